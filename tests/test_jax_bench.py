"""``fusible bench jax`` checks before it times, and leaves out what cannot run."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("jax", reason="jax is not installed")
import torch

from fusible.__main__ import main
from fusible.benchmarks import jax_experts
from fusible.benchmarks.problem import Problem

SIZES = ("--preset", "small", "--experts", "2", "--features", "8", "--hidden", "8", "--tokens", "4")


def test_contestants_are_timed_or_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "jax", *SIZES, "--rounds", "1", "--calls", "1", "--device", "cpu", "--json"])
    (found,) = json.loads(capsys.readouterr().out)["results"]
    names = {*found["contestants"], *[one["name"] for one in found["left_out"]]}

    assert names == set(jax_experts.CONTESTANTS)
    assert {"fusible.jax", "ragged_dot", jax_experts.PYTORCH} <= found["contestants"].keys()
    assert all(one["step"] > 0 and one["error"] < 1e-5 for one in found["contestants"].values())


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda: lambda x, *rest: 1.01 * jax_experts.ours(x, *rest)  # noqa: E731
    monkeypatch.setitem(jax_experts.LAYERS, "fusible.jax", wrong)
    problem = Problem.make(2, 8, 8, torch.tensor([3, 4]), "cpu", torch.float32)
    programs, left_out, _ = jax_experts.taking_part(problem, ["fusible.jax"])

    assert programs == {}
    assert "relative errors" in left_out[0].reason
