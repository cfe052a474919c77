"""Activations without a gate."""

from __future__ import annotations

from ..values.activation_spec import ActivationSpec
from .glu import Activated


class Activation(Activated):
    """silu, gelu (by erf), gelu_tanh, quick_gelu, relu, relu2 or sigmoid of every element.

    Raises:
        ValueError: another name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(ActivationSpec(name))

    def extra_repr(self) -> str:
        return self.spec.name
