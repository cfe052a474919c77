"""Routers of the installed transformers that choose by ``functional.route``: the results of their own code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

import transformers
from hugging_face import make, relative
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import fusible.integrations.transformers  # noqa: F401  # registers "fusible"
from fusible.integrations import routers
from fusible.integrations.hugging_face.router_formula import Formula, recognized

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))

SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 16),
    "hidden_size": 32,
}
DEEPSEEK_V2 = {"topk_method": "group_limited_greedy", "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
OURS = re.findall(
    r"\w+",
    """
AXK1 AXK2 AriaText BailingHybrid Beam Cohere2Moe DeepseekOcr2Text DeepseekV2 DeepseekV3 DeepseekV32 Dots3NoteText
Ernie4_5_Moe Ernie4_5_VLMoeMoe ExaoneMoe FlexOlmo Flint Glm4Moe Glm4MoeLite Glm4vMoeText Glm5NextText GlmMoeDsa GptOss
GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared HYV3 HYV4 HYV4VL Jamba KimiLinear Laguna LaraMini Lfm2Moe
LongcatFlash Mellum MiMoV2Flash MiniMax MiniMaxM2 MiniMaxM3VL Mistral4 MistralLarge4Text Mixtral NemotronH Olmoe
Qwen2Moe Qwen3Moe Qwen3Next Qwen3OmniMoeTalkerText Qwen3OmniMoeText Qwen3OmniMoeThinkerText Qwen3VLMoeText Qwen3_5Moe
Qwen4ExpText SolarOpen Step3p7 UnlimitedOcrText
""",
)
THEIRS = {
    "DeepseekV4TopKRouter": "it rounds scores to torch.bfloat16",
    "DeepseekV4HashRouter": "its forward reads input_ids",
    "Kolibri1TopKRouter": "no rule of fusible.functional.route gives its experts",
    "Llama4Router": "it does not return logits, weights and ids",
    "MuseSparkTopkRouter": "its logits are not the product of its input and a weight",
    "PhimoeTopKRouter": "it computes something else in training",
}


def classes() -> Iterator[tuple[str, str, str]]:
    """The package, the module and the name of every class of a router."""
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        for name in re.findall(r"^class (\w*Router)\(", file.read_text("utf8"), re.MULTILINE):
            yield f"transformers.models.{file.parent.name}", file.stem, name


CLASSES = {name: (package, module) for package, module, name in classes()}
NAMES = {re.sub("Top[Kk]Router", "", name): name for name in CLASSES}


def draw(name: str) -> nn.Module:
    """The router with the sizes of its default configuration where they are not ours."""
    package, module = CLASSES[name]
    configurations = import_module(f"{package}.configuration_{package.rpartition('.')[2]}")
    for kind in [
        value for key, value in vars(configurations).items() if key.endswith("Config") and key != "AutoConfig"
    ]:
        config = kind()
        sizes = DEEPSEEK_V2 if getattr(config, "topk_method", None) else {}
        try:
            for key, value in {**SIZES, **sizes}.items():
                if hasattr(config, key):
                    setattr(config, key, value)
            router = getattr(import_module(f"{package}.{module}"), name)(config)
        except (AttributeError, TypeError, ValueError, AssertionError, RuntimeError):
            continue  # the configuration of another part of the model
        return router.bfloat16()
    raise AssertionError(name)


@pytest.mark.parametrize("name", [*OURS])
def test_formulas_are_found(name: str) -> None:
    if name not in NAMES:
        assert VERSION < (5, 24)
        pytest.skip("not in this transformers")
    router = draw(NAMES[name])
    formula = recognized(router, torch.bfloat16)
    assert isinstance(formula, Formula), formula
    check_agrees(router, formula)


def check_agrees(router: nn.Module, formula: Formula) -> None:
    """Logits to the bit; weights by expert, of numbers that no trial has drawn, where float32 has no ties."""
    generator = torch.Generator().manual_seed(77)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    weight = next(p for p in router.parameters() if p.dim() == 2)
    x = torch.randn(200, weight.shape[1], generator=generator).bfloat16()
    given = (torch.randn(weight.shape[0], generator=generator),) if formula.reads_argument else ()
    ours, own = formula.run(router, x, given), type(router).forward(router, x, *given)
    same = (ours.ids.sort(-1).values == own[2].sort(-1).values).all(-1)

    assert torch.equal(ours.logits, own[0])
    assert same.sum() > 100  # 16-bit logits have ties
    assert ours.weights.dtype == own[1].dtype
    dense = [torch.zeros(200, weight.shape[0]).scatter(1, i, w.float()) for _, w, i in (ours, own)]
    assert relative(dense[0][same], dense[1][same]) < 2 * torch.finfo(own[1].dtype).eps


@pytest.mark.parametrize("name", [*THEIRS])
def test_other_routers_keep_their_code(name: str) -> None:
    if name not in CLASSES:
        pytest.skip("not in this transformers")
    found = recognized(draw(name), torch.bfloat16)

    assert isinstance(found, str)
    assert THEIRS[name] in found


def model_of(name: str) -> Any:
    model = make(name)
    model.set_experts_implementation("fusible")
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in key and tensor.is_floating_point():
                tensor.normal_(std=0.1)
    return model.train()


IDS = torch.randint(1, 64, (2, 11), generator=torch.Generator().manual_seed(3))
MASK = torch.ones(2, 11, dtype=torch.int64)
MASK[1, :4] = 0


def step(model: Any, **given: Any) -> list[Tensor]:
    """The logits and all gradients by those of tokens that count."""
    model.zero_grad()
    logits = model(IDS, **given).logits
    real = given.get("attention_mask", torch.ones_like(IDS)).bool()
    logits[real].square().mean().backward()
    return [logits.detach()[real], *[p.grad for p in model.parameters() if p.grad is not None]]


@contextmanager
def chosen(model: Any) -> Iterator[list[Tensor]]:
    """The ids of all routers that are called."""
    ids: list[Tensor] = []
    hooks = [
        m.register_forward_hook(lambda _, args, out: ids.append(out[2]))
        for m in model.modules()
        if hasattr(m, routers.ATTRIBUTE)
    ]
    yield ids
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "gpt-oss", "deepseek-v3", "nemotron-h"])
@pytest.mark.parametrize("masked", [False, True])
def test_models_give_what_they_gave(name: str, masked: bool) -> None:
    model, given = model_of(name), {"attention_mask": MASK} if masked else {}
    before, state = step(model, **given), {*model.state_dict()}
    reasons = routers.route(model)

    assert reasons
    assert {*reasons.values()} == {""}
    with chosen(model) as ids:
        after = step(model, **given)
    assert len(before) == len(after)
    assert max(map(relative, after, before)) < 1e-5
    assert {*model.state_dict()} == state
    for each in ids:
        assert torch.equal((each == -1).all(-1), ~MASK.bool().reshape(-1) if masked else torch.zeros(22).bool())
    assert len(ids) == len(reasons)


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "gpt-oss"])
def test_router_logits_and_the_loss_of_them_are_the_same(name: str) -> None:
    model, found = model_of(name), []
    for _ in range(2):
        out = model(IDS, attention_mask=MASK, labels=IDS, output_router_logits=True)
        found.append([out.aux_loss.detach(), *out.router_logits])
        routers.route(model)

    assert len(found[0]) == 3
    for row, (ours, own) in enumerate(zip(found[1], found[0], strict=True)):
        real = MASK.bool().reshape(-1) if row else torch.ones((), dtype=torch.bool)
        torch.testing.assert_close(ours[real], own[real])


TRAINED = ["mixtral", "qwen3", "gpt-oss", "deepseek-v3"]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", TRAINED)
def test_compiled_and_recomputed_steps_give_what_they_gave(name: str) -> None:
    model = model_of(name)
    before = step(model)
    routers.route(model)
    compiled = deepcopy(model)
    compiled.compile(backend="aot_eager")
    model.gradient_checkpointing_enable()
    with chosen(model) as ids:
        recomputed = step(model)

    assert len(ids) == 2 * sum(hasattr(m, routers.ATTRIBUTE) for m in model.modules())
    for after in (recomputed, step(compiled)):
        assert len(before) == len(after)
        assert max(map(relative, after, before)) < 1e-5


@pytest.mark.parametrize("name", TRAINED)
def test_float32_models_that_are_cast_to_16_bits_route_alike(name: str) -> None:
    """As FSDP2 casts weights for a call."""
    model = model_of(name)
    routers.route(model)
    router = next(m for m in model.modules() if hasattr(m, routers.ATTRIBUTE)).bfloat16()
    x = torch.randn(200, 32).bfloat16()
    with torch.no_grad(), mock.patch.object(Formula, "run", autospec=True, side_effect=Formula.run) as run:
        ours, own = router(x), type(router).forward(router, x)
    same = (ours[2].sort(-1).values == own[2].sort(-1).values).all(-1)  # 16-bit logits have ties

    assert [call.args[0].dtype for call in run.call_args_list] == [torch.bfloat16]
    assert torch.equal(ours[0], own[0])
    assert same.sum() > 100
    assert ours[1].dtype == own[1].dtype
    assert relative(ours[1][same].sort(-1).values, own[1][same].sort(-1).values) < 2 * torch.finfo(own[1].dtype).eps


def test_a_router_of_another_form_is_named_with_the_reason() -> None:
    reasons = routers.route(model_of("gemma-4"))

    assert {*reasons.values()} == {"its logits are not the product of its input and a weight"}


def masks_reach(model: Any) -> bool:
    with chosen(model) as ids:
        model(IDS, attention_mask=MASK)
    return any(bool((each == -1).any()) for each in ids)


def test_padding_is_kept_out_where_all_of_a_step_agrees() -> None:
    model = model_of("qwen3")
    routers.route(model)

    assert masks_reach(model)
    model.gradient_checkpointing_enable()
    assert not masks_reach(model)  # the second forward, in the backward, may come after another call
    assert masks_reach(model.eval())
    model.set_experts_implementation("eager")
    assert not masks_reach(model)


def test_layers_that_run_after_the_call_have_no_mask_of_it() -> None:
    model = model_of("qwen3").eval()
    routers.route(model)
    layer, x = model.model.layers[0].mlp, torch.randn(2, 11, 32)
    with torch.no_grad():
        expected = layer(x)
        model(IDS, attention_mask=MASK)
        assert torch.equal(layer(x), expected)


def test_recomputations_have_no_mask_of_another_call() -> None:
    """FSDP checkpoints the layers, not the model; two calls come before the backward, as in DPO."""
    other, found = MASK.flip(0), []
    for recomputed in (False, True):
        model = model_of("qwen3")
        routers.route(model)
        if recomputed:
            apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__.endswith("DecoderLayer"))
        losses = [model(IDS, attention_mask=mask, use_cache=False).logits[mask.bool()] for mask in (MASK, other)]
        torch.cat(losses).square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])

    assert len(found[0]) == len(found[1])
    assert max(map(relative, *found)) < 1e-5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_formulas_are_found_where_no_gradients_are_recorded(mode: Any) -> None:
    model = model_of("mixtral").eval()
    with mode():
        assert {*routers.route(model).values()} == {""}
        assert masks_reach(model)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_a_base_model_that_is_called_alone_has_the_mask_of_its_call(name: str) -> None:
    model = model_of(name).eval()
    routers.route(model)
    expected = model.base_model(IDS)[0]
    model(IDS, attention_mask=MASK)

    assert torch.equal(model.base_model(IDS)[0], expected)
    assert masks_reach(model.base_model)


def test_masks_reach_routers_beside_embeddings() -> None:
    model = model_of("mixtral")
    routers.route(model)
    embeddings = model.get_input_embeddings()(IDS).detach()
    with chosen(model) as ids:
        model(input_ids=None, inputs_embeds=embeddings, attention_mask=MASK)

    assert any(bool((each == -1).any()) for each in ids)


@torch.no_grad()
def test_generation_with_padding_on_the_left() -> None:
    model = model_of("mixtral").eval()
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    before = model.generate(IDS, attention_mask=MASK, **how)
    routers.route(model)

    assert torch.equal(model.generate(IDS, attention_mask=MASK, **how), before)


def test_copies_have_their_own_weights() -> None:
    model = model_of("mixtral")
    routers.route(model)
    copied, x = deepcopy(model), torch.randn(5, 32)
    router = next(m for m in copied.modules() if hasattr(m, routers.ATTRIBUTE))
    with torch.no_grad():
        router.weight.neg_()

    assert router.forward.__self__ is router
    assert torch.equal(router(x)[0], torch.nn.functional.linear(x, router.weight))


def test_own_code_runs_under_autocast_and_for_other_dtypes() -> None:
    model = model_of("deepseek-v3")
    routers.route(model)
    router, x = next(m for m in model.modules() if hasattr(m, routers.ATTRIBUTE)), torch.randn(5, 32)
    for tokens, cast in ((x, True), (x.bfloat16(), False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            ours, own = router(tokens), type(router).forward(router, tokens)
        assert all(torch.equal(*pair) for pair in zip(ours, own, strict=True))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_models_route_alike() -> None:
    model = model_of("qwen3").eval()
    routers.route(model)
    with torch.no_grad():
        eager = model(IDS, attention_mask=MASK).logits
        compiled = torch.compile(model, backend="aot_eager")(IDS, attention_mask=MASK).logits

    assert relative(compiled[MASK.bool()], eager[MASK.bool()]) < 1e-5


def test_a_second_choice_is_not_found_by_chance() -> None:
    """A formula that differs in one number, or in its gradient alone, is another."""
    router = draw("Qwen3MoeTopKRouter")

    class Other(type(router)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
            logits, weights, ids = super().forward(hidden_states)
            return logits, self.change(weights), ids

    for change in (lambda w: 1.01 * w, lambda w: w.detach() + 0 * w, lambda w: w.flip(-1)):
        other = deepcopy(router)
        other.__class__, other.change = Other, change
        assert isinstance(recognized(other, torch.bfloat16), str)
    assert isinstance(recognized(router, torch.bfloat16), Formula)
