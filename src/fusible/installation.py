"""The installation: where the package was imported from, and whether it has CUDA kernels, or why not."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
NOTE = Path("ops", "left_out.txt")  # setup.py writes it where it leaves the kernels out


def left_out_reason(folder: Path = FOLDER) -> str:
    """Why the kernels of the package in this folder were not built."""
    note = folder / NOTE
    return note.read_text().strip() if note.is_file() else "nothing was built for this folder"


def missing_kernels(folder: Path = FOLDER) -> str | None:
    """The reason why the package in this folder has no working kernels, or None."""
    if find_spec("fusible.ops._C") is None:
        return f"not built ({left_out_reason(folder)})"
    try:
        from .ops import _C  # noqa: F401
    except ImportError as error:
        return f"built, but does not load ({error})"
    return None


def kernels() -> str:
    """The state of the CUDA extension in a few words."""
    missing = missing_kernels()
    if missing is not None:
        return missing
    from .ops import _C

    major, minor = divmod(_C.cuda_version() // 10, 100)
    return f"built with CUDA {major}.{minor}"
