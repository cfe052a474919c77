"""``fusible tune``: which tiles are tried, and that the fastest one is kept and used; without a GPU."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_interpreter

from fusible.__main__ import main
from fusible.commands import tune
from fusible.ops.kernels.jit.cache import kernel_cache
from fusible.ops.kernels.pytorch import loop
from fusible.ops.kernels.triton import tiles, tuned
from fusible.ops.kernels.triton.shape import ProgramTile

CARD = torch.device("cuda", 0)
FAST = ProgramTile(64, 128, 32, 4, 3)
DOES_NOT_FIT = ProgramTile(256, 128, 64, 8, 3)
WRONG = ProgramTile(128, 128, 64, 8, 3)


@pytest.fixture(autouse=True)
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The name of the card, and an empty cache."""
    name = ["a card"]
    monkeypatch.setenv("FUSIBLE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name[0])
    for function in (kernel_cache, tuned.tiles_of):
        function.cache_clear()
    yield name
    for function in (kernel_cache, tuned.tiles_of):
        function.cache_clear()


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("architecture", tiles.TABLE)
@pytest.mark.parametrize("kind", tiles.TABLE["sm_80"])
def test_candidates_fit_the_card(architecture: str, kind: str, few: bool) -> None:
    """The first one is that of the table for as many rows as are measured, and that for many rows is tried, too."""
    found = list(tiles.candidates(architecture, kind, few))

    assert found[0] == tiles.choose(architecture, kind, tiles.MEASURED_ROWS[few], 2)
    assert tiles.choose(architecture, kind, tiles.MEASURED_ROWS[False], 2) in found
    assert len(found) == len({*found}) > 4
    for tile in found:
        assert tile.stages * (tile.m + tile.n) * tile.k * 2 <= tiles.SHARED[architecture] * 1024


def test_what_was_found_goes_before_the_table() -> None:
    found = {("nt", True): FAST, ("tn", False): FAST}

    def chosen(kind: str, rows: float, itemsize: int = 2) -> ProgramTile:
        return tiles.choose("sm_80", kind, rows, itemsize, of_card=found)

    assert chosen("nt", 300) == chosen("tn", 2000) == FAST
    for kind, rows in (("nt", 20), ("nt", 2000), ("nn", 300), ("tn", 300)):
        assert chosen(kind, rows) == tiles.choose("sm_80", kind, rows, 2)
    assert chosen("nt", 300, 4) == tiles.choose("sm_80", "nt", 300, 4)


def test_tiles_are_kept_for_the_card(card: list[str]) -> None:
    assert tuned.tiles_of(CARD) == {}
    found = {("nt", True): FAST, ("activate", False): FAST._replace(registers=128)}

    assert tuned.keep(CARD, found) is None
    assert tuned.tiles_of(CARD) == found
    assert tuned.tiles_of(torch.device("cpu")) == {}
    card[0] = "another card"
    tuned.tiles_of.cache_clear()
    assert tuned.tiles_of(CARD) == {}


def test_others_may_not_write_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert tuned.keep(CARD, {("nt", True): FAST}) == "can be written by others"
    assert tuned.tiles_of(CARD) == {}


def test_a_full_disk_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(source: str, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)

    assert tuned.keep(CARD, {("nt", True): FAST}) == "could not be written"
    assert tuned.tiles_of(CARD) == {}


def test_a_damaged_file_is_no_file(tmp_path: Path) -> None:
    tuned.keep(CARD, {("nt", True): FAST})
    (file,) = tmp_path.glob("*.cubin")
    for damaged in (b"", b"[]", file.read_bytes()[:-1], file.read_bytes() + b" "):
        file.write_bytes(damaged)
        tuned.tiles_of.cache_clear()
        assert tuned.tiles_of(CARD) == {}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Any]:
    with triton_interpreter.interpreted() as launch:
        yield launch


def by_pytorch(problem: Any, tile: ProgramTile) -> None:
    """Computes as any right tile does."""
    loop.run(problem)


def replace_tiles(
    monkeypatch: pytest.MonkeyPatch,
    interpreter: Any,
    run: Callable[[Any, ProgramTile], None],
    seconds: Mapping[ProgramTile, float],
) -> None:
    """Makes these tiles the candidates. Each computes by ``run``, in so many seconds."""
    tried = list[ProgramTile]()

    def noted(problem: Any, tile: ProgramTile) -> None:
        tried.append(tile)
        run(problem, tile)

    def time_of(function: Callable[[], None]) -> float:
        function()
        return seconds[tried[-1]]

    monkeypatch.setattr(interpreter, "run", noted)
    monkeypatch.setattr(tiles, "candidates", lambda *form: list(seconds))
    monkeypatch.setattr(tune, "_clock", lambda device: time_of)


def test_the_fastest_is_found(interpreter: Any, monkeypatch: pytest.MonkeyPatch, card: list[str]) -> None:
    from triton.runtime.errors import OutOfResources

    def run(problem: Any, tile: ProgramTile) -> None:
        if tile == DOES_NOT_FIT:
            raise OutOfResources(1, 0, "shared memory")
        loop.run(problem)
        if tile == WRONG:
            problem.out[0, 0].add_(problem.out.abs().max())

    seconds = {FAST._replace(k=64): 2.0, DOES_NOT_FIT: 0.5, FAST: 1.0, FAST._replace(m=32): 2.0}
    replace_tiles(monkeypatch, interpreter, run, seconds)
    fastest, why = tune.run(torch.device("cpu"), (2, 16, 16), 60.0)

    assert why is None
    assert tuned.tiles_of(CARD) == {(each.kind, each.few): FAST for each in fastest}
    assert len(fastest) == 10
    for each in fastest:
        assert each.tile == FAST
        assert (each.seconds, each.of_table, each.tried) == (1.0, 2.0, 3)
    replace_tiles(monkeypatch, interpreter, run, {WRONG: 0.5})
    with pytest.raises(RuntimeError, match="no tile of activate gives the results of PyTorch on this card"):
        tune.run(torch.device("cpu"), (2, 16, 16), 60.0)
    printed = "activate_backward few rows   64 x 128 x 32, 4 warps, 3 stages: 2.00 x as fast as the table's; 3 tried"
    assert printed in map(tune.line, fastest)


@pytest.mark.parametrize(("speedup", "kept", "says"), [(1.04, False, ", which is kept"), (1.06, True, "")])
def test_only_a_clearly_faster_tile_goes_before_the_tables(
    interpreter: Any, monkeypatch: pytest.MonkeyPatch, card: list[str], speedup: float, kept: bool, says: str
) -> None:
    """A small gain may be noise, and the tile would also replace those that the table has for fewer rows."""
    replace_tiles(monkeypatch, interpreter, by_pytorch, {FAST._replace(k=64): speedup, FAST: 1.0})
    assert tuned.keep(CARD, {("nt", True): WRONG}) is None
    fastest, _ = tune.run(torch.device("cpu"), (2, 16, 16), 60.0)

    assert {each.tile for each in fastest} == {FAST}
    tile = "activate_backward few rows   64 x 128 x 32, 4 warps, 3 stages"
    assert f"{tile}: {speedup} x as fast as the table's{says}; 2 tried" in map(tune.line, fastest)
    assert tuned.tiles_of(CARD) == ({(each.kind, each.few): FAST for each in fastest} if kept else {})


def test_a_tile_that_writes_nothing_gives_no_results(
    interpreter: Any, monkeypatch: pytest.MonkeyPatch, card: list[str]
) -> None:
    """Neither what PyTorch computed nor what the tile before was timed with counts as its own.

    If it is the table's, any other one goes before it.
    """
    idle = FAST._replace(m=32)

    def run(problem: Any, tile: ProgramTile) -> None:
        if tile != idle:
            loop.run(problem)

    for order in ([idle, FAST], [FAST, idle]):
        replace_tiles(monkeypatch, interpreter, run, dict.fromkeys(order, 1.0))
        fastest, _ = tune.run(torch.device("cpu"), (2, 16, 16), 60.0)

        assert {(each.tile, each.tried) for each in fastest} == {(FAST, 1)}
        replaces = order[0] == idle
        assert tuned.tiles_of(CARD) == ({(each.kind, each.few): FAST for each in fastest} if replaces else {})
        assert ("the table's fails; 1 tried" in tune.line(fastest[0])) == replaces


@pytest.mark.parametrize("name", ["--hidden", "--features"])
def test_tiles_serve_rows_of_whole_16_bytes(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that were measured on others would serve rows for which they were not measured."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit):
        main(["tune", name, "1407"])
    assert f"argument {name}: expected a multiple of 8, got '1407'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit):
        main(["tune"])
    assert "triton needs a CUDA device, got cpu" in capsys.readouterr().err
