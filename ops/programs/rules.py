"""Rules that translate functions of PyTorch to lines of a program. PyTorch's decompositions handle the others.

A rule takes the builder, then the arguments of the function: program values for tensors and numbers, others unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .builder import Builder
from .program import Value

Bound = Value | None
Rule = Callable[..., Value]

_ERF_SCALE = 0.7071067811865476  # 1 / sqrt(2)
_DENSITY = 0.3989422804014327  # 1 / sqrt(2 pi)
_GELU_TANH = 1.5957691216057308  # 2 sqrt(2 / pi)
_GELU_CUBE = 0.044715
_NAMES = (
    *("neg", "abs", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "sin", "cos", "atan"),
    *("round", "floor", "reciprocal", "mul", "div", "pow", "maximum", "minimum", "lt", "le", "eq", "where"),
)


def _same(operation: str) -> Rule:
    return lambda e, *values: e(operation, *values)


def _constant(number: float) -> Rule:
    return lambda e, *_, **__: number


def _first(e: Builder, x: Value, *_: object, **__: object) -> Value:
    return x


def _filled(e: Builder, _: object, fill: Value, *__: object, **___: object) -> Value:
    return fill


def _clamp(e: Builder, x: Value, low: Bound = None, high: Bound = None, min: Bound = None, max: Bound = None) -> Value:
    low, high = (low if min is None else min), (high if max is None else max)
    x = x if low is None else e("maximum", x, low)
    return x if high is None else e("minimum", x, high)


def _gelu(e: Builder, x: Value, approximate: str) -> tuple[Value, Value]:
    """Value and slope: ``x cdf(x)`` and ``cdf(x) + x density(x)``; by tanh, ``(1 + tanh(v / 2)) / 2`` is sigmoid(v)."""
    if approximate == "tanh":
        square = e("mul", x, x)
        v = e("mul", e("mul", x, e("add", e("mul", square, _GELU_CUBE), 1.0)), _GELU_TANH)
        s, dv = e("sigmoid", v), e("add", e("mul", square, 3 * _GELU_CUBE * _GELU_TANH), _GELU_TANH)
        value = e("mul", x, s)
        return value, e("add", s, e("mul", e("mul", value, e("sub", 1.0, s)), dv))
    cdf = e("add", e("mul", e("erf", e("mul", x, _ERF_SCALE)), 0.5), 0.5)
    density = e("mul", e("exp", e("mul", e("mul", x, x), -0.5)), _DENSITY)
    return e("mul", x, cdf), e("add", cdf, e("mul", x, density))


def _silu_backward(e: Builder, dy: Value, x: Value) -> Value:
    s = e("sigmoid", x)
    return e("mul", dy, e("add", s, e("mul", e("mul", x, s), e("sub", 1.0, s))))


def _softplus_backward(e: Builder, dy: Value, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    scaled = e("mul", x, beta)
    return e("where", e("lt", threshold, scaled), dy, e("mul", dy, e("sigmoid", scaled)))


def _elu(e: Builder, x: Value, alpha: float = 1.0, scale: float = 1.0, slope: float = 1.0) -> Value:
    negative = e("mul", e("expm1", e("mul", x, slope)), alpha * scale)
    return e("where", e("lt", 0.0, x), e("mul", x, scale), negative)


def _sign(e: Builder, x: Value) -> Value:
    return e("where", e("lt", 0.0, x), 1.0, e("where", e("lt", x, 0.0), -1.0, 0.0))


def _shrunk_backward(e: Builder, dy: Value, x: Value, limit: float) -> Value:
    return e("where", e("and", e("le", -limit, x), e("le", x, limit)), 0.0, dy)


RULES: dict[str, Rule] = {
    **{name: _same(name) for name in _NAMES},
    **{f"{kind}_{name}": _same(name) for kind in ("logical", "bitwise") for name in ("and", "or", "not")},
    "add": lambda e, a, b, alpha=1.0: e("add", a, e("mul", b, alpha)),
    "sub": lambda e, a, b, alpha=1.0: e("sub", a, e("mul", b, alpha)),
    "rsub": lambda e, a, b, alpha=1.0: e("sub", b, e("mul", a, alpha)),
    "gt": lambda e, a, b: e("lt", b, a),
    "ge": lambda e, a, b: e("le", b, a),
    "ne": lambda e, a, b: e("not", e("eq", a, b)),
    "exp2": lambda e, x: e("exp", e("mul", x, math.log(2))),
    "log2": lambda e, x: e("mul", e("log", x), 1 / math.log(2)),
    "erfc": lambda e, x: e("sub", 1.0, e("erf", x)),
    "isnan": lambda e, x: e("not", e("eq", x, x)),
    "relu": lambda e, x: e("maximum", x, 0.0),
    "leaky_relu": lambda e, x, slope=0.01: e("where", e("lt", 0.0, x), x, e("mul", x, slope)),
    "elu": _elu,
    "sgn": _sign,
    "sign": _sign,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda e, x, high: _clamp(e, x, None, high),
    "hardtanh": lambda e, x, low=-1.0, high=1.0: _clamp(e, x, low, high),
    "silu": lambda e, x: e("mul", x, e("sigmoid", x)),
    "silu_backward": _silu_backward,
    "gelu": lambda e, x, approximate="none": _gelu(e, x, approximate)[0],
    "gelu_backward": lambda e, dy, x, approximate="none": e("mul", dy, _gelu(e, x, approximate)[1]),
    "softplus_backward": _softplus_backward,
    "sigmoid_backward": lambda e, dy, y: e("mul", dy, e("mul", y, e("sub", 1.0, y))),
    "tanh_backward": lambda e, dy, y: e("mul", dy, e("sub", 1.0, e("mul", y, y))),
    **dict.fromkeys(["hardshrink_backward", "softshrink_backward"], _shrunk_backward),
    "threshold_backward": lambda e, dy, x, at: e("where", e("le", x, at), 0.0, dy),
    "copy": lambda e, to, source, *_: source,
    "new_full": lambda e, x, size, fill, **_: fill,
    **dict.fromkeys(["alias", "detach", "view", "view_of", "expand", "clone", "lift_fresh"], _first),
    **dict.fromkeys(["scalar_tensor", "_to_copy"], _first),  # the tracer makes truth values of numbers, and back
    **dict.fromkeys(["full", "full_like", "fill"], _filled),
    **dict.fromkeys(["empty_like", "new_empty", "empty_permuted"], _constant(math.nan)),  # to be written to
    **dict.fromkeys(["zeros", "zeros_like", "new_zeros", "zero"], _constant(0.0)),
    **dict.fromkeys(["ones", "ones_like", "new_ones"], _constant(1.0)),
}
"""By the name of the aten operation; one that writes in place has the rule of the one that does not."""
