"""Our Triton kernels are compiled for GPUs that are not here: they fit the memory of the card, and its registers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import triton_process
from triton_process import CARDS, Compile, spilled

from fusible.ops.kernels.triton import tiles

FLOAT32 = "--dtype", "float32", "--wide"
FORMS = [("fc1",), ("dgrad2",), ("wgrad1",), ("fc1", *FLOAT32), ("wgrad1", *FLOAT32)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    with triton_process.started(str(tmp_path_factory.mktemp("triton"))) as compiled:
        yield compiled


@pytest.mark.parametrize("first", range(len(FORMS)))
def test_compiles(first: int, compiled: Compile) -> None:
    """A case has every card, as every part of CI shall, and another product on each; all cases have each on each."""
    for i, (card, of_matrices) in enumerate(CARDS.items()):
        form = FORMS[(first + i) % len(FORMS)]
        printed = compiled(card, "--products", *form)

        assert len(printed) >= 1
        for line in printed:
            assert " fits " in line
            assert spilled(line) == 0, line
            without_matrices = len(form) > 1 and card.startswith("sm_")
            assert " alone " in line or ("fma.rn.f32" if without_matrices else of_matrices) in line


def test_one_kernel_serves_all_numbers_of_tokens(compiled: Compile) -> None:
    """Triton compiles for integers that are 1 or multiples of 16, unless it is told not to."""
    tokens = "1", "16", "23", "64"
    printed = [line.partition(" ") for line in compiled("--forms", *tokens)]
    first, *others = ([form for count, _, form in printed if count == each] for each in tokens)

    assert len(first) == 41
    for other in others:
        assert other == first


@pytest.mark.parametrize("card", CARDS)
def test_every_tile_takes_less_shared_memory_than_its_card_has(card: str) -> None:
    available = tiles.SHARED[card] * 1024
    for kind in tiles.TABLE[card]:
        for rows, itemsize, odd in product((1.0, 40.0, 500.0, 1e4), (2, 4), (False, True)):
            tile = tiles.choose(card, kind, rows, itemsize, odd=odd)
            assert tiles.shared_bytes(tile, itemsize, card) <= available, (kind, rows, itemsize, odd)
        for tile in (*tiles.candidates(card, kind), *tiles.candidates(card, kind, few=True)):
            assert tiles.shared_bytes(tile, 2, card) <= available, (kind, tile)
