"""Everything that the documentation shows runs: code blocks, drawings, examples, docstrings, and links."""

from __future__ import annotations

import argparse
import ast
import doctest
import importlib
import pkgutil
import re
import runpy
import shlex
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from absent import triton_if_missing

import fusible
from fusible.benchmarks import measured_plot

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "api"  # made from docstrings
PAGES = [
    "README.md",
    *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent != REFERENCE),
]
LAB = "docs/lab/"  # holds what older commits did
WITHOUT_CODE = {
    *(page for page in PAGES if re.match(r"docs/(decisions|lab)/", page)),
    *(
        f"docs/{name}.md"
        for name in (
            "adding",
            "architecture",
            "benchmarks",
            "exchange",
            "glossary",
            "index",
            "install",
            "kernels",
            "measured",
            "roadmap",
            "support",
        )
    ),
}
FRAMEWORKS = ("transformers", "peft", "torchtitan", "megatron", "jax")  # which may be missing
EXAMPLES = ["moe_layer", "custom_fusion", "torchtitan_experts", "megatron_experts"]


@pytest.fixture(scope="module", autouse=True)
def megatron_has_warned() -> None:
    """Imports Megatron-Core, if it is there, since it and what it compiles warn the first time."""
    if "megatron" not in absent():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("megatron.core.transformer.moe.token_dispatcher")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def absent() -> list[str]:
    """The frameworks that cannot be imported."""
    return [name for name in FRAMEWORKS if find_spec(name) is None]


def builds_from_ops() -> bool:
    """Whether Megatron-Core's experts are built from ops, which its release 0.16 does not know."""
    core = find_spec("megatron.core") if find_spec("megatron") else None
    if core is None or core.origin is None:
        return False
    return "_make_fused_ops" in (Path(core.origin).parent / "transformer" / "moe" / "experts.py").read_text()


def missing(block: str) -> list[str]:
    """The modules that a block imports, or that its calls import, and that are not installed."""
    found = {name: rf"^ *(import|from) (fusible\.integrations(\.| import ))?{name}(_\w+)?\b" for name in absent()}
    imported = [name for name, pattern in found.items() if re.search(pattern, block, re.M)]
    unbuilt = "transformer_engine.install(" in block and not builds_from_ops()
    trains = "Trainer(" in block and find_spec("accelerate") is None
    return imported + ["accelerate"] * trains + ["ops in megatron's experts"] * unbuilt


def can_run(block: str) -> bool:
    """Whether what a block imports is there."""
    return not missing(block)


def run_page(page: str) -> dict[str, Any]:
    """Runs the Python blocks of a page that can run, one after the other, in one namespace."""
    torch._dynamo.reset()  # a page counts what it compiles itself, not what tests before it have compiled
    names: dict[str, Any] = {"__name__": page}
    with triton_if_missing() if page == "docs/torchtitan.md" else nullcontext():
        for block in filter(can_run, blocks(page, "python")):
            exec(compile(block, page, "exec"), names)
    return names


def test_pages_without_code_are_those_that_are_known() -> None:
    assert {page for page in PAGES if not blocks(page, "python")} == WITHOUT_CODE
    assert {page for page in PAGES if "```py" in (ROOT / page).read_text()} == set(PAGES) - WITHOUT_CODE


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
"""What ``torchrun`` sets, for the only process."""
OF_RANKS = ("docs/expert_parallel.md", "docs/fsdp.md", "docs/hosts.md", "docs/train.md")


@pytest.mark.parametrize("page", [page for page in PAGES if page not in WITHOUT_CODE])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_code_of_page_runs(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if page == "docs/jax.md":
        pytest.importorskip("jax", reason="jax is not installed")
    for variable in TORCHRUN if page in OF_RANKS else ():
        monkeypatch.setenv(variable, TORCHRUN[variable])
    monkeypatch.chdir(tmp_path)  # where a page saves
    names, ran = run_page(page), any(map(can_run, blocks(page, "python")))

    ours = [v is fusible or str(getattr(v, "__module__", "")).startswith("fusible.") for v in names.values()]
    assert any(ours) or not ran
    absent = {name for block in blocks(page, "python") for name in missing(block)}
    if absent:
        pytest.skip(f"the rest needs {', '.join(sorted(absent))}, not installed")


def test_quickstart_prints_the_fused_plan(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("docs/moe.md")
    printed = capsys.readouterr().out

    assert re.search(r"GroupedMLP +0 1 2 3 +taken", printed)
    assert names["x"].grad is not None
    assert names["probabilities"].grad is not None


def test_drawing_in_the_docs_is_what_explain_draws(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("docs/debugging.md")
    drawn = names["layer"].explain(names["x"].detach(), **names["call"]).to_mermaid()

    assert blocks("docs/debugging.md", "mermaid") == [drawn + "\n"]


def test_readme_shows_the_commands_that_there_are() -> None:
    readme, makefile = ((ROOT / name).read_text() for name in ("README.md", "Makefile"))
    targets = re.findall(r"^    make ([a-z-]+) +# ", readme, re.MULTILINE)

    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


COMMAND = r"(?:python -m fusible[.\w]*|fusible(?= [a-z]))"
PLACEHOLDERS = {"--preset …": "--preset qwen3", "--tokens …": "--tokens 8", "--device cuda": "--device cpu"}


def commands(page: str) -> list[list[str]]:
    """The commands of the package that a page shows in a line of text or in a block."""
    text = (ROOT / page).read_text()
    lines = [*re.findall(rf"`({COMMAND}[^`]*)`", text), *re.findall(rf"^    ({COMMAND} .*)$", text, re.MULTILINE)]
    for words, instead in PLACEHOLDERS.items():
        lines = [line.replace(words, instead) for line in lines]
    return [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]


class UnderstoodError(Exception):
    """A parser has read all that a command says."""


@pytest.fixture
def only_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a command behind its last parser."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, *args: Any) -> Any:
        arguments = parse_args(parser, *args)
        if parser.prog in ("fusible", "fusible bench"):  # which leave the rest to another
            return arguments
        raise UnderstoodError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)


@pytest.mark.usefixtures("only_parsing")
@pytest.mark.parametrize("page", [p for p in PAGES if not p.startswith(LAB) and commands(p)])
def test_commands_of_a_page_are_understood(page: str) -> None:
    for words in commands(page):
        name, arguments = ("fusible", words[1:]) if words[0] == "fusible" else (words[2], words[3:])
        if "jax" in name and "jax" in absent():
            continue
        module = importlib.import_module("fusible.__main__" if name == "fusible" else name)
        if hasattr(module, "main") and arguments != ["--help"]:
            with pytest.raises(UnderstoodError):
                module.main(arguments)


def test_ci_runs_the_tests_by_the_command_for_contributors() -> None:
    page, ci = ((ROOT / name).read_text() for name in ("CONTRIBUTING.md", ".ci/run"))

    assert re.search(r"make test-all +# all tests that need no GPU; CI runs a sixteenth", page)
    assert re.search(r"^make test-all ", ci, re.MULTILINE)


def measured_speeds() -> dict[str, dict[str, float]]:
    return measured_plot.speeds((ROOT / "docs" / "measured.md").read_text())


def test_the_plot_shows_what_was_measured() -> None:
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", (ROOT / "docs" / "plots" / "experts.svg").read_text())
    speeds = measured_speeds().values()
    labels = [f"{s[name]:.3g}" for name in measured_plot.LABELS.values() for s in speeds if name in s]

    assert len(measured_speeds()) == 5
    assert [text for text in texts if text in labels] == labels


def test_the_plot_is_drawn_from_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, drawing = tmp_path / "page.md", tmp_path / "drawing.svg"
    row = "| {} | 1.0 | 123 |"
    rows = "\n".join(row.format(name) for name in measured_plot.LABELS)
    page.write_text(
        f"# x\n\n## Experts on the GPU\n\n### A, 8k tokens: E\n\n| | ms | TFLOP/s |\n|-|-|-|\n{rows}\n\n## y\n"
    )
    measured_plot.main([str(page), str(drawing)])

    assert drawing.read_text().count(">123<") == len(measured_plot.LABELS)


def test_the_factors_of_the_readme_are_those_of_the_tables() -> None:
    page = (ROOT / "docs" / "measured.md").read_text()
    both = [
        {row[""]: float(row["both, ms"]) for row in rows}
        for _, rows in measured_plot.tables(page, "Experts on the GPU")
    ]
    factors = [times["grouped_mm+compile"] / times["fused"] for times in both]
    said = re.search(r"([\d.]+) × \(Mixtral\) to ([\d.]+) × \(Qwen3-30B-A3B", (ROOT / "README.md").read_text())

    assert said is not None
    assert [f"{min(factors):.2f}", f"{max(factors):.2f}"] == [*said.groups()]


def test_the_megabytes_are_those_of_the_tables() -> None:
    numbers = re.findall(r"\d+(?:\.\d+)?", (ROOT / "docs" / "measured.md").read_text())
    measured = {str(int(float(number) + 0.5)) for number in numbers}
    rows = re.findall(r"^\|[^|]*\|((?: \d+ \|){4,})$", (ROOT / "docs" / "memory.md").read_text(), re.MULTILINE)
    said = [number for row in rows for number in re.findall(r"\d+", row)]

    assert len(said) == 4 * 5
    assert [number for number in said if number not in measured] == []


def test_plugin_of_the_docs_is_short_and_changes_nothing() -> None:
    block = next(block for block in blocks("docs/plugins.md", "python") if "class LinearReLU" in block)
    names = run_page("docs/plugins.md")
    x = names["torch"].randn(4, 8)
    fused = names["model"](x)

    assert len([line for line in block.splitlines() if line.strip()]) <= 35
    with fusible.config(disable_fusions={"LinearReLU"}):
        assert names["torch"].equal(names["model"](x), fused)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    broken = [link for link in links if "://" not in link and not ((ROOT / page).parent / link).exists()]

    assert broken == []


def slug(heading: str) -> str:
    """The anchor that Python-Markdown gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)).strip().lower())


@pytest.mark.parametrize("page", PAGES)
def test_anchors_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^):]*\.md)?#([^)]+)\)", (ROOT / page).read_text())
    broken = []
    for target, anchor in links:
        text = ((ROOT / page).parent / target if target else ROOT / page).read_text()
        if anchor not in {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}:
            broken.append(f"{target}#{anchor}")

    assert broken == []


GUIDES = re.findall(r"^ {2,6}- .+: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text().split("- API:")[0], re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}" for name in GUIDES)])
def test_guides_are_short_and_their_code_is_narrow(page: str) -> None:
    """The site shows 80 columns of a block of code without a scroll bar."""
    text = (ROOT / page).read_text()
    fenced = re.findall(r"^```(?:python|bash|toml)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    code = [*"".join(fenced).splitlines(), *re.findall(r"^    (.*)$", text, re.MULTILINE)]

    assert len(text.splitlines()) <= 150
    assert [line for line in code if len(line) > 80] == []


@pytest.mark.parametrize("page", [f"docs/{name}" for name in GUIDES if name not in ("index.md", "install.md")])
def test_guides_begin_with_what_to_write(page: str) -> None:
    """A table of what a reader has, wants or asks comes before the first heading of a section."""
    begins = (ROOT / page).read_text().split("\n## ")[0]

    assert re.search(r"^\| (you have|you want|question|recipe)\b", begins, re.MULTILINE)


def test_the_docs_are_read_in_an_afternoon() -> None:
    """Without the lab book, which is looked up."""
    assert sum(len(p.read_text().split()) for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "lab") <= 40_000


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/adding.md", "docs/kernels.md"])
def test_files_that_inside_pages_name_exist(page: str) -> None:
    tops = "benchmarks|csrc|docs|fuser|integrations|ops|src|tests"
    named = re.findall(rf"(?<![\w/.])((?:{tops})/[\w/]+\.\w+)", (ROOT / page).read_text())

    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")

    assert "taken" in capsys.readouterr().out


def test_own_op_pattern_and_fused_op_take_under_40_lines() -> None:
    tree = ast.parse((ROOT / "examples" / "custom_fusion.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    assert (classes["BiasSoftcap"].end_lineno or 0) - classes["Softcap"].lineno < 40


@pytest.mark.parametrize("grad", ["x", "weight"])
def test_own_fusions_change_nothing(grad: str) -> None:
    names = runpy.run_path(str(ROOT / "examples" / "custom_fusion.py"))
    torch, model = (
        names["torch"],
        fusible.Sequential(
            names["MakeExtraOutput"]("residual"),
            names["Linear"](8, 8, bias=False),
            names["AddExtraInput"]("residual"),
            names["Bias"](8),
            names["Softcap"](2.0),
        ).double(),
    )
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    wanted = x if grad == "x" else model[1].weight
    fused, fused_grad = model(x), torch.autograd.grad(model(x).square().sum(), wanted)[0]

    assert [step.name for step in model.explain().steps] == ["ResidualLinear", "BiasSoftcap"]
    with fusible.config(disable_fusions={"ResidualLinear", "BiasSoftcap", "PointwiseChain"}):
        assert len(model.explain(x).steps) == 5
        torch.testing.assert_close(fused, model(x))
        torch.testing.assert_close(fused_grad, torch.autograd.grad(model(x).square().sum(), wanted)[0])


def modules() -> list[str]:
    packages = [importlib.import_module(f"fusible.{name}") for name in ("fuser", "ops", "integrations")]
    found = (m.name for p in packages for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}."))
    unusable = [*absent(), *["torchtitan"] * (find_spec("triton") is None)]  # torchtitan imports Triton
    left_out = re.compile(rf"(\b_C|\btriton\.device\.\w+|\bintegrations\.({'|'.join(unusable) or '-'})(_\w+)?)$")
    return ["fusible", *(name for name in found if not left_out.search(name))]


def test_docstrings_run() -> None:
    results = [doctest.testmod(importlib.import_module(name)) for name in modules()]

    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0
