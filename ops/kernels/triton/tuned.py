"""The tiles that ``fusible tune`` has measured on a card, kept on disk as compiled kernels are."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from ..jit.cache import kernel_cache, key_of
from .shape import ProgramTile
from .tiles import CardTiles


@cache
def tiles_of(device: torch.device) -> CardTiles:
    """The tiles of a card; none where nothing has been measured, or by another version of Triton."""
    content = kernel_cache().read(_key(device)) if device.type == "cuda" else None
    if content is None:
        return {}
    return {(kind, few): ProgramTile(*fields) for kind, few, fields in json.loads(content)}


def keep(device: torch.device, tiles: CardTiles) -> str | None:
    """Keeps the tiles on disk, for this process and later ones; returns the reason why it cannot, or None."""
    content = json.dumps([(kind, few, list(tile)) for (kind, few), tile in tiles.items()]).encode()
    kernels, key = kernel_cache(), _key(device)
    kernels.write(key, content)
    tiles_of.cache_clear()
    return kernels.refusal or (None if kernels.read(key) == content else "could not be written")


def _key(device: torch.device) -> str:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    return key_of("tiles", triton, torch.cuda.get_device_name(device), ProgramTile._fields)
