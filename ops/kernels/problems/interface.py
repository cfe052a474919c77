"""The registration of a backend: for each kind of problem that it solves, its kernels and their capabilities."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from .gemm import GroupedGemm

P = TypeVar("P")


class Measured(Protocol):
    """A problem that a trace may be told of."""

    @property
    def bytes(self) -> int:
        """Every operand read once, the result written once."""


@dataclass(frozen=True, slots=True, eq=False)
class Implementation(Generic[P]):
    """The kernels of one backend for one kind of problem.

    Attributes:
        backend: the name by which ``config(backend=...)`` asks for them; None for those that run under any name: a
            fallback on PyTorch, which takes every problem.
        name: what ``explain()`` calls them, which may depend on the problem.
        run: solves a problem that is not refused.
        refusal: why a problem cannot be solved here, in words that follow "it"; None: it can. Kernels without a
            refusal take every problem.
        cache_key: what alone decides whether a problem is refused: equal keys are taken alike. None where it takes more
            to say; kernels without this are asked at every call.
        device: the type of the devices that they run on; None for any.
        interpreted: whether they run on other devices, too, where they are asked for by name.
        by_name: whether they run only where they are asked for by name.
        configuration: what is chosen for a problem, in words.
        warn: called with a problem that runs here because others refused it, under ``config(backend="auto")``.
    """

    backend: str | None
    name: str | Callable[[P], str]
    run: Callable[[P], None]
    refusal: Callable[[P], str | None] | None = None
    cache_key: Callable[[P], Hashable | None] | None = None
    device: str | None = None
    interpreted: bool = False
    by_name: bool = False
    configuration: Callable[[P], str] | None = None
    warn: Callable[[P], None] | None = None


def solving(kernels: object) -> methodcaller:
    """A function that solves a problem with the functions of a module; the problem knows which it needs."""
    return methodcaller("solve", kernels)


@dataclass(frozen=True, slots=True, eq=False)
class GemmImplementation(Implementation[GroupedGemm]):
    """An implementation of the grouped GEMM, and what it can beside the product.

    Attributes:
        has_epilogues: whether an activation, or its backward, may be part of a product.
        epilogue_refusal: why it cannot be part of a product that is not refused, so that it follows as a kernel of its
            own; None: it can. Kernels without this have every epilogue.
        slower_epilogue: why an epilogue that is not refused is faster as a kernel of its own; None: it is not.
        second_refusal: why the product of the second pair of operands is a kernel of its own; None: it is not. Kernels
            without this take one pair.
        stores_to_slots: whether the rows of a product go to its slots, so that ``out`` stays as it is.
        zeroes_tail: whether rows of a fresh result past the last group become zero.
        finishes_backward: whether :class:`ActivateBackward` also gives the gradient of the bias, and zeroes the tail of
            that of the scales.
    """

    has_epilogues: bool = False
    epilogue_refusal: Callable[[GroupedGemm], str | None] | None = None
    slower_epilogue: Callable[[GroupedGemm], str | None] | None = None
    second_refusal: Callable[[GroupedGemm], str | None] | None = None
    stores_to_slots: Callable[[GroupedGemm], bool] | None = None
    zeroes_tail: bool = False
    finishes_backward: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Kind(Generic[P]):
    """Problems that the same kernels solve.

    Attributes:
        subject: what errors call a problem.
        types: of the problems.
        reads: a tensor that a problem reads, whose device decides who may solve it.
        is_empty: whether there is nothing to solve.
        flops: the floating-point operations of a problem.
        configuration: a problem in words, if its kernels have none.
        optional: whether nothing is lost where no backend takes it, so that ``config(strict=True)`` raises nothing.
        by_door: whether the door has a way of its own, of other problems or PyTorch, where no backend takes one.
        kernels: in the order in which they are asked.
    """

    subject: str
    reads: Callable[[P], Tensor]
    types: tuple[type, ...] = ()
    is_empty: Callable[[P], bool] | None = None
    flops: Callable[[P], int] | None = None
    configuration: Callable[[P], str] | None = None
    optional: bool = False
    by_door: bool = False
    kernels: list[Implementation[P]] = field(default_factory=list)


AnyImplementation = Implementation[Any]
AnyKind = Kind[Any]
Implementations = tuple[tuple[AnyKind, AnyImplementation], ...]
"""The kernels that a backend registers, by the kind of their problems."""
