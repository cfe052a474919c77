"""Which tile a product gets: a small table per architecture, no autotuner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from types import MappingProxyType

from .shape import ProgramTile

SHORT = {
    "nt": ProgramTile(16, 128, 128, 4, 4),
    "nn": ProgramTile(16, 128, 64, 4, 4),
    "activate": ProgramTile(16, 128, 128, 4, 4),
    "activate_backward": ProgramTile(16, 128, 64, 4, 4),
}
"""Groups of up to a few rows: weights are read once, as fast as memory gives them."""

_PERSISTENT = ProgramTile(128, 256, 64, 8, 4, per_sm=1, tma=True, flatten=True)
TABLE: dict[str, dict[str, ProgramTile]] = {
    "sm_80": {  # mma.sync, cp.async
        "nt": ProgramTile(128, 128, 64, 8, 3),
        "nn": ProgramTile(128, 128, 64, 8, 3),
        "activate": ProgramTile(128, 128, 64, 8, 3),
        "activate_backward": ProgramTile(128, 128, 32, 8, 4),
        "tn": ProgramTile(128, 128, 32, 8, 4, strip=4),
    },
    "sm_89": {  # also sm_86 and sm_120
        "nt": ProgramTile(128, 128, 32, 8, 4),
        "nn": ProgramTile(128, 128, 32, 8, 4),
        "activate": ProgramTile(128, 128, 32, 8, 4),
        "activate_backward": ProgramTile(128, 64, 32, 4, 4, part=16),
        "tn": ProgramTile(128, 128, 32, 8, 4, strip=4),
    },
    "sm_90": {  # wgmma, TMA
        "nt": _PERSISTENT,
        "nn": _PERSISTENT._replace(flatten=False),
        "activate": _PERSISTENT._replace(stages=3),
        "activate_backward": _PERSISTENT._replace(part=16, apart=True),
        "tn": _PERSISTENT._replace(stages=3, strip=4),
    },
    "sm_100": {  # tcgen05 with tensor memory, TMA
        "nt": _PERSISTENT,
        "nn": _PERSISTENT,
        "activate": ProgramTile(128, 256, 64, 8, 3, per_sm=1, tma=True),
        "activate_backward": ProgramTile(128, 128, 64, 8, 4, per_sm=1, tma=True),
        "tn": ProgramTile(128, 256, 64, 8, 3, strip=4, tma=True),
    },
    "gfx942": {  # MFMA
        "nt": ProgramTile(128, 128, 32, 4, 2, strip=4),
        "nn": ProgramTile(128, 128, 32, 4, 2, strip=4),
        "activate": ProgramTile(128, 128, 32, 4, 2, strip=4),
        "activate_backward": ProgramTile(128, 128, 32, 4, 2, strip=4),
        "tn": ProgramTile(128, 128, 32, 4, 2, strip=4),
    },
}
ODD = ProgramTile(64, 128, 32, 8, 3)
"""Products of rows that are no multiples of 16 bytes: each number has its own address, and larger tiles spill those."""
_TWO_A_MULTIPROCESSOR = ProgramTile(128, 128, 64, 8, 3, per_sm=2, tma=True, registers=128)
EPILOGUE = ProgramTile(8, 256, 16, 4, 1, part=256)
"""The tile of an activation's backward that is a kernel of its own: 16 elements a thread."""
BY_ROWS: dict[str, dict[str, tuple[tuple[int, ProgramTile], ...]]] = {
    "sm_90": {
        "nn": ((768, _PERSISTENT),),
        "activate": ((180, _TWO_A_MULTIPROCESSOR),),
        "tn": ((768, _PERSISTENT._replace(k=32, stages=6, strip=4)),),
    }
}
"""The faster choices for groups of up to so many rows, where measured; the first that holds."""
FEW_ROWS, _SHORT_ROWS = 768, 64
MEASURED_ROWS = {True: 256, False: 2 * FEW_ROWS}
"""The rows of a group for which tiles are measured on a card: few, and many."""
TABLE |= {"sm_86": TABLE["sm_89"], "sm_120": TABLE["sm_89"], "sm_103": TABLE["sm_100"], "gfx950": TABLE["gfx942"]}
SHARED = {
    **{"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99},
    **{"gfx942": 64, "gfx950": 160},
}
"""Kilobytes of shared memory that a program may have."""
WITHOUT_BULK_COPIES = dict.fromkeys(("sm_90", "sm_100", "sm_103"), "sm_80")
"""The architecture whose tiles serve operands that are unaligned or lie apart: larger tiles spill addresses."""
_LIKE = {8: "sm_86", 9: "sm_90", 10: "sm_100"}


def nearest(architecture: str) -> str:
    """The architecture of the table whose row serves for ``sm_90`` and the like; the least of those that are alike."""
    if architecture in TABLE:
        return architecture
    return _LIKE.get(int(architecture[3:]) // 10, "sm_120") if architecture.startswith("sm_") else "gfx942"


CardTiles = Mapping[tuple[str, bool], ProgramTile]
"""Tiles that were measured on a card, for 16 bits: by kind, and whether groups have at most ``FEW_ROWS`` rows."""
_NOTHING: CardTiles = MappingProxyType({})


def choose(
    architecture: str,
    kind: str,
    rows_per_group: float,
    itemsize: int,
    strict: bool = False,
    of_card: CardTiles = _NOTHING,
    odd: bool = False,
) -> ProgramTile:
    """The tile of a product.

    Args:
        kind: a key of the table.
        itemsize: bytes of an operand's element; a step of 4 has half the depth.
        strict: operands of float32 that are multiplied as such, without tensor cores.
        of_card: those that were measured, which go before the table.
        odd: rows of operands are no multiples of 16 bytes.
    """
    architecture = nearest(architecture)
    measured = of_card.get((kind, rows_per_group <= FEW_ROWS)) if itemsize == 2 else None
    if measured is not None and (kind == "tn" or rows_per_group > _SHORT_ROWS):
        return _fitted(measured, architecture, itemsize)
    tile = ODD if odd and kind != "tn" else TABLE[architecture][kind]
    if strict:
        return ProgramTile(64, 64, 16, 8, 2, strip=tile.strip)
    if kind != "tn" and rows_per_group <= 16 and not odd:
        tile = SHORT[kind]
    elif kind != "tn" and rows_per_group <= _SHORT_ROWS:
        m = 32 if rows_per_group <= 32 else 64
        warps = tile.warps if odd else 4
        tile = ProgramTile(m, min(tile.n, 128), tile.k, warps, tile.stages, tile.strip, tma=tile.tma)
    elif itemsize == 2 and not odd:
        by_rows = BY_ROWS.get(architecture, {}).get(kind, ())
        tile = next((of_few for most, of_few in by_rows if rows_per_group <= most), tile)
    if itemsize == 4:
        tile = tile._replace(k=max(16, tile.k // 2), n=min(tile.n, 128))
    return _fitted(tile, architecture, itemsize)


def candidates(architecture: str, kind: str, few: bool = False) -> Iterator[ProgramTile]:
    """Tiles for 16 bits that may be faster on a card than the table's, which is the first; all fit its memory.

    Args:
        few: for groups of few rows, for which the tile for many rows is the second, where that is another.
    """
    architecture = nearest(architecture)
    first, of_many = (choose(architecture, kind, MEASURED_ROWS[rows], 2) for rows in (few, False))
    forms = [first]
    if kind == "activate_backward":
        forms += [first._replace(apart=not first.apart)]
    of_table = [*forms, of_many] if of_many not in forms else forms
    yield from of_table
    for (m, n), k, stages, form in product(_SIDES, (64, 32), (3, 4, 2), forms):
        tile = form._replace(m=m, n=n, k=k, stages=stages, warps=8 if m * n > _OF_FOUR_WARPS else 4)
        if tile == _fitted(tile, architecture, 2) and tile not in of_table:
            yield tile


_SIDES = ((128, 128), (128, 256), (64, 128), (128, 64), (256, 128), (64, 256))
_OF_FOUR_WARPS = 64 * 128  # elements of a tile


def shared_bytes(tile: ProgramTile, itemsize: int, architecture: str) -> int:
    """An upper bound of the shared memory of a program, with any epilogue and results of 16 or 32 bits.

    Operands take ``stages`` copies. Tensor cores that read operands of 32 bits there need them transposed, in two more
    copies. An epilogue changes layouts there, in float32: of the whole tile where several warps share a row, else of
    ``2 * part`` of its columns. Where loops are flattened, the operands of the next tile are loaded meanwhile.
    """
    copies = tile.stages + (2 if tile.tma and itemsize == 4 else 0)
    operands = copies * (tile.m + tile.n) * tile.k * itemsize + _BARRIERS
    if architecture == "gfx950":  # rows are padded there since Triton 3.8, by up to 5 %
        operands += operands // 16
    if not tile.flatten:
        return max(operands, tile.m * tile.n * 4)
    return operands + tile.m * (tile.n if tile.m < 16 * tile.warps else 2 * tile.part) * 4


_BARRIERS = 256


def _fitted(tile: ProgramTile, architecture: str, itemsize: int) -> ProgramTile:
    """The tile with as many stages, at most its own, as the memory has room for."""
    while tile.stages > 1 and shared_bytes(tile, itemsize, architecture) > SHARED[architecture] * 1024:
        tile = tile._replace(stages=tile.stages - 1)
    return tile
