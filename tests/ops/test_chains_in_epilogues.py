"""Chains of pointwise ops in the place of an activation: every fusion that takes one, against the ops one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import steps
from reference import assert_close_to, relative_error
from test_pointwise_chain import LINKS

from fusible import (
    Activation,
    AddExtraInput,
    Bias,
    Combine,
    ConstantScale,
    Dispatch,
    Float8Block,
    GroupedLinear,
    Pointwise,
    Scale,
    Sequential,
    SwiGLU,
    config,
)

E, K, H, T, SIZES = 3, 8, 16, 20, [9, 0, 7]
D, BF16 = torch.float64, torch.bfloat16
LINEARS = {"GroupedLinearResidual", "GroupedLinearGLU", "GroupedLinearChain"}
FUSIONS = {"RoutedMLP", "GroupedMLP", *LINEARS, "PointwiseChain", "GLUScale"}
IN_EPILOGUES = [name for name in LINKS if name not in ("bias", "column", "groups", "rows", "residual")]


class Experts:
    """A grouped linear, ops by name, and another one or none; what a call passes them, and its results."""

    def __init__(self, names, dtype=D, ends=True, frozen=(), by_module=False):
        torch.manual_seed(len(names))
        gates = sum(LINKS[name][1] == 2 for name in names)
        self.by_module, fc1 = by_module, GroupedLinear(E, K, H * 2**gates, dtype=D)
        widths = [H * 2 ** sum(LINKS[name][1] == 2 for name in names[i:]) for i in range(len(names))]
        functions = [LINKS[name][0](width) for name, width in zip(names, widths, strict=True)]
        ops = [fc1, *functions, *([GroupedLinear(E, H, K, dtype=D)] if ends else [])]
        self.model, sizes = Sequential(*ops).to(dtype), torch.tensor(SIZES)
        self.tensors, self.keywords = {"x": torch.randn(T, K, dtype=D).to(dtype)}, {}
        for i, op in enumerate(ops):
            self.keywords[i] = {"split_sizes": sizes} if "split_sizes" in op.keywords else {}
            for keyword in op.keywords.keys() - {"split_sizes"} if 0 < i <= len(names) else ():
                shape = (T, widths[i - 1]) if isinstance(op, AddExtraInput) else (T,)
                self.keywords[i][keyword] = self.tensors[f"{i}.{keyword}"] = (torch.rand(shape, dtype=D) + 0.5).to(
                    dtype
                )
        self.tensors |= dict(self.model.named_parameters())
        for i, tensor in enumerate(self.tensors.values()):
            tensor.requires_grad_(i not in frozen)
        self.dy = torch.randn(T, K if ends else H, dtype=D).to(dtype)

    def run(self, fused=True):
        of_ops = {self.model[i] if self.by_module else i: each for i, each in self.keywords.items() if each}
        wanted = {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}
        with config(disable_fusions=set() if fused else FUSIONS):
            y = self.model(self.tensors["x"], op_kwargs=of_ops)
            valid = sum(SIZES)  # what follows them is of no group, and another value where nobody looks
            grads = torch.autograd.grad(y[:valid], list(wanted.values()), self.dy[:valid])
        results = {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}
        return {n: t[:valid] if t.shape[0] == T else t for n, t in results.items()}


def in_double(names, experts, ends):
    """Unfused results of the same numbers in float64."""
    other = Experts(names, D, ends)
    with torch.no_grad():
        for name, tensor in experts.tensors.items():
            other.tensors[name].copy_(tensor).requires_grad_(tensor.requires_grad)
    other.dy = experts.dy.double()
    return other.run(fused=False)


def check(names, dtype, ends, frozen=(), by_module=False):
    experts = Experts(names, dtype, ends, frozen, by_module)
    fused, apart, truth = experts.run(), experts.run(fused=False), in_double(names, experts, ends)
    for name, tensor in apart.items():
        assert fused[name].dtype == tensor.dtype
        assert_close_to(fused[name], tensor, truth[name], name)


def chains_of(names, fewest=2):
    return st.tuples(
        st.lists(st.sampled_from(names), min_size=fewest, max_size=5).filter(
            lambda names: sum(LINKS[name][1] == 2 for name in names) < 2
        ),
        st.booleans(),
        st.sets(st.integers(0, 6), max_size=3),
        st.booleans(),
    )


CHAINS = chains_of(IN_EPILOGUES)
COLUMNS = ["groups", "bias", "column"]
CHAINS_WITH_COLUMNS = chains_of([*IN_EPILOGUES, *COLUMNS * 3]).filter(
    lambda drawn: not set(COLUMNS).isdisjoint(drawn[0])
)


def test_random_chains():
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(CHAINS)
    def agree(drawn):
        names, *how = drawn
        check(names, D, *how)

    agree()


def test_random_chains_in_half_precision():
    """Where few roundings meet, either way may be the closer one by chance: all chains together say which is."""
    errors = []

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(CHAINS)
    def collect(drawn):
        names, *how = drawn
        experts = Experts(names, BF16, *how)
        fused, apart, truth = experts.run(), experts.run(fused=False), in_double(names, experts, how[0])
        for name, tensor in apart.items():
            of_fused, of_apart = (relative_error(each, truth[name]) for each in (fused[name], tensor))
            assert of_fused <= 4 * of_apart + torch.finfo(BF16).eps, name
            errors.append((of_fused, of_apart))

    collect()
    of_fused, of_apart = (sum(each) for each in zip(*errors, strict=True))
    assert of_fused <= 1.1 * of_apart


CHAINS_WITH_MATRICES = chains_of([*IN_EPILOGUES, *COLUMNS, *["residual"] * 6]).filter(
    lambda drawn: "residual" in drawn[0]
)


@pytest.mark.parametrize("chains", [CHAINS_WITH_MATRICES, CHAINS_WITH_COLUMNS], ids=["matrices", "columns of groups"])
def test_random_chains_with(chains):
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(chains)
    def agree(drawn):
        names, *options = drawn
        check(names, D, *options)

    agree()


@pytest.mark.parametrize("ends", [False, True], ids=["first half", "both"])
@pytest.mark.parametrize("names", [["swiglu", "scale", "residual"], ["residual", "silu", "groups"]], ids=str)
def test_chains_with_matrices_in_half_precision(names, ends):
    check(names, BF16, ends)


@pytest.mark.parametrize("leading", [(T,), (4, T // 4)], ids=str)
def test_a_bias_scale_beside_a_matrix(leading):
    torch.manual_seed(0)
    model = Sequential(GroupedLinear(E, K, 2 * H, scale_bias=True, dtype=D), SwiGLU(), AddExtraInput("residual"))
    keywords = {"bias_scale": torch.rand(leading, dtype=D), "residual": torch.randn(*leading, H, dtype=D)}
    leaves = [torch.randn(*leading, K, dtype=D), *keywords.values()]
    results = []
    for disabled in (set(), FUSIONS):
        with config(disable_fusions=disabled):
            inputs = [leaf.clone().requires_grad_() for leaf in leaves]
            bias_scale, residual = inputs[1:]
            y = model(inputs[0], split_sizes=torch.tensor(SIZES), bias_scale=bias_scale, residual=residual)
            valid = y.flatten(0, -2)[: sum(SIZES)]
            results.append([valid, *torch.autograd.grad(valid.sin().sum(), [*inputs, *model.parameters()])])
            assert steps(model)[0] == ("GroupedLinear" if disabled else "GroupedLinearResidual")
    for fused, apart in zip(*results, strict=True):
        torch.testing.assert_close(fused, apart)


@pytest.mark.parametrize("ends", [False, True], ids=["first half", "both"])
@pytest.mark.parametrize("names", [["silu", "groups"], ["swiglu", "groups", "tanh", "groups", "row"]], ids=str)
def test_chains_with_columns_of_groups_in_half_precision(names, ends):
    check(names, BF16, ends)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["tanh", "constant"], ["GroupedMLP"]),
        (["swiglu", "tanh", "scale"], ["GroupedMLP"]),
        (["constant", "swiglu", "scale", "constant"], ["GroupedMLP"]),
        (["scale", "silu"], ["GroupedMLP"]),
        (["row", "scale"], ["GroupedLinearGLU", "Scale", "GroupedLinear"]),
        (["swiglu", "swiglu"], ["GroupedLinearGLU", "SwiGLU", "GroupedLinear"]),
        (["groups", "silu"], ["GroupedMLP"]),
        (["swiglu", "groups", "tanh", "groups", "row"], ["GroupedMLP"]),
        (["groups", "swiglu"], ["GroupedMLP"]),
        (["column", "silu"], ["GroupedMLP"]),
        (["bias", "silu"], ["GroupedMLP"]),
        (["bias", "groups", "swiglu", "column", "bias"], ["GroupedMLP"]),
        (["silu", "tanh", "bias"], ["GroupedMLP"]),
        (["silu", "residual"], ["GroupedLinearResidual", "GroupedLinear"]),
        (["residual", "silu"], ["GroupedLinearResidual", "GroupedLinear"]),
        (["silu", "residual", "tanh"], ["GroupedLinearResidual", "GroupedLinear"]),
        (["swiglu", "scale", "residual", "groups"], ["GroupedLinearResidual", "GroupedLinear"]),
        (["row", "scale", "residual"], ["GroupedLinearGLU", "PointwiseChain", "GroupedLinear"]),
        (["constant", "scale"], ["GroupedMLP"]),
        (["scale", "bias"], ["GroupedMLP"]),
        (["residual"], ["GroupedLinearResidual", "GroupedLinear"]),
        (["residual", "scale"], ["GroupedLinearResidual", "GroupedLinear"]),
        (["scale", "bias", "residual"], ["GroupedLinearResidual", "GroupedLinear"]),
        (["scale", "scale"], ["GroupedLinear", "PointwiseChain", "GroupedLinear"]),
        (["scale"], ["GroupedLinear", "Scale", "GroupedLinear"]),
    ],
    ids=str,
)
def test_what_becomes_one_op(names, expected):
    experts = Experts(names)
    experts.run()
    assert steps(experts.model) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["scale", "constant"], ["GroupedLinearChain"]),
        (["constant", "scale", "constant", "scale"], ["GroupedLinearChain", "Scale"]),
        (["bias", "scale"], ["GroupedLinear", "PointwiseChain"]),
        (["scale", "constant", "bias"], ["GroupedLinearChain", "Bias"]),
        (["residual", "scale"], ["GroupedLinear", "PointwiseChain"]),
        (["residual"], ["GroupedLinear", "AddExtraInput"]),
        (["bias", "swiglu"], ["GroupedLinearGLU"]),
        (["bias", "residual", "silu"], ["GroupedLinearResidual"]),
    ],
    ids=str,
)
def test_what_becomes_one_op_behind_a_linear(names, expected):
    experts = Experts(names, ends=False)
    experts.run()
    assert steps(experts.model) == expected


@pytest.mark.parametrize("names", [["bias", "scale"], ["residual", "scale"], ["scale", "residual"]], ids=str)
def test_rows_past_the_last_group_are_as_without_the_fusion(names):
    """Unless all later ops are linears of the same groups, as other ops may read these rows."""
    experts = Experts(names, ends=False)
    experts.run()
    refused = {f.reason for f in experts.model.explain().fusions if f.name.startswith("GroupedLinear") and not f.taken}
    assert refused == {"rows past the last group would be zero, and not what act adds"}
    outputs = []
    for disabled in (set(), FUSIONS):
        with config(disable_fusions=disabled):
            keywords = {i: each for i, each in experts.keywords.items() if each}
            outputs.append(experts.model(experts.tensors["x"], op_kwargs=keywords))
    assert torch.equal(*outputs)
    assert outputs[0][sum(SIZES) :].any()

    model = Sequential(*experts.model, GroupedLinear(E, H, K, dtype=D))
    keywords[len(names) + 1] = {"split_sizes": experts.keywords[0]["split_sizes"].clone()}
    model(experts.tensors["x"], op_kwargs=keywords)
    assert steps(model)[0] == "GroupedLinear"  # other sizes, as far as anybody knows


def test_a_chain_that_only_adds_and_multiplies_keeps_what_gradients_read():
    """Not the product, but where the gradient of a scale of the row is wanted."""
    model, sizes = Sequential(GroupedLinear(E, K, H), Scale(), ConstantScale(0.5)), torch.tensor(SIZES)
    x, scales, kept = torch.randn(T, K), torch.rand(T), list[torch.Tensor]()
    for wanted in (False, True):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            model(x, split_sizes=sizes, scales=scales.requires_grad_(wanted))
        assert (T, H) in [t.shape for t in kept] if wanted else (T, H) not in [t.shape for t in kept]
    assert steps(model) == ["GroupedLinearChain"]


AFFINE = ["bias", "scale", "constant", "residual"]


@pytest.mark.parametrize("dtype", [D, BF16], ids=str)
def test_random_chains_that_only_add_and_multiply(dtype):
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(chains_of(AFFINE, fewest=1))
    def agree(drawn):
        names, *options = drawn
        check(names, dtype, *options)

    agree()


def test_a_recipe_keeps_a_chain_without_an_activation_outside():
    model = Sequential(GroupedLinear(E, K, H, recipe=Float8Block()), Scale(), ConstantScale(0.5))
    x, sizes = torch.randn(T, K).to(BF16), torch.tensor(SIZES)
    model.to(BF16)(x, split_sizes=sizes, scales=torch.rand(T))
    refused = [f.reason for f in model.explain().fusions if f.name == "GroupedLinearChain"]
    assert refused == ["fc1 follows a recipe, and quantised products end in no chain but an activation's"]
    assert steps(model) == ["GroupedLinear", "PointwiseChain"]


@pytest.mark.parametrize("ends", [False, True], ids=["first half", "both"])
@pytest.mark.parametrize("names", [["scale", "constant"], ["residual", "scale", "bias"]], ids=str)
def test_delayed_weight_gradients_and_buffers_behind_chains(names, ends):
    """As of the linear alone: ``main_grad`` is added to, and ``backward_dw`` gives what waits."""
    results = []
    for disabled in (set(), FUSIONS):
        experts = Experts(names, D, ends)
        linears = [op for op in experts.model if isinstance(op, GroupedLinear)]
        for linear in linears:
            linear.delay_wgrad_compute = linear.accumulate_into_main_grad = True
            linear.weight.main_grad = torch.ones_like(linear.weight)
        with config(disable_fusions=disabled):
            buffer = torch.full((T, K), 7.0, dtype=D)
            experts.keywords[0]["grad_input"] = buffer
            of_ops = {i: each for i, each in experts.keywords.items() if each}
            x = experts.tensors["x"].detach().requires_grad_()
            y = experts.model(x, op_kwargs=of_ops)
            y[: sum(SIZES)].backward(experts.dy[: sum(SIZES)])
        for linear in linears:
            linear.backward_dw()
        results.append([buffer[: sum(SIZES)], *[linear.weight.main_grad for linear in linears]])
        assert all((linear.weight.main_grad[0] != 1).all() for linear in linears)
    for fused, apart in zip(*results, strict=True):
        torch.testing.assert_close(fused, apart)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["row", "tanh", "scale", "row"], "act reads more than one number of a row"),
        (["residual", "silu"], "act adds a matrix, which the epilogue of a backward does not read"),
        (["swiglu", "residual"], "act adds a matrix, which the epilogue of a backward does not read"),
    ],
    ids=str,
)
def test_why_a_chain_is_refused(names, reason):
    experts = Experts(names)
    experts.run()
    refused = [f.reason for f in experts.model.explain().fusions if f.name == "GroupedMLP"]
    assert refused == [reason]


def test_a_chain_that_reads_other_split_sizes_is_refused():
    experts = Experts(["silu", "groups"])
    experts.keywords[2]["split_sizes"] = torch.tensor(SIZES)
    experts.run()
    refused = [f.reason for f in experts.model.explain().fusions if f.name == "GroupedMLP"]
    assert refused == ["act and fc1 read different split_sizes"]


@pytest.mark.parametrize("by_function", [False, True], ids=["scale", "function"])
def test_routed_experts(by_function):
    torch.manual_seed(0)
    columns = {"b": torch.rand(E, H, dtype=D)}
    if by_function:  # which reads the routing weights and numbers of each expert's columns
        ops = [SwiGLU(), Pointwise(lambda x, scales, b: torch.tanh(x * b) * scales, columns=columns)]
    else:
        ops = [SwiGLU(), Pointwise(lambda x: 3 * torch.tanh(x / 3)), ConstantScale(0.5)]
    linears = GroupedLinear(E, K, 2 * H, dtype=D), GroupedLinear(E, H, K, dtype=D)
    last = [] if by_function else [Scale()]
    model = Sequential(Dispatch(E), linears[0], *ops, linears[1], *last, Combine())
    x, weights = torch.randn(T, K, dtype=D, requires_grad=True), torch.rand(T, 2, dtype=D, requires_grad=True)
    index, results = torch.randint(E, (T, 2)), []
    for disabled in (set(), FUSIONS):
        with config(disable_fusions=disabled):
            y = model(x, top_k_index=index, top_k_weights=weights)
            results.append([y, *torch.autograd.grad(y.sin().sum(), [x, weights, *model.parameters()])])
    for fused, apart in zip(*results, strict=True):
        torch.testing.assert_close(fused, apart)
    model(x, top_k_index=index, top_k_weights=weights)
    assert steps(model) == ["RoutedMLP"]


def test_the_state_dict_and_edits():
    experts = Experts(["tanh", "constant"])
    names = list(experts.model.state_dict())
    before = experts.run()["y"]
    assert list(experts.model.state_dict()) == names == ["0.weight", "0.bias", "3.weight", "3.bias"]
    experts.model[2].scale *= 2
    with torch.no_grad():
        experts.model[3].bias.zero_()
    doubled = experts.run()["y"]
    experts.model[2].scale /= 2
    torch.testing.assert_close(doubled, 2 * experts.run()["y"])
    assert not torch.equal(before, doubled)
    experts.model[1].register_forward_hook(lambda *arguments: None)
    experts.run()
    assert steps(experts.model) == ["GroupedLinear", "Pointwise", "ConstantScale", "GroupedLinear"]


def test_compiled_code():
    torch._dynamo.reset()
    experts = Experts(["swiglu", "tanh", "scale"], torch.float32)
    expected = experts.run()
    compiled = torch.compile(experts.model, backend="aot_eager", fullgraph=True)
    y = compiled(experts.tensors["x"], op_kwargs={i: each for i, each in experts.keywords.items() if each})
    torch.testing.assert_close(y[: sum(SIZES)], expected["y"])
    torch._dynamo.reset()


def test_a_parametrized_bias_stays_outside():
    model = Sequential(GroupedLinear(E, K, H, dtype=D), Activation("silu"), Bias(H, dtype=D))
    torch.nn.utils.parametrize.register_parametrization(model[2], "bias", torch.nn.Tanh())
    x, sizes = torch.randn(T, K, dtype=D), torch.tensor(SIZES)
    y = model(x, split_sizes=sizes)
    expected = F.silu(model[0](x, split_sizes=sizes)) + model[2].bias
    torch.testing.assert_close(y[: sum(SIZES)], expected[: sum(SIZES)])
    chain = Sequential(Activation("silu"), model[2])
    (grad,) = torch.autograd.grad(chain(expected.detach()).sum(), [model[2].parametrizations.bias.original])
    assert grad.shape == (H,)
    assert steps(chain) == ["PointwiseChain"]
