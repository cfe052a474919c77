"""Calls on Triton are replayed by the extension: the same bits as call by call, with other tensors and sizes.

The extension is the emulated one, and the kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton_emulated
import triton_interpreter
from emulation import build, harness
from torch import Tensor

from fusible import Combine, Dispatch, GroupedLinear, Scale, Sequential, SwiGLU, config
from fusible.fuser import replay
from fusible.fuser.replay.capture import Capture
from fusible.ops.kernels.triton.shape import ProgramTile

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, which computes rows of no group, too
]

GROUPS, K, F, T = 3, 16, 16, 16
TILE = ProgramTile(16, 32, 16, 4, 2, strip=2)


@pytest.fixture(scope="module")
def interpreter(emulation: harness.Emulation) -> Iterator[Any]:
    with triton_interpreter.interpreted() as launch, triton_emulated.compiled(), config(backend="triton"):
        yield launch


@pytest.fixture
def tiles(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ProgramTile]]:
    """The tile of all products, which a test may replace."""
    tiles = [TILE]
    monkeypatch.setattr(interpreter, "tile_of", lambda problem: tiles[0])
    with replay.simulated("cpu"):
        yield tiles


FORMS: dict[str, tuple[ProgramTile, dict[str, Any]]] = {
    "stacked": (TILE, {}),
    "bulk copies, with a bias": (TILE._replace(tma=True), {"bias": True}),
    "apart, one parameter an expert": (TILE._replace(apart=True), {"single_grouped_weight": False}),
    "main_grad": (TILE, {"accumulate_into_main_grad": True}),
}


class Experts:
    """A fused MLP and what it is called with."""

    def __init__(self, **how: Any) -> None:
        torch.manual_seed(0)
        how = {"bias": False, "dtype": torch.float16, **how}
        self.model = Sequential(
            GroupedLinear(GROUPS, K, 2 * F, **how), SwiGLU(), Scale(), GroupedLinear(GROUPS, F, K, **how)
        )

    def step(self, seed: int, sizes: list[int], rows: int = T) -> list[Tensor]:
        """The output and all gradients, of the rows of groups."""
        torch.manual_seed(seed)
        x, dy = (torch.randn(rows, K, dtype=torch.float16) for _ in range(2))
        leaves = [x.requires_grad_(), torch.rand(rows).requires_grad_(), *self.model.parameters()]
        for leaf in leaves:
            leaf.grad = None
        y = self.model(x, split_sizes=torch.tensor(sizes), scales=leaves[1])
        y.backward(dy)
        gradients = [leaf.grad for leaf in leaves]
        return [y.detach()[: sum(sizes)], *[g.clone() for g in gradients if g is not None]]


def reasons() -> object:
    """Why calls were not repeated."""
    return replay.stats().unsupported


def give_main_grads(experts: Experts) -> None:
    for parameter in experts.model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]


def main_grads(experts: Experts) -> list[Tensor]:
    return [parameter.main_grad for parameter in experts.model.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("form", FORMS)
def test_a_repeated_call_has_the_bits_of_one(form: str, tiles: list[ProgramTile]) -> None:
    tiles[0], how = FORMS[form]
    experts, others = Experts(**how), Experts(**how)
    others.model.load_state_dict(experts.model.state_dict())
    give_main_grads(experts)
    for _ in range(2):
        experts.step(0, [5, 0, 9])
    before = replay.stats().replayed
    give_main_grads(experts)
    give_main_grads(others)
    again, anew = experts.step(1, [2, 8, 6]), others.step(1, [2, 8, 6])

    repeated = replay.stats().replayed - before
    assert repeated == 2, reasons()
    for a, b in zip([*again, *main_grads(experts)], [*anew, *main_grads(others)], strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("tiles")
def test_a_kernel_with_other_parameters_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = import_module("fusible.ops.kernels.triton.device.foreign")
    monkeypatch.setattr(foreign, "parameter_sizes", lambda handle: [4, 4])
    experts, before = Experts(), replay.stats().replayed
    first, *others = [experts.step(0, [5, 0, 9]) for _ in range(3)]

    repeated = replay.stats().replayed - before
    assert repeated == 0
    assert "parameters of [4, 4] bytes" in str(reasons())
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.usefixtures("tiles")
def test_routed_experts_are_repeated() -> None:
    up, down = (GroupedLinear(GROUPS, *each, bias=False, dtype=torch.float16) for each in ((K, 2 * F), (F, K)))
    model, outputs = Sequential(Dispatch(GROUPS), up, SwiGLU(), Scale(), down, Combine()), list[Tensor]()
    ids, weights = torch.rand(T, GROUPS).argsort(-1)[:, :2].contiguous(), torch.rand(T, 2)
    x, before = torch.randn(T, K, dtype=torch.float16).requires_grad_(), replay.stats().replayed
    for _ in range(3):
        y = model(x, top_k_index=ids, top_k_weights=weights)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        outputs.append(torch.stack((y.detach(), gradient)))

    repeated = replay.stats().replayed - before
    assert repeated == 2, reasons()
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_launches_that_a_hook_observes_are_not_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, before = Experts(), replay.stats()
    monkeypatch.setattr(getattr(import_module("triton").knobs.runtime, name), "calls", [print])
    for _ in range(3):
        experts.step(0, [5, 0, 9])

    assert replay.stats().replayed == before.replayed
    reasons = replay.stats().unsupported - before.unsupported
    assert any("a hook observes the launches of Triton" in reason for reason in reasons)


def test_a_tuple_of_another_form_is_left_to_triton() -> None:
    foreign = pytest.importorskip("fusible.ops.kernels.triton.device.foreign")
    source, metadata = SimpleNamespace(signature={"x": ("i32", "i32")}), SimpleNamespace(num_warps=4, shared=0)
    compiled = SimpleNamespace(src=source, metadata=metadata, _init_handles=lambda: None)
    kernel = SimpleNamespace(run=lambda *arguments, **how: compiled)
    with pytest.raises(foreign.UnknownLaunchError, match="argument 2 is shorter"):
        foreign.launch(kernel, (1,), ((1,),), {})


@pytest.mark.usefixtures("emulation")
def test_a_launch_that_the_driver_refuses_is_described() -> None:
    how = {"device": 0, "stream": 0, "function": 1, "blocks_x": 0, "blocks_y": 2, "threads": 128, "shared_bytes": 64}
    lists = {name: [] for name in ("parameters", "numbers", "maps", "addresses")}
    with pytest.raises(RuntimeError, match="driver error 1: grid 0 x 2, 128 threads, 64 bytes of shared memory, 0 par"):
        Capture.find_library().launch_foreign(**how, **lists)


@pytest.mark.usefixtures("tiles")
def test_wrong_sizes_are_reported_by_repeated_calls() -> None:
    experts = Experts()
    for _ in range(3):
        experts.step(0, [5, 0, 9])
    before = replay.stats().replayed
    with pytest.raises(RuntimeError, match="the size of group 2 is 19, more than the rows"):
        experts.step(0, [5, 0, 19])

    repeated = replay.stats().replayed - before
    assert repeated > 0
