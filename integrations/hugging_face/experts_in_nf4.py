"""Experts in NF4 as bitsandbytes stores them: five tensors of each matrix, and a JSON object of facts, as bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.formats.nf4 import NESTED_BLOCK, NF4_BLOCK, TABLE, Nested
from .stored_layouts import Layout, Piece

_FACTS = ".quant_state.bitsandbytes__nf4"
SUFFIXES = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _FACTS)
"""The ends of the names of the tensors of a matrix, after that of the weight."""
_DTYPES = ("bfloat16", "float16", "float32")


class ExpertsInNF4(NamedTuple):
    """The experts of a stack as bitsandbytes stores them: each section of the rows of each expert is a matrix.

    Attributes:
        layout: of the stack.
        sections: 2 of gate and up.
    """

    layout: Layout
    sections: int

    @property
    def is_nested(self) -> bool:
        return bool(self.layout.recipe.nested)  # type: ignore[attr-defined]

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, K] of a matrix that was quantised."""
        return self.layout.shape[1] // self.sections, self.layout.shape[2]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The tensors of a matrix, without the facts."""
        values = self.shape[0] * self.shape[1]
        blocks, number = values // NF4_BLOCK, torch.float32
        pieces = (
            Piece("", (values // 2, 1), torch.uint8),
            Piece(".absmax", (blocks,), torch.uint8 if self.is_nested else number),
            Piece(".quant_map", (len(TABLE),), number),
        )
        if not self.is_nested:
            return pieces
        nested = Piece(".nested_absmax", (-(-blocks // NESTED_BLOCK),), number)
        return (*pieces, nested, Piece(".nested_quant_map", (256,), number))

    def facts(self, dtype: str, offset: float) -> dict[str, Any]:
        """The facts of a matrix, in the order of bitsandbytes."""
        facts = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": dtype, "shape": list(self.shape)}
        nested = {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
        return facts | nested if self.is_nested else facts

    def read(self, where: str, tensors: dict[str, list[Tensor]]) -> tuple[torch.dtype, list[Tensor]]:
        """The dtype that was quantised, and the parts of the stack for a section, [E, numbers].

        Args:
            where: the name of a weight, with a star for the number of the expert.
            tensors: those of all experts by suffix.

        Raises:
            ValueError: one is missing, or has another form or content; names it.
        """
        groups = self.layout.shape[0]
        for suffix in (*[piece.suffix for piece in self.pieces], _FACTS):
            if len(tensors[suffix]) != groups:
                raise ValueError(f"{where}{suffix}: {len(tensors[suffix])} of {groups} experts have it, under NF4")
        for piece in self.pieces:
            for group, tensor in enumerate(tensors[piece.suffix]):
                if (why := piece.misfit(tensor)) is not None:
                    raise ValueError(f"{where.replace('*', str(group))}{piece.suffix}: {why}, for {self.layout.recipe}")
        stacks = {piece.suffix: torch.stack(tensors[piece.suffix]).flatten(1) for piece in self.pieces}
        _check_table(where, stacks[".quant_map"])
        facts = [self._checked(f"{where.replace('*', str(e))}{_FACTS}", text) for e, text in enumerate(tensors[_FACTS])]
        parts = [stacks[""], stacks[".absmax"]]
        if self.is_nested:
            offsets = stacks[".nested_absmax"].new_tensor([[each["nested_offset"]] for each in facts])
            parts.append(Nested(stacks[".nested_absmax"], stacks[".nested_quant_map"], offsets).joined())
        return getattr(torch, facts[0]["dtype"]), parts

    def _checked(self, name: str, text: Tensor) -> dict[str, Any]:
        """The facts of a matrix.

        Raises:
            ValueError: they are missing, or differ from those of the layout.
        """
        try:
            facts = json.loads(bytes(text.tolist()))
            dtype, offset = facts["dtype"], facts["nested_offset"] if self.is_nested else 0.0
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{name}: is no quant_state of bitsandbytes: {error!r}") from error
        expected = self.facts(dtype, offset)
        if facts != expected or dtype not in _DTYPES or not isinstance(offset, float):
            raise ValueError(f"{name}: expected {expected}, got {facts}")
        return expected

    def write(self, weights: Sequence[str], parts: Sequence[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of all experts by name, with the names of all sections; the inverse of :meth:`read`."""
        by_matrix = [part.reshape(self.layout.shape[0], self.sections, -1) for part in parts]
        offsets = by_matrix[-1][..., -1].tolist()  # where scales are nested
        written: dict[str, Tensor] = {}
        for group, section in product(range(self.layout.shape[0]), range(self.sections)):
            data, scales, *decoders = [part[group, section] for part in by_matrix]
            nested = [part[0] for part in Nested.of(decoders[0].unsqueeze(0))[:2]] if decoders else []
            tensors = (data, scales, scales.new_tensor(TABLE, dtype=torch.float32), *nested)
            name = weights[section].replace("*", str(group))
            written |= {f"{name}{p.suffix}": t.view(p.shape) for p, t in zip(self.pieces, tensors, strict=True)}
            facts = self.facts(str(dtype).removeprefix("torch."), offsets[group][section])
            written[f"{name}{_FACTS}"] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8, device="cpu")
        return written


def _check_table(where: str, tables: Tensor) -> None:
    for group, table in enumerate(tables.tolist()):
        if table != list(TABLE):
            raise ValueError(f"{where.replace('*', str(group))}.quant_map: is not the table of NF4")
