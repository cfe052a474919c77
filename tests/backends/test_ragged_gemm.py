"""Groups ragged on both sides: room for what the device alone could size, tails, gradients, and who multiplies them."""

from __future__ import annotations

import math

import pytest
import torch
from reference import unit
from torch import Tensor

from fusible import ArgumentError, GroupedTensor, config, grouped_gemm
from fusible.benchmarks import ragged_gemm
from fusible.benchmarks.problem import InaccurateError
from fusible.fuser import RefusedError
from fusible.fuser.contract import tracing as trace
from fusible.ops import kernels
from fusible.ops.kernels.hopper import ragged as hopper_ragged
from fusible.ops.kernels.problems.gemm import Layout
from fusible.ops.kernels.problems.ragged import RaggedGemm

ROWS, COLUMNS, DEPTHS, TAIL = (3, 0, 4), (2, 5, 1), (6, 2, 3), 7
SIZE = sum(m * n for m, n in zip(ROWS, COLUMNS, strict=True))
A = [unit(m, k, grad=False) for m, k in zip(ROWS, DEPTHS, strict=True)]
B = [unit(n, k, grad=False) for n, k in zip(COLUMNS, DEPTHS, strict=True)]
PRODUCT = torch.cat([(a @ b.mT).reshape(-1) for a, b in zip(A, B, strict=True)])


def with_tail(matrices: list[Tensor], grad: bool = False) -> GroupedTensor:
    """The matrices, and NaN behind them."""
    packed = GroupedTensor.from_tensors(matrices)
    data = torch.cat([packed.data.reshape(-1), packed.data.new_full((TAIL,), math.nan)])
    return GroupedTensor(data.requires_grad_(grad), packed.first_dims, packed.last_dims)


def test_room_may_be_larger_than_the_groups() -> None:
    c = grouped_gemm(with_tail(A), with_tail(B), out_elements=SIZE + 5)

    torch.testing.assert_close(c.data, torch.cat([PRODUCT, torch.zeros(5, dtype=PRODUCT.dtype)]))
    assert c.shapes() == list(zip(ROWS, COLUMNS, strict=True))


def test_the_callers_room_keeps_what_lies_behind_the_groups() -> None:
    out = torch.full((SIZE + 5,), 3.0, dtype=PRODUCT.dtype)
    returned = grouped_gemm(with_tail(A), with_tail(B), out=out)

    assert returned is out
    torch.testing.assert_close(out[:SIZE], PRODUCT)
    assert (out[SIZE:] == 3).all()


@pytest.mark.parametrize("given", ["out", "out_elements"])
def test_room_that_is_too_small_is_an_error(given: str) -> None:
    room = {"out": torch.empty(SIZE - 1, dtype=PRODUCT.dtype), "out_elements": SIZE - 1}[given]
    least = f"have {SIZE} elements at least" if given == "out" else f"be at least {SIZE}"
    with pytest.raises(ArgumentError, match=f"^grouped_gemm: {given} must {least}, got {SIZE - 1}$"):
        grouped_gemm(with_tail(A), with_tail(B), **{given: room})


def test_rooms_that_cannot_be() -> None:
    a, b = with_tail(A), with_tail(B)
    out = torch.empty(SIZE, dtype=PRODUCT.dtype)
    with pytest.raises(ArgumentError, match="give out or out_elements, not both"):
        grouped_gemm(a, b, out=out, out_elements=SIZE)
    with pytest.raises(ArgumentError, match=r"out must be contiguous, of shape \[any\], on cpu; got shape \[1, "):
        grouped_gemm(a, b, out=out[None])
    uniform = GroupedTensor(torch.ones(2, 3, 4))
    with pytest.raises(ArgumentError, match=r"out_elements is not needed here, the output has shape \[2, 3, 3\]"):
        grouped_gemm(uniform, uniform, out_elements=18)


def test_rows_that_the_device_alone_could_count() -> None:
    """Rows and depth are ragged, columns are not: the room is whole rows."""
    b = [unit(2, k, grad=False) for k in DEPTHS]
    c = grouped_gemm(with_tail(A), GroupedTensor.from_tensors(b), out_elements=19)

    assert c.data.shape == (9, 2)
    torch.testing.assert_close(c.data[:7], torch.cat([x @ y.mT for x, y in zip(A, b, strict=True)]))
    assert (c.data[7:] == 0).all()


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_operands_bound_what_is_ragged_in_one_of_them(layout: str) -> None:
    """Nothing has to be read: the shapes hold for tensors without data."""
    ragged, flat = torch.tensor([3, 0, 4], device="meta"), {"device": "meta"}
    wide = GroupedTensor(torch.empty(6 * 9, **flat), None, ragged, rows=6)  # [6, n], or [k, m]
    tall, even = GroupedTensor(torch.empty(9, 6, **flat), ragged), torch.empty(3, 5, 6, **flat)
    if layout == "NT":
        assert grouped_gemm(GroupedTensor(even), tall).data.shape == (5 * 9,)
    elif layout == "NN":
        assert grouped_gemm(GroupedTensor(even), wide, layout=layout).data.shape == (5 * 9,)
    else:
        assert grouped_gemm(wide, GroupedTensor(even.mT.contiguous()), layout="TN").data.shape == (9, 5)
        return
    assert grouped_gemm(tall, even if layout == "NT" else even.mT.contiguous(), layout=layout).data.shape == (9, 5)


def test_gradients_are_zero_behind_the_groups() -> None:
    a, b = with_tail(A, grad=True), with_tail(B, grad=True)
    grouped_gemm(a, b, out_elements=SIZE + 5).data.backward(torch.ones(SIZE + 5, dtype=PRODUCT.dtype))

    for t, others, ones in ((a, B, COLUMNS), (b, A, ROWS)):
        mine = DEPTHS, [m.shape[0] for m in (A if t is a else B)]
        want = [torch.ones(rows, n, dtype=PRODUCT.dtype) @ x for x, n, rows in zip(others, ones, mine[1], strict=True)]
        torch.testing.assert_close(t.data.grad[:-TAIL], torch.cat([w.reshape(-1) for w in want]))
        assert (t.data.grad[-TAIL:] == 0).all()


def test_who_multiplies_and_why() -> None:
    a, b, why = with_tail(A), with_tail(B), "hopper needs a CUDA device, got cpu"
    out = a.with_data(torch.empty_like(a.data))
    assert hopper_ragged.refusal(RaggedGemm(Layout.NT, a, b, out)) == "needs a CUDA device, got cpu"
    with trace.recording() as found:
        kernels.ragged_gemm(Layout.NT, a, b, out)
    assert [(call.kernel, call.reason) for call in found.calls] == [("loop", why)]
    with config(backend="hopper"), pytest.raises(RefusedError, match=f"no backend for this ragged GEMM: {why}"):
        grouped_gemm(a, b)
    with config(backend="grouped_mm"), pytest.raises(RefusedError, match="grouped_mm has no kernel for it"):
        grouped_gemm(a, b)


def test_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    ragged_gemm.main(["--device", "cpu", "--rounds", "1", "--sizes", "2x16"])
    lines = capsys.readouterr().out.splitlines()

    assert len(lines) == 2 + 4 * 3
    assert lines[2].startswith("| equal, NT, E=2, about 16")
    assert lines[-1].startswith("| any, TN, E=2, about 16")


def test_the_benchmark_times_nothing_wrong() -> None:
    functions = {"loop": lambda: torch.ones(4), "one launch": lambda: torch.tensor([1.0, 1.0, 1.0, 1.1])}
    with pytest.raises(InaccurateError, match=r"one launch: relative error 0\.05"):
        ragged_gemm.check(functions)
