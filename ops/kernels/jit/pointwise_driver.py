"""``pointwise`` of the extension for GPUs without the extension: the same keywords, launched by the CUDA driver."""

from __future__ import annotations

import struct
from functools import cache

import torch

from . import driver

THREADS, MOST_CONSTANTS, MOST_OPERANDS = 256, 16, 8  # of kernels and of PointwiseParams: pointwise_params.h in csrc
_BLOCKS_PER_MULTIPROCESSOR = 8
_PARAMS = struct.Struct(f"@qII4P{6 * MOST_OPERANDS}PPi?3xP{MOST_CONSTANTS}f")
PARAMS_BYTES = -(-_PARAMS.size // 8) * 8  # of PointwiseParams, which is aligned as its addresses are


def pointwise(
    *,
    function: int,
    device: int,
    stream: int,
    rows: int,
    columns: int,
    block: int,
    x: int,
    dy: int,
    y: int,
    dx: int,
    numbers: list[int],
    dnumbers: list[int],
    vectors: list[int],
    dcolumns: list[int],
    matrices: list[int],
    dmatrices: list[int],
    groups: int,
    sizes: int,
    int64_sizes: bool,
    constants: tuple[float, ...],
) -> None:
    """Launches a compiled kernel. The keywords are described in csrc/fusible/pointwise_params.h."""
    unused = (0.0,) * (MOST_CONSTANTS - len(constants))
    lists = numbers, dnumbers, vectors, dcolumns, matrices, dmatrices
    nowhere = 0  # to report wrong sizes to, which is the extension's
    operands = [address for each in lists for address in _filled(each)]
    of_groups = sizes, groups, int64_sizes, nowhere
    params = _PARAMS.pack(rows, columns, block, x, dy, y, dx, *operands, *of_groups, *constants, *unused)
    blocks = min(-(-rows // (THREADS // 32)), _most_blocks(device))  # a warp has a row
    driver.launch(function, blocks, THREADS, params, device, stream)


def _filled(addresses: list[int]) -> list[int]:
    return addresses + [0] * (MOST_OPERANDS - len(addresses))


@cache
def _most_blocks(device: int) -> int:
    """The number of blocks that can run at once."""
    return int(_BLOCKS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count)
