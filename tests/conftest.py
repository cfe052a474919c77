"""What every test starts from: one seed, and the fusions of the package alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from emulation import build, harness

from fusible.fuser import registry


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _restored_registry() -> Iterator[None]:
    with registry.restored():
        yield


@pytest.fixture(scope="module")
def emulation() -> Iterator[harness.Emulation]:
    """Our kernels on tensors of the CPU, for all tests of a module; where :func:`build.missing` says nothing."""
    emulation = harness.Emulation(build.build())
    with harness.installed(emulation):
        yield emulation
