"""The demo, a few steps of it."""

from __future__ import annotations

import math
import re

import pytest
import torch

from fusible.examples import moe_lm


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
