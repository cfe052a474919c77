"""Whole trainings and generations of `fusible bench`, at sizes of a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from absent import triton_if_missing
from torch import Tensor, nn
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

from fusible.benchmarks import arguments, hf, processes
from fusible.benchmarks.runs import (
    decoding,
    finetune,
    generate,
    losses,
    main_weights,
    plot,
    regions,
    slices,
    titan,
    train,
    trainer,
    ways,
)

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

TINY = ["--shrink", "128", "--layers", "1", "--device", "cpu"]
TRAINING = [*TINY, "--tokens", "16", "--sequence", "8", "--steps", "3", "--rounds", "1"]
SERVING = [*TINY, "--prompt", "4", "--new", "3", "--batch", "1", "2", "--rounds", "1"]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """The process is the only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run_here(measure: Any, job: Any, *_: object) -> dict[str, Any]:
    """Measures in this process; a contestant that is compiled fails."""
    if ways.WAYS[job.way].compiled:
        return {"failure": "no compiler"}
    return json.loads(json.dumps(measure(job)))  # type: ignore[no-any-return]


def job(way: str = "fusible", **others: Any) -> trainer.Job:
    sizes = {"layers": 1, "shrink": 128, "sequence": 8, "tokens": 16, "steps": 2, "rounds": 1, "device": "cpu"}
    return trainer.Job(**{"preset": "qwen3", "way": way, **sizes, **others})  # type: ignore[arg-type]


# ---- trainings


@pytest.mark.usefixtures("alone")
def test_training_prints_and_writes_who_ran_and_who_did_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train, "run", run_here)
    names = ["grouped_mm+compile", "grouped_mm", "fusible", "torchtitan"]
    train.main([*TRAINING, "--contestants", *names, "--profile", "--out", str(tmp_path / "train")])
    printed = capsys.readouterr().out

    assert printed.strip().endswith((tmp_path / "train.md").read_text().strip())
    assert printed.startswith("grouped_mm+compile: no compiler\ngrouped_mm: tokens/s a GPU ")  # at once
    assert "- grouped_mm+compile: no compiler" in printed
    assert "- torchtitan: its attention has no backward on a CPU" in printed
    assert printed.count("next after the experts:") == 4
    assert printed.count("ms of kernels in the profile") == 4
    (run,) = json.loads((tmp_path / "train.json").read_text())["results"]
    assert [one["name"] for one in run["contestants"] if "failure" not in one] == [
        "grouped_mm",
        "fusible",
        "grouped_mm, checkpointing",
        "fusible, checkpointing",
    ]


def test_exchanges_are_those_that_are_asked_for() -> None:
    args = train._arguments([*TRAINING, "--exchanges", "fusible", "none"])

    assert train.asked_exchanges(args, "fusible", 2) == ["fusible", None]
    assert train.asked_exchanges(args, "fusible", 1) == [None]
    assert None in train.asked_exchanges(train._arguments(TRAINING), "grouped_mm", 2)


def test_exchanges_are_known_before_a_model_is_loaded() -> None:
    program = "from fusible.benchmarks.runs.ways import WAYS, exchanges; print(*exchanges(WAYS['fusible']))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert said.split() == ["all_to_all", "fusible", "fusible_symmetric"]


@pytest.mark.parametrize(
    ("of", "asked", "why"),
    [
        (train, ["--exchanges", "another"], "no contestant has another, only all_to_all"),
        (train, ["--exchanges", "fusible", "--ranks", "2", "1"], "one rank has all experts, add 'none'"),
        (train, ["--tokens", "24", "--sequence", "16"], "--tokens: expected a multiple of --sequence 16, got 24"),
        (train, ["--device", "cuda", "--ranks", "1", "4"], "cuda needs 4 GPUs, one a rank, and here are 0"),
        (generate, ["--device", "cuda"], "cuda needs a GPU, and here are 0: --device cpu needs none"),
        (generate, ["--new", "1"], "--new must be at least 2"),
        (generate, ["--tune", "--loop", "generate"], "--tune: only --loop graph"),
        (generate, ["--tune", "--contestants", "fusible"], "--tune: none of the contestants is compiled"),
        (finetune, ["--device", "cuda"], "cuda needs a GPU"),
        (finetune, ["--layers", "2", "2"], "--layers: expected two different numbers, got 2 twice"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    of: Any, asked: list[str], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        of._arguments(asked)
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("of", [hf, train, generate, finetune])
def test_a_package_that_is_missing_is_named(
    of: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        of._arguments([])
    assert ": pip install transformers" in capsys.readouterr().err


def test_a_sequence_has_at_most_the_tokens_of_a_step() -> None:
    args = train._arguments(["--tokens", "64"])
    (first, *_) = train.jobs(args, "qwen3", 1)

    assert args.sequence == first.sequence == 64  # as many keys as the printed operations count


@pytest.mark.usefixtures("alone")
def test_losses_without_a_base_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train, "run", run_here)
    train.main([*TRAINING, "--contestants", "grouped_mm", "fusible", "--checkpointing", "on"])

    said = "Losses of grouped_mm, checkpointing and fusible, checkpointing are compared with no others: "
    assert f"{said}grouped_mm did not run with every expert on every rank and without checkpointing" in (
        capsys.readouterr().out
    )


@pytest.mark.usefixtures("alone")
def test_other_losses_end_with_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run_wrong(measure: Any, job: trainer.Job, *_: object) -> dict[str, Any]:
        found = run_here(measure, job)
        return found if job.way == "grouped_mm" else {**found, "losses": [[loss + 1 for loss in found["losses"][0]]]}

    monkeypatch.setattr(train, "run", run_wrong)
    with pytest.raises(SystemExit, match="losses differ"):
        train.main([*TRAINING, "--contestants", "grouped_mm", "fusible", "--checkpointing", "off"])

    assert "1.0000 > (differs)" in capsys.readouterr().out


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("preset", slices.SLICES)
def test_every_slice_trains_to_the_losses_of_grouped_mm(preset: str) -> None:
    theirs, ours = (trainer.measure(job(way, preset=preset, is_profiled=False)) for way in ("grouped_mm", "fusible"))

    assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-3)
    assert ours["losses"][0][1] != ours["losses"][0][0]


@pytest.mark.usefixtures("alone")
def test_the_peak_is_that_of_the_rank_with_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    def another_rank_has_twice_as_much(tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        tensor.mul_(2 if op == dist.ReduceOp.MAX else 1)

    task = job("grouped_mm", is_profiled=False)
    here = trainer.measure(task)["peak"]
    monkeypatch.setattr(dist, "all_reduce", another_rank_has_twice_as_much)

    assert trainer.measure(task)["peak"] == 2 * here


def test_ranks_share_shards_and_experts() -> None:
    found = processes.run(trainer.measure, job(exchange="all_to_all", checkpointing=True, steps=3), 2, "cpu")

    assert found.get("failure") is None
    assert len(found["losses"][0]) == 3
    assert found["parts"]["shards"] > 0


@pytest.mark.parametrize("apart", [False, True])
def test_layers_are_compiled_around_experts_that_are_sharded_apart(apart: bool) -> None:
    config = slices.config_of("qwen3", 1, 128, 8)
    layer = slices.model_of(config, "fusible", torch.bfloat16, torch.device("cpu")).model.layers[0]
    trainer.compile_layer(layer, apart)
    compiled = {name for name, module in layer.named_modules() if module._compiled_call_impl is not None}

    around = {"self_attn", "input_layernorm", "post_attention_layernorm", "mlp.gate"}
    assert compiled == (around if apart else {""})


def test_a_failure_is_a_result(capfd: pytest.CaptureFixture[str]) -> None:
    found = processes.run(trainer.measure, job("fusible", sequence=0), 1, "cpu")

    assert found == {"failure": "ZeroDivisionError: integer division or modulo by zero"}
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("bench", [train, generate])
def test_an_interrupted_run_leaves_what_it_knows(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(measure: Any, job: Any, *_: object) -> dict[str, Any]:
        if job.way == "fusible":
            raise KeyboardInterrupt
        return {"failure": "no memory"}

    monkeypatch.setattr(bench, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.main([*TINY, "--contestants", "grouped_mm", "fusible", "--out", str(tmp_path / "run")])

    assert "grouped_mm: no memory" in capsys.readouterr().out
    assert "- grouped_mm: no memory" in (tmp_path / "run.md").read_text()
    (run,) = json.loads((tmp_path / "run.json").read_text())["results"]
    assert [one["failure"] for one in run["contestants"]] == ["no memory"]


def test_the_reason_is_the_first_line_behind_the_last_traceback() -> None:
    text = """
-- Process 0 terminated with the following error:
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
    ^^^
CompilationError: no such tile

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace
"""
    assert processes.reason_of(text) == "CompilationError: no such tile"
    assert processes.reason_of("process 0 terminated with signal SIGKILL") == "process 0 terminated with signal SIGKILL"


@pytest.mark.parametrize(("gigabytes", "layers"), [(80, 4), (141, 8)])
def test_layers_are_those_of_the_memory_here(gigabytes: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: here)

    assert slices.layers_here("qwen3", "cuda") == layers
    assert slices.layers_here("qwen3", "cpu") == 8


def test_work_of_the_published_model() -> None:
    work = slices.work_of("qwen3", 48, 1, 4096)

    assert work.parameters == 30_532_122_624  # "30.5B in total and 3.3B activated"
    assert work.active + 151936 * 2048 == pytest.approx(3.35e9, rel=0.01)
    assert work.attention == 6 * 48 * 32 * (128 + 128) * 2048
    assert work.read(1) == pytest.approx(work.active)
    assert work.read(10_000) == pytest.approx(work.dense + work.experts)


def test_windows_shorten_the_spans_of_attention() -> None:
    config = slices.config_of("gpt-oss-20b", 2, 128, 64)

    assert sorted(slices.spans(config, 4096)) == [128, 2048]


def test_main_weights_move_where_16_bits_would_stand_still() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleList([nn.Linear(8, 8, dtype=torch.bfloat16)])).requires_grad_()
    exact = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer, reference = main_weights.MainWeights(main_weights.groups_of(model)), main_weights.adamw(exact)
    for step in range(4):
        for main, parameter in zip(exact, model.parameters(), strict=True):
            parameter.grad = torch.randn_like(parameter) * 10.0**-step
            main.grad = parameter.grad.float()
        optimizer.step(), reference.step()

    assert all(p.grad is None for p in model.parameters())
    for main, parameter in zip(exact, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), main.detach().bfloat16(), rtol=0, atol=0)


# ---- losses


def test_losses_agree_within_the_distance_of_seeds() -> None:
    base = [[3.0, 2.0, 1.0], [3.2, 2.2, 1.2], [3.1, 2.1, 1.1]]

    assert losses.agreement([3.15, 2.15, 1.15], base).holds
    assert not losses.agreement([3.4, 2.4, 1.4], base).holds
    assert losses.agreement([3.1, 2.1, 1.1], base).distance == 0


# ---- profiles


class Layer(nn.Module):
    """A layer with the names of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.norm, self.other = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(self.norm(self.other(x)))
        return y


def test_parts_have_their_forward_and_their_backward() -> None:
    layer, x = Layer(), torch.randn(32, 64)
    found = regions.profiled(layer, lambda: layer(x).sum().backward(), torch.device("cpu"), most=100)
    of_part = {(name, part) for name, part, _ in found.kernels}

    assert {part for name, part in of_part if name == "aten::addmm"} == {"experts", "rest"}
    assert {part for name, part in of_part if name == "aten::mm"} == {"experts", "rest"}  # of the backward
    assert ("aten::native_layer_norm_backward", "norm") in of_part
    assert not layer.experts._forward_hooks


@pytest.mark.parametrize("preset", slices.SLICES)
def test_every_product_of_a_slice_belongs_to_a_part(preset: str) -> None:
    model = slices.model_of(slices.config_of(preset, 1, 128, 8), "eager", torch.bfloat16, torch.device("meta"))
    modules = dict(model.named_modules())
    inside = {name for name, module in modules.items() if regions.part_of(name, module)}
    outside = {
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and not any(f"{name}.".startswith(f"{part}.") for part in inside)
    }

    assert outside == set()
    assert {regions.part_of(name, module) for name, module in modules.items()} - {None, "experts"} <= {*regions.ADVICE}


def event(name: str, parent: Any = None, number: int = -1, kernels: Any = (), id: object = None) -> Any:
    found = SimpleNamespace(name=name, cpu_parent=parent, sequence_nr=number, kernels=kernels, id=id or object())
    found.thread = found.fwd_thread = 1
    return found


def test_kernels_belong_to_the_op_that_launched_them() -> None:
    kernel = [SimpleNamespace(name="wgmma", duration=2e6)]
    mark = event("part: experts")
    events = [mark, event("fusible::RoutedMLP", mark, 7, kernel)]
    node = event("autograd::engine::evaluate_function: Backward", None, 7)
    events += [node, event("launch", node, -1, kernel), event("FSDP::all_gather", kernels=kernel), event("add")]
    found = regions.summary(events, cuda=True, most=1)

    assert found.parts == {"experts": 4.0, "shards": 2.0}
    assert found.kernels == [("wgmma", "experts", 4.0)]


def test_a_recomputed_op_has_the_numbers_of_its_thread() -> None:
    kernel = [SimpleNamespace(name="wgmma", duration=1e6)]
    mark, other = event("part: experts"), event("part: router")
    recomputed = event("aten::mm", other, 7, kernel)
    nodes = [event("autograd::engine::evaluate_function: Backward", None, 7, kernel) for _ in range(2)]
    recomputed.thread = nodes[1].fwd_thread = 2
    found = regions.summary([mark, event("RoutedMLP", mark, 7), other, recomputed, *nodes], cuda=True, most=1)

    assert found.parts == {"router": 2.0, "experts": 1.0}


def test_kernels_count_once_where_other_records_have_the_id_of_their_op() -> None:
    kernels = [SimpleNamespace(name="multi_tensor_apply_kernel", duration=1e6)] * 3
    call = event("cudaDeviceSynchronize", event("part: experts"), kernels=kernels, id=7)
    op = event("aten::_fused_adamw_", event("part: optimizer"), kernels=kernels, id=7)
    waits = [event("Command Buffer Full", op, kernels=kernels, id=7)] * 2
    found = regions.summary([event("multi_tensor_apply_kernel", id=7), call, op, *waits], cuda=True, most=1)

    assert found.parts == {"optimizer": 3.0}


def test_the_next_bottleneck_is_outside_the_experts() -> None:
    said = regions.bottleneck({"experts": 5.0, "router": 1.0, "norm": 2.0, "attention": 2.5})

    assert said.startswith("next after the experts: attention, 24% of the step; choose a faster attn_implementation")
    assert {"attention", "router", "norm", "optimizer"} <= {*regions.ADVICE}


# ---- torchtitan


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:In CPU autocast.*:UserWarning")
def test_torchtitan_has_the_same_loss_with_our_experts() -> None:
    pytest.importorskip("torchtitan")
    found = []
    ids = torch.randint(64, (1, 16))
    with triton_if_missing(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for is_ours in (False, True):
            torch.manual_seed(0)
            model = titan.titan_of(titan.SMALL, 1, is_ours, torch.bfloat16, torch.device("cpu"))
            found.append(float(model(ids, ids)))
            kinds = {type(module).__name__ for module in model.modules()}
            assert ("FusibleGroupedExperts" in kinds) == is_ours

    assert found[0] == pytest.approx(found[1], rel=1e-3)


# ---- generation


@pytest.mark.usefixtures("alone")
def test_generation_prints_and_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(generate, "run", run_here)
    names = ["grouped_mm", "grouped_mm+compile", "fusible"]
    generate.main([*SERVING, "--contestants", *names, "--out", str(tmp_path / "generate")])
    printed = capsys.readouterr().out

    assert printed.strip().endswith((tmp_path / "generate.md").read_text().strip())
    assert "fusible: batch 1: prefill " in printed
    assert "- grouped_mm+compile: no compiler" in printed
    (run,) = json.loads((tmp_path / "generate.json").read_text())["results"]
    for one in run["contestants"][:2]:
        assert min(one["decode"].values()) > 0
        assert 0 < one["error"] < 0.02


@pytest.mark.usefixtures("alone")
def test_batches_that_fit_are_measured_beside_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class LittleMemory(decoding.OneGraph):
        def __call__(self) -> list[float]:
            if len(self._ids) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return [0.0, 1.0, 3.0]

    monkeypatch.setitem(decoding.LOOPS, "graph", LittleMemory)
    request = generate.Request("qwen3", "fusible", 1, 128, 4, 2, (8, 1, 2), 1, "cpu")
    measured = json.loads(json.dumps(generate.measure(request)))

    assert measured["decode"] == {"1": 2.0, "2": 2.0}
    work = slices.work_of("qwen3", 1, 128, 4)
    assert generate.cells_of(measured, work, 8) == ("out of memory", "", "", "", "", "")
    assert generate.cells_of(measured, work, 2)[:2] == ("1000.000", "2000.000")
    with pytest.raises(torch.OutOfMemoryError):
        generate.measure(request._replace(batches=(4, 8)))


@torch.no_grad()
@pytest.mark.parametrize("preset", slices.SLICES)
def test_a_step_of_its_own_decodes_the_tokens_of_generate(preset: str) -> None:
    config = slices.config_of(preset, 2, 128, 20)
    model = ways.routed(
        slices.model_of(config, "fusible", torch.bfloat16, torch.device("cpu")).eval(), ways.WAYS["fusible"]
    )
    ids = torch.randint(config.vocab_size, (2, 16))
    loop = decoding.OneGraph(model, ids, decoding.Options(4))
    ticks = [loop(), loop()]  # the second time on a cache that is not new
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)

    assert loop.tokens == expected[:, 16:].tolist()
    assert [len(at) for at in ticks] == [5, 5]
    assert decoding.Generate(model, ids, decoding.Options(4))()[0] > ticks[1][-1]


class MadeTensors(TorchFunctionMode):
    """Counts tensors that are made of numbers, which a CUDA graph cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.tensor
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_step_behind_a_window_makes_no_tensors_of_numbers() -> None:
    config = slices.config_of("gpt-oss-20b", 2, 128, 20)
    config.sliding_window = 8
    model = slices.model_of(config, "fusible", torch.bfloat16, torch.device("cpu")).eval()
    ids = torch.randint(config.vocab_size, (2, 16))
    loop = decoding.OneGraph(model, ids, decoding.Options(4))
    loop()
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)

    assert loop.tokens == expected[:, 16:].tolist()
    loop._start()
    with MadeTensors() as of_model:
        loop._decode()
    with MadeTensors() as of_step:
        loop._step()
    assert of_model.count > 0
    assert of_step.count == 0


@torch.no_grad()
def test_prompts_run_by_the_experts_that_were_asked_for() -> None:
    config = slices.config_of("qwen3", 1, 128, 20)
    model = slices.model_of(config, "grouped_mm", torch.bfloat16, torch.device("cpu")).eval()
    ran = set[tuple[int, str]]()

    def note(_: Any, ids: Any) -> None:
        ran.add((ids[0].shape[1], model.config._experts_implementation))

    model.model.embed_tokens.register_forward_pre_hook(note)
    ids = torch.randint(config.vocab_size, (2, 16))
    decoding.OneGraph(model, ids, decoding.Options(3, experts="batched_mm"))()

    assert ran == {(16, "grouped_mm"), (1, "batched_mm")}


@torch.no_grad()
def test_a_step_without_memory_leaves_the_experts_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(decoding.OneGraph, "_decode", fail)
    config = slices.config_of("qwen3", 1, 128, 20)
    model = slices.model_of(config, "grouped_mm", torch.bfloat16, torch.device("cpu")).eval()
    loop = decoding.OneGraph(model, torch.zeros(2, 16, dtype=torch.int64), decoding.Options(3, experts="batched_mm"))

    with pytest.raises(torch.OutOfMemoryError):
        loop()
    assert model.config._experts_implementation == "grouped_mm"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("memory", "faster"), [(True, "grouped_mm"), (False, "batched_mm")])
def test_grouped_mm_decodes_by_the_faster_implementation(
    monkeypatch: pytest.MonkeyPatch, memory: bool, faster: str
) -> None:
    """transformers' own choice on a GPU, ``batched_mm``, copies the weights of every row."""
    seconds = {"grouped_mm": 1.0, "batched_mm": 2.0}

    class Timed(decoding.OneGraph):
        def __call__(self) -> list[float]:
            experts = str(self._options.experts)
            if experts == "grouped_mm" and not memory:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return [0.0, 1.0, 1.0 + seconds[experts]]

    monkeypatch.setitem(decoding.LOOPS, "graph", Timed)
    request = generate.Request("qwen3", "grouped_mm", 1, 128, 4, 2, (1, 2), 1, "cpu")
    measured = json.loads(json.dumps(generate.measure(request)))

    assert measured["experts"] == {"1": faster, "2": faster}
    assert measured["decode"]["1"] == seconds[faster]
    assert generate.chosen({"grouped_mm": measured}) == f"\ngrouped_mm decodes by {faster} at 1, {faster} at 2\n"


def test_a_window_that_a_prompt_does_not_fill_is_refused() -> None:
    cache = SimpleNamespace(layers=[SimpleNamespace(is_sliding=s, max_cache_len=8) for s in (False, True)])

    decoding._check_windows(cache, 8)
    with pytest.raises(ValueError, match="do not fill a window of 8: use --loop generate"):
        decoding._check_windows(cache, 7)


def test_a_wrong_contestant_is_left_out() -> None:
    results = {"grouped_mm": {"error": 0.01}, "fusible": {"error": 0.03}, "fusible+Float8Block": {"error": 0.3}}

    assert generate.wrong(results) == {"fusible": "wrong (relative error 3.0e-02, allowed 2.0e-02)"}


# ---- the plot


def report(commit: str | None, contestants: list[dict[str, Any]]) -> dict[str, Any]:
    run = {"preset": "qwen3", "ranks": 2, "contestants": contestants}
    return {"commit": commit, "gpu": "NVIDIA H200", "results": [run]}


TRAINED: dict[str, Any] = {
    "name": "fusible",
    "tokens": 1_000_000,
    "seconds": {"forward": 1.5, "backward": 2.5},
    "peak": 7e9,
}
SERVED: dict[str, Any] = {
    "name": "fusible",
    "prompt": 32,
    "prefill": {"1": 9.0, "8": 2.0},
    "decode": {"1": 0.0625, "8": 9.0},
    "peak": {"1": 2e9, "8": 9e9},
}


def test_the_plot_names_its_commit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "train.json", tmp_path / "generate.json", tmp_path / "runs.svg"]
    checkpointed = {**TRAINED, "name": "small", "checkpointing": True}
    trained = report("abc123", [TRAINED, checkpointed, {"name": "lost", "failure": "no memory"}])
    compiled = {**SERVED, "name": "fusible+compile", "decode": {"1": 0.03125}}
    for file, data in zip(files, (trained, report("abc123", [SERVED, compiled])), strict=False):
        file.write_text(json.dumps(data))
    plot.main([str(file) for file in files])
    drawn = files[-1].read_text()

    assert "NVIDIA H200, commit abc123<" in drawn
    assert all(f">{number}<" in drawn for number in ("250", "7", "0.128", "16", "9", "32"))
    assert ">fusible<" in drawn
    assert not {"small", "lost"} & {*drawn.replace("<", ">").split(">")}


def test_contestants_are_compared_at_the_most_prompts_that_all_served() -> None:
    smaller = {key: {"1": SERVED[key]["1"]} if isinstance(SERVED[key], dict) else SERVED[key] for key in SERVED}
    drawn = plot.values([report("abc123", [SERVED, {**smaller, "name": "grouped_mm"}])])

    assert drawn[plot.SERVING_PEAK] == {"qwen3\n1 prompt": {"fusible": 2.0, "grouped_mm": 2.0}}
    drawn = plot.values([report("abc123", [SERVED, {**smaller, "name": "grouped_mm+compile"}])])
    assert drawn[plot.SERVING_PEAK] == {"qwen3\n8 prompts": {"fusible": 9.0}}
    assert drawn[plot.PREFILL] == {"qwen3\n8 prompts": {"fusible": 0.128}}
    assert drawn[plot.DECODE] == {"qwen3\n1 prompt": {"fusible": 16.0, "grouped_mm+compile": 16.0}}


def test_a_plot_without_a_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="names no commit"):
        plot.draw(tmp_path / "runs.svg", report(None, [TRAINED]))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks
@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
@pytest.mark.parametrize("preset", finetune.CHECKPOINTS)
def test_a_step_of_fine_tuning_is_extended_to_all_layers(
    preset: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    kept = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4}
    sizes = slices.SLICES["qwen3"].sizes | kept | {"num_experts": 8, "vocab_size": 64}
    monkeypatch.setitem(slices.SLICES, "qwen3", slices.SLICES["qwen3"]._replace(sizes=sizes))
    quantizer = import_module("transformers.quantizers.auto").AUTO_QUANTIZER_MAPPING["fp8"]
    monkeypatch.setattr(quantizer, "validate_environment", lambda self, *args, **kwargs: None)  # it asks for a GPU
    fp8 = import_module("transformers.integrations.finegrained_fp8")
    monkeypatch.setattr(fp8, "load_finegrained_fp8_kernel", lambda: 1 / 0)  # it downloads
    monkeypatch.setattr(fp8, "fp8_linear", fp8.fp8_linear)
    held = []
    measured = finetune.measure
    monkeypatch.setattr(finetune, "measure", lambda *args: held.append(measured(*args)) or held[-1])
    shrink = "45" if preset == "gpt-oss-20b" else "1"
    tiny = ["--shrink", shrink, "--tokens", "16", "--rounds", "1", "--layers", "1", "2", "--device", "cpu"]
    finetune.main(["--preset", preset, *tiny])
    table = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    every = f"{finetune.CHECKPOINTS[preset].layers}"
    assert [row[2].strip() for row in table[-6:]] == ["1", "2", every] * 2
    assert held[0].held < held[1].held  # in few bits, and in 16

    few, more = finetune.StepCost(2, 3.0, 6.0, 0.5), finetune.StepCost(4, 5.0, 9.0, 0.75)
    assert finetune.extended(few, more, 8) == finetune.StepCost(8, 9.0, 15.0, 1.25)
