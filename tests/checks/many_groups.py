"""Checks with more groups than a product's table holds, on a GPU or its emulation: every one of these runs by windows.

Most groups are empty, some have one row, and those on both sides of a window's end have several.
"""

from __future__ import annotations

import torch

from fusible.ops.formats.packed import PackedFormat
from fusible.ops.kernels.hopper.routed_mlp import RoutedMlp, refusal
from fusible.ops.kernels.problems.gemm import Layout
from fusible.ops.values.activation_spec import gated

from . import fake_quantize, fused, gemm, low_rank, packed, quantize, ragged, routed, rows, scaled
from . import routing as routes

GROUPS = (511, 512, 513, 896, 2048, 4096)
WINDOW = 512
SLOTS = (1, 16, 22, 32)


def sizes_of(groups: int, every: int = 29) -> tuple[int, ...]:
    """A row for each ``every``-th group, and more for the last of a window and the first of the next."""
    edges = {groups - 1: 5, **{edge + at: 70 + at for edge in range(WINDOW, groups, WINDOW) for at in (-1, 0)}}
    return tuple(edges.get(g, int(g % every == 3)) for g in range(groups))


def check_products(device: str, layout: Layout, groups: int) -> None:
    gemm.check(device, gemm.Case(layout, sizes_of(groups), k=24, n=16, tail=9))


def check_products_with_all(device: str, layout: Layout, groups: int) -> None:
    """Bias, factors, matrices anywhere; a beta for each group."""
    case = gemm.Case(layout, sizes_of(groups), k=24, n=16, tail=9, bias=torch.float32, alpha="groups")
    of_rows = layout is not Layout.TN
    gemm.check(device, case, row_scale=of_rows, bias_scale=of_rows, separate=True, index=torch.int64)
    gemm.check(device, case, bias=None, accumulate=True, beta="groups")
    if of_rows:
        gemm.check(device, case, bias=None, alpha=1.0, rank=8)


def check_sums_of_weight_gradients(device: str, groups: int) -> None:
    """Groups without tokens have no tasks."""
    case = gemm.Case(Layout.TN, sizes_of(groups), k=24, n=16, tail=9, accumulate=True)
    gemm.check(device, case, out_dtype=torch.float32)
    gemm.check(device, case, beta="groups", separate=True)


def check_sorted_and_split(device: str, groups: int) -> None:
    """Tiles whose groups are sorted in the last window, and a depth that would be split there."""
    few = sizes_of(groups)[:-1] + (700,)
    gemm.check(device, gemm.Case(Layout.NT, few, k=24, n=16, tail=9, variant=9))
    gemm.check(device, gemm.Case(Layout.TN, few, k=24, n=16, tail=9, variant=10))


def check_activations(device: str, groups: int) -> None:
    spec = gated("silu", None, 1.0, 0.0, "concat")
    case = fused.Case(spec, sizes_of(groups), features=24, columns=16, tail=9, bias=torch.bfloat16)
    fused.check_forward(device, case)
    fused.check_backward(device, case)


def check_e4m3(device: str, groups: int) -> None:
    sizes = sizes_of(groups)
    scaled.check_gemm(device, scaled.Case(sizes, n=16, k=144, tail=9, bias=torch.bfloat16, factors=True))
    scaled.check_gemm(device, scaled.Case(sizes, n=16, k=144, tail=9, whole_rows=True))
    scaled.check_wgrad(device, scaled.WgradCase(sizes, m=16, n=24, tail=9))
    scaled.check_wgrad(device, scaled.WgradCase(sizes, m=16, n=24, tail=9, accumulate=True, out_dtype=torch.float32))


def check_packed(device: str, groups: int) -> None:
    for format in PackedFormat:
        packed.check(device, packed.Case(format, sizes_of(groups), n=16, k=32))


def check_low_rank(device: str, groups: int) -> None:
    sizes = sizes_of(groups)
    low_rank.check_same_bits(device, low_rank.Case(Layout.NT, sizes, columns=24, rank=8, top_k=2))
    low_rank.check(device, low_rank.Case(Layout.NN, sizes, columns=24, rank=32))


def check_quantised_rows(device: str, groups: int) -> None:
    sizes = [*sizes_of(groups)]
    quantize.check_rows(device, sizes, 16)
    for format in (PackedFormat.MXFP8, PackedFormat.NVFP4):
        fake_quantize.check_rows(device, format, sizes, 32)


def check_quantised_weights(device: str, groups: int) -> None:
    """Anywhere in memory."""
    quantize.check_weight(device, groups, 16, 16, separate=True)
    for format in (PackedFormat.MXFP8, PackedFormat.NVFP4):
        fake_quantize.check_weight(device, format, groups, 16, 32, separate=True)


def check_sums_of_groups(device: str, groups: int) -> None:
    sizes = [*sizes_of(groups, 97)][: groups - 1] + [5]
    rows.check_column_sums(device, torch.bfloat16, 24, 24, sizes, torch.int64, True)
    rows.check_row_dots(device, torch.bfloat16, torch.float32, 24, 24, sizes)


def check_ragged(device: str, layout: Layout, groups: int) -> None:
    """All have as many columns, as their biases do."""
    shapes = tuple((rows, 10, 3 + g % 3) for g, rows in enumerate(sizes_of(groups)))
    ragged.check(device, ragged.Case(layout, shapes, bias=torch.float32, alpha="groups", beta="groups"))


def check_routes(device: str, groups: int, slots: int, tokens: int, kind: str = "absent") -> None:
    routes.check_route_sorts_stably(device, tokens, slots, groups, kind)


def check_rows_go_and_come_back(device: str, groups: int, slots: int) -> None:
    routes.check_rows_go_and_come_back(device, 9, slots, groups, 24, torch.bfloat16, "absent")


def check_routed_experts(device: str, groups: int, slots: int, tokens: int) -> None:
    """In one call, against float64; and that route, products and sum need no other number of experts."""
    case = routed.Case(tokens=tokens, slots=slots, groups=groups, features=24, columns=16, absent=True)
    problem = routed.Problem(device, case)
    assert refusal(problem.experts) is None, refusal(problem.experts)
    with torch.no_grad():
        y = RoutedMlp(problem.experts)(problem.x, problem.ids, problem.weights)
    kept = ~problem.lost.squeeze(1)
    assert routed.distance(y[kept], problem.truth()[0][kept]) < 0.02
