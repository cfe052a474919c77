"""The compiled extension without torch: whether it is usable, and its handlers, registered with jax once."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax

from .. import installation

HOPPER = "9.0"
_NAME = "fusible.ops._C"


class Version(NamedTuple):
    """The version of XLA's foreign function interface."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class Kernels(NamedTuple):
    """The extension, and the platform of jax whose devices its handlers launch on."""

    library: ModuleType
    platform: str

    def target(self, name: str) -> str:
        """The name of a handler in compiled programs. It has a version number because programs store it."""
        return f"fusible_{name}_v1"


@cache
def kernels() -> Kernels:
    """The extension, its handlers registered.

    Raises:
        ImportError: it cannot be used here; the message says why.
    """
    loaded = Kernels(_load(), "cuda")
    if (why := version_refusal(Version(*loaded.library.XLA_FFI_API), jaxlib_version())) is not None:
        raise ImportError(why)
    register(loaded)
    return loaded


def register(loaded: Kernels) -> None:
    """Registers the handlers with XLA, each once: XLA refuses to register a name again with another address."""
    platform = "CUDA" if loaded.platform == "cuda" else loaded.platform
    for name, handler in loaded.library.xla_handlers().items():
        jax.ffi.register_ffi_target(loaded.target(name), handler, platform=platform)


def version_refusal(handlers: Version, jaxlib: Version) -> str | None:
    """The reason why jaxlib would refuse the handlers, or None. A refused handler would break later calls of jax."""
    if handlers.major == jaxlib.major and handlers.minor <= jaxlib.minor:
        return None
    return (
        f"is built for version {handlers} of XLA's foreign function interface, and jaxlib has {jaxlib}; "
        "install a newer jaxlib"
    )


@cache
def jaxlib_version() -> Version:
    """The version in the headers of the installed jaxlib; -1 if it is not found."""
    text = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    numbers = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    major, minor = (int(number[1]) if number else -1 for number in numbers)
    return Version(major, minor)


@cache
def unavailable() -> str | None:
    """The reason why the extension cannot be used with this jax on any device, or None."""
    try:
        kernels()
    except Exception as error:
        return str(error)
    return None


def device_refusal() -> str | None:
    """The reason why some GPU of the process cannot run the kernels, or None."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return "needs a CUDA device, and jax sees none"
    others = {str(device.compute_capability) for device in devices} - {HOPPER}
    return f"needs GPUs of compute capability {HOPPER}, got {', '.join(sorted(others))}" if others else None


def _load() -> ModuleType:
    """Loads the module by its path, as importing its package would import torch; torch then shares it."""
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    files = [installation.FOLDER / "ops" / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((file for file in files if file.exists()), None)
    if path is None:
        raise ImportError(f"is not built ({installation.left_out_reason()})")
    spec = spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return sys.modules.setdefault(_NAME, module)
