"""Our Triton kernels are compiled for GPUs that are not here: they fit the memory of the card, and its registers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from triton_interpreter import needs_triton

SUPPORT = Path(__file__).parents[1] / "support"
EXPECTED = {
    **{"sm_80": "mma.sync", "sm_86": "mma.sync", "sm_89": "mma.sync", "sm_120": "mma.sync"},
    **{"sm_90": "wgmma", "sm_100": "tcgen05", "sm_103": "tcgen05", "gfx942": "v_mfma", "gfx950": "v_mfma"},
}

SPILLED = 40  # bytes of a thread, in the one kernel whose registers nearly suffice, under TF32


def spilled(line: str) -> int:
    return int(re.search(r"(\d+) spilled", line)[1])  # type: ignore[index]


def compiled(cache: Path, *arguments: str, script: str = "triton_ahead.py") -> list[str]:
    """Returns the output of the script, run in a process in which kernels are not interpreted."""
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SUPPORT / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


@needs_triton
@pytest.mark.parametrize("arguments", [(), ("--dtype", "float32", "--products", "fc1", "wgrad1", "--wide")])
@pytest.mark.parametrize("architecture", EXPECTED)
def test_compiles(architecture: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    printed = compiled(tmp_path, architecture, "--products", "fc1", "dgrad2", "wgrad1", *arguments)

    assert len(printed) >= 2
    for line in printed:
        assert " fits " in line
        assert spilled(line) == 0, line
        without_matrices = arguments and architecture.startswith("sm_")
        assert " alone " in line or ("fma.rn.f32" if without_matrices else EXPECTED[architecture]) in line


@needs_triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("architecture", EXPECTED)
def test_compiles_an_epilogue_that_is_a_kernel_of_its_own(architecture: str, dtype: str, tmp_path: Path) -> None:
    of_product, of_epilogue = compiled(tmp_path, architecture, "--apart", "--products", "dgrad2", "--dtype", dtype)

    assert not any(instruction in of_epilogue for instruction in EXPECTED.values())
    for line in (of_product, of_epilogue):
        assert " fits " in line
        assert spilled(line) == 0, line


@needs_triton
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx950"])
def test_float32_that_may_be_rounded(architecture: str, tmp_path: Path) -> None:
    """TF32 is a format of NVIDIA's."""
    form = "--dtype", "float32", "--tf32", "--rows", "middle", "--products", "fc1", "dgrad2", "wgrad1"
    printed = compiled(tmp_path, architecture, *form)

    assert len(printed) == 3
    for line in printed:
        assert " fits " in line
        assert spilled(line) <= (SPILLED if " dgrad2 " in line else 0), line
        assert {**EXPECTED, "gfx950": "v_mfma_f32_32x32x2_f32"}[architecture] in line


@needs_triton
@pytest.mark.parametrize("architecture", [name for name in EXPECTED if name.startswith("sm_")])
def test_rows_that_begin_anywhere(architecture: str, tmp_path: Path) -> None:
    """Loads of single numbers, each with an address of its own."""
    sizes = "--sizes", "1407", "333", "--rows", "middle", "long"
    printed = compiled(tmp_path, architecture, *sizes, "--products", "fc2", "dgrad2")

    assert len(printed) == 4
    for line in printed:
        assert " fits " in line
        assert spilled(line) == 0, line


@needs_triton
@pytest.mark.parametrize("architecture", EXPECTED)
def test_compiles_passes_over_rows(architecture: str, tmp_path: Path) -> None:
    printed = compiled(tmp_path, architecture, "--instead", "passes")

    assert len(printed) == 42
    for line in printed:
        assert spilled(line) == 0, line


@needs_triton
def test_one_kernel_serves_all_numbers_of_tokens(tmp_path: Path) -> None:
    """Triton compiles for integers that are 1 or multiples of 16, unless it is told not to."""
    tokens = "1", "16", "23", "64"
    printed = [line.partition(" ") for line in compiled(tmp_path, "--forms", *tokens)]
    first, *others = ([form for count, _, form in printed if count == each] for each in tokens)

    assert len(first) == 41
    for other in others:
        assert other == first


@needs_triton
def test_compiles_what_lies_apart_and_functions_of_columns_and_elements(tmp_path: Path) -> None:
    printed = compiled(tmp_path, "sm_80", "--instead", "operands")

    assert len(printed) == 5
    assert all("mma.sync" in line for line in printed)


@needs_triton
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_hidden_rows_are_rounded_alike_with_the_pre_activation_and_without(architecture: str, tmp_path: Path) -> None:
    """A product and a sum that become one operation in one of the two kernels are rounded once there."""
    printed = compiled(tmp_path, architecture, "--instead", "residual")

    assert len(printed) == 2
    for line in printed:
        assert "fma.rn.f32" not in line


@needs_triton
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
def test_the_choice_counts_the_shared_memory_that_kernels_take(architecture: str, tmp_path: Path) -> None:
    """Every kind of product is compiled with every epilogue, for operands and results of 16 and 32 bits."""
    printed = compiled(tmp_path, architecture, script="triton_shared.py")

    assert len(printed) == 100
    for line in printed:
        shared, counted, available = map(int, line.split(maxsplit=3)[:3])
        assert shared <= counted <= available, line


@pytest.mark.parametrize("architecture", EXPECTED)
def test_every_tile_takes_less_shared_memory_than_its_card_has(architecture: str) -> None:
    from fusible.ops.kernels.triton import tiles

    available = tiles.SHARED[architecture] * 1024
    for kind in tiles.TABLE[architecture]:
        for rows, itemsize, odd in product((1.0, 40.0, 500.0, 1e4), (2, 4), (False, True)):
            tile = tiles.choose(architecture, kind, rows, itemsize, odd=odd)
            assert tiles.shared_bytes(tile, itemsize) <= available, (kind, rows, itemsize, odd)
        for tile in tiles.candidates(architecture, kind):
            assert tiles.shared_bytes(tile, 2) <= available, (kind, tile)


@needs_triton
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_parameters_are_those_that_replays_give(architecture: str, tmp_path: Path) -> None:
    printed = [line.split() for line in compiled(tmp_path, architecture, script="triton_parameters.py")]

    assert {name for name, _, _ in printed} >= {"rows_kernel", "weights_kernel", "epilogue_kernel", "table_kernel"}
    assert {is_right for _, _, is_right in printed} == {"True"}
    assert any(has_maps == "True" for _, has_maps, _ in printed) == (architecture != "sm_80")
