"""Counts the Python functions of this package that a call runs, their files, and the hops between files.

``python benchmarks/call_counts.py`` counts in the tree that ``PYTHONPATH`` names, which may be an older one; without
the stub of the extension there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import fusible

GROUPS, FEATURES, HIDDEN = 2, 8, 8
ROOT = Path(fusible.fuser.__file__).resolve().parents[1]  # of the tree, whichever folder has the import package
PACKAGES = ("fuser", "fusible", "integrations", "ops", "src")


class Counts(NamedTuple):
    """The counts of one call. A hop is a call whose function is in another file than the function called before."""

    functions: int
    files: int
    hops: int

    @classmethod
    def of(cls, function: Callable[[], Any]) -> Counts:
        files = files_of_calls(function)
        return cls(len(files), len(set(files)), sum(a != b for a, b in pairwise(files)))


def files_of_calls(function: Callable[[], Any]) -> list[str]:
    """The file of each Python function of this package that is called, in order."""
    names: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    ours = {name: is_ours(name) for name in set(names)}
    return [name for name in names if ours[name]]


def is_ours(name: str) -> bool:
    path = Path(name).resolve()
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES


class SampleExperts:
    """A model that is fused as a whole, with its arguments."""

    def __init__(self, dtype: torch.dtype) -> None:
        fc1, fc2 = (
            fusible.GroupedLinear(GROUPS, k, n, bias=False, dtype=dtype)
            for k, n in ((FEATURES, 2 * HIDDEN), (HIDDEN, FEATURES))
        )
        self.model = fusible.Sequential(fc1, fusible.SwiGLU(), fusible.Scale(), fc2)
        rows = 2 * GROUPS
        self.x = torch.randn(rows, FEATURES, dtype=dtype, requires_grad=True)
        self.dy = torch.randn(rows, FEATURES, dtype=dtype)
        self.keywords = {"split_sizes": torch.full((GROUPS,), 2), "scales": torch.rand(rows, requires_grad=True)}

    def step(self) -> tuple[Counts, Counts]:
        """The counts of a forward and of its backward."""
        for tensor in (self.x, self.keywords["scales"], *self.model.parameters()):
            tensor.grad = None
        outputs: list[torch.Tensor] = []
        forward = Counts.of(lambda: outputs.append(self.model(self.x, **self.keywords)))
        return forward, Counts.of(lambda: torch.autograd.backward(outputs[0], self.dy))


def on_cpu() -> dict[str, Counts]:
    """Counts on a CPU: the first call compiles the plan, the second fills the other caches, the third is hot."""
    experts = SampleExperts(torch.float32)
    steps = [experts.step() for _ in range(3)]
    return {
        "CPU, cold forward": steps[0][0],
        "CPU, hot forward": steps[2][0],
        "CPU, hot backward": steps[2][1],
    }


def with_stub() -> dict[str, Counts]:
    """Counts on the path of a GPU: the first calls run step by step and are captured, the third one is replayed."""
    from .stub_extension import launching_nothing

    with launching_nothing():
        experts = SampleExperts(torch.bfloat16)
        steps = [experts.step() for _ in range(3)]
    counts: dict[str, Counts] = {}
    for name, (forward, backward) in zip(("1st", "2nd", "3rd, replayed,"), steps, strict=True):
        counts |= {f"GPU path, {name} forward": forward, f"GPU path, {name} backward": backward}
    return counts


if __name__ == "__main__":
    print(json.dumps(on_cpu()))
