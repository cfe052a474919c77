"""A grouped linear and a chain whose gradients are a kernel of their own.

There are two kinds: a chain that adds a matrix, which the epilogue of a backward does not read, and one that only adds
and multiplies. The second keeps no pre-activation where no gradient reads one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import (
    Buffer,
    FusedOp,
    Gradient,
    Grads,
    Keyword,
    Match,
    Op,
    Pattern,
    Promises,
    Run,
    one_or_run,
    register_fusion,
)
from ...fuser.compiler.legality import last
from .. import kernels
from ..basic.bias import Bias
from ..basic.link import Link
from ..basic.residual import AddExtraInput
from ..grouped import link_rows
from ..grouped.grouped_linear import GroupedLinear, LinearCall, flat, with_rows_of
from ..kernels import ActivationCall
from ..quantized.activation import ActivatedProduct
from ..quantized.linear import in_force
from .activation_role import PREFIX, is_chain, shares_groups
from .parts import FC1, filed, names_of
from .pointwise_chain import AFFINE, LINKS, PointwiseChain, has_function

_SIZES = "split_sizes"


def _adds_a_matrix(ops: Sequence[Op]) -> bool:
    return is_chain(ops) and any(isinstance(op, AddExtraInput) for op in ops)


def _is_supported(match: Match) -> bool:
    return match.act.link is not None


def _reads_one_number(match: Match) -> bool:
    return len(match.act.link.rows) < 2


def _is_unquantized(match: Match) -> bool:
    return in_force(match.fc1.recipe) is None


def _ends_in_zeros(match: Match) -> bool:
    """Whether rows outside of all groups agree with the unfused ops: they are zero, or no op reads them.

    There a chain with a function has the value of zero, and a chain that adds has the added term.
    """
    ops = [match.part(name) for name in match.nodes if name != "fc1"]
    if has_function(ops) or not any(isinstance(op, Bias | AddExtraInput) for op in ops):
        return True
    readers = match.graph.readers(last(match))
    return bool(readers) and all(_is_of_same_groups(match, *reader) for reader in readers)


def _is_of_same_groups(match: Match, node: str, port: str, _: str) -> bool:
    is_linear = isinstance(match.graph.op(node), GroupedLinear) and port == "x"
    return is_linear and match.graph.sources(node).get(_SIZES) == match.source("fc1", _SIZES)


def _pattern(run: Run) -> Pattern:
    return (
        Pattern.path(fc1=GroupedLinear, act=one_or_run((), run))
        .absent("output", "fc1")
        .where("act has operations that kernels do not know", _is_supported)
        .where("act reads more than one number of a row", _reads_one_number)
        .where("act and fc1 read different split_sizes", shares_groups)
        .where("fc1 follows a recipe, and quantised products end in no chain but an activation's", _is_unquantized)
        .where("rows past the last group would be zero, and not what act adds", _ends_in_zeros)
    )


@register_fusion(_pattern(Run(AFFINE, PointwiseChain)), priority=-5)
class GroupedLinearChain(FusedOp):
    """A grouped linear and a chain that adds and multiplies: one kernel forward, another for the chain's gradients.

    It keeps x, and the tensors that gradients read.
    """

    promises = Promises(replayable=True)
    fc1: GroupedLinear
    act: PointwiseChain

    class Saved(NamedTuple):
        fc1: GroupedLinear.Saved
        act: link_rows.Saved

    def __init__(self, **roles: Any) -> None:
        super().__init__(**roles)
        assert self.act.link is not None
        self.link: Link = self.act.link
        of_chain = {f"act_{name}": keyword for name, keyword in self.act.keywords.items() if name != _SIZES}
        self.keywords: dict[str, Keyword] = {**type(self).keywords, **of_chain}

    def takes(self, role: str, keyword: str) -> str | None:
        first, _, member = role.partition(".")
        if first != "act" or keyword == _SIZES:
            return super().takes(role, keyword)
        return f"act_{self.act.takes(member, keyword) if member else keyword}"

    def fwd(
        self,
        x: Tensor,
        *,
        split_sizes: Tensor,
        grad_input: Buffer | None = None,
        fc1_bias_scale: Tensor | None = None,
        needs_grad: frozenset[str],
        autocast_dtype: torch.dtype | None,
        x_is_inner: bool,
        **keywords: Any,
    ) -> tuple[Tensor, Saved]:
        link, columns, needs = self.link, dict(self.act.inputs()), self._needs_of_chain(needs_grad)
        by_keyword = {name: keywords[f"act_{name}"] for name in link.rows + link.matrices}
        operands = link_rows.LinkOperands(link, by_keyword, columns, None)
        spec, keep_preact = link.forward_spec, link_rows.reads_x(link, needs)
        assert spec is not None
        sizes = kernels.as_split_sizes(split_sizes, x.device)
        call = LinearCall(sizes, names_of(FC1, needs_grad), fc1_bias_scale, grad_input, x.shape, x_is_inner)
        read = link_rows.vectors_of(link, columns), operands.matrices()
        behind = ActivationCall(flat(next(iter(operands.numbers()), None)), keep_preact, False, *read)
        activating = ActivatedProduct(spec, behind)
        (preact, hidden), fc1 = self.fc1.multiply(self.fc1.reads(x, call, autocast_dtype), call, activating)
        of_groups = operands._replace(split_sizes=None if link.groups is None else sizes)
        assert hidden.values is not None
        return with_rows_of(x, hidden.values), self.Saved(fc1, link_rows.saved(of_groups, preact, needs))

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        needs = names_of(FC1, needs_grad)
        of_chain = link_rows.backward(
            self.link, saved.act, dy, dict(self.act.inputs()), self._needs_of_chain(needs_grad)
        )
        grads: dict[str, Gradient] = {self._outer_name(n): gradient for n, gradient in of_chain.items() if n != "x"}
        if not needs:
            return grads
        dpreact = of_chain["x"]
        assert isinstance(dpreact, Tensor)
        return grads | filed(FC1, self.fc1.bwd(saved.fc1, dpreact, needs_grad=needs))

    def _needs_of_chain(self, needs_grad: frozenset[str]) -> frozenset[str]:
        """The gradients that the chain must give, by its names."""
        names = [*self.link.rows, *self.link.columns, *self.link.matrices]
        wanted = {name for name in names if self._outer_name(name) in needs_grad}
        return frozenset(wanted | ({"x"} if names_of(FC1, needs_grad) else set()))

    def _outer_name(self, name: str) -> str:
        """The fused op's name for an operand of the chain."""
        return f"{PREFIX}{name}" if name in self.link.columns else f"act_{name}"


@register_fusion(_pattern(Run(LINKS, PointwiseChain, _adds_a_matrix, shortest=1)), priority=25)
class GroupedLinearResidual(GroupedLinearChain):
    """A grouped linear and a chain that adds a matrix."""
