"""What every test starts from: one seed, and the fusions of the package alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from emulation import build, harness

from fusible.fuser import registry

pytest.register_assert_rewrite("checks")

if "PYTEST_XDIST_WORKER" in os.environ:
    # a dozen workers with a thread a core each wait for one another: the GPU's suite took over ten minutes, not two
    torch.set_num_threads(1)


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
