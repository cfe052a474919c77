"""Our own CUDA kernel that decodes a weight: it reads the stored bytes once and writes values of 16 bits once.

It writes memory that the door has just allocated and no one else has seen, so its version stays.
"""

from __future__ import annotations

import torch

from ...formats.decoding import Codes, Decoding
from ..extension import TYPE_CODES, address, compiled, hardware_refusal, stream
from ..problems.decoding import WeightDecoding
from ..problems.gemm import addresses

_VALUES = 8
"""The values that a thread takes at a time."""
_CODES = {Codes.E2M1: 0, Codes.NF4: 1, Codes.INTEGER: 2, Codes.E4M3: 3}
_SCALES = {**TYPE_CODES, torch.float8_e4m3fn: 3, torch.float8_e8m0fnu: 4, torch.uint8: 5}
_SCALES_OF_BYTES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)
_MOST_ROWS = 2**31 - 1


def refusal(p: WeightDecoding) -> str | None:
    """Why the kernel does not decode the weight; None: it does."""
    if (why := hardware_refusal(p.data)) is not None:
        return why
    if p.decoding is None:
        return f"does not know the codes of {p.name}"
    return _value_refusal(p, p.decoding) or _layout_refusal(p)


def _value_refusal(p: WeightDecoding, decoding: Decoding) -> str | None:
    groups, rows, columns = p.out.shape
    if p.out.dtype not in (torch.bfloat16, torch.float16):
        return f"decodes to 16 bits, not {p.out.dtype}"
    if columns % _VALUES:
        return f"needs rows of a multiple of {_VALUES} values, got {columns}"
    if groups * rows > _MOST_ROWS:
        return f"takes at most {_MOST_ROWS} rows, got {groups * rows}"
    if not _are_eights(decoding.columns, columns):
        return f"needs scales of {_VALUES} values times a power of two, got one for {decoding.columns}"
    if p.scales.dtype not in (_SCALES_OF_BYTES if decoding.codes is Codes.E4M3 else _SCALES):
        return f"does not read scales in {p.scales.dtype}"
    return None


def _are_eights(block: int | None, columns: int) -> bool:
    """Whether the values of a row that share a scale are all, or eight times a power of two."""
    return block is None or block >= columns or (block % _VALUES == 0 and (block & (block - 1)) == 0)


def _layout_refusal(p: WeightDecoding) -> str | None:
    parts = {"data": p.data, "scales": p.scales} | ({} if p.factors is None else {"factors": p.factors})
    for name, part in parts.items():
        if not part.is_contiguous():
            return f"needs dense {name}, got strides {list(part.stride())}"
    for name, part, alignment in (("data", p.data, _VALUES), ("out", p.out, 16)):
        (at,) = addresses(part)
        if at % alignment:
            return f"needs {name} aligned to {alignment} bytes, got the address {at:#x}"
    return None


def run(p: WeightDecoding) -> None:
    """One launch on the current stream."""
    device, (groups, rows, columns), decoding = p.data.get_device(), p.out.shape, p.decoding
    assert decoding is not None
    sections = decoding.sections
    compiled().decode_weight(
        device=device,
        stream=stream(device),
        groups=groups * sections,
        n=rows // sections,
        k=columns,
        codes=_CODES[decoding.codes],
        data=p.data.data_ptr(),
        stored_scale=_SCALES[p.scales.dtype],
        scales=p.scales.data_ptr(),
        rows_of_scale=rows // p.scales.shape[1] if decoding.rows is None else decoding.rows,
        columns_of_scale=decoding.columns or columns,
        decoders=address(p.factors),
        decoders_of_group=0 if p.factors is None else p.factors[0].numel() // sections,
        divides=decoding.divides,
        type=TYPE_CODES[p.out.dtype],
        out=p.out.data_ptr(),
    )
