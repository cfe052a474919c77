"""Other libraries in the benchmarks: how they are called, and what is said where one cannot take part.

None of them runs without a GPU. The modules of ``stand_in_peers.py`` take their places: the same names and arguments,
computed by PyTorch.
"""

from __future__ import annotations

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import stand_in_peers
import torch
from torch import Tensor

from fusible.benchmarks import grouped_mlp, hf, scaled_gemm
from fusible.benchmarks.contestant import interleaved, separated
from fusible.benchmarks.contestants import CONTESTANTS
from fusible.benchmarks.left_out import LeftOut, footer
from fusible.benchmarks.peers import PEERS, deepgemm, quack
from fusible.benchmarks.peers.deepgemm import padding_of
from fusible.benchmarks.problem import Problem
from fusible.ops.kernels.problems.quantized import ScaledGemm, ScaledWgrad
from fusible.ops.kernels.pytorch import scaled_gemm as loop

SMALL = ["--experts", "3", "--features", "16", "--hidden", "24", "--tokens", "20", "--rounds", "1", "--dtype", "fp32"]
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
EXPERTS = [name for name, peer in PEERS.items() if peer.experts_forward is not None]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """All libraries, on this device and in every dtype."""
    stand_in_peers.install(monkeypatch)
    monkeypatch.setattr("fusible.benchmarks.peers.peer.Peer.refusal", lambda *arguments: None)


def problem(hidden: int = 24, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem.make(4, 16, hidden, torch.tensor([5, 0, 9, 4]), "cpu", dtype)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("hidden", [8, 24])  # QuACK's scale goes to the narrower of hidden rows and output
@pytest.mark.parametrize("name", PEERS)
def test_peers_compute_the_problem(name: str, hidden: int) -> None:
    p = problem(hidden)

    assert max(p.errors(PEERS[name].contestant(p).result()).values()) < 4 * torch.finfo(torch.float32).eps


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", PEERS)
def test_peers_infer_without_gradients(name: str) -> None:
    p = problem()

    torch.testing.assert_close(PEERS[name].contestant(p).infer(), CONTESTANTS["loop"](p).infer())


@needs_transformers
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", EXPERTS)
def test_peers_compute_the_experts_of_a_model(name: str) -> None:
    block = hf.Block(hf.MODELS["qwen3-moe"], 64, "cpu", torch.float32)

    assert hf.peer_reason(name, block) is None
    assert hf.error(block, name) < 1e-6


@needs_transformers
@pytest.mark.usefixtures("stand_ins")
def test_a_model_that_a_peer_does_not_compute_is_left_out() -> None:
    block = hf.Block(hf.MODELS["gpt-oss"], 64, "cpu", torch.float32)
    reasons = {name: hf.peer_reason(name, block) for name in PEERS}

    own = "failed (ValueError: it computes SwiGLU experts without bias only)"
    assert reasons == {
        **dict.fromkeys(("sonicmoe", "quack", "deepgemm", "liger"), own),
        "scattermoe": None,
        "transformer_engine": "cannot take weights that a model owns",
    }


def test_a_peer_that_is_not_installed_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sonicmoe", None)  # as if it were not installed, where it is
    reason = PEERS["sonicmoe"].refusal("cpu", torch.bfloat16)

    assert reason is not None
    assert reason.startswith("not importable (")
    assert "sonicmoe" in reason


def test_a_peer_whose_import_fails_otherwise_is_left_out_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_gemm.py").write_text("assert None is not None, 'no compiler\\nsecond line'")
    monkeypatch.syspath_prepend(tmp_path)

    assert PEERS["deepgemm"].refusal("cpu", torch.bfloat16) == "not importable (AssertionError: no compiler)"


def test_a_peer_is_left_out_where_its_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_peers.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    refusal = PEERS["quack"].refusal

    assert refusal("cpu", torch.bfloat16) == "needs a CUDA device"
    assert refusal("cuda", torch.float32) == "does not take float32"
    assert refusal("cuda", torch.bfloat16) == "needs compute capability 9.0"
    assert PEERS["scattermoe"].refusal("cuda", torch.float32) is None


def run(out: Path, *contestants: str) -> dict[str, Any]:
    grouped_mlp.main([*SMALL, "--device", "cpu", "--contestants", *contestants, "--out", str(out)])
    (found,) = json.loads(out.with_suffix(".json").read_text())["results"]
    return dict(found)


def test_bench_says_below_the_table_and_in_its_data_who_was_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sonicmoe", None)
    found = run(tmp_path / "bench", "loop", "loop-on-streams", "sonicmoe")
    printed = capsys.readouterr().out

    assert found["contestants"].keys() == {"loop"}
    streams, sonic = found["left_out"]
    assert streams == {"name": "loop-on-streams", "reason": "needs a CUDA device", "requirement": None}
    assert sonic["name"] == "sonicmoe"
    assert "pip install sonic-moe" in sonic["requirement"]
    assert "\nLeft out:\n\n- loop-on-streams: needs a CUDA device\n- sonicmoe: not importable (" in printed
    assert f"{sonic['reason']}; needs {sonic['requirement']}" in printed


def test_a_missing_module_is_named() -> None:
    if find_spec("scattermoe") is not None:
        pytest.skip("scattermoe is installed")

    assert PEERS["scattermoe"].refusal("cpu", torch.float32) == "not importable (No module named 'scattermoe')"


def test_nothing_is_printed_where_nothing_was_left_out() -> None:
    assert footer([]) == ""
    assert footer([LeftOut("loop", "why")]) == "\nLeft out:\n\n- loop: why"


@pytest.mark.usefixtures("stand_ins")
def test_bench_times_peers_that_can_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = run(tmp_path / "bench", "loop", *PEERS)

    assert found["contestants"].keys() == {"loop", *PEERS}
    assert found["left_out"] == []
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in PEERS)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("factor", [1.02, math.nan])
def test_a_peer_whose_result_is_wrong_is_not_timed(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **keywords: Any) -> Tensor:
        return stand_in_peers.scattermoe_linear(*args, **keywords) * factor

    monkeypatch.setattr(sys.modules["scattermoe"], "parallel_linear", wrong)
    found = run(tmp_path / "bench", "loop", "scattermoe", "sonicmoe")

    assert found["contestants"].keys() == {"loop", "sonicmoe"}
    (left_out,) = found["left_out"]
    assert left_out["name"] == "scattermoe"
    assert left_out["reason"].startswith("wrong (relative errors {'y': ")


@pytest.mark.usefixtures("stand_ins")
def test_a_peer_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **keywords: Any) -> None:
        raise TypeError("no such argument\nand a long explanation")

    monkeypatch.setattr(sys.modules["sonicmoe.functional"], "moe_general_routing_inputs", fails)
    found = run(tmp_path / "bench", "fused", "sonicmoe")

    assert found["contestants"].keys() == {"fused"}
    assert found["left_out"][0]["reason"] == "failed (TypeError: no such argument)"


@needs_transformers
@pytest.mark.usefixtures("stand_ins")
def test_bench_of_transformers_times_and_leaves_out_peers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **keywords: Any) -> tuple[Tensor, None]:
        return stand_in_peers.sonicmoe_layer(*args, **keywords)[0] * 1.5, None

    monkeypatch.setattr(sys.modules["sonicmoe.functional"], "moe_general_routing_inputs", wrong)
    small = ["--shrink", "64", "--tokens", "8", "--rounds", "1", "--device", "cpu", "--dtype", "fp32"]
    names = ["grouped_mm", "sonicmoe", "scattermoe"]
    hf.main([*small, "--implementations", *names, "--out", str(tmp_path / "hf")])
    (found,) = json.loads((tmp_path / "hf.json").read_text())["results"]

    assert found["implementations"].keys() == {"grouped_mm", "scattermoe"}
    (left_out,) = found["left_out"]
    assert left_out["reason"].startswith("wrong (relative error ")
    assert "- sonicmoe: wrong (relative error " in capsys.readouterr().out


def test_interleaved_weights_are_separated_again() -> None:
    w1 = torch.arange(2 * 6 * 3).view(2, 6, 3)

    assert interleaved(w1)[0, :, 0].tolist() == [0, 9, 3, 12, 6, 15]
    assert torch.equal(separated(interleaved(w1)), w1)


def test_rows_of_deepgemm_are_padded_by_group() -> None:
    padding = padding_of(torch.tensor([3, 0, 4, 1]), alignment=4)

    assert padding.sizes == padding.device_sizes.tolist() == [4, 0, 4, 4]
    assert padding.group_of_padded_row.tolist() == [0, 0, 0, -1, 2, 2, 2, 2, 3, -1, -1, -1]
    assert padding.padded_index.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]


def float8_problems(sizes: Tensor) -> tuple[ScaledGemm, ScaledWgrad]:
    """A product of rows, whose features are no multiple of a block, and a weight gradient; results are NaN."""
    rows, (columns, features) = int(sizes.sum()), (144, 208)
    random = torch.Generator().manual_seed(0)
    x, dy, weight = (
        torch.randn(shape, generator=random, dtype=torch.bfloat16)
        for shape in ((rows, features), (rows, columns), (len(sizes), columns, features))
    )
    y, dweight = torch.full((rows, columns), torch.nan), torch.full(weight.shape, torch.nan)
    blocks = scaled_gemm.blocked_columns(dy, sizes), scaled_gemm.blocked_columns(x, sizes)
    return (
        ScaledGemm(scaled_gemm.quantized_rows(x), *scaled_gemm.quantized_weight(weight), 1, sizes, y.bfloat16()),
        ScaledWgrad(*blocks, sizes, rows, dweight),
    )


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("sizes", [[130, 1, 0, 257], [128, 256]])
def test_deepgemm_multiplies_what_our_kernels_multiply(sizes: list[int]) -> None:
    product, wgrad = float8_problems(torch.tensor(sizes))
    loop.run(product)
    loop.run(wgrad)
    theirs = deepgemm.float8_product(product)
    sums = deepgemm.float8_wgrad(wgrad)
    sums()  # as a benchmark has run it before it asks for the result

    torch.testing.assert_close(theirs.result(), product.out)
    assert theirs().shape[0] == sum(-(-size // stand_in_peers.ALIGNMENT) for size in sizes) * stand_in_peers.ALIGNMENT
    once = sums.result()
    torch.testing.assert_close(once, wgrad.out)
    torch.testing.assert_close(sums(), 2 * once)  # a call adds


def test_quack_runs_the_fastest_tile_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quack, "configurations", lambda device: ("broken", "slow", "fast"))
    monkeypatch.setattr(quack, "timed_by_turns", lambda functions, *args, **how: {"0": 2.0, "1": 1.0})
    launched = []

    def launch(configuration: str) -> str:
        launched.append(configuration)
        if configuration == "broken":
            raise RuntimeError("broken")
        return configuration

    tuner, device = quack.Tuner(), torch.device("cpu")

    assert tuner.run(("fc1",), launch, device) == "fast"
    assert launched == ["broken", "slow", "fast", "fast"]
    assert tuner.run(("fc1",), launch, device) == "fast"
    assert len(launched) == 5  # known now


def test_quack_fails_where_no_tile_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(configuration: object) -> None:
        raise TypeError("every configuration fails")

    with pytest.raises(TypeError, match="every configuration fails"):
        quack.Tuner().run(("fc1",), launch, torch.device("cpu"))


def test_tiles_of_quack_are_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_peers.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda:7")
    try:
        found = quack.configurations(device)
        assert quack.configurations(device) is found
    finally:
        quack.configurations.cache_clear()
    assert [(c.tile_m, c.tile_n, c.pingpong) for c in found] == list(quack.TILES)
    assert {(c.cluster_m, c.cluster_n, c.is_dynamic_persistent) for c in found} == {(2, 1, False)}


@pytest.mark.cuda
@pytest.mark.parametrize("name", PEERS)
def test_peers_that_are_installed_are_right_on_cuda(name: str) -> None:
    sizes = torch.tensor([300, 0, 128, 84])
    p = Problem.make(4, 512, 256, sizes, "cuda", torch.bfloat16)
    why = PEERS[name].refusal("cuda", torch.bfloat16)
    if why is not None:
        pytest.skip(f"{name}: {why}")

    assert max(p.errors(PEERS[name].contestant(p).result()).values()) < 8 * torch.finfo(torch.bfloat16).eps
