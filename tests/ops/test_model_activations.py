"""The activations of models in the wild: every one of transformers without parameters is read as a program."""

from __future__ import annotations

import pytest
import torch
from checks import fused

from fusible import Pointwise
from fusible.ops.kernels.extension import is_built

activations = pytest.importorskip("transformers.activations")
OF_PARAMETERS = {"prelu", "xielu"}
NAMES = sorted(activations.ACT2FN.keys() - OF_PARAMETERS)


@pytest.mark.parametrize("name", NAMES)
def test_the_program_is_the_activation(name: str) -> None:
    act = activations.ACT2FN[name]
    op = Pointwise(act)
    assert op.program is not None, op.refusal
    inputs = (4 * torch.randn(64, 8, dtype=torch.float64)).requires_grad_()
    other, dy = inputs.detach().clone().requires_grad_(), torch.randn(64, 8, dtype=torch.float64)
    results = [(y, *torch.autograd.grad(y, x, dy)) for x, y in ((inputs, op(inputs)), (other, act(other)))]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.cuda
@pytest.mark.skipif(not is_built(), reason="the extension is not built")
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_compute_the_activation(name: str) -> None:
    act = activations.ACT2FN[name]
    case = fused.case_of(Pointwise(act), act)
    fused.check_forward("cuda", case)
    fused.check_backward("cuda", case)
