"""``grouped_mlp``: the experts of a mixture-of-experts layer, with one gradient rule for the whole.

With s the probabilities before the second linear and o those after it, per row: ``y = o (W2 (s act(W1 x + b1)) + b2)``.
The backward keeps x and the pre-activation, and computes the activation again, as GroupedMLP in ``ops/fused`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from . import dispatch
from .activation import KernelActivation
from .activation import activation as activation_of
from .calls import BackwardOperands, GemmArrays, Layout
from .checks import ArgumentError, check_array, check_depths, check_one_dtype, check_shape, check_sharding, check_sizes
from .gemm import as_rows, no_gradient
from .versions import vary_alike

_NAME = "grouped_mlp"
PREACT = "fusible_pre"
"""The name of the pre-activation for policies of ``jax.checkpoint``; the backward reads it."""


class StaticArguments(NamedTuple):
    """The arguments of a call that are not arrays.

    Attributes:
        kn: weights are [G, in, out] rather than [G, out, in].
        probs_at_output: the probabilities scale the output of the second linear rather than its input.
    """

    activation: KernelActivation
    kn: bool
    probs_at_output: bool

    @property
    def forward(self) -> Layout:
        """The layout of both products of the forward."""
        return Layout.NN if self.kn else Layout.NT

    @property
    def backward(self) -> Layout:
        """The layout of the products that give the gradients of the inputs."""
        return Layout.NT if self.kn else Layout.NN

    def wgrad(self, inputs: Array, grads: Array, sizes: Array, dtype: DTypeLike) -> Array:
        """The gradient of a weight, in the weight's own layout."""
        a, b = (inputs, grads) if self.kn else (grads, inputs)
        return dispatch.product(Layout.TN, dtype, GemmArrays(a, b, sizes))


def grouped_mlp(
    x: Array,
    w13: Array,
    w2: Array,
    sizes: Array,
    probs: Array | None = None,
    *,
    activation: str = "silu",
    gated: bool = True,
    interleave: int | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    linear_offset: float = 0.0,
    b13: Array | None = None,
    b2: Array | None = None,
    weight_layout: str = "kn",
    probs_at: str = "activation",
) -> Array:
    """The experts of a layer: two linears of G groups, an activation in between, and a probability for each row.

    On Hopper the activation runs in the epilogue of the first product, and its backward in the epilogue of the second
    product's backward. Rows past the last group are ignored, and are zero in the result and in gradients. A size below
    0 counts as 0, and sizes beyond the number of rows are cut off. There is no forward mode, and there are no second
    derivatives.

    Args:
        x: rows [..., H], sorted by group.
        w13: gate and up of each group: [G, H, 2F], or [G, 2F, H] for ``weight_layout="nk"``; without a gate F columns.
        w2: [G, F, H], or [G, H, F].
        sizes: int32 or int64 [G], the rows of each group.
        probs: [...], a factor for each row, of any float dtype.
        activation: silu, gelu (by erf), gelu_tanh, quick_gelu, relu, relu2 or sigmoid.
        gated: ``act(gate) * (up + linear_offset)`` rather than ``act(x)``.
        interleave: the block size in which columns of gate and up alternate; None: gate is the first half.
        limit: gate is clamped to at most this, up to within plus and minus this.
        alpha: the slope inside silu.
        linear_offset: added to up.
        b13, b2: biases [G, 2F] and [G, H].
        weight_layout: ``"kn"`` [G, in, out] or ``"nk"`` [G, out, in].
        probs_at: ``"activation"``: before the second linear; ``"output"``: after it, with its bias.

    Returns:
        [..., H], in the dtype of x.

    Raises:
        ArgumentError: arguments do not fit; raised while tracing.
    """
    spec = activation_of(activation, gated, limit, alpha, linear_offset, interleave)
    static = StaticArguments(
        spec, _choice("weight_layout", weight_layout, "kn", "nk"), _choice("probs_at", probs_at, "output", "activation")
    )
    _check(static, x, w13, w2, sizes, probs, b13, b2)
    check_sharding(_NAME, x, w13, w2, sizes, probs, b13, b2)
    rows = as_rows(x)
    factors = None if probs is None else probs.reshape(-1)
    operands = Arrays(*vary_alike(rows, w13, w2, sizes, factors, b13, b2))
    y: Array = _mlp(static, operands)
    return y.reshape(x.shape)


def _choice(name: str, value: str, chosen: str, other: str) -> bool:
    if value not in (chosen, other):
        raise ArgumentError(f"{_NAME}: {name} must be {chosen!r} or {other!r}, got {value!r}")
    return bool(value == chosen)


def _check(
    static: StaticArguments,
    x: Array,
    w13: Array,
    w2: Array,
    sizes: Array,
    probs: Array | None,
    b13: Array | None,
    b2: Array | None,
) -> None:
    check_array(_NAME, "x", x)
    for name, weight in (("w13", w13), ("w2", w2)):
        check_array(_NAME, name, weight, 3)
    check_one_dtype(_NAME, x=x, w13=w13, w2=w2)
    (first_in, first_out), (second_in, second_out) = (w.shape[1:] if static.kn else w.shape[:0:-1] for w in (w13, w2))
    groups, spec = w13.shape[0], static.activation
    if x.ndim < 1 or (spec.gated and first_out % (2 * (spec.block or 1))):
        raise ArgumentError(f"{_NAME}: w13 has {first_out} columns, which do not divide into gate and up")
    check_depths(_NAME, ("x", "w13"), (x.shape[-1], first_in))
    check_depths(_NAME, ("the activation", "w2"), (spec.columns(first_out), second_in))
    check_depths(_NAME, ("x", "the columns of w2"), (x.shape[-1], second_out))
    check_shape(_NAME, "w2", w2, (groups, *w2.shape[1:]))
    check_sizes(_NAME, "sizes", sizes, groups)
    for name, array, shape in (
        ("probs", probs, x.shape[:-1]),
        ("b13", b13, (groups, first_out)),
        ("b2", b2, (groups, second_out)),
    ):
        if array is not None:
            check_shape(_NAME, name, array, shape)


class Arrays(NamedTuple):
    """The arrays of a call, or their gradients; None for absent ones."""

    x: Array
    w13: Array
    w2: Array
    sizes: Array
    probs: Array | None
    b13: Array | None
    b2: Array | None


class Saved(NamedTuple):
    """The values that the forward keeps for the backward."""

    operands: Arrays
    preact: Array


def _forward(static: StaticArguments, keep_preact: bool, o: Arrays) -> tuple[Array, Array]:
    before, after = (None, o.probs) if static.probs_at_output else (o.probs, None)
    spec = static.activation
    first = GemmArrays(o.x, o.w13, o.sizes, o.b13, before)
    hidden, preact = dispatch.linear_activation(static.forward, spec, keep_preact, first)
    return dispatch.product(static.forward, o.x.dtype, GemmArrays(hidden, o.w2, o.sizes, o.b2, after)), preact


def _primal(static: StaticArguments, operands: Arrays) -> Array:
    y: Array = _forward(static, False, operands)[0]
    return y


def _fwd(static: StaticArguments, operands: Arrays) -> tuple[Array, Saved]:
    y, preact = _forward_once(static, operands)
    return y, Saved(operands, checkpoint_name(preact, PREACT))


def _bwd(static: StaticArguments, saved: Saved, dy: Array) -> tuple[Arrays]:
    grads: Arrays = _backward_once(static, saved, dy)
    return (grads._replace(sizes=no_gradient(saved.operands.sizes)),)


def _backward(static: StaticArguments, saved: Saved, dy: Array) -> Arrays:
    o, spec = saved.operands, static.activation
    bias_dtype = None if o.b13 is None else o.b13.dtype
    dpreact, dprobs, hidden, db13 = dispatch.linear_activation_backward(
        static.backward, spec, bias_dtype, BackwardOperands(dy, o.w2, o.sizes, saved.preact, o.probs)
    )
    at_output = o.probs if static.probs_at_output else None
    if at_output is not None and o.b2 is not None:
        dots = dispatch.row_dots(dy, o.b2, o.sizes)
        dprobs = (dprobs.astype(dots.dtype) + dots).astype(at_output.dtype)
    return Arrays(
        x=dispatch.product(static.backward, o.x.dtype, GemmArrays(dpreact, o.w13, o.sizes)),
        w13=static.wgrad(o.x, dpreact, o.sizes, o.w13.dtype),
        w2=static.wgrad(hidden, dy, o.sizes, o.w2.dtype),
        sizes=None,
        probs=None if o.probs is None else dprobs,
        b13=None if o.b13 is None else db13,
        b2=None if o.b2 is None else dispatch.column_sums(o.b2.dtype, dy, o.sizes, at_output),
    )


def _once(function: Callable[..., object]) -> jax.custom_jvp:
    """Wraps a function so that differentiating it raises an error."""
    once = jax.custom_jvp(function, nondiff_argnums=(0,))
    once.defjvp(_refuse)
    return once


def _refuse(static: StaticArguments, primals: tuple[object, ...], tangents: tuple[object, ...]) -> NoReturn:
    raise NotImplementedError("grouped_mlp: second derivatives are not supported; a layer of two grouped_gemm has them")


_forward_once = _once(lambda static, operands: _forward(static, True, operands))
_backward_once = _once(_backward)
_mlp = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_mlp.defvjp(_fwd, _bwd)
