"""Tunes tokamax's kernels for the products of a program before it is compiled; untuned ones use small tiles."""

from __future__ import annotations

from typing import Any


def tune(lowered: Any, most: int) -> None:
    """Times at most ``configurations`` configurations of each product; tokamax uses the fastest from then on."""
    from tokamax import autotuning  # type: ignore[import-not-found, unused-ignore]

    for product in autotuning.get_bound_args(lowered):
        configurations = sorted(product.autotuning_configs, key=_preference)
        if configurations:
            product.autotune(set(configurations[:most]))


def _preference(configuration: Any) -> tuple[Any, ...]:
    """Sort key of configurations: the entries of tokamax's own list for an H100 are among the first eight."""
    c = configuration
    deep_if_persistent = (c.num_stages == 4) == c.persistent
    return (-c.block_m, c.block_k, not deep_if_persistent, c.grid_tile_width not in (1, 8), c.grid_minor_dim)
