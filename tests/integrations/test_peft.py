"""PEFT's LoRA on experts: what its own way computes, without a sum of weights and adapters."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import OrderedDict
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if find_spec("transformers") is None or find_spec("peft") is None:
    pytest.skip("transformers or peft is not installed", allow_module_level=True)

import peft
from hugging_face import experts_of, make, relative

import fusible.integrations.peft
import fusible.integrations.transformers
from fusible import config, explain
from fusible.integrations.hugging_face import lora

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
MODELS = ["mixtral", "qwen3", "gpt-oss", "nemotron-h", "gemma-4"]
D = torch.float64


def adapted(name: str, targets: str = "both", dtype: torch.dtype = D, rank: int = 3, **how: Any) -> Any:
    """A model with adapters that are not zero."""
    model = make(name, dtype)
    up = "gate_up_proj" if hasattr(experts_of(model)[0], "gate_up_proj") else "up_proj"
    names = {"both": (up, "down_proj"), "up": (up,), "down": ("down_proj",)}[targets]
    settings = {"target_modules": [], "target_parameters": [f"experts.{n}" for n in names], "lora_alpha": 5}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=rank, **settings, **how), autocast_adapter_dtype=False)
    draw(wrapped)
    return wrapped


def draw(model: nn.Module) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)


def run_through(model: Any, implementation: str) -> None:
    """Sets it where the experts look for it; eager is the loop of the model's own."""
    for experts in experts_of(model):
        experts.config._experts_implementation = implementation


def results(model: Any, implementation: str) -> dict[str, Tensor]:
    """The logits, and the gradients of all that trains."""
    run_through(model, implementation)
    ids = torch.arange(26).view(2, 13) % 64
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    logits.square().mean().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **trained}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """In float64, but the norms of these models compute in float32."""
    assert ours.keys() == theirs.keys()
    assert {name: relative(ours[name], t) for name, t in theirs.items() if relative(ours[name], t) > tolerance} == {}


@pytest.fixture
def no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where PEFT makes weights and adapters into one."""
    wrapper = fusible.integrations.peft.peft_layer.ParamWrapper

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a sum of a weight and an adapter")

    for name in ("get_delta_weight", "get_delta_factors"):
        if hasattr(wrapper, name):
            monkeypatch.setattr(wrapper, name, refuse)


@pytest.mark.parametrize("targets", ["both", "up", "down"])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_peft(name: str, targets: str) -> None:
    model = adapted(name, targets)
    theirs, ours = results(model, "eager"), results(model, "fusible")

    assert any("lora_A" in key for key in theirs)
    assert_same(ours, theirs)


def test_nothing_of_the_size_of_the_weights_is_made(no_sums: None) -> None:
    ours = results(adapted("mixtral"), "fusible")

    assert sum("lora_" in name for name in ours) == 8  # two layers, two parameters, A and B


def test_peft_still_makes_sums_elsewhere(no_sums: None) -> None:
    with pytest.raises(AssertionError, match="a sum"):
        results(adapted("mixtral"), "eager")


def test_several_adapters_at_once() -> None:
    model = adapted("mixtral")
    model.add_adapter("other", peft.LoraConfig(r=5, **_same_targets(model)))
    draw(model)
    model.base_model.set_adapter(["default", "other"])
    theirs, ours = results(model, "eager"), results(model, "fusible")

    assert any(".other." in name for name in theirs)
    assert_same(ours, theirs)


def _same_targets(model: Any) -> dict[str, Any]:
    first = model.peft_config["default"]
    return {"target_modules": [], "target_parameters": list(first.target_parameters), "lora_alpha": 7}


def test_half_precision_is_as_near_as_theirs() -> None:
    exact = results(adapted("mixtral"), "eager")
    model = adapted("mixtral")
    half = copy.deepcopy(model).to(torch.bfloat16)
    for name, parameter in half.named_parameters():  # as PEFT keeps adapters by default
        if "lora_" in name:
            parameter.data = parameter.data.float()
    theirs, ours = results(half, "eager"), results(half, "fusible")

    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    for name, truth in exact.items():
        assert relative(ours[name], truth) < 1.5 * relative(theirs[name], truth) + 0.01, name


def test_ranks_are_filled_up_to_rows_that_kernels_read() -> None:
    part = lora.Adapter(torch.randn(4, 3, 6), torch.randn(4, 5, 3))
    half = lora.Adapter(*(t.bfloat16() for t in part))

    assert lora.Adapter.of([part]).a.shape == (4, 3, 6)
    assert lora.Adapter.of([half, half, half]).b.shape == (4, 5, 16)
    torch.testing.assert_close(lora.Adapter.of([half]).b @ lora.Adapter.of([half]).a, half.b @ half.a)


def test_scaling_of_rslora() -> None:
    model = adapted("gpt-oss", use_rslora=True)

    assert_same(results(model, "fusible"), results(model, "eager"))


def test_disabled_adapters_are_left_out() -> None:
    model = adapted("mixtral")
    run_through(model, "fusible")
    ids = torch.arange(13).view(1, 13)
    with model.disable_adapter():
        without = model(ids, use_cache=False).logits
    base = make("mixtral", D)
    run_through(base, "eager")

    torch.testing.assert_close(without, base(ids, use_cache=False).logits)
    assert relative(model(ids, use_cache=False).logits, without) > 1e-3


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_merge_and_unmerge(name: str) -> None:
    model = adapted(name)
    run_through(model, "fusible")
    ids = torch.arange(13).view(1, 13)
    before = model(ids, use_cache=False).logits
    model.base_model.merge_adapter()
    merged = model(ids, use_cache=False).logits
    model.base_model.unmerge_adapter()

    torch.testing.assert_close(merged, before)
    torch.testing.assert_close(model(ids, use_cache=False).logits, before)
    torch.testing.assert_close(model.merge_and_unload()(ids, use_cache=False).logits, before)


def test_save_and_load(tmp_path: Any) -> None:
    model = adapted("mixtral")
    run_through(model, "fusible")
    ids = torch.arange(13).view(1, 13)
    before = model(ids, use_cache=False).logits
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make("mixtral", D), tmp_path, autocast_adapter_dtype=False)
    run_through(loaded, "fusible")

    torch.testing.assert_close(loaded(ids, use_cache=False).logits, before)
    assert "fusible" not in " ".join(model.state_dict())


def test_training_steps_are_those_of_peft() -> None:
    losses = {}
    for implementation in ("eager", "fusible"):
        model = adapted("mixtral")
        run_through(model, implementation)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
        ids = torch.arange(26).view(2, 13)
        losses[implementation] = []
        for _ in range(4):
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[implementation].append(loss.item())

    assert losses["fusible"] == pytest.approx(losses["eager"], rel=1e-9)
    assert losses["fusible"][-1] < losses["fusible"][0]


def test_gradient_checkpointing() -> None:
    model = adapted("mixtral")
    theirs = results(model, "eager")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()

    assert_same(results(model, "fusible"), theirs)


def test_autocast() -> None:
    model = adapted("mixtral", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = results(model, "eager"), results(model, "fusible")

    assert_same(ours, theirs, 0.05)


# ------------------------------------------------------------------------------------------------------- explain


def rows_of(model: nn.Module) -> list[Any]:
    return [(layer.explanation.steps[0].name, layer.explanation.saved_bytes_per_row) for layer in explain(model).layers]


def test_explain_says_what_ran_in_every_layer() -> None:
    model = adapted("mixtral")
    results(model, "fusible")
    first, second = rows_of(model)

    assert first == second
    assert first[0] == "RoutedLoRA"
    assert first[1] > 0
    assert [step.backward is not None for layer in explain(model).layers for step in layer.explanation.steps] == [
        True,
        True,
    ]


def test_explain_of_calls_without_adapters_forgets_those_with() -> None:
    model = adapted("mixtral")
    results(model, "fusible")
    with model.disable_adapter():
        model(torch.arange(5).view(1, 5), use_cache=False)

    assert [name for name, _ in rows_of(model)] == ["RoutedMLP", "RoutedMLP"]


@pytest.mark.parametrize(("act", "steps"), [(nn.Softplus(), 1), (nn.Softmax(-1), 6)], ids=str)
def test_explain_of_a_gate_of_the_models_own(act: nn.Module, steps: int) -> None:
    model = adapted("mixtral")
    for experts in experts_of(model):
        experts.act_fn = act
    theirs, ours = results(model, "eager"), results(model, "fusible")

    assert_same(ours, theirs)
    assert len(explain(model).layers[0].explanation.steps) == steps  # a softmax is no function of one element


def test_nothing_is_held_between_calls() -> None:
    model = adapted("mixtral")
    results(model, "fusible")
    explain(model)
    layer = experts_of(model)[0].__dict__[lora.ATTRIBUTE]
    results(model, "fusible")

    assert layer.adapters == {}
    assert all(t.is_meta for linear in layer._linears() for held in linear for t in held.values())


def test_copies_and_pickles_have_their_own() -> None:
    model = adapted("mixtral")
    theirs = results(model, "fusible")
    twin = copy.deepcopy(model)
    draw(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.zero_()

    assert_same(results(twin, "fusible"), theirs)


def test_strict_mode_says_what_a_cpu_lacks() -> None:
    from fusible import RefusedError

    model = adapted("mixtral")
    with config(backend="hopper"), pytest.raises(RefusedError, match="hopper"):
        results(model, "fusible")


def test_registering_twice_changes_nothing() -> None:
    wrapper = fusible.integrations.peft.peft_layer.ParamWrapper
    before = wrapper._activate_lora
    fusible.integrations.peft.register()

    assert wrapper._activate_lora is before


def test_a_peft_that_activates_otherwise_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fusible.integrations.peft.peft_layer.ParamWrapper, "_activate_lora")
    with pytest.warns(UserWarning, match="merges the adapters of experts in every forward"):
        fusible.integrations.peft.register()


@pytest.mark.parametrize("imports", ["import fusible, peft", "import peft, fusible"])
def test_either_may_be_imported_first(imports: str) -> None:
    program = f"{imports}\nassert hasattr(peft.tuners.lora.layer.ParamWrapper._activate_lora, '_fusible')"
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], check=True)


def in_bytes(name: str) -> Any:
    """A model as transformers loads it from an FP8 checkpoint."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    return replace_with_fp8_linear(make(name), quantization_config=FineGrainedFP8Config(), pre_quantized=True)


@pytest.mark.parametrize(
    ("target", "implementation", "cure"),
    [
        # 96 rows with scales for two blocks, one a projection: not the blocks of Float8Block
        ("gate_up_proj", "fusible", "dequantize=True.*or leave"),
        ("gate_up_proj", "eager", "dequantize=True.*or leave"),
        ("gate_up_proj", "grouped_mm", "dequantize=True.*or leave"),
        ("down_proj", "eager", 'Load the model with experts_implementation="fusible"'),
        ("down_proj", "grouped_mm", 'Load the model with experts_implementation="fusible"'),
    ],
)
def test_adapters_on_bytes_are_refused_where_they_are_made(target: str, implementation: str, cure: str) -> None:
    model = in_bytes("mixtral")
    run_through(model, implementation)
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=[f"experts.{target}"])

    with pytest.raises(ValueError, match=rf"^FP8Experts\.{target}: PEFT cannot adapt .*{cure}"):
        peft.get_peft_model(model, config)


def test_adapters_on_what_decodes_bytes_are_refused() -> None:
    model = in_bytes("mixtral")
    run_through(model, "fusible")
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.down_proj_scale_inv"])

    with pytest.raises(
        ValueError, match="down_proj_scale_inv: PEFT cannot adapt what decodes down_proj: nothing would"
    ):
        peft.get_peft_model(model, config)


def test_adapters_on_bytes_that_are_read_here_are_made() -> None:
    model = in_bytes("mixtral")
    run_through(model, "fusible")
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.down_proj"])
    model = peft.get_peft_model(model, config)

    assert any("lora_" in name for name, _ in model.named_parameters())


def test_adapters_beside_bytes_are_not_refused() -> None:
    model = peft.get_peft_model(in_bytes("mixtral"), peft.LoraConfig(r=4, target_modules=["lm_head"]))

    assert any("lora_" in name for name, _ in model.named_parameters())


def test_adapters_on_bytes_that_were_made_before_are_refused_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = fusible.integrations.peft.peft_layer.ParamWrapper
    monkeypatch.setattr(wrapper, "__init__", wrapper.__init__.__wrapped__)
    experts = experts_of(in_bytes("mixtral"))[0]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["gate_up_proj"])
    model = peft.get_peft_model(nn.Sequential(OrderedDict(experts=experts)), config)

    with pytest.raises(ValueError, match=r"FP8Experts\.gate_up_proj: PEFT cannot adapt"):
        model(torch.randn(3, 32))


def test_compiled_code_has_the_sums_of_peft() -> None:
    model = adapted("mixtral")
    run_through(model, "fusible")
    ids = torch.arange(13).view(1, 13)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    try:
        logits = compiled(ids, use_cache=False).logits
    except torch._dynamo.exc.Unsupported:
        run_through(model, "grouped_mm")
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(ids, use_cache=False)
        pytest.skip("torch cannot compile what this PEFT does, by whatever implementation")

    torch.testing.assert_close(logits, model(ids, use_cache=False).logits)
