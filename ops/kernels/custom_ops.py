"""The kernel door as custom ops of ``torch.library``: what compiled code and exported programs call.

A schema knows no alternatives: stacked matrices come as a list of one tensor, which has a dimension more than one of
several; a factor as a number or as a tensor; what is not wanted is returned as an empty tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...fuser.config import Config, active_config, config_of, use_config
from .. import kernels
from ..activation_spec import ActivationSpec
from . import ActivationGrads, Layout, Matrices, outputs

_library: Any = torch.library.Library("fusible", "DEF")  # type: ignore[no-untyped-call]
_AS_IT_IS = nullcontext()
SPEC = "str name, bool gated, float? limit, float alpha, float linear_offset, int? block"
_EPILOGUE = "Tensor[]? bias, Tensor? bias_scale, Tensor? row_scale"


def register(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function under the schema; ``fake`` takes the same, of tensors without data."""

    def registered(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*arguments)
            with torch.no_grad():  # an exported program may run with gradients on; a backward through it warns
                return function(*arguments)

        name = schema[: schema.index("(")]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fusible::{name}", fake, lib=_library)
        return function

    return registered


def _fake_gemm(
    layout: str, a: Tensor, b: list[Tensor], split_sizes: Tensor, dtype: torch.dtype | None, *_: Any
) -> Tensor:
    return outputs.new_output(Layout[layout], a, _right(layout, b), split_sizes, dtype)


@register(
    "grouped_gemm(str layout, Tensor a, Tensor[] b, Tensor split_sizes, ScalarType? out_dtype, "
    f"float? alpha, Tensor? alphas, {_EPILOGUE}, str switches) -> Tensor",
    _fake_gemm,
)
def _gemm(
    layout: str,
    a: Tensor,
    b: list[Tensor],
    split_sizes: Tensor,
    dtype: torch.dtype | None,
    alpha: float | None,
    alphas: Tensor | None,
    *epilogue: Any,
) -> Any:
    how = {"out_dtype": dtype, "alpha": alpha if alphas is None else alphas, **_epilogue(*epilogue[:-1])}
    with obeying(epilogue[-1]):
        return kernels.grouped_gemm(Layout[layout], a, _right(layout, b), split_sizes, **how)


@register(
    "grouped_gemm_out(str layout, Tensor a, Tensor[] b, Tensor split_sizes, Tensor(a!)[] out, "
    f"float? alpha, Tensor? alphas, float? beta, Tensor? betas, {_EPILOGUE}, str switches) -> ()",
    lambda *_: None,
)
def _gemm_out(layout: str, a: Tensor, b: list[Tensor], split_sizes: Tensor, out: list[Tensor], *how: Any) -> None:
    alpha, alphas, beta, betas, *epilogue, switches = how
    factors = {"alpha": alpha if alphas is None else alphas, "beta": beta if betas is None else betas}
    into = _matrices(out, 3 if layout == "TN" else 2)
    with obeying(switches):
        kernels.grouped_gemm(
            Layout[layout], a, _right(layout, b), split_sizes, out=into, **factors, **_epilogue(*epilogue)
        )


def _fake_linear_activation(x: Tensor, weight: list[Tensor], split_sizes: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    pre, hidden = outputs.new_hidden(x, _right("NT", weight), ActivationSpec(*how[:6]), keep_pre=how[9])
    return x.new_empty(0) if pre is None else pre, hidden


@register(
    f"grouped_linear_activation(Tensor x, Tensor[] weight, Tensor split_sizes, {SPEC}, "
    "Tensor[]? bias, Tensor? bias_scale, Tensor? scales, bool keep_pre, bool interior, str switches) "
    "-> (Tensor, Tensor)",
    _fake_linear_activation,
)
def _linear_activation(x: Tensor, weight: list[Tensor], split_sizes: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    *spec, bias, bias_scale, scales, keep_pre, interior, switches = how
    given = {"bias": _matrices(bias, 2), "bias_scale": bias_scale, "scales": scales}
    with obeying(switches):
        pre, hidden = kernels.grouped_linear_activation(
            x, _right("NT", weight), split_sizes, ActivationSpec(*spec), keep_pre=keep_pre, interior=interior, **given
        )
    return x.new_empty(0) if pre is None else pre, hidden


def _fake_activation_grads(pre: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``how``: the activation, the scales, which of their gradient and the hidden rows are wanted."""
    *spec, scales, want_scales, want_hidden = how
    return _returned(outputs.new_grads(pre, ActivationSpec(*spec), scales, want_scales, want_hidden))


def _fake_linear_activation_backward(
    dy: Tensor, weight: list[Tensor], pre: Tensor, split_sizes: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *grads, bias_dtype, _ = how
    bias = pre.new_empty(0) if bias_dtype is None else outputs.new_sums(pre, split_sizes, bias_dtype)
    return *_fake_activation_grads(pre, *grads), bias


@register(
    f"grouped_linear_activation_backward(Tensor dy, Tensor[] weight, Tensor pre, Tensor split_sizes, {SPEC}, "
    "Tensor? scales, bool want_scales, bool want_hidden, ScalarType? bias_dtype, str switches) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake_linear_activation_backward,
)
def _linear_activation_backward(
    dy: Tensor, weight: list[Tensor], pre: Tensor, split_sizes: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *spec, scales, want_scales, want_hidden, bias_dtype, switches = how
    given = {"scales": scales, "want_scales": want_scales, "want_hidden": want_hidden, "bias_dtype": bias_dtype}
    with obeying(switches):
        made = kernels.grouped_linear_activation_backward(
            dy, _right("NN", weight), pre, split_sizes, ActivationSpec(*spec), **given
        )
    return *_returned(made), pre.new_empty(0) if made.bias is None else made.bias


@register(
    f"activate(Tensor pre, {SPEC}, Tensor? scales) -> Tensor",
    lambda pre, *how: outputs.new_activated(pre, ActivationSpec(*how[:-1])),
)
def _activate(pre: Tensor, *how: Any) -> Tensor:
    return kernels.activate(pre, ActivationSpec(*how[:-1]), how[-1])


@register(
    f"activate_backward(Tensor dhidden, Tensor pre, {SPEC}, Tensor? scales, bool want_scales, bool want_hidden) "
    "-> (Tensor, Tensor, Tensor)",
    lambda dhidden, pre, *how: _fake_activation_grads(pre, *how),
)
def _activate_backward(dhidden: Tensor, pre: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    *spec, scales, want_scales, want_hidden = how
    wanted = {"want_scales": want_scales, "want_hidden": want_hidden}
    return _returned(kernels.activate_backward(dhidden, pre, ActivationSpec(*spec), scales, **wanted))


@register(
    "column_sums(Tensor tokens, Tensor split_sizes, ScalarType dtype, Tensor? scale) -> Tensor",
    lambda tokens, split_sizes, dtype, scale: outputs.new_sums(tokens, split_sizes, dtype),
)
def _column_sums(tokens: Tensor, split_sizes: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    return kernels.column_sums(tokens, split_sizes, dtype, scale)


@register(
    "row_dots(Tensor tokens, Tensor[] vectors, Tensor split_sizes, ScalarType dtype) -> Tensor",
    lambda tokens, vectors, split_sizes, dtype: tokens.new_empty((tokens.shape[0],), dtype=dtype),
)
def _row_dots(tokens: Tensor, vectors: list[Tensor], split_sizes: Tensor, dtype: torch.dtype) -> Tensor:
    return kernels.row_dots(tokens, _matrices(vectors, 2), split_sizes, dtype)


def obeying(switches: str) -> AbstractContextManager[Any]:
    """Puts the switches of compiled code in force, unless they are."""
    wanted = config(switches)
    return _AS_IT_IS if active_config() is wanted else use_config(wanted)


@cache
def config(switches: str) -> Config:
    """The inverse of :func:`backends.traced.switches`."""
    backend, *strict = switches.split()
    return config_of(**{**vars(Config()), "backend": backend, "strict": bool(strict)})


def _matrices(listed: list[Tensor] | None, stacked: int) -> Any:
    """Undoes what :mod:`traced` does to matrices: the tensor alone, if it is one of so many dimensions."""
    return listed[0] if listed is not None and len(listed) == 1 and listed[0].dim() == stacked else listed


def _right(layout: str, b: list[Tensor]) -> Matrices:
    matrices: Matrices = _matrices(b, 2 if layout == "TN" else 3)
    return matrices


def _epilogue(bias: list[Tensor] | None, bias_scale: Tensor | None, row_scale: Tensor | None) -> dict[str, Any]:
    return {"bias": _matrices(bias, 2), "bias_scale": bias_scale, "row_scale": row_scale}


def _returned(grads: ActivationGrads) -> tuple[Tensor, Tensor, Tensor]:
    pre, scales, hidden = (grads.pre.new_empty(0) if t is None else t for t in grads[:3])
    return pre, scales, hidden
