"""Quantised checkpoints through transformers and PEFT in the usual lines: bytes stay, adapters beside them train."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("transformers") is None or find_spec("peft") is None:
    pytest.skip("transformers or peft is not installed", allow_module_level=True)

import peft
import quantised_checkpoints as checkpoints
import transformers
from safetensors.torch import load_file

from fusible.integrations.stored_experts import Stored, stored_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
IDS = torch.randint(checkpoints.TOKENS, (2, 9), generator=torch.Generator().manual_seed(0))
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
COMPRESSED = ["int4", "int4-zero", "nvfp4", "mxfp4", "fp8-channel", "fp8-tensor"]
KINDS = ["gpt-oss", *COMPRESSED, "modelopt", "fp8-qwen3", "fp8-deepseek"]
BYTES = [kind for kind in KINDS if not kind.startswith("fp8-q") and kind != "fp8-deepseek"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind in COMPRESSED:
            pytest.importorskip("compressed_tensors")
        if kind not in made:
            made[kind] = _make(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


def _make(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    match kind:
        case "gpt-oss":
            return checkpoints.mxfp4_of_gpt_oss(folder)
        case "modelopt":
            return checkpoints.modelopt(folder)
        case "plain":
            return checkpoints.plain(folder)
        case "fp8-qwen3":
            return checkpoints.float8(folder, checkpoints.qwen3().bfloat16())
        case "fp8-deepseek":
            return checkpoints.float8(folder, checkpoints.deepseek_v3().bfloat16())
        case _:
            return checkpoints.compressed(folder, kind)


@pytest.fixture(autouse=True)
def _fp8_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for a GPU before it keeps FP8 experts; the layers that would need it are not converted."""
    quantizer = transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING["fp8"]
    monkeypatch.setattr(quantizer, "validate_environment", lambda self, *args, **kwargs: None)


def load(folder: Path, implementation: str = "fusible", **options: Any) -> Any:
    options = {"dtype": torch.bfloat16, "attn_implementation": "eager"} | options
    return transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation=implementation, **options)


def experts_of(model: Any) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "has_gate")]


def stored(experts: Any, name: str) -> Stored:
    found = stored_of(experts, name)
    assert found is not None
    return found


def values(experts: Any, name: str) -> Tensor:
    of = stored(experts, name)
    return of.recipe.weight_values(of.weight(experts))


def far(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def decoded(folder: Path, kind: str) -> Any:
    """The same model with float32 experts, through another implementation of transformers."""
    model, makers = load(folder), {"gpt-oss": checkpoints.gpt_oss, "fp8-deepseek": checkpoints.deepseek_v3}
    plain = makers.get(kind, checkpoints.qwen3)()
    modules, state = dict(model.named_modules()), dict(model.state_dict())
    with torch.no_grad():
        for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
            path, _, last = name.rpartition(".")
            if path.endswith("experts") and last in ("gate_up_proj", "down_proj"):
                whole = values(modules[path], last)
                tensor.copy_(whole.mT if plain.get_submodule(path).is_transposed else whole)
            elif name in state:
                tensor.copy_(state[name])
    plain.set_attn_implementation("eager")
    plain.set_experts_implementation("eager")
    return plain


@pytest.mark.parametrize("kind", KINDS)
def test_experts_stay_in_bytes_and_mean_what_they_meant(kind: str, folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of(kind), dtype=torch.float32)
    for experts in experts_of(model):
        assert experts.down_proj.element_size() == 1
    if kind.startswith("fp8-q") or kind == "fp8-deepseek":
        return  # float32 rows stay with transformers
    expected = decoded(folder_of(kind), kind)(IDS).logits
    assert far(model(IDS).logits, expected) < 1e-5


@pytest.mark.parametrize("kind", BYTES)
def test_the_model_saves_the_bytes_that_it_loaded(kind: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    load(folder_of(kind)).save_pretrained(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (folder_of(kind), tmp_path))
    names = [name for name in before if ".experts." in name and "bias" not in name]
    assert names
    for name in names:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(_bytes(after[name]), _bytes(before[name])), name
    again = load(tmp_path)
    assert torch.equal(again(IDS).logits, load(folder_of(kind))(IDS).logits)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def adapted(model: Any, targets: list[str] = TARGETS, **options: Any) -> Any:
    options = {"r": 3, "lora_alpha": 6, "init_lora_weights": False} | options
    torch.manual_seed(2)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=[], target_parameters=targets, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.3)
    return model


def trained(model: Any) -> dict[str, Any]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


CASES = [
    *[(kind, {}) for kind in KINDS],
    ("gpt-oss", {"use_rslora": True}),
    ("gpt-oss", {"targets": TARGETS[:1]}),
    ("gpt-oss", {"targets": TARGETS[1:]}),
    ("modelopt", {"alpha_pattern": {"down_proj": 17}, "rank_pattern": {"gate_up_proj": 5}}),
]


@pytest.mark.parametrize(("kind", "how"), CASES, ids=str)
def test_adapters_are_those_of_the_16_bit_model(
    kind: str, how: dict[str, Any], folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    is_float8 = kind in ("fp8-qwen3", "fp8-deepseek")
    dtype = torch.bfloat16 if is_float8 else torch.float32
    model = load(folder_of(kind), dtype=dtype)
    theirs, ours = adapted(decoded(folder_of(kind), kind), **how), adapted(model, **how)
    of_theirs, of_ours = trained(theirs), trained(ours)
    assert {n: p.shape for n, p in of_ours.items()} == {n: p.shape for n, p in of_theirs.items()}
    for name, parameter in of_theirs.items():
        parameter.data.copy_(of_ours[name])
    results = [each(IDS, labels=IDS) for each in (ours, theirs)]
    for result in results:
        result.loss.backward()

    bound = 0.2 if is_float8 else 1e-4  # rows are rounded to e4m3
    assert far(results[0].logits, results[1].logits) < bound
    for name, parameter in of_ours.items():
        assert parameter.grad is not None, name
        assert far(parameter.grad, of_theirs[name].grad) < 2 * bound, name
    ours.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(decoded(folder_of(kind), kind), tmp_path)
    assert far(again(IDS).logits, results[1].logits) < 1e-5
