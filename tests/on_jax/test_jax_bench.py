"""``fusible bench jax`` checks before it times, and leaves out what cannot run."""

from __future__ import annotations

import json
import sys
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jax", reason="jax is not installed")
import torch

from fusible.__main__ import main
from fusible.benchmarks import jax_experts, tokamax_tuning
from fusible.benchmarks.gpt_oss import GptOssProblem
from fusible.benchmarks.problem import Problem

SIZES = ("--experts", "2", "--features", "8", "--hidden", "8", "--tokens", "4")


@pytest.mark.parametrize("preset", ["small", "gpt-oss"])
def test_contestants_are_timed_or_left_out(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "jax", "--preset", preset, *SIZES, "--rounds", "1", "--seconds", "0", "--device", "cpu", "--json"])
    (found,) = json.loads(capsys.readouterr().out)["results"]
    names = {*found["contestants"], *[one["name"] for one in found["left_out"]]}

    assert names == set(jax_experts.CONTESTANTS)
    assert {"fusible.jax", "ragged_dot", jax_experts.PYTORCH} <= found["contestants"].keys()
    assert all(one["step"] > 0 and one["error"] < 1e-5 for one in found["contestants"].values())


def wrong_output(sizes: Any, x: Any, *rest: Any) -> Any:
    return 1.01 * jax_experts.ours(sizes, x, *rest)


def without_biases(sizes: Any, x: Any, scales: Any, w1: Any, w2: Any, b1: Any, b2: Any) -> Any:
    return jax_experts.ours(sizes, x, scales, w1, w2, 0 * b1, b2)


@pytest.mark.parametrize(("layer", "of_gpt_oss"), [(wrong_output, False), (wrong_output, True), (without_biases, True)])
def test_what_is_wrong_is_not_timed(layer: Any, of_gpt_oss: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jax_experts.LAYERS, "fusible.jax", lambda: layer)
    problem = Problem.make(2, 8, 8, torch.tensor([3, 4]), "cpu", torch.float32)
    programs, left_out, _ = jax_experts.taking_part(
        GptOssProblem.of(problem) if of_gpt_oss else problem, ["fusible.jax"]
    )

    assert programs == {}
    assert "relative errors" in left_out[0].reason


def test_a_peer_that_is_asked_for_is_timed_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jax_experts.LAYERS, "ragged_dot", lambda: wrong_output)
    monkeypatch.setitem(jax_experts.LAYERS, "fusible.jax", lambda: wrong_output)
    problem = Problem.make(2, 8, 8, torch.tensor([3, 4]), "cpu", torch.float32)
    programs, left_out, errors = jax_experts.taking_part(problem, ["fusible.jax", "ragged_dot"], peer_error=0.1)

    assert programs.keys() == {"ragged_dot"}
    assert [one.name for one in left_out] == ["fusible.jax"]
    assert 0.005 < errors["ragged_dot"] < 0.1


def test_tokamax_is_tuned_for_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first configurations are those that its own list for an H100 holds."""
    names = ("block_m", "block_k", "num_stages", "persistent", "grid_minor_dim", "grid_tile_width")
    values = product((64, 128), (256, 128), (2, 4), (False, True), (0, 1), (1, 2, 4, 8))
    # of a class that can be put in a set, as those of tokamax can
    configuration = type("Configuration", (SimpleNamespace,), {"__hash__": object.__hash__})
    all_of_them = {configuration(**dict(zip(names, numbers, strict=True))) for numbers in values}
    tried: list[set[Any]] = []
    tunable = SimpleNamespace(autotuning_configs=all_of_them, autotune=tried.append)
    others = SimpleNamespace(autotuning_configs=set(), autotune=lambda _: pytest.fail("there is nothing to tune"))
    module = ModuleType("tokamax")
    module.autotuning = SimpleNamespace(get_bound_args=lambda lowered: (tunable, others, tunable))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokamax", module)

    tokamax_tuning.tune(None, 8)

    assert [len(configurations) for configurations in tried] == [8, 8]
    assert {(c.block_m, c.block_k, c.num_stages, c.persistent, c.grid_tile_width) for c in tried[0]} == {
        (128, 128, stages, stages == 4, width) for stages in (2, 4) for width in (1, 8)
    }
