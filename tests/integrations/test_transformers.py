"""Models of transformers through our experts: the same numbers and gradients, on the model's own parameters."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fusible

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

import transformers
from hugging_face import COMMON, MODELS, assert_same, experts_of, inputs, make, relative, results

from fusible.integrations import transformers as integration
from fusible.integrations.hugging_face import experts as adapter

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    integration._warned.clear()


def step(model: Any, implementation: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and all gradients of a training step."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    ids = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(2))
    output = model(ids, labels=ids)
    output.loss.backward()
    return output.logits.detach(), output.loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_model_trains_as_eager(name: str) -> None:
    model = make(name)
    logits, loss, grads = step(model, "eager")
    ours, our_loss, our_grads = step(model, "fusible")

    assert relative(ours, logits) < 1e-6
    assert relative(our_loss, loss) < 1e-6
    assert our_grads.keys() == grads.keys()
    assert {n for n, g in grads.items() if g is not None and relative(our_grads[n], g) > 5e-6} == set()
    assert all(".experts." not in n or our_grads[n].abs().sum() > 0 for n in grads)


@pytest.mark.parametrize("name", MODELS)
def test_every_experts_module_of_it_is_fused(name: str) -> None:
    model = make(name)
    step(model, "fusible")
    layers = fusible.explain(model).layers

    assert len(layers) == len(experts_of(model)) > 0
    assert [layer.explanation.steps[0].name for layer in layers] == ["RoutedMLP"] * len(layers)
    rows = str(fusible.explain(model)).splitlines()[2:]  # equal layers share one
    assert rows
    assert all(row.count("RoutedMLP") == 1 for row in rows)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "nemotron-h", "gemma-4"])
def test_generates_what_eager_generates(name: str) -> None:
    model = make(name).eval()
    ids = torch.randint(2, 64, (1, 5), generator=torch.Generator().manual_seed(3))
    texts = []
    for implementation in ("eager", "fusible"):
        model.set_experts_implementation(implementation)
        texts.append(model.generate(ids, max_new_tokens=32, do_sample=False))

    assert texts[0].shape[1] == 37
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_save_and_load(name: str, tmp_path: Path) -> None:
    model = make(name)
    step(model, "fusible")
    before, ids = model.state_dict(), torch.arange(2, 12).view(1, 10)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, experts_implementation="fusible")
    other = type(model).from_pretrained(tmp_path, experts_implementation="eager")

    assert loaded.config._experts_implementation == "fusible"
    assert {n: relative(t, before[n]) for n, t in loaded.state_dict().items()} == dict.fromkeys(before, 0.0)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert relative(loaded(ids).logits, other(ids).logits) < 1e-6


# --- an experts module alone ------------------------------------------------------------------------------------------


def module(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """The experts of the first layer that has some."""
    experts = experts_of(make(name, dtype))[0]
    experts.config._experts_implementation = "fusible"
    return experts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [1, 17])
def test_module_gives_what_eager_gives(name: str, tokens: int) -> None:
    experts = module(name)

    assert_same(experts, inputs(experts, tokens))


@pytest.mark.parametrize("name", ["mixtral, F = K", "qwen3, 2F = K", "gpt-oss, F = K"])
def test_orientation_is_not_guessed_from_the_shape(name: str) -> None:
    """Every weight is a number of its own: whatever is read the wrong way round gives another result."""
    experts = module(name)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter).div(1e3).sin())

    assert_same(experts, inputs(experts, 9))


def test_one_expert_gets_all_rows() -> None:
    experts = module("mixtral")
    x, index, weights = inputs(experts, 6, top_k=1)

    assert_same(experts, (x, torch.full_like(index, 2), weights))


def test_no_tokens() -> None:
    experts = module("gpt-oss")
    ours = results(experts, "fusible", *inputs(experts, 0))

    assert ours["y"].shape == (0, 32)
    assert all(float(gradient.abs().sum()) == 0 for gradient in ours.values())


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "nemotron-h"])
def test_ids_of_no_expert_add_nothing(name: str, share: float) -> None:
    experts = module(name)
    x, index, weights = inputs(experts, 8)
    absent = torch.arange(8)[:, None] < 8 * share
    absent = absent.expand(8, 2) & (torch.arange(2) < (2 if share == 1 else 1))
    index = index.masked_fill(absent, experts.down_proj.shape[0])
    found = results(experts, "fusible", x, index, weights)
    present = results(experts, "fusible", x, index.masked_fill(absent, 0), weights.masked_fill(absent, 0.0))

    assert torch.equal(found["weights"][absent], torch.zeros(int(absent.sum()), dtype=torch.float64))
    assert relative(found["y"], present["y"]) < 1e-12
    assert relative(found["x"], present["x"]) < 1e-12
    assert all(relative(found[n], present[n]) < 1e-12 for n, _ in experts.named_parameters())


def test_hidden_states_of_no_expert_may_be_nan() -> None:
    experts = module("mixtral")
    x, index, weights = inputs(experts, 4)
    with torch.no_grad():
        x[0] = torch.nan
    index[0] = 4
    found = results(experts, "fusible", x, index, weights)

    assert all(bool(t.isfinite().all()) for t in found.values())
    assert float(found["x"][0].abs().sum()) == 0


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_bfloat16_is_as_exact_as_grouped_mm(name: str) -> None:
    exact, rounded = module(name), module(name, torch.bfloat16)
    with torch.no_grad():
        for wide, narrow in zip(exact.parameters(), rounded.parameters(), strict=True):
            wide.copy_(narrow)
    arguments = inputs(rounded, 33)
    wide_arguments = tuple(t.detach().double().requires_grad_() if t.is_floating_point() else t for t in arguments)
    truth = results(exact, "eager", *wide_arguments)
    ours, theirs = (results(rounded, n, *arguments) for n in ("fusible", "grouped_mm"))

    assert {n for n, t in truth.items() if relative(ours[n], t) > 1.1 * relative(theirs[n], t) + 1e-4} == set()


def test_weights_of_experts_are_not_rounded() -> None:
    experts = module("mixtral", torch.bfloat16)
    x, index, _ = inputs(experts, 16, top_k=1)
    fine = torch.linspace(0.5, 0.51, 16).view(16, 1)  # all but a few of these are one number in bfloat16
    one = experts(x, index, torch.ones(16, 1))
    ours = experts(x, index, fine)

    assert relative(ours, one.float() * fine) < relative((one * fine.bfloat16()), one.float() * fine)


def test_autocast() -> None:
    experts = module("gpt-oss", torch.float32)
    x, index, weights = inputs(experts, 12)
    with torch.autocast("cpu", torch.bfloat16):
        ours = experts(x, index, weights)
    experts.config._experts_implementation = "eager"

    assert ours.dtype == torch.float32
    assert 1e-4 < relative(ours, experts(x, index, weights)) < 0.02


def test_hidden_states_are_cast_to_the_weights() -> None:
    experts = module("mixtral", torch.bfloat16)
    x, index, weights = inputs(experts, 5)

    assert experts(x.float(), index, weights).dtype == torch.float32
    assert torch.equal(experts(x.float(), index, weights), experts(x, index, weights).float())


def test_twice_is_bitwise_the_same() -> None:
    experts = module("qwen3", torch.float32)
    arguments = inputs(experts, 64, top_k=3)
    first, second = (results(experts, "fusible", *arguments) for _ in range(2))

    assert all(torch.equal(t, second[n]) for n, t in first.items())


# --- parameters stay the model's --------------------------------------------------------------------------------------


def test_model_shows_nothing_of_us() -> None:
    model = make("mixtral")
    names, modules = list(model.state_dict()), len(list(model.modules()))
    places = {n: p.data_ptr() for n, p in model.named_parameters()}
    step(model, "fusible")

    assert list(model.state_dict()) == names
    assert len(list(model.modules())) == modules
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == places


def test_container_reads_the_parameters_as_they_lie() -> None:
    experts = module("gpt-oss")
    container = adapter.built_of(experts, adapter.ModuleParameters.of(experts)).container

    assert container.fc1.weight is experts.gate_up_proj
    assert container.fc2.bias is experts.down_proj_bias


def test_replaced_parameters_are_seen() -> None:
    experts = module("mixtral")
    arguments = inputs(experts, 7)
    experts(*arguments)
    experts.down_proj = nn.Parameter(torch.randn_like(experts.down_proj))

    assert_same(experts, arguments)


def test_parametrized_weights_get_their_gradients() -> None:
    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    experts = module("mixtral")
    nn.utils.parametrize.register_parametrization(experts, "down_proj", Halved())

    assert_same(experts, inputs(experts, 7))


@pytest.mark.parametrize("act_fn", ["silu", "of its own"])
def test_parametrized_weights_are_computed_once_and_let_go(act_fn: str) -> None:
    """A weight that a parametrization merges is as large as all experts; a model must not keep one a layer."""
    made = []

    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            made.append(weight / 2)
            return made[-1]

    experts = module("mixtral")
    if act_fn != "silu":
        experts.act_fn = Bessel()
    nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", Halved())
    made.clear()
    with torch.no_grad():
        experts(*inputs(experts, 7))
    assert len(made) == 1
    weight = weakref.ref(made.pop())
    gc.collect()

    assert weight() is None
    assert "GroupedLinear" in steps_of(experts) if act_fn != "silu" else steps_of(experts) == ["RoutedMLP"]


@pytest.mark.parametrize("several", [False, True])
def test_offloaded_weights_are_let_go(several: bool) -> None:
    """As accelerate fetches them: a hook puts parameters there for the call, and takes them away after it."""
    experts = module("mixtral")
    stored, arguments = dict(experts._parameters), inputs(experts, 7)
    expected = experts(*arguments)
    fetching = SimpleNamespace(offload=True)
    experts._hf_hook = SimpleNamespace(hooks=[SimpleNamespace(), fetching]) if several else fetching
    for _ in range(2):
        experts._parameters.update({n: nn.Parameter(p.detach().clone()) for n, p in stored.items()})
        weights = [weakref.ref(p) for p in experts.parameters()]
        with torch.no_grad():
            assert torch.equal(experts(*arguments), expected)
        experts._parameters.update({n: nn.Parameter(p.detach().to("meta")) for n, p in stored.items()})
        gc.collect()

        assert [weight() for weight in weights] == [None, None]


def test_shallow_copies_run_their_own_modules() -> None:
    """As those that ``nn.DataParallel`` makes, which run side by side."""
    experts = module("mixtral", torch.float32)
    if not hasattr(experts, "has_post_expert_norm"):
        pytest.skip(f"transformers {transformers.__version__} has no norms after experts")
    experts.has_post_expert_norm, experts.post_expert_norm = True, nn.RMSNorm(32)
    x, index, weights = inputs(experts, 9)
    y = experts(x, index, weights)
    twin = copy.copy(experts)
    twin._modules = {**experts._modules, "post_expert_norm": nn.LayerNorm(32, elementwise_affine=False)}
    found, theirs = results(twin, "fusible", x, index, weights), results(twin, "grouped_mm", x, index, weights)

    assert {n for n, t in theirs.items() if relative(found[n], t) > 5e-6} == set()
    twin.config._experts_implementation = "fusible"
    assert torch.equal(experts(x, index, weights), y)


def test_hooks_of_an_activation_run() -> None:
    experts = module("mixtral")
    arguments = inputs(experts, 7)
    experts(*arguments)
    handle = experts.act_fn.register_forward_hook(lambda module, args, y: 2 * y)
    assert_same(experts, arguments)
    assert steps_of(experts)[2] == "ModelStep"

    handle.remove()
    assert_same(experts, arguments)
    assert steps_of(experts) == ["RoutedMLP"]


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_gate_that_was_replaced_on_one_module_is_seen(name: str) -> None:
    experts = module(name)
    arguments = inputs(experts, 7)
    experts(*arguments)
    experts._apply_gate = lambda rows: rows[..., ::2].tanh()
    experts.config._experts_implementation = "batched_mm"
    expected = experts(*arguments)
    experts.config._experts_implementation = "fusible"

    assert relative(experts(*arguments), expected) < 1e-12
    assert steps_of(experts)[2] == "ModelStep"


def test_changed_constant_of_a_gate_is_seen() -> None:
    experts = module("gpt-oss")
    arguments = inputs(experts, 7)
    experts(*arguments)
    experts.limit = 0.5

    assert_same(experts, arguments)


def test_copies_and_pickles_run() -> None:
    experts = module("gpt-oss")
    arguments = inputs(experts, 7)
    y = experts(*arguments)

    assert torch.equal(copy.deepcopy(experts)(*arguments), y)
    assert torch.equal(pickle.loads(pickle.dumps(experts))(*arguments), y)


def test_frozen_experts_cost_no_weight_gradient() -> None:
    experts = module("mixtral").requires_grad_(False)
    x, index, weights = inputs(experts, 7)
    experts(x, index, weights).sum().backward()

    assert x.grad is not None
    assert all(p.grad is None for p in experts.parameters())


def test_gradient_checkpointing() -> None:
    model = make("qwen3")
    _, _, plain = step(model.train(), "fusible")
    plain = {n: g.clone() for n, g in plain.items()}
    model.gradient_checkpointing_enable()
    _, _, checkpointed = step(model, "fusible")

    assert {n for n, g in plain.items() if relative(checkpointed[n], g) > 1e-6} == set()


def test_first_call_may_be_checkpointed() -> None:
    """Finding out which gate it is saves nothing that a recomputation would not save."""
    plain, checkpointed = make("qwen3").train(), make("qwen3").train()
    _, _, expected = step(plain, "fusible")
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    _, _, found = step(checkpointed, "fusible")

    assert {n for n, g in expected.items() if relative(found[n], g) > 1e-6} == set()


def _flops(call: Callable[[], Any]) -> None:
    with FlopCounterMode(display=False):
        call().sum().backward()


def _fake(call: Callable[[], Any]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        call().sum().backward()


def _inferred(call: Callable[[], Any]) -> None:
    with torch.inference_mode():
        call()


@pytest.mark.parametrize("mode", [_inferred, _flops, _fake])
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_first_call_may_be_in_any_mode(name: str, mode: Any) -> None:
    experts, same = module(name), module(name)
    arguments = inputs(experts, 7)
    mode(lambda: experts(*arguments))

    assert steps_of(experts) == ["RoutedMLP"]
    assert torch.equal(experts(*arguments), same(*arguments))


# --- gates ------------------------------------------------------------------------------------------------------------


def custom(family: str, name: str, **sizes: Any) -> Any:
    """An experts class of another model, with drawn weights."""
    from importlib import import_module

    config = transformers.PretrainedConfig(**{"hidden_size": 32, "hidden_act": "silu", **sizes})
    config._experts_implementation = "fusible"
    experts = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)(config).double()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(6))
    return experts


SIZES = {
    **{"intermediate_size": 24, "moe_intermediate_size": 24, "swiglu_limit": 1.5, "swiglu_alpha": 1.702},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4},
}
KNOWN = {
    "openai_privacy_filter": "OpenAIPrivacyFilterExperts",
    "minimax_m3_vl": "MiniMaxM3VLExperts",
    "deepseek_v4": "DeepseekV4Experts",
    "hy_v4": "HYV4Experts",
    "glm5_next": "Glm5NextTextExperts",
}


def container_of(experts: Any) -> Any:
    built = adapter.existing(experts)
    assert built is not None
    return built.container


def steps_of(experts: Any) -> list[str]:
    return [step.name for step in container_of(experts).explain().steps]


@pytest.mark.parametrize("family", KNOWN)
def test_known_gate_fuses(family: str) -> None:
    try:
        experts = custom(family, KNOWN[family], **SIZES)
    except ModuleNotFoundError:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")

    assert_same(experts, inputs(experts, 9), 1e-6 if family == "openai_privacy_filter" else 1e-12)  # its eager is fp32
    assert steps_of(experts) == ["RoutedMLP"]


def interleaved_tanh(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    return torch.tanh(self.steepness * gate) * up


def up_first(self: Any, gate_up: Tensor) -> Tensor:
    up, gate = gate_up.split(gate_up.shape[-1] // 2, dim=-1)
    return self.curve(gate) * up


def in_pairs(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.view(*gate_up.shape[:-1], -1, 2).unbind(-1)
    return torch.relu(gate).square() * (up + self.steepness)


@pytest.mark.parametrize("gate", [interleaved_tanh, up_first, in_pairs])
def test_gate_that_nobody_has_heard_of_fuses(gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = module("gpt-oss")
    experts.steepness = 0.5
    monkeypatch.setattr(type(experts), "_apply_gate", gate)
    monkeypatch.setattr(type(experts), "curve", lambda self, x: torch.atan(self.steepness * x), raising=False)

    assert_same(experts, inputs(experts, 9))
    assert steps_of(experts) == ["RoutedMLP"]
    experts.steepness = 2.0  # in the gate, or in a method that it calls
    assert_same(experts, inputs(experts, 9))
    assert steps_of(experts) == ["RoutedMLP"]


@pytest.mark.parametrize("act", [nn.Softsign(), nn.LeakyReLU(0.3), nn.Mish(), torch.tanh])
@pytest.mark.parametrize("name", ["mixtral", "nemotron-h"])
def test_activation_that_is_no_built_in_fuses(name: str, act: Any) -> None:
    experts = module(name)
    del experts.act_fn
    experts.act_fn = act

    assert_same(experts, inputs(experts, 9))
    assert steps_of(experts) == ["RoutedMLP"]


def test_changed_constant_of_an_activation_is_seen() -> None:
    experts = module("mixtral")
    experts.act_fn = nn.LeakyReLU(0.3)
    assert_same(experts, inputs(experts, 9))
    experts.act_fn.negative_slope = 0.1

    assert_same(experts, inputs(experts, 9))


@pytest.mark.parametrize("name", MODELS)
def test_gates_of_models_are_built_in_ones(name: str) -> None:
    experts = module(name)
    experts(*inputs(experts, 9))

    assert container_of(experts).act.spec.program is None


def test_class_that_nobody_has_heard_of_fuses() -> None:
    experts = module("gpt-oss")

    class InventedExperts(type(experts)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return 3.0 * torch.tanh(F.silu(gate) / 3.0) * up

    experts.__class__ = InventedExperts

    assert_same(experts, inputs(experts, 9))
    assert steps_of(experts) == ["RoutedMLP"]


def test_activation_with_children_fuses() -> None:
    """Children of the activation bound gate and up."""
    try:
        experts = custom("inkling2", "Inkling2Experts", **SIZES, mlp_gate_softcap=2.0, mlp_up_softcap=3.0)
    except ModuleNotFoundError:
        pytest.skip(f"transformers {transformers.__version__} has no inkling2")

    assert_same(experts, inputs(experts, 9), 1e-6)  # its eager is fp32
    assert steps_of(experts) == ["RoutedMLP"]
    experts.act_fn.up_softcap = nn.Tanh()
    assert_same(experts, inputs(experts, 9), 1e-6)
    assert steps_of(experts) == ["RoutedMLP"]
    experts.act_fn.up_softcap.register_forward_hook(lambda module, args, y: 2 * y)
    assert_same(experts, inputs(experts, 9), 1e-6)
    assert "ModelStep" in steps_of(experts)


def of_the_whole_row(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.softmax(gate, -1) * up


def of_what_may_change(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.clamp(max=self.numbers["limit"]) * up


def of_all_columns(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.tanh().chunk(2, dim=-1)
    return gate * up


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (of_the_whole_row, "kernels do not know _softmax"),
        (of_what_may_change, "its gate reads numbers, which may change"),
        (of_all_columns, "calls tanh on gate and up together"),
    ],
)
def test_gate_that_cannot_be_read_runs_as_it_is(gate: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = module("gpt-oss")
    experts.numbers = {"limit": 1.0}
    monkeypatch.setattr(type(experts), "_apply_gate", gate)

    assert_same(experts, inputs(experts, 9))
    assert "ModelStep" in steps_of(experts)
    assert reason in str(container_of(experts))


class Bessel(nn.Module):
    """An activation that kernels cannot compute."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.special.i0(x)


def test_unknown_gate_and_activation_run_as_they_are() -> None:
    experts = module("mixtral")
    experts.act_fn = Bessel()

    assert_same(experts, inputs(experts, 9))
    assert steps_of(experts)[2] == "ModelStep"


def test_unknown_activation_without_a_gate_runs_as_it_is() -> None:
    experts = module("nemotron-h")
    experts.act_fn = Bessel()

    assert_same(experts, inputs(experts, 9))
    assert steps_of(experts)[2] == "ModelStep"


def test_norm_after_the_experts() -> None:
    experts = module("mixtral", torch.float32)
    if not hasattr(experts, "has_post_expert_norm"):
        pytest.skip(f"transformers {transformers.__version__} has no norms after experts")
    experts.has_post_expert_norm, experts.post_expert_norm = True, nn.RMSNorm(32)
    theirs, ours = (results(experts, name, *inputs(experts, 9)) for name in ("grouped_mm", "fusible"))

    assert "post_expert_norm.weight" in ours
    assert {n for n, t in theirs.items() if relative(ours[n], t) > 5e-6} == set()


# --- what is not ours -------------------------------------------------------------------------------------------------


class Wrapped(Tensor):
    """A weight whose operations are its own, such as a quantised one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_subclassed_weights_run_through_stock_with_one_warning() -> None:
    experts = module("mixtral", torch.float32)
    x, index, weights = inputs(experts, 5)
    expected = experts(x, index, weights)
    down = experts.down_proj.detach().as_subclass(Wrapped)
    del experts.down_proj
    experts.down_proj = down

    with pytest.warns(UserWarning, match="grouped_mm: down_proj is a Wrapped, a tensor subclass"):
        y = experts(x, index, weights)
    assert relative(y.detach().as_subclass(Tensor), expected.detach()) < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experts(x, index, weights)


def test_integer_weights_are_refused_with_the_reason() -> None:
    experts = module("mixtral", torch.float32)
    del experts.gate_up_proj
    experts.gate_up_proj = torch.zeros(4, 48, 16, dtype=torch.uint8)

    assert adapter.refusal(experts, adapter.ModuleParameters.of(experts)) == "gate_up_proj is uint8"


def test_explain_says_what_runs_the_experts() -> None:
    model = make("mixtral")
    model.set_experts_implementation("eager")
    assert "set_experts_implementation('fusible')" in str(fusible.explain(model))
    model.set_experts_implementation("fusible")
    assert "no call yet" in str(fusible.explain(model))


def test_explain_says_why_a_gate_is_the_models_own() -> None:
    model = make("mixtral")
    for experts in experts_of(model):
        experts.act_fn = Bessel()
    step(model, "fusible")

    assert all("kernels do not know i0" in layer.reason for layer in fusible.explain(model).layers)


@pytest.mark.parametrize("gate", ["known", "unknown"])
def test_explain_says_what_routes(gate: str) -> None:
    model = make("mixtral")
    model.set_experts_implementation("fusible")
    if gate == "unknown":
        for experts in experts_of(model):
            experts.act_fn = Bessel()
    step(model, "fusible")
    layers = fusible.explain(model).layers

    assert {layer.routing for layer in layers} == {
        "torch: hopper needs a CUDA device, got cpu; triton needs a CUDA device, got cpu"
    }
    (row,) = str(fusible.explain(model)).splitlines()[2:]  # the layers are equal
    assert layers[0].routing in row


class _Adapter(nn.Module):
    """PEFT's addition to a target parameter: two thin matrices for each expert."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn_like(thin)) for thin in (like[..., :1], like[..., :1, :]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a * self.b


@pytest.mark.parametrize("trains", [True, False], ids=["training", "no_grad"])
def test_explain_tells_of_adapters_that_are_there_during_a_call_alone(trains: bool) -> None:
    """As PEFT's ``ParamWrapper`` has them: put on for a call, and taken off after it."""
    experts, saved = module("mixtral").requires_grad_(False), []
    adapters = {name: _Adapter(getattr(experts, name)) for name in ("gate_up_proj", "down_proj")}
    arguments = [a.detach() for a in inputs(experts, 7)]
    for while_they_are_on in (False, False, False, True):
        for name, low_rank in adapters.items():
            nn.utils.parametrize.register_parametrization(experts, name, low_rank)
        with torch.set_grad_enabled(trains):
            experts(*arguments)
        if while_they_are_on:
            fusible.explain(nn.Sequential(experts))
        for name in adapters:
            nn.utils.parametrize.remove_parametrizations(experts, name, leave_parametrized=False)
        saved.append(fusible.explain(nn.Sequential(experts)).layers[0].explanation.saved_bytes_per_row)

    assert len(set(saved)) == 1
    assert (saved[0] > 0) == trains


@pytest.mark.filterwarnings("ignore:.*profiler.*:UserWarning")
def test_profile_names_the_steps() -> None:
    experts = module("mixtral")
    arguments = inputs(experts, 7)
    with torch.profiler.profile() as profile:
        experts(*arguments).sum().backward()
    names = {event.key for event in profile.key_averages()}

    assert {"fusible::RoutedMLP", "fusible::RoutedMLP.bwd"} <= names


def test_old_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration.transformers, "__version__", "5.6.0")

    with pytest.raises(ImportError, match=r"needs transformers 5\.7 or newer, found 5\.6\.0"):
        integration.register()


def several_parts(of_text: dict[str, Any]) -> Any:
    """The configuration of a tiny model with a vision and a text part, whose experts are in the latter."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    text = {**COMMON, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"deepstack_visual_indexes": [0], "patch_size": 4, "num_position_embeddings": 16}
    inner = transformers.Qwen3VLMoeTextConfig(**text, rope_parameters=rope, **of_text)
    return transformers.Qwen3VLMoeConfig(text_config=inner, vision_config=vision)


@pytest.mark.parametrize("how", ["fusible", {"text_config": "fusible"}])
def test_a_model_of_several_parts_takes_it_as_a_whole(how: Any, tmp_path: Path) -> None:
    kind = transformers.Qwen3VLMoeForConditionalGeneration
    built = kind._from_config(several_parts({}), experts_implementation=how)
    built.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path, experts_implementation=how)
    switched = kind.from_pretrained(tmp_path)
    switched.set_experts_implementation(how)
    for model in (built, loaded, switched):
        model(torch.arange(2, 9).view(1, 7))
        assert {layer.explanation.steps[0].name for layer in fusible.explain(model).layers} == {"RoutedMLP"}


def test_what_the_text_part_alone_was_given_is_lost_and_explained() -> None:
    """transformers sets it anew in all parts, as it does with the implementation of attention."""
    model = transformers.Qwen3VLMoeForConditionalGeneration(several_parts({"experts_implementation": "fusible"}))
    said = str(fusible.explain(model))

    assert "model.set_experts_implementation('fusible') runs it here" in said


def test_a_model_of_two_sets_of_experts_trains() -> None:
    """Ernie 4.5 VL: tokens of text and of images have experts of their own."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    sizes = {"intermediate_size": 48, "moe_intermediate_size": [24, 16], "moe_num_experts": 4, "moe_k": 2}
    common = {name: value for name, value in COMMON.items() if name != "head_dim"}
    text = {**common, **sizes, "rope_parameters": rope, "output_router_logits": True}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "patch_size": 4}
    torch.manual_seed(0)
    config = transformers.Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision)
    model = transformers.Ernie4_5_VLMoeForConditionalGeneration(config)
    ids, losses = torch.arange(2, 15).view(1, 13), []
    for implementation in ("eager", "fusible"):
        model.set_experts_implementation(implementation)
        losses.append(model(ids, labels=ids, mm_token_type_ids=torch.zeros_like(ids)).loss)

    torch.testing.assert_close(*losses)
    losses[1].backward()
    ran = [layer.explanation for layer in fusible.explain(model).layers if layer.explanation is not None]
    assert {explanation.steps[0].name for explanation in ran} == {"RoutedMLP"}
