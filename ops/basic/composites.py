"""TransformerEngine's names for an activation with a scale. A container splits them into the two ops."""

from __future__ import annotations

from ...fuser import Composite
from ..values.activation_spec import Interleaved
from .activation import Activation
from .glu import ClampedSwiGLU, SwiGLU
from .scale import Scale


class ScaledSwiGLU(Composite):
    """:class:`SwiGLU`, then :class:`Scale`: ``silu(gate) * up * scales``."""

    def __init__(self, *, layout: str | Interleaved = "concat") -> None:
        super().__init__(activation=SwiGLU(layout=layout), scale=Scale())


class ScaledClampedSwiGLU(Composite):
    """:class:`ClampedSwiGLU`, then :class:`Scale`."""

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        linear_offset: float = 1.0,
        layout: str | Interleaved = "concat",
    ) -> None:
        activation = ClampedSwiGLU(limit=limit, alpha=alpha, linear_offset=linear_offset, layout=layout)
        super().__init__(activation=activation, scale=Scale())


class ScaledActivation(Composite):
    """:class:`Activation`, then :class:`Scale`."""

    def __init__(self, name: str) -> None:
        super().__init__(activation=Activation(name), scale=Scale())
