"""The experts of a mixture-of-experts layer: GroupedLinear -> activation -> [Scale] -> GroupedLinear -> [Scale]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import FusedOp, Gradient, Grads, Keyword, Promises, register_fusion
from ...fuser.contract import tracing as trace
from .. import kernels
from ..basic.glu import Activated
from ..basic.scale import Scale
from ..formats.quantized_tokens import QuantizedTokens
from ..grouped.grouped_linear import GroupedLinear, LinearCall, as_rows, flat, with_rows_of
from ..grouped.pointwise import Pointwise
from ..kernels import ActivationCall, Terms
from ..quantized.activation import ActivatedProduct, Hidden, Through, Wanted, through_activation
from ..quantized.linear import in_force
from ..quantized.operands import GatheredTokens, Tokens, tokens_for
from ..values.switches import active_switches
from .activation_role import keyword_of, spec_of, vector_grads, vectors_of, wants_vectors
from .mlp_pattern import EXPERTS
from .parts import FC1, FC2, filed, goes_through, kept_for_fc1, kept_for_fc2, names_of, reads_preact
from .pointwise_chain import PointwiseChain

_PRODUCTS = frozenset({"x", "fc1.weight", "fc2.weight"})  # of a backward, that do not need one another


@dataclass(slots=True)
class MLPCall:
    """The arguments of a call beside x: keywords, reserved names, and the state of an exchange of rows.

    Attributes:
        needs_grad, x_is_inner: as for :class:`LinearCall`, with the names of the fused op.
        arrived: the counters of rows that may still arrive; see :class:`fusible.ops.kernels.GroupedGemm`.
        slots: the destination of the output's rows; ``output`` then has arbitrary values.
    """

    split_sizes: Tensor
    scales: Tensor | None = None
    out_scale_scales: Tensor | None = None
    output: Tensor | None = None
    grad_input: Tensor | None = None
    fc1_bias_scale: Tensor | None = None
    fc2_bias_scale: Tensor | None = None
    needs_grad: frozenset[str] = frozenset()
    autocast_dtype: torch.dtype | None = None
    x_is_inner: bool = True
    arrived: Tensor | None = None
    slots: kernels.RowSlots | None = None


@register_fusion(EXPERTS, priority=30)
class GroupedMLP(FusedOp):
    """Experts with one kernel for each product, which also computes the pointwise operations around it.

    The rows of T tokens are sorted by expert; e is the expert of a row, s its scale before the second linear and o its
    scale after it; C is 2F for an activation with gate and up, else F::

        h[T, C] = x[T, K] W1[e].T + b1[e]           kept, with x, s and o
        a[T, F] = s[T] * act(h)                     in the epilogue of h
        y[T, N] = o[T] * (a W2[e].T + b2[e])

        u[T, F] = dy[T, N] W2[e]
        dh[T, C] = s o u * act'(h), and s o act(h)  in the epilogue of u
        ds[T] = o <u, act(h)>                       do[T] = s <u, act(h)> + <dy, b2[e]>
        dW2[e] = dy.T (s o act(h))                  db2[e] = sum of o dy
        dx[T, K] = dh W1[e], dW1[e] = dh.T x        db1[e] = sum of dh

    Products read :class:`Tokens`, which a linear makes: unquantised, gathered, or quantised by its recipe.
    """

    promises = Promises(replayable=True)
    keywords = {
        "split_sizes": Keyword(required=True, tensor=True),
        **dict.fromkeys(("scales", "out_scale_scales", "fc1_bias_scale", "fc2_bias_scale"), Keyword(False, True)),
        **dict.fromkeys(("output", "grad_input"), Keyword(False, False, buffer=True)),
    }
    fc1: GroupedLinear
    act: Activated | Pointwise | PointwiseChain
    scale: Scale | None
    fc2: GroupedLinear
    out_scale: Scale | None

    class Saved(NamedTuple):
        fc1: GroupedLinear.Saved
        fc2: GroupedLinear.Saved
        preact: Tensor | None
        scales: Tensor | None
        out_scales: Tensor | None
        vectors: tuple[Tensor, ...] | None
        encode: Tensor | None

    def takes(self, role: str, keyword: str) -> str | None:
        return keyword_of(role, keyword) or super().takes(role, keyword)

    def fwd(self, x: Tensor, **keywords: Any) -> tuple[Tensor, Saved]:
        call = MLPCall(**keywords)
        call.split_sizes = kernels.as_split_sizes(call.split_sizes, x.device)
        y, saved = self.run(x, call)
        return with_rows_of(x, y) if call.output is None else call.output.detach(), saved

    def run(self, x: Tensor | GatheredTokens | QuantizedTokens, call: MLPCall) -> tuple[Tensor, Saved]:
        """The rows of the output, and the saved state."""
        needs, sizes, vectors = call.needs_grad, call.split_sizes, vectors_of(self.act)
        keep_preact = reads_preact(needs)
        recompute = keep_preact and active_switches().recompute and self._recomputes()
        of_fc1 = kept_for_fc1(needs, self.fc1.has_bias, recompute)
        first = LinearCall(sizes, of_fc1, call.fc1_bias_scale, call.grad_input, x.shape, call.x_is_inner)
        activating = ActivatedProduct(
            spec_of(self.act),
            ActivationCall(flat(call.scales), keep_preact and not recompute, True, vectors),
            reader=self.fc2,
            arrived=call.arrived,
        )
        (preact, hidden), fc1 = self.fc1.multiply(self.fc1.reads(x, first, call.autocast_dtype), first, activating)
        second = LinearCall(sizes, kept_for_fc2(needs, self.fc2.has_bias), call.fc2_bias_scale)
        out = None if call.output is None else call.output.view(-1, self.fc2.out_features)
        y, fc2 = self.fc2.multiply(hidden, second, out=out, row_scale=flat(call.out_scale_scales), slots=call.slots)
        encode = None if fc2.recipe is None else fc2.recipe.scales_of_forward(self.fc2)
        return y, self.Saved(fc1, fc2, preact, call.scales, call.out_scale_scales, vectors, encode)

    def _recomputes(self) -> bool:
        """Whether the backward computes the pre-activation again, where the switches say so."""
        if in_force(self.fc1.recipe) is not None:
            trace.note("recompute: quantised experts keep the pre-activation")
            return False
        trace.note("recompute: the pre-activation is computed again in the backward")
        return True

    def bwd(self, saved: Saved, dy: Tensor | GatheredTokens, *, needs_grad: frozenset[str]) -> Grads:
        if saved.preact is None and saved.fc1.recipe is None and reads_preact(needs_grad):
            saved = saved._replace(preact=self._recomputed(saved))
        of_fc1, of_fc2 = names_of(FC1, needs_grad), names_of(FC2, needs_grad)
        through, trains = saved.fc2.weight is not None and goes_through(needs_grad), "weight" in of_fc2
        read = tokens_for(
            *(self.fc2, saved.fc2.recipe, as_rows(dy) if isinstance(dy, Tensor) else dy, saved.fc2.split_sizes),
            rows=through,
            wgrad=trains,
            values="bias" in of_fc2 or saved.fc2.bias is not None,
            is_gradient=True,
        )
        back = self._through_fc2(saved, read, needs_grad, through)
        overlaps = saved.fc1.recipe is None and isinstance(dy, Tensor)
        independent = kernels.Independent.of(len(needs_grad & _PRODUCTS)) if overlaps else None
        grads: dict[str, Gradient] = filed(FC2, self._fc2_grads(saved, read, back, of_fc2, independent))
        if of_fc1 and back.preact is not None:
            grads |= filed(FC1, self.fc1.grads_of(saved.fc1, back.preact, of_fc1, independent, back.bias))
        if back.scales is not None:
            grads |= _scale_grads(saved, read, back.scales, needs_grad)
        return grads | vector_grads(self.act, back.vectors, needs_grad)

    def _recomputed(self, saved: Saved) -> Tensor:
        """The pre-activation, from the rows of x by the forward's kernel, bit-identical."""
        fc1, sizes, bias_scale = saved.fc1, saved.fc1.split_sizes, flat(saved.fc1.bias_scale)
        activating = ActivatedProduct(spec_of(self.act), ActivationCall(flat(saved.scales), True, True, saved.vectors))
        read = tokens_for(None, None, fc1.x, sizes, rows=True, wgrad=False)  # type: ignore[arg-type]
        terms = Terms(bias=fc1.bias, bias_scale=bias_scale)
        preact, _ = activating(read, fc1.weight, sizes, terms)  # type: ignore[arg-type]
        assert preact is not None
        return preact

    def _through_fc2(self, saved: Saved, dy: Tokens, needs_grad: frozenset[str], through: bool) -> Through:
        """The gradient of the pre-activation, ``<u, act(h)>`` by row, ``s o act(h)``, and others that are wanted."""
        if saved.preact is None:
            return Through()
        total, trains = _product(flat(saved.scales), flat(saved.out_scales), dy.dtype), "fc2.weight" in needs_grad
        hidden = Hidden(saved.preact, saved.fc2.split_sizes, spec_of(self.act), total, saved.vectors, saved.encode)
        if not through:
            return Through(postact=hidden.for_wgrad(dy.recipe) if trains else None)
        of_fc1 = names_of(FC1, needs_grad)
        unscaled = "bias" in of_fc1 and saved.fc1.bias_scale is None
        wanted = Wanted(
            scales=not needs_grad.isdisjoint(("scales", "out_scale_scales")),
            vectors=wants_vectors(needs_grad),
            postact=trains,
            rows="x" in of_fc1,
            wgrad="weight" in of_fc1,
            values=not of_fc1.isdisjoint(("bias", "bias_scale")),
            bias_dtype=self.fc1.one_parameter("bias").dtype if unscaled else None,
        )
        assert saved.fc2.weight is not None
        return through_activation(dy, saved.fc2.weight, hidden, wanted, self.fc1)

    def _fc2_grads(
        self, saved: Saved, dy: Tokens, back: Through, needs: frozenset[str], independent: kernels.Independent | None
    ) -> dict[str, Gradient]:
        """The gradients of the second linear's parameters and bias scale, by its names."""
        fc2, values, out_scales = saved.fc2, dy.values, flat(saved.out_scales)
        of_weight = self.fc2.weight_grads(dy.for_wgrad, back.postact, fc2.split_sizes, needs, dy.number, independent)
        grads: dict[str, Gradient] = {**of_weight}
        if "bias" in needs and values is not None:
            factors = _product(flat(fc2.bias_scale), out_scales, dy.dtype)
            grads |= self.fc2.bias_grads(values, fc2.split_sizes, factors)
        if "bias_scale" in needs and values is not None and fc2.bias is not None and fc2.bias_scale is not None:
            dots = kernels.row_dots(values, fc2.bias, fc2.split_sizes, _wide(fc2.bias_scale.dtype))
            dots = dots if out_scales is None else dots * out_scales
            grads["bias_scale"] = dots.to(fc2.bias_scale.dtype).view_as(fc2.bias_scale)
        return grads


def _scale_grads(saved: GroupedMLP.Saved, dy: Tokens, dots: Tensor, needs: frozenset[str]) -> dict[str, Gradient]:
    """The gradients of the scales, from ``<u, act(h)>`` by row."""
    grads: dict[str, Gradient] = {}
    scales, out_scales, fc2 = saved.scales, saved.out_scales, saved.fc2
    if scales is not None and "scales" in needs:
        ds = dots if out_scales is None else dots * out_scales.reshape(-1)
        grads["scales"] = ds.to(scales.dtype).view_as(scales)
    if out_scales is not None and "out_scale_scales" in needs:
        do = dots if scales is None else dots * scales.reshape(-1)
        if fc2.bias is not None and dy.values is not None:
            bias_dots, bias_scale = kernels.row_dots(dy.values, fc2.bias, fc2.split_sizes, dots.dtype), fc2.bias_scale
            do = do + (bias_dots if bias_scale is None else bias_dots * bias_scale.reshape(-1))
        grads["out_scale_scales"] = do.to(out_scales.dtype).view_as(out_scales)
    return grads


def _product(a: Tensor | None, b: Tensor | None, rows: torch.dtype) -> Tensor | None:
    """The product of two factors in at least float32, and no narrower than the rows: it is rounded with them, once."""
    if a is None or b is None:
        one = b if a is None else a
        return None if one is None else one.to(_wide(one.dtype))
    return a.to(_wide(torch.promote_types(torch.promote_types(a.dtype, b.dtype), rows))) * b


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
