"""A replay of large tensors holds no more memory than the launches that it was captured from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from emulation import build, harness
from models import mlp
from test_replay import Runs, runs, same
from torch import Tensor

from fusible import Combine, Dispatch, GroupedLinear, Scale, Sequential, SwiGLU
from fusible.fuser.replay import capture

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")
__all__ = ["runs"]

E, K, F, ROWS, SLOTS = 3, 64, 16, 400, 2
SMALL = 8192  # bytes of sizes, scales and workspaces, which a replay may have at other times
BF16 = torch.bfloat16


class Experts:
    """The experts under test, with rows that are larger than the weights."""

    def __init__(self, emulation: harness.Emulation, frozen: int | None = None) -> None:
        torch.manual_seed(0)
        self.model, self.emulation = self.experts(), emulation
        if frozen is not None:
            self.linears()[frozen].requires_grad_(False)
        self.give(ROWS)

    def experts(self) -> Sequential:
        return mlp(E, K, F, bias=False, dtype=BF16)

    def linears(self) -> list[GroupedLinear]:
        return [op for op in self.model if isinstance(op, GroupedLinear)]

    def give(self, rows: int) -> None:
        """Inputs; most rows are behind the last group, which makes products short and keeps them as large."""
        self.x, self.dy = torch.randn(rows, K, dtype=BF16).requires_grad_(), torch.randn(rows, K, dtype=BF16)
        self.scales = torch.rand(rows).requires_grad_()
        self.keywords = {"split_sizes": torch.tensor([5, 0, 9]), "scales": self.scales}

    def leaves(self) -> list[Tensor]:
        return [self.x, self.scales, *[p for p in self.model.parameters() if p.requires_grad]]

    def peaks(self) -> list[int]:
        """The most bytes that a forward and its backward hold beside what lives before; keeps the gradients."""
        self.grads: tuple[Tensor, ...] = ()
        with self.peak() as forward:
            y = self.model(self.x, **self.keywords)
        with self.peak() as backward:
            self.grads = torch.autograd.grad(y, self.leaves(), self.dy)
        return forward + backward

    @contextmanager
    def peak(self) -> Iterator[list[int]]:
        """A list that has it in the end."""
        found: list[int] = []
        self.emulation.peak = 0
        self.emulation._show_memory()
        before = self.emulation.peak
        yield found
        found.append(self.emulation.peak - before)


class Layer(Experts):
    def experts(self) -> Sequential:
        fc1, fc2 = (GroupedLinear(E, *shape, bias=False, dtype=BF16) for shape in ((K, 2 * F), (F, K)))
        return Sequential(Dispatch(E), fc1, SwiGLU(), fc2, Scale(), Combine())

    def give(self, rows: int) -> None:
        super().give(rows)
        self.scales = torch.rand(rows, SLOTS).requires_grad_()
        self.keywords = {"top_k_index": torch.randint(E, (rows, SLOTS)), "top_k_weights": self.scales}


Kind = Callable[..., Experts]


def no_higher(peaks: list[int], others: list[int]) -> bool:
    return all(peak <= other + SMALL for peak, other in zip(peaks, others, strict=True))


@pytest.mark.parametrize("frozen", [None, 0, 1])
@pytest.mark.parametrize("kind", [Experts, Layer])
def test_a_long_replay_holds_no_more_than_its_launches(
    kind: Kind, frozen: int | None, runs: Runs, emulation: harness.Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "LARGE", SMALL)
    case = kind(emulation, frozen)
    launched, expected, replayed = case.peaks(), [*case.grads], list[int]()
    for _ in range(2):
        case.peaks()

    assert runs.of(lambda: replayed.extend(case.peaks())) == (0, 2)
    assert no_higher(replayed, launched), (replayed, launched)
    assert same([*case.grads], expected)


@pytest.mark.parametrize("kind", [Experts, Layer])
def test_a_short_replay_has_its_memory_at_once(
    kind: Kind, runs: Runs, emulation: harness.Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what the test above measures does depend on letting go."""
    monkeypatch.setattr(capture, "LARGE", 2**40)
    case = kind(emulation)
    launched = case.peaks()
    for _ in range(2):
        case.peaks()

    assert not no_higher(case.peaks()[1:], launched[1:])


def test_rows_that_were_few_in_both_captures_may_be_many(
    runs: Runs, emulation: harness.Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "LARGE", SMALL)
    case, replayed = Experts(emulation), list[int]()
    for rows in (16, 16, 20):
        case.give(rows)
        case.peaks()
    case.give(ROWS)

    assert runs.of(lambda: replayed.extend(case.peaks())) == (0, 2)
    found, case.model = [*case.grads], deepcopy(case.model)
    launched = case.peaks()
    assert no_higher(replayed, launched), (replayed, launched)
    assert same(found, [*case.grads])


def test_a_graph_that_is_kept_can_be_replayed_twice(
    runs: Runs, emulation: harness.Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "LARGE", 1)
    case = Experts(emulation)
    for _ in range(3):
        case.peaks()
    y = case.model(case.x, **case.keywords)
    first = torch.autograd.grad(y, case.leaves(), case.dy, retain_graph=True)
    second: list[Tensor] = []

    assert runs.of(lambda: second.extend(torch.autograd.grad(y, case.leaves(), case.dy))) == (0, 1)
    assert same(second, [*first])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, case.leaves(), case.dy)
