"""Activations by name, for functions and layers that build ops themselves."""

from __future__ import annotations

from dataclasses import replace

from ...fuser.contract.config import constant
from ..programs.activations import ACTIVATIONS
from ..values.activation_spec import ActivationSpec, Interleaved
from .activation import Activation
from .glu import GEGLU, GLU, QGEGLU, Activated, ClampedSwiGLU, ReGLU, SReGLU, SwiGLU

GATES = {
    "swiglu": SwiGLU().spec,
    "geglu": GEGLU().spec,
    "geglu_tanh": GEGLU("tanh").spec,
    "qgeglu": QGEGLU().spec,
    "reglu": ReGLU().spec,
    "sreglu": SReGLU().spec,
    "clamped_swiglu": ClampedSwiGLU().spec,
}
"""The gated linear units of :mod:`fusible.ops.basic.glu`, by their lower-case names."""


def activation_spec(chosen: str | Activated, layout: str | Interleaved = "concat") -> ActivationSpec:
    """The activation that a user has chosen: by name, or as an op.

    Args:
        chosen: a name of :data:`GATES` or of :data:`ACTIVATIONS`, or an op such as ``SwiGLU(layout=interleaved(32))``.
        layout: the layout of gate and up columns, for a gate chosen by name.

    Raises:
        ValueError: an unknown activation or layout; a layout without a gate, or together with an op, which has its own.
    """
    block = layout.block if isinstance(layout, Interleaved) else layout
    if not isinstance(layout, Interleaved) and layout != "concat":
        raise ValueError(f"layout must be 'concat' or interleaved(n); got {layout!r}")
    if isinstance(chosen, Activated):
        if block != "concat":
            raise ValueError(f"layout: {type(chosen).__name__} has a layout of its own; leave the argument out")
        return chosen.spec
    return _named(chosen, block)


@constant
def _named(name: str, block: str | int) -> ActivationSpec:
    if name in GATES:
        return GATES[name] if isinstance(block, str) else replace(GATES[name], block=block)
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join((*GATES, *ACTIVATIONS))}, or an op; got {name!r}")
    if block != "concat":
        raise ValueError(f"layout: {name!r} has no gate; leave the argument out")
    return ActivationSpec(name)


def activation_op(spec: ActivationSpec) -> Activated:
    """The op that computes it."""
    if not spec.gated:
        return Activation(spec.name)
    layout = "concat" if spec.block is None else Interleaved(spec.block)
    return GLU(spec.name, limit=spec.limit, alpha=spec.alpha, linear_offset=spec.linear_offset, layout=layout)
