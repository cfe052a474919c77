"""The count of what tiles leave of the tensor cores (benchmarks/tile_bounds.py)."""

from __future__ import annotations

import pytest

from fusible.benchmarks import tile_bounds
from fusible.benchmarks.tile_bounds import ProductShape, Task, Tile

TALL, SWAPPED = Tile(128, 256, 2, False), Tile(160, 256, 2, True)


def test_rows_are_rounded_up_and_shared_evenly_where_operands_are_swapped() -> None:
    assert tile_bounds.heights_of(TALL, 300) == [128, 128, 64]
    assert tile_bounds.heights_of(SWAPPED, 300) == [160, 144]
    assert tile_bounds.heights_of(SWAPPED, 1) == [16]


def test_a_tile_takes_the_cycles_of_its_products() -> None:
    assert Task(128, 256, 64).cycles == 4 * 2 * 128  # two m64n256k16 in each step, 128 cycles each


def test_an_odd_tile_is_done_as_pairs_side_by_side() -> None:
    columns = ProductShape(256 * 3, 64)

    assert len(list(tile_bounds.tasks(columns, TALL, [300, 0]))) == 3 + 2
    assert list(tile_bounds.tasks(columns, TALL, [300])) == list(tile_bounds.tasks(columns, TALL, [0, 300]))


def test_the_last_columns_of_a_weight_gradient_are_narrower() -> None:
    wide, rest = tile_bounds.tasks(ProductShape(192 + 64, fixed_rows=256), Tile(256, 192, 1, False), [64])

    assert rest.cycles / wide.cycles == pytest.approx(128 / 192)


def test_bytes_of_shared_memory() -> None:
    """Weight gradients with four stages: 85 bytes a cycle of reads, 37 of stages, 32 of results."""
    task = Task(256, 192, 256)

    assert task.bytes_of(swap_ab=False) / task.cycles == pytest.approx(64 + 4096 / 192 + (256 + 192) * 128 / 1536 + 32)
    by_rows, by_weights = (Task(128, 256, 64).bytes_of(swap_ab) for swap_ab in (False, True))
    assert by_weights - by_rows == (4 * (64 + 128) - 2 * (64 + 256)) * 64 * 2


def test_whoever_is_free_takes_the_next_task() -> None:
    assert tile_bounds.last_end([3, 1, 1, 1, 4], 2) == 7
    assert tile_bounds.last_end([4, 3, 1, 1, 1], 2) == 5


def test_prints_every_product(capsys: pytest.CaptureFixture[str]) -> None:
    tile_bounds.main(["--preset", "small", "--tokens", "64"])
    text = capsys.readouterr().out

    assert text.startswith("### small, 64 tokens, random")
    assert all(f"| {name} " in text for name in tile_bounds.shapes(256, 512))
