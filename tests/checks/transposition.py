"""Checks of the kernel that transposes bytes, on a GPU or its emulation."""

from __future__ import annotations

import torch
from torch import Tensor

from fusible.ops.kernels.hopper import transpose
from fusible.ops.kernels.problems.transposition import ByteTransposition

from .quantize import assert_untouched, poisoned

SHAPES = [
    (2, 128, 256),  # whole tiles
    (3, 136, 160),  # the last ones are partial, in vectors of 16 bytes or not
    (2, 144, 272),
    (2, 16, 400),
    (5, 17, 33),
    (1, 129, 16),
    (1, 1, 1),
    (512, 3, 5),
    (0, 16, 16),
    (2, 0, 16),
    (2, 16, 0),
]
GUARD = 256


def bytes_of(*shape: int) -> Tensor:
    """Bytes of all values."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def check_transpose(device: str, groups: int, rows: int, columns: int, offset: int = 0) -> None:
    """Bytes of all values, from ``offset`` after an aligned address on; memory around the result is unchanged."""
    count, generator = groups * rows * columns, torch.Generator().manual_seed(rows + columns)
    source = torch.randint(0, 256, (offset + count,), generator=generator, dtype=torch.uint8).to(device)
    data = source[offset:].view(groups, rows, columns)
    memory = poisoned(GUARD + count + GUARD, device=device)
    out = memory[GUARD : GUARD + count].view(groups, columns, rows)
    transposed_into(out, data)
    assert torch.equal(out, data.mT)
    assert_untouched(memory[:GUARD], "bytes before the result")
    assert_untouched(memory[GUARD + count :], "bytes behind the result")


def transposed_into(out: Tensor, data: Tensor) -> None:
    """By the kernel, of e4m3."""
    data, out = data.view(torch.float8_e4m3fn), out.view(torch.float8_e4m3fn)
    problem = ByteTransposition(data, out)
    assert transpose.refusal(problem) is None, transpose.refusal(problem)
    transpose.run(problem)
