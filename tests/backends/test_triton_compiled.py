"""More kernels than in ``test_triton_ahead.py`` are compiled for GPUs that are not here; ``--sample`` divides them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import triton_process
from triton_process import CARDS, Compile, spilled

from fusible.ops.kernels.triton import tiles

SPILLED = 40  # bytes of a thread, in the one kernel whose registers nearly suffice, under TF32


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    with triton_process.started(str(tmp_path_factory.mktemp("triton"))) as compiled:
        yield compiled


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("card", CARDS)
def test_an_epilogue_that_is_a_kernel_of_its_own(card: str, dtype: str, compiled: Compile) -> None:
    of_product, of_epilogue = compiled(card, "--apart", "--products", "dgrad2", "--dtype", dtype)

    assert not any(instruction in of_epilogue for instruction in CARDS.values())
    for line in (of_product, of_epilogue):
        assert " fits " in line
        assert spilled(line) == 0, line


@pytest.mark.parametrize("card", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx950"])
def test_float32_that_may_be_rounded(card: str, compiled: Compile) -> None:
    """TF32 is a format of NVIDIA's."""
    form = "--dtype", "float32", "--tf32", "--rows", "middle", "--products", "fc1", "dgrad2", "wgrad1"
    printed = compiled(card, *form)

    assert len(printed) == 3
    for line in printed:
        assert " fits " in line
        assert spilled(line) <= (SPILLED if " dgrad2 " in line else 0), line
        assert {**CARDS, "gfx950": "v_mfma_f32_32x32x2_f32"}[card] in line


@pytest.mark.parametrize("card", [name for name in CARDS if name.startswith("sm_")])
def test_rows_that_begin_anywhere(card: str, compiled: Compile) -> None:
    """Loads of single numbers, each with an address of its own."""
    sizes = "--sizes", "1407", "333", "--rows", "middle", "long"
    printed = compiled(card, *sizes, "--products", "fc2", "dgrad2")

    assert len(printed) == 4
    for line in printed:
        assert " fits " in line
        assert spilled(line) == 0, line


@pytest.mark.parametrize("card", CARDS)
def test_passes_over_rows(card: str, compiled: Compile) -> None:
    printed = compiled(card, "--instead", "passes")

    assert len(printed) == 42
    for line in printed:
        assert spilled(line) == 0, line


def test_what_lies_apart_and_functions_of_columns_and_elements(compiled: Compile) -> None:
    printed = compiled("sm_80", "--instead", "operands")

    assert len(printed) == 5
    assert all("mma.sync" in line for line in printed)


@pytest.mark.parametrize("card", ["sm_80", "sm_90", "sm_100"])
def test_hidden_rows_are_rounded_alike_with_the_pre_activation_and_without(card: str, compiled: Compile) -> None:
    """A product and a sum that become one operation in one of the two kernels are rounded once there."""
    printed = compiled(card, "--instead", "residual")

    assert len(printed) == 2
    for line in printed:
        assert "fma.rn.f32" not in line


@pytest.mark.parametrize("kind", tiles.TABLE["sm_80"])
@pytest.mark.parametrize("card", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"])
def test_the_choice_counts_the_shared_memory_that_kernels_take(card: str, kind: str, compiled: Compile) -> None:
    """Every kind of product is compiled with every epilogue, for operands of 16 and 32 bits."""
    printed = compiled(card, kind, script="triton_shared")

    assert len(printed) == {"activate": 24, "activate_backward": 12}.get(kind, 6)
    for line in printed:
        shared, counted, available = map(int, line.split(maxsplit=3)[:3])
        assert shared <= counted <= available, line


@pytest.mark.parametrize("card", ["sm_80", "sm_90", "sm_100"])
def test_parameters_are_those_that_replays_give(card: str, compiled: Compile) -> None:
    printed = [line.split() for line in compiled(card, script="triton_parameters")]

    assert {name for name, _, _ in printed} >= {"rows_kernel", "weights_kernel", "epilogue_kernel", "table_kernel"}
    assert {is_right for _, _, is_right in printed} == {"True"}
    assert any(has_maps == "True" for _, has_maps, _ in printed) == (card != "sm_80")
