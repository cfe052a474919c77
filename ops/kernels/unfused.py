"""A product, that of its second pair of operands, and its epilogue as kernels of their own, where none does it all."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from . import dispatch
from .problems.gemm import Activate, GroupedGemm, Matrices, first
from .problems.interface import Backend


def product_of(problem: GroupedGemm) -> GroupedGemm:
    """The product alone, into rows of its own where the epilogue keeps none."""
    epilogue = problem.epilogue
    out = epilogue.preact if isinstance(epilogue, Activate) else None
    if out is None:
        out = problem.a.new_empty(problem.rows, problem.mnk[1])
    return replace(problem, out=out, epilogue=None)


def run(backend: Backend, problem: GroupedGemm) -> None:
    """The product, then the activation or its backward."""
    product = product_of(problem)
    backend.run(product)
    run_epilogue(problem, first(product.out))


def second_product(problem: GroupedGemm, out: Matrices) -> GroupedGemm:
    """That of the second pair of operands, added to what ``out`` holds of the first."""
    p, second = problem, problem.second
    assert second is not None
    assert p.alpha is None
    assert p.beta is None
    return GroupedGemm(p.layout, second.a, second.b, p.split_sizes, out, beta=1.0, row_scale=p.row_scale)


def run_epilogue(problem: GroupedGemm, rows: Tensor) -> None:
    """The activation or its backward, of the rows of the product."""
    epilogue = problem.epilogue
    if isinstance(epilogue, Activate):
        out = first(problem.out)
        kernels = dispatch.activation_kernels(epilogue.spec, rows, epilogue.scales, out, of_groups=problem.of_groups)
        kernels.forward(rows, epilogue.spec, epilogue.scales, out)
    elif epilogue is not None:
        preact, grads = epilogue.preact, epilogue.grads
        beside = rows, grads.preact, grads.postact
        kernels = dispatch.activation_kernels(
            epilogue.spec, preact, epilogue.scales, *beside, of_groups=problem.of_groups
        )
        kernels.backward(rows, preact, epilogue.spec, epilogue.scales, grads)
