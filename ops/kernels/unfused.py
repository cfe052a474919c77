"""A product and its epilogue as two kernels, where the backend has no kernel for both."""

from __future__ import annotations

from dataclasses import replace

from . import dispatch
from .interface import Backend
from .problem import Activate, GroupedGemm, first


def product_of(problem: GroupedGemm) -> GroupedGemm:
    """The product alone, into rows of its own where the epilogue keeps none."""
    epilogue = problem.epilogue
    out = epilogue.preact if isinstance(epilogue, Activate) else None
    if out is None:
        out = problem.a.new_empty(problem.rows, problem.mnk[1])
    return replace(problem, out=out, epilogue=None)


def run(backend: Backend, problem: GroupedGemm) -> None:
    """The product, then the activation or its backward."""
    epilogue, product = problem.epilogue, product_of(problem)
    backend.run(product)
    rows = first(product.out)
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
