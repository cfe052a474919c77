"""Expert parallelism over the collectives of torch, on processes of this machine: the bits of one, errors, no hangs."""

from __future__ import annotations

import importlib
import json
import re
import time
from pathlib import Path
from typing import Any

import ep_cases
import ep_failures
import ep_sharded_cases
import ep_world
import pytest
import torch

from fusible import ep
from fusible.benchmarks import expert_parallel, vdev
from fusible.examples import moe_lm
from fusible.ops.ep.overlap import Overlaps, multiprocessors_beside
from fusible.ops.ep.settings import Settings


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of four ranks on the cases; two run in the tests of the symmetric transport."""
    return ep_world.start("ep_cases", 4, tmp_path_factory.mktemp("ranks"), only=ep_world.selected(request))


@pytest.mark.parametrize("case", [case.__name__ for case in ep_cases.CASES])
def test_on_all_ranks(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)


@pytest.fixture(scope="module")
def said_of_failures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    only = [ep_failures.CASES[0].__name__, *ep_world.selected(request)]
    return ep_world.start("ep_failures", 3, tmp_path_factory.mktemp("failing"), only=only)


@pytest.mark.parametrize("case", [case.__name__ for case in ep_failures.CASES[1:]])
def test_a_rank_that_does_not_come(case: str, said_of_failures: dict[str, list[str]]) -> None:
    ranks = said_of_failures.get(case, [])

    assert len(ranks) == (2 if "ends" in case else 3), said_of_failures
    assert not any(ranks), "\n".join(ranks)


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def said_of_sharding(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of four ranks: pairs share the experts, and FSDP2 shards them over two."""
    folder, only = tmp_path_factory.mktemp("sharded"), ep_world.selected(request)
    return ep_world.start("ep_sharded_cases", request.param, folder, only=only)


@pytest.mark.parametrize("case", [case.__name__ for case in ep_sharded_cases.CASES])
def test_what_the_page_says_of_training(case: str, said_of_sharding: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said_of_sharding)


def test_ranks_that_do_not_end_are_killed_with_their_children(tmp_path: Path) -> None:
    """However many there are, and whoever holds their output: what is started with a limit ends with it."""
    began, wait = time.monotonic(), 15.0
    said = ep_world.start("ep_stuck_cases", 2, tmp_path, wait=wait)

    assert wait <= time.monotonic() - began < wait + 15
    assert len(said["unfinished"]) == 2
    assert all("asleep" in text and "killed: it did not end" in text for text in said["unfinished"])


def test_a_group_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"Group: call torch.distributed.init_process_group\(\) first"):
        ep.Group(num_experts=2, max_tokens=1, top_k=1, hidden=8, dtype=torch.float32)


@pytest.mark.parametrize(
    ("asked", "there", "megabytes", "expected"),
    [
        (None, 132, 268, 32),
        (None, 78, 268, 19),
        (None, 3, 268, 0),
        (None, 132, 8, 32),
        (None, 132, 7, 0),
        (0, 132, 268, 0),
        (16, 132, 7, 16),
    ],
)
def test_how_many_multiprocessors_sum_beside_products(
    asked: int | None, there: int, megabytes: int, expected: int
) -> None:
    assert multiprocessors_beside(asked, there, megabytes << 20) == expected


QWEN3 = {"num_experts": 128, "max_tokens": 8192, "top_k": 8, "hidden": 2048}
DEEPSEEK = {**QWEN3, "hidden": 7168}
MIXTRAL = {"num_experts": 8, "max_tokens": 8192, "top_k": 2, "hidden": 4096}
CHOSEN, OFF = "overlap_dispatch=16 (chosen), overlap_combine=True (chosen): ", "overlap_combine=False (chosen): "


@pytest.mark.parametrize(
    ("problem", "ranks", "expected", "words"),
    [
        (QWEN3, 2, (16, True), CHOSEN),
        (QWEN3, 4, (16, True), CHOSEN),
        (DEEPSEEK, 4, (16, True), CHOSEN),
        ({**DEEPSEEK, "num_experts": 64}, 2, (16, True), CHOSEN),
        (MIXTRAL, 4, (0, False), OFF + "an expert has up to 2048 rows of each rank, and with over 1024"),
        ({**QWEN3, "max_tokens": 128}, 4, (0, False), OFF + "a rank has at most 4096 KB of rows"),
        ({**QWEN3, "dtype": torch.float16}, 4, (0, False), OFF + "products of torch.float16 neither wait"),
        (QWEN3, 1, (0, False), OFF + "no row leaves the only rank"),
        (
            {**QWEN3, "overlap_dispatch": 0},
            2,
            (0, True),
            "overlap_dispatch=0 (asked for), overlap_combine=True (chosen)",
        ),
        ({**QWEN3, "overlap_combine": False}, 2, (16, False), "overlap_combine=False (asked for): "),
        ({**MIXTRAL, "overlap_dispatch": 8, "overlap_combine": True}, 2, (8, True), "overlap_combine=True (asked for)"),
    ],
)
def test_which_moves_run_beside_products(
    problem: dict[str, Any], ranks: int, expected: tuple[int, bool], words: str
) -> None:
    rest = {"dtype": torch.bfloat16, "capacity": 2.0, "overflow": "raise", "combine": "exact"}
    rest |= {"transport": "symmetric", "lanes": 1, "timeout": 60.0}
    rest["float8_gradients"] = False
    overlaps = dict.fromkeys(("overlap", "overlap_dispatch", "overlap_combine"))

    chosen = Overlaps.of(Settings(**{**rest, **overlaps, **problem}), ranks)

    assert chosen[:2] == expected
    assert words in chosen.reason


def test_the_benchmark_compares_with_one_rank_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    expert_parallel.main(["--tokens", "16", "--rounds", "1", "--json", "--device", "cpu", "--ranks", "2"])
    (result,) = json.loads(capsys.readouterr().out)["results"]

    assert set(result["differences"]) == {"y", "dx", "dweights", "dW1", "dW2"}
    assert max(result["differences"].values()) < 1e-6
    assert all(seconds > 0 for seconds in result["seconds"].values())
    assert len(result["seconds"]) == 6
    assert result["steady"].keys() == result["seconds"].keys()
    assert all(seconds > 0 for seconds in result["steady"].values())
    assert 1 <= result["skew"] < 2


def test_the_benchmark_sends_tokens_in_8_bits(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "16", "--rounds", "1", "--device", "cpu", "--ranks", "2", "--dtype", "bf16"]
    expert_parallel.main([*sizes, "--float8", "--json"])
    (result,) = json.loads(capsys.readouterr().out)["results"]

    assert "tokens and products in e4m3" in result["problem"]
    assert result["differences"]["y"] == 0
    assert 0 < result["differences"]["dW1"] < 0.01  # its operands are rounded twice


def test_the_benchmark_reports_what_fails_and_goes_on(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs there is no transport ``symmetric``."""
    arguments = ["--tokens", "16", "--rounds", "1", "--device", "cpu", "--ranks", "2", "--out", str(tmp_path / "times")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="1"):
        expert_parallel.main([*arguments, "--transport", "symmetric", "collective"])
    first, second = json.loads((tmp_path / "times.json").read_text())["results"]
    printed = capfd.readouterr()

    assert first["failure"].startswith("ValueError: Group: transport 'symmetric' cannot serve rank 0: it needs CUDA")
    assert f"failed, and was not measured: {first['failure']}" in printed.out
    assert "Traceback" in printed.err
    assert len(second["seconds"]) == 6


def test_torchs_exchange_is_tried_on_the_device_that_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVSHMEM's teams take a device without an index for another one."""
    memory, gpu = importlib.import_module("torch.distributed._symmetric_memory"), torch.device("cuda", 1)
    tried: list[torch.device] = []
    monkeypatch.setattr(memory, "is_nvshmem_available", lambda: True)
    monkeypatch.setattr(memory, "set_backend", lambda name: None)
    monkeypatch.setattr(vdev, "_symmetric", lambda *shape, dtype, device: tried.append(device))

    assert vdev.refusal(gpu) is None
    assert tried == [gpu]


def test_the_benchmark_refuses_experts_that_are_no_multiple(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        expert_parallel.main(["--device", "cpu", "--preset", "small", "--ranks", "3"])

    assert "8 experts of small do not divide into 3 ranks" in capsys.readouterr().err


def test_the_demo_runs_on_two_processes(capfd: pytest.CaptureFixture[str]) -> None:
    moe_lm.main(["--ep", "2", "--steps", "2", "--device", "cpu"])
    printed = capfd.readouterr().out

    assert "2 processes, each with 16 of 32 experts" in printed
    assert re.search(r"EPGroupedMLP +0 1 2 3 4 5 +taken", printed)
    assert re.search(r"Statistics\(exchanges=6, required=\d+, dropped=0\)", printed)


def test_a_fault_in_a_case_is_seen(said_of_failures: dict[str, list[str]]) -> None:
    """The tests above would say so."""
    ranks = said_of_failures["a_case_that_fails_on_one_rank"]

    assert (ranks[0], ranks[2]) == ("", "")
    assert "AssertionError: y differs" in ranks[1]
