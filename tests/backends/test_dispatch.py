"""Which kernels run: one dispatcher obeys ``config(backend=..., strict=...)`` for every one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from emulation import harness
from kernels_asked import asked, runner

from fusible import config
from fusible.fuser import RefusedError
from fusible.fuser.contract import tracing as trace
from fusible.ops.kernels import dispatch, products
from fusible.ops.kernels.doors import routing
from fusible.ops.kernels.hopper import gemm
from fusible.ops.kernels.problems import kinds
from fusible.ops.kernels.problems.gemm import Activate, ActivateBackward, ActivationGrads, GroupedGemm, Layout
from fusible.ops.kernels.problems.interface import Implementation
from fusible.ops.kernels.problems.rows import ActivateRows, ColumnSums
from fusible.ops.kernels.pytorch import grouped_mm_cpu, loop
from fusible.ops.kernels.triton import gemm as triton_gemm
from fusible.ops.kernels.triton import installed
from fusible.ops.values.activation_spec import gated, interleaved

T, E, F, K = 6, 2, 64, 32
BF16 = torch.bfloat16
SPEC = gated("silu", None, 1.0, 0.0, "concat")


@pytest.fixture
def gpu(monkeypatch):
    """Tensors of the CPU pass for those of a Hopper GPU; nothing is launched."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with harness.installed(object()):
        yield


def dense(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def problem(epilogue=None, dtype=BF16):
    x, weight, sizes = dense(T, K, dtype=dtype), dense(E, 2 * F, K, dtype=dtype), torch.tensor([2, 4])
    return GroupedGemm(Layout.NT, x, weight, sizes, dense(T, F, dtype=dtype), fresh=True, epilogue=epilogue)


def activation(preact):
    return ActivateRows(preact, SPEC, None, torch.empty_like(preact[..., ::2]))


def sums():
    return ColumnSums(dense(T, F), torch.tensor([2, 4]), dense(E, F))


def why_apart(p):
    return products.epilogue_apart(p, dispatch.choose(p).kernels)


def with_block(block):
    return problem(Activate(gated("silu", None, 1.0, 0.0, interleaved(block)), None, None))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("backend", ["auto", "hopper"])
def test_our_kernels_run_where_they_are_allowed(backend):
    with config(backend=backend):
        assert runner(problem()) is gemm.run
        assert dispatch.choose(activation(dense(T, F))).kernels.name == "activation"
        assert dispatch.choose(sums()).kernels.backend == "hopper"
        assert routing.refusal(torch.zeros(T, 2, dtype=torch.int64), E, BF16) is None


@pytest.mark.usefixtures("gpu")
def test_another_backend_means_pytorch_everywhere():
    with config(backend="loop"):
        assert runner(problem()) is loop.run
        choice = dispatch.choose(activation(dense(T, F)))
        assert choice.kernels.name == "torch"
        assert choice.reason == "config(backend='loop')"
        assert dispatch.choose(sums()).kernels.name == "grouped_mm"  # no sync on CUDA
        assert routing.refusal(torch.zeros(T, 2, dtype=torch.int64), E, BF16) == "config(backend='loop')"


@pytest.mark.usefixtures("gpu")
def test_rows_that_our_kernels_do_not_take():
    wide = dense(T, F, dtype=torch.float64)
    choice = dispatch.choose(activation(wide), tracing=True)
    assert choice.kernels.name == "torch"
    assert "needs dense rows of 16 or 32 bits, got torch.float64" in choice.reason
    for switches in ({"strict": True}, {"backend": "hopper"}):
        with (
            config(**switches),
            pytest.raises(RefusedError, match="the activation has no kernel of hopper, because it"),
        ):
            dispatch.choose(activation(wide))


@pytest.mark.usefixtures("gpu")
def test_an_epilogue_that_does_not_fit_says_why():
    assert runner(with_block(24)) is gemm.run
    assert why_apart(with_block(24)) == "has no tile for blocks of 24 columns"
    assert why_apart(with_block(32)) is None
    with config(strict=True):
        assert why_apart(with_block(32)) is None
        with pytest.raises(RefusedError, match="a kernel of its own, because hopper's epilogue has no tile for blocks"):
            why_apart(with_block(24))


@pytest.mark.usefixtures("gpu")
def test_a_backward_epilogue_that_does_not_fit_raises_when_strict():
    grads = ActivationGrads(dense(T, 2 * F), None, None)
    epilogue = ActivateBackward(gated("silu", None, 1.0, 0.0, interleaved(12)), None, dense(T, 2 * F), grads)
    assert why_apart(problem(epilogue)) == "has no loads for blocks of 12 columns"
    with config(strict=True), pytest.raises(RefusedError, match="no loads for blocks of 12 columns"):
        why_apart(problem(epilogue))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("rows", "depth", "bias", "apart"),
    [(160, 4096, False, True), (320, 4096, False, True), (159, 4096, False, False), (321, 4096, False, False)]
    + [(200, 4088, False, False), (200, 4096, True, False)],
)
def test_a_backward_epilogue_that_is_slower_is_a_kernel_of_its_own(rows, depth, bias, apart):
    """Two groups; strict takes it, for nothing is refused."""
    tokens, hidden = 2 * rows, 8
    grads = ActivationGrads(dense(tokens, 2 * hidden), None, None, dense(2, 2 * hidden) if bias else None)
    epilogue = ActivateBackward(SPEC, None, dense(tokens, 2 * hidden), grads)
    sizes = torch.tensor([rows, rows])
    wanted = GroupedGemm(
        Layout.NN, dense(tokens, depth), dense(2, depth, hidden), sizes, grads.preact, fresh=True, epilogue=epilogue
    )
    with config(strict=True):
        reason = why_apart(wanted)

    assert reason == ("is slower at 160 to 320 rows per group and such a depth" if apart else None)


def test_a_cpu_asks_no_kernel_of_ours():
    assert runner(with_block(24)) is grouped_mm_cpu.run
    assert why_apart(with_block(24)) is None
    assert dispatch.choose(activation(dense(T, F))).reason == "hopper needs a CUDA device, got cpu"
    with config(backend="hopper"), pytest.raises(RefusedError, match="needs a CUDA device, got cpu"):
        dispatch.choose(activation(dense(T, F)))
    with config(strict=True):  # a CPU has no other kernels: nothing fell back
        assert dispatch.choose(activation(dense(T, F))).kernels.name == "torch"


def solved_by(backend: str | None, why: str | None = None, **how) -> Implementation:
    """Kernels that refuse for a reason, or take everything."""
    return Implementation(backend, backend or "torch", lambda p: None, lambda p: why, **how)


@pytest.mark.usefixtures("gpu")
def test_backends_are_asked_in_the_order_of_their_registration():
    with asked(kinds.ROW_PASS, solved_by("a", "is odd"), solved_by("b"), solved_by("c"), solved_by(None)):
        choice = dispatch.choose(sums(), tracing=True)
        assert (choice.kernels.name, choice.reason) == ("b", "a is odd")
        with (
            config(strict=True),
            pytest.raises(RefusedError, match="strict: the pass over rows falls back to b, because a"),
        ):
            dispatch.choose(sums())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("form", "solved", "why"),
    [
        ({}, "hopper", ""),
        ({"groups": 600}, "hopper", ""),
        ({"dtype": torch.float32}, "triton", "hopper needs bfloat16 or float16 operands, got torch.float32 and "),
        ({"features": 33}, "triton", "hopper needs features that are multiples of 8, got 32 and 33"),
    ],
)
def test_triton_is_next(form, solved, why, monkeypatch):
    """A product that Hopper's kernels can is another's only if they refuse it, with a reason."""
    monkeypatch.setattr(triton_gemm, "triton_refusal", lambda rows: None)
    groups, features, dtype = form.get("groups", E), form.get("features", F), form.get("dtype", BF16)
    x, weight, out = dense(T, K, dtype=dtype), dense(groups, features, K, dtype=dtype), dense(T, features, dtype=dtype)
    sizes = torch.zeros(groups, dtype=torch.int32)
    choice = dispatch.choose(GroupedGemm(Layout.NT, x, weight, sizes, out, fresh=True), tracing=True)

    assert choice.kernels.backend == solved
    assert choice.reason.startswith(why)


@pytest.mark.parametrize(
    ("compiler", "header", "part"),
    [("gcc", "Python.h", None), (None, "Python.h", "a C compiler"), ("gcc", "other.h", "the header ")],
)
def test_triton_is_left_out_where_it_cannot_build(compiler, header, part, monkeypatch, tmp_path):
    (tmp_path / header).touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(installed.shutil, "which", lambda name: compiler)
    monkeypatch.setattr(installed.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setattr(installed, "missing_to_build", installed.missing_to_build.__wrapped__)
    monkeypatch.setattr(installed, "is_installed", lambda: True)
    monkeypatch.setattr(installed, "capability_of", lambda device: installed.OLDEST)
    refused = installed.triton_refusal(SimpleNamespace(device=torch.device("cuda", 0)))

    assert refused is None if part is None else refused.startswith(f"needs {part}")


@pytest.mark.parametrize(("backend", "refused"), [("auto", True), ("triton", False)])
def test_triton_leaves_long_groups_of_float32_to_pytorch(backend, refused, monkeypatch):
    monkeypatch.setattr(triton_gemm, "triton_refusal", lambda rows: None)
    x, weight = dense(64 * E + 1, K, dtype=torch.float32), dense(E, F, K, dtype=torch.float32)
    sizes, out = torch.zeros(E, dtype=torch.int32), dense(64 * E + 1, F, dtype=torch.float32)
    with config(backend=backend):
        whys = [
            triton_gemm.refusal(GroupedGemm(Layout.NT, a, weight, sizes, out[: len(a)], fresh=True))
            for a in (x[:-1], x)
        ]

    assert whys == [
        None,
        "is slower than PyTorch for more than 64 float32 rows a group without TF32" if refused else None,
    ]


@pytest.mark.usefixtures("gpu")
def test_a_fallback_says_why_no_backend_takes_the_problem():
    with asked(kinds.ROW_PASS, solved_by("a", "is odd"), solved_by("b", "is even"), solved_by(None)):
        assert dispatch.refusal(sums()) == "a is odd; b is even"
        message = "the pass over rows has no kernel of a, because it is odd, and none of b, because it is even"
        with config(strict=True), pytest.raises(RefusedError, match=message):
            dispatch.choose(sums())
        with config(backend="loop", strict=True):
            assert dispatch.refusal(sums()) == "config(backend='loop')"


def test_a_fallback_takes_every_problem():
    """It has no name by which an error could say what it refuses."""
    assert not [k.name for kind in kinds.KINDS for k in kind.kernels if k.backend is None and k.refusal is not None]


def test_a_backend_of_gpus_is_interpreted_where_it_is_asked_for_by_name():
    with asked(kinds.ROW_PASS, solved_by("loop", device="cuda", interpreted=True), solved_by(None)):
        assert dispatch.refusal(sums()) == "loop needs a CUDA device, got cpu"
        with config(backend="loop"):
            assert dispatch.refusal(sums()) is None


@pytest.mark.parametrize("keyed", [False, True])
def test_kernels_with_a_key_are_asked_once(keyed):
    asked_for = []
    kernels = Implementation(
        *("a", "a", lambda p: None, asked_for.append), cache_key=(lambda p: tuple(p.rows.shape)) if keyed else None
    )
    with asked(kinds.ROW_PASS, kernels):
        for _ in range(3):
            dispatch.choose(sums())

    assert len(asked_for) == (1 if keyed else 3)


def test_a_trace_is_told_of_the_kernels_and_they_do_not_run():
    ran = []
    kernels = Implementation("a", lambda p: f"a of {p.rows.shape[0]} rows", ran.append)
    with asked(kinds.ROW_PASS, kernels), trace.recording() as recorded:
        dispatch.run(sums())

    assert not ran
    assert [(call.kernel, call.bytes) for call in recorded.calls] == [("a of 6 rows", 2 * (T * F + E * F))]


def test_a_kind_without_backends_is_refused():
    with asked(kinds.GEMM), pytest.raises(RefusedError, match="no backend for this grouped GEMM: auto has no kernel"):
        dispatch.choose(problem())
