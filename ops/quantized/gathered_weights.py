"""Weights whose shards FSDP2 gathers in e4m3: each rank quantises its experts, and products read the gathered bytes.

Blocks of 128 x 128 never cross experts, and a shard is whole experts. So the bytes are those of a weight that is
quantised after a gather in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ...fuser import ArgumentError
from ...fuser.contract import tracing as trace
from ...fuser.contract.torch_private import disabled_torch_function, dispatch_disabled
from ..formats.copies import Transposition, Weight, WeightOperands
from ..formats.recipe import Recipe, gives_blocks
from ..kernels.doors.quantized import new_weight, quantize_weight

aten = torch.ops.aten
_KEPT = {
    aten.detach.default,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.slice.Tensor,
    aten._to_copy.default,
    aten._pin_memory.default,
}
"""Operations by which FSDP2 makes a shard of a parameter, and modules and DTensors a parameter of another."""

_ALIGNED = 128  # bytes, as kernels that read scales want them


class ShardForm(NamedTuple):
    """The form of a rank's shard, kept from before a gather to after it."""

    recipe: Recipe
    data: tuple[int, ...]
    scales: tuple[int, ...]


class MasterWeight(Tensor):
    """The values of a weight [E, N, K], or of a shard of it, in 16 or 32 bits. Operations give plain tensors."""

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, values: Tensor) -> MasterWeight:
        return Tensor._make_subclass(cls, values)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        assert dispatch_disabled is not None
        with dispatch_disabled():
            result = func(*args, **(kwargs or {}))
            return cls(result) if func in _KEPT else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files have the values, and load without this class."""
        return self.values().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def values(self) -> Tensor:
        """The same memory as a tensor."""
        return aten.alias.default(self)  # type: ignore[no-any-return]

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], ShardForm]:
        """The bytes and scales of this shard, which are gathered.

        Raises:
            ArgumentError: the shard, the recipe or the dtype is none whose bytes can be gathered.
        """
        recipe: Any = module.recipe
        dtype = mp_policy.param_dtype or self.dtype
        if (why := _shard_refusal(recipe, dtype, self.shape, outer_size, mesh.size())) is not None:
            raise ArgumentError(f"{type(module).__name__}: weight: {why}")
        copies = quantize_weight(self.values().to(dtype), power_of_two=recipe.is_power_of_two)
        form = ShardForm(recipe, tuple(copies.data.shape), tuple(copies.scales.shape))
        return (copies.data, copies.scales) if mesh.size() > 1 else (_packed(copies.data, copies.scales),), form

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], form: ShardForm, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight; nothing where ``out`` is it already, which reads the memory that has been filled again."""
        if out is not None:
            return None
        data, scales = gathered if len(gathered) > 1 else _unpacked(gathered[0], form)
        return GatheredWeight(data, scales, dtype, form.recipe), ()


class GatheredWeight(Tensor):
    """A weight [E, N, K] that has been gathered: bytes and scales. Operations other than ours read its values."""

    __torch_function__ = disabled_torch_function
    data_bytes: Tensor
    scales: Tensor
    recipe: Recipe

    @staticmethod
    def __new__(cls, data: Tensor, scales: Tensor, dtype: torch.dtype, recipe: Recipe) -> GatheredWeight:
        weight: GatheredWeight = Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)
        weight.data_bytes, weight.scales, weight.recipe = data, scales, recipe
        return weight

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        one, kwargs = args[0], kwargs or {}
        is_same = func is aten.as_strided.default and (tuple(args[1]), tuple(args[2])) == (one.shape, one.stride())
        if func is aten.detach.default or is_same:
            return cls(one.data_bytes, one.scales, one.dtype, one.recipe)
        if any(isinstance(tensor, cls) for tensor in _written(func, args, kwargs)):
            raise RuntimeError(f"{func}: a weight that was gathered in e4m3 cannot be written; write its shards")
        return func(*_dequantized(args), **_dequantized(kwargs))

    def dequantized(self) -> Tensor:
        """The values, rounded as products read them."""
        return self.recipe.weight_values(Weight(self.data_bytes, self.scales)).to(self.dtype)

    def operands(self, both: bool) -> WeightOperands:
        """The operands of products, in memory that FSDP2 frees after a forward and fills again before its backward."""
        return _operands(Weight(self.data_bytes, self.scales), both)

    def check_reader(self, recipe: Any) -> None:
        """Raises :class:`ArgumentError` for products under another recipe, which would not read the bytes."""
        if recipe != self.recipe:
            raise ArgumentError(f"weight: it was gathered under {self.recipe}, but the op now has recipe={recipe}")


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Arguments that an operation writes, and the tensors of lists that it does."""
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else (value,)


def _dequantized(arguments: Any) -> Any:
    """Arguments of an operation, with the values of gathered weights in their stead."""
    if isinstance(arguments, GatheredWeight):
        return arguments.dequantized()
    if isinstance(arguments, dict):
        return {name: _dequantized(value) for name, value in arguments.items()}
    return type(arguments)(map(_dequantized, arguments)) if isinstance(arguments, list | tuple) else arguments


def is_gathered(weight: Tensor | None) -> TypeGuard[GatheredWeight]:
    """Whether products read gathered bytes.

    Raises:
        ArgumentError: they would, were the module sharded.
    """
    if isinstance(weight, MasterWeight):
        raise ArgumentError("weight: gather_quantized has prepared it for FSDP2; call fully_shard before the module")
    return isinstance(weight, GatheredWeight)


def expected_operands(weight: Tensor, both: bool) -> WeightOperands:
    """The form, for a trace, of the operands that products will read once the weight is gathered."""
    copies = new_weight(torch.empty(weight.shape, dtype=weight.dtype, device=weight.device), 1, both=False)
    trace.stand_for_parameters(copies.data, copies.scales)
    return _operands(Weight(copies.data, copies.scales), both)


def _operands(weight: Weight, both: bool) -> WeightOperands:
    """The backward has the bytes transposed only once it reads them, so that nothing stays between."""
    return WeightOperands(weight, weight._replace(turn=Transposition.COPY) if both else None)


def _shard_refusal(recipe: Any, dtype: torch.dtype, shard: torch.Size, whole: torch.Size, ranks: int) -> str | None:
    """Why the bytes of a shard cannot be gathered; None: they can. The same on all ranks."""
    if not gives_blocks(recipe):
        return f"only Float8Block is gathered in e4m3, but the op now has recipe={recipe}"
    if whole[0] % ranks:
        return f"{whole[0]} experts do not divide among {ranks} ranks; shard over a divisor, or gather 16 bits"
    if shard[1:] != whole[1:]:
        return f"{list(shard)} is not a shard of whole experts of {list(whole)}; shard dimension 0"
    if (why := recipe.dtype_refusal(dtype)) is not None:
        return f"{why}; give MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
    return None


def _packed(data: Tensor, scales: Tensor) -> Tensor:
    """Both in one: of a mesh of one rank, torch takes the first tensor alone."""
    flat = data.view(torch.uint8).flatten(), data.new_zeros(-data.numel() % _ALIGNED, dtype=torch.uint8)
    return torch.cat([*flat, scales.flatten().view(torch.uint8)])


def _unpacked(packed: Tensor, form: ShardForm) -> tuple[Tensor, Tensor]:
    data = packed[: torch.Size(form.data).numel()].view(torch.float8_e4m3fn)
    scales = packed[packed.numel() - 4 * torch.Size(form.scales).numel() :].view(torch.float32)
    return data.view(form.data), scales.view(form.scales)
