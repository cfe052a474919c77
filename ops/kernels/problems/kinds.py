"""The kinds of problems that the door hands to backends: a backend registers kernels for those that it can solve."""

from __future__ import annotations

from operator import attrgetter

from .choice import Choosing, ChoosingBackward
from .decoding import WeightDecoding
from .fake_quantized import FakeQuantizing
from .gate import GateProduct
from .gemm import GroupedGemm
from .interface import Kind, Measured
from .low_rank import LowRankPass
from .quantized import ActivatedScaledGemm, Multiplying, PackedGemm, Quantizing, StoredGemm
from .ragged import RaggedGemm
from .routing import Permuting
from .rows import Activating, FunctionOfRows, PointwisePass, RowPass
from .transposition import ByteTransposition


def _size(problem: Measured) -> str:
    """The computation and its memory traffic, as text."""
    return f"{problem}, {problem.bytes / 1e6:.1f} MB"


FLOPS = attrgetter("flops")

GEMM: Kind[GroupedGemm] = Kind("grouped GEMM", GroupedGemm, attrgetter("a"), flops=FLOPS)
RAGGED: Kind[RaggedGemm] = Kind("ragged GEMM", RaggedGemm, attrgetter("a.data"))
ACTIVATION: Kind[Activating] = Kind("activation", Activating, attrgetter("preact"))
FUNCTION: Kind[FunctionOfRows] = Kind("pointwise function", FunctionOfRows, attrgetter("activation.preact"))
POINTWISE: Kind[PointwisePass] = Kind("pointwise function", PointwisePass, attrgetter("columns"))
ROW_PASS: Kind[RowPass] = Kind("pass over rows", RowPass, attrgetter("rows"))
TRANSPOSITION: Kind[ByteTransposition] = Kind(
    "transposition of bytes",
    ByteTransposition,
    attrgetter("data"),
    is_empty=lambda p: not p.out.numel(),
    configuration=_size,
)
DECODING: Kind[WeightDecoding] = Kind(
    "decoding of a weight",
    WeightDecoding,
    attrgetter("data"),
    is_empty=lambda p: not p.out.numel(),
    configuration=_size,
)
PERMUTATION: Kind[Permuting] = Kind("permutation of rows", Permuting, attrgetter("ids"), by_door=True)
CHOICE: Kind[Choosing | ChoosingBackward] = Kind(
    "choice of experts", Choosing | ChoosingBackward, attrgetter("logits"), by_door=True
)
GATE: Kind[GateProduct] = Kind(
    "product of a router", GateProduct, attrgetter("a"), flops=FLOPS, optional=True, by_door=True
)
LOW_RANK: Kind[LowRankPass] = Kind(
    "pass of low rank", LowRankPass, attrgetter("x"), flops=FLOPS, optional=True, by_door=True
)
QUANTIZER: Kind[Quantizing] = Kind(
    "quantiser",
    Quantizing,
    attrgetter("tensor"),
    is_empty=lambda p: not p.tensor.numel(),
    configuration=_size,
)
FAKE_QUANTIZER: Kind[FakeQuantizing] = Kind(
    "quantiser",
    FakeQuantizing,
    attrgetter("tensor"),
    is_empty=lambda p: not p.tensor.numel(),
    configuration=_size,
)
SCALED_PRODUCT: Kind[Multiplying] = Kind(
    "product of quantised operands",
    Multiplying,
    attrgetter("a.data"),
    flops=FLOPS,
    configuration=_size,
)
ACTIVATED_PRODUCT: Kind[ActivatedScaledGemm] = Kind(
    "epilogue of a product of quantised operands",
    ActivatedScaledGemm,
    attrgetter("product.a.data"),
    is_empty=lambda p: not p.product.rows,
    flops=attrgetter("product.flops"),
    optional=True,
    by_door=True,
    configuration=_size,
)
PACKED: Kind[PackedGemm] = Kind(
    "product of packed weights",
    PackedGemm,
    attrgetter("a"),
    is_empty=lambda p: not p.rows,
    flops=FLOPS,
    optional=True,
    by_door=True,
    configuration=str,
)
STORED: Kind[StoredGemm] = Kind(
    "product of stored weights",
    StoredGemm,
    attrgetter("product.a"),
    is_empty=lambda p: not p.product.rows,
    flops=FLOPS,
    optional=True,
    by_door=True,
    configuration=str,
)

KINDS = (
    *(GEMM, RAGGED, ACTIVATION, FUNCTION, POINTWISE, ROW_PASS, TRANSPOSITION, DECODING, LOW_RANK),
    *(PERMUTATION, CHOICE, GATE, QUANTIZER, FAKE_QUANTIZER, SCALED_PRODUCT, ACTIVATED_PRODUCT, PACKED, STORED),
)
