"""``explain``: what a call runs and why, without running anything."""

from __future__ import annotations

import json
import re
from functools import partial
from xml.etree import ElementTree

import models
import pytest
import torch
from emulation import harness
from torch import Tensor, nn

from fusible import (
    AddExtraInput,
    ArgumentError,
    Combine,
    ConstantScale,
    Dispatch,
    GroupedLinear,
    Identity,
    Linear,
    MakeExtraOutput,
    Op,
    Scale,
    Sequential,
    SwiGLU,
    config,
    explain,
    interleaved,
)
from fusible.fuser import RefusedError
from fusible.fuser.contract.tracing import KernelCall
from fusible.fuser.explain.explanation import KernelReport

E, K, F, T = 4, 64, 32, 128
SIZES = torch.tensor([T // E] * E)


mlp = partial(models.mlp, E, K, F, bias=False, dtype=torch.bfloat16)


def arguments(dtype=torch.bfloat16, x_grad=True, scales_grad=True):
    x, scales = torch.randn(T, K, dtype=dtype), torch.rand(T)
    return x.requires_grad_(x_grad), SIZES, scales.requires_grad_(scales_grad), SIZES


class Unready(nn.Module):
    """Cannot run on tensors without data."""

    def forward(self, x):
        return x * x.sum().item()


# ------------------------------------------------------------------------------------------------- without running


def test_explain_before_a_call_raises():
    with pytest.raises(ArgumentError, match="no call yet; pass the arguments of forward"):
        mlp().explain()


@pytest.mark.parametrize("given", [{"split_sizes": SIZES}, {"op_kwargs": {0: {"split_sizes": SIZES}}}])
def test_explain_with_arguments_but_without_x_raises(given):
    model = mlp()
    model(*arguments())

    with pytest.raises(ArgumentError, match="x: expected a tensor, got a NoneType"):
        model.explain(**given)


def test_explain_after_a_call_explains_that_call():
    model, args = mlp(), arguments()
    model(*args)

    assert model.explain().to_dict() == model.explain(*args).to_dict()


def test_explain_takes_what_forward_takes():
    model, (x, sizes, scales, _) = mlp(), arguments()
    expected = model.explain(x, sizes, scales, sizes).to_dict()
    addressed = {0: {"split_sizes": sizes}, model[2]: {"scales": scales}, "3": {"split_sizes": sizes}}

    assert model.explain(x, split_sizes=sizes, scales=scales).to_dict() == expected
    assert model.explain(x=x, op_kwargs=addressed).to_dict() == expected
    assert explain(model, x, sizes, scales, sizes).to_dict() == expected


def test_explain_refuses_what_forward_refuses():
    model, (x, sizes, scales, _) = mlp(), arguments()
    overlapping = {3: {"output": x.detach()}}

    for wrong in (
        {"scales": scales[1:]},
        {"nothing": 1, "scales": scales},
        {"scales": scales, "op_kwargs": overlapping},
    ):
        with pytest.raises(ArgumentError):
            model.explain(x, split_sizes=sizes, **wrong)


@pytest.mark.parametrize("before", [True, False], ids=["after a call", "with arguments"])
def test_explain_changes_nothing(before):
    norm = nn.BatchNorm1d(K, dtype=torch.bfloat16)
    model = Sequential(*mlp(accumulate_into_main_grad=True), norm, nn.Dropout())
    for op in (model[0], model[3]):
        op.weight.main_grad = torch.full(op.weight.shape, 7.0)
    args, output = arguments(), torch.full((T, K), 7.0, dtype=torch.bfloat16)
    if before:
        model(*args)
    versions = [t._version for t in (*model.parameters(), *args)]
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    model.explain() if before else model.explain(*args, op_kwargs={3: {"output": output}})

    assert versions == [t._version for t in (*model.parameters(), *args)]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all((op.weight.main_grad == 7).all() and op.weight.grad is None for op in (model[0], model[3]))
    assert (output == 7).all()


def test_explain_runs_no_op_on_real_data():
    seen = []

    class Looks(Identity):
        def fwd(self, x):
            seen.append(type(x).__name__)
            return x, None

    Sequential(Looks()).explain(torch.ones(2))

    assert seen == ["FakeTensor"]


def test_explain_runs_no_hooks():
    linear, seen = nn.Linear(K, K), []
    linear.register_forward_hook(lambda *_: seen.append(1))
    Sequential(linear).explain(torch.ones(T, K))

    assert not seen


def test_explain_works_on_meta_tensors():
    x, sizes, scales = (a.detach().to("meta") for a in arguments()[:3])

    assert mlp().to("meta").explain(x, split_sizes=sizes, scales=scales).flops == mlp().explain(*arguments()).flops


# ------------------------------------------------------------------------------------------------- steps


def test_step_of_a_fusion_stands_for_its_ops():
    (step,) = mlp().explain(*arguments()).steps

    assert (step.name, step.ops, step.labels, step.shape) == ("GroupedMLP", (0, 1, 2, 3), ("0", "1", "2", "3"), (T, K))


def test_kernel_and_the_reason_for_it_are_named():
    (step,) = mlp().explain(*arguments()).steps

    assert step.kernel == "grouped_mm"
    assert step.reason == "hopper needs a CUDA device, got cpu; triton needs a CUDA device, got cpu"


def test_a_reason_of_several_kernels_is_said_once():
    reasons = ("first cannot", "first cannot; second might", "", "second might; third will")
    report = KernelReport.of([KernelCall("k", reason, 0, 0) for reason in reasons])

    assert report.reason == "first cannot; second might; third will"


def test_backend_that_was_asked_for_needs_no_reason():
    with config(backend="loop"):
        (step,) = mlp().explain(*arguments()).steps

    assert (step.kernel, step.reason) == ("loop", "")


def test_ops_count_in_the_outermost_container():
    model = Sequential(nn.Identity(), Sequential(Identity(), ConstantScale(2.0)))
    steps = model.explain(torch.ones(2)).steps

    assert [(s.name, s.ops, s.labels) for s in steps] == [
        ("Identity", (0,), ("0",)),
        ("Identity", (1,), ("1.0",)),
        ("ConstantScale", (1,), ("1.1",)),
    ]


def test_other_module_is_a_step_with_a_reason():
    (step,) = Sequential(nn.Linear(K, 3)).explain(torch.ones(T, K)).steps

    assert (step.name, step.kernel, step.reason) == ("Linear", "module", "not an Op: runs unchanged")
    assert step.shape == (T, 3)


class Counts(Op):
    """Reads its input's values."""

    def fwd(self, x: Tensor):
        return x * x.sum().item(), None

    def bwd(self, saved, dy): ...


@pytest.mark.parametrize(
    ("module", "reason"),
    [(Counts(), "it reads values, so it cannot run without data"), (Unready(), "not an Op: runs unchanged")],
)
def test_behind_what_needs_data_nothing_is_known(module, reason):
    steps = Sequential(module, Identity()).explain(torch.ones(2)).steps

    assert [s.reason for s in steps] == [reason, "its input is not known without data"]
    assert [s.shape for s in steps] == [None, None]


class Keeps(Op):
    """The rows whose first number is positive."""

    def fwd(self, x: Tensor):
        return x[x[:, 0] > 0], None

    def bwd(self, saved, dy): ...


@pytest.mark.parametrize("first", [True, False], ids=["explained", "called before"])
def test_shapes_behind_an_op_of_as_many_rows_as_the_data_say_are_unknown_in_words(first):
    model, x = Sequential(Linear(K, K), Keeps(), Linear(K, 3), nn.Identity()), torch.randn(T, K)
    if not first:
        with torch.no_grad():
            model(x)
    explanation = model.explain(x) if first else model.explain()
    behind = "its shapes depend on data: on what op 1 (Keeps) gives"

    assert [s.shape for s in explanation.steps] == [(T, K), None, None, None]
    assert [s.reason for s in explanation.steps] == ["", "the shape of its output depends on data", behind, behind]
    assert "3 of 4 steps, of unknown shapes, are not counted" in str(explanation)
    assert explanation.to_dict()["steps"][0]["shape"] == (T, K)


def test_output_of_integers_carries_no_grad():
    class Ranks(Identity):
        extra_outputs = ("ranks",)

        def fwd(self, x):
            return {"y": x * 2, "ranks": x.argsort(-1)}, None

    model = Sequential(Ranks(), Identity())

    assert [s.shape for s in model.explain(torch.ones(2, 3, requires_grad=True)).steps] == [(2, 3)] * 2


def test_output_of_another_module_carries_grad_on():
    frozen, trained = nn.Linear(K, K).requires_grad_(False), nn.Linear(K, K)
    after = [Sequential(m, SwiGLU()).explain(torch.ones(T, K)).steps[1].saved_bytes for m in (frozen, trained)]

    assert after == [0, T * K * 4]


def test_a_module_under_two_names_keeps_its_tensors():
    """Its tensors are replaced under one name: restored under both, the second would get back the first's stand-in."""
    other, tied = nn.Module(), nn.Linear(K, 1)
    other.norm = other.again = nn.BatchNorm1d(K)
    other.tied, other.also = tied, nn.Linear(K, 1)
    other.also.weight = tied.weight
    other.forward = lambda x: other.again(x) * other.also(x)
    before = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    steps = Sequential(Linear(K, K), other).explain(torch.randn(T, K)).steps

    assert [step.shape for step in steps] == [(T, K), (T, K)]
    after = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert all(after[name] is tensor for name, tensor in before.items())


@pytest.mark.parametrize("x_grad", [True, False])
def test_module_that_gives_no_tensor_is_unknown_behind(x_grad):
    steps = Sequential(nn.LSTM(4, 4), nn.Identity()).explain(torch.ones(3, 4, requires_grad=x_grad)).steps

    assert [s.shape for s in steps] == [None, None]


# ------------------------------------------------------------------------------------------------- sizes


def test_flops_are_those_of_the_products():
    explanation = mlp().explain(*arguments())

    assert explanation.flops == explanation.steps[0].flops == 2 * T * K * 2 * F + 2 * T * F * K


def test_bytes_are_at_least_every_operand_once():
    weights = 2 * (E * 2 * F * K + E * F * K)
    x_and_y = 2 * (T * K + T * K)

    assert mlp().explain(*arguments()).bytes >= weights + x_and_y


def saved(model, *args, **kwargs):
    return model.explain(*args, **kwargs).saved_bytes_per_row


def test_fused_mlp_saves_x_and_the_pre_activation_only():
    small = 4 + SIZES.numel() * 8 / T  # a float32 scale a row, and the split sizes

    assert saved(mlp(), *arguments()) == 2 * K + 4 * F + small


def test_unfused_ops_save_more():
    with config(disable_fusions={"GroupedMLP", "GroupedLinearGLU", "GLUScale"}):
        explanation = mlp().explain(*arguments())

    assert explanation.saved_bytes_per_row > 2 * K + 4 * F + 2 * F
    assert [s.name for s in explanation.steps] == ["GroupedLinear", "SwiGLU", "Scale", "GroupedLinear"]


def test_saved_bytes_are_those_that_autograd_keeps():
    model, args, packed = mlp(), arguments(), {}

    def pack(t):
        packed[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(*args)
    for parameter in model.parameters():
        packed.pop(parameter.data_ptr(), None)

    assert sum(packed.values()) / T == saved(model, *args)


def test_frozen_first_linear_needs_no_x():
    model = mlp()
    model[0].requires_grad_(False)

    assert saved(model, *arguments()) == saved(mlp(), *arguments()) - 2 * K


def test_nothing_is_saved_for_a_frozen_model():
    model = mlp().requires_grad_(False)

    assert saved(model, *arguments(x_grad=False, scales_grad=False)) == 0


def test_only_fc2_frozen_and_no_gradient_before_it_saves_nothing_of_x():
    model = mlp()
    model[0].requires_grad_(False)
    bytes_ = saved(model, *arguments(x_grad=False, scales_grad=False))

    assert bytes_ < 2 * K + 4 * F


def test_nothing_is_saved_under_no_grad():
    with torch.no_grad():
        assert saved(mlp(), *arguments()) == 0


def test_tensor_that_two_steps_keep_counts_once():
    model, x = Sequential(MakeExtraOutput("r"), Linear(K, K), AddExtraInput("r"), Linear(K, K)), torch.ones(T, K)

    assert saved(model, x) == 2 * 4 * K


# ------------------------------------------------------------------------------------------------- the backward


def backward_of(model, *args, **kwargs):
    """The report on the backward of a model that is one step."""
    (step,) = model.explain(*args, **kwargs).steps
    return step.backward


def test_backward_names_its_kernels_and_counts_their_products():
    explanation = mlp().explain(*arguments())
    (step,) = explanation.steps

    assert step.backward.kernel == f"{step.kernel} + loop"  # the tail of the scales' gradient
    assert step.backward.reason == step.reason
    assert explanation.backward_flops == step.backward.flops == 2 * step.flops
    assert explanation.backward_bytes == step.backward.bytes > step.bytes
    assert json.loads(json.dumps(explanation.to_dict()))["steps"][0]["backward"]["kernel"] == step.backward.kernel
    assert f"backward {step.backward.flops / 1e9:.3f} GFLOP" in str(explanation)


def test_backward_counts_the_wanted_gradients_alone():
    model = mlp()
    model[0].requires_grad_(False)

    assert backward_of(model, *arguments(x_grad=False)).flops == 2 * (2 * T * F * K)


def test_there_is_no_backward_where_nothing_needs_a_gradient():
    frozen = mlp().requires_grad_(False)
    with torch.no_grad():
        assert backward_of(mlp(), *arguments()) is None

    assert backward_of(frozen, *arguments(x_grad=False, scales_grad=False)) is None
    assert backward_of(Sequential(MakeExtraOutput("r")), torch.ones(T, K, requires_grad=True)) is None


def test_backward_of_another_module_is_its_own():
    trained, frozen = (Sequential(nn.Linear(K, 3).requires_grad_(flag)) for flag in (True, False))

    assert backward_of(trained, torch.ones(T, K)).kernel == "module"
    assert backward_of(frozen, torch.ones(T, K)) is None


def test_backward_runs_without_autocast():
    seen = []

    class Looks(Identity):
        def fwd(self, x):
            return x * 2, None

        def bwd(self, saved, dy):
            seen.append((type(dy).__name__, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return {"x": lambda: dy * 2}

    with torch.autocast("cpu", torch.bfloat16):
        assert backward_of(Sequential(Looks()), torch.ones(2, requires_grad=True)).kernel == "torch"

    assert seen == [("FakeTensor", False, False)]


@pytest.mark.parametrize("how", [{"accumulate_into_main_grad": True}, {"delay_wgrad_compute": True}, None])
@pytest.mark.parametrize("single", [True, False])
def test_explaining_a_backward_changes_no_weight_and_queues_nothing(how, single):
    how = {"accumulate_into_main_grad": True, "delay_wgrad_compute": True} if how is None else how
    model, hooked = mlp(single_grouped_weight=single, **how), []
    for op in (model[0], model[3]):
        op.register_wgrad_accumulation_and_reduce_hooks(lambda: hooked.append(1))
        for weight in op.parameters():
            weight.main_grad, weight.grad_added_to_main_grad = torch.full(weight.shape, 7.0), False
    versions = [p.main_grad._version for p in model.parameters()]
    report = backward_of(model, *arguments())

    assert report.flops == 2 * model.explain(*arguments()).flops
    assert not any(op.has_delayed_wgrad() for op in (model[0], model[3]))
    assert all(p.grad is None and p.grad_added_to_main_grad is False for p in model.parameters())
    assert all((p.main_grad == 7).all() for p in model.parameters())
    assert versions == [p.main_grad._version for p in model.parameters()]
    assert not hooked
    assert model[0]._stand_ins._memory is None


def test_delayed_gradients_are_noted():
    (step,) = mlp(delay_wgrad_compute=True).explain(*arguments()).steps

    assert "the gradient of the weights is computed by backward_dw()" in step.notes


def test_main_grad_that_is_not_there_is_noted_and_one_that_does_not_fit_is_the_reason():
    model = mlp(accumulate_into_main_grad=True)
    (step,) = model.explain(*arguments()).steps
    model[3].weight.main_grad = torch.zeros(3)
    report = backward_of(model, *arguments())

    assert "weight.main_grad is not there yet; it is taken to be float32" in step.notes
    assert step.backward.flops == 2 * step.flops
    assert report.kernel == "?"
    assert "weight.main_grad must be floating-point, on cpu" in report.reason


class Remembers(Identity):
    """Assigns to itself, in both directions."""

    def __init__(self):
        super().__init__()
        self.last = None

    def fwd(self, x):
        self.last = x
        return x * 2, None

    def bwd(self, saved, dy):
        self.last = dy
        return {"x": dy}


def test_what_an_op_assigns_to_itself_is_forgotten():
    op = Remembers()
    version = op.attribute_version
    backward_of(Sequential(op), torch.ones(2, requires_grad=True))

    assert op.last is None
    assert op.attribute_version == version


class Asks(Identity):
    """Cannot run its backward without data."""

    def fwd(self, x):
        return x * 2, None

    def bwd(self, saved, dy):
        return {"x": dy * dy.sum().item()}


class Fails(Asks):
    def bwd(self, saved, dy):
        raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (Asks, "its backward reads values, so it cannot run without data"),
        (Fails, "its backward cannot run without data: KeyError: 'no such thing'"),
    ],
)
def test_backward_that_cannot_run_without_data_says_so_and_the_rest_is_explained(op, reason):
    explanation = Sequential(op(), Linear(3, 3)).explain(torch.ones(2, 3, requires_grad=True))
    first, second = explanation.steps

    assert (first.kernel, first.backward.kernel, first.backward.reason) == ("torch", "?", reason)
    assert (second.shape, second.backward.kernel) == ((2, 3), "torch")
    assert reason in str(explanation)


def test_behind_what_needs_data_no_backward_is_known():
    steps = Sequential(Unready(), Linear(2, 2)).explain(torch.ones(2, 2)).steps

    assert [step.backward.kernel for step in steps] == ["?", "?"]
    assert str(Sequential(Unready()).explain(torch.ones(2))).count("backward") == 1


def routed(**how):
    fc1, fc2 = GroupedLinear(E, K, 2 * F, dtype=torch.bfloat16, **how), GroupedLinear(E, F, K, dtype=torch.bfloat16)
    return Sequential(Dispatch(E), fc1, SwiGLU(), fc2, Scale(), Combine())


def routed_arguments():
    x, weights = torch.randn(T, K, dtype=torch.bfloat16, requires_grad=True), torch.rand(T, 2, requires_grad=True)
    return x, {"top_k_index": torch.zeros(T, 2, dtype=torch.int64), "top_k_weights": weights}


@pytest.mark.parametrize("disabled", [(), ("RoutedMLP",)], ids=["fused", "in steps"])
def test_permutations_of_pytorch_are_kernels(disabled):
    x, given = routed_arguments()
    with config(disable_fusions=disabled):
        steps = routed().explain(x, **given).steps

    assert steps[0].kernel.startswith("torch")
    assert steps[0].backward.kernel.startswith("torch")
    assert all(step.bytes and step.backward.bytes for step in (steps[0], steps[-1]))


def test_only_extra_outputs_that_leave_a_step_are_noted():
    x, given = routed_arguments()
    (fused,) = routed().explain(x, **given).steps
    with config(disable_fusions={"RoutedMLP"}):
        dispatch = routed().explain(x, **given).steps[0]

    assert not fused.notes
    assert "extra output 'num_rows': read by op 5" in dispatch.notes


class Extension:
    """In place of the compiled one: says nothing of interest, launches nothing."""

    def __getattr__(self, name):
        return lambda *_, **fields: 16


@pytest.fixture
def gpu(monkeypatch):
    """Tensors of the CPU pass for those of a Hopper GPU; nothing is launched."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with harness.installed(Extension()):
        yield


EPILOGUE = "hopper (activation in the epilogue)"


def block_mlp(block, width=2 * F):
    fc1, fc2 = GroupedLinear(E, K, width, dtype=torch.bfloat16), GroupedLinear(E, width // 2, K, dtype=torch.bfloat16)
    return Sequential(fc1, SwiGLU(layout=interleaved(block)), fc2)


@pytest.mark.usefixtures("gpu")
def test_backward_of_experts_names_our_kernels():
    explanation = mlp().explain(*arguments())
    (step,) = explanation.steps

    assert step.kernel == step.backward.kernel == f"{EPILOGUE} + hopper"
    assert [c.split(":")[0] for c in step.backward.configurations] == [
        f"{EPILOGUE}, NN {T} x {F} x {K}",
        f"hopper, NN {T} x {K} x {2 * F}",
        f"hopper, TN {2 * F} x {K} x {T}",
        f"hopper, TN {K} x {F} x {T}",
    ]
    assert f"GroupedMLP 0 1 2 3 backward: {step.backward.configurations[0]}" in str(explanation)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("single", [True, False])
def test_bias_gradients_and_bias_scales_are_kernels(single):
    op = GroupedLinear(E, K, F, dtype=torch.bfloat16, scale_bias=True, single_grouped_weight=single)
    scale = torch.ones(T, requires_grad=True)
    report = backward_of(Sequential(op), torch.ones(T, K, dtype=torch.bfloat16), SIZES, scale)

    assert report.kernel == "hopper (row dots) + hopper + hopper (column sums)"


@pytest.mark.usefixtures("gpu")
def test_activation_alone_and_the_tail_of_its_scales_are_kernels():
    scales = torch.ones(T, requires_grad=True)
    model = Sequential(GroupedLinear(E, K, 2 * F, bias=False, dtype=torch.bfloat16), SwiGLU(), Scale())
    x = torch.ones(T, K, dtype=torch.bfloat16, requires_grad=True)
    (step,) = model.explain(x, SIZES, scales).steps

    assert step.kernel == f"{EPILOGUE} + hopper (zero tail)"
    assert step.backward.kernel == "activation + hopper"


@pytest.mark.usefixtures("gpu")
def test_epilogue_that_fell_back_is_printed_in_both_directions():
    x = torch.ones(T, K, dtype=torch.bfloat16, requires_grad=True)
    explanation = block_mlp(12, 48).explain(x, split_sizes=SIZES)
    (step,) = explanation.steps
    tiles, loads = (
        "its epilogue has no tile for blocks of 12 columns",
        "its epilogue has no loads for blocks of 12 columns",
    )

    assert (step.kernel, step.reason) == ("hopper + activation", tiles)
    assert step.backward.kernel == "hopper + activation + hopper (column sums)"
    assert step.backward.reason == loads
    forward, backward = str(explanation).splitlines()[2:4]
    assert forward.startswith("GroupedMLP")
    assert forward.endswith(tiles)
    assert backward.startswith("  backward")
    assert backward.endswith(loads)


@pytest.mark.usefixtures("gpu")
def test_epilogue_may_fall_back_in_one_direction_alone():
    x = torch.ones(T, K, dtype=torch.bfloat16, requires_grad=True)
    (step,) = block_mlp(24, 96).explain(x, split_sizes=SIZES).steps

    assert step.reason == "its epilogue has no tile for blocks of 24 columns"
    assert (step.backward.kernel, step.backward.reason) == (f"{EPILOGUE} + hopper + hopper (column sums)", "")


def wide_scales():
    """Experts whose scales, behind them, are too wide for the epilogue of the backward alone; and what they take."""
    model = mlp()
    x, scales = torch.ones(T, K, dtype=torch.bfloat16, requires_grad=True), torch.ones(T, dtype=torch.float64)
    return Sequential(model[0], model[1], model[3], model[2]), x, {"split_sizes": SIZES, "scales": scales}


@pytest.mark.usefixtures("gpu")
def test_strict_refuses_the_epilogue_of_a_backward_through_explain_and_through_a_call():
    model, x, given = wide_scales()
    refused = "strict: .* because hopper's epilogue needs dense scales of 16 or 32 bits"
    (step,) = model.explain(x, **given).steps
    with config(strict=True):
        with pytest.raises(RefusedError, match=refused):
            model.explain(x, **given)
        with torch.no_grad():
            assert model.explain(x, **given).steps[0].kernel == f"{EPILOGUE} + hopper"
        y = model(x, **given)

    assert step.backward.kernel == "hopper + torch"
    assert "its epilogue needs dense scales of 16 or 32 bits" in step.backward.reason
    with pytest.raises(RefusedError, match=refused):
        y.sum().backward()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("disabled", [(), ("RoutedMLP",)], ids=["fused", "in steps"])
def test_our_permutations_are_kernels_of_the_backward(disabled):
    x, given = routed_arguments()
    with config(disable_fusions=disabled):
        steps = routed().explain(x, **given).steps
    forward = {name for step in steps for name in step.kernel.split(" + ")}
    backward = {name for step in steps for name in step.backward.kernel.split(" + ")}

    assert {"fusible (route)", "fusible (spread)", "fusible (sum)"} <= forward
    assert {"fusible (spread)", "fusible (sum)", "fusible (by slot)", "hopper (row dots)", EPILOGUE} <= backward
    assert not {"loop", "torch"} & (forward | backward)


@pytest.mark.usefixtures("gpu")
def test_another_backend_names_every_kernel_of_a_backward():
    x, given = routed_arguments()
    with config(backend="loop"):
        (step,) = routed().explain(x, **given).steps

    assert "fusible" not in step.backward.kernel
    assert "config(backend='loop')" in step.backward.reason


def test_table_of_a_model_has_the_kernels_of_backwards():
    model, (x, sizes, scales, _) = mlp(), arguments()
    model(x, split_sizes=sizes, scales=scales)
    heading, _, row = str(explain(nn.ModuleList([model]))).splitlines()

    assert heading.split()[:5] == ["layer", "module", "runs", "kernel", "backward"]
    assert row.split()[3:5] == ["grouped_mm", "grouped_mm"]


# ------------------------------------------------------------------------------------------------- notes and fusions


@pytest.mark.parametrize(("sizes", "notes"), [([T // E] * E, ("split_sizes are copied to cpu",)), (SIZES, ())])
def test_copied_split_sizes_are_noted(sizes, notes):
    x, _, scales, _ = arguments()

    assert mlp().explain(x, split_sizes=sizes, scales=scales).steps[0].notes == notes


def test_fusions_say_whether_they_were_taken_and_why():
    fusions = mlp().explain(*arguments()).fusions

    assert [(f.name, f.ops, f.taken, f.reason) for f in fusions] == [
        ("GroupedMLP", (0, 1, 2, 3), True, "every condition holds"),
    ]


def test_refused_fusion_gives_its_reason():
    x, sizes, scales, _ = arguments()
    explanation = mlp().explain(x, sizes, scales, sizes.clone())

    assert explanation.fusions[0].reason == "fc1 and fc2 read different split_sizes"
    assert [s.name for s in explanation.steps] == ["GroupedLinearGLU", "GroupedLinear"]


# ------------------------------------------------------------------------------------------------- as text and pictures


def test_to_dict_is_plain_data():
    explanation = mlp().explain(*arguments())
    plain = json.loads(json.dumps(explanation.to_dict()))

    assert plain["steps"][0]["name"] == "GroupedMLP"
    assert plain["fusions"][0]["taken"] is True
    assert (plain["rows"], plain["flops"]) == (T, explanation.flops)


def test_printed_tables_show_steps_fusions_and_totals():
    text = str(mlp().explain(*arguments()))

    for part in (
        "GroupedMLP  0 1 2 3  grouped_mm         128x64",
        "needs a CUDA device",
        "260 saved bytes a row",
        "taken",
    ):
        assert part in text


def test_printed_tables_show_what_was_refused():
    x, sizes, scales, _ = arguments()
    text = str(mlp().explain(x, sizes, scales, sizes.clone()))

    assert "refused  fc1 and fc2 read different split_sizes" in text


def test_printed_tables_say_where_nothing_fits_or_is_known():
    text = str(Sequential(Unready(), Identity()).explain(torch.ones(2)))

    assert "no fusion fits" in text
    assert "?" in text


def residual():
    ops = [MakeExtraOutput("r"), Identity(), AddExtraInput("r"), GroupedLinear(E, K, K), SwiGLU()]
    return Sequential(*ops).explain(torch.ones(T, K), SIZES)


def test_mermaid_shows_nodes_edges_and_a_box_around_a_fusion():
    lines = residual().to_mermaid().splitlines()

    assert lines[0] == "flowchart LR"
    assert '  n2["0: MakeExtraOutput"]' in lines
    assert '  n1(["split_sizes"])' in lines
    assert "  n2 -->|r| n4" in lines
    assert "  n2 --> n3" in lines
    box = lines.index('  subgraph f0["GroupedLinearGLU 3 4"]')
    assert [line.strip() for line in lines[box + 1 : box + 4]] == ["n5", "n6", "end"]


def test_dot_shows_nodes_edges_and_a_cluster():
    text = residual().to_dot()

    assert text.startswith("digraph fusible {")
    assert '"0" -> "2" [label="r"];' in text
    assert 'subgraph cluster_0 { label="GroupedLinearGLU 3 4"; "3"; "4"; }' in text
    assert text.count("{") == text.count("}")


def nothing():
    return Sequential().explain(torch.ones(2))


@pytest.mark.parametrize("explained", [residual, nothing])
def test_svg_is_well_formed(explained):
    root = ElementTree.fromstring(explained().to_svg())

    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root[-1].text in ("split_sizes", "x")


def test_svg_has_a_frame_for_every_op_and_fusion_and_a_line_for_every_edge():
    tags = [element.tag.rpartition("}")[2] for element in ElementTree.fromstring(residual().to_svg())]

    assert tags.count("rect") == 5 + 1
    assert tags.count("line") == 5 + 1 + 1


def test_svg_shows_ops_channels_and_fusions():
    words = [e.text for e in ElementTree.fromstring(residual().to_svg()) if e.text]

    assert {"0: MakeExtraOutput", "r", "GroupedLinearGLU 3 4"} <= set(words)
    assert words.count("split_sizes") == 1


def boxes(root, colour):
    """(left, top, right, bottom) of the rectangles with that outline."""
    found = [
        [float(e.get(k)) for k in ("x", "y", "width", "height")]
        for e in root
        if e.get("stroke") == colour and e.get("x")
    ]
    return [(x, y, x + width, y + height) for x, y, width, height in found]


def test_svg_places_lines_on_ops_and_frames_around_them():
    root = ElementTree.fromstring(residual().to_svg())
    ops, ((left, top, right, bottom),) = boxes(root, "black"), boxes(root, "teal")
    ends = [[float(e.get(k)) for k in ("x1", "y1", "x2", "y2")] for e in root if e.get("x1")]

    assert all(any(x2 in (a, (a + c) / 2) and b <= y2 <= d for a, b, c, d in ops) for _, _, x2, y2 in ends)
    assert all(any(x1 == (a + c) / 2 and y1 == d for a, b, c, d in ops) for x1, y1, x2, y2 in ends if x1 > 300)
    assert [left < a and top < b and c < right and d < bottom for a, b, c, d in ops] == [False] * 3 + [True] * 2
    assert bottom <= float(root.get("height"))


def test_text_drawing_shows_every_op():
    text = residual().to_text()

    for part in ("0 MakeExtraOutput", "2 AddExtraInput", "4 SwiGLU", "x"):
        assert part in text


HOSTILE = 'x"]; click n0 "javascript:alert(1)\\" \n \x00 \ud800 <b>#|`&'


@pytest.fixture
def hostile():
    """An explanation in which a class, a child and a keyword have such a name."""
    name = HOSTILE.replace("\x00", "").replace("\ud800", "")  # neither of which a class may have in its name
    branches = [type(name, (kind,), {})("r") for kind in (MakeExtraOutput, AddExtraInput)]
    branches[0].extra_outputs, branches[1].keywords = (HOSTILE,), {HOSTILE: branches[1].keywords["r"]}
    model = Sequential()
    for i, op in enumerate([branches[0], ConstantScale(2.0), branches[1], GroupedLinear(E, K, K), SwiGLU()]):
        model.add_module(HOSTILE.replace(".", "") + str(i), op)
    return model.explain(torch.ones(T, K), split_sizes=SIZES)


def test_mermaid_takes_names_as_text(hostile):
    quoted = re.compile(r'\["[^"\]<>|`&\\]*"\]|\|[^"\]<>|`&\\]*\|')

    for line in hostile.to_mermaid().splitlines():
        outside = quoted.sub("", line).replace("-->", "")
        assert not set(outside) & set('"<>|`&;')
        assert "javascript" not in outside


def test_dot_takes_names_as_text(hostile):
    text = hostile.to_dot()
    outside = re.sub(r'"(?:[^"\\\n]|\\.)*"', "", text)

    assert "javascript" in text
    assert "javascript" not in outside
    assert '"' not in outside
    assert text.isprintable() or text.replace("\n", "").isprintable()


def test_svg_is_well_formed_whatever_the_names(hostile):
    words = [e.text for e in ElementTree.fromstring(hostile.to_svg().encode()) if e.text]

    assert sum("click n0" in word for word in words) >= 3
