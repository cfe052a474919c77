"""A grouped GEMM: by one kernel, or with its second product, its epilogue and its tail as problems of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ...fuser import RefusedError
from ...fuser.contract import tracing as trace
from . import dispatch
from .dispatch import Choice
from .hopper.peers import send_rows
from .operators import outputs
from .problems.gemm import Activate, ActivateBackward, GroupedGemm, Layout, Matrices, first
from .problems.interface import GemmImplementation
from .problems.rows import ActivateRows, ActivateRowsBackward, Activating, ColumnSums, ZeroTail, stated


def run(problem: GroupedGemm, finish: bool = True) -> GemmImplementation:
    """Computes ``out`` and the results of the epilogue, or records them in a trace; returns the kernels of the product.

    Args:
        finish: whether tails, slots and sums by group are wanted, which some kernels leave.
    """
    p, epilogue, tracing = problem, problem.epilogue, trace.active()
    choice = dispatch.choose(p, tracing)
    kernels: GemmImplementation = choice.kernels  # type: ignore[assignment]  # as this kind of problem has
    takes_all = kernels.has_epilogues and kernels.epilogue_refusal is None
    apart = None if epilogue is None or takes_all else epilogue_apart(p, kernels)
    if not tracing and (not p.a.shape[0] or p.a.is_meta):
        _fill_without_rows(p)
        return kernels
    if p.second is not None and second_apart(p, kernels) is not None:
        kernels, apart = _run_second_apart(p), "follows a second product"
    elif tracing:
        _record(p, choice, apart)
    elif apart is None:
        kernels.run(p)
    else:
        run_apart(kernels.run, p)
    if finish and epilogue is not None and not (type(epilogue) is Activate and epilogue.tail_unspecified):
        _finish_epilogue(p, kernels, apart)
    elif finish and epilogue is None and (p.slots is not None or (p.fresh and not kernels.zeroes_tail)):
        _finish_rows(p, kernels)
    return kernels


def epilogue_apart(problem: GroupedGemm, kernels: GemmImplementation) -> str | None:
    """Why the epilogue is a kernel of its own behind the product by these kernels; None: it is not.

    Raises:
        RefusedError: strict, and the kernels have epilogues, but not this one.
    """
    if not kernels.has_epilogues:
        return "has no epilogue"
    why = None if kernels.epilogue_refusal is None else kernels.epilogue_refusal(problem)
    if why is None:
        return None if kernels.slower_epilogue is None else kernels.slower_epilogue(problem)
    if dispatch.is_strict():
        raise RefusedError(
            f"strict: the activation runs as a kernel of its own, because {kernels.backend}'s epilogue {why}"
        )
    return why


def second_apart(problem: GroupedGemm, kernels: GemmImplementation) -> str | None:
    """Why the product of the second pair of operands is a kernel of its own; None: it is not."""
    return f"{kernels.backend} takes one pair" if kernels.second_refusal is None else kernels.second_refusal(problem)


def run_apart(multiply: Callable[[GroupedGemm], None], problem: GroupedGemm) -> None:
    """The product, then the activation or its backward."""
    product = product_of(problem)
    multiply(product)
    run_epilogue(problem, first(product.out))


def _record(problem: GroupedGemm, choice: Choice, apart: str | None) -> None:
    """Tells a trace of the product, and of the activation that follows it where that is a kernel of its own."""
    if apart is None:
        return dispatch.record(problem, choice)
    kernels: GemmImplementation = choice.kernels  # type: ignore[assignment]  # as this kind of problem has
    why = f"{kernels.backend if not kernels.has_epilogues else 'its epilogue'} {apart}"
    product = product_of(problem)
    dispatch.record(product, choice, "; ".join(filter(None, (choice.reason, why))))
    run_epilogue(problem, first(product.out))


def _run_second_apart(problem: GroupedGemm) -> GemmImplementation:
    """The same with separate kernels for the product of the second pair of operands, and for an epilogue."""
    with_rows = problem if problem.epilogue is None else product_of(problem)
    product = replace(with_rows, second=None, slots=None)
    kernels = run(product, finish=False)
    run(_second_product(problem, product.out), finish=False)
    if problem.epilogue is not None:
        run_epilogue(problem, first(product.out))
    return kernels


def product_of(problem: GroupedGemm) -> GroupedGemm:
    """The product alone, into rows of its own where the epilogue keeps none."""
    epilogue = problem.epilogue
    out = epilogue.preact if isinstance(epilogue, Activate) else None
    if out is None:
        out = problem.a.new_empty(problem.rows, problem.mnk[1])
    return replace(problem, out=out, epilogue=None)


def _second_product(problem: GroupedGemm, out: Matrices) -> GroupedGemm:
    """The product of the second pair of operands, added to the first one's in ``out``."""
    p, second = problem, problem.second
    assert second is not None
    assert p.alpha is None
    assert p.beta is None
    first_group = p.first_group
    b = second.b if first_group is None else second.b[first_group : first_group + len(p.b)]
    return GroupedGemm(
        *(p.layout, second.a, b, p.split_sizes, out), beta=1.0, row_scale=p.row_scale, first_group=first_group
    )


def run_epilogue(problem: GroupedGemm, rows: Tensor) -> None:
    """The activation or its backward, of the rows of the product."""
    epilogue = problem.epilogue
    assert epilogue is not None
    if isinstance(epilogue, Activate):
        stages: Activating = ActivateRows(rows, epilogue.spec, epilogue.scales, first(problem.out), problem.of_groups)
    else:
        stages = ActivateRowsBackward(
            rows, epilogue.preact, epilogue.spec, epilogue.scales, epilogue.grads, problem.of_groups
        )
    dispatch.run(stated(stages))


def _finish_rows(problem: GroupedGemm, kernels: GemmImplementation) -> None:
    """Completes a product of rows: sends rows to slots, and zeroes the tail of fresh ones, unless the kernels do."""
    p = problem
    if p.slots is not None and not (kernels.stores_to_slots is not None and kernels.stores_to_slots(p)):
        send_rows(first(p.out), p.slots)
    if p.fresh and not (kernels.zeroes_tail or p.tail_unspecified or p.layout is Layout.TN):
        zero_tail(first(p.out), p.split_sizes)


def _finish_epilogue(problem: GroupedGemm, kernels: GemmImplementation, apart: str | None) -> None:
    """Completes an epilogue: zeroes tails and sums by group, unless the kernels do."""
    epilogue = problem.epilogue
    if isinstance(epilogue, Activate):
        for tokens in () if epilogue.tail_unspecified else (epilogue.preact, first(problem.out)):
            if tokens is not None:
                zero_tail(tokens, problem.split_sizes)
    elif epilogue is not None and (apart is not None or not kernels.finishes_backward):
        grads = epilogue.grads
        if grads.scales is not None:
            dispatch.run(ZeroTail(grads.scales.unsqueeze(-1), problem.split_sizes))
        if grads.bias is not None:
            dispatch.run(ColumnSums(grads.preact, problem.split_sizes, grads.bias))


def zero_tail(rows: Tensor, split_sizes: Tensor) -> None:
    """Zeroes the rows past the last group of a result allocated here."""
    dispatch.run(ZeroTail(rows, split_sizes))


def _fill_without_rows(problem: GroupedGemm) -> None:
    """Without rows a product is zero, and so are sums over them; on a meta device there is nothing to fill."""
    epilogue = problem.epilogue
    if problem.rows:
        return
    if epilogue is None:
        outputs.fill_without_rows(problem)
    elif isinstance(epilogue, ActivateBackward):
        vectors = epilogue.grads.vectors
        for sums in (epilogue.grads.bias, *(() if vectors is None else vectors)):
            if sums is not None:
                sums.zero_()
