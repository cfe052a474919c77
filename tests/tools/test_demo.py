"""The demo, a few steps of it."""

from __future__ import annotations

import json
import math
import re
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from fusible.benchmarks import demo_plot
from fusible.examples import moe_lm

FOUND = {  # of a comparison
    "fused": {"seconds": 0.002, "peak_bytes": 3e6, "kept_bytes": 1e6, "difference": 0.0},
    "unfused": {"seconds": 0.003, "peak_bytes": 6e6, "kept_bytes": 4e6, "difference": 0.0},
    "loop": {"seconds": 0.006, "peak_bytes": 6e6, "kept_bytes": 5e6, "difference": 0.0},
}


@pytest.fixture
def one_thread() -> object:
    """Small tensors on a busy machine: threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_model() -> moe_lm.LanguageModel:
    torch.manual_seed(0)
    return moe_lm.LanguageModel(features=32, heads=2, hidden=32, layers=1)


@pytest.mark.usefixtures("one_thread")
def test_loss_goes_down() -> None:
    text, model = moe_lm.read_text(100_000), small_model()
    before = moe_lm.held_out_loss(model, text)

    losses = moe_lm.train(model, text, seconds=60, steps=25)

    assert len(losses) == 25
    # it knows nothing yet: ln 256, and half the variance of its logits, of weights even between -1 and 1 over sqrt(32)
    assert losses[0] == pytest.approx(math.log(256) + 1 / 6, abs=0.2)
    assert losses[-1] < losses[0] - 1
    assert moe_lm.held_out_loss(model, text) < before - 1


@pytest.mark.usefixtures("one_thread")
def test_demo_trains_explains_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    moe_lm.main(["--steps", "3", "--rounds", "1"])
    printed = capsys.readouterr().out

    assert re.search(r"\[#+\] 100% +step +3 +loss \d", printed)
    assert re.search(r"RoutedMLP +0 1 2 3 4 5 +taken", printed)
    assert re.search(r"Fused experts are .* x as fast as loop\. They keep \d\d% of the memory", printed)
    assert printed.splitlines()[-1] == moe_lm.ON_A_GPU
    for name in ("fused", "unfused", "loop"):
        assert re.search(rf"\| {name} +\| +\d+\.\d+ \| +\d+\.\d \| +\d+\.\d \| +\d\.\de", printed)


def test_bar_prints_ten_lines_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    bar = moe_lm.Bar()
    for i in range(100):
        bar.show(i / 100, "loss 1")
    bar.show(1, "loss 1")

    assert len(capsys.readouterr().out.splitlines()) == 11


def test_bar_stays_on_one_line_where_somebody_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    bar = moe_lm.Bar()
    bar.show(0.5, "loss 1")
    bar.show(1, "loss 1")

    assert capsys.readouterr().out.count("\n") == 1


def test_text_is_always_the_same() -> None:
    assert torch.equal(moe_lm.read_text(10_000), moe_lm.read_text(10_000))


def test_targets_are_the_next_bytes() -> None:
    text = torch.arange(1000)
    x, target = moe_lm.batch_of(text, 4, torch.Generator().manual_seed(0))

    assert torch.equal(target, x + 1)


def test_model_does_not_look_ahead() -> None:
    model, (text, _) = small_model(), moe_lm.batch_of(moe_lm.read_text(10_000), 1, torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 64:] = 0

    torch.testing.assert_close(model(text)[0][0, :64], model(changed)[0][0, :64])


def test_the_small_model_is_that_of_a_cpu() -> None:
    setting = moe_lm.Setting.on("cpu")

    assert setting == ("cpu", torch.float32, moe_lm.SMALL)
    assert not torch.is_autocast_enabled("cpu")
    with setting.autocast():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("bf16", "dtype", "size"), [(True, torch.bfloat16, moe_lm.LARGE), (False, torch.float32, moe_lm.SMALL)]
)
def test_the_large_model_is_that_of_a_gpu_with_bfloat16(
    bf16: bool, dtype: torch.dtype, size: moe_lm.Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)

    assert moe_lm.Setting.on("cuda") == ("cuda", dtype, size)


def test_a_model_is_as_large_as_its_setting_says() -> None:
    size = moe_lm.Size(16, 2, 8, experts=4, top_k=3, layers=3, batch=2, rate=1e-3)
    model = moe_lm.Setting("cpu", torch.float32, size).model()
    layer = moe_lm.first_layer(model)

    assert len(model.blocks) == 3
    assert [tuple(w.shape) for w in layer.experts.parameters()] == [(4, 16, 16), (4, 16, 8)]
    assert (layer.router.top_k, model.blocks[0].attention.heads) == (3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_problem_of_the_experts_has_the_dtype_of_the_setting(dtype: torch.dtype) -> None:
    problem = moe_lm.experts_problem(small_model(), moe_lm.read_text(10_000), batch=2, dtype=dtype)

    assert {t.dtype for t in (problem.x, problem.w1, problem.w2, problem.dy)} == {dtype}
    assert problem.scales.dtype == torch.float32
    assert problem.x.shape[0] == int(problem.split_sizes.sum()) == 2 * moe_lm.CONTEXT * 2


def test_the_verdict_says_what_is_faster() -> None:
    said = (
        "Fused experts are 1.50 x as fast as unfused, 3.00 x as fast as loop. "
        "They keep 25% of the memory that unfused ones keep for the backward."
    )

    assert moe_lm.verdict(FOUND, "cuda") == said
    assert moe_lm.verdict(FOUND, "cpu") == f"{said}\n{moe_lm.ON_A_GPU}"


def test_what_a_gpu_would_show_was_measured() -> None:
    page = (Path(__file__).parents[2] / "docs" / "measured.md").read_text()
    section = page.split("\n## The demo\n")[1].split("\n## ")[0]
    said = re.findall(r"([\d.]+) x as fast", moe_lm.ON_A_GPU)

    assert re.findall(r"([\d.]+) ×", section) == said
    assert len(said) == 3


def test_experts_of_a_cpu_are_many_and_small() -> None:
    """A loop over few large experts is as fast as anything on a CPU."""
    size, large = moe_lm.SMALL, moe_lm.LARGE

    assert size.experts >= large.experts
    assert size.batch * moe_lm.CONTEXT * size.top_k // size.experts <= 128


def test_the_plot_shows_parts_of_what_unfused_experts_take() -> None:
    found = demo_plot.shares(FOUND)

    assert found["time, forward + backward"]["fusible, fused"] == pytest.approx(2 / 3)
    assert found["memory kept for the backward"] == {
        "fusible, fused": 0.25,
        "fusible, op by op": 1,
        "a loop over experts": 1.25,
    }


def test_a_completion_has_no_control_characters() -> None:
    completion = moe_lm.complete(small_model(), "def f():\n", 300)
    assert completion.startswith("def f():\n")
    assert all(c.isprintable() or c == "\n" for c in completion)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_plot_is_drawn_from_the_data_of_a_run(tmp_path: Path) -> None:
    data, plot = tmp_path / "demo.json", tmp_path / "demo.svg"
    data.write_text(json.dumps({"problem": "E=2, H100", "comparison": FOUND}))
    demo_plot.main([str(data), str(plot)])
    text = "".join(ElementTree.parse(plot).getroot().itertext())

    assert "The experts of the demo: E=2, H100" in text
    assert "fusible, fused" in text


@pytest.mark.cuda
def test_demo_compares_grouped_mm_too_on_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    moe_lm.main(["--steps", "2", "--rounds", "2"])
    printed = capsys.readouterr().out

    assert "bfloat16" in printed
    assert "| grouped_mm " in printed
    assert "Fused experts are " in printed
