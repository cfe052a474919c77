"""The kinds of problems that the door hands to backends: a backend registers kernels for those that it can solve."""

from __future__ import annotations

from operator import attrgetter

from .choice import Choosing, ChoosingBackward
from .decoding import WeightDecoding
from .fake_quantized import FakeQuantizeRows, FakeQuantizeWeight, FakeQuantizing
from .gate import GateProduct
from .gemm import GroupedGemm
from .interface import Kind, Measured
from .low_rank import LowRankPass
from .quantized import (
    ActivatedScaledGemm,
    Multiplying,
    PackedGemm,
    QuantizeActivation,
    QuantizeActivationBackward,
    QuantizeRows,
    QuantizeWeight,
    Quantizing,
    ScaledGemm,
    ScaledWgrad,
)
from .ragged import RaggedGemm
from .routing import GatherSlots, OrderSlots, Permuting, SpreadRows, SumRows
from .rows import (
    ActivateRows,
    ActivateRowsBackward,
    Activating,
    ColumnSums,
    FunctionOfRows,
    PointwiseBackward,
    PointwiseForward,
    PointwisePass,
    RowDots,
    RowPass,
    ZeroTail,
)
from .transposition import ByteTransposition


def _size(problem: Measured) -> str:
    """The computation and its memory traffic, as text."""
    return f"{problem}, {problem.bytes / 1e6:.1f} MB"


FLOPS = attrgetter("flops")

GEMM: Kind[GroupedGemm] = Kind("grouped GEMM", attrgetter("a"), types=(GroupedGemm,), flops=FLOPS)
RAGGED: Kind[RaggedGemm] = Kind("ragged GEMM", attrgetter("a.data"), types=(RaggedGemm,))
ACTIVATION: Kind[Activating] = Kind("activation", attrgetter("preact"), types=(ActivateRows, ActivateRowsBackward))
FUNCTION: Kind[FunctionOfRows] = Kind("pointwise function", attrgetter("activation.preact"), types=(FunctionOfRows,))
POINTWISE: Kind[PointwisePass] = Kind(
    "pointwise function", attrgetter("columns"), types=(PointwiseForward, PointwiseBackward)
)
ROW_PASS: Kind[RowPass] = Kind("pass over rows", attrgetter("rows"), types=(ColumnSums, RowDots, ZeroTail))
TRANSPOSITION: Kind[ByteTransposition] = Kind(
    "transposition of bytes",
    attrgetter("data"),
    types=(ByteTransposition,),
    is_empty=lambda p: not p.out.numel(),
    configuration=_size,
)
DECODING: Kind[WeightDecoding] = Kind(
    "decoding of a weight",
    attrgetter("data"),
    types=(WeightDecoding,),
    is_empty=lambda p: not p.out.numel(),
    configuration=_size,
)
PERMUTATION: Kind[Permuting] = Kind(
    "permutation of rows", attrgetter("ids"), types=(OrderSlots, SpreadRows, SumRows, GatherSlots), by_door=True
)
CHOICE: Kind[Choosing | ChoosingBackward] = Kind(
    "choice of experts", attrgetter("logits"), types=(Choosing, ChoosingBackward), by_door=True
)
GATE: Kind[GateProduct] = Kind(
    "product of a router", attrgetter("a"), types=(GateProduct,), flops=FLOPS, optional=True, by_door=True
)
LOW_RANK: Kind[LowRankPass] = Kind(
    "pass of low rank", attrgetter("x"), types=(LowRankPass,), flops=FLOPS, optional=True, by_door=True
)
QUANTIZER: Kind[Quantizing] = Kind(
    "quantiser",
    attrgetter("tensor"),
    types=(QuantizeRows, QuantizeWeight, QuantizeActivation, QuantizeActivationBackward),
    is_empty=lambda p: not p.tensor.numel(),
    configuration=_size,
)
FAKE_QUANTIZER: Kind[FakeQuantizing] = Kind(
    "quantiser",
    attrgetter("tensor"),
    types=(FakeQuantizeRows, FakeQuantizeWeight),
    is_empty=lambda p: not p.tensor.numel(),
    configuration=_size,
)
SCALED_PRODUCT: Kind[Multiplying] = Kind(
    "product of quantised operands",
    attrgetter("a.data"),
    types=(ScaledGemm, ScaledWgrad),
    flops=FLOPS,
    configuration=_size,
)
ACTIVATED_PRODUCT: Kind[ActivatedScaledGemm] = Kind(
    "epilogue of a product of quantised operands",
    attrgetter("product.a.data"),
    types=(ActivatedScaledGemm,),
    is_empty=lambda p: not p.product.rows,
    flops=attrgetter("product.flops"),
    optional=True,
    by_door=True,
    configuration=_size,
)
PACKED: Kind[PackedGemm] = Kind(
    "product of packed weights",
    attrgetter("a"),
    types=(PackedGemm,),
    is_empty=lambda p: not p.rows,
    flops=FLOPS,
    optional=True,
    by_door=True,
    configuration=str,
)

KINDS = (
    *(GEMM, RAGGED, ACTIVATION, FUNCTION, POINTWISE, ROW_PASS, TRANSPOSITION, DECODING, LOW_RANK),
    *(PERMUTATION, CHOICE, GATE, QUANTIZER, FAKE_QUANTIZER, SCALED_PRODUCT, ACTIVATED_PRODUCT, PACKED),
)
