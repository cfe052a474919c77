"""Versions, the device, the fusions, and the backends with the reason if one cannot run here."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import GroupedLinear, Sequential, __version__, config, installation
from ..benchmarks.arguments import command
from ..fuser import RefusedError, registry
from ..fuser.contract import torch_private
from ..ops.values.switches import BACKENDS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TESTED_TORCH = ("2.11", "2.13", "2.14")  # docs/support.md tells where


def main(argv: Sequence[str]) -> None:
    """Prints the information."""
    args = command("info", __doc__).parse_args(argv)
    facts = about()
    print(json.dumps(facts, indent=1) if args.json else "\n".join(lines(facts)))


def about() -> dict[str, object]:
    """Versions, device, fusions and backends as a dict."""
    cuda = torch.cuda.is_available()
    return {
        "fusible": __version__,
        "folder": str(installation.FOLDER),
        "kernels": installation.kernels(),
        "torch": torch.__version__,
        "torch_is_tested": ".".join(torch.__version__.split(".")[:2]) in TESTED_TORCH,
        "torch_lacks": [*torch_private.missing],
        "cpu_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if cuda else None,
        "fusions": [fusion.name for fusion in registry],
        "backends": {name: backend(name, "cuda" if cuda else "cpu") for name in BACKENDS[1:]},
    }


def lines(facts: dict[str, Any]) -> Iterator[str]:
    """The information as lines of text."""
    yield f"fusible   {facts['fusible']} from {facts['folder']}"
    yield f"kernels   {facts['kernels']}"
    untested = "" if facts["torch_is_tested"] else f"; not tested with it, but with {', '.join(TESTED_TORCH)}"
    yield f"torch     {facts['torch']}, {facts['cpu_threads']} CPU threads{untested}"
    if facts["torch_lacks"]:
        lacks = ", ".join(facts["torch_lacks"])
        yield f"torch     lacks {lacks}: fuser/contract/torch_private.py says what happens instead"
    yield f"python    {facts['python']}, {facts['system']}"
    yield f"device    {facts['device'] or 'no CUDA device'}"
    yield f"fusions   {', '.join(facts['fusions'])}"
    for name, state in facts["backends"].items():
        taken = ", ".join(state["dtypes"])
        yield f"backend   {name} takes {taken}" if taken else f"backend   {state['refusal']}"


def backend(name: str, device: str) -> dict[str, object]:
    """The dtypes that a grouped-GEMM backend supports on a device, and why it does not support bfloat16."""
    refusals = {dtype: _refusal(name, device, dtype) for dtype in DTYPES}
    taken = [str(dtype).removeprefix("torch.") for dtype, refusal in refusals.items() if refusal is None]
    return {"dtypes": taken, "refusal": refusals[torch.bfloat16]}


def _refusal(name: str, device: str, dtype: torch.dtype) -> str | None:
    """The reason why a backend cannot run a small linear, or None. Runs nothing."""
    linear = GroupedLinear(2, 16, 16, bias=False, device=device, dtype=dtype)
    x, splits = torch.zeros(4, 16, device=device, dtype=dtype), torch.zeros(2, dtype=torch.int64, device=device)
    try:
        with config(backend=name):
            Sequential(linear).explain(x, split_sizes=splits)
    except RefusedError as error:
        return str(error).partition(": ")[2]
    return None
