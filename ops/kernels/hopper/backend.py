"""What our own kernels solve: ``config(backend="hopper")``."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from ..problems import kinds
from ..problems.function import function_by
from ..problems.gemm import GroupedGemm
from ..problems.interface import GemmKernels, Kernels, Kind
from ..problems.quantized import PackedGemm
from ..problems.routing import GatherSlots, OrderSlots, Permuting, SlotOrder, SpreadRows, SumRows
from ..problems.rows import ActivateRows, Activating, FunctionOfRows, PointwiseBackward, PointwiseForward
from . import (
    epilogue,
    fake_quantize,
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
    transpose,
)

NAME = "hopper"
FEW_ROWS = 16
"""As many of a group, on average, read packed weights as they lie. More than a handful have not been timed."""


def _name_of(problem: GroupedGemm) -> str:
    return NAME if problem.epilogue is None else epilogue.name_of(problem.epilogue.spec)


def _activate(p: Activating) -> None:
    if isinstance(p, ActivateRows):
        rows.forward(p.preact, p.spec, p.scales, p.out)
    else:
        rows.backward(p.dpostact, p.preact, p.spec, p.scales, p.out)


def _function_refusal(p: FunctionOfRows) -> str | None:
    assert p.activation.spec.program is not None
    return pointwise.refusal(p.activation.spec.program, p.activation.preact, p.rows)


def _pointwise(p: PointwiseForward | PointwiseBackward) -> None:
    if isinstance(p, PointwiseForward):
        pointwise.forward(p.program, p.rows, p.out)
    else:
        pointwise.backward(p.program, p.rows, p.columns, p.out)


def _permute(p: Permuting) -> None:
    match p:
        case OrderSlots():
            p.out = SlotOrder(*permute.route(p.ids, p.num_experts, p.weights))
        case SpreadRows():
            permute.permute(p.source, p.ids, p.tokens_per_expert, p.out, p.fill)
        case SumRows():
            permute.unpermute(p.source, p.ids, p.tokens_per_expert, p.out)
        case GatherSlots():
            permute.of_slots(p.source, p.ids, p.tokens_per_expert, p.out)


def _packed_refusal(p: PackedGemm) -> str | None:
    if p.rows > FEW_ROWS * p.groups:
        return f"{p.rows} rows of {p.groups} groups are not few: more than {FEW_ROWS} of each, on average"
    return packed_gemm.refusal(p)


def _of(name: str | Callable[[Any], str], **fields: Any) -> Kernels[Any]:
    return Kernels(NAME, name, device="cuda", **fields)


_GEMM = GemmKernels(
    *(NAME, _name_of, gemm.run, gemm.refusal, "cuda"),
    cache_key=attrgetter("cache_key"),
    configuration=gemm.configuration,
    has_epilogues=True,
    epilogue_refusal=epilogue.refusal,
    slower_epilogue=epilogue.slower,
    second_refusal=gemm.second_refusal,
    stores_to_slots=gemm.stores_to_slots,
    zeroes_tail=True,
    finishes_backward=True,
)

KERNELS: tuple[tuple[Kind[Any], Kernels[Any]], ...] = (
    (kinds.GEMM, _GEMM),
    (kinds.RAGGED, _of(NAME, run=ragged.run, refusal=ragged.refusal)),
    (
        kinds.ACTIVATION,
        _of("activation", run=_activate, refusal=lambda p: rows.activation_refusal(p.preact, p.scales, *p.beside)),
    ),
    (kinds.FUNCTION, _of(NAME, run=function_by(pointwise), refusal=_function_refusal)),
    (
        kinds.POINTWISE,
        _of(
            f"{NAME} (pointwise)",
            run=_pointwise,
            refusal=lambda p: pointwise.refusal(p.program, p.columns, p.rows),
        ),
    ),
    (
        kinds.COLUMN_SUMS,
        _of(
            f"{NAME} (column sums)",
            run=lambda p: rows.column_sums(p.rows, p.split_sizes, p.out, p.scale),
            refusal=lambda p: rows.groups_refusal(p.rows, p.split_sizes, p.out),
        ),
    ),
    (
        kinds.ROW_DOTS,
        _of(
            f"{NAME} (row dots)",
            run=lambda p: rows.row_dots(p.rows, p.vectors, p.split_sizes, p.out),
            refusal=lambda p: rows.groups_refusal(p.rows, p.split_sizes, p.out),
        ),
    ),
    (
        kinds.ZERO_TAIL,
        _of(
            f"{NAME} (zero tail)",
            run=lambda p: rows.zero_tail(p.rows, p.split_sizes),
            refusal=lambda p: rows.groups_refusal(p.rows, p.split_sizes, p.rows),
        ),
    ),
    (
        kinds.TRANSPOSITION,
        _of(
            f"{NAME} (transpose)",
            run=lambda p: transpose.run(p.data, p.out),
            refusal=lambda p: transpose.refusal(p.data),
        ),
    ),
    (
        kinds.PERMUTATION,
        _of(
            lambda p: f"{permute.NAME} ({p.PASS})",
            run=_permute,
            refusal=lambda p: permute.refusal(p.ids, p.num_experts, p.dtype),
            cache_key=attrgetter("cache_key"),
        ),
    ),
    (kinds.LOW_RANK, _of(low_rank.NAME, run=low_rank.run, refusal=low_rank.refusal)),
    (
        kinds.QUANTIZER,
        _of(f"{NAME} (quantise)", run=quantize.run, refusal=quantize.refusal),
    ),
    (
        kinds.FAKE_QUANTIZER,
        _of(f"{NAME} (quantise)", run=fake_quantize.run, refusal=fake_quantize.refusal),
    ),
    (
        kinds.SCALED_PRODUCT,
        _of(f"{NAME} (e4m3)", run=scaled_gemm.run, refusal=scaled_gemm.refusal),
    ),
    (
        kinds.ACTIVATED_PRODUCT,
        _of(scaled_activation.NAME, run=scaled_activation.run, refusal=scaled_activation.refusal),
    ),
    (
        kinds.PACKED,
        _of(f"{NAME} (packed weight)", run=packed_gemm.run, refusal=_packed_refusal),
    ),
)
