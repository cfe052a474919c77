"""Processes that run cases of expert parallelism together, each as one rank, and say of every case what came of it.

``start`` runs this file, which on a CPU imports the cases once and forks into the ranks: imports take longer than most
cases. A case is a function of a :class:`World`; all cases of a run share the processes.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from itertools import groupby
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from fusible import Combine, Dispatch, GroupedLinear, Scale, Sequential, SwiGLU, ep

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 60.0  # of what must not end by it, on a busy machine
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""For the environment: multicast over NVLink is used by nobody here, and does not work on every host."""
H, F = 8, 64
"""F is a multiple of the longest vector: torch computes the last elements of a tensor that fill none by other code,
whose exponentials have other bits, so that those of a row would depend on which rows are behind it."""


class World(NamedTuple):
    """One rank among others."""

    rank: int
    size: int
    transport: str = "collective"

    def group(self, **settings: Any) -> ep.Group:
        """A group of all ranks, with settings that most cases share."""
        common = {"num_experts": 4 * self.size, "max_tokens": 13, "top_k": 3, "hidden": H, "dtype": torch.float32}
        common |= {"timeout": TIMEOUT, "capacity": "worst", "transport": self.transport}
        if self.transport == "symmetric" and settings.get("capacity") == "exact":
            settings = {**settings, "capacity": "worst"}  # as exact, but for the tail
        return ep.Group(**{**common, **settings})


class Batch(NamedTuple):
    """The tokens of all ranks, ``counts`` of each rank."""

    counts: tuple[int, ...]
    x: Tensor
    ids: Tensor
    weights: Tensor
    dy: Tensor

    @classmethod
    def random(
        cls, counts: Sequence[int], experts: int, top_k: int, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> Batch:
        """Ids are of any expert, a few of none."""
        draw, tokens = torch.Generator().manual_seed(seed), sum(counts)
        with torch.device("cpu"):  # the same numbers wherever they go
            x, dy = (torch.randn(tokens, H, generator=draw).to(dtype) for _ in range(2))
            ids = torch.randint(experts + 1, (tokens, top_k), generator=draw)
            weights = torch.rand(tokens, top_k, generator=draw)
        return cls(tuple(counts), *(each.to(torch.get_default_device()) for each in (x, ids, weights, dy)))

    def of(self, rank: int) -> Batch:
        """The part of one rank."""
        own = slice(sum(self.counts[:rank]), sum(self.counts[: rank + 1]))
        return Batch((self.counts[rank],), *(t[own].clone() for t in self[1:]))


class Results(NamedTuple):
    """The results of a training step."""

    y: Tensor
    dx: Tensor
    dweights: Tensor
    parameters: tuple[Tensor, ...]

    def of(self, counts: Sequence[int], group: ep.Group) -> Results:
        """The part of one rank."""
        own = slice(sum(counts[: group.rank]), sum(counts[: group.rank + 1]))
        parts = tuple(grad[group.local_experts] for grad in self.parameters)
        return Results(self.y[own], self.dx[own], self.dweights[own], parts)


def experts(first: Any, number: int, last: Any, dtype: torch.dtype = torch.float32, hidden: int = H) -> Sequential:
    """A layer between two ops; of the same seed in all processes."""
    torch.manual_seed(3)
    up, down = GroupedLinear(number, hidden, 2 * F, dtype=dtype), GroupedLinear(number, F, hidden, dtype=dtype)
    return Sequential(first, up, SwiGLU(), Scale(), down, last)


def whole(group: ep.Group) -> Sequential:
    """The layer as one process has it."""
    s = group.settings
    return experts(Dispatch(s.num_experts), s.num_experts, Combine(), s.dtype, s.hidden)


def part(group: ep.Group, lane: int = 0) -> Sequential:
    """The same layer, with the experts of one rank."""
    s, ends = group.settings, (ep.EPDispatch(group, lane), ep.EPCombine(group, lane))
    layer = experts(ends[0], group.num_local_experts, ends[1], s.dtype, s.hidden)
    with torch.no_grad():
        for mine, all_of_them in zip(layer.parameters(), whole(group).parameters(), strict=True):
            mine.copy_(all_of_them[group.local_experts])
    return layer


def trained(layer: Any, batch: Batch) -> Results:
    """One step, and its gradients."""
    x, weights = batch.x.clone().requires_grad_(), batch.weights.clone().requires_grad_()
    y = layer(x, top_k_index=batch.ids, top_k_weights=weights)
    y.backward(batch.dy)
    parameters = tuple(p.grad for p in layer.parameters()) if isinstance(layer, torch.nn.Module) else ()
    return Results(y.detach(), x.grad, weights.grad, parameters)


def same(came: Results, expected: Results) -> None:
    """Bit for bit."""
    for name, a, b in zip(Results._fields[:3], came, expected, strict=False):
        assert torch.equal(a, b), f"{name} differs by {(a - b).abs().max()}"
    for i, (a, b) in enumerate(zip(came.parameters, expected.parameters, strict=True)):
        assert torch.equal(a, b), f"the gradient of parameter {i} differs by {(a - b).abs().max()}"


def unchecked(group: ep.Group) -> Any:
    """The host does not look at what the device says; else a call may raise what came of its own first half."""
    return patch.object(group, "check", lambda synchronize=False: None)


def check_step(group: ep.Group, batch: Batch, layer: Any = None) -> None:
    """A step of all ranks gives each the bits of one process that has the tokens of all."""
    expected = trained(whole(group), batch).of(batch.counts, group)
    came = trained(part(group) if layer is None else layer, batch.of(group.rank))
    same(came, expected if came.parameters else expected._replace(parameters=()))


# --------------------------------------------------------------------------------------------------- processes


_LEFT_OUT = ["left out"]
_KILLED = "\nkilled: it did not end"


def said_by(request: Any, folder: Path, module: str, cases: Sequence[str], few: Sequence[str]) -> dict[str, list[str]]:
    """The messages of ``request.param`` ranks of the transport ``symmetric`` on the cases of a module.

    Args:
        few: the cases that run where the ranks share fewer CPUs: there each waits for all others, and a turn of the
            machine passes in between.
    """
    ranks = request.param
    left_out = {*cases} - {*few} if ranks > (os.cpu_count() or 1) else set()
    only = [case for case in selected(request) if case not in left_out]
    said = start(module, ranks, folder, 1500, "symmetric", only=only) if only else {}
    return {**dict.fromkeys(left_out, _LEFT_OUT), **said}


def assert_passed(case: str, said: dict[str, list[str]]) -> None:
    """Whether every rank came to a case and found nothing wrong, from what :func:`start` returns."""
    ranks = said.get(case, [])
    if ranks == _LEFT_OUT:
        pytest.skip("four ranks wait for one another")

    assert ranks, said.get("unfinished", ["no rank came to it"])
    assert not any(ranks), "\n".join(ranks)


def environment(device: str) -> dict[str, str]:
    """The environment of processes that run the tests' modules on a kind of device."""
    paths = [str(ROOT / "src"), str(ROOT / "tests"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    theirs = {**os.environ, **NO_MULTICAST, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    return theirs | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def start(
    module: str,
    ranks: int,
    folder: Path,
    wait: float = 300,
    transport: str = "collective",
    device: str = "cpu",
    only: Sequence[str] = (),
    launcher: Callable[[int], list[str]] = lambda rank: [],
) -> dict[str, list[str]]:
    """The message of every rank on every case of a module: "" if it passed. An empty list: no message arrived.

    Args:
        wait: seconds, after which the ranks are killed.
        only: the names of cases; none: all.
        launcher: the words in front of the command of a rank.
    """
    command = [sys.executable, str(Path(__file__)), transport, device, module, str(ranks), str(folder)]
    end = time.monotonic() + wait
    running: dict[tuple[int, ...], subprocess.Popen[str]] = {}
    said: dict[int, str] = {}
    try:
        # on GPUs each rank has a process of its own: no child can use a driver that was begun before it
        for (words, _), group in groupby(range(ranks), lambda rank: (launcher(rank), rank * (device == "cuda"))):
            together = (*group,)
            line = [*words, *command, ",".join(map(str, together)), *only]
            running[together] = _started(line, device, folder / f"{together[0]}.out")
        for together, process in running.items():
            said |= dict.fromkeys(together, _ended(process, end, folder / f"{together[0]}.out"))
    finally:
        for process in running.values():
            _kill(process)
    found: dict[str, list[str]] = {}
    for rank, text in said.items():
        path = folder / f"{rank}.json"
        results = json.loads(path.read_text()) if path.exists() else {}
        if not results or text.endswith(_KILLED):
            results["unfinished"] = text
        for name, result in results.items():
            found.setdefault(name, []).append(f"rank {rank}: {result}" if result else "")
    return found


def _started(command: list[str], device: str, out: Path) -> subprocess.Popen[str]:
    """A process that leads a group of its own, with which its children are killed. It writes to a file: a pipe would
    last as long as the longest of them.
    """
    theirs = environment(device)
    with out.open("w") as file:
        return subprocess.Popen(
            command, env=theirs, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )


def _ended(process: subprocess.Popen[str], end: float, out: Path) -> str:
    """The output of a process that has ended, or is killed at the time ``end`` after it has written its stacks."""
    try:
        process.wait(max(0.0, end - time.monotonic()))
        return out.read_text()
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            process.wait(2)
        _kill(process)
        return out.read_text() + _KILLED


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a process that runs, and its children; waits no longer than a killed process takes."""
    if process.poll() is not None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # it hangs in a driver
        process.wait(5)


def selected(request: Any) -> list[str]:
    """The cases of the tests that will use a fixture in this session: no others need run.

    Args:
        request: that of the fixture. Its parameter, if it has one, is that of the tests as well.
    """
    absent, name = object(), request.fixturename
    wanted = getattr(request, "param", absent)
    items = (item for item in request.session.items if item.path == request.path and name in item.fixturenames)
    parameters = (item.callspec.params for item in items if hasattr(item, "callspec"))
    return list(dict.fromkeys(p["case"] for p in parameters if p.get(name, absent) == wanted))


class Run(NamedTuple):
    """The settings that all ranks of a run share."""

    transport: str
    device: str
    module: str
    ranks: int
    folder: Path
    only: Sequence[str]


def run_cases(module: str, world: World, report: Path, only: Sequence[str] = ()) -> None:
    """Runs the cases of a module in the order of the file; writes down after each what came of it."""
    cases = importlib.import_module(module).CASES
    results: dict[str, str] = {}
    for case in cases:
        if only and case.__name__ not in only:
            continue
        torch.manual_seed(0)
        try:
            case(world)
            results[case.__name__] = ""
        except Exception:
            results[case.__name__] = traceback.format_exc()
        report.write_text(json.dumps(results))


@contextmanager
def memory_for(transport: str, device: str) -> Iterator[None]:
    """The requirements of the transport on a CPU: for the symmetric one, our kernels, and memory that
    processes share.
    """
    with ExitStack() as stack:
        if transport == "symmetric" and device == "cpu":
            from ep_shared_memory import on_this_machine

            stack.enter_context(on_this_machine())
        yield


def rank_of(run: Run, rank: int) -> None:
    """One rank, to its end. A signal makes it write the stacks of its threads."""
    faulthandler.register(signal.SIGUSR1)
    gpu = torch.device("cuda", rank) if run.device == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
        torch.set_default_device(gpu)
    backend, store = "nccl" if gpu else "gloo", dist.FileStore(str(run.folder / "store"), run.ranks)
    of_ranks, wait = {"rank": rank, "world_size": run.ranks}, timedelta(seconds=2 * TIMEOUT)
    dist.init_process_group(backend, store=store, timeout=wait, device_id=gpu, **of_ranks)
    with memory_for(run.transport, run.device):
        world = World(rank, run.ranks, run.transport)
        run_cases(run.module, world, run.folder / f"{rank}.json", run.only)
    sys.stdout.flush()
    os._exit(0)  # threads of gloo that wait for a peer that has gone would keep the process


def main(transport: str, device: str, module: str, ranks: str, folder: str, numbers: str, *only: str) -> None:
    """One rank, or several, each in a child of this process, which passes a signal on to all of them."""
    torch.set_num_threads(1)
    run, mine = Run(transport, device, module, int(ranks), Path(folder), only), [*map(int, numbers.split(","))]
    if len(mine) == 1:
        rank_of(run, *mine)
    for name in (module, "torch.fx.experimental.symbolic_shapes"):  # which torch imports later
        importlib.import_module(name)
    gc.freeze()
    children = [multiprocessing.get_context("fork").Process(target=rank_of, args=(run, rank)) for rank in mine]
    for child in children:
        child.start()
    signal.signal(signal.SIGUSR1, lambda *_: pass_on(children))
    for child in children:
        child.join()


def pass_on(children: Sequence[BaseProcess]) -> None:
    """Sends the signal to the children that run."""
    for child in children:
        if child.is_alive():
            os.kill(child.pid, signal.SIGUSR1)


if __name__ == "__main__":
    main(*sys.argv[1:])
