"""Builds csrc for the CPU: g++ compiles the kernel sources against headers that emulate what is PTX.

Three pieces of syntax are rewritten in a copy, because no macro can express them: launches, shared variables and grid
constants.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "emulation"
HEADERS = HERE / "headers.h"
XLA_HEADERS = ROOT / "third_party" / "xla_ffi"
EMULATED = {path.relative_to(HERE / "include") for path in (HERE / "include").rglob("*.*h")}
FLAGS = [
    "-std=c++20",
    "-fPIC",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fmax-errors=3",
    "-w",
]
LINKED = ["g++", "-shared", "-Wl,-Bsymbolic"]  # with its own CUDA runtime, not that of a torch built for CUDA


def rewrite(source: str) -> str:
    """CUDA's syntax as C++; every line stays where it is."""
    source = re.sub(
        r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];",
        r"auto* \2 = reinterpret_cast<\1*>(emulation::current->block->shared);",
        source,
    )
    source = re.sub(r"__shared__ ([^;]+);", shared_variable, source)
    if "<<<" not in source:  # launched by its address, which does not tell the size of its parameter
        source = re.sub(r"const __grid_constant__ ([\w:<> ]+) (\w+)", r"const \1& \2", source)
    launch = re.compile(r"([\w:]+(?:<[^<>()]*>)?)(\s*)<<<(.*?)>>>\((.*?)\);$", re.M | re.S)
    return launch.sub(r"emulation::launch(\3, [&] {\2 \1(\4); });", source)


def shared_variable(match: re.Match[str]) -> str:
    """`__shared__ float x[2], y;` as references to the members of a structure that every block has once."""
    names = [re.sub(r"\[.*", "", part).split()[-1] for part in split_declarators(match[1])]
    kind = "Shared_" + "_".join(names)
    return f"struct {kind} {{ {match[1]}; }}; auto& [{', '.join(names)}] = emulation::shared_variable<{kind}>();"


def split_declarators(text: str) -> list[str]:
    """Parts between commas outside of brackets."""
    return re.split(r",(?![^<\[]*[>\]])", text)


def find_cuda() -> Path | None:
    """The folder of cuda_bf16.h, if there is one."""
    nvcc = shutil.which("nvcc")
    homes = [Path("/usr/local/cuda")] + ([Path(nvcc).resolve().parents[1]] if nvcc else [])
    return next((home / "include" for home in homes if (home / "include" / "cuda_bf16.h").exists()), None)


def missing() -> str | None:
    """Why the emulation cannot be built here, if it cannot."""
    if shutil.which("g++") is None:
        return "no g++"
    return None if find_cuda() else "no CUDA headers"


def copy_sources(csrc: Path, to: Path) -> list[Path]:
    """Rewritten sources, without the headers that are emulated; returns those to compile.

    A copy that is there stays: another process may be compiling from it.
    """
    if not to.exists():
        unfinished = to.with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        for path in sorted(csrc.rglob("*.*")):
            if path.relative_to(csrc) in EMULATED:
                continue
            target = unfinished / path.relative_to(csrc)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(rewrite(path.read_text()))
        unfinished.rename(to)
    return sorted([*to.rglob("*.cu"), *to.rglob("*.cpp")])


def digest(paths: list[Path], seed: str = "") -> str:
    """A digest of names and contents."""
    total = hashlib.sha256(seed.encode())
    for path in paths:
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()[:16]


def command(source: Path, target: Path, includes: list[str]) -> list[str]:
    """How a source is compiled. The emulation itself has -O3, for its products. Kernels have -Og: they compile in two
    thirds of the time of -O1, and their tests take no longer.
    """
    is_ours = source.parent == HERE and source.suffix == ".cpp"
    before = [] if source == HEADERS else ["-include", "cuda_language.h" if is_ours else HEADERS.name]
    language = "c++-header" if source == HEADERS else "c++"
    level = "-O3" if is_ours else "-Og"
    return ["g++", *FLAGS, level, *includes, *before, "-x", language, "-c", str(source), "-o", str(target)]


class Includes(NamedTuple):
    """Where g++ looks for headers: options, and what names their contents."""

    folders: list[str]
    seed: str


@cache
def _includes(copy: Path) -> Includes:
    """For the sources of a copy, whose headers are read once."""
    folders = [f"-I{HERE / 'include'}", f"-I{copy}", f"-I{HERE}", f"-isystem{find_cuda()}"]
    headers = [path for folder in (HERE, copy) for path in sorted(folder.rglob("*.*h"))]
    seed = digest(headers, " ".join(command(HEADERS, BUILD, folders[:1])))
    return Includes([f"-I{precompiled(folders, seed)}", *folders], seed)


def precompiled(includes: list[str], seed: str) -> Path:
    """The folder of the headers as g++ keeps them, which it prefers to the text where the folder is searched first."""
    target = BUILD / f"headers_{seed}" / f"{HEADERS.name}.gch"
    target.parent.mkdir(exist_ok=True)
    if not target.exists():
        unfinished = target.with_suffix(".new")
        subprocess.run(command(HEADERS, unfinished, includes), check=True)
        unfinished.rename(target)
    return target.parent


def build(csrc: Path = ROOT / "csrc", workers: int = 2, show: Callable[[str], None] = lambda line: None) -> Path:
    """Path of the extension module `_C`, compiled if it is not up to date; by one process at a time.

    Args:
        show: gets a line about each source that is compiled.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(csrc, workers, show)


def _copy(csrc: Path) -> Path:
    """The folder of the rewritten sources, named after them and after what rewrites them."""
    return BUILD / ("csrc_" + digest(sorted([*csrc.rglob("*.*"), *HERE.rglob("*.*h"), Path(__file__)])))


def build_function(text: str, module: Path, csrc: Path = ROOT / "csrc") -> Path:
    """Path of a library made of a source that the extension would compile when the program runs.

    Args:
        module: the emulated extension, whose memory and threads a kernel shares.
    """
    target = BUILD / f"function_{digest([module], text)}.so"
    if target.exists():
        return target
    with TemporaryDirectory(dir=BUILD) as own:  # another process may be compiling the same source
        source, unfinished = Path(own, "function.cpp"), Path(own, target.name)
        source.write_text(rewrite(text))
        line = ["g++", *FLAGS, "-Og", "-shared", *_includes(_copy(csrc)).folders, "-include", HEADERS.name, str(source)]
        subprocess.run([*line, str(module), f"-Wl,-rpath,{BUILD}", "-o", str(unfinished)], check=True)
        unfinished.rename(target)
    return target


def _build(csrc: Path, workers: int, show: Callable[[str], None]) -> Path:
    import pybind11

    copy = _copy(csrc)
    sources = copy_sources(csrc, copy) + sorted(HERE.glob("*.cpp"))
    folders, seed = _includes(copy)
    folders = [
        *folders,
        f"-I{sysconfig.get_paths()['include']}",
        f"-I{pybind11.get_include()}",
        f"-isystem{XLA_HEADERS}",
    ]
    objects = {source: BUILD / f"{source.stem}_{digest([source], seed)}.o" for source in sources}
    stale = {source: command(source, target, folders) for source, target in objects.items() if not target.exists()}
    with ThreadPoolExecutor(workers) as pool:
        done = pool.map(lambda line: subprocess.run(line, check=True), stale.values())
        for i, (source, _) in enumerate(zip(stale, done, strict=True), 1):
            show(f"emulation of the kernels: [{i}/{len(stale)}] g++ {source.name}")
    module = BUILD / f"_C_{digest(list(objects.values()), ' '.join(LINKED))}.so"
    if not module.exists():
        subprocess.run([*LINKED, *map(str, objects.values()), "-o", str(module)], check=True)
    return module


def main() -> None:
    """Builds, and shows how far it is; pytest would hide that."""
    reason = missing()
    print(f"no emulation of the kernels: {reason}" if reason else build(show=partial(print, flush=True)))


if __name__ == "__main__":
    main()
