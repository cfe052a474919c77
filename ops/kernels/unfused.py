"""A product and its epilogue as two kernels, where the backend has no kernel for both."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from . import dispatch
from .interface import Backend
from .problem import Activate, GroupedGemm


def run(backend: Backend, problem: GroupedGemm) -> None:
    """The product, then the activation or its backward."""
    epilogue, columns = problem.epilogue, problem.mnk[1]
    if isinstance(epilogue, Activate):
        product = epilogue.preact
        if product is None:
            product = problem.a.new_empty(problem.rows, columns)
        backend.run(replace(problem, out=product, epilogue=None))
        assert isinstance(problem.out, Tensor)
        dispatch.activation_kernels(product, epilogue.scales, problem.out).forward(
            product, epilogue.spec, epilogue.scales, problem.out
        )
    elif epilogue is not None:
        dhidden = problem.a.new_empty(problem.rows, columns)
        backend.run(replace(problem, out=dhidden, epilogue=None))
        pre, grads = epilogue.preact, epilogue.grads
        dispatch.activation_kernels(pre, epilogue.scales, dhidden, grads.pre, grads.hidden).backward(
            dhidden, pre, epilogue.spec, epilogue.scales, grads
        )
