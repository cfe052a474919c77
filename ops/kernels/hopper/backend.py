"""The problems that our own kernels solve: ``config(backend="hopper")``."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import TypeVar

from ..problems import kinds
from ..problems.function import function_by
from ..problems.gemm import GroupedGemm
from ..problems.interface import GemmImplementation, Implementation, Implementations, solving
from ..problems.quantized import PackedGemm
from ..problems.rows import FunctionOfRows, PointwisePass, RowPass
from . import (
    choice,
    decode,
    epilogue,
    fake_quantize,
    gate,
    gemm,
    low_rank,
    packed_gemm,
    permute,
    pointwise,
    quantize,
    ragged,
    rows,
    scaled_activation,
    scaled_gemm,
    stored_gemm,
    transpose,
)

P = TypeVar("P")
NAME = "hopper"
KEY = attrgetter("cache_key")
FEW_ROWS = 16
"""The most rows per group, on average, for which packed weights are read directly. More have not been timed."""


def _name_of(problem: GroupedGemm) -> str:
    return NAME if problem.epilogue is None else epilogue.name_of(problem.epilogue.spec)


def _groups_refusal(p: RowPass) -> str | None:
    return rows.groups_refusal(p.rows, p.split_sizes, p.out)


def _pointwise_refusal(p: PointwisePass) -> str | None:
    return pointwise.refusal(p.program, p.columns, p.rows)


def _function_refusal(p: FunctionOfRows) -> str | None:
    assert p.activation.spec.program is not None
    return pointwise.refusal(p.activation.spec.program, p.activation.preact, p.rows)


def _packed_refusal(p: PackedGemm) -> str | None:
    if p.rows > FEW_ROWS * p.groups:
        return f"{p.rows} rows of {p.groups} groups are not few: more than {FEW_ROWS} of each, on average"
    return packed_gemm.refusal(p)


def _of(
    name: str | Callable[[P], str],
    run: Callable[[P], None],
    refusal: Callable[[P], str | None],
    key: Callable[[P], Hashable] | None = None,
) -> Implementation[P]:
    return Implementation(NAME, name, run, refusal, key, "cuda")


_GEMM = GemmImplementation(
    *(NAME, _name_of, gemm.run, gemm.refusal, KEY, "cuda"),
    configuration=gemm.configuration,
    has_epilogues=True,
    epilogue_refusal=epilogue.refusal,
    slower_epilogue=epilogue.slower,
    second_refusal=gemm.second_refusal,
    stores_to_slots=gemm.stores_to_slots,
    zeroes_tail=True,
    finishes_backward=True,
)

KERNELS: Implementations = (
    (kinds.GEMM, _GEMM),
    (kinds.RAGGED, _of(NAME, ragged.run, ragged.refusal)),
    (kinds.ACTIVATION, _of("activation", solving(rows), rows.activation_refusal)),
    (kinds.FUNCTION, _of(NAME, function_by(pointwise), _function_refusal)),
    (kinds.POINTWISE, _of(f"{NAME} (pointwise)", solving(pointwise), _pointwise_refusal)),
    (kinds.ROW_PASS, _of(lambda p: f"{NAME} ({p.PASS})", solving(rows), _groups_refusal)),
    (kinds.TRANSPOSITION, _of(f"{NAME} (transpose)", transpose.run, transpose.refusal)),
    (kinds.DECODING, _of(lambda p: f"{NAME} (decode {p.name})", decode.run, decode.refusal)),
    (kinds.PERMUTATION, _of(lambda p: f"{permute.NAME} ({p.PASS})", solving(permute), permute.refusal, KEY)),
    (kinds.CHOICE, _of(lambda p: f"{choice.NAME} ({p.PASS})", choice.run, choice.refusal)),
    (kinds.GATE, _of(f"{NAME} (gate)", gate.run, gate.refusal)),
    (kinds.LOW_RANK, _of(low_rank.NAME, low_rank.run, low_rank.refusal)),
    (kinds.QUANTIZER, _of(f"{NAME} (quantise)", quantize.run, quantize.refusal)),
    (kinds.FAKE_QUANTIZER, _of(f"{NAME} (quantise)", fake_quantize.run, fake_quantize.refusal)),
    (kinds.SCALED_PRODUCT, _of(f"{NAME} (e4m3)", scaled_gemm.run, scaled_gemm.refusal)),
    (kinds.ACTIVATED_PRODUCT, _of(scaled_activation.NAME, scaled_activation.run, scaled_activation.refusal)),
    (kinds.STORED, _of(f"{NAME} (stored weight)", stored_gemm.run, stored_gemm.refusal)),
    (kinds.PACKED, _of(f"{NAME} (packed weight)", packed_gemm.run, _packed_refusal)),
)
