"""The names, shapes and dtypes of publishers' experts in 8 or 4 bits, once transformers has stacked them.

Each tensor is a view of a part of a format of this library, so nothing is copied, and saving writes the loaded bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.formats.copies import Weight
from ...ops.formats.float8_weight import Float8Weight
from ...ops.formats.forms import form_of, misfit
from ...ops.formats.int4 import Int4
from ...ops.formats.mxfp4 import MXFP4
from ...ops.formats.nf4 import NF4
from ...ops.formats.nvfp4_weight import NVFP4Weight
from ...ops.formats.weight_only import WeightOnly


class Piece(NamedTuple):
    """A tensor of a publisher.

    Attributes:
        suffix: of its name, after that of the weight.
        dtype: None: any that the format keeps.
    """

    suffix: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def misfit(self, tensor: Any) -> str | None:
        """The difference of a tensor from it; None: none."""
        if not isinstance(tensor, Tensor):
            return "is missing"
        same = tuple(tensor.shape) == self.shape and self.dtype in (None, tensor.dtype)
        wanted = f"{list(self.shape)}" if self.dtype is None else f"{list(self.shape)}, {self.dtype}"
        return None if same else f"expected {wanted}, got {list(tensor.shape)}, {tensor.dtype}"


class Layout(NamedTuple):
    """A stacked weight [E, N, K] as a publisher stores it.

    Attributes:
        parts: those of the format, in its order.
        more: tensors that decode nothing, and are saved unchanged.
        quantised_from: the dtype of the weights before, where the publisher notes it.
    """

    recipe: WeightOnly
    shape: tuple[int, int, int]
    parts: tuple[Piece, ...]
    more: tuple[Piece, ...] = ()
    quantised_from: torch.dtype | None = None

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of the parts of the format."""
        return tuple([part.suffix for part in self.parts])

    @property
    def extras(self) -> tuple[str, ...]:
        """The suffixes of further tensors."""
        return tuple([part.suffix for part in self.more])

    def read(self, name: str, tensors: dict[str, Any]) -> Weight:
        """The weight, of tensors by suffix.

        Raises:
            ValueError: one is missing, of another shape or dtype, or has values that are none; names it.
        """
        if (why := self.recipe.size_refusal(self.shape[2], self.shape[1])) is not None:
            raise ValueError(f"{name}: {why}")
        for part in self.parts:
            if (why := part.misfit(tensors.get(part.suffix))) is not None:
                raise ValueError(f"{name}{part.suffix}: {why}, for {self.recipe.name} {list(self.shape)}")
        forms = form_of(self.recipe, self.shape).tensors
        weight = Weight(*[_as(tensors[p.suffix], like, p) for p, like in zip(self.parts, forms, strict=False)])  # type: ignore[arg-type]
        if (why := misfit(self.recipe, self.shape, weight)) is None and not weight.data.is_meta:
            why = self.recipe.stored_refusal(weight)
        if why is not None:
            raise ValueError(f"{name}: {why}")
        return weight

    def write(self, weight: Weight) -> dict[str, Tensor]:
        """The inverse of :meth:`read`."""
        named = zip(self.parts, (weight.data, *weight.decoders), strict=True)
        return {p.suffix: _viewed(t, p.dtype or t.dtype).reshape(p.shape) for p, t in named}


def _as(tensor: Tensor, like: Tensor | None, part: Piece) -> Tensor:
    """The part in the form of the format, without a copy."""
    assert like is not None
    flat = tensor.reshape(*like.shape[:-1], -1) if tensor.dim() > like.dim() else tensor
    return _viewed(flat, tensor.dtype if part.dtype is None else like.dtype).reshape(like.shape)


def _viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.contiguous().view(dtype)


def mxfp4_of_gpt_oss(shape: tuple[int, int, int]) -> Layout:
    """``_blocks`` and ``_scales``; gate and up rows alternate."""
    e, n, k = shape
    blocks, scales = (
        Piece("_blocks", (e, n, k // 32, 16), torch.uint8),
        Piece("_scales", (e, n, k // 32), torch.uint8),
    )
    return Layout(MXFP4(), shape, (blocks, scales))


def nf4(shape: tuple[int, int, int], nested: bool, sections: int) -> Layout:
    """The stack of experts that bitsandbytes has quantised one by one: ``_factor`` decodes nested scales."""
    recipe = NF4(nested, sections if nested else 1)
    forms = zip(("", "_scale", "_factor"), form_of(recipe, shape).tensors, strict=True)
    return Layout(
        recipe, shape, tuple([Piece(suffix, tuple(f.shape), f.dtype) for suffix, f in forms if f is not None])
    )


def modelopt_nvfp4(shape: tuple[int, int, int], sections: int) -> Layout:
    """``weight``, ``weight_scale``, ``weight_scale_2``, which multiplies."""
    e, n, k = shape
    scales = Piece("_scale", (e, n, k // 16), torch.float8_e4m3fn)
    factor = Piece("_scale_2", (e, sections), torch.float32)
    return Layout(NVFP4Weight(sections), shape, (Piece("", (e, n, k // 2), torch.uint8), scales, factor))


def compressed_tensors(scheme: Any, format: str, shape: tuple[int, int, int], sections: int) -> Layout | None:
    """The layout of a scheme of compressed-tensors; None: no format of ours is its."""
    makers = {"pack-quantized": _int4, "nvfp4-pack-quantized": _nvfp4, "mxfp4-pack-quantized": _mxfp4}
    makers |= dict.fromkeys(("float-quantized", "naive-quantized"), _float8)
    make = makers.get(format)
    return None if make is None else make(scheme, shape, sections)


def _int4(scheme: Any, shape: tuple[int, int, int], sections: int) -> Layout | None:
    (e, n, k), weights = shape, scheme.weights
    group = weights.group_size or k
    if weights.num_bits != 4 or weights.actorder is not None or group % 8:
        return None
    parts: tuple[Piece, ...] = (
        Piece("_packed", (e, n, k // 8), torch.int32),
        Piece("_scale", (e, n, -(-k // group)), None),
    )
    if not weights.symmetric:
        parts = (*parts, Piece("_zero_point", (e, -(-n // 8), -(-k // group)), torch.int32))
    recipe = Int4(group, zero_points=not weights.symmetric)
    return Layout(recipe, shape, parts, (Piece("_shape", (e, 2 * sections), torch.int64),))


def _nvfp4(scheme: Any, shape: tuple[int, int, int], sections: int) -> Layout:
    e, n, k = shape
    data, scales = (
        Piece("_packed", (e, n, k // 2), torch.uint8),
        Piece("_scale", (e, n, k // 16), torch.float8_e4m3fn),
    )
    factor = Piece("_global_scale", (e, sections), torch.float32)
    return Layout(NVFP4Weight(sections, divides=True), shape, (data, scales, factor))


def _mxfp4(scheme: Any, shape: tuple[int, int, int], sections: int) -> Layout:
    e, n, k = shape
    data, scales = (
        Piece("_packed", (e, n, k // 2), torch.uint8),
        Piece("_scale", (e, n, k // 32), torch.uint8),
    )
    return Layout(MXFP4(), shape, (data, scales))


def _float8(scheme: Any, shape: tuple[int, int, int], sections: int) -> Layout | None:
    (e, n, _), weights = shape, scheme.weights
    if weights.type != "float" or weights.num_bits != 8 or weights.strategy not in ("channel", "tensor"):
        return None
    by_row = weights.strategy == "channel"
    recipe = Float8Weight("rows") if by_row else Float8Weight("tensor", sections)
    scales = Piece("_scale", (e, n, 1) if by_row else (e, sections), None)
    return Layout(recipe, shape, (Piece("", shape, torch.float8_e4m3fn), scales))
