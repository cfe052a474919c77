"""nvcc as a compiler of kernels while a program runs. It takes longer than NVRTC, and needs a host compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from .compiler import raise_for

_OPTIONS = ("-std=c++20", "-cubin", "-Xptxas", "-v")


class Nvcc:
    """nvcc of one path, as a :class:`Compiler`. It reads CUDA's headers, and ours from a folder of this process."""

    def __init__(self, path: str, release: str) -> None:
        self._path = path
        self.version: tuple[str, ...] = "nvcc", release, *_OPTIONS

    def compile(self, source: str, headers: Mapping[str, str], architecture: str) -> bytes:
        """See :meth:`Compiler.compile`."""
        with TemporaryDirectory(prefix="fusible-") as name:
            folder = Path(name)
            for path, text in {"kernel.cu": source, **headers}.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
            command = [self._path, f"-arch={architecture}", *_OPTIONS, "-I.", "kernel.cu", "-o", "kernel.cubin"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            raise_for(done.returncode != 0, done.stdout + done.stderr)
            return (folder / "kernel.cubin").read_bytes()


def find() -> Nvcc | None:
    """The nvcc of CUDA_HOME, else of PATH, if it runs."""
    home = os.environ.get("CUDA_HOME")
    path = shutil.which(os.path.join(home, "bin", "nvcc") if home else "nvcc")
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release (\S+),", done.stdout)
    return Nvcc(path, release[1]) if release else None
