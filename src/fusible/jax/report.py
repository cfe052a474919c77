"""A report on what runs in this process, and why."""

from __future__ import annotations

import jax

from . import dispatch, extension

VERIFIED = "on an H200 under jax 0.11.2 (2026-11-23, commit 4c1d1b4), and on CPUs by the sources of the kernels"
"""Where the tests of the custom calls have passed."""


def info() -> dict[str, object]:
    """Reports versions, the devices that jax sees, and the reason if jax's own products run.

    Returns:
        ``jax``; ``ffi_api``, jaxlib's version of XLA's foreign function interface; ``handlers_api``, the version of our
        handlers, None if they cannot be used; ``targets``, their names in compiled programs; ``devices``;
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
    """The names of our custom calls in compiled programs; ``jax.export`` asks for them."""
    kernels = extension.kernels()
    return [kernels.target(name) for name in kernels.library.xla_handlers()]
