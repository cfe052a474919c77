"""A folder in the layout of Hugging Face's `kernels`, made of wheels: dist/kernel/build/<variant>/fusible.

Run it with ``python .ci/kernel_folder.py dist COMMIT``. A variant serves every version of torch, as the extension
contains none. ``torch-cuda`` has the extension of every wheel, one for each Python; ``torch-cpu`` has none.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sys
import zipfile
from pathlib import Path

NAME, LICENSE = "fusible", "apache-2.0"
MAJOR = 0  # by the convention of the Hub, while the API may change
EXTENSION = "fusible/ops/_C."
ENTRY = '''"""fusible from the Hub: loading it makes "fusible" an experts implementation of transformers.

The package has its own name, and not one of the Hub's: the names of its ops and of "fusible" exist once in a process.
A fusible that is imported already is used.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
try:
    import fusible
finally:
    sys.path.pop(0)

__all__ = fusible.__all__


def __getattr__(name):
    return getattr(fusible, name)
'''
CARD = """---
license: apache-2.0
tags: [kernels]
---
# fusible

A fused mixture-of-experts layer on its own kernels for Hopper GPUs.

    from kernels import get_kernel

    get_kernel("OWNER/fusible", version={major}, trust_remote_code=True)  # registers "fusible"
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="fusible")
"""


def main(dist: Path, commit: str) -> None:
    """Writes the folder anew."""
    wheels = sorted(dist.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"no wheel in {dist}: run .ci/wheels first")
    folder = dist / "kernel"
    shutil.rmtree(folder, ignore_errors=True)
    for backend in ("cuda", "cpu"):
        variant = folder / "build" / f"torch-{backend}"
        for wheel in wheels:
            unpack(wheel, variant, backend == "cuda")
        (variant / "__init__.py").write_text(ENTRY)
        (variant / "metadata.json").write_text(json.dumps(metadata(variant, backend, commit), indent=2) + "\n")
    (folder / "README.md").write_text(CARD.format(major=MAJOR))
    print(f"{folder}: {', '.join(sorted(path.name for path in (folder / 'build').iterdir()))} of {len(wheels)} wheels")


def unpack(wheel: Path, variant: Path, with_extension: bool) -> None:
    """Adds the package of a wheel to a variant."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            is_extension = name.startswith(EXTENSION) and name.endswith(".so")
            if name.startswith(f"{NAME}/") and (with_extension or not is_extension):
                archive.extract(name, variant)


def metadata(variant: Path, backend: str, commit: str) -> dict[str, object]:
    """The facts that the Hub requires of a variant."""
    files = sorted(path for path in variant.rglob("*") if path.is_file())
    return {
        "name": NAME,
        "id": f"_{NAME}_{backend}_{commit}",
        "version": MAJOR,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": {str(f.relative_to(variant)): digest(f) for f in files}},
    }


def digest(file: Path) -> str:
    """The SHA-256 of a file in base 64."""
    return base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
