"""Builds `fusible.ops._C` with nvcc and ninja; everything else about the package stands in pyproject.toml.

FUSIBLE_BUILD_CUDA=auto (default) builds the extension where nvcc is and a Hopper GPU is visible, 0 never builds it,
1 builds it without the GPU too, and fails without nvcc. Where it is left out, a file in the package says why.
`python setup.py build_ext --inplace` rebuilds what changed (objects are kept in build/); `python setup.py kernels`
does the same and prints each source's kernels, registers, code size and compile time. Both fail on a register spill
and on any advice of ptxas against a kernel (C75xx, C76xx: wgmma made serial, setmaxnreg ignored), which cost a
multiple in speed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from setuptools import Command, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
BUILD = Path(
    "build", "cuda"
)  # ninja runs at the root with relative names, so no path of this machine enters the binary
LIBRARY = BUILD / "_C.so"  # copied to where setuptools wants it
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"
FLAGS = f"-O3 -std=c++20 {ARCHITECTURE} -Xcompiler -fPIC,-fvisibility=hidden,-Wall -Xptxas -v -Icsrc"
XLA_HEADERS = Path("third_party", "xla_ffi")
OLDEST_NVCC = (12, 4)
PACKAGES = Path("src")  # not the root, where an import would find the tree instead of what is installed
OPS = Path("fusible", "ops")
HEADERS = ("device/**/*.cuh", "kernels/**/*.cuh", "kernels/**/*.h", "fusible/*.h")  # kernels that are compiled later
NOTE = "left_out.txt"  # in the package: why it has no kernels; `fusible info` reads it


class BuildError(Exception):
    """The extension cannot be built; the message says why and what to do."""


def find_nvcc() -> str:
    """Path of nvcc, from CUDA_HOME or PATH; raises BuildError where there is none that is new enough."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which(os.path.join(home, "bin", "nvcc") if home else "nvcc")
    if nvcc is None:
        raise BuildError("no nvcc in " + (f"CUDA_HOME={home}" if home else "PATH (and CUDA_HOME is not set)"))
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None or (int(match[1]), int(match[2])) < OLDEST_NVCC:
        raise BuildError(
            f"{nvcc} is older than {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]}, the oldest release that can build them"
        )
    return nvcc


def find_ninja() -> str:
    """Path of ninja: the Python package's (a build requirement), else the one on PATH."""
    try:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        path = shutil.which("ninja")
        if path is None:
            raise BuildError("ninja is not installed (pip install ninja)") from None
        return path


def compute_capabilities() -> list[str]:
    """Those of the GPUs of this machine, as nvidia-smi says, or else torch, where it is installed."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        pass
    try:
        import torch
    except ImportError:
        return []
    devices = range(torch.cuda.device_count())
    return [".".join(map(str, torch.cuda.get_device_capability(device))) for device in devices]


@cache
def left_out() -> str | None:
    """Why the kernels are not built; None: they are. An empty FUSIBLE_BUILD_CUDA is as good as none."""
    choice = os.environ.get("FUSIBLE_BUILD_CUDA") or "auto"
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"FUSIBLE_BUILD_CUDA must be auto, 0 or 1, got {choice!r}")
    if choice == "0":
        return "FUSIBLE_BUILD_CUDA=0"
    try:
        find_nvcc()
    except BuildError as error:
        if choice == "1":
            raise SystemExit(f"FUSIBLE_BUILD_CUDA=1, but {error}") from None
        return str(error)
    capabilities = [] if choice == "1" else compute_capabilities()
    if choice == "1" or any(capability.startswith("9.") for capability in capabilities):
        return None
    seen = f"only compute capability {', '.join(capabilities)}" if capabilities else "no GPU at all"
    return f"no Hopper GPU is visible, {seen}"


def note_left_out(package: Path) -> None:
    """Says why the kernels are left out, in a line and in a file of the package. There is no file if they are built."""
    reason, note = left_out(), package / NOTE
    if reason is None:
        note.unlink(missing_ok=True)
        return
    cure = "FUSIBLE_BUILD_CUDA=1 builds them wherever nvcc is"
    print(f"fusible: CUDA kernels are not built: {reason}. {cure}.", file=sys.stderr, flush=True)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(reason + "\n")


def sources() -> list[Path]:
    """All C++ and CUDA sources, relative to the root."""
    return sorted(
        path.relative_to(ROOT) for pattern in ("csrc/**/*.cpp", "csrc/**/*.cu") for path in ROOT.glob(pattern)
    )


def object_of(source: Path) -> Path:
    """Where the object of a source lies; its log stands beside it."""
    return BUILD / source.relative_to("csrc").with_suffix(source.suffix + ".o")


def in_command(word: str) -> str:
    """A word of a command in a ninja file: quoted for the shell, then for ninja."""
    return shlex.quote(word).replace("$", "$$")


def write_ninja_file(nvcc: str) -> None:
    """One object per source and the shared library. The log of each compilation is kept: `check_kernels` reads it.

    Names of files are relative, so nothing else depends on where the checkout lies.
    """
    import pybind11

    nvcc = in_command(nvcc)
    includes = map(Path, (sysconfig.get_paths()["include"], pybind11.get_include()))
    python = " ".join(in_command(f"-I{p.relative_to(ROOT) if p.is_relative_to(ROOT) else p}") for p in includes)
    lines = [
        f"builddir = {BUILD}",
        "rule compile",
        f"  command = {nvcc} {FLAGS} $extra -MD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat $out.log; exit 1)",
        "  description = nvcc $in",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {nvcc} -shared -cudart static {ARCHITECTURE} -Xlinker --exclude-libs,ALL $in -o $out",
        "  description = link $out",
    ]
    objects = []
    for source in sources():
        lines.append(f"build {object_of(source)}: compile {source}")
        if source.name == "bindings.cpp":  # the only one that sees Python: a new environment rebuilds this object alone
            lines.append(f"  extra = {python}")
        if source.parent.name == "xla":
            lines.append(f"  extra = -isystem {XLA_HEADERS}")
        objects.append(str(object_of(source)))
    lines += [f"build {LIBRARY}: link {' '.join(objects)}", f"default {LIBRARY}", ""]
    (ROOT / BUILD).mkdir(parents=True, exist_ok=True)
    (ROOT / BUILD / "build.ninja").write_text("\n".join(lines))


@dataclass(frozen=True)
class Kernel:
    """What ptxas says about one kernel."""

    source: str
    name: str
    registers: int
    spilled: int  # bytes stored and loaded


def read_kernels() -> tuple[list[Kernel], list[str]]:
    """All kernels of the last build, and every line of advice of ptxas (C75xx, C76xx) about them."""
    kernels, advice = [], []
    for source in sources():
        name, spilled = "", 0
        for line in Path(f"{ROOT / object_of(source)}.log").read_text().splitlines():
            if match := re.search(r"Compiling entry function '(\S+)'", line):
                name, spilled = match[1], 0
            elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
                spilled = int(match[1]) + int(match[2])
            elif match := re.search(r"Used (\d+) registers", line):
                kernels.append(Kernel(str(source), name, int(match[1]), spilled))
            elif re.search(r"\bC7[56]\d\d\b", line):
                advice.append(f"{source}: {line.strip()}")
    return kernels, advice


def check_kernels() -> None:
    """Fails the build on a spill or on advice of ptxas."""
    kernels, advice = read_kernels()
    advice += [f"{k.source}: {k.name} spills {k.spilled} bytes" for k in kernels if k.spilled]
    if advice:
        raise SystemExit("ptxas is not content with the kernels:\n  " + "\n  ".join(advice))


class BuildPackage(build_py):
    """`build_py`, and a file that says why there are no kernels."""

    def run(self) -> None:
        super().run()
        note_left_out(ROOT / PACKAGES / OPS if self.editable_mode else Path(self.build_lib) / OPS)


class BuildKernels(build_ext):
    """`build_ext` through nvcc and ninja."""

    def run(self) -> None:
        super().run()
        if self.inplace:
            note_left_out(ROOT / PACKAGES / OPS)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        compile_kernels()
        check_kernels()
        shutil.copy(ROOT / LIBRARY, target)


def compile_kernels() -> None:
    """Compiles what has changed. A line for each source says how many are done, and for how many seconds."""
    write_ninja_file(find_nvcc())
    jobs = len(os.sched_getaffinity(0))
    print(
        f"fusible: compiling what has changed of {len(sources())} sources for sm_90a, {jobs} at a time, which takes "
        "minutes; FUSIBLE_BUILD_CUDA=0 leaves them out.",
        flush=True,
    )
    ninja = [find_ninja(), "-f", str(BUILD / "build.ninja"), "-j", str(jobs)]
    lines = {**os.environ, "NINJA_STATUS": "[%f/%t, %e s] ", "TERM": "dumb"}  # a line each, not one that is rewritten
    if subprocess.run(ninja, cwd=ROOT, env=lines, check=False).returncode:
        raise SystemExit("the CUDA kernels do not compile (see above); FUSIBLE_BUILD_CUDA=0 installs without them")


class ListKernels(Command):
    """`python setup.py kernels`: builds in place and prints a Markdown table of all kernels."""

    description = "build in place and print registers, code size and compile time of every kernel"
    user_options: list[tuple[str, str | None, str]] = []

    def initialize_options(self) -> None: ...
    def finalize_options(self) -> None: ...

    def run(self) -> None:
        if (reason := left_out()) is not None:
            raise SystemExit(f"there are no kernels to list: {reason}. FUSIBLE_BUILD_CUDA=1 builds them.")
        self.run_command("build_ext")
        kernels, _ = read_kernels()
        seconds = {}
        for line in (ROOT / BUILD / ".ninja_log").read_text().splitlines()[1:]:
            start, end, _, name, _ = line.split("\t")
            seconds[name] = (int(end) - int(start)) / 1000
        print("| source | kernels | registers | spills | object, KB | compile, s |\n|---|---|---|---|---|---|")
        for source in sources():
            mine = [k for k in kernels if k.source == str(source)]
            if mine:
                size = (ROOT / object_of(source)).stat().st_size // 1024
                registers = ", ".join(map(str, sorted({k.registers for k in mine})))
                time = seconds[str(object_of(source))]
                print(f"| {source} | {len(mine)} | {registers} | {sum(k.spilled for k in mine)} | {size} | {time} |")


setup(
    package_dir={"": str(PACKAGES)},
    packages=find_packages(str(PACKAGES), include=["fusible", "fusible.*"]),
    package_data={
        "fusible": ["py.typed", *(f"csrc/{headers}" for headers in HEADERS)],
        "fusible.ops": ["*.pyi"],
    },
    ext_modules=[Extension("fusible.ops._C", sources=[])] if left_out() is None else [],
    cmdclass={"build_py": BuildPackage, "build_ext": BuildKernels, "kernels": ListKernels},
)
