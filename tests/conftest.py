"""What every test starts from: one seed, and the fusions of the package alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fusible.fuser import registry


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _restored_registry() -> Iterator[None]:
    with registry.restored():
        yield
