"""The benchmarks compute what they say, refuse to time what is wrong, and print tables."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from fusible.benchmarks import (
    arguments,
    balancing,
    bits,
    chains,
    compare,
    expert_parallel,
    few_rows,
    float32,
    functions,
    gemm_contestants,
    grouped_gemm,
    grouped_mlp,
    hf,
    host_overhead,
    lora,
    loss_curves,
    plots,
    pointwise,
    quantized_errors,
    roofline,
    routing,
    timing,
)
from fusible.benchmarks.contestant import Contestant
from fusible.benchmarks.contestants import CONTESTANTS, race, refusal
from fusible.benchmarks.problem import (
    DISTRIBUTIONS,
    PRESETS,
    InaccurateError,
    Preset,
    Problem,
    Sizes,
    add_size_arguments,
    sizes_of,
    split_sizes,
)
from fusible.benchmarks.recipes import RECIPES
from fusible.ops.kernels.problems.gemm import GroupedGemm

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
PRODUCTS = ["fc1", "fc2", "dgrad1", "dgrad2", "wgrad1", "wgrad2"]
SMALL = ["--experts", "3", "--features", "16", "--hidden", "24", "--tokens", "20", "--rounds", "1", "--dtype", "fp32"]


def problem(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Problem:
    return Problem.make(3, 16, 24, torch.tensor([5, 0, 9]), device, dtype)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("experts", "rows"), [(1, 7), (8, 0), (8, 100), (5, 3)])
def test_split_sizes_use_every_row(distribution: str, experts: int, rows: int) -> None:
    sizes = split_sizes(distribution, experts, rows)

    assert sizes.shape == (experts,)
    assert sizes.sum() == rows
    assert sizes.min() >= 0


def test_split_sizes_spread_as_they_say() -> None:
    balanced, random, zipf = (split_sizes(name, 8, 80000) for name in ("balanced", "random", "zipf"))

    assert set(balanced.tolist()) == {10000}
    assert 0.1 < (random / 10000).log().std() < 0.6
    falling = zipf.sort(descending=True).values
    assert falling[0] / falling[7] == pytest.approx(8**0.6, rel=1e-3)
    assert zipf.tolist() != falling.tolist()


def test_rows_of_a_preset_are_those_of_one_rank() -> None:
    parser = ArgumentParser()
    add_size_arguments(parser, tokens=1024)

    assert sizes_of(parser.parse_args([])) == Sizes(8, 256, 512, 2048)
    assert sizes_of(parser.parse_args(["--preset", "deepseek-v3-ep8"])) == Sizes(32, 7168, 2048, 1024)
    assert sizes_of(parser.parse_args(["--hidden", "8"]), "gpt-oss", 10) == Sizes(32, 2880, 8, 40)


def test_one_expert_takes_all() -> None:
    assert split_sizes("one", 4, 10).tolist() == [10, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fused", "unfused", "loop"])
def test_contestants_are_right(name: str, dtype: torch.dtype) -> None:
    errors = problem(dtype).errors(CONTESTANTS[name](problem(dtype)).result())

    assert max(errors.values()) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["fused", "unfused", "loop"])
def test_contestants_compute_the_activation_of_the_model(name: str) -> None:
    asked = Problem.make(2, 16, 24, torch.tensor([3, 9]), "cpu", torch.float32, PRESETS["kimi-k3"].glu)
    errors = asked.errors(CONTESTANTS[name](asked).result())

    assert max(errors.values()) < 4 * torch.finfo(torch.float32).eps
    assert max(asked.errors(CONTESTANTS[name](replace(asked, glu="swiglu")).result()).values()) > 0.01


def test_errors_see_a_wrong_gradient_of_one_expert() -> None:
    p = problem()
    result = CONTESTANTS["loop"](p).result()
    result.w1[0, 0, 0] += 1

    errors = p.errors(result)

    assert errors["w1"] > 1e-3
    assert max(error for name, error in errors.items() if name != "w1") < 1e-6


@pytest.mark.parametrize("factor", [1.01, math.nan, math.inf])
def test_wrong_contestant_is_not_timed(factor: float) -> None:
    p = problem()
    right = CONTESTANTS["loop"](p)
    wrong = Contestant(lambda: right.forward() * factor, right.leaves, right.dy)

    with pytest.raises(InaccurateError, match="wrong: relative errors"):
        grouped_mlp.measure(p, {"loop": right, "wrong": wrong}, 1)


def test_grouped_mm_is_left_out_on_the_cpu() -> None:
    assert refusal("grouped_mm", problem(torch.bfloat16)) == "needs bfloat16 on a CUDA device"
    assert list(race(problem(), ["loop", "grouped_mm"])) == ["loop"]


def test_grouped_mm_is_left_out_where_it_takes_fewer_experts() -> None:
    many = Problem.make(1024, 8, 8, torch.ones(1024, dtype=torch.int64), "cpu", torch.bfloat16)
    for name in ("grouped_mm", "grouped_mm+compile"):
        assert refusal(name, many) == "takes at most 1023 groups, got 1024"


def test_bench_prints_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "bench"
    grouped_mlp.main([*SMALL, "--device", "cpu", "--distribution", "zipf", "one", "--out", str(out)])
    printed = capsys.readouterr().out

    assert printed.strip() == (tmp_path / "bench.md").read_text().strip()
    assert "E=3, K=16, F=24, T=40, float32, CPU" in printed
    for start in ("| fused ", "| unfused ", "| loop ", "| dense "):
        assert sum(line.startswith(start) for line in printed.splitlines()) == 2
    results = json.loads((tmp_path / "bench.json").read_text())["results"]
    assert [r["distribution"] for r in results] == ["zipf", "one"]
    assert results[0]["contestants"]["fused"]["step"] > 0


def product(name: str, dtype: torch.dtype = torch.float32) -> GroupedGemm:
    return dict(gemm_contestants.products(problem(dtype)))[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_right(name: str, dtype: torch.dtype) -> None:
    p = product(name, dtype)
    functions = {who: gemm_contestants.CONTESTANTS[who](p) for who in ("ours", "dense", "loop")}

    errors = grouped_gemm.check(p, functions)

    assert errors.keys() == {"ours", "loop"}
    assert max(errors.values()) < 4 * torch.finfo(dtype).eps
    assert functions["dense"]().shape == functions["ours"]().shape[-2:]
    assert p.flops == 2 * math.prod(p.mnk)


def off_by_two_percent(result: Tensor) -> None:
    result.mul_(1.02)


def last_row_not_written(result: Tensor) -> None:
    result[-1] = torch.nan


def one_wrong_row(result: Tensor) -> None:
    result.view(-1, result.shape[-1])[-1].neg_()


@pytest.mark.parametrize("harm", [off_by_two_percent, last_row_not_written, one_wrong_row])
@pytest.mark.parametrize("name", PRODUCTS)
def test_wrong_product_is_not_timed(name: str, harm: Callable[[Tensor], None]) -> None:
    p = product(name, torch.bfloat16)
    right, calls = gemm_contestants.ours(p), []

    def wrong() -> Tensor:
        calls.append(name)
        result = right().clone()
        harm(result)
        return result

    with pytest.raises(InaccurateError, match="wrong: "):
        grouped_gemm.measure(p, {"right": right, "wrong": wrong}, 1)
    assert calls == [name]


def test_weight_gradient_of_an_empty_group_must_be_zero() -> None:
    p = product("wgrad1")
    right = gemm_contestants.ours(p)

    def wrong() -> Tensor:
        result = right()
        result[1, 0, 0] = 1e-3
        return result

    with pytest.raises(InaccurateError, match="wrong: TN, M, N, K"):
        grouped_gemm.check(p, {"wrong": wrong})


def test_product_that_adds_must_count_what_stood_there() -> None:
    p = dict(gemm_contestants.products(problem(torch.bfloat16), main_grad=True))["wgrad1+="]
    right, assigned = gemm_contestants.ours(p), gemm_contestants.ours(replace(p, beta=None))

    assert p.out.dtype == torch.float32
    assert grouped_gemm.check(p, {"right": right})["right"] < 1e-5
    assert gemm_contestants.refusal("loop", p) == "does not add to float32"
    with pytest.raises(InaccurateError, match="assigned: TN"):
        grouped_gemm.check(p, {"assigned": assigned})


def test_bound_leaves_out_weights_of_empty_groups() -> None:
    p = product("fc1", torch.bfloat16)
    moved = 2 * (14 * 16 + 2 * 48 * 16 + 14 * 48)

    assert grouped_gemm.bytes_moved(p) == moved
    assert grouped_gemm.bound(p, "NVIDIA H200") == pytest.approx(moved / 4.3e12)
    assert grouped_gemm.bound(p, "NVIDIA A100") is None
    assert grouped_gemm.bound(product("fc1"), "NVIDIA H200") is None


def test_bench_of_grouped_gemm_prints_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "gemm"
    sizes = ["--preset", "small", "deepseek-v3-ep8", *SMALL[:-2], "--dtype", "fp32"]
    grouped_gemm.main([*sizes, "--device", "cpu", "--distribution", "one", "--main-grad", "--out", str(out)])
    printed = capsys.readouterr()

    assert printed.out.strip() == (tmp_path / "gemm.md").read_text().strip()
    assert "small, 20 tokens, one: wgrad2 …" in printed.err
    assert "Left out: grouped_mm needs a CUDA device, got cpu; loop does not add to float32;" in printed.out
    for name in [*PRODUCTS, "wgrad1+="]:
        assert sum(line.startswith(f"| {name} ") for line in printed.out.splitlines()) == 2
    found = json.loads((tmp_path / "gemm.json").read_text())
    assert found["torch"] == torch.__version__
    assert [(r["preset"], r["split_sizes"]) for r in found["results"]] == [
        ("small", [40, 0, 0]),
        ("deepseek-v3-ep8", [20, 0, 0]),
    ]
    fc1 = found["results"][0]["products"][0]
    assert (fc1["product"], fc1["backend"], fc1["shape"]) == ("fc1", "loop", [40, 48, 16])
    assert fc1["tflops"].keys() == {"ours", "dense", "loop"}
    assert min(fc1["ours_to"].values()) > 0


def test_bench_of_grouped_gemm_runs_without_ours(capsys: pytest.CaptureFixture[str]) -> None:
    grouped_gemm.main([*SMALL, "--device", "cpu", "--contestants", "loop", "dense", "--sustain", "0.001", "--tiles"])

    assert "| TFLOP/s " in capsys.readouterr().out


@needs_matplotlib
def test_roofline_prints_writes_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, plot = tmp_path / "roof", tmp_path / "roof.svg"
    roofline.main([*SMALL, "--device", "cpu", "--out", str(out), "--plot", str(plot)])
    printed = capsys.readouterr().out

    assert re.match(r"Ceilings: [\d.]+ TFLOP/s, [\d.]+ TB/s", printed)
    assert (tmp_path / "roof.md").read_text().strip() in printed
    fc1 = json.loads((tmp_path / "roof.json").read_text())["results"][0]["products"][0]
    moved = 4 * (40 * 16 + 3 * 48 * 16 + 40 * 48)
    assert (fc1["product"], fc1["intensity"]) == ("fc1", pytest.approx(2 * 40 * 48 * 16 / moved))
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


@needs_matplotlib
def test_loss_curves_agree_on_the_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "curves.svg"
    loss_curves.main(["--device", "cpu", "--steps", "3", "--out", str(tmp_path / "curves"), "--plot", str(plot)])
    found = json.loads((tmp_path / "curves.json").read_text())["results"][0]["losses"]

    assert list(found) == ["unfused, loop, nudged", "fused", "unfused", "unfused, loop"]
    assert max(loss_curves.apart(found).values()) < 1e-4
    assert found["fused"][0] == pytest.approx(math.log(256), abs=0.2)
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    assert "| unfused, loop " in capsys.readouterr().out


def test_loss_curves_of_one_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    loss_curves.main(["--device", "cpu", "--steps", "1", "--recipes", "Float8Row"])

    names = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert names[2:] == ["nudged 1", "nudged 2", "nudged 3", "Float8Row", "16 bits"]


def test_loss_curves_of_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    loss_curves.main(["--device", "cpu", "--steps", "1", "--out", str(tmp_path / "curves"), "--recipes"])
    found = json.loads((tmp_path / "curves.json").read_text())["results"][0]["losses"]

    assert list(found) == ["nudged 1", "nudged 2", "nudged 3", *loss_curves.RECIPES, "16 bits"]
    assert all(found[name] != found["16 bits"] for name in loss_curves.RECIPES)
    assert max(loss_curves.apart(found).values()) < 0.05
    assert "apart from 16 bits" in capsys.readouterr().out


def test_trainings_of_processes_beside_each_other_are_those_of_one() -> None:
    assert loss_curves.recipe_losses("cpu", 1, ["Float8Row"], 2) == loss_curves.recipe_losses("cpu", 1, ["Float8Row"])


@pytest.mark.cuda
def test_recipes_train_as_16_bits_do_on_cuda() -> None:
    far = loss_curves.apart(loss_curves.recipe_losses("cuda", 200))
    nudged = max(far[name] for name in far if name.startswith("nudged"))

    assert max(far.values()) < 2 * max(nudged, 0.03), far


def test_few_rows_are_multiplied_by_the_weights_of_every_recipe() -> None:
    torch.manual_seed(0)
    sizes, found = few_rows.ways(few_rows.PRESETS["small"], 3, "cpu")
    expected, size = found.pop("bfloat16")
    y = expected()

    assert int(sizes.sum()) == 6
    for name, (run, size_of_copy) in found.items():
        assert (run() - y).norm() < 0.2 * y.norm(), name  # another draw would be 1.4 times as long
        assert size_of_copy < 0.6 * size, name


def test_curves_that_part_are_seen() -> None:
    assert loss_curves.apart({"a": [1.0] * 30, "b": [1.0] * 25 + [3.0] * 5})["a"] == pytest.approx(0.5)


@pytest.mark.cuda
def test_loss_curves_agree_on_cuda() -> None:
    found = loss_curves.losses("cuda", 200)
    nudged, *far = loss_curves.apart(found).values()

    assert found["fused"][-1] < 3.5
    assert max(far) < 2 * max(nudged, 0.03), (nudged, far)


def test_bound_is_the_lower_of_both_ceilings() -> None:
    roof = roofline.Ceilings(flops=100.0, bandwidth=10.0)

    assert roof.bound(flops=50, moved=10) == 50
    assert roof.bound(flops=5000, moved=10) == 100


@needs_matplotlib
def test_bars_leave_a_gap_where_nothing_was_measured(tmp_path: Path) -> None:
    plot = tmp_path / "bars.svg"
    plots.bars(plot, {"a": {"ours": 3.25, "peer": 1.5}, "b": {"ours": 2.75}}, "title", "unit")
    texts = [element.text for element in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")]

    assert {"3.25", "1.5", "2.75"} <= {*texts}
    assert not {"nan", "0"} & {*texts[texts.index("unit") + 1 :]}


@needs_matplotlib
def test_bench_draws(tmp_path: Path) -> None:
    plot = tmp_path / "bench.png"
    grouped_mlp.main([*SMALL, "--device", "cpu", "--contestants", "fused", "loop", "--plot", str(plot)])

    assert plot.read_bytes().startswith(b"\x89PNG")


def test_plot_is_refused_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        roofline.main(["--plot", "somewhere.svg"])

    assert "needs matplotlib: pip install matplotlib" in capsys.readouterr().err


@pytest.mark.cuda
def test_roofline_runs_on_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    roofline.main(["--preset", "small", *SMALL[:-2], "--dtype", "bf16", "--device", "cuda"])

    assert "grouped_mm / bound" in capsys.readouterr().out


@pytest.mark.cuda
def test_bench_of_grouped_gemm_runs_on_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--preset", "small", *SMALL[:-2], "--dtype", "bf16", "--device", "cuda"]
    grouped_gemm.main([*sizes, "--distribution", "random", "one", "--main-grad", "--tiles", "--sustain", "0.001"])

    printed = capsys.readouterr().out
    assert "ours / grouped_mm" in printed
    assert "ours / tile 1" in printed


@pytest.mark.cuda
def test_bench_runs_on_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in CONTESTANTS if "compile" not in name]  # torch's compiler warns, and takes its time
    grouped_mlp.main([*SMALL[:-2], "--dtype", "bf16", "--device", "cuda", "--contestants", *names])

    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in names)


def test_host_overhead_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    host_overhead.main(["--rounds", "2", "--calls", "2"])
    printed = capsys.readouterr().out

    assert "| op_kwargs by module |" in printed
    assert "| forward + backward " in printed


def test_peak_memory_counts_what_lives_at_once() -> None:
    def one_after_the_other() -> None:
        for _ in range(4):
            torch.empty(1000, dtype=torch.float32)

    def together() -> list[torch.Tensor]:
        return [torch.empty(1000, dtype=torch.float32) for _ in range(4)]

    assert 4000 <= timing.peak_bytes(one_after_the_other) < 8000
    assert timing.peak_bytes(together) >= 16000
    assert timing.kept_bytes(one_after_the_other) == 0
    assert timing.kept_bytes(together) >= 16000


def test_what_a_function_is_given_is_made_anew_for_every_call() -> None:
    made, used = iter(range(100)), []

    timing.interleaved({"f": used.append}, rounds=2, calls=2, steady=True, prepare={"f": lambda: next(made)})

    assert used == list(range(9))  # three rounds, an untimed call before the two of each


def test_phases_in_a_row_wait_for_the_device_only_behind_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that works off a queue, in seconds of its own; the host does not wait between calls."""
    queued: list[float] = []
    waited_for: list[int] = []

    class Mark:
        def __init__(self) -> None:
            self.at = sum(queued)

        def __call__(self, earlier: Mark) -> float:
            waited_for.append(len(queued))
            return self.at - earlier.at

    def run() -> Iterator[None]:
        call = len(queued) // 2
        for seconds in (1.0 + call, 10.0):
            queued.append(seconds)
            yield

    monkeypatch.setattr(timing, "_mark", lambda device: Mark())

    assert timing.phases_in_a_row(run, calls=3, warm_up=2) == [4.0, 10.0]  # of calls 2, 3 and 4
    assert waited_for == [10] * 6


def test_the_table_between_ranks_has_idle_and_steady_times_side_by_side() -> None:
    setting = expert_parallel.Setting("small", 2, 16, "fp32", "cpu", "uniform", "exact", "collective", None, 1, False)
    small = PRESETS["small"]
    flops = 6 * 16 * small.top_k * small.features * small.hidden
    idle, steady = flops / 2e12, flops / 4e12
    results = {"seconds": {"layer forward": idle}, "steady": {"layer forward": steady}, "differences": {}, "skew": 1.0}

    heading, _, row, *_ = expert_parallel.table(setting, results).splitlines()

    assert heading.split(" | ")[1:3] == ["idle, ms", "steady, ms"]
    assert row.strip("| ").split()[-3:] == ["2.0", "|", "4.0"]


@pytest.mark.parametrize("name", ["fused", "loop"])
def test_backward_alone_is_that_of_a_step(name: str) -> None:
    contestant = CONTESTANTS[name](problem())

    gradients = contestant.backward(contestant.forward())

    torch.testing.assert_close(gradients, contestant.step()[1:])


def test_interleaved_times_every_function() -> None:
    calls = {"a": 0, "b": 0}

    def call(name: str) -> None:
        calls[name] += 1

    seconds = timing.interleaved({name: (lambda name=name: call(name)) for name in calls}, rounds=3, calls=2)

    assert calls == {"a": 8, "b": 8}  # one round of warm-up
    assert min(seconds.values()) > 0


def test_sustained_calls_for_as_long_as_asked() -> None:
    calls = {"a": 0, "b": 0}

    def call(name: str) -> None:
        calls[name] += 1
        time.sleep(0.001)

    seconds = timing.sustained({name: (lambda name=name: call(name)) for name in calls}, rounds=1, seconds=0.02)

    assert min(seconds.values()) >= 0.001
    assert all(2 < count <= 2 + 2 * 10 and count % 2 == 0 for count in calls.values())  # two to begin with, two halves


def test_turns_are_taken_in_random_order() -> None:
    turns: list[str] = []
    functions = {name: (lambda name=name: turns.append(name)) for name in "abcd"}

    timing.interleaved(functions, rounds=9, steady=True)
    rounds = [turns[i : i + 8] for i in range(0, 80, 8)]

    assert len(turns) == 80  # an untimed call before each
    assert all(sorted(r) == sorted("aabbccdd") for r in rounds)
    assert len({tuple(r) for r in rounds}) > 3


def test_ratios_are_those_of_neighbours_whatever_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    waits, now = {"first": 1.0, "same": 1.0, "twice": 2.0}, [0.0]

    def call(name: str) -> None:
        calls.append(name)
        now[0] += waits[name] * len(calls)  # slower and slower

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    ratios = timing.relative({name: (lambda name=name: call(name)) for name in waits}, rounds=5)

    assert ratios == pytest.approx(waits)
    assert [calls.count(name) for name in waits] == [20, 15, 15]


@pytest.mark.parametrize("model", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_bench_of_transformers_prints_and_writes(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    small = ["--shrink", "64", "--tokens", "8", "--rounds", "1", "--device", "cpu", "--dtype", "fp32", "--layers", "2"]
    hf.main(["--model", model, *small, "--out", str(tmp_path / "hf")])
    printed = capsys.readouterr().out

    assert printed.strip() == (tmp_path / "hf.md").read_text().strip()
    (result,) = json.loads((tmp_path / "hf.json").read_text())["results"]
    assert result["implementations"].keys() == {"eager", "grouped_mm", "batched_mm", "fusible"}
    assert result["implementations"]["batched_mm"]["step"] is None
    assert min(result["implementations"]["fusible"]["decode"].values()) > 0
    assert 0 < result["implementations"]["fusible"]["kept"] < result["implementations"]["eager"]["kept"]


def test_wrong_implementation_of_transformers_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    block = hf.Block(hf.MODELS["gpt-oss"], 64, "cpu", torch.float32)
    true = hf.error
    monkeypatch.setattr(hf, "error", lambda block, name: true(block, name) + 1e-3 * (name == "fusible"))

    with pytest.raises(InaccurateError, match="fusible: relative error"):
        hf.check(block, ["eager", "grouped_mm", "fusible"])


def check_of_transformers(monkeypatch: pytest.MonkeyPatch, **errors: float) -> Callable[..., dict[str, float]]:
    """The check of the benchmark, for implementations that are so far from the truth."""
    monkeypatch.setattr(hf, "error", lambda block, name: errors[name.replace(" ", "_")])
    return lambda *names: hf.check(SimpleNamespace(dtype=torch.float32), names)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["eager", "grouped_mm", "fusible", "fusible compiled"])
@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_implementation_that_is_not_finite_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, wrong: str, error: float
) -> None:
    names = ("eager", "grouped_mm", "fusible", "fusible compiled")
    check = check_of_transformers(
        monkeypatch, **{name.replace(" ", "_"): error if name == wrong else 1e-7 for name in names}
    )

    with pytest.raises(InaccurateError, match=f"{wrong}: relative error {error}"):
        check(*names)


def test_our_implementation_is_compared_with_whichever_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_of_transformers(monkeypatch, eager=1e-3, grouped_mm=1e-5, fusible=1e-3, fusible_compiled=0.0)

    assert check("eager", "fusible") == {"eager": 1e-3, "fusible": 1e-3}
    assert check("fusible") == {"fusible": 1e-3}  # eager is the yardstick all the same
    assert check("eager", "grouped_mm") == {"eager": 1e-3, "grouped_mm": 1e-5}  # nothing of ours
    for names in (("grouped_mm", "fusible"), ("eager", "grouped_mm", "fusible"), ("grouped_mm", "fusible compiled")):
        with pytest.raises(InaccurateError, match=r"fusible: relative error 1\.00e-03, allowed 2\.1"):
            check(*names)


def test_bench_of_routing_prints_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    routing.main(["--tokens", "16", "5", "--rounds", "1", "--device", "cpu", "--out", str(tmp_path / "routing")])
    printed = capsys.readouterr().out

    assert printed.strip() == (tmp_path / "routing.md").read_text().strip()
    assert "copy bound" not in printed
    assert printed.count("(ours)") == 2 * 7
    assert printed.count("| combine: embedding_bag ") == 2


def test_bench_of_pointwise_functions_prints(capsys: pytest.CaptureFixture[str]) -> None:
    pointwise.main(["--rows", "4", "--columns", "8", "--rounds", "1"])

    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("| 4 rows of 2 x 8")
    assert [line.split()[1] for line in printed[2:]] == ["Pointwise", "PyTorch"]


def test_bench_of_chains_prints(capsys: pytest.CaptureFixture[str]) -> None:
    chains.main(["--rows", "8", "--columns", "8", "--depth", "4", "--groups", "2", "--rounds", "1", "--device", "cpu"])

    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + len(chains.models(2, 4, 8))


_SMALL = ("--experts", "4", "--features", "256", "--hidden", "128", "--tokens", "16", "--rounds", "1")


def _first_column(printed):
    return [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")]


def test_bench_mlp_under_recipes(capsys):
    grouped_mlp.main([*_SMALL, "--dtype", "bf16", "--contestants", "fused", "loop", "--recipe", *RECIPES])

    names = _first_column(capsys.readouterr().out)
    assert names[2:] == ["fused", "loop", *(f"fused, {name}" for name in RECIPES)]


def test_bench_mlp_quantises_16_bits_only(capsys):
    with pytest.raises(SystemExit):
        grouped_mlp.main([*_SMALL, "--dtype", "fp32", "--recipe", "MXFP8"])

    assert "give --dtype bf16" in capsys.readouterr().err


def test_bench_grouped_gemm_under_recipes(capsys):
    options = ["--dtype", "bf16", "--main-grad", "--contestants", "ours", "--recipe", *RECIPES]
    grouped_gemm.main([*_SMALL, *options])

    heading, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert all(f" {name} |" in heading for name in RECIPES)
    assert len(rows) == 8


def test_a_wrong_result_under_a_recipe_is_refused():
    case = problem(torch.bfloat16)
    right = CONTESTANTS["fused"](case)
    wrong = replace(right, forward=lambda: 1.2 * right.forward(), rounding=0.0625)
    with pytest.raises(InaccurateError, match="fused"):
        grouped_mlp.check(case, {"fused": wrong})


def test_float32_beside_bfloat16(capsys):
    float32.main(["--preset", "small", "--tokens", "16", "--rounds", "1"])

    assert "| small " in capsys.readouterr().out


def test_bench_of_functions_prints(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--experts", "2", "--features", "8", "--hidden", "8", "--tokens", "1", "--no-first-calls"]
    names = [name for name in functions.CONTESTANTS if not name.endswith("compiled")]
    functions.main([*sizes, "--preset", "small", "gpt-oss", "--rounds", "1", "--contestants", *names])

    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("| small, 1 tokens: 2 experts of 8 x 8")
    assert [line.split("|")[1].strip() for line in printed[2 : 2 + len(names)]] == names
    assert printed[2 + len(names)].startswith("| gpt-oss, 1 tokens: 2 experts of 8 x 8")


def test_contestants_of_functions_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    sizes, rows = functions.Sizes(2, 16, 8, 5), torch.tensor([3, 2])
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    names = ("function", "function unfused", "function compiled")
    first, *others = every = [functions.contestant(name, sizes, "cpu") for name in names]
    with torch.no_grad():
        for other in others:
            for ours, theirs in zip(first.parameters, other.parameters, strict=True):
                theirs.copy_(ours.view_as(theirs))

    expected, *results = [each.model(x, split_sizes=rows) for each in every]
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0.016, atol=1e-3)


def test_bench_of_adapters_prints(capsys: pytest.CaptureFixture[str]) -> None:
    lora.main(["--preset", "small", "--tokens", "4", "--rank", "8", "--rounds", "1"])

    decoded, steps, decoding = (part.splitlines() for part in capsys.readouterr().out.strip().split("\n\n"))
    assert [line.split("|")[1].strip() for line in decoded[2:]] == [*lora.FORMATS]
    assert steps[0].startswith("| small, 4 tokens, rank 8")
    names = [line.split("|")[1].strip() for line in steps[2:]]
    assert names == ["frozen", "LoRA", "full", *(f"LoRA, {base}" for base in lora.BASES)]
    assert [line.rpartition("(")[2] for line in decoding] == [f"LoRA, {base})" for base in lora.FORMATS]
    assert all(re.match(r"decode: \d+\.\d\d ms of \d+\.\d\d ms, \d+\.\d% ", line) for line in decoding)


def test_adapters_of_peft_multiply_the_same_weights() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    preset = Preset(4, 64, 32, 2)
    frozen, rows = lora.linears(preset, 0, "cpu"), lora.RoutedRows.draw(preset, 8, "cpu")
    gradients = lora.peft_step(preset, 8, frozen, rows)()
    assert len(gradients) == 5
    assert all(float(each.abs().max()) > 0 for each in gradients)


def test_peft_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "peft", None)
    preset = Preset(4, 64, 32, 2)
    frozen, rows = lora.linears(preset, 0, "cpu"), lora.RoutedRows.draw(preset, 8, "cpu")
    steps, (left_out,) = lora.attempts(["PEFT"], lambda name: lora.peft_step(preset, 8, frozen, rows))
    assert not steps
    assert left_out.reason.startswith("ModuleNotFoundError: import of peft halted")


def test_operations_of_a_step() -> None:
    preset = Preset(4, 64, 32, 2)
    assert lora.products(preset, 10, "LoRA") == 2 * 2 * 20 * 64 * 3 * 32
    assert lora.products(preset, 10, "full") == 3 * 2 * 20 * 64 * 3 * 32


def test_a_wrong_base_of_adapters_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The features are no multiples of a block of 128."""
    exact = lora.NF4.values
    monkeypatch.setattr(lora.NF4, "values", lambda format, weight: 1.1 * exact(format, weight))
    monkeypatch.setattr(lora.NF4, "weight_values", lambda format, weight, parts=1: exact(format, weight))
    steps, _, left_out = lora.contestants(Preset(4, 320, 192, 2), 8, 8, "cpu", [*lora.BASES])

    assert [one.name for one in left_out] == ["NF4", "NF4 nested"]
    assert left_out[0].reason.startswith("InaccurateError: a gradient is off by ")
    assert {name for name in steps if "," in name} == {f"LoRA, {name}" for name in lora.BASES if "NF4" not in name}


def test_wrong_decoding_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "decode_weight", lambda data, scales, factors, like, format: like.clone())
    rows, left_out = lora.attempts(["MXFP4"], lambda name: lora.decoding(name, torch.randn(2, 64, 64).bfloat16(), 1))

    assert rows == {}
    assert str(left_out[0]) == "- MXFP4: InaccurateError: decoded values differ from the definition's"


def test_pointwise_contestants_agree() -> None:
    x, s = torch.randn(5, 16, dtype=torch.bfloat16), torch.rand(5)
    first, *others = [call(x, s) for call in pointwise.contestants("cpu").values()]

    for other in others:
        torch.testing.assert_close(first, other)


def test_wrong_way_of_routing_is_not_timed() -> None:
    part = routing.RoutingPart("combine", {"right": lambda: torch.ones(3), "wrong": lambda: torch.zeros(3)}, 1)

    with pytest.raises(InaccurateError, match="combine: wrong gives something else than right"):
        routing.check(part)


@pytest.mark.cuda
@pytest.mark.parametrize("bench", ["hf", "routing"])
def test_bench_of_transformers_runs_on_cuda(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    small = {"hf": ["--shrink", "8", "--tokens", "64"], "routing": ["--preset", "small", "--tokens", "64"]}
    {"hf": hf.main, "routing": routing.main}[bench]([*small[bench], "--rounds", "2", "--dtype", "bf16"])

    assert "NVIDIA" in capsys.readouterr().out


def test_the_time_of_many_experts_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    host_overhead.print_many_experts("cpu", torch.float32, (2,), 1)

    rows = capsys.readouterr().out.splitlines()
    assert sum("E=2" in row for row in rows) == 5
    assert sum("other rows in each call" in row for row in rows) == 1


def test_two_trees_take_turns(capfd):
    tree = Path(compare.__file__).resolve().parent.parent
    compare.main(
        [str(tree), str(tree), "--preset", "small", "--tokens", "4", "--rounds", "1", "--kind", "wgrad1", "backward"]
    )
    printed = capfd.readouterr().out
    rows = [line.split("|") for line in printed.splitlines()[2:]]
    assert [row[1].strip() for row in rows] == ["small wgrad1", "small backward"]
    assert all(
        float(row[2]) > 0 and float(row[4]) == pytest.approx(float(row[3]) / float(row[2]), rel=0.1) for row in rows
    )


def test_a_tree_that_does_not_start_is_an_error(tmp_path):
    (tmp_path / "fusible.py").write_text("raise SystemExit(3)")
    case = compare.Case("fc1", 8, 8, (1, 2), "float32")
    with pytest.raises(RuntimeError, match="ended with status 3"):
        list(compare.compare([tmp_path, tmp_path], {"fc1": case}, 1))


def test_errors_of_recipes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    quantized_errors.main(["--tokens", "64", "--features", "128", "--columns", "64", "--groups", "2"])

    lines = [line.split("|") for line in capsys.readouterr().out.splitlines()]
    errors = {name.strip(): [float(e) for cell in cells for e in cell.split("/")] for _, name, *cells, _ in lines[2:]}
    assert list(errors) == list(quantized_errors.RECIPES)
    assert all(0.001 < error < 0.003 for error in errors["bfloat16"])
    assert all(0.02 < error < 0.05 for error in errors["Float8Block()"])
    assert all(0.05 < error < 0.2 for error in errors["NVFP4()"])


def test_bits_that_differ_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert bits.main([str(first), "--only", "gemm.NT"]) == 0
    assert bits.main([str(second), "--only", "gemm.NT"]) == 0
    assert bits.main(["compare", str(first), str(second)]) == 0
    digests = json.loads(second.read_text())
    del digests["gemm.NT.torch.float32.loop/alpha"]
    second.write_text(json.dumps(digests | {"gemm.NT.torch.bfloat16.loop/y": "another"}))
    capsys.readouterr()

    assert bits.main(["compare", str(first), str(second)]) == 1
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]]
    assert names == ["gemm.NT.torch.bfloat16.loop/y", "gemm.NT.torch.float32.loop/alpha"]


def test_balancing_evens_loads_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trainings = {name: balancing.train(balancing.METHODS[name], 12) for name in ("none", "QuantileBias()")}

    assert trainings["QuantileBias()"].loads[-1] < 0.9 * trainings["none"].loads[-1]
    assert all(1 <= load <= balancing.EXPERTS / balancing.TOP_K for each in trainings.values() for load in each.loads)
    assert "| `QuantileBias()` |" in balancing.table(trainings, 12)
    balancing.main(["--steps", "1", "--json", "--plot", str(tmp_path / "loads.svg")])
    assert json.loads(capsys.readouterr().out).keys() == balancing.METHODS.keys()
    assert all(name in (tmp_path / "loads.svg").read_text() for name in balancing.METHODS)


@pytest.mark.parametrize("name", ["balancing", "quantize", "runs.finetune"])
def test_the_usage_of_a_module_is_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(f"fusible.benchmarks.{name}")
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    assert f"usage: python -m {module.__name__} [-h]" in capsys.readouterr().out


def test_parts_that_do_not_exist_are_refused() -> None:
    with pytest.raises(SystemExit, match="--parts: none begins like sort; there are choose"):
        routing.main(["--tokens", "8", "--device", "cpu", "--parts", "sort"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["few_rows", "gathers", "low_rank", "scaled_gemm"])
def test_kernels_are_timed_on_a_gpu_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        import_module(f"fusible.benchmarks.{name}").main([])
    assert "error: times kernels of a CUDA GPU, and here is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"), [("{", "Expecting property name"), ("[1]", "a JSON object with the keys"), (None, "No such file")]
)
@pytest.mark.parametrize("name", ["demo_plot", "runs.plot"])
def test_a_plot_of_other_data_is_refused_in_words(
    name: str, text: str | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    data = tmp_path / "data.json"
    if text is not None:
        data.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        import_module(f"fusible.benchmarks.{name}").main([str(data), str(tmp_path / "drawn.svg")])
    assert why in capsys.readouterr().err


def test_digests_of_one_file_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bits.main(["compare", "a.json"])
    assert "error: compare: expected two files, got 1" in capsys.readouterr().err
