"""The configuration of a kernel, as ``explain`` shows it and as the emulated extension reports it."""

from __future__ import annotations

import pytest
import torch
from emulation import build, harness

from fusible import GroupedLinear, Scale, Sequential, SwiGLU, interleaved
from fusible.ops.kernels.extension import TYPE_CODES

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")

NT, TN, MULTIPROCESSORS = 0, 2, 4  # the emulated device has as many
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("groups", "rows", "n", "k", "tile"),
    [
        (128, 16, 256, 64, "128 x 192, cluster 1 x 1"),  # hardly any rows
        (128, 16, 256, 4096, "192 x 256, cluster 2 x 1, 3 stages, swap_ab"),  # deep
        (128, 512, 2048, 64, "192 x 256, cluster 2 x 1, 3 stages, swap_ab"),  # short groups
        (2, 512, 256, 64, "128 x 256, cluster 2 x 1, 3 stages, swap_ab"),  # no work for many rounds
        (2, 256, 256, 4096, "160 x 256, cluster 2 x 1, 3 stages, swap_ab"),  # few rounds of long tasks
        (2, 336, 256, 4096, "128 x 256, cluster 2 x 1, 3 stages, swap_ab"),  # where that has not been measured
        (2, 256, 256, 4032, "128 x 256, cluster 2 x 1, 3 stages, swap_ab"),
        (32, 1024, 2880, 2880, "256 x 192, cluster 1 x 1"),  # 192 divides the columns
        (8, 2048, 2048, 64, "128 x 256, cluster 2 x 1, 3 stages, 4 blocks"),  # long groups
        (8, 2048, 64, 2048, "128 x 64, cluster 1 x 1"),  # hardly any columns
    ],
)
def test_tiles_of_rows(emulation: harness.Emulation, groups: int, rows: int, n: int, k: int, tile: str) -> None:
    types = (TYPE_CODES[BF16],) * 2
    chosen = emulation.grouped_gemm_config(NT, *types, 0, groups, groups * rows, 0, n, k)

    assert chosen.startswith(f"tile {tile}")


def test_swap_ab_tiles_give_16_bits_and_the_lower_ones_take_bias(emulation: harness.Emulation) -> None:
    bf16, fp32, shape = TYPE_CODES[BF16], TYPE_CODES[torch.float32], (0, 64, 64 * 512, 0, 2048, 64)

    assert "192 x 256" in emulation.grouped_gemm_config(NT, bf16, bf16, *shape)
    assert "128 x 256, cluster 2 x 1, 3 stages, swap_ab" in emulation.grouped_gemm_config(NT, bf16, bf16, *shape, True)
    assert "swap_ab" not in emulation.grouped_gemm_config(NT, bf16, fp32, *shape)
    assert "swap_ab" not in emulation.grouped_gemm_config(TN, bf16, bf16, 0, 64, 64 * 512, 2048, 2048, 0)


@pytest.mark.parametrize(("rows", "n"), [(16, 256), (512, 2880), (512, 64), (2048, 2880)])
def test_a_second_pair_has_tiles_that_are_built_for_it(emulation: harness.Emulation, rows: int, n: int) -> None:
    bf16 = TYPE_CODES[BF16]
    chosen = emulation.grouped_gemm_config(NT, bf16, bf16, 0, 8, 8 * rows, 0, n, 64, False, 16)

    assert " x 256, cluster 2 x 1, 3 stages" in chosen
    assert ("swap_ab" in chosen) == (rows <= 1024)


def test_tiles_of_weight_gradients_may_be_halved(emulation: harness.Emulation) -> None:
    bf16, few = TYPE_CODES[BF16], ", halved where long groups are few, "

    assert few in emulation.grouped_gemm_config(TN, bf16, bf16, 0, 1, 512, 2048, 768, 0)
    assert few not in emulation.grouped_gemm_config(TN, bf16, bf16, 0, 1, 512, 2048, 768, 0, True)  # 128 rows
    assert few not in emulation.grouped_gemm_config(NT, bf16, bf16, 0, 1, 512, 0, 2880, 2880)


@pytest.mark.parametrize(("block", "swap_ab"), [(384, True), (1, True), (64, True), (128, False)])
def test_blocks_of_gate_and_up_must_fit_into_a_swap_ab_tile(
    emulation: harness.Emulation, block: int, swap_ab: bool
) -> None:
    chosen = emulation.linear_activation_config(False, True, block, TYPE_CODES[BF16], 0, 4, 2048, 768, 64)

    assert ("swap_ab" in chosen) == swap_ab


@pytest.mark.parametrize(
    ("scale_bias", "second_k", "function", "rows"),
    [(False, 0, False, 160), (True, 0, False, 128), (False, 16, False, 128), (False, 0, True, 160)],
)
def test_tiles_of_deep_products_end_in_activations_and_functions(
    emulation: harness.Emulation, scale_bias: bool, second_k: int, function: bool, rows: int
) -> None:
    shape = 0, 4, 1024, 768, 4096
    chosen = emulation.linear_activation_config(
        False, True, 384, TYPE_CODES[BF16], *shape, scale_bias, second_k, function
    )

    assert chosen.startswith(f"tile {rows} x 256, cluster 2 x 1, 3 stages, swap_ab")


def test_explain_names_kernels_and_configurations(emulation: harness.Emulation) -> None:
    model = Sequential(
        GroupedLinear(4, 64, 256, bias=False, dtype=BF16),
        SwiGLU(),
        Scale(),
        GroupedLinear(4, 128, 64, bias=False, dtype=BF16),
    )
    x, sizes, scales = torch.ones(40, 64, dtype=BF16), torch.full((4,), 10), torch.ones(40)
    explanation = model.explain(x, split_sizes=sizes, scales=scales)
    (step,) = explanation.steps
    first, second = step.configurations

    assert first.startswith("hopper (activation in the epilogue), NT 40 x 256 x 64: tile 128 x 256, ")
    assert "swap_ab" in first
    assert second == (
        "hopper, NT 40 x 64 x 128: tile 128 x 192, cluster 1 x 1, 4 stages, "
        f"{MULTIPROCESSORS} blocks, tasks in a fixed order"
    )
    assert f"GroupedMLP 0 1 2 3: {second}" in str(explanation).splitlines()


def test_explain_names_the_configuration_of_a_product_beside_an_activation(emulation: harness.Emulation) -> None:
    linear = GroupedLinear(2, 64, 96, bias=True, dtype=BF16)
    model = Sequential(linear, SwiGLU(layout=interleaved(6)))
    (step,) = model.explain(torch.ones(8, 64, dtype=BF16), split_sizes=torch.tensor([3, 5])).steps

    assert step.kernel == "hopper + activation + hopper (zero tail)"
    assert "blocks of 6" in step.reason
    assert step.configurations[0].startswith("hopper, NT 8 x 96 x 64: tile ")


@pytest.mark.parametrize(
    ("groups", "output", "bias", "tile"),
    [
        (1, torch.bfloat16, False, "256 x 192"),  # four tiles for four multiprocessors, or three pairs for two clusters
        (2, torch.bfloat16, False, "256 x 128"),  # more than a round of either
        (1, torch.float32, False, "256 x 128"),  # not measured
        (1, torch.bfloat16, True, "256 x 128"),  # not built
    ],
)
def test_weight_gradients_that_fit_one_round_take_one(
    emulation: harness.Emulation, groups: int, output: torch.dtype, bias: bool, tile: str
) -> None:
    types, sizes = (TYPE_CODES[BF16], TYPE_CODES[output]), (groups, groups * 3000, 256, 768, 0)
    assert emulation.grouped_gemm_config(TN, *types, 0, *sizes, bias).startswith(f"tile {tile}")
