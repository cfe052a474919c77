"""Containers and functions that are drawn, under ``config(backend="triton")`` in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import triton_interpreter
from checks import fused
from checks.functions import op_of, random_function
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from test_properties import ROWS, E, chains, value_for
from torch import Tensor

from fusible import Op, Sequential, config
from fusible.ops.kernels.triton.installed import NAME
from fusible.ops.kernels.triton.shape import ProgramTile

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which computes rows of no group, too

TILE = ProgramTile(16, 32, 16, 4, 2, strip=2)


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    with triton_interpreter.interpreted() as launch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "tile_of", lambda problem: TILE)
        yield


@pytest.mark.parametrize("number", range(5))
def test_containers_give_what_the_loop_gives_in_float64(number: int) -> None:
    sizes = st.lists(st.integers(0, 3), min_size=E, max_size=E).filter(lambda n: sum(n) <= ROWS)
    drawn = settings(max_examples=5, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    seed(number)(drawn(given(chain=chains(), sizes=sizes)(check_container)))()


def check_container(chain: tuple[list[Op], int], sizes: list[int]) -> None:
    ops, width = chain
    x, valid, splits = torch.randn(ROWS, width), sum(sizes), torch.tensor(sizes)
    exact, keywords, y = list[Tensor](), list[dict[str, Tensor]](), x.double()
    for op in ops:
        keywords.append({name: value_for(name, y, splits) for name, k in op.keywords.items() if k.required})
        y = op(y, **keywords[-1])
    dy = torch.randn_like(y)
    dy[valid:] = 0
    exact = results(Sequential(*ops), x.double(), keywords, dy)
    with config(backend=NAME):
        found = results(Sequential(*[deepcopy(op).float() for op in ops]), x, keywords, dy)

    for a, b in zip(found, exact, strict=True):
        a, b = (a[:valid], b[:valid]) if a.dim() and a.shape[0] == ROWS else (a, b)
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def results(model: Sequential, x: Tensor, keywords: list[dict[str, Tensor]], dy: Tensor) -> list[Tensor]:
    """The output and all gradients, in the dtype of ``x``."""
    x = x.clone().requires_grad_()
    given = [{name: like(value, x) for name, value in each.items()} for each in keywords]
    y = model(x, op_kwargs={i: each for i, each in enumerate(given) if each})
    leaves = [x, *model.parameters(), *(v for each in given for v in each.values() if v.requires_grad)]
    if not y.requires_grad:
        return [y]
    return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype), allow_unused=True, materialize_grads=True)]


def like(value: Tensor, x: Tensor) -> Tensor:
    return value.detach().to(x.dtype).requires_grad_() if value.is_floating_point() else value


@pytest.mark.parametrize("number", range(12))
def test_functions(number: int) -> None:
    function, count = random_function(number)
    form: dict[str, Any] = {"sizes": (2, 0, 3), "features": 8, "columns": 12, "tail": 3, "backend": NAME}
    case = fused.case_of(op_of(function, count), function, dtype=torch.float32, **form)
    fused.check_forward("cpu", case, alone=False)
    fused.check_backward("cpu", case)
