"""Quantised checkpoints through transformers and PEFT in the usual lines: bytes stay, adapters beside them train."""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import re
import shutil
from collections.abc import Callable
from importlib import import_module
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
from safetensors.torch import load_file, save_file
from transformers.integrations import finegrained_fp8
from transformers.integrations.bitsandbytes import dequantize_bnb_weight

import fusible
from fusible import Float8Weight
from fusible.integrations.export import export_merged
from fusible.integrations.hugging_face.stored_experts import Stored, stored_of
from fusible.integrations.quantizers import float8_blocks
from fusible.ops.formats.copies import Weight

_IGNORED = ("UserWarning", "DeprecationWarning", "FutureWarning", "RuntimeWarning")
pytestmark = pytest.mark.filterwarnings(*[f"ignore::{kind}" for kind in _IGNORED])
IDS = torch.randint(checkpoints.TOKENS, (2, 9), generator=torch.Generator().manual_seed(0))
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
COMPRESSED = ["int4", "int4-zero", "nvfp4", "mxfp4", "fp8-channel", "fp8-tensor"]
NF4 = ["nf4", "nf4-nested"]
BLOCKS = ["fp8-qwen3", "fp8-deepseek"]
KINDS = ["gpt-oss", *COMPRESSED, *NF4, "modelopt", *BLOCKS]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind in COMPRESSED:
            pytest.importorskip("compressed_tensors")
        if kind in NF4:
            pytest.importorskip("bitsandbytes")
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
        case "nf4" | "nf4-nested":
            return checkpoints.bitsandbytes_experts(folder, kind == "nf4-nested")
        case "fp8-qwen3":
            return checkpoints.float8(folder, checkpoints.qwen3().bfloat16(), torch.bfloat16)
        case "fp8-deepseek":
            return checkpoints.float8(folder, checkpoints.deepseek_v3().bfloat16())
        case _:
            return checkpoints.compressed(folder, kind)


@pytest.fixture(autouse=True)
def _fp8_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for a GPU before it keeps FP8; what its linears promise is computed in their stead."""
    quantizer = transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING["fp8"]
    monkeypatch.setattr(quantizer, "validate_environment", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", _fp8_linear)


def _fp8_linear(rows: Tensor, weight: Tensor, scales: Tensor, *others: Any) -> Tensor:
    parts = Weight(weight.unsqueeze(0), scales.unsqueeze(0))
    return rows @ Float8Weight().weight_values(parts)[0].to(rows.dtype).mT


def load(folder: Path, implementation: str = "fusible", **options: Any) -> Any:
    options = {"dtype": torch.bfloat16, "attn_implementation": "eager"} | options
    if "bitsandbytes" in (folder / "config.json").read_text():
        options = {"device_map": {"": "cpu"}} | options  # it takes a GPU where there is one
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
    makers = {"gpt-oss": checkpoints.gpt_oss, "fp8-deepseek": checkpoints.deepseek_v3}
    makers |= dict.fromkeys(NF4, checkpoints.nf4_of_qwen3)
    model, plain = load(folder, dtype=torch.float32), makers.get(kind, checkpoints.qwen3)()
    modules, state = dict(model.named_modules()), dict(model.state_dict())
    with torch.no_grad():
        for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
            path, _, last = name.rpartition(".")
            if path.endswith("experts") and last in ("gate_up_proj", "down_proj"):
                whole = values(modules[path], last)
                tensor.copy_(whole.mT if plain.get_submodule(path).is_transposed else whole)
            elif f"{name}_scale_inv" in state:
                parts = Weight(state[name].unsqueeze(0), state[f"{name}_scale_inv"].unsqueeze(0))
                tensor.copy_(Float8Weight().weight_values(parts)[0])
            elif f"{name}.absmax" in state:
                tensor.copy_(dequantize_bnb_weight(modules[path].weight))
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
    if kind in BLOCKS:
        return  # float32 rows stay with transformers
    expected = decoded(folder_of(kind), kind)(IDS).logits
    assert far(model(IDS).logits, expected) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_saves_the_bytes_that_it_loaded(kind: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    load(folder_of(kind)).save_pretrained(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (folder_of(kind), tmp_path))
    names = [name for name in before if (".experts." in name and "bias" not in name) or name.endswith("_scale_inv")]
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
    is_float8 = kind in BLOCKS
    dtype = torch.bfloat16 if is_float8 else torch.float32
    model = load(folder_of(kind), dtype=dtype)
    theirs, ours = adapted(decoded(folder_of(kind), kind), **how), adapted(model, **how)
    of_theirs, of_ours = trained(theirs), trained(ours)
    assert {n: p.shape for n, p in of_ours.items()} == {n: p.shape for n, p in of_theirs.items()}
    for name, parameter in of_theirs.items():
        parameter.data.copy_(of_ours[name])
    results = [each.train()(IDS, labels=IDS) for each in (ours, theirs)]  # else bitsandbytes rounds rows on a CPU
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


def test_merging_is_refused_in_words(folder_of: Callable[[str], Path]) -> None:
    model = adapted(load(folder_of("gpt-oss")))
    before = values(experts_of(model)[0], "down_proj")
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="down_proj is stored as MXFP4, whose steps are larger than an adapter"):
            merge()
    assert torch.equal(values(experts_of(model)[0], "down_proj"), before)


def test_dropout_is_refused_by_peft(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="lora_dropout"):
        adapted(load(folder_of("gpt-oss")), lora_dropout=0.1)


def test_disabled_adapters_leave_the_base(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("modelopt"))
    before = model(IDS).logits
    model = adapted(model)
    assert not torch.equal(model(IDS).logits, before)
    with model.disable_adapter():
        assert torch.equal(model(IDS).logits, before)


def test_preparing_for_training_in_few_bits_changes_no_byte(folder_of: Callable[[str], Path]) -> None:
    """PEFT casts every parameter of 16 bits to float32; bytes are none."""
    model = load(folder_of("gpt-oss"))
    before = experts_of(model)[0].gate_up_proj.clone()
    prepared = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert torch.equal(experts_of(prepared)[0].gate_up_proj, before)
    assert prepared.model.layers[0].self_attn.q_proj.weight.dtype == torch.float32


def in_nf4(nested: bool = False, type: str = "nf4") -> Any:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=type, bnb_4bit_use_double_quant=nested
    )


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_quantises_experts_too(nested: bool, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = load(folder_of("plain"), quantization_config=in_nf4(nested), device_map={"": "cpu"})
    before = load(folder_of("plain"), "eager")
    for experts, whole in zip(experts_of(model), experts_of(before), strict=True):
        assert experts.gate_up_proj.dtype == torch.uint8
        assert stored(experts, "gate_up_proj").recipe == fusible.NF4(nested, 2 if nested else 1)
        assert 0.05 < far(values(experts, "gate_up_proj"), whole.gate_up_proj) < 0.12
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    model = adapted(model)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in trained(model).values())


@pytest.mark.parametrize("quantised_here", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_experts_are_saved_as_bitsandbytes_stores_them(nested: bool, quantised_here: bool, tmp_path: Path) -> None:
    """All tensors but routers, which transformers 4 had as linears."""
    functional = pytest.importorskip("bitsandbytes").functional
    folder = checkpoints.bitsandbytes_experts(tmp_path / "theirs", nested, torch.bfloat16)
    if quantised_here:
        model = load(folder / "plain", quantization_config=in_nf4(nested), device_map={"": "cpu"})
    else:
        model = load(folder)
    model.save_pretrained(tmp_path / "ours")
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "ours"))

    def decoded(state: dict[str, Tensor], name: str) -> Tensor:
        parts = {key.removeprefix(f"{name}."): state[key] for key in state if key.startswith(f"{name}.")}
        whole: Tensor = functional.dequantize_4bit(state[name], functional.QuantState.from_dict(parts, "cpu"))
        return whole

    router = "model.layers.1.mlp.gate.weight"
    assert after[router].dtype == torch.bfloat16
    assert quantised_here or torch.equal(after[router], decoded(before, router))
    kept = [name for name in before if ".mlp.gate." not in name]
    assert {*kept} == {name for name in after if ".mlp.gate." not in name}
    for name in kept:
        assert (after[name].shape, after[name].dtype) == (before[name].shape, before[name].dtype), name
        if not (quantised_here and nested):  # they find codes of scales by other comparisons
            assert torch.equal(after[name], before[name]), name
    theirs = decoded(after, "model.layers.1.mlp.experts.3.up_proj.weight")
    ours = values(model.model.layers[1].mlp.experts, "gate_up_proj")[3, theirs.shape[0] :]
    assert torch.equal(ours.bfloat16(), theirs)


def test_layers_that_were_left_in_16_bits_stay_so(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("nf4-nested"), tmp_path, dirs_exist_ok=True)
    before, whole = (load_file(folder / part / "model.safetensors") for part in ("", "plain"))
    layer = "model.layers.1.mlp.experts."
    before = {name: tensor for name, tensor in before.items() if not name.startswith(layer)}
    before |= {name: tensor for name, tensor in whole.items() if name.startswith(layer)}
    save_file(before, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="experts that were left in 16 bits"):
        model = load(folder)
    assert [experts.down_proj.dtype for experts in experts_of(model)] == [torch.uint8, torch.float32]
    assert model(IDS).logits.isfinite().all()
    model.save_pretrained(tmp_path / "ours")
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if ".mlp.gate." not in name)


def test_the_dtype_that_bitsandbytes_has_noted_is_saved(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("nf4"), tmp_path, dirs_exist_ok=True)
    before = load_file(folder / "model.safetensors")
    for name in [name for name in before if ".experts." in name and "quant_state" in name]:
        before[name] = bytes_of(before[name], b"float32", b"float16")
    save_file(before, folder / "model.safetensors", metadata={"format": "pt"})
    load(folder).save_pretrained(tmp_path / "ours")
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if ".experts." in name)


def test_nf4_of_the_first_release_loads(tmp_path: Path) -> None:
    """It wrote the bytes of each expert, and the scales of the stack."""
    pytest.importorskip("bitsandbytes")
    folder = checkpoints.bitsandbytes_experts(tmp_path, False)
    model, state = load(folder), load_file(folder / "model.safetensors")
    old = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    old |= {name: tensor for name, tensor in model.state_dict().items() if name.endswith("_proj_scale")}
    for name in [name for name in state if ".experts." in name and name.endswith("_proj.weight")]:
        old[name] = state[name].view(128 if "down_proj" in name else 192, -1)
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    again = load(folder)
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(values(experts_of(again)[1], name), values(experts_of(model)[1], name))


def test_stacks_that_a_publisher_has_stay_stacks_in_nf4(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    checkpoints.gpt_oss(128).bfloat16().save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", quantization_config=in_nf4(nested=True), device_map={"": "cpu"})
    model.save_pretrained(tmp_path / "nf4")
    again = load(tmp_path / "nf4")
    assert experts_of(again)[0].gate_up_proj.dtype == torch.uint8
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(values(experts_of(again)[1], name), values(experts_of(model)[1], name))


def test_transformers_alone_neither_loads_experts_in_nf4_nor_saves_linears_again(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The reasons for the operations of ours; where this fails, see which are still needed."""
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(folder_of("nf4"), "eager")
    model = load(folder_of("plain"), "eager", quantization_config=in_nf4(), device_map={"": "cpu"})
    model.save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError):
        load(tmp_path, "eager").save_pretrained(tmp_path)


@pytest.mark.parametrize("reentrant", [False, True])
def test_trainer_and_checkpointing_change_adapters_alone(
    reentrant: bool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model = adapted(load(folder_of("gpt-oss"), dtype=torch.float32))
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    before = {n: p.detach().clone() for n, p in trained(model).items()}
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        report_to="none",
        use_cpu=True,
        save_strategy="no",
    )
    data = [{"input_ids": each, "labels": each} for each in IDS.repeat(2, 1)]
    transformers.Trainer(model, arguments, train_dataset=data).train()
    assert all(not torch.equal(before[name], p) for name, p in trained(model).items())
    assert all(torch.equal(frozen[n], p) for n, p in model.named_parameters() if not p.requires_grad)


def test_two_hundred_steps_are_those_beside_16_bits(folder_of: Callable[[str], Path]) -> None:
    losses = []
    for model in (load(folder_of("gpt-oss"), dtype=torch.float32), decoded(folder_of("gpt-oss"), "gpt-oss")):
        model = adapted(model)
        optimizer = torch.optim.AdamW(trained(model).values(), 1e-3)
        of_model = []
        for _ in range(200):
            loss = model(IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            of_model.append(float(loss.detach()))
        losses.append(torch.tensor(of_model))
    assert losses[0][-1] < 0.9 * losses[0][0]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-3)


def test_compiled_code_breaks_its_graph_and_agrees(folder_of: Callable[[str], Path]) -> None:
    model = adapted(load(folder_of("gpt-oss"), dtype=torch.float32))
    expected = model(IDS, labels=IDS).loss
    torch._dynamo.reset()
    loss = torch.compile(model, backend="aot_eager")(IDS, labels=IDS).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert all(p.grad is not None for p in trained(model).values())


def test_explain_names_the_format_in_every_layer(folder_of: Callable[[str], Path]) -> None:
    model = adapted(load(folder_of("gpt-oss")))
    model(IDS)
    text = str(fusible.explain(model))
    assert text.count("torch (decode MXFP4)") >= 4


@pytest.mark.parametrize("kind", ["gpt-oss", "int4", *NF4, "modelopt", "fp8-deepseek"])
def test_merged_weights_are_written_in_16_bits(kind: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    dtype = torch.bfloat16 if kind == "fp8-deepseek" else torch.float32
    model, theirs = adapted(load(folder_of(kind), dtype=dtype)), adapted(decoded(folder_of(kind), kind))
    for name, parameter in trained(theirs).items():
        parameter.data.copy_(trained(model)[name])
    export_merged(model, tmp_path)
    written = load(tmp_path, "eager", dtype=torch.float32)
    assert all(parameter.element_size() == 4 for parameter in written.parameters())
    assert far(written(IDS).logits, theirs.merge_and_unload()(IDS).logits) < (0.02 if kind == "fp8-deepseek" else 1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])  # as linears of compressed-tensors are before a call
def test_weights_that_nothing_decodes_are_refused_before_anything_is_written(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = checkpoints.qwen3()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=rf"export_merged: lm_head.weight is {dtype}, which nothing here decodes"):
        export_merged(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("spoil", ["missing", "shape", "nan"])
def test_a_malformed_file_names_the_tensor(
    spoil: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints.mxfp4_of_gpt_oss(tmp_path)
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    if spoil == "missing":
        del state[name]
    else:
        state[name] = state[name][:, :-1].contiguous() if spoil == "shape" else state[name].fill_(255)
    checkpoints.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # it reports shapes in its log
    with pytest.raises((ValueError, RuntimeError)) as raised, caplog.at_level(logging.WARNING, "transformers"):
        load(folder)
    named = "model.layers.1.mlp.experts.down_proj"
    assert named in str(raised.value) if spoil == "nan" else named in f"{raised.value} {caplog.text}"


@pytest.mark.parametrize("kind", ["int4", "nvfp4", "fp8-channel", "modelopt", *BLOCKS])
def test_scales_that_are_no_numbers_are_refused(kind: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of(kind), tmp_path / "spoilt")
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if re.search(r"layers\.1\..*experts.*down_proj.*weight_scale(_inv)?$", name))
    spoilt = state[name].float()
    spoilt.view(-1)[0] = math.nan
    save_file(state | {name: spoilt.to(state[name].dtype)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"^model\.layers\.1\.mlp\.experts\.down_proj: scales must be finite, and 1 are not"
    ):
        load(folder)


@pytest.mark.parametrize("missing", ["self_attn.q_proj.weight_scale_inv", "mlp.experts.{}.down_proj.weight"])
def test_parts_of_fp8_that_are_missing_are_named(
    missing: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folder_of("fp8-qwen3"), tmp_path / "spoilt")
    names = {f"model.layers.1.{missing}".format(expert) for expert in range(4)}
    state = {n: tensor for n, tensor in load_file(folder / "model.safetensors").items() if n not in names}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    named = f"model.layers.1.{missing}".replace(".{}", "").replace("down_proj.weight", "down_proj")
    with pytest.raises(ValueError, match=rf"^{re.escape(named)}: the checkpoint lacks it, and has FP8 weights"):
        load(folder)


def test_files_are_not_read_for_other_implementations(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(float8_blocks, "safe_open", lambda file, framework: opened.append(file))
    load(folder_of("fp8-qwen3"), "grouped_mm")
    assert not opened


def on_disk(folder: Path) -> dict[str, Any]:
    """The options that leave the last layer of two in a folder."""
    parts = {f"model.{name}": "cpu" for name in ("embed_tokens", "layers.0", "norm", "rotary_emb")}
    return {"device_map": parts | {"lm_head": "cpu", "model.layers.1": "disk"}, "offload_folder": str(folder)}


def test_layers_in_fp8_are_offloaded_to_a_disk(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("fp8-qwen3")
    offloaded = load(folder, **on_disk(tmp_path))
    assert torch.equal(offloaded(IDS).logits, load(folder)(IDS).logits)
    assert offloaded.state_dict()["model.layers.1.self_attn.q_proj.weight_scale_inv"].is_meta


@pytest.mark.parametrize("kind", ["gpt-oss", "int4"])
def test_other_experts_on_a_disk_are_refused(kind: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    refusal = r"^model\.layers\.1\.mlp\.experts\.gate_up_proj\w+: experts in \w+ cannot be offloaded to a disk"
    with pytest.raises(ValueError, match=refusal):
        load(folder_of(kind), **on_disk(tmp_path))


SPOILT: dict[str, tuple[str, Callable[[Tensor], Tensor | None]]] = {
    "missing": (".absmax", lambda tensor: None),
    "table": (".quant_map", lambda tensor: tensor.flip(0)),
    "shape": (".nested_absmax", lambda tensor: tensor[:-1].clone()),
    "dtype": (".absmax", lambda tensor: tensor.float()),
    "no text": (".quant_state.bitsandbytes__nf4", lambda tensor: tensor[:-1].clone()),
    "blocks": (".quant_state.bitsandbytes__nf4", lambda tensor: bytes_of(tensor, b": 64", b": 128")),
    "offset": (".quant_state.bitsandbytes__nf4", lambda tensor: bytes_of(tensor, b"nested_offset", b"nested_mean")),
    "bytes": ("", lambda tensor: tensor[:-1].clone()),
}


def bytes_of(tensor: Tensor, old: bytes, new: bytes) -> Tensor:
    text = bytes(tensor.tolist())
    assert old in text
    return torch.tensor(list(text.replace(old, new)), dtype=torch.uint8)


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_malformed_file_of_bitsandbytes_names_the_tensor(
    spoil: str,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    suffix, change = SPOILT[spoil]
    folder = shutil.copytree(folder_of("nf4-nested"), tmp_path, dirs_exist_ok=True)
    state = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.experts.2.up_proj.weight{suffix}"
    changed = change(state.pop(name))
    save_file(state | ({} if changed is None else {name: changed}), folder / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # it reports errors in its log
    with pytest.raises((ValueError, RuntimeError)) as raised, caplog.at_level(logging.WARNING, "transformers"):
        load(folder)
    said = f"{raised.value} {caplog.text}"
    assert (name.replace(".2.", ".*.") + ": 3 of 4 experts have it" if changed is None else name) in said


def test_what_bitsandbytes_stores_otherwise_is_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    model = checkpoints.gpt_oss().bfloat16()
    for experts in experts_of(model):
        for name in ("gate_up_proj", "down_proj"):
            parametrize.replace_parameter_4bit(experts, name)
    model.save_pretrained(tmp_path / "stack")
    with pytest.raises(ValueError, match=r"experts\.\w+\.quant_state.*quantised as one matrix.* Load the 16-bit check"):
        load(labelled(tmp_path / "stack", tmp_path / "labelled", in_nf4()))
    renamed = shutil.copytree(folder_of("nf4"), tmp_path / "renamed")
    state = load_file(renamed / "model.safetensors")
    state = {re.sub(r"experts\.(\d+)\.(\w+)_proj", r"experts.\2_projs.\1", name): t for name, t in state.items()}
    save_file(state, renamed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"experts\.\w+_projs\.\d\.weight: .* would be random numbers.* Load the 16-bit check"
    ):
        load(renamed)
    for name, options in {"fp4": in_nf4(type="fp4"), "stored in 16 bits": in_nf4()}.items():
        if name != "fp4":
            options.bnb_4bit_quant_storage = torch.bfloat16
        with pytest.raises(ValueError, match=r"gate_up_proj .*no product here reads this kind.* Load the 16-bit check"):
            load(labelled(folder_of("nf4"), tmp_path / name, options))


def test_bytes_are_refused_by_other_implementations(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("gpt-oss"))
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(ValueError, match=r"PEFT cannot adapt torch.uint8.*experts_implementation=\"fusible\""):
        adapted(model)


def test_a_call_of_another_implementation_says_what_reads_bytes(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("gpt-oss"))
    assert "no call yet" in str(fusible.explain(model))
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(ValueError, match=r"stored as MXFP4; experts_implementation='grouped_mm' reads 16 bits\. Keep"):
        model(IDS)


def test_experts_that_transformers_leaves_in_16_bits_are_refused_unless_they_are_meant(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    model = load(folder_of("plain"), "eager", quantization_config=in_nf4(), device_map={"": "cpu"})
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"gate_up_proj is torch.bfloat16, .* quantised by bitsandbytes, which leaves"):
        adapted(model)
    meant = in_nf4()
    meant.llm_int8_skip_modules = ["experts", "lm_head"]
    model = adapted(load(folder_of("plain"), "eager", quantization_config=meant, device_map={"": "cpu"}))
    assert not [p for p in trained(model).values() if p.dim() == 3]
    model.config.quantization_config.llm_int8_skip_modules = None  # as if adapted before this package was imported
    model(IDS)
    with pytest.warns(UserWarning, match="no product here reads this kind of bitsandbytes: the experts become 16 bits"):
        load(folder_of("plain"), quantization_config=in_nf4(type="fp4"), device_map={"": "cpu"})
    eight = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.warns(UserWarning, match="does not keep experts in bitsandbytes: the experts become 16 bits, 0.0003.*"):
        load(folder_of("plain"), quantization_config=eight, device_map={"": "cpu"})
    with pytest.warns(UserWarning, match="experts that were left in 16 bits .*: the experts become 16 bits"):
        again = load(tmp_path)
    assert experts_of(again)[0].down_proj.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [transformers.GPTQConfig(bits=4), transformers.AwqConfig(bits=4)], ids=repr)
def test_formats_that_nothing_reads_are_refused_before_their_packages(
    options: Any, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    quantised = labelled(folder_of("plain"), tmp_path, options)
    name = options.quant_method.value.upper()
    with pytest.raises(ValueError, match=f"no product here reads the bytes of {name}, .* int4 of compressed-tensors"):
        load(quantised)
    if find_spec("gptqmodel") is None:
        with pytest.raises(ImportError, match=r"requires (optimum|gptqmodel)"):  # transformers' own words
            load(quantised, "eager")


def labelled(folder: Path, to: Path, options: Any) -> Path:
    """A copy of a checkpoint whose configuration says that it is quantised."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": options.to_dict()}))
    return to


def test_copies_have_their_own_experts(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("modelopt"))
    before = model(IDS).logits
    again = copy.deepcopy(model)
    assert torch.equal(again(IDS).logits, before)
    for experts in experts_of(again):
        experts.down_proj.data.zero_()
    assert torch.equal(model(IDS).logits, before)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(IDS).logits, before)


@pytest.mark.parametrize("kind", ["gpt-oss", "nf4", "modelopt", "fp8-qwen3"])
def test_models_are_pickled(kind: str, folder_of: Callable[[str], Path]) -> None:
    """A pickle has the model's quantiser, of a class that replaces one of transformers."""
    model, buffer = load(folder_of(kind)), io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert type(again.hf_quantizer) is type(model.hf_quantizer)


def test_every_quantiser_is_found_by_its_name() -> None:
    for kind in transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING.values():
        assert getattr(import_module(kind.__module__), kind.__qualname__) is kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["gpt-oss", *COMPRESSED, *NF4, "modelopt"])
def test_casts_that_may_round_what_decodes_bytes_are_refused(
    kind: str, dtype: torch.dtype, folder_of: Callable[[str], Path]
) -> None:
    """A cast of a module reaches scales of any float dtype; those of int4 have 16 bits, in which they may stay."""
    experts = experts_of(load(folder_of(kind)))[0]
    if kind.startswith("int4") and dtype == torch.bfloat16:
        assert experts.to(dtype).gate_up_proj_scale.dtype == dtype
        return
    experts.to(dtype)
    with pytest.raises(RuntimeError, match=rf"_proj\w*, .*was .* and is {dtype}: a cast of the model also casts"):
        values(experts, "gate_up_proj")
    with pytest.raises(RuntimeError, match="a cast of the model also casts"):
        experts.state_dict()


def test_scales_in_float32_are_saved_as_they_were(folder_of: Callable[[str], Path]) -> None:
    """``prepare_model_for_kbit_training`` casts them so, which is exact."""
    model = load(folder_of("int4"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert experts_of(model)[0].gate_up_proj_scale.dtype == torch.float32
    after = model.state_dict()
    names = [name for name in before if ".experts." in name]
    assert names
    for name in names:
        assert after[name].dtype == before[name].dtype, name
        assert torch.equal(after[name], before[name]), name
    model.load_state_dict(before)


def test_scales_of_another_dtype_are_not_rounded_into_those_that_are_there(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("int4"))
    state = model.state_dict()
    name = next(name for name in state if name.endswith("gate_up_proj_scale"))
    state[name] = state[name].to(torch.float16)
    with pytest.raises(RuntimeError, match=f"{name}: expected torch.bfloat16, got torch.float16"):
        model.load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_are_assigned(kind: str, folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of(kind))
    before = model(IDS).logits
    for experts in experts_of(model):
        experts.load_state_dict({n: t.clone() for n, t in experts.state_dict().items()}, assign=True)
    state = model.state_dict()
    if kind not in NF4:  # bitsandbytes does not load its linears so
        model.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    assert torch.equal(model(IDS).logits, before)
    again = model.state_dict()
    assert all(again[name].dtype == tensor.dtype for name, tensor in state.items())


def test_adapters_beside_fp8_that_was_cast_are_refused(folder_of: Callable[[str], Path]) -> None:
    """Codes without their scales would be multiplied as if they were weights."""
    model = adapted(load(folder_of("fp8-qwen3"))).to(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"FP8Experts\.\w+_proj: was .* is torch.bfloat16: a cast of the model also casts"
    ):
        model(IDS)
    with pytest.raises(ValueError, match="a cast of the model also casts"):
        adapted(load(folder_of("fp8-qwen3")).to(torch.bfloat16))
