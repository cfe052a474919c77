"""The experts of a mixture-of-experts layer: GroupedLinear -> activation -> [Scale] -> GroupedLinear -> [Scale].

With s the scales before the second linear and o those after it (1 where there are none), per row:
``preact = W1 x + b1``, ``a = act(preact)``, ``y = o (W2 (s a) + b2)``. The backward keeps neither ``a`` nor ``y``: with
``u = W2^T dy`` it is ``da = s o u``, ``ds = o <u, a>``, ``do = s <u, a> + <dy, b2>``, ``dW2 = dy (s o a)^T``: one
kernel that is given the product ``s o`` serves both places of the scale.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import Buffer, FusedOp, Gradient, Grads, Match, Pattern, Promises, optional, register_fusion
from ...fuser.contract import tracing as trace
from .. import kernels
from ..basic.glu import Activated
from ..basic.scale import Scale
from ..formats.copies import Columns, Weight
from ..formats.recipe import Recipe
from ..grouped.grouped_linear import GroupedLinear, as_rows, with_rows_of
from ..grouped.pointwise import Pointwise
from ..kernels import ActivationGrads, Layout
from ..quantized.linear import (
    HiddenActivation,
    ThroughActivation,
    Wanted,
    activating,
    followed_by,
    hidden_for_wgrad,
    in_force,
    through_activation,
)
from ..quantized.operands import GatheredTokens, TokenCopies, copies_of
from ..values.switches import active_switches
from . import fc1 as first_linear
from .activation_role import (
    BETWEEN_LINEARS,
    keyword_of,
    spec_of,
    vector_grads,
    vectors_of,
    wants_vectors,
    with_activation,
)
from .fc1 import FC1, FirstLinear, OpPart, filed, flat, names_of
from .pointwise_chain import PointwiseChain

_FC2 = OpPart("fc2", (("fc2_bias_scale", "bias_scale"),))
_PRODUCTS = frozenset({"x", "fc1.weight", "fc2.weight"})  # of a backward, that do not need one another


def _carries_scales(recipe: Recipe | None) -> bool:
    """Whether scales come from steps before, whose amaxes are those of the tensors as they are."""
    return recipe is not None and recipe.steps is not None


def _buffer_holds_y(match: Match) -> bool:
    """A buffer of the second linear holds what that linear gives, before a scale that follows it."""
    return match.out_scale is None or not match.reads("fc2", "output")


_PATH = Pattern.path(
    fc1=GroupedLinear, act=BETWEEN_LINEARS, scale=optional(Scale), fc2=GroupedLinear, out_scale=optional(Scale)
)


def with_one_recipe(pattern: Pattern) -> Pattern:
    """Adds two conditions: both linears use one recipe, and fusing does not change which tensors delayed scales see."""
    return pattern.where(
        "fc1 and fc2 have different recipes", lambda m: followed_by(m.fc1) == followed_by(m.fc2)
    ).where(
        "the scale after fc2 would change the amaxes that delayed scales come from",
        lambda m: m.out_scale is None or not _carries_scales(followed_by(m.fc1)),
    )


@register_fusion(
    with_one_recipe(
        with_activation(_PATH)
        .shares("split_sizes", "fc1", "fc2")
        .absent("output", "fc1")
        .absent("grad_input", "fc2")
        .where("fc1 and fc2 have different numbers of groups", lambda m: m.fc1.num_groups == m.fc2.num_groups)
    ).where("the scale after fc2 would change what its output buffer holds", _buffer_holds_y),
    priority=30,
)
class GroupedMLP(FusedOp):
    """Keeps x, the pre-activation, the scales, the split sizes and the weights; computes the activation again."""

    promises = Promises(replayable=True)
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
        hidden_scales: Tensor | None = None

    def takes(self, role: str, keyword: str) -> str | None:
        return keyword_of(role, keyword) or super().takes(role, keyword)

    def fwd(
        self,
        x: Tensor,
        *,
        split_sizes: Tensor,
        scales: Tensor | None = None,
        out_scale_scales: Tensor | None = None,
        output: Buffer | None = None,
        grad_input: Buffer | None = None,
        fc1_bias_scale: Tensor | None = None,
        fc2_bias_scale: Tensor | None = None,
        needs_grad: frozenset[str],
        autocast_dtype: torch.dtype | None,
        x_is_inner: bool,
    ) -> tuple[Tensor, Saved]:
        return self.by_kernels(
            x,
            split_sizes=split_sizes,
            scales=scales,
            out_scale_scales=out_scale_scales,
            output=output,
            grad_input=grad_input,
            fc1_bias_scale=fc1_bias_scale,
            fc2_bias_scale=fc2_bias_scale,
            needs_grad=needs_grad,
            autocast_dtype=autocast_dtype,
            x_is_inner=x_is_inner,
        )

    def by_kernels(
        self,
        x: Tensor,
        *,
        split_sizes: Tensor,
        scales: Tensor | None = None,
        out_scale_scales: Tensor | None = None,
        output: Tensor | None = None,
        grad_input: Tensor | None = None,
        fc1_bias_scale: Tensor | None = None,
        fc2_bias_scale: Tensor | None = None,
        arrived: Tensor | None = None,
        slots: kernels.RowSlots | None = None,
        needs_grad: frozenset[str],
        autocast_dtype: torch.dtype | None,
        x_is_inner: bool,
    ) -> tuple[Tensor, Saved]:
        """The forward, one kernel after the other. The experts of an :class:`EPGroupedMLP` are given more.

        Args:
            arrived: of rows that may come meanwhile.
            slots: where its rows go; what stands in ``output`` then may be anything.
        """
        vectors, keep_preact = vectors_of(self.act), reads_preact(needs_grad)
        recompute = active_switches().recompute and keep_preact and self._recomputes()
        fc1 = first_linear.forward(
            *(self.fc1, spec_of(self.act), x, split_sizes, scales, grad_input, fc1_bias_scale),
            *(_kept_for_fc1(needs_grad, self.fc1.has_bias, recompute), autocast_dtype),
            keep_preact=keep_preact and not recompute,
            tail_unspecified=True,
            x_is_inner=x_is_inner,
            vectors=vectors,
            reader=self.fc2,
            arrived=arrived,
        )
        factors: dict[str, Any] = {
            "out": None if output is None else output.view(-1, self.fc2.out_features),
            "bias": self._bias(),
            "bias_scale": flat(fc2_bias_scale),
            "row_scale": flat(out_scale_scales),
        }
        if slots is not None:
            factors["slots"] = slots
        y, fc2 = self._second(fc1, fc2_bias_scale, _kept_for_fc2(needs_grad, self.fc2.has_bias), factors)
        recipe = fc1.saved.recipe
        hidden_scales = None if recipe is None else recipe.scales_of_forward(self.fc2)
        saved = self.Saved(fc1.saved, fc2, fc1.preact, scales, out_scale_scales, vectors, hidden_scales)
        return with_rows_of(x, y) if output is None else output.detach(), saved

    def quantized_fwd(
        self,
        recipe: Recipe,
        x: Tensor | GatheredTokens,
        split_sizes: Tensor,
        scales: Tensor | None,
        out_scales: Tensor | None,
        needs_grad: frozenset[str],
    ) -> tuple[Tensor, Saved]:
        """The output as rows and the saved state, from rows that are gathered while they are quantised.

        Args:
            recipe: one whose scales come from the rows themselves.
        """
        needs, vectors = names_of(FC1, needs_grad), vectors_of(self.act)
        tokens = x.tokens if isinstance(x, GatheredTokens) else x
        copies = copies_of(recipe, x, split_sizes, rows=True, wgrad="weight" in needs)
        bias = {"bias": self.fc1.matrices("bias") if self.fc1.has_bias else None}
        hidden_of = HiddenActivation(spec_of(self.act), flat(scales), vectors)
        activate = activating(hidden_of, reads_preact(needs_grad), self.fc2)
        (preact, hidden), first = self.fc1.quantized_fwd(
            recipe, tokens, copies, split_sizes, None, None, needs, True, bias, activate
        )
        factors = {"bias": self._bias(), "row_scale": flat(out_scales)}
        kept = _kept_for_fc2(needs_grad, self.fc2.has_bias)
        y, fc2 = self._second(FirstLinear(hidden, preact, first), None, kept, factors)
        return y, self.Saved(first, fc2, preact, scales, out_scales, vectors)

    def _second(
        self, fc1: FirstLinear, bias_scale: Tensor | None, needs: frozenset[str], factors: dict[str, Any]
    ) -> tuple[Tensor, GroupedLinear.Saved]:
        """The output as rows, and the saved state of the second linear."""
        postact, sizes, recipe = fc1.postact, fc1.saved.split_sizes, fc1.saved.recipe
        if isinstance(postact, TokenCopies):
            assert recipe is not None
            assert postact.rows is not None
            slots = factors.pop("slots", None)
            y, saved = self.fc2.quantized_fwd(
                recipe, postact.rows.data, postact, sizes, bias_scale, None, needs, True, factors
            )
            if slots is not None:
                kernels.send_rows(y, slots)
            return y, saved
        weight = self.fc2.matrices("weight", postact.dtype)
        y = kernels.grouped_gemm(Layout.NT, postact, weight, sizes, **factors)
        assert isinstance(y, Tensor)
        return y, self.fc2.saved(postact, postact, weight, sizes, bias_scale, None, needs, True)

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        rows = as_rows(dy)
        if saved.fc1.recipe is not None:
            return self.quantized_bwd(saved.fc1.recipe, saved, rows, needs_grad)
        if saved.preact is None and reads_preact(needs_grad):
            assert isinstance(saved.fc1.x, Tensor)
            saved = self.recomputed(saved, saved.fc1.x)
        activated = self.through_fc2(saved, rows, needs_grad)
        independent = kernels.Independent.of(len(needs_grad & _PRODUCTS))
        outer = names_of(_FC2, needs_grad)
        fc2 = self._fc2_grads(saved, rows, activated.postact, outer, independent=independent)
        grads: dict[str, Gradient] = filed(_FC2, fc2)
        needs = names_of(FC1, needs_grad)
        if needs:
            inner = first_linear.backward(self.fc1, saved.fc1, activated.preact, needs, activated.bias, independent)
            grads |= filed(FC1, inner)
        if activated.scales is not None:
            grads |= self.scale_grads(saved, rows, activated.scales, needs_grad)
        return grads | vector_grads(self.act, activated.vectors, needs_grad)

    def quantized_bwd(
        self, recipe: Recipe, saved: Saved, dy: Tensor | GatheredTokens, needs_grad: frozenset[str]
    ) -> Grads:
        """:meth:`bwd` of a call that followed a recipe.

        Args:
            dy: gathered as it is quantised only where :meth:`reads_values` does not hold.
        """
        through = self._through_quantized(recipe, saved, dy, needs_grad)
        needs, outer = names_of(FC1, needs_grad), names_of(_FC2, needs_grad)
        values, left = dy if isinstance(dy, Tensor) else dy.tokens, (through.dy.for_wgrad, through.dy.number)
        grads: dict[str, Gradient] = filed(_FC2, self._fc2_grads(saved, values, through.postact, outer, *left))
        if needs and through.preact is not None:
            grads |= filed(FC1, first_linear.backward(self.fc1, saved.fc1, through.preact, needs))
        if through.scales is not None:
            grads |= self.scale_grads(saved, values, through.scales, needs_grad)
        return grads | vector_grads(self.act, through.vectors, needs_grad)

    def reads_values(self, recipe: Recipe, saved: Saved, needs_grad: frozenset[str]) -> bool:
        """Whether a backward reads the gradient of the output as it was before it is quantised."""
        biased = "fc2.bias" in needs_grad or saved.fc2.bias is not None
        return biased or _carries_scales(recipe) or (not recipe.quantises_wgrad and _trains(needs_grad))

    def _through_quantized(
        self, recipe: Recipe, saved: Saved, dy: Tensor | GatheredTokens, needs_grad: frozenset[str]
    ) -> ThroughActivation:
        """:meth:`through_fc2` of a call that followed a recipe."""
        sizes, weight, trains = saved.fc2.split_sizes, saved.fc2.weight, _trains(needs_grad)
        through = weight is not None and _through(needs_grad)
        of_step = recipe.on(self.fc2, "gradient", dy, sizes) if isinstance(dy, Tensor) else recipe
        copies = copies_of(of_step, dy, sizes, rows=through, wgrad=trains, is_gradient=True)
        total = _product(flat(saved.scales), flat(saved.out_scales), copies.dtype)
        hidden = HiddenActivation(spec_of(self.act), total, saved.vectors)
        if saved.preact is None:
            return ThroughActivation(copies, None, None, None)
        if not through:
            options = recipe, saved.preact, sizes, hidden, saved.hidden_scales
            return ThroughActivation(copies, None, None, hidden_for_wgrad(*options) if trains else None)
        inner = names_of(FC1, needs_grad)
        wanted = Wanted(
            scales=not needs_grad.isdisjoint(("scales", "out_scale_scales")),
            weight=trains,
            inner_rows="x" in inner,
            inner_weight="weight" in inner,
            values=not inner.isdisjoint(("bias", "bias_scale")),
            vectors=wants_vectors(needs_grad),
        )
        assert isinstance(weight, Weight)
        return through_activation(
            recipe, copies, weight, saved.preact, sizes, hidden, wanted, self.fc1, saved.hidden_scales
        )

    def _recomputes(self) -> bool:
        """Whether the backward computes the pre-activation again, where the switches say so."""
        if in_force(self.fc1.recipe) is not None:
            trace.note("recompute: quantised experts keep the pre-activation")
            return False
        trace.note("recompute: the pre-activation is computed again in the backward")
        return True

    def recomputed(self, saved: Saved, x: Tensor) -> Saved:
        """The saved state with the pre-activation, recomputed from the rows of x by the forward's kernel,
        bit-identical.
        """
        fc1 = saved.fc1
        preact, _ = kernels.grouped_linear_activation(
            x,
            fc1.weight,  # type: ignore[arg-type]
            fc1.split_sizes,
            spec_of(self.act),
            keep_preact=True,
            tail_unspecified=True,
            vectors=saved.vectors,
            bias=fc1.bias,
            bias_scale=flat(fc1.bias_scale),
            scales=flat(saved.scales),
        )
        return saved._replace(preact=preact)

    def _bias(self) -> kernels.Matrices | None:
        return self.fc2.matrices("bias") if self.fc2.has_bias else None

    def through_fc2(self, saved: Saved, dy: Tensor, needs_grad: frozenset[str]) -> ActivationGrads:
        """The gradient of the pre-activation, ``<u, a>`` by row, ``s o a``, and others: those that are wanted."""
        total, vectors = _product(flat(saved.scales), flat(saved.out_scales), dy.dtype), saved.vectors
        weight, sizes, spec = saved.fc2.weight, saved.fc2.split_sizes, spec_of(self.act)
        if saved.preact is None:
            return ActivationGrads(dy, None, None)
        if weight is None or isinstance(weight, Weight) or not _through(needs_grad):
            of_groups = (vectors, None if vectors is None else sizes)
            return ActivationGrads(dy, None, kernels.activate(saved.preact, spec, total, *of_groups))
        return kernels.grouped_linear_activation_backward(
            dy,
            weight,
            saved.preact,
            sizes,
            spec,
            scales=total,
            want_scales=not needs_grad.isdisjoint(("scales", "out_scale_scales")),
            want_postact=_trains(needs_grad),
            bias_dtype=self._bias_dtype(saved, needs_grad),
            vectors=vectors,
            want_vectors=wants_vectors(needs_grad),
        )

    def _bias_dtype(self, saved: Saved, needs_grad: frozenset[str]) -> torch.dtype | None:
        """The dtype of fc1's bias gradient if that is the plain column sum of dpreact; else None."""
        unscaled = "fc1.bias" in needs_grad and saved.fc1.bias_scale is None
        return self.fc1.one_parameter("bias").dtype if unscaled else None

    def _fc2_grads(
        self,
        saved: Saved,
        dy: Tensor,
        postact: Tensor | Columns | None,
        needs_grad: frozenset[str],
        for_wgrad: Tensor | Columns | None = None,
        number: int = 0,
        independent: kernels.Independent | None = None,
    ) -> Grads:
        """The gradients of the second linear's parameters and bias scale, by its names.

        Args:
            for_wgrad: the operand of the weight gradient in place of ``dy``, with ``number`` rows.
        """
        fc2, sizes, out_scales = saved.fc2, saved.fc2.split_sizes, flat(saved.out_scales)
        left = dy if for_wgrad is None else for_wgrad
        grads: dict[str, Gradient] = dict(self.fc2.weight_grads(left, postact, sizes, needs_grad, number, independent))
        if "bias" in needs_grad:
            grads |= self.bias_grads(saved, dy)
        if "bias_scale" in needs_grad and fc2.bias is not None and fc2.bias_scale is not None:
            dots = kernels.row_dots(dy, fc2.bias, sizes, _wide(fc2.bias_scale.dtype))
            dots = dots if out_scales is None else dots * out_scales
            grads["bias_scale"] = dots.to(fc2.bias_scale.dtype).view_as(fc2.bias_scale)
        return grads

    def bias_grads(self, saved: Saved, dy: Tensor) -> Grads:
        """The gradient of the second linear's bias, by its name."""
        factors = _product(flat(saved.fc2.bias_scale), flat(saved.out_scales), dy.dtype)
        return self.fc2.bias_grads(dy, saved.fc2.split_sizes, factors)

    def scale_grads(self, saved: Saved, dy: Tensor, dots: Tensor, needs_grad: frozenset[str]) -> dict[str, Gradient]:
        """The gradients of the scales, from ``<u, a>`` by row: ``ds = o <u, a>`` and ``do = s <u, a> + <dy, b2>``."""
        grads: dict[str, Gradient] = {}
        scales, out_scales = saved.scales, saved.out_scales
        if scales is not None and "scales" in needs_grad:
            ds = dots if out_scales is None else dots * out_scales.reshape(-1)
            grads["scales"] = ds.to(scales.dtype).view_as(scales)
        if out_scales is not None and "out_scale_scales" in needs_grad:
            do = dots if scales is None else dots * scales.reshape(-1)
            if saved.fc2.bias is not None:
                bias_dots = kernels.row_dots(dy, saved.fc2.bias, saved.fc2.split_sizes, dots.dtype)
                bias_scale = flat(saved.fc2.bias_scale)
                do = do + (bias_dots if bias_scale is None else bias_dots * bias_scale)
            grads["out_scale_scales"] = do.to(out_scales.dtype).view_as(out_scales)
        return grads


@lru_cache(maxsize=4096)
def _kept_for_fc1(needs_grad: frozenset[str], has_bias: bool, recompute: bool) -> frozenset[str]:
    """The gradients that decide what is kept of the first linear: all that it reads, where it is computed again."""
    everything = {"x", "weight", *(["bias_scale"] if has_bias else [])} if recompute else set()
    return names_of(FC1, needs_grad) | everything


@lru_cache(maxsize=4096)
def _kept_for_fc2(needs_grad: frozenset[str], has_bias: bool) -> frozenset[str]:
    """The gradients that decide what is kept of the second linear: all but its weight's, whose input is made again."""
    needs = set(names_of(_FC2, needs_grad)) | ({"x"} if _through(needs_grad) else set())
    needs |= {"bias_scale"} if has_bias and "out_scale_scales" in needs_grad else set()
    return frozenset(needs - {"weight"})


@lru_cache(maxsize=4096)
def reads_preact(needs_grad: frozenset[str]) -> bool:
    """Whether a backward reads the pre-activation; it is computed again where it is not kept."""
    return _through(needs_grad) or _trains(needs_grad)


@lru_cache(maxsize=4096)
def _through(needs_grad: frozenset[str]) -> bool:
    """Whether a wanted gradient lies behind the second linear."""
    return any(not name.startswith("fc2") for name in needs_grad)


def _trains(needs_grad: frozenset[str]) -> bool:
    """Whether the second linear's weights are wanted, which need its input."""
    return "fc2.weight" in needs_grad


def _product(a: Tensor | None, b: Tensor | None, rows: torch.dtype) -> Tensor | None:
    """The product of two factors in at least float32, and no narrower than the rows: it is rounded with them, once."""
    if a is None or b is None:
        one = b if a is None else a
        return None if one is None else one.to(_wide(one.dtype))
    return a.to(_wide(torch.promote_types(torch.promote_types(a.dtype, b.dtype), rows))) * b


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
