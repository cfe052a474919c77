"""Properties of every op, fusion and backend, on a GPU. Run with ``-m cuda``."""

from __future__ import annotations

import pytest
import torch
from checks import properties

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # what the compiler itself uses
]


@pytest.mark.parametrize("cell", properties.cells("cuda"), ids=str)
def test_table(cell: properties.Cell) -> None:
    cell.check("cuda")
