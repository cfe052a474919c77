"""Experts of a transformers model whose weights are the bytes of a quantised checkpoint.

A stored weight has three parameters of the experts module: bytes under the name of the weight, ``NAME_scale`` and, in
some formats, ``NAME_factor``. All are frozen. State dicts have the names and shapes of the publisher.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.formats.copies import BLOCK, Weight
from ...ops.formats.float8 import ScaleKind
from ...ops.formats.forms import misfit, widened
from ...ops.formats.per_block import Float8Block
from ...ops.formats.recipe import Recipe
from .experts import Names
from .stored_layouts import Layout

NAME = "fusible"
ATTRIBUTE = "_fusible_stored"  # of the module: name of a weight -> Stored
CAST = "a cast of the model also casts bytes and scales; load it with that dtype instead"
_SUFFIXES = ("", "_scale", "_factor")


class Stored(NamedTuple):
    """A stored weight [E, N, K].

    Attributes:
        names: the parameters of the module that have its parts.
        dtypes: those of the parts.
        dtype: that of the model's other parameters.
        layout: how a state dict has it; None: as the module does.
        is_transposed: whether the class has [E, K, N] in 16 bits.
    """

    recipe: Recipe
    shape: tuple[int, int, int]
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    dtype: torch.dtype
    layout: Layout | None = None
    is_transposed: bool = False

    def weight(self, experts: nn.Module) -> Weight:
        """The current parts.

        Raises:
            RuntimeError: a cast of the model may have rounded one.
        """
        parts = [getattr(experts, name).detach() for name in self.names]
        self._check_casts(parts)
        return widened(self.recipe, self.shape, Weight(*parts))

    def as_kept(self, parts: Sequence[Tensor]) -> Weight:
        """The parts in the dtypes in which they came, as :meth:`weight` reads them."""
        self._check_casts(parts)
        kept: list[Any] = [part.to(dtype) for part, dtype in zip(parts, self.dtypes, strict=True)]
        return Weight(*kept)

    def _check_casts(self, parts: Sequence[Tensor]) -> None:
        for name, part, dtype in zip(self.names, parts, self.dtypes, strict=True):
            if not _is_exact(dtype, part.dtype):
                raise RuntimeError(
                    f"fusible: {name}, of a weight in {self.recipe.name}, was {dtype} and is {part.dtype}: {CAST}"
                )

    def stand_in(self, experts: nn.Module) -> Tensor:
        """A tensor with the shape, dtype and device of the values, and memory for one of them."""
        one = torch.empty((), dtype=self.dtype, device=getattr(experts, self.names[0]).device)
        return one.expand(self.shape)


def _is_exact(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether a cast changes nothing, or gives float32 of 16 bits, as PEFT asks of frozen parameters."""
    return dtype == to or (to == torch.float32 and dtype in (torch.bfloat16, torch.float16))


def stored_of(experts: Any, name: str) -> Stored | None:
    """The meaning of the bytes of a weight of an experts module; None: it has no bytes that are read here."""
    kept: dict[str, Stored] | None = experts.__dict__.get(ATTRIBUTE)
    if kept is not None:
        return kept.get(name)
    scales, weight = getattr(experts, f"{name}_scale_inv", None), experts._parameters.get(name)
    if scales is None or weight is None or weight.dim() != 3 or weight.dtype != torch.float8_e4m3fn:
        return None
    return _of_float8_blocks(experts, name, weight, scales)


def _of_float8_blocks(experts: Any, name: str, weight: Tensor, scales: Tensor) -> Stored | None:
    """The bytes of transformers' own FP8 experts."""
    recipe = Float8Block(scales=kind_of(scales))
    shape: Any = tuple(weight.shape)
    block = getattr(experts, "block_size", None)
    if block is None or tuple(block) != (BLOCK, BLOCK) or getattr(experts, "activation_scheme", "") != "dynamic":
        return None
    dtype = getattr(getattr(experts, "config", None), "dtype", None)
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    stored = Stored(recipe, shape, (name, f"{name}_scale_inv"), (weight.dtype, scales.dtype), dtype)
    return stored if misfit(recipe, shape, widened(recipe, shape, Weight(weight, scales))) is None else None


def kind_of(scales: Tensor) -> ScaleKind:
    """The kind of scales of blocks, which those of rows follow. Checkpoints may have numbers of float32 in 16 bits."""
    return "power_of_two" if scales.dtype == torch.float8_e8m0fnu else "float32"


def weight_decoded_by(name: str) -> str | None:
    """The name of the weight whose codes a tensor of this name decodes; None: it is none of the names for that."""
    match = re.fullmatch(r"(.+)_(scale|factor|shape)(_inv)?", name)
    return match[1] if match else None


def is_stored(experts: Any) -> bool:
    """Whether weights of an experts module are bytes that :func:`keep` has put there."""
    return ATTRIBUTE in experts.__dict__


def both_stored(experts: Any) -> bool:
    """Whether both weights of an experts module are bytes that we read."""
    return all([stored_of(experts, name) is not None for name in Names.of(experts)[:2]])


def float8_blocks(experts: Any) -> bool:
    """Whether the bytes of an experts module are multiplied by quantised rows."""
    stored = stored_of(experts, Names.of(experts).up)
    return stored is not None and stored.recipe.quantises_tokens


def keep(
    experts: Any, name: str, layout: Layout, parts: dict[str, Tensor], dtype: torch.dtype, was_transposed: bool
) -> None:
    """Makes the parameter ``name`` of an experts module from a publisher's parts, without a copy.

    Args:
        was_transposed: whether the class stores [E, K, N] in 16 bits, which bytes [E, N, K / 2] do not show.

    Raises:
        ValueError: a part does not have the form of the format, or has invalid values; the message names the tensor.
    """
    weight = layout.read(name, parts)
    names = [f"{name}{suffix}" for suffix, part in zip(_SUFFIXES, weight.tensors, strict=True) if part is not None]
    for part in (name, *[f"{name}{suffix}" for suffix in layout.suffixes]):
        experts._parameters.pop(part, None)
    for part, tensor in zip(names, (weight.data, *weight.decoders), strict=True):
        experts.register_parameter(part, nn.Parameter(tensor, requires_grad=False))
        experts._parameters[part]._is_hf_initialized = True
    for suffix in layout.extras:
        experts.register_parameter(f"{name}{suffix}", nn.Parameter(parts[suffix], requires_grad=False))
        experts._parameters[f"{name}{suffix}"]._is_hf_initialized = True
    if ATTRIBUTE not in experts.__dict__:
        experts.__dict__[ATTRIBUTE] = {}
        experts.register_state_dict_post_hook(_publish)
        experts.register_load_state_dict_pre_hook(_take_back)
        experts.register_forward_pre_hook(_check_reader)
    dtypes = tuple([tensor.dtype for tensor in (weight.data, *weight.decoders)])
    stored = Stored(layout.recipe, layout.shape, tuple(names), dtypes, dtype, layout, was_transposed)
    experts.__dict__[ATTRIBUTE][name] = stored
    experts._is_hf_initialized = True  # the model's initialiser looks for the parameters that it knows


def _check_reader(experts: Any, arguments: Any) -> None:
    """Raises :class:`ValueError` in a call of another implementation, which would multiply bytes."""
    implementation = getattr(experts.config, "_experts_implementation", None)
    if implementation != NAME:
        stored: Stored = next(iter(experts.__dict__[ATTRIBUTE].values()))
        raise ValueError(
            f"fusible: the experts are stored as {stored.recipe.name}; experts_implementation={implementation!r} reads "
            f"16 bits. Keep {NAME!r}, or write the model in 16 bits with fusible.integrations.export.export_merged"
        )


def _publish(experts: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Gives a state dict the names and shapes of the publisher."""
    for name, stored in experts.__dict__.get(ATTRIBUTE, {}).items():
        if stored.layout is not None and f"{prefix}{name}" in state:
            parts = [state.pop(f"{prefix}{part}") for part in stored.names]
            written = stored.layout.write(stored.as_kept(parts))
            state.update({f"{prefix}{name}{suffix}": part for suffix, part in written.items()})


def _take_back(experts: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Gives a state dict of the publisher the names of the module; reports what does not fit."""
    for name, stored in experts.__dict__.get(ATTRIBUTE, {}).items():
        layout = stored.layout
        if layout is None or not any(f"{prefix}{name}{suffix}" in state for suffix in layout.suffixes):
            continue
        parts = {suffix: state.pop(f"{prefix}{name}{suffix}", None) for suffix in layout.suffixes}
        try:
            weight = layout.read(f"{prefix}{name}", parts)
        except ValueError as error:
            args[-1].append(str(error))
            continue
        parts_of_module = zip(stored.names, (weight.data, *weight.decoders), stored.dtypes, strict=True)
        for part, tensor, dtype in parts_of_module:
            if _is_exact(tensor.dtype, dtype):
                state[f"{prefix}{part}"] = tensor.to(dtype)
            else:
                args[-1].append(f"{prefix}{part}: expected {dtype}, got {tensor.dtype}, which would be rounded")
