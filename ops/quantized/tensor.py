"""Tokens or weights in the copies that a recipe asks for: a plain object beside :class:`GroupedTensor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...fuser.contract.errors import shown
from ...fuser.contract.stored_values import check_stores_values
from ..formats.copies import Columns, Rows, Scaling, Weight
from ..formats.recipe import RECIPES, Recipe, is_recipe
from ..formats.reference import groups_of
from ..kernels.doors.quantized import quantize_rows, quantize_weight
from ..values.checks import is_free_to_read
from ..values.grouped_tensor import GroupedTensor

Copy = Rows | Columns | Weight
_SOURCES = (torch.bfloat16, torch.float16, torch.float32)
_TENSORS = (
    *("rowwise", "rowwise_scales", "rowwise_amax"),
    *("columnwise", "columnwise_scales", "columnwise_amax", "first_dims"),
)


@dataclass(eq=False, repr=False)
class QuantizedGroupedTensor:
    """Tokens [T, K], sorted by group, or weights [E, N, K], as bytes and scales.

    Scales decode: a value is its byte times its scale. The rowwise copy is contracted over the last dimension, the
    columnwise copy over the tokens of each group, or over the rows of each weight. One of the two may be missing.

    Args:
        recipe: the formats and blocks.
        shape: the shape of the tensor before quantisation.
        dtype: the dtype of the tensor before quantisation.
        first_dims: tokens of each group, int32 or int64 [E]; None for weights.
        halves: 2 if the rows of a weight are gate and up, which no block spans; else 1.
        is_gradient: whether the tensor is a gradient, whose format is the recipe's ``gradient``.
        rowwise, rowwise_scales, rowwise_amax: the rowwise copy, as ``quantize`` makes it; ``rowwise_amax`` [E] only for
            NVFP4.
        columnwise, columnwise_scales, columnwise_amax: the columnwise copy, likewise.

    Raises:
        ValueError: a copy has another shape or dtype than the recipe gives, or both copies are missing.
    """

    recipe: Recipe
    shape: tuple[int, ...]
    dtype: torch.dtype
    first_dims: Tensor | None = None
    halves: int = 1
    is_gradient: bool = False
    _: KW_ONLY
    rowwise: Tensor | None = None
    rowwise_scales: Tensor | None = None
    rowwise_amax: Tensor | None = None
    columnwise: Tensor | None = None
    columnwise_scales: Tensor | None = None
    columnwise_amax: Tensor | None = None

    def __post_init__(self) -> None:
        self.shape = torch.Size(self.shape)
        _check(self)

    @classmethod
    def quantize(
        cls,
        data: Tensor | GroupedTensor,
        recipe: Recipe,
        first_dims: Tensor | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = False,
        halves: int = 1,
        is_gradient: bool = False,
    ) -> QuantizedGroupedTensor:
        """The wanted copies of tokens [T, K] with their ``first_dims``, or of weights [E, N, K].

        Raises:
            ValueError: other dimensions or dtypes, groups that are ragged in their columns, halves that do not divide
                the rows of a weight, features that the recipe does not take, or a recipe that quantises nothing.
        """
        if isinstance(data, GroupedTensor):
            if data.last_dims is not None:
                raise ValueError("QuantizedGroupedTensor: groups that are ragged in their columns are not quantised")
            wanted = {"rowwise": rowwise, "columnwise": columnwise, "is_gradient": is_gradient}
            return cls.quantize(data.data, recipe, data.first_dims, halves=halves, **wanted)
        _check_source(data, recipe, first_dims, halves)
        wanted_names = [name for name, is_wanted in (("rowwise", rowwise), ("columnwise", columnwise)) if is_wanted]
        copies = _copies(data.detach(), recipe, first_dims, wanted_names, halves, is_gradient)
        fields: dict[str, Tensor | None] = {}
        for name, copy in copies.items():
            fields |= {name: copy.data, f"{name}_scales": copy.scales, f"{name}_amax": copy.amax}
        return cls(recipe, data.shape, data.dtype, first_dims, halves, is_gradient, **fields)

    def dequantize(self, dtype: torch.dtype | None = None, *, columnwise: bool | None = None) -> Tensor:
        """Returns the values in the shape and dtype of the original tensor, or in another dtype; zero past the last
        group.

        Args:
            columnwise: whether to read the columnwise copy; None: only if the rowwise copy is missing.
        """
        name = "columnwise" if columnwise or (columnwise is None and self.rowwise is None) else "rowwise"
        copy: Any = self._copy(name)
        if copy is None:
            raise ValueError(f"QuantizedGroupedTensor: there is no {name} copy")
        sizes, recipe = self.first_dims, self.recipe
        if sizes is None:
            values = (recipe.weight_values if name == "rowwise" else recipe.transposed_values)(copy, self.halves)
        elif name == "rowwise":
            in_tail = groups_of(sizes, self.shape[0]) == sizes.shape[0]
            values = recipe.row_values(copy, sizes).masked_fill(in_tail.unsqueeze(-1), 0)
        else:
            values = recipe.column_values(copy, sizes, self.shape[0])
        return values.to(dtype or self.dtype)

    def _copy(self, name: str) -> Copy | None:
        data, scales = getattr(self, name), getattr(self, f"{name}_scales")
        kind = Weight if self.first_dims is None else Rows if name == "rowwise" else Columns
        return None if data is None else kind(data, scales, getattr(self, f"{name}_amax"))

    @property
    def num_groups(self) -> int:
        """The number of groups, E."""
        return int(self.shape[0] if self.first_dims is None else self.first_dims.shape[0])

    @property
    def device(self) -> torch.device:
        data = self.rowwise if self.rowwise is not None else self.columnwise
        assert data is not None
        return data.device

    def to(self, device: torch.device | str) -> QuantizedGroupedTensor:
        """Copies the tensor to another device."""
        return self.from_state(
            {name: value.to(device) if isinstance(value, Tensor) else value for name, value in self.state().items()}
        )

    def state(self) -> dict[str, Any]:
        """Tensors and plain values by name, for ``torch.save``, and for ``torch.load`` with ``weights_only=True``."""
        switches: Any = self.recipe
        recipe = {"name": self.recipe.name, **asdict(switches)}
        described = {"recipe": recipe, "shape": tuple(self.shape), "dtype": self.dtype, "halves": self.halves}
        described["is_gradient"] = self.is_gradient
        return described | {name: value for name in _TENSORS if (value := getattr(self, name)) is not None}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> QuantizedGroupedTensor:
        """Makes the tensor from the result of :meth:`state`.

        Raises:
            ValueError: the recipe has another name, tensors do not fit, or an entry is missing.
        """
        _check_has(state, "recipe")
        fields = dict(state)
        switches = dict(fields.pop("recipe"))
        if (name := switches.pop("name")) not in RECIPES:
            raise ValueError(f"QuantizedGroupedTensor: no recipe {name!r}, only {', '.join(sorted(RECIPES))}")
        _check_has(state, "shape", "dtype")
        return cls(RECIPES[name](**switches), **fields)

    def __repr__(self) -> str:
        copies = " and ".join(name for name in ("rowwise", "columnwise") if getattr(self, name) is not None)
        return f"QuantizedGroupedTensor({self.recipe}, {list(self.shape)}, {self.dtype}, {copies})"


def _copies(
    data: Tensor, recipe: Recipe, first_dims: Tensor | None, names: Sequence[str], halves: int, is_gradient: bool
) -> dict[str, Copy]:
    """Makes the copies of these names. Kernels make copies of ``Float8Block``, and do not write rows outside of all
    groups.
    """
    if recipe.kernels(is_gradient) is not Scaling.BLOCKS or data.dtype.itemsize != 2:
        return {name: _quantize(recipe, name, data, first_dims, halves, is_gradient) for name in names}
    copies: dict[str, Any]
    if first_dims is None:
        both = "columnwise" in names
        weight = quantize_weight(data, power_of_two=recipe.is_power_of_two, halves=halves, both=both)
        transposed = None if weight.transposed is None else Weight(weight.transposed, weight.scales)
        copies = {"rowwise": Weight(weight.data, weight.scales), "columnwise": transposed}
    else:
        by_row, by_column = "rowwise" in names, "columnwise" in names
        options = {"power_of_two": recipe.is_power_of_two, "want_rows": by_row, "want_columns": by_column}
        tokens = quantize_rows(data, first_dims, **options)  # type: ignore[arg-type]
        copies = {"rowwise": tokens.rows, "columnwise": tokens.columns}
    return {name: copies[name] for name in names}


def _quantize(
    recipe: Recipe, name: str, data: Tensor, first_dims: Tensor | None, halves: int, is_gradient: bool
) -> Copy:
    if not recipe.quantises:
        raise ValueError(f"{recipe.name} quantises nothing")
    if first_dims is None:
        return (recipe.weight if name == "rowwise" else recipe.transposed_weight)(data, halves, is_gradient)
    return (recipe.rows if name == "rowwise" else recipe.columns)(data, first_dims, is_gradient)


def _check_source(data: Tensor, recipe: Recipe, first_dims: Tensor | None, halves: int) -> None:
    """Checks the arguments of a quantisation."""
    if not is_recipe(recipe):
        raise _error(f"recipe must be one such as fusible.Float8Block(), got {shown(recipe)}")
    check_stores_values("data", data, "QuantizedGroupedTensor")
    if data.dtype not in _SOURCES:
        raise _error(f"data must be of bfloat16, float16 or float32, got {data.dtype}")
    if data.dim() != (3 if first_dims is None else 2):
        expected = "weights [E, N, K]" if first_dims is None else "tokens [T, K] with first_dims"
        raise _error(f"expected {expected}, got shape {list(data.shape)}")
    if first_dims is None:
        if halves not in (1, 2) or data.shape[1] % halves:
            raise _error(f"halves must be 1, or 2 of an even number of rows, got {shown(halves)} of {data.shape[1]}")
        return
    is_vector = isinstance(first_dims, Tensor) and first_dims.dim() == 1
    if not is_vector or first_dims.dtype not in (torch.int32, torch.int64) or first_dims.device != data.device:
        raise _error(f"first_dims must be int32 or int64 [E] on {data.device}, got {_form(first_dims)}")
    _check_groups(first_dims, data.shape[0])


def _check_groups(first_dims: Tensor, rows: int) -> None:
    """Checks that the groups fit into the rows, if that needs no synchronisation."""
    if not is_free_to_read(first_dims):
        return
    sizes = first_dims.tolist()
    if min(sizes, default=0) < 0 or sum(sizes) > rows:
        raise _error(f"first_dims {sizes} do not fit into {rows} rows")


def _check_has(state: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name not in state:
            raise _error(f"{name} is missing in the state; there are {', '.join(state) or 'none'}")


def _error(reason: str) -> ValueError:
    return ValueError(f"QuantizedGroupedTensor: {reason}")


def _form(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"{list(value.shape)}, {value.dtype} on {value.device}" if is_tensor else shown(value)


def _check(tensor: QuantizedGroupedTensor) -> None:
    """Checks that copies have the recipe's shapes and dtypes, found by quantising a tensor without data."""
    if tensor.rowwise is None and tensor.columnwise is None:
        raise ValueError("QuantizedGroupedTensor: needs a rowwise or a columnwise copy")
    sizes = tensor.first_dims
    if len(tensor.shape) != (3 if sizes is None else 2):
        dims = "[E, N, K] without first_dims" if sizes is None else "[T, K] with first_dims"
        raise _error(f"expected shape {dims}, got {list(tensor.shape)}")
    if sizes is not None:
        _check_groups(sizes, tensor.shape[0])
    data = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    for name in ("rowwise", "columnwise"):
        copy = tensor._copy(name)
        if copy is None:
            continue
        sizes_without_data = None if sizes is None else sizes.to("meta")
        expected = _quantize(tensor.recipe, name, data, sizes_without_data, tensor.halves, tensor.is_gradient)
        for part, value, like in zip(("", "_scales", "_amax"), copy[:3], expected[:3], strict=True):
            _check_part(f"{name}{part}", tensor.recipe, value, like)


def _check_part(name: str, recipe: Recipe, value: Any, like: Tensor | None) -> None:
    actual = None if value is None else (list(value.shape), value.dtype)
    expected = None if like is None else (list(like.shape), like.dtype)
    if actual != expected:
        raise ValueError(f"QuantizedGroupedTensor: {name} must be {expected} under {recipe}, got {actual}")
