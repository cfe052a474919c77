"""Which kernels compute activations: our own where they are built for the device, else PyTorch's."""

from __future__ import annotations

from torch import Tensor

from ..activation_spec import ActivationSpec
from .hopper import rows
from .pytorch import activation as pointwise
from .pytorch.activation import ActivationGrads


def name(pre: Tensor, scales: Tensor | None) -> str:
    """What ``explain`` calls the kernel for these tensors."""
    return rows.NAME if rows.usable(scales, pre) else pointwise.NAME


def forward(pre: Tensor, spec: ActivationSpec, scales: Tensor | None, out: Tensor) -> None:
    """``out`` [..., F] = activation of ``pre`` [..., C], times ``scales`` [...], rounded once."""
    kernels = rows if rows.usable(scales, pre, out) else pointwise
    kernels.forward(pre, spec, scales, out)


def backward(dhidden: Tensor, pre: Tensor, spec: ActivationSpec, scales: Tensor | None, out: ActivationGrads) -> None:
    """From ``dhidden`` [..., F] what ``out`` has room for; the activation is computed again from ``pre``."""
    kernels = rows if rows.usable(scales, pre, dhidden, out.pre, out.hidden) else pointwise
    kernels.backward(dhidden, pre, spec, scales, out)
