"""``python -m fusible``."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import fusible
from fusible.__main__ import BENCHMARKS, main
from fusible.commands import info
from fusible.fuser.contract import torch_private
from fusible.ops.kernels import architecture, extension
from fusible.ops.kernels.hopper import ahead
from fusible.ops.kernels.jit.cache import kernel_cache

ACTIVATION = fusible.Pointwise(lambda gate, up: torch.tanh(gate) * up, halves="concat")
BESSEL = fusible.Pointwise(torch.special.i0)


def printed_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def test_info_tells_versions_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by(capsys, "info")

    assert f"fusible   {fusible.__version__} from" in printed
    assert torch.__version__ in printed
    assert "GroupedLinearResidual, GroupedLinearGLU, GroupedLinearChain, PointwiseChain, GLUScale" in printed
    assert "loop takes bfloat16, float16, float32" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_info_tells_of_another_torch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert "not tested" not in printed_by(capsys, "info")
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    monkeypatch.setitem(torch_private.missing, "torch._C._gone", None)

    lines = [line for line in printed_by(capsys, "info").splitlines() if line.startswith("torch ")]
    assert re.fullmatch(r"torch     2.99.1\+cpu, \d+ CPU threads; not tested with it, but with 2.11, .*", lines[0])
    assert lines[1].startswith("torch     lacks torch._C._gone: fuser/contract/torch_private.py")


def test_tested_versions_of_torch_are_those_of_the_docs() -> None:
    support = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
    (sentence,) = re.findall(r"^Tested are .*", support, re.MULTILINE)

    assert tuple(re.findall(r"PyTorch (\d+\.\d+)", sentence)) == info.TESTED_TORCH


def test_info_tells_why_a_backend_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hopper needs a CUDA device, got cpu" in printed_by(capsys, "info")


def test_explain_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by(capsys, "explain", "--tokens", "64")

    assert "GroupedMLP  0 1 2 3  taken" in printed
    assert "128x256" in printed  # two rows a token


def test_explain_takes_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by(capsys, "explain", "--preset", "mixtral", "--features", "48", "--tokens", "16")

    assert "32x48" in printed


@pytest.mark.parametrize(
    ("arch", "runs"),
    [
        ("sm_90", "hopper (activation in the epilogue) + hopper"),
        ("sm_80", "triton (activation in the epilogue) + triton"),
    ],
)
def test_explain_tells_what_runs_on_a_gpu_that_is_not_here(
    capsys: pytest.CaptureFixture[str], arch: str, runs: str
) -> None:
    arguments = ("--tokens", "64", "--device", "meta", "--arch", arch)
    explanation = json.loads(printed_by(capsys, "explain", *arguments, "--json"))
    step = explanation["steps"][0]

    assert explanation["replay"] == ""
    assert (step["name"], step["kernel"], step["backward"]["kernel"]) == ("GroupedMLP", runs, runs)
    assert ("needs compute capability 9.0, got 8.0" in step["reason"]) == (arch == "sm_80")


@pytest.mark.parametrize(
    ("arch", "experts", "runs", "reason"),
    [
        ("sm_90", "513", "hopper", ""),
        ("sm_90", "4096", "hopper", ""),
        ("sm_90", "4097", "loop", "takes 1 to 4096 groups, got 4097"),
        ("sm_80", "4096", "triton", "needs compute capability 9.0"),
        ("sm_80", "4097", "loop", "takes at most 1023 groups, got 4097"),
    ],
)
def test_explain_tells_what_takes_many_experts(
    capsys: pytest.CaptureFixture[str], arch: str, experts: str, runs: str, reason: str
) -> None:
    asked = ("--experts", experts, "--tokens", "64", "--device", "meta", "--arch", arch, "--json")
    step = json.loads(printed_by(capsys, "explain", *asked))["steps"][0]

    for part in (step, step["backward"]):
        assert part["kernel"].startswith(runs)
    assert reason in step["reason"]


def test_an_assumed_gpu_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    printed_by(capsys, "explain", "--tokens", "64", "--device", "meta", "--arch", "sm_90")

    assert architecture.assumed() is None
    assert extension.device_refusal.cache_info().currsize == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_explain_at_a_desk_says_how_to_ask_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "--tokens", "64"])
    assert "--arch sm_90" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("drawing", "start"), [("text", "╙── "), ("mermaid", "flowchart"), ("dot", "digraph"), ("svg", "<svg")]
)
def test_explain_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path, drawing: str, start: str) -> None:
    printed = printed_by(capsys, "explain", "--tokens", "16", "--draw", drawing)
    assert start in printed

    out = tmp_path / "drawing"
    assert printed_by(capsys, "explain", "--tokens", "16", "--draw", drawing, "--out", str(out)) == ""
    assert out.read_text() == printed


def test_svg_is_well_formed(capsys: pytest.CaptureFixture[str]) -> None:
    ElementTree.fromstring(printed_by(capsys, "explain", "--tokens", "16", "--draw", "svg"))


def test_bench_and_demo_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("bench", "demo"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert f"usage: fusible {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [((), "bench mlp"), (("mlp",), "bench mlp"), (("grouped_gemm",), "bench grouped_gemm")],
)
def test_bench_takes_the_name_of_a_benchmark(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], usage: str
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", *arguments, "--help"])
    assert f"usage: fusible {usage} [-h]" in capsys.readouterr().out


def test_bench_times_the_grouped_gemm(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--preset", "small", "--experts", "2", "--features", "8", "--hidden", "8", "--tokens", "4"]
    printed = printed_by(capsys, "bench", "grouped_gemm", *sizes, "--rounds", "1", "--device", "cpu")

    assert "### small, 4 tokens, random: E=2, K=8, F=8, T=8" in printed


SMALL = ("--preset", "small", "--experts", "2", "--features", "8", "--hidden", "8", "--tokens", "4")
QUICK = (*SMALL, "--rounds", "1", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("info",), {"fusible", "folder", "kernels", "torch", "backends"}),
        (("explain", "--tokens", "16"), {"steps", "fusions", "flops"}),
        (("demo", "--steps", "1", "--rounds", "1"), {"losses", "held_out_loss", "explanation", "comparison"}),
        (("roofline", *QUICK), {"date", "results"}),
        (("bench", "mlp", *QUICK, "--contestants", "loop"), {"date", "results"}),
        (("bench", "grouped_gemm", *QUICK), {"date", "results"}),
        (("bench", "routing", "--tokens", "8", "--rounds", "1", "--device", "cpu"), {"date", "results"}),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_json_is_all_that_is_printed(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], keys: set[str]
) -> None:
    found = json.loads(printed_by(capsys, *arguments, "--json"))

    assert keys <= found.keys()
    assert found.get("results", True)


@pytest.mark.parametrize("name", ["info", "explain", "demo", "roofline", *(f"bench {name}" for name in BENCHMARKS)])
def test_help_explains_every_option_and_tells_defaults(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*name.split(), "--help"])
    options = re.split(r"\n  (?=-)", capsys.readouterr().out.partition("options:\n")[2])
    numbers = [" ".join(option.split()) for option in options if option.startswith(("--rounds", "--tokens", "--dtype"))]

    assert any(option.startswith("--json") for option in options)
    assert [option for option in options if not re.search(r"\S( {2,}|\n {20,})\S", option.strip())] == []
    assert all("(default: " in option for option in numbers)
    assert not [option for option in options if "(default: )" in option]


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fusible {fusible.__version__}\n"


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert "roofline  how near" in capsys.readouterr().out


def test_help_of_bench_names_all_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "--help"])
    assert f"benchmarks: {', '.join(BENCHMARKS)}" in capsys.readouterr().out


def test_there_is_a_command_of_that_name() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["fusible"].partition(":")

    assert getattr(import_module(module), function) is main


def test_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fly"])
    assert "invalid choice: 'fly'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "fly"), "argument benchmark: invalid choice: 'fly'"),
        (("bench", "mlp", "--rounds", "0"), "argument --rounds: expected an integer of at least 1, got '0'"),
        (("bench", "--experts", "0"), "argument --experts: expected an integer of at least 1, got '0'"),
        (("bench", "grouped_gemm", "--tokens", "8", "0"), "argument --tokens: expected an integer of at least 1"),
        (("bench", "routing", "--calls", "-1"), "argument --calls: expected an integer of at least 1, got '-1'"),
        (("bench", "hf", "--shrink", "0"), "argument --shrink: expected an integer of at least 1"),
        (("roofline", "--device", "cuda:99"), "argument --device: no device 'cuda:99' here: "),
        (("roofline", "--out", "/nowhere/found"), "argument --out: no such folder: '/nowhere'"),
        (("explain", "--out", "/nowhere/found"), "argument --out: no such folder: '/nowhere'"),
        (("demo", "--seconds", "0"), "argument --seconds: expected a number of seconds above 0, got '0'"),
        (("bench", "grouped_gemm", "--sustain", "-1"), "argument --sustain: expected a number of seconds above 0"),
        (("explain", "--device", "cpu", "--arch", "sm_90"), "argument --arch: is for --device meta, got cpu"),
        (("explain", "--device", "cuda:99"), "argument --device: no device 'cuda:99' here: "),
        (("explain", "--draw", "svg", "--json"), "argument --draw: not allowed with argument --json"),
        (("demo", "--steps", "0"), "argument --steps: expected an integer of at least 1"),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_plot_is_an_svg_or_a_png(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--plot", "bars.jpg"])
    assert "argument --plot: expected a name that ends in .svg or .png, got 'bars.jpg'" in capsys.readouterr().err


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FUSIBLE_CACHE_DIR", str(tmp_path / "kernels"))
    kernel_cache.cache_clear()
    yield
    kernel_cache.cache_clear()


@pytest.mark.usefixtures("own_cache")
def test_cache_tells_what_is_kept_and_removes_it(capsys: pytest.CaptureFixture[str]) -> None:
    kernel_cache().find("ab" * 32, lambda: b"code")

    assert json.loads(printed_by(capsys, "cache", "--json"))["kernels"] == 1
    assert "kernels   0, 0.0 MB" in printed_by(capsys, "cache", "--clear")
    assert not kernel_cache().sizes()


@pytest.mark.usefixtures("own_cache")
def test_cache_compiles_the_functions_of_a_module(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = list[str]()
    monkeypatch.setattr(ahead, "compiled", lambda sources, architecture: texts.extend(sources))
    monkeypatch.setattr(ahead, "is_built", lambda: False)

    assert "compiled  2, or found" in printed_by(capsys, "cache", "--compile", f"{__name__}:ACTIVATION")
    assert ["pointwise_forward" in text for text in texts] == [True, False]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("nonsense", "expected MODULE:NAME, got 'nonsense'"),
        ("nosuch:name", "'nosuch:name' cannot be imported: No module named 'nosuch'; PYTHONPATH names the folders"),
        ("torch:nosuch", "'torch:nosuch' cannot be imported: module 'torch' has no attribute 'nosuch'"),
        ("torch:float32", "'torch:float32' is no function without arguments: torch.float32 is not a callable object"),
        ("torch:tensor", "'torch:tensor' is no function without arguments: "),
        ("pathlib:Path", "'pathlib:Path' returns a PosixPath, which is no module"),
        ("torch.nn:ReLU", "'torch.nn:ReLU' has no Pointwise"),
        (f"{__name__}:BESSEL", "Pointwise: special_i0: kernels do not know i0"),
    ],
)
def test_what_cannot_be_compiled_ahead_is_refused_in_words(
    asked: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cache", "--compile", asked])
    assert f"argument --compile: {why}" in capsys.readouterr().err


def test_a_function_that_kernels_do_not_know_is_not_compiled() -> None:
    with pytest.raises(ValueError, match="kernels do not know"):
        fusible.Pointwise(torch.special.i0).compile_kernels()
