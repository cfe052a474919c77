"""Measures the tiles that may suit a card."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from ....values.activation_spec import gated
from ...problems.gemm import Activate, ActivateBackward, ActivationGrads, GroupedGemm, Layout, first
from ...pytorch import loop
from .. import tiles
from ..shape import ProgramTile
from . import launch

_DOES_NOT_RUN = CompilationError, OutOfResources, PTXASError
_LEAST_SPEEDUP = 1.05  # two runs of one kernel differ by up to 3 %
_SWIGLU = gated("silu", None, 1.0, 0.0, "concat")


class ExpertSizes(NamedTuple):
    """The sizes of experts to tune for."""

    groups: int
    hidden: int
    features: int


class TunedTile(NamedTuple):
    """The fastest tile of a kind of product, and seconds of a call: of this tile, and of the table's if it is right."""

    kind: str
    few: bool
    tile: ProgramTile
    seconds: float
    of_table: float | None
    tried: int

    @property
    def is_clearly_faster(self) -> bool:
        """Whether the tile beats the table's by more than what two runs differ."""
        return self.of_table is None or self.of_table >= _LEAST_SPEEDUP * self.seconds


def measure(
    sizes: ExpertSizes, device: torch.device, seconds: float, time_of: Callable[[Callable[[], None]], float]
) -> Iterator[TunedTile]:
    """The fastest tiles on this device for products in bfloat16, among tiles that give PyTorch's results.

    Args:
        seconds: how long to try; the table's tile and one more are tried in any case.
        time_of: seconds of a call of a function.

    Raises:
        RuntimeError: no tile gives the results of PyTorch.
    """
    kinds = [(few, kind, p) for few in (False, True) for kind, p in problems(sizes, device, few).items()]
    for few, kind, problem in kinds:
        deadline = time.monotonic() + seconds / len(kinds)
        times, right = dict[ProgramTile, float](), _Expected(problem)
        of_table, *others = tiles.candidates(launch.architecture_of(device), kind, few)
        for tile in (of_table, *others):
            right.wipe()
            try:
                launch.run(problem, tile)
            except _DOES_NOT_RUN:
                continue
            if right.are_there():
                times[tile] = time_of(partial(launch.run, problem, tile))
            if len(times) > 1 and time.monotonic() > deadline:
                break
        if not times:
            raise RuntimeError(f"no tile of {kind} gives the results of PyTorch on this card; please report it")
        best = min(times, key=times.__getitem__)
        yield TunedTile(kind, few, best, times[best], times.get(of_table), len(times))


class _Expected:
    """The results of a problem by PyTorch, and where those of a tile go."""

    def __init__(self, problem: GroupedGemm) -> None:
        epilogue, results = problem.epilogue, [first(problem.out)]
        if isinstance(epilogue, ActivateBackward):
            results = [each for each in epilogue.grads[:3] if isinstance(each, torch.Tensor)]
        elif epilogue is not None and epilogue.preact is not None:
            results.append(epilogue.preact)
        self._results = results
        loop.run(problem)
        self._expected = [each.float() for each in results]

    def wipe(self) -> None:
        """Wipes the results, so that none of PyTorch or of another tile counts as a tile's own."""
        for result in self._results:
            result.fill_(torch.nan)

    def are_there(self) -> bool:
        """Whether the results are the expected ones up to rounding."""
        right = True
        for result, expected in zip(self._results, self._expected, strict=True):
            right &= bool((result.float() - expected).abs().max() <= _TOLERANCE * expected.abs().max())
        return right


_TOLERANCE = 2.0**-6  # of the largest number, in bfloat16


def problems(sizes: ExpertSizes, device: torch.device, few: bool) -> dict[str, GroupedGemm]:
    """The products of gated experts, by kind; none writes what another reads.

    Args:
        few: with few rows a group, or with many: see :data:`tiles.MEASURED_ROWS`.
    """
    groups, hidden, features = sizes
    rows = groups * tiles.MEASURED_ROWS[few]
    split_sizes = torch.full((groups,), rows // groups, device=device)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    x, a, h = random(rows, hidden), random(rows, features), random(rows, 2 * features)
    up, down = random(groups, 2 * features, hidden), random(groups, hidden, features)
    scales = torch.rand(rows, device=device)
    grads = ActivationGrads(torch.empty_like(h), torch.empty_like(scales), torch.empty_like(a))
    forward, backward = Activate(_SWIGLU, scales, torch.empty_like(h)), ActivateBackward(_SWIGLU, scales, h, grads)
    return {
        "activate": GroupedGemm(Layout.NT, x, up, split_sizes, torch.empty_like(a), fresh=True, epilogue=forward),
        "nt": GroupedGemm(Layout.NT, a, down, split_sizes, torch.empty_like(x), fresh=True),
        "activate_backward": GroupedGemm(Layout.NN, x, down, split_sizes, grads.preact, fresh=True, epilogue=backward),
        "nn": GroupedGemm(Layout.NN, h, up, split_sizes, torch.empty_like(x), fresh=True),
        "tn": GroupedGemm(Layout.TN, h, x, split_sizes, torch.empty_like(up), fresh=True),
    }
