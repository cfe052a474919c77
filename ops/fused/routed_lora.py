"""Routed experts with low-rank adapters, from tokens to tokens: the weighted sum of two GroupedLoRA and an activation.

With ``v = dy B2`` and ``u = dy W2 + v A2``, which is ``dy (W2 + B2 A2)``, and s the scales:
``dpreact`` comes from ``s u`` as without adapters, ``ds = <u, a> + <dy, b2>``, ``dA2 = v^T (s a)`` and
``dB2 = dy^T (A2 (s a))``. The forward scales the input of the second linear rather than its output, as all of these
read ``s a``. Each adapter adds its product to that of the weight within one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import Gradient, Grads, Pattern, Promises, register_fusion
from ...fuser.runtime.call import evaluate
from .. import kernels
from ..basic.glu import Activated
from ..basic.scale import Scale
from ..grouped.lora import GroupedLoRA, back_through, input_grad, lora_b_grad
from ..grouped.pointwise import Pointwise
from ..kernels import ActivationCall, ActivationGrads, Terms
from ..kernels.doors import routing as permutation
from ..kernels.doors.routing import Routing
from ..kernels.operators.outputs import WantedThrough
from ..quantized.linear import multiplies_apart, values_of
from ..routed.call import RoutedCall
from ..routed.moe import Combine, Dispatch
from .activation_role import (
    BETWEEN_LINEARS,
    spec_of,
    vector_grads,
    vectors_of,
    wants_vectors,
    with_activation,
)
from .pointwise_chain import PointwiseChain
from .routed import RoutedOp, routed, with_as_many_groups


def _pattern() -> Pattern:
    path = Pattern.path(
        dispatch=Dispatch, fc1=GroupedLoRA, act=BETWEEN_LINEARS, fc2=GroupedLoRA, scale=Scale, combine=Combine
    )
    return with_as_many_groups(with_activation(routed(path, ("scale",))))


@register_fusion(_pattern(), priority=40)
class RoutedLoRA(RoutedOp):
    """A routed layer with adapters (:class:`GroupedLoRA`), from tokens to tokens, as one op.

    It keeps the tokens, the permutation, the pre-activation, and R numbers per row and adapter. The backward computes
    the activation again, and gathers the rows again. A frozen weight needs no gradient product.
    """

    dispatch: Dispatch
    fc1: GroupedLoRA
    act: Activated | Pointwise | PointwiseChain
    fc2: GroupedLoRA
    scale: Scale
    combine: Combine
    promises = Promises(replayable=True)

    class Saved(NamedTuple):
        fc1: GroupedLoRA.Saved
        fc2: GroupedLoRA.Saved
        preact: Tensor | None
        scales: Tensor
        bias: Tensor | None
        routing: Routing
        weights_dtype: torch.dtype
        x_dtype: torch.dtype
        vectors: tuple[Tensor, ...] | None

    def run(self, call: RoutedCall) -> tuple[Tensor, Saved]:
        tokens, (routing, scales) = call.tokens(), call.route(self.dispatch.num_experts)
        sizes = routing.split_sizes
        needs = _needs(call.needs_grad)
        vectors = vectors_of(self.act)
        low1, preact, postact = self._through_fc1(tokens, routing, scales, vectors, needs.preact)
        low2 = self.fc2.project(postact, sizes).product
        bias_scale = scales if self.fc2.has_bias else None
        y = self.fc2.product(postact, low2, sizes, bias_scale=bias_scale, tail_unspecified=routing.is_native)
        del postact
        kept = self.Saved(
            _with_split_sizes(self.fc1.saved(tokens.dtype, tokens, low1, sizes, needs.fc1), None),
            _with_split_sizes(self.fc2.saved(tokens.dtype, None, low2, sizes, needs.fc2), None),
            preact,
            scales,
            self._kept_bias(call.needs_grad),
            routing,
            call.top_k_weights.dtype,
            call.x.dtype,
            vectors,
        )
        return permutation.unpermute(y, routing), kept

    def _through_fc1(
        self,
        tokens: Tensor,
        routing: Routing,
        scales: Tensor,
        vectors: tuple[Tensor, ...] | None,
        keep_preact: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The rows' product with ``lora_a``, the pre-activation if it is kept, and the scaled hidden rows."""
        fc1, sizes = self.fc1, routing.split_sizes
        rows, low, _ = fc1.project(tokens, sizes, routing)
        assert rows is not None
        if fc1.multiplies_apart(rows):
            product = fc1.product(rows, low, sizes)
            postact = kernels.activate(product, spec_of(self.act), scales, *_of_groups(vectors, sizes))
            return low, product if keep_preact else None, postact
        preact, postact = kernels.grouped_linear_activation(
            rows,
            fc1.base(rows),
            sizes,
            spec_of(self.act),
            Terms(bias=fc1.matrices("bias") if fc1.has_bias else None, second=fc1.second(low)),
            ActivationCall(scales, keep_preact, True, vectors),
        )
        return low, preact, postact

    def _kept_bias(self, needs_grad: frozenset[str]) -> Tensor | None:
        wanted = self.fc2.has_bias and "top_k_weights" in needs_grad
        return self.fc2.one_parameter("bias") if wanted else None

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        needs, routing, sizes = _needs(needs_grad), saved.routing, saved.routing.split_sizes
        fc1, fc2 = (_with_split_sizes(part, sizes) for part in (saved.fc1, saved.fc2))
        saved = saved._replace(fc1=fc1, fc2=fc2)
        of_fc2 = self.fc2.through_lora_b(dy, saved.fc2, routing)
        rows, dlow2, _ = of_fc2
        assert rows is not None
        through = self._through_activation(saved, rows, dlow2, needs)
        grads = {f"fc2.{name}": gradient for name, gradient in lora_b_grad(of_fc2).items()}
        grads |= vector_grads(self.act, through.vectors, needs_grad)
        if "top_k_weights" in needs_grad:
            grads["top_k_weights"] = self._weight_grads(saved, rows, through.scales)
        if "fc2.bias" in needs_grad:
            grads["fc2.bias"] = kernels.column_sums(rows, sizes, self.fc2.one_parameter("bias").dtype, saved.scales)
        by_fc2 = self.fc2.parameter_grads(rows, dlow2, through.postact, sizes, needs.fc2)
        grads |= {f"fc2.{name}": evaluate(gradient) for name, gradient in by_fc2.items()}
        del rows, of_fc2
        if needs.fc1:
            grads |= self._fc1_grads(saved, through.preact, needs.fc1)
        return grads

    def _through_activation(self, saved: Saved, rows: Tensor, dlow: Tensor | None, needs: _Needs) -> ActivationGrads:
        """The gradient of the pre-activation, ``<u, a>`` by row, and ``s a``: those that are wanted."""
        preact, spec, vectors = saved.preact, spec_of(self.act), saved.vectors
        if preact is None:
            return ActivationGrads(rows, None, None)
        if saved.fc2.weight is None:
            of_groups = _of_groups(vectors, saved.routing.split_sizes)
            return ActivationGrads(rows, None, kernels.activate(preact, spec, saved.scales, *of_groups))
        if multiplies_apart(saved.fc2.weight, saved.fc2.recipe, rows, self.fc2.rank):
            dpostact, sizes = input_grad(rows, dlow, saved.fc2), saved.fc2.split_sizes
            read, sizes_of_groups = _of_groups(vectors, sizes)
            return kernels.activate_backward(
                *(dpostact, preact, spec, saved.scales),
                want_scales=needs.weights,
                want_postact=needs.postact,
                vectors=read,
                split_sizes=sizes_of_groups,
                want_vectors=needs.vectors,
            )
        return kernels.grouped_linear_activation_backward(
            rows,
            values_of(saved.fc2.weight, saved.fc2.recipe, rows),
            preact,
            saved.fc2.split_sizes,
            spec,
            scales=saved.scales,
            wanted=WantedThrough(needs.weights, needs.postact, needs.vectors),
            vectors=vectors,
            second=back_through(dlow, saved.fc2),
        )

    def _weight_grads(self, saved: Saved, rows: Tensor, dots: Tensor | None) -> Tensor:
        """The gradient [T, k] of the routing weights."""
        assert dots is not None
        if saved.bias is not None:
            dots = dots + kernels.row_dots(rows, saved.bias, saved.routing.split_sizes, dots.dtype)
        return permutation.by_slot(dots, saved.routing, saved.weights_dtype)

    def _fc1_grads(self, saved: Saved, dpreact: Tensor, needs: frozenset[str]) -> dict[str, Gradient]:
        sizes, routing = saved.routing.split_sizes, saved.routing
        through = self.fc1.through_lora_b(dpreact, saved.fc1)
        dlow, grads = through.product, lora_b_grad(through)
        if "x" in needs:
            rows = input_grad(dpreact, dlow, saved.fc1, tail_unspecified=routing.is_native)
            grads["x"] = permutation.unpermute(rows.to(saved.x_dtype), routing)
            del rows
        if "bias" in needs:
            grads["bias"] = kernels.column_sums(dpreact, sizes, self.fc1.one_parameter("bias").dtype)
        grads |= {name: evaluate(gradient) for name, gradient in self._gathered_grads(saved, dpreact, dlow, needs)}
        return {name if name == "x" else f"fc1.{name}": gradient for name, gradient in grads.items()}

    def _gathered_grads(
        self, saved: Saved, dpreact: Tensor, dlow: Tensor | None, needs: frozenset[str]
    ) -> Iterable[tuple[str, Gradient]]:
        """The gradients of fc1's parameters that multiply its input, whose rows are gathered once for all."""
        tokens, routing, sizes = saved.fc1.x, saved.routing, saved.routing.split_sizes
        if tokens is None:
            return
        if "weight" not in needs:
            yield "lora_a", self.fc1.lora_a_grad(dlow, tokens, sizes, routing)
            return
        inputs = permutation.permute(tokens, routing, fill=False)
        yield from self.fc1.parameter_grads(dpreact, dlow, inputs, sizes, needs).items()


def _of_groups(vectors: tuple[Tensor, ...] | None, split_sizes: Tensor) -> tuple[kernels.Operands, Tensor | None]:
    """The numbers of columns, and the rows of each group, which nothing reads without them."""
    return vectors, None if vectors is None else split_sizes


def _with_split_sizes(saved: GroupedLoRA.Saved, split_sizes: Any) -> GroupedLoRA.Saved:
    """Replaces the split sizes; None in the saved state, as they are part of the routing, which is kept."""
    return saved._replace(split_sizes=split_sizes)


class _Needs(NamedTuple):
    """The gradients that each linear must compute, by its own names, and those wanted of the backward between them."""

    fc1: frozenset[str]
    fc2: frozenset[str]
    weights: bool
    vectors: bool
    postact: bool
    preact: bool


@lru_cache(maxsize=4096)
def _needs(needs_grad: frozenset[str]) -> _Needs:
    fc1, fc2 = (
        {name.removeprefix(prefix) for name in needs_grad if name.startswith(prefix)} for prefix in ("fc1.", "fc2.")
    )
    fc1 |= needs_grad & {"x"}
    weights, vectors = "top_k_weights" in needs_grad, wants_vectors(needs_grad)
    postact = not fc2.isdisjoint(("weight", "lora_a"))
    through = bool(fc1 or weights or vectors)
    fc2 |= {"x"} if through else set()
    return _Needs(frozenset(fc1), frozenset(fc2), weights, vectors, postact, postact or through)
