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
        backend: the name for ``config(backend=...)``; None for a fallback on PyTorch, which runs under every name and
            takes every problem.
        name: the name in ``explain()``, which may depend on the problem.
        run: solves a problem that is not refused.
        refusal: why the kernels cannot solve a problem, in words that follow "it"; None: they can. Kernels without a
            refusal take every problem.
        cache_key: a key that decides whether a problem is refused. None: the refusal depends on more; kernels without a
            ``cache_key`` are asked at every call.
        device: the type of the devices that the kernels run on; None for any.
        interpreted: whether they also run on other devices if they are asked for by name.
        by_name: whether they run only if they are asked for by name.
        configuration: the choice for a problem, such as a tile, in words.
        warn: called with a problem that other backends refused, under ``config(backend="auto")``.
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
    """Returns a function that solves a problem with the functions of a module; the problem chooses the function."""
    return methodcaller("solve", kernels)


@dataclass(frozen=True, slots=True, eq=False)
class GemmImplementation(Implementation[GroupedGemm]):
    """An implementation of the grouped GEMM, and its abilities beside the product.

    Attributes:
        has_epilogues: whether an activation, or its backward, may be part of a product.
        epilogue_refusal: why the epilogue of an accepted product must be a separate kernel; None: it need not. Kernels
            without this have every epilogue.
        slower_epilogue: why an accepted epilogue is faster as a separate kernel; None: it is not.
        second_refusal: why the product of the second pair of operands must be a separate kernel; None: it need not.
            Kernels without this take one pair.
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
        subject: the name of a problem in errors.
        problems: the type of the problems, or the union of their types.
        reads: a tensor that a problem reads; its device decides which kernels may run.
        is_empty: whether there is nothing to solve.
        flops: the floating-point operations of a problem.
        configuration: a problem in words, for kernels without a ``configuration``.
        optional: whether a problem that no backend takes costs nothing, so that ``config(strict=True)`` does not raise.
        by_door: whether the door solves a problem that no backend takes, by other problems or PyTorch.
        kernels: the kernels, in the order in which they are asked.
    """

    subject: str
    problems: Any
    reads: Callable[[P], Tensor]
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
