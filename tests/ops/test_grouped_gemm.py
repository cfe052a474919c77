"""``grouped_gemm`` and :class:`GroupedTensor`: every layout, every raggedness, every error."""

from __future__ import annotations

import pytest
import torch
from reference import assert_close_to, assert_same, unit

from fusible import ArgumentError, DoubleBackwardError, GroupedTensor, grouped_gemm
from fusible.ops.grouped.product import Product, shape_to_allocate
from fusible.ops.kernels import Layout

E, M, N, K, T = 3, 4, 5, 6, 9
SIZES = torch.tensor([3, 0, 5])
LAYOUTS = ["NT", "NN", "TN"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def operands(layout, dtype=torch.float64, grad=False, rows=T):
    shapes = {"NT": ((rows, K), (E, N, K)), "NN": ((rows, K), (E, K, N)), "TN": ((rows, M), (rows, N))}[layout]
    return tuple(unit(*shape, dtype=dtype, grad=grad) for shape in shapes)


def product_of(layout, a, b):
    return (a.mT if layout == "TN" else a) @ (b.mT if layout == "NT" else b)


def expected(layout, a, b, sizes=SIZES, bias=None, alpha=None):
    """One product a group; rows past the last one are zero."""
    sizes, ends = sizes.tolist(), sizes.cumsum(0).tolist()
    parts = []
    for g, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        rows = slice(end - size, end)
        part = product_of(layout, a[rows], b[rows] if layout == "TN" else b[g])
        part = (
            part if alpha is None else part * (alpha[g] if isinstance(alpha, torch.Tensor) and alpha.dim() else alpha)
        )
        parts.append(part if bias is None else part + bias[g])
    if layout == "TN":
        return torch.stack(parts)
    return torch.cat([*parts, parts[0].new_zeros(a.shape[0] - ends[-1], parts[0].shape[1])])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype):
    a, b = operands(layout, dtype)
    exact, plain = expected(layout, a.double(), b.double()), expected(layout, a, b)

    assert_close_to(grouped_gemm(a, b, SIZES, layout=layout), plain, exact)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_are_ends_of_groups(layout, dtype):
    a, b = operands(layout)

    assert torch.equal(
        grouped_gemm(a, b, offsets=SIZES.cumsum(0).to(dtype), layout=layout), grouped_gemm(a, b, SIZES, layout=layout)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [[0, 0, 0], [9, 0, 0], [0, 0, 9], [1, 1, 1]])
def test_splits(layout, sizes):
    a, b, sizes = *operands(layout), torch.tensor(sizes)

    torch.testing.assert_close(grouped_gemm(a, b, sizes, layout=layout), expected(layout, a, b, sizes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rows(layout):
    a, b = operands(layout, rows=0)
    c = grouped_gemm(a, b, torch.zeros(E, dtype=torch.int64), layout=layout)

    assert c.shape == ((E, M, N) if layout == "TN" else (0, N))
    assert c.eq(0).all()


def test_bias_without_rows_is_all_there_is():
    bias = unit(E, N, grad=False)
    c = grouped_gemm(*operands("TN", rows=0), torch.zeros(E, dtype=torch.int64), layout="TN", bias=bias)

    assert torch.equal(c, bias[:, None].expand(E, M, N))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_in_the_tail_reaches_nothing(layout):
    a, b = operands(layout)
    clean = expected(layout, a, b)
    a[8:] = float("nan")
    if layout == "TN":
        b[8:] = float("nan")

    torch.testing.assert_close(grouped_gemm(a, b, SIZES, layout=layout), clean)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alpha", [2.5, torch.tensor(-1.5), torch.tensor([0.5, 2.0, -1.0])], ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_alpha_and_bias(layout, alpha, with_bias):
    a, b = operands(layout)
    bias = unit(E, N, grad=False) if with_bias else None
    got = grouped_gemm(a, b, SIZES, layout=layout, alpha=alpha, bias=bias)

    torch.testing.assert_close(got, expected(layout, a, b, alpha=alpha, bias=bias))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_is_written_and_returned(layout):
    a, b = operands(layout)
    want = expected(layout, a, b)
    out = torch.full_like(want, -7.0)
    got = grouped_gemm(a, b, SIZES, layout=layout, out=out)

    assert got is out
    torch.testing.assert_close(out, want if layout == "TN" else torch.cat([want[:8], torch.full_like(want[8:], -7.0)]))


BETAS = [0.5, torch.tensor(2.0), torch.tensor([0.5, 2.0, -1.0])]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("beta", BETAS, ids=str)
@pytest.mark.parametrize("rows", [T, 0])
def test_beta(layout, beta, rows):
    a, b = operands(layout, rows=rows)
    sizes = SIZES if rows else torch.zeros_like(SIZES)
    want, valid = expected(layout, a, b, sizes), int(sizes.sum())
    out = torch.randn_like(want)
    before, by_group = out.clone(), torch.as_tensor(beta).expand(E)
    grouped_gemm(a, b, sizes, layout=layout, out=out, beta=beta)

    if layout == "TN":
        torch.testing.assert_close(out, want + by_group.view(-1, 1, 1) * before)
    else:
        torch.testing.assert_close(
            out[:valid], want[:valid] + by_group.repeat_interleave(sizes)[:, None] * before[:valid]
        )
        assert torch.equal(out[valid:], before[valid:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_a_beta_of_zero_out_is_not_read(layout):
    a, b = operands(layout)
    want = expected(layout, a, b)
    out = grouped_gemm(a, b, SIZES, layout=layout, out=torch.full_like(want, float("nan")), beta=0)
    valid = slice(None) if layout == "TN" else slice(int(SIZES.sum()))

    torch.testing.assert_close(out[valid], want[valid])


def test_no_depth_gives_zeros_and_no_columns_nothing():
    a, b = unit(T, 0), unit(E, N, 0)
    c = grouped_gemm(a, b, SIZES)
    c.sum().backward()

    assert torch.equal(c, torch.zeros_like(c))
    assert (a.grad.shape, b.grad.shape) == ((T, 0), (E, N, 0))
    nothing = torch.empty(T, 0).double()
    assert grouped_gemm(A, B[:, :0], SIZES, out=nothing) is nothing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_accumulate(layout):
    a, b = operands(layout)
    out = grouped_gemm(a, b, SIZES, layout=layout)
    grouped_gemm(a, b, SIZES, layout=layout, out=out, accumulate=True)

    torch.testing.assert_close(out, 2 * expected(layout, a, b))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wide_out_of_half_operands(layout):
    a, b = operands(layout, torch.bfloat16)
    want = expected(layout, a.float(), b.float())
    out = torch.zeros_like(want)
    grouped_gemm(a, b, SIZES, layout=layout, out=out)

    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("layout", ["NT", "NN"])
def test_transposed_weights_are_read_as_they_lie(layout, monkeypatch):
    a, b = operands(layout)
    view, copies = b.mT.contiguous().mT, []
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t: copies.append(t) or t)
    got = grouped_gemm(a, view, SIZES, layout=layout)

    torch.testing.assert_close(got, expected(layout, a, b))
    assert all(t.is_contiguous() for t in copies)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_operands(layout):
    a, b = operands(layout)
    wide = [torch.stack([t, t], -1).flatten(-2)[..., ::2] for t in (a, b)]

    torch.testing.assert_close(grouped_gemm(*wide, SIZES, layout=layout), expected(layout, a, b))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alpha", [None, 0.5, torch.tensor([0.5, 2.0, -1.0])], ids=str)
def test_gradcheck(layout, alpha):
    a, b = operands(layout, grad=True)
    bias = unit(E, N)

    def function(a, b, bias):
        return grouped_gemm(a, b, SIZES, layout=layout, alpha=alpha, bias=bias)

    assert torch.autograd.gradcheck(function, (a, b, bias), fast_mode=True)


@pytest.mark.parametrize("rows", [(9, 12), (12, 9), (8, 9)])
def test_gradients_have_the_rows_of_their_operand_whatever_lies_behind_the_other(rows):
    a, b = unit(rows[0], M), unit(rows[1], N)
    c = grouped_gemm(GroupedTensor(a, SIZES), GroupedTensor(b, SIZES), layout="TN").data
    dc = torch.randn_like(c)
    valid = int(SIZES.sum())
    got, want = (torch.autograd.grad(y, (a, b), dc) for y in (c, expected("TN", a[:valid], b[:valid])))

    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layout", ["NT", "NN"])
def test_gradient_through_a_transposed_view(layout):
    a, b = operands(layout)
    lying = b.mT.contiguous().requires_grad_()

    assert torch.autograd.gradcheck(lambda t: grouped_gemm(a, t.mT, SIZES, layout=layout), (lying,))


@pytest.mark.parametrize("wanted", ["a", "b", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_wanted_gradients(layout, wanted):
    a, b = operands(layout)
    tensors = {"a": a, "b": b, "bias": unit(E, N, grad=False)}
    tensors[wanted].requires_grad_()
    c = grouped_gemm(a, b, SIZES, layout=layout, bias=tensors["bias"])
    want = expected(layout, a, b, bias=tensors["bias"])

    torch.testing.assert_close(
        torch.autograd.grad(c.sum(), tensors[wanted]), torch.autograd.grad(want.sum(), tensors[wanted])
    )


def test_second_derivative_is_a_named_error():
    a, b = operands("NT", grad=True)
    (da,) = torch.autograd.grad(grouped_gemm(a, b, SIZES).square().sum(), a, create_graph=True)

    with pytest.raises(DoubleBackwardError, match="first-order gradients only"):
        da.sum().backward()


ROWS, COLS, DEEP = [2, 0, 3], [1, 4, 2], [3, 2, 0]
RAGGED = [(m, n, k) for m in (ROWS, [4] * 3) for n in (COLS, [5] * 3) for k in (DEEP, [6] * 3)]


def matrices(layout, m, n, k):
    a = [unit(*((k, m) if layout == "TN" else (m, k)), grad=False) for m, k in zip(m, k, strict=True)]
    b = [unit(*((n, k) if layout == "NT" else (k, n)), grad=False) for n, k in zip(n, k, strict=True)]
    return a, b


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), RAGGED)
def test_every_raggedness(layout, m, n, k):
    a, b = matrices(layout, m, n, k)
    c = grouped_gemm(GroupedTensor.from_tensors(a), GroupedTensor.from_tensors(b), layout=layout)

    assert c.shapes() == list(zip(m, n, strict=True))
    for got, x, y in zip(c.split(), a, b, strict=True):
        torch.testing.assert_close(got, product_of(layout, x, y))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), RAGGED)
def test_every_raggedness_gradcheck(layout, m, n, k):
    a, b = (GroupedTensor.from_tensors(t) for t in matrices(layout, m, n, k))

    def function(x, y):
        return grouped_gemm(a.with_data(x), b.with_data(y), layout=layout).data

    assert torch.autograd.gradcheck(function, (a.data.requires_grad_(), b.data.requires_grad_()), fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), [(ROWS, COLS, DEEP), ([4] * 3, [5] * 3, [6] * 3)])
def test_grouped_out_accumulates(layout, m, n, k):
    a, b = (GroupedTensor.from_tensors(t) for t in matrices(layout, m, n, k))
    out = grouped_gemm(a, b, layout=layout)
    once = out.data.clone()
    got = grouped_gemm(a, b, layout=layout, out=out, accumulate=True)

    assert got is out
    torch.testing.assert_close(out.data, 2 * once)


def test_grouped_operand_beside_a_plain_one():
    a, b = operands("NT")
    grouped = GroupedTensor(a, SIZES)
    c = grouped_gemm(grouped, b)

    assert isinstance(c, GroupedTensor)
    assert torch.equal(c.data, grouped_gemm(a, b, SIZES))


def test_plain_operand_beside_a_grouped_one():
    a, b = operands("TN")
    c = grouped_gemm(GroupedTensor(a, SIZES), b, SIZES, layout="TN")

    assert torch.equal(c.data, grouped_gemm(a, b, SIZES, layout="TN"))


def test_every_raggedness_with_alpha_beta_bias():
    a, b = matrices("NT", ROWS, [5] * 3, DEEP)
    bias, alpha = unit(E, 5, grad=False), torch.tensor([0.5, 2.0, -1.0])
    c = grouped_gemm(GroupedTensor.from_tensors(a), GroupedTensor.from_tensors(b), alpha=alpha, bias=bias)

    for g, got in enumerate(c.split()):
        torch.testing.assert_close(got, alpha[g] * (a[g] @ b[g].mT) + bias[g])


A, B = operands("NT")
G = GroupedTensor(A, SIZES)
F8 = torch.float8_e4m3fn


def inference(*shape):
    with torch.inference_mode():
        return torch.zeros(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grouped_gemm(A, B, SIZES, layout="TT"), "layout must be NT, NN or TN, got 'TT'"),
        (lambda: grouped_gemm(A, B), r"plain tensors need split_sizes or offsets, int32 or int64 \[E\], got none"),
        (lambda: grouped_gemm(A, B, SIZES.float()), r"offsets, int32 or int64 \[E\], got torch\.float32"),
        (lambda: grouped_gemm(A, B, [3, 0, 5]), r"split_sizes must be an int32 or int64 tensor \[E\], got a list"),
        (
            lambda: grouped_gemm(A, B[:0], torch.tensor([], dtype=torch.int64)),
            "split_sizes must have at least one group",
        ),
        (lambda: grouped_gemm(A, B, offsets=[3, 3, 8]), r"offsets must be an int32 or int64 tensor \[E\], got a list"),
        (lambda: grouped_gemm(A, B, SIZES[None]), r"split_sizes must be .* \[E\], got shape \[1, 3\]"),
        (lambda: grouped_gemm(A, B, offsets=SIZES[0]), r"offsets must be .* \[E\], got shape \[\]"),
        (lambda: grouped_gemm(A, B, SIZES, alpha=[1, 2, 3]), r"alpha must be a number or a tensor \[3\], got a list"),
        (lambda: grouped_gemm(A, B, SIZES, offsets=SIZES), "give split_sizes or offsets, not both"),
        (lambda: grouped_gemm(A[0], B, SIZES), r"a must have 2 dimensions, got shape \[6\]"),
        (lambda: grouped_gemm(A, A, SIZES), r"b must have 3 dimensions, got shape \[9, 6\]"),
        (lambda: grouped_gemm(A, B, SIZES + 9), r"split sizes \[12, 9, 14\] do not fit into the 9 rows of a"),
        (lambda: grouped_gemm(A, B, SIZES - 1), r"split sizes \[2, -1, 4\] do not fit into the 9 rows of a"),
        (lambda: grouped_gemm(A, B, offsets=torch.tensor([3, 2, 8])), r"split sizes \[3, -1, 6\] do not fit"),
        (lambda: grouped_gemm(A, B.float(), SIZES), "one dtype expected; a has torch.float64, b has torch.float32"),
        (lambda: grouped_gemm(A, B.to("meta"), SIZES), "one device expected; a has cpu, b has meta"),
        (lambda: grouped_gemm(A, B[:2], SIZES), "one num_groups expected; a has 3, b has 2"),
        (lambda: grouped_gemm(A, B, SIZES, layout="NN"), "NN contracts 6 of a with 5 of b; they must be equal"),
        (lambda: grouped_gemm(G, B, SIZES), "a GroupedTensor has its own dims; leave split_sizes out"),
        (lambda: grouped_gemm(G, G, SIZES, layout="TN"), "a GroupedTensor has its own dims"),
        (lambda: grouped_gemm(A, B, SIZES, accumulate=True), "accumulate and beta need out="),
        (lambda: grouped_gemm(A, B, SIZES, beta=1.0), "accumulate and beta need out="),
        (lambda: grouped_gemm(A, B, SIZES, out=A, accumulate=True, beta=1.0), "accumulate is beta = 1"),
        (
            lambda: grouped_gemm(A, B, SIZES, alpha=torch.ones(E, requires_grad=True)),
            "alpha and beta are not differentiable",
        ),
        (
            lambda: grouped_gemm(A, B, SIZES, out=torch.empty(T, N + 1).double()),
            r"of shape \[9, 5\], on cpu; got shape \[9, 6\]",
        ),
        (lambda: grouped_gemm(A, B, SIZES, out=torch.empty(N, T).double().mT), "out must be contiguous"),
        (
            lambda: grouped_gemm(A, B, SIZES, out=torch.empty(T, N, device="meta")),
            r"on cpu; got shape \[9, 5\] on meta",
        ),
        (
            lambda: grouped_gemm(A, B.clone().requires_grad_(), SIZES, out=torch.empty(T, N).double()),
            "out= is not differentiable",
        ),
        (
            lambda: grouped_gemm(G, GroupedTensor(A, SIZES.flip(0)), layout="TN"),
            "depths 3 and 5 of a and b must be equal",
        ),
        (lambda: grouped_gemm(A, B, SIZES, bias=torch.ones(E, N + 1)), r"bias must be \[3, 5\]"),
        (lambda: grouped_gemm(A, B, SIZES, bias=torch.ones(N)), r"bias must be \[3, 5\]"),
        (lambda: grouped_gemm(A, B, SIZES, alpha=torch.ones(E + 1)), r"alpha must be a number or a tensor \[3\]"),
        (
            lambda: grouped_gemm(A, B, SIZES, out=torch.empty(T, N).double(), beta=torch.ones(E, 1)),
            r"beta must be a number or a tensor \[3\]",
        ),
        (lambda: grouped_gemm(A, torch.eye(K).double().expand(E, K, K), SIZES, out=A), "out overlaps a in memory"),
        (lambda: grouped_gemm(A.cfloat(), B.cfloat(), SIZES), "a and b must hold real numbers, got torch.complex64"),
        (lambda: grouped_gemm([1], B, SIZES), "a must be a Tensor or GroupedTensor, got a list"),
        (lambda: grouped_gemm(A, None, SIZES), "b must be a Tensor or GroupedTensor, got a NoneType"),
        (lambda: grouped_gemm(A, B, SIZES, bias=1.0), "bias must be a Tensor, got a float"),
        (lambda: grouped_gemm(A, B, SIZES, out=[1]), "out must be a Tensor or GroupedTensor, got a list"),
        (lambda: grouped_gemm(A, B, SIZES.to("meta")), "split sizes must be on cpu, where a is, got meta"),
        (lambda: grouped_gemm(A, B, SIZES, alpha=torch.ones(E, device="meta")), "alpha must hold real numbers, on cpu"),
        (
            lambda: grouped_gemm(A, B, SIZES, bias=torch.ones(E, N, device="meta")),
            "bias must hold real numbers, on cpu",
        ),
        (lambda: grouped_gemm(A, B, SIZES, out=torch.empty(T, N).int()), "out of torch.int32 cannot hold a product"),
        (lambda: grouped_gemm(A, B, SIZES, out=torch.empty(T, N).cfloat()), "out of torch.complex64 cannot hold"),
        (lambda: grouped_gemm(A, B, SIZES, out=inference(T, N)), r"out was made under torch.inference_mode\(\)"),
        (lambda: grouped_gemm(A, B, SIZES, out=torch.empty(T, N).double().requires_grad_()), "out= is not different"),
    ],
)
def test_call_error(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


HUGE = 2**62
WRAPPING = {  # sums and products that come out as less than they are in 64 or 32 bits
    "sum of sizes": lambda: grouped_gemm(A, unit(4, N, K), torch.tensor([HUGE] * 4)),
    "sum of sizes, TN": lambda: grouped_gemm(A, A, torch.tensor([HUGE] * 4), layout="TN"),
    "difference of offsets": lambda: grouped_gemm(A, B[:2], offsets=torch.tensor([1, -(2**63)])),
    "rows": lambda: GroupedTensor(torch.ones(4, 2), torch.tensor([HUGE] * 4)),
    "rows by columns": lambda: GroupedTensor(torch.ones(16), torch.tensor([2**32, 1]), torch.tensor([2**32, 1])),
    "32 bits": lambda: GroupedTensor(torch.ones(16), *[torch.tensor([2**16, 1], dtype=torch.int32)] * 2),
    "rows= by columns": lambda: GroupedTensor(torch.ones(16), None, torch.tensor([2**32, 1]), rows=2**32),
}


@pytest.mark.parametrize("call", WRAPPING.values(), ids=WRAPPING)
def test_sizes_that_wrap_do_not_fit(call):
    with pytest.raises(ValueError, match="do not fit into"):
        call()


def test_room_for_more_elements_than_32_bits_count():
    operand = GroupedTensor(torch.empty(2**16 + 1, 0), torch.tensor([2**16, 1], dtype=torch.int32))

    assert shape_to_allocate(Product(operand, operand, Layout.NT, None), None) == (2**32 + 1,)


def nested():
    return torch.nested.nested_tensor([torch.ones(1, K), torch.ones(3, K)])


SPARSE = torch.ones(T, K).double().to_sparse()


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grouped_gemm(SPARSE, B, SIZES), "a: expected a dense tensor, got a torch.sparse_coo"),
        (lambda: grouped_gemm(A, B.to_sparse(), SIZES), "b: expected a dense tensor, got a torch.sparse_coo"),
        (lambda: grouped_gemm(A, B, SIZES, out=SPARSE), "out: expected a dense tensor, got a torch.sparse_coo"),
        (lambda: grouped_gemm(A, B, SIZES, bias=SPARSE), "bias: expected a dense tensor, got a torch.sparse_coo"),
        (lambda: grouped_gemm(A, B, SIZES, alpha=SPARSE), "alpha: expected a dense tensor, got a torch.sparse"),
        (lambda: grouped_gemm(nested(), B, SIZES), "a: expected a dense tensor, got a nested one"),
        (lambda: grouped_gemm(A, B, nested()), "split_sizes: expected a dense tensor, got a nested one"),
        (lambda: grouped_gemm(A, B, SIZES.to_sparse()), "split_sizes: expected a dense tensor, got a torch.sp"),
        (lambda: GroupedTensor(SPARSE, SIZES), "GroupedTensor: data: expected a dense tensor, got a torch.sp"),
        (
            lambda: grouped_gemm(A.to(F8), B.to(F8), SIZES),
            "a and b must hold numbers of at least 16 bits",
        ),
        (lambda: grouped_gemm(A, B, SIZES, bias=torch.ones(E, N).to(F8)), "bias must hold numbers of at least 16 bits"),
        (lambda: grouped_gemm(A, B, SIZES, alpha=torch.ones(E).to(F8)), "alpha must hold numbers of at least 16 bits"),
        (lambda: grouped_gemm(A, B, SIZES, out=torch.ones(T, N).to(F8)), "out of torch.float8_e4m3fn cannot hold"),
        (
            lambda: grouped_gemm(A, B, SIZES, alpha=torch.ones((), device="meta")),
            "alpha must hold real numbers, on cpu",
        ),
        (lambda: grouped_gemm(A, B, SIZES, alpha=torch.ones(()).cfloat()), "alpha must hold real numbers, on cpu"),
        (lambda: grouped_gemm(A, B, SIZES, layout=["NT"]), r"layout must be NT, NN or TN, got \['NT'\]"),
    ],
)
def test_what_no_kernel_can_read_is_refused_by_name(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"out": torch.empty(4)}, "out must have 5 elements at least, got 4"),
        ({"out_elements": 4}, "out_elements must be at least 5, got 4"),
        ({"out_elements": -1}, "out_elements must be an int that is not negative, got -1"),
        ({"out_elements": 5.0}, "out_elements must be an int that is not negative, got 5.0"),
        (
            {"out": GroupedTensor(torch.empty(5), torch.tensor([1, 2]), torch.tensor([1, 2]))},
            r"out must have groups of shapes \[\(2, 1\), \(1, 3\)\], got \[\(1, 1\), \(2, 2\)\]",
        ),
    ],
)
def test_room_that_cannot_hold_the_product_is_refused_by_name(how, message):
    a, b = (GroupedTensor.from_tensors([torch.ones(rows, 2) for rows in sizes]) for sizes in ((2, 1), (1, 3)))

    with pytest.raises(ArgumentError, match=f"^grouped_gemm: {message}$"):
        grouped_gemm(a, b, **how)


def test_ragged_depths_that_differ_are_an_error():
    a, b = GroupedTensor.from_tensors([A[:2, :3], A[:2, :4]]), GroupedTensor.from_tensors([A[:2, :3], A[:2, :5]])

    with pytest.raises(ArgumentError, match="group 1: the depths 4 and 5 of a and b must be equal"):
        grouped_gemm(a, b)


def test_bias_of_ragged_columns_is_an_error():
    a, b = (GroupedTensor.from_tensors(t) for t in matrices("NT", ROWS, COLS, DEEP))

    with pytest.raises(ArgumentError, match="a bias needs an output whose groups have the same number of columns"):
        grouped_gemm(a, b, bias=torch.ones(E, 4))


def test_out_is_allowed_under_no_grad():
    a, b = operands("NT", grad=True)
    with torch.no_grad():
        out = grouped_gemm(a, b, SIZES, out=torch.zeros(T, N, dtype=torch.float64))

    torch.testing.assert_close(out, expected("NT", a, b).detach())


SHAPES = {
    "nothing": [(2, 3)] * 3,
    "rows": [(2, 3), (0, 3), (1, 3)],
    "columns": [(2, 3), (2, 0), (2, 1)],
    "rows and columns": [(2, 3), (1, 0), (0, 2)],
}


@pytest.mark.parametrize(("ragged", "shapes"), SHAPES.items())
def test_from_tensors_and_split(ragged, shapes):
    tensors = [unit(*shape, grad=False) for shape in shapes]
    grouped = GroupedTensor.from_tensors(tensors)

    assert_same(tuple(grouped.split()), tuple(tensors))
    assert grouped.shapes() == shapes
    assert grouped.num_groups == 3
    assert f"ragged in {ragged})" in repr(grouped)


@pytest.mark.parametrize("shapes", SHAPES.values())
def test_offsets_are_where_groups_start(shapes):
    grouped = GroupedTensor.from_tensors([unit(*shape, grad=False) for shape in shapes])
    sizes = torch.tensor([rows * columns for rows, columns in shapes])

    assert grouped.offsets.tolist() == [0, *sizes.cumsum(0).tolist()]
    assert grouped.offsets.dtype == torch.int64


def test_split_gives_views():
    grouped = GroupedTensor(torch.zeros(9, 2), SIZES)
    grouped.split()[2].fill_(1)

    assert grouped.data.sum(1).tolist() == [0, 0, 0, 2, 2, 2, 2, 2, 0]


def test_with_data_keeps_the_groups():
    grouped = GroupedTensor.from_tensors([unit(2, n, grad=False) for n in (1, 3)])
    other = grouped.with_data(2 * grouped.data)

    assert other.shapes() == [(2, 1), (2, 3)]
    assert other.dtype == torch.float64
    assert other.device == torch.device("cpu")


def dims(*values):
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupedTensor(torch.ones(4, 2)), r"expected contiguous data of 3 dimensions, got shape \[4, 2\]"),
        (lambda: GroupedTensor(torch.ones(4, 2).mT, dims(1)), "expected contiguous data of 2 dimensions"),
        (lambda: GroupedTensor(torch.ones(4, 2), dims(1), dims(2)), "contiguous data of 1 dimensions"),
        (lambda: GroupedTensor(torch.ones(4), None, dims(2)), "rows= is for groups that are ragged in their columns"),
        (lambda: GroupedTensor(torch.ones(4, 2), dims(2), rows=2), "rows= is for groups that are ragged"),
        (lambda: GroupedTensor(torch.ones(4, 2), dims(2.0)), r"first_dims must be int32 or int64 \[E\] on cpu"),
        (lambda: GroupedTensor(torch.ones(4), dims(2), dims(1, 1)), "1 first_dims, but 2 last_dims"),
        (lambda: GroupedTensor(torch.ones(4), None, dims(2).to("meta"), rows=2), "last_dims must be int32 or int64"),
        (lambda: GroupedTensor(torch.ones(4, 2), dims(3, 2)), "groups of 5 rows do not fit into 4"),
        (lambda: GroupedTensor(torch.ones(4, 2), dims(3, -1)), "first_dims must not be negative, got -1"),
        (lambda: GroupedTensor(torch.ones(4), None, dims(2, 3), rows=1), "groups of 5 elements do not fit into 4"),
        (lambda: GroupedTensor(torch.ones(4), dims(2, 1), dims(2, 1)), "groups of 5 elements do not fit into 4"),
        (
            lambda: GroupedTensor(torch.ones(4), None, dims(2), rows=-1),
            "rows must be an int that is not negative, got -1",
        ),
        (lambda: GroupedTensor(torch.ones(4), None, dims(2), rows=1.5), "rows must be an int .*, got 1.5"),
        (lambda: GroupedTensor(None), "GroupedTensor: data must be a tensor, got a NoneType"),
        (lambda: GroupedTensor([[1.0]], dims(1)), "GroupedTensor: data must be a tensor, got a list"),
        (lambda: GroupedTensor.from_tensors([[[1.0]]]), "from_tensors: expected matrices, got a list"),
        (lambda: GroupedTensor.from_tensors([]), "expected matrices of one dtype and device, got none"),
        (lambda: GroupedTensor.from_tensors([torch.ones(2)]), "expected matrices of one dtype and device"),
        (lambda: GroupedTensor.from_tensors([torch.ones(1, 1), torch.ones(1, 1).int()]), "matrices of one dtype"),
    ],
)
def test_grouped_tensor_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_dims_of_a_grouped_tensor_are_a_tensor():
    with pytest.raises(ValueError, match=r"first_dims must be int32 or int64 \[E\] on cpu, got \[3, 0, 5\]"):
        GroupedTensor(A, [3, 0, 5])
