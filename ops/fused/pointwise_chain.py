"""Pointwise ops that follow one another, as one program: rounded once, it keeps only the inputs of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...fuser import FusedOp, Grads, Keyword, Match, Op, Pattern, Promises, Run, register_fusion
from ...fuser.contract.tracing import note
from .. import kernels
from ..basic.bias import Bias
from ..basic.glu import Activated
from ..basic.link import Link
from ..basic.residual import AddExtraInput
from ..basic.scale import ConstantScale, Scale
from ..grouped import link_rows
from ..grouped.pointwise import Pointwise
from ..programs.compose import composed
from ..programs.program import Program
from ..values.activation_spec import ActivationSpec
from ..values.checks import is_dense

FUNCTIONS = (Activated, Pointwise)
AFFINE = (Scale, ConstantScale, Bias)
LINKS = (*FUNCTIONS, *AFFINE, AddExtraInput)
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class PointwiseChain(FusedOp):
    """Consecutive pointwise ops as one kernel forward and one backward; without kernels the ops run one by one."""

    promises = Promises(replayable=True)

    def __init__(self, **roles: Any) -> None:
        super().__init__(**roles)
        self.keywords = self._keywords_of_parts()
        if any("split_sizes" in part.keywords for part in self.parts.values()):
            others = {name: keyword for name, keyword in self.keywords.items() if not name.endswith("split_sizes")}
            self.keywords = {**others, "split_sizes": Keyword(required=True, tensor=True)}
        parts: Iterable[Any] = self.parts.values()
        links = [part.link for part in parts if part.link is not None]
        self.link = self._composed(links) if len(links) == len(roles) else None

    def _composed(self, links: Sequence[Link]) -> Link | None:
        """The link that the parts are together; None if more than one has gate and up."""
        gates = [i for i, link in enumerate(links) if link.gated]
        if len(gates) > 1:
            return None
        by_role = list(zip(self.parts, links, strict=True))
        return Link(
            composed(tuple([link.program for link in links])),
            tuple([str(self.takes(role, name)) for role, link in by_role for name in link.rows]),
            tuple([f"{role}.{name}" for role, link in by_role for name in link.columns]),
            tuple([str(self.takes(role, name)) for role, link in by_role for name in link.matrices]),
            tuple([number for link in links for number in link.constants]),
            bool(gates),
            links[gates[0]].block if gates else None,
            next((link.groups for link in links if link.groups is not None), None),
        )

    @property
    def program(self) -> Program | None:
        """The program of the chain; None if kernels do not know it."""
        return None if self.link is None else self.link.program

    @property
    def spec(self) -> ActivationSpec | None:
        """The chain as an :class:`ActivationSpec`; None if kernels have no such activation."""
        return None if self.link is None else self.link.spec

    def fwd(
        self, x: Tensor, *, needs_grad: frozenset[str], autocast_dtype: torch.dtype | None, **keywords: Any
    ) -> tuple[Any, Any]:
        link = self.link
        if link is not None and x.dtype in DTYPES and x.dim() and is_dense(x):
            by_keyword, sizes = {n: keywords[n] for n in link.rows + link.matrices}, keywords.get("split_sizes")
            sizes = None if sizes is None else kernels.as_split_sizes(sizes, x.device)
            operands = link_rows.LinkOperands(link, by_keyword, dict(self.inputs()), sizes)
            refusal = link_rows.refusal(operands, x)
            if refusal is None:
                return link_rows.forward(operands, x, needs_grad)
            note(f"the ops run one by one: {refusal}")
        return super().fwd(x, needs_grad=needs_grad, autocast_dtype=autocast_dtype, **keywords)

    def bwd(self, saved: Any, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        if not isinstance(saved, link_rows.Saved) or self.link is None:
            return super().bwd(saved, dy, needs_grad=needs_grad)
        return link_rows.backward(self.link, saved, dy, dict(self.inputs()), needs_grad)


def is_run(ops: Sequence[Op]) -> bool:
    """Whether ops are a chain: all but the two whose kernels are compiled ahead."""
    return not (len(ops) == 2 and isinstance(ops[0], Activated) and isinstance(ops[1], Scale))


def has_function(ops: Sequence[Op]) -> bool:
    """Whether one of the ops does more than add and multiply."""
    return any(isinstance(op, FUNCTIONS) for op in ops)


def number_of_gates(ops: Sequence[Op]) -> int:
    """How many of the ops have gate and up."""
    gates = [op.spec.gated if isinstance(op, Activated) else getattr(op, "halves", None) is not None for op in ops]
    return sum(gates)


RUN = Run(LINKS, PointwiseChain, is_run)


def _ops(match: Match) -> list[Any]:
    return [match.part(name) for name in match.nodes]


def _are_supported(match: Match) -> bool:
    return all(op.link is not None for op in _ops(match))


def _links(match: Match) -> list[Link]:
    return [op.link for op in _ops(match) if op.link is not None]


def _one_gate(match: Match) -> bool:
    return number_of_gates(_ops(match)) < 2


def _same_groups(match: Match) -> bool:
    return len({link.groups for link in _links(match) if link.groups is not None}) < 2


register_fusion(
    Pattern.of_run(RUN)
    .where("an op has operations that kernels do not know", _are_supported)
    .where("more than one op has gate and up", _one_gate)
    .where("numbers of columns are of different groups", _same_groups),
    priority=-10,  # behind fusions of users: whatever they take, the rest is still a chain
)(PointwiseChain)
