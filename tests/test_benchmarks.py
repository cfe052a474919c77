"""The benchmarks compute what they say, refuse to time what is wrong, and print tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusible.benchmarks import grouped_mlp, host_overhead, timing
from fusible.benchmarks.contestants import CONTESTANTS, Contestant, race, refusal
from fusible.benchmarks.problem import DISTRIBUTIONS, Problem, split_sizes

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


def test_one_expert_takes_all() -> None:
    assert split_sizes("one", 4, 10).tolist() == [10, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fused", "unfused", "loop"])
def test_contestants_are_right(name: str, dtype: torch.dtype) -> None:
    errors = problem(dtype).errors(CONTESTANTS[name](problem(dtype)).result())

    assert max(errors.values()) < 4 * torch.finfo(dtype).eps


def test_errors_see_a_wrong_gradient_of_one_expert() -> None:
    p = problem()
    result = CONTESTANTS["loop"](p).result()
    result.w1[0, 0, 0] += 1

    errors = p.errors(result)

    assert errors["w1"] > 1e-3
    assert max(error for name, error in errors.items() if name != "w1") < 1e-6


def test_wrong_contestant_is_not_timed() -> None:
    p = problem()
    right = CONTESTANTS["loop"](p)
    wrong = Contestant(lambda: right.forward() * 1.01, right.leaves, right.dy)

    with pytest.raises(grouped_mlp.InaccurateError, match="wrong: relative errors"):
        grouped_mlp.measure(p, {"loop": right, "wrong": wrong}, 1)


def test_grouped_mm_is_left_out_on_the_cpu() -> None:
    assert refusal("grouped_mm", problem(torch.bfloat16)) == "needs bfloat16 on a CUDA device"
    assert list(race(problem(), ["loop", "grouped_mm"])) == ["loop"]


def test_bench_prints_and_writes_markdown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "bench.md"
    grouped_mlp.main([*SMALL, "--device", "cpu", "--distribution", "zipf", "one", "--out", str(out)])
    printed = capsys.readouterr().out

    assert printed.strip() == out.read_text().strip()
    assert "E=3, K=16, F=24, T=40, float32, CPU" in printed
    for start in ("| fused ", "| unfused ", "| loop ", "| dense "):
        assert sum(line.startswith(start) for line in printed.splitlines()) == 2


@pytest.mark.cuda
def test_bench_runs_on_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    grouped_mlp.main(
        [*SMALL[:-2], "--dtype", "bf16", "--device", "cuda", "--contestants", "fused", "loop", "grouped_mm"]
    )

    assert "| grouped_mm " in capsys.readouterr().out


def test_host_overhead_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    host_overhead.main(["--rounds", "2", "--calls", "2"])
    printed = capsys.readouterr().out

    assert "| op_kwargs by module |" in printed
    assert "| forward + backward " in printed


def test_look_up_takes_microseconds() -> None:
    p = Problem.make(2, 8, 8, torch.tensor([2, 2]), "cpu", torch.float32)

    seconds = host_overhead.look_up_seconds(p, rounds=20, calls=20)

    assert max(seconds.values()) < 250e-6  # the bar is 25 on a quiet machine; ten times that is a defect anywhere


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


def test_interleaved_times_every_function() -> None:
    calls = {"a": 0, "b": 0}

    def call(name: str) -> None:
        calls[name] += 1

    seconds = timing.interleaved({name: (lambda name=name: call(name)) for name in calls}, rounds=3, calls=2)

    assert calls == {"a": 8, "b": 8}  # one round of warm-up
    assert min(seconds.values()) > 0
