"""A ``transformer_engine`` for Megatron's code on machines without it.

Megatron's experts, their padding and the state of ``fp8_autocast`` are here, with TransformerEngine's names and
arguments. All other names exist and do nothing: Megatron imports them, and these tests do not call them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

NAME = "transformer_engine"
ABSENT = ("ep",)  # which is of versions that have a transport of their own


class _Idle(nn.Module):
    """A class that Megatron names."""

    apply: Any = None


class _Names(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ABSENT:
            raise AttributeError(name)
        value = _Idle if name.lstrip("_")[0].isupper() else _nothing
        setattr(self, name, value)
        return value


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_here = fullname.split(".")[0] == NAME and fullname.split(".")[-1] not in ABSENT
        return ModuleSpec(fullname, self, is_package=True) if is_here else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_CONTENTS.get(module.__name__.removeprefix(NAME).removeprefix("."), {}))


@contextmanager
def installed() -> Iterator[None]:
    """For a process that has imported nothing of Megatron yet, to do so in the body; it stays afterwards."""
    assert NAME not in sys.modules
    assert "megatron.core" not in sys.modules
    sys.meta_path.insert(0, _Finder())
    for name in filter(None, _CONTENTS):
        import_module(f"{NAME}.{name}")
    yield


# ----------------------------------------------------------------------------------------------------------- experts


class GroupedLinear(nn.Module):
    """One weight [out, in] an expert, or all of them in one parameter; computes expert by expert.

    Args:
        kwargs: what Megatron gives to all layers of TransformerEngine.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        use_grouped_tensor: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.fuse_wgrad_accumulation = bias, fuse_wgrad_accumulation
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.hooks_ran = 0
        shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
        for name, shape in shapes.items():
            if name == "weight" or bias:
                single = single_grouped_weight if name == "weight" else single_grouped_bias
                self._register(name, torch.randn(num_gemms, *shape, dtype=params_dtype) / in_features**0.5, single)

    def _register(self, name: str, values: Tensor, single: bool) -> None:
        for key, value in [(name, values)] if single else [(f"{name}{i}", v.clone()) for i, v in enumerate(values)]:
            self.register_parameter(key, nn.Parameter(value))

    def stacked(self, name: str) -> Tensor:
        """[num_gemms, ...]"""
        single = self.single_grouped_weight if name == "weight" else self.single_grouped_bias
        if single:
            return self.get_parameter(name)
        return torch.stack([self.get_parameter(f"{name}{i}") for i in range(self.num_gemms)])

    def forward(self, x: Tensor, m_splits: list[int], **_: Any) -> Tensor:
        return torch.cat([rows @ w.T for rows, w in zip(x.split(m_splits), self.stacked("weight"), strict=True)])

    def backward_dw(self) -> None:
        """Delayed weight gradients, which the unfused experts here do not have."""

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        self.hooks_ran += 1


class OpGroupedLinear(nn.Module):
    """The op of TransformerEngine, of which Megatron asks for the arguments alone."""

    def __init__(self, num_groups: int, in_features: int, out_features: int, *, scale_bias: bool = False) -> None:
        super().__init__()


class Fp8Padding(nn.Module):
    """Fills each expert's rows up to a multiple of ``align_size`` with zeros.

    Attributes:
        calls: how often it has run, of all of them.
    """

    calls = 0

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.align_size = 16 if align_size is None else align_size

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        assert sum(m_splits) == len(x), f"{sum(m_splits)} rows of experts among {len(x)}"
        Fp8Padding.calls += 1
        padded = [-(-m // self.align_size) * self.align_size for m in m_splits]
        parts = zip(x.split(m_splits), m_splits, padded, strict=True)
        return torch.cat([nn.functional.pad(rows, (0, 0, 0, p - m)) for rows, m, p in parts]), padded


class Fp8Unpadding(nn.Module):
    """Undoes :class:`Fp8Padding`."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.align_size = 16 if align_size is None else align_size

    def forward(self, x: Tensor, m_splits: list[int]) -> Tensor:
        starts = torch.tensor([0, *[-(-m // self.align_size) * self.align_size for m in m_splits]]).cumsum(0).tolist()
        return torch.cat([x[a : a + m] for (a, _), m in zip(pairwise(starts), m_splits, strict=True)])


# ----------------------------------------------------------------------------------------------------------- recipes


class Format(Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


class QParams(NamedTuple):
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


CLOSEST, POWERS_OF_TWO = QParams(), QParams(power_2_scale=True)


@dataclass
class Recipe:
    fp8_format: Format = Format.E4M3
    backward_override: str | None = None
    fp8_dpa: bool = False
    fp8_mha: bool = False


class DelayedScaling(Recipe):
    def __init__(self, **settings: Any) -> None:
        super().__init__()


@dataclass
class Float8CurrentScaling(Recipe):
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = CLOSEST
    fp8_quant_fwd_weight: QParams = CLOSEST
    fp8_quant_bwd_grad: QParams = CLOSEST


@dataclass
class Float8BlockScaling(Recipe):
    fp8_quant_fwd_inp: QParams = POWERS_OF_TWO
    fp8_quant_fwd_weight: QParams = POWERS_OF_TWO
    fp8_quant_bwd_grad: QParams = POWERS_OF_TWO
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1


@dataclass
class MXFP8BlockScaling(Recipe):
    margin: int = 0
    enable_2d_quantization: bool = False


@dataclass
class NVFP4BlockScaling(Recipe):
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"


@dataclass
class CustomRecipe(Recipe):
    qfactory: Any = None


class FP8GlobalStateManager:
    """The state of ``fp8_autocast``."""

    recipe: Recipe | None = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @classmethod
    def get_fp8_recipe(cls) -> Recipe | None:
        return cls.recipe


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Recipe | None = None, **_: Any) -> Iterator[None]:
    before = FP8GlobalStateManager.recipe
    FP8GlobalStateManager.recipe = fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before


_STATE = {"FP8GlobalStateManager": FP8GlobalStateManager, "fp8_autocast": fp8_autocast}
_RECIPES = [DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling]
_CONTENTS: dict[str, dict[str, Any]] = {
    "": {"__version__": "2.20.0"},
    "pytorch": {
        "GroupedLinear": GroupedLinear,
        "Fp8Padding": Fp8Padding,
        "Fp8Unpadding": Fp8Unpadding,
        "fp8_autocast": fp8_autocast,
    },
    "pytorch.ops": {"GroupedLinear": OpGroupedLinear},
    "pytorch.ops.basic.grouped_linear": {"OUTPUT_BUFFER_KEY": "output", "GRAD_INPUT_BUFFER_KEY": "grad_input"},
    "pytorch.quantization": _STATE,
    "pytorch.fp8": _STATE,
    "common.recipe": {"Format": Format, **{recipe.__name__: recipe for recipe in [*_RECIPES, CustomRecipe]}},
}
