"""Who may import whom: the compiler knows no op, only the doors know the kernels, packages import relatively.

And which names carry nothing, so that nothing is called so.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOORS = (
    "ops/kernels/doors/inference.py",
    "ops/ep/symmetric.py",
)  # besides the files that declare kernels: theirs are no custom ops
SHARED = (
    "ops.kernels.problems.gemm",
    "ops.kernels.operators.outputs",
    "ops.kernels.operators.custom_ops",
)  # values, and what only has to be loaded

ARROWS = {  # package -> its parts, and which parts each may import; nothing stands above its row
    "fuser": {
        "contract": (),
        "runtime": ("contract",),
        "composite": ("contract", "runtime"),
        "compiler": ("contract", "runtime", "composite"),
        "replay": ("contract", "runtime", "compiler"),
        "dynamo": ("contract", "runtime", "compiler"),
        "explain": ("contract", "runtime", "compiler"),
        "container": ("contract", "runtime", "compiler", "replay", "dynamo", "explain"),
        "testing": ("contract", "runtime", "compiler", "container"),
    },
    "ops": {
        "formats": (),
        "programs": (),
        "values": ("programs",),
        "kernels": ("formats", "programs", "values"),
        "quantized": ("formats", "values", "kernels"),
        "parameters": ("formats", "values", "kernels", "quantized"),
        "basic": ("programs", "values", "kernels", "parameters"),
        "grouped": ("formats", "programs", "values", "kernels", "quantized", "parameters", "basic"),
        "modules": ("formats", "kernels", "quantized", "grouped"),
        "routed": ("values", "kernels", "basic", "grouped"),
        "layers": ("values", "parameters", "basic", "grouped", "routed"),
        "ep": ("formats", "values", "kernels", "routed"),
        "fused": ("formats", "programs", "values", "kernels", "quantized", "basic", "grouped", "routed", "ep"),
    },
    "ops/kernels": {
        "architecture": (),
        "problems": (),
        "operators": ("problems",),
        "extension": ("architecture",),
        "tensor_lists": ("extension",),
        "jit": ("problems", "extension"),
        "hopper": ("architecture", "problems", "extension", "jit"),
        "pytorch": ("architecture", "problems", "operators"),
        "triton": ("architecture", "jit", "problems", "pytorch"),
        "dispatch": ("problems",),
        "backends": ("hopper", "pytorch", "triton", "dispatch"),
        "products": ("problems", "operators", "hopper", "dispatch"),
        "__init__": (
            "problems",
            "operators",
            "extension",
            "tensor_lists",
            "jit",
            "hopper",
            "pytorch",
            "dispatch",
            "backends",
            "products",
        ),
        "doors": ("problems", "operators", "extension", "hopper", "pytorch", "dispatch", "products", "__init__"),
    },
    "integrations": {
        "on_import": (),
        "state_dicts": (),
        "exchanges": (),
        "hugging_face": (),
        "transformer_engine": (),
        "checkpoints": ("state_dicts",),
        "quantizers": ("hugging_face",),
        "routers": ("hugging_face",),
        "peft": ("hugging_face",),
        "export": ("hugging_face",),
        "transformers_ep": ("exchanges", "hugging_face"),
        "transformers": ("hugging_face", "quantizers", "transformers_ep"),
        "torchtitan": ("hugging_face",),
        "torchtitan_dispatcher": ("exchanges",),
        "megatron_dispatcher": ("exchanges", "transformer_engine"),
    },
}


@cache
def imports(path):
    """The dotted names that a file imports, relative ones resolved from the root: "ops.backends.loop"."""
    return (*names_imported(path),)


def names_imported(path):
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", files("fuser"), ids=lambda p: p.name)
def test_the_compiler_imports_no_op(path):
    forbidden = ("ops", "integrations", "fusible", "csrc", "tests")
    assert not [name for name in imports(path) if name.split(".")[0] in forbidden]


def module(path):
    """The dotted name of a file: "fuser.contract.op"; that of a package for its ``__init__``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(name, package):
    """The part of a package that a module is in; "__init__" for the package itself, None for what is elsewhere."""
    parts, above = name.split("."), package.split("/")
    if parts[: len(above)] != above:
        return None
    return parts[len(above)] if len(parts) > len(above) else "__init__"


PARTS = [(package, path) for package in ARROWS for path in files(package)]


@pytest.mark.parametrize(
    ("package", "path"), PARTS, ids=lambda p: str(p.relative_to(ROOT)) if isinstance(p, Path) else p
)
def test_parts_import_only_what_is_below_them(package, path):
    part = part_of(module(path), package)
    imported = {part_of(".".join(modules(name)), package) for name in imports(path) if name != "ops._C"} - {None, part}

    assert part == "__init__" or part in ARROWS[package], "a new part: say what it may import"
    assert imported <= set(ARROWS[package].get(part, ARROWS[package]))  # a package may import all of its parts


@pytest.mark.parametrize("package", ARROWS)
def test_every_arrow_points_to_an_earlier_row(package):
    rows = list(ARROWS[package])
    assert all(rows.index(target) < rows.index(part) for part, targets in ARROWS[package].items() for target in targets)


@pytest.mark.parametrize("package", ARROWS)
def test_every_arrow_is_drawn(package):
    """Every stated arrow is used: an arrow that nothing needs any more is removed."""
    drawn = {
        (part_of(module(path), package), part_of(".".join(modules(name)), package))
        for path in files(package)
        for name in imports(path)
    }
    stated = {(part, target) for part, targets in ARROWS[package].items() for target in targets}

    assert stated - drawn == set()


def test_no_files_import_each_other():
    """Imports inside functions count."""
    paths = files("fuser", "ops", "integrations")
    graph = {module(path): {".".join(modules(i)) for i in imports(path) if i != "ops._C"} for path in paths}

    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the files


@pytest.mark.parametrize("path", files("ops"), ids=lambda p: p.name)
def test_ops_import_no_integration(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "integrations"]


@cache
def is_door(path):
    """Whether a file is a door to kernels: it stands among the doors, or declares kernels, for itself or for others."""
    if path.parent.name == "doors":
        return True
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    decorators = [ast.unparse(decorator) for function in functions for decorator in function.decorator_list]
    return any(decorator.startswith("kernel(") for decorator in decorators)


def inside_kernels(path):
    """The modules behind doors that a file imports, but for values that all may share."""
    deep = [name for name in imports(path) if name.startswith("ops.kernels.") and len(modules(name)) > 2]
    files = {name: ROOT.joinpath(*modules(name)).with_suffix(".py") for name in deep if not name.startswith(SHARED)}
    return [name for name, file in files.items() if not file.is_file() or not is_door(file)]


def modules(name):
    """The part of a dotted name that is a module."""
    parts = name.split(".")
    return parts if is_module(*parts) else parts[:-1]


@cache
def is_module(*parts):
    path = ROOT.joinpath(*parts)
    return path.with_suffix(".py").is_file() or path.is_dir()


@pytest.mark.parametrize("name", DOORS)
def test_a_door_imports_kernels(name):
    assert inside_kernels(ROOT / name)


def is_outside(path):
    name = path.relative_to(ROOT)
    return "kernels" not in name.parts and name.as_posix() not in DOORS and not is_door(path)


OUTSIDE = [path for path in files("ops", "integrations") if is_outside(path)]


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: p.name)
def test_the_rest_sees_kernels_through_their_door(path):
    assert inside_kernels(path) == []


def test_a_file_that_declares_kernels_is_a_door(tmp_path):
    source = "from .kernels.custom_ops import kernel\n\n\n{}def pass_over_rows(x): ...\n"
    files = {name: tmp_path / f"{name}.py" for name in ("declares", "imports")}
    files["declares"].write_text(source.format("@kernel(new_rows, obeys_switches=False)\n"))
    files["imports"].write_text(source.format(""))

    assert {name: is_door(path) for name, path in files.items()} == {"declares": True, "imports": False}


@pytest.mark.parametrize("path", files("fuser", "ops", "integrations"), ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_import_relatively(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "fusible"]


PRIVATE_OF_TORCH = {  # which others may use, and why: nothing can stand in for them, and torch documents them
    "torch._check": "in its reference",
    "torch._C.DisableTorchFunctionSubclass": "in its notes on extending it",
    "torch.utils._python_dispatch.TorchDispatchMode": "the way to see operations in its notes on extending it",
}
INTERNAL_ATTRIBUTES = {"_cdata", "_dynamo_marked_constant", "_will_engine_execute_node", "_profiler_enabled"}


def private_names_of_torch(source):
    """Dotted names of torch with a part that is private, imported or read; and attributes that only torch sets."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            if node.attr in INTERNAL_ATTRIBUTES:
                yield node.attr
        else:
            continue
        yield from (name for name in names if re.match(r"torch\.(\w+\.)*_[A-Za-z]", name))


def unguarded(source):
    names = set(private_names_of_torch(source)) - PRIVATE_OF_TORCH.keys()
    return {name for name in names if not any(allowed.startswith(f"{name}.") for allowed in PRIVATE_OF_TORCH)}


@pytest.mark.parametrize("path", files("fuser", "ops", "integrations"), ids=lambda p: str(p.relative_to(ROOT)))
def test_one_module_uses_what_torch_does_not_promise(path):
    assert path.name == "torch_private.py" or not unguarded(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._decomp import table",
        "from torch.utils._python_dispatch import _disable_current_modes",
        "torch._C._will_engine_execute_node(node)",
        "tensor.untyped_storage()._cdata",
    ],
)
def test_private_names_of_torch_are_seen(source):
    assert unguarded(source)


INSIDE = files("ops/kernels")


@pytest.mark.parametrize("path", INSIDE, ids=lambda p: str(p.relative_to(ROOT / "ops/kernels")))
def test_kernels_import_no_op(path):
    allowed = (
        "ops.kernels",
        "ops.values.activation_spec",
        "ops.values.grouped_tensor",
        "ops.values.switches",
        "ops.programs",
        "ops.formats",
        "ops._C",
    )

    assert all(name.startswith(allowed) for name in imports(path) if name.startswith("ops."))


EMPTY_WORDS = frozenset(("found", "given", "halves", "how", "known", "made", "own", "place", "plain", "room", "what"))
EMPTY_ALONE = frozenset(("half", "told"))
PUBLIC_WORDS = {  # the keyword of Pointwise; the blocks of a weight of gate and up
    "benchmarks/quantize.py": {"halves"},
    "ops/values/checks.py": {"check_halves"},
    "ops/grouped/pointwise.py": {"halves"},
    "ops/kernels/problems/quantized.py": {"halves"},
    "ops/kernels/doors/quantized.py": {"halves"},
    "ops/kernels/hopper/quantize.py": {"half", "halves"},
    "ops/kernels/hopper/scaled_gemm.py": {"halves"},
    "ops/kernels/pytorch/quantize.py": {"halves"},
    "ops/kernels/pytorch/scaled_gemm.py": {"halves"},
    "ops/formats/mxfp8.py": {"halves"},
    "ops/formats/operands.py": {"halves"},
    "ops/formats/reference.py": {"halves"},
    "ops/formats/schemes.py": {"halves"},
    "ops/quantized/tensor.py": {"halves"},
}


def names_of(node):
    """The identifiers that a node binds; what others have called something is theirs."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
            yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name


def words_of(name):
    """The words of an identifier, ``in_place`` left out, which is a term."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name.replace("in_place", ""))}


def empty_words(source):
    names = {name for node in ast.walk(ast.parse(source)) for name in names_of(node)}
    return {name for name in names if words_of(name) & EMPTY_WORDS or name.strip("_").lower() in EMPTY_ALONE}


NAMED = files("fuser", "ops", "integrations", "src/fusible", "benchmarks", "examples")


@pytest.mark.parametrize("path", NAMED, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_identifier_says_something(path):
    allowed = PUBLIC_WORDS.get(path.relative_to(ROOT).as_posix(), set())

    assert empty_words(path.read_text()) <= allowed


@pytest.mark.parametrize(
    "source",
    [
        "def how(): ...",
        "def f(*given): ...",
        "class Room: ...",
        "def f(): self._known = 1",
        "[x for found in xs]",
        "PLACE: int = 1",
        "import a as plain",
        "if (made := f()): ...",
        "def note_what_is_left_out(): ...",
        "class FoundContainer: ...",
    ],
)
def test_words_that_say_nothing_are_seen_wherever_they_are_bound(source):
    assert empty_words(source)


def test_names_of_others_may_hold_such_words():
    assert not empty_words("works_in_place = x.half().to(place=0)\nf(how=room)\nknows = shown = 'what'")
