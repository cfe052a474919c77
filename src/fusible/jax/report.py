"""What runs in this process, and why."""

from __future__ import annotations

from typing import Any

import jax

from . import dispatch, extension

VERIFIED = "on an H200 under jax 0.11.2 (2026-11-23, commit 4c1d1b4), and on CPUs by the sources of the kernels"
"""Where the tests of the custom calls have passed."""


def info() -> dict[str, Any]:
    """What is here: versions, the devices that jax sees, and why jax's own products run, if they do.

    Returns:
        ``jax``; ``ffi_api``, the version of XLA's foreign function interface of jaxlib; ``handlers_api``, that of our
        handlers, None where they cannot be used; ``targets``, their names in compiled programs; ``devices``;
        ``fallback``, the reason why ``jax.lax.ragged_dot`` runs, or None where kernels do; ``verified``, where the
        custom calls have been tested.
    """
    usable = extension.unavailable() is None
    return {
        "jax": jax.__version__,
        "ffi_api": str(extension.jaxlib_version()),
        "handlers_api": str(extension.Version(*extension.kernels().library.XLA_FFI_API)) if usable else None,
        "targets": targets() if usable else [],
        "devices": [str(device.device_kind) for device in jax.devices()],
        "fallback": dispatch.device_refusal(),
        "verified": VERIFIED,
    }


def targets() -> list[str]:
    """What our custom calls are called in compiled programs; for ``jax.export``, which asks for them by name."""
    kernels = extension.kernels()
    return [kernels.target(name) for name in kernels.library.xla_handlers()]
