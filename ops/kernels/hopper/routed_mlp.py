"""The routed experts of a layer without gradients as one call of the extension, whose launches follow one another."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...values.activation_spec import ActivationSpec
from ..extension import TYPE_CODES, compiled, stream
from ..problems.gemm import Activate, GroupedGemm, Layout
from . import epilogue
from . import gemm as hopper
from .operands import Addressing, addressing


class Experts(NamedTuple):
    """The stored parameters of a layer's experts, and the activation between the linears.

    Attributes:
        up, down: [E, out, in], or [E, in, out] if ``transposed``.
        up_bias, down_bias: [E, out].
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    spec: ActivationSpec
    transposed: bool

    @property
    def features(self) -> int:
        """The features of a token."""
        return self.up.shape[1 if self.transposed else 2]

    @property
    def columns(self) -> int:
        """The columns of the hidden rows."""
        return self.down.shape[1 if self.transposed else 2]


def refusal(experts: Experts) -> str | None:
    """Why the kernels cannot run these experts here; None: they can."""
    dtypes = [bias.dtype for bias in (experts.up_bias, experts.down_bias) if bias is not None]
    if len(set(dtypes)) > 1:
        return f"takes biases of one dtype, got {' and '.join(map(str, dtypes))}"
    why = hopper.refusal(_up(experts)) or hopper.refusal(_down(experts))
    if why is None and experts.spec.program is not None:
        return epilogue.refusal(_activated(experts))
    return why


class RoutedMlp:
    """Experts that lie where they lay when this was made."""

    def __init__(self, experts: Experts) -> None:
        e, self.features = experts, experts.features
        activated = _activated(e)
        unfused = epilogue.refusal(activated) is not None
        bias = e.down_bias if e.up_bias is None else e.up_bias
        bias_type = 0 if bias is None else TYPE_CODES[bias.dtype]
        shapes = {
            "type": TYPE_CODES[e.up.dtype],
            "groups": e.up.shape[0],
            "features": self.features,
            "columns": e.columns,
            "unfused": unfused,
        }
        self._sizes = {"gated": e.spec.gated, **shapes}
        self._experts = {
            "activation": epilogue.activation_of(activated, e.spec, e.columns),
            **shapes,
            "transposed": e.transposed,
            **_matrix("up", addressing(e.up)),
            **_matrix("down", addressing(e.down)),
            **_vector("up_bias", e.up_bias),
            **_vector("down_bias", e.down_bias),
            "bias_type": bias_type,
        }

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Computes the weighted sums [T, H] for rows [T, H], ids of 32 or 64 bits [T, k] and weights [T, k]."""
        tokens, top_k = ids.shape
        x = x if x.stride(-1) == 1 else x.contiguous()
        ids = ids.contiguous()
        weights = weights.contiguous() if weights.dtype in TYPE_CODES else weights.float().contiguous()
        device, size = x.get_device(), compiled().routed_workspace_bytes(**self._sizes, slots=tokens * top_k)
        out, workspace = x.new_empty((tokens, self.features)), x.new_empty(size, dtype=torch.uint8)
        if tokens:
            compiled().routed_mlp(
                **self._experts,
                device=device,
                stream=stream(device),
                tokens=tokens,
                top_k=top_k,
                x=x.data_ptr(),
                pitch=x.stride(0),
                ids=ids.data_ptr(),
                int64_ids=ids.dtype == torch.int64,
                weights=weights.data_ptr(),
                weights_type=TYPE_CODES[weights.dtype],
                out=out.data_ptr(),
                workspace=workspace.data_ptr(),
            )
        return out


def _activated(experts: Experts) -> GroupedGemm:
    """The first linear with its activation."""
    postact = experts.up.new_empty((1, experts.columns))
    return replace(_up(experts), out=postact, epilogue=Activate(experts.spec, None, None))


def _up(e: Experts) -> GroupedGemm:
    return _product(e, e.up, e.up_bias, e.features, e.up.shape[2 if e.transposed else 1])


def _down(e: Experts) -> GroupedGemm:
    return _product(e, e.down, e.down_bias, e.columns, e.features)


def _product(e: Experts, weight: Tensor, bias: Tensor | None, depth: int, columns: int) -> GroupedGemm:
    """One row's, to ask for refusals."""
    layout = Layout.NN if e.transposed else Layout.NT
    a, out = weight.new_empty((1, depth)), weight.new_empty((1, columns))
    sizes = weight.new_empty(weight.shape[0], dtype=torch.int32)
    return GroupedGemm(layout, a, weight, sizes, out, bias=bias, fresh=True)


def _matrix(name: str, addressing: Addressing) -> dict[str, int]:
    address, pitch, distance = addressing[0]
    return {name: address, f"{name}_pitch": pitch, f"{name}_group": distance}


def _vector(name: str, bias: Tensor | None) -> dict[str, int]:
    address, pitch = (0, 0) if bias is None else (bias.data_ptr(), bias.stride(0))
    return {name: address, f"{name}_pitch": pitch}
