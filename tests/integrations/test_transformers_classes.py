"""Every experts class that the installed transformers has, found there: what eager gives, in one ``RoutedMLP``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

import transformers
from hugging_face import assert_same, inputs, relative

import fusible.integrations.transformers  # noqa: F401  # registers "fusible"
from fusible.integrations.hugging_face import experts as adapter

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 16),  # 2F = K: shapes do not tell the orientation
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **{"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh", "mlp_hidden_act": "relu2"},
    **{"swiglu_limit": 1.5, "swiglu_alpha": 1.702, "mlp_gate_softcap": 1.5, "mlp_up_softcap": 1.2},
    **{"moe_latent_size": None, "post_norm_eps": 1e-6},
}
"""What a class may ask its configuration for."""

IN_STEPS = {
    "MuseSparkExperts": [
        "Dispatch",
        "GroupedMLP",
        "ModelStep",
        "Scale",
        "Combine",
    ],  # a norm before weights
}
IN_FLOAT32 = ("BeamExperts", "Inkling2Experts", "MuseSparkExperts", "OpenAIPrivacyFilterExperts")
"""Their eager computes, in part, in float32 whatever it is given."""


def classes() -> Iterator[tuple[str, str]]:
    """The module and name of every class that transformers lets others run."""
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        for name in re.findall(r"^@use_experts_implementation.*\nclass (\w+)", file.read_text("utf8"), re.MULTILINE):
            yield f"transformers.models.{file.parent.name}.{file.stem}", name


def draw(module: str, name: str) -> Any:
    """The experts with random weights."""
    experts = getattr(import_module(module), name)(transformers.PretrainedConfig(**SIZES)).double()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return experts


CLASSES = {name: module for module, name in classes()}
KNOWN = """
AXK1Experts AXK2Experts AfmoeExperts AriaExperts BailingHybridExperts BeamExperts Cohere2MoeExperts
DeepseekOcr2TextExperts DeepseekV2Experts DeepseekV32Experts DeepseekV3Experts DeepseekV4Experts
DiffusionGemmaTextExperts Dots1Experts Dots3NoteExperts Ernie4_5_MoeExperts Ernie4_5_VLMoeMoeExperts
ExaoneMoeExperts FlexOlmoExperts FlintExperts Gemma4TextExperts Glm4MoeExperts Glm4MoeLiteExperts
Glm4vMoeTextExperts Glm5NextTextExperts GlmMoeDsaExperts GptOssExperts GraniteMoeExperts
GraniteMoeHybridExperts GraniteMoeSWAExperts GraniteMoeSharedExperts HYV3Experts HYV4Experts
HunYuanMoEV1Experts Inkling2Experts InklingExperts JambaExperts KimiLinearExperts Kolibri1Experts
LagunaExperts Lfm2MoeExperts MellumExperts MiMoV2FlashExperts MiniMaxExperts MiniMaxM2Experts
MiniMaxM3VLExperts Mistral4Experts MistralLarge4TextExperts MixtralExperts MuseSparkExperts NemotronHExperts
OlmoeExperts OpenAIPrivacyFilterExperts PhimoeExperts Qwen2MoeExperts Qwen3MoeExperts Qwen3NextExperts
Qwen3OmniMoeTalkerTextExperts Qwen3OmniMoeThinkerTextExperts Qwen3VLMoeTextExperts Qwen3_5MoeExperts
Qwen4ExpTextExperts SolarOpenExperts UnlimitedOcrTextExperts ZayaExperts
""".split()  # noqa: SIM905  # one a line would be a page
"""The classes of transformers 5.23."""
newer = pytest.mark.xfail(VERSION > (5, 23), reason="newer than what is known of classes here", strict=False)


@pytest.mark.skipif(VERSION != (5, 23), reason="another version of transformers has other classes")
def test_known_classes_are_those_of_transformers() -> None:
    """A newer version may have others, which may fail below; those that are known may not."""
    assert set(CLASSES) == set(KNOWN)


@pytest.mark.parametrize("name", [n if n in KNOWN else pytest.param(n, marks=newer) for n in CLASSES])
def test_gives_what_eager_gives(name: str) -> None:
    experts = draw(CLASSES[name], name)
    for tokens in (1, 9):
        arguments, tolerance = inputs(experts, tokens), 1e-6 if name in IN_FLOAT32 else 1e-12
        eager = assert_same(experts, arguments, tolerance)
        with torch.no_grad():
            assert relative(experts(*arguments), eager["y"]) <= tolerance
    built = adapter.existing(experts)

    assert built is not None
    assert [step.name for step in built.container.explain().steps] == IN_STEPS.get(name, ["RoutedMLP"])
