"""Megatron-Core's own experts and MoE layer on our ops, and names and arguments of TransformerEngine."""

from __future__ import annotations

import ast
import inspect
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import ep_world
import pytest
import torch
import triton_interpreter
from models import steps
from torch import Tensor

from fusible import config
from fusible.integrations import transformer_engine as integration

MODULE = "ep_megatron_op_cases"
WHERE = "transformer", "moe", "experts.py"
E, H, FFN, SIZES = 4, 32, 64, [6, 0, 9, 5]


def cases() -> list[str]:
    """Names of the cases, whose module is imported on the ranks alone: it stands in for TransformerEngine."""
    source = Path(ep_world.__file__).with_name(f"{MODULE}.py").read_text()
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if any(isinstance(d, ast.Name) and d.id == "case" for d in f.decorator_list)]


def with_op_fuser() -> Path:
    """The folder of a Megatron-Core whose experts are built from ops: the installed one, or that beside this Python's.

    Those releases are of Python 3.12 and newer, and run on 3.11. ``make`` puts one into ``.venv/megatron`` there.
    """
    try:
        spec = find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    installed = [] if spec is None or spec.origin is None else [Path(spec.origin).parents[2]]
    for folder in (*installed, Path(sys.prefix, "megatron")):
        experts = folder.joinpath("megatron", "core", *WHERE)
        if experts.exists() and "skip_routed_expert_padding" in experts.read_text():
            return folder
    pytest.skip("no Megatron-Core builds experts from ops here: that takes 0.18 or newer, for Python 3.12 or newer")


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The messages of the ranks on the cases."""
    paths = os.pathsep.join([str(with_op_fuser()), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, PYTHONPATH=paths):
        return ep_world.start(MODULE, 2, tmp_path_factory.mktemp("ranks"), only=ep_world.selected(request))


@pytest.mark.parametrize("case", cases())
def test_on_all_ranks(case: str, said: dict[str, list[str]]) -> None:
    ep_world.assert_passed(case, said)


# ------------------------------------------------------------------------------- without Megatron: names and arguments


def test_install_needs_experts_that_are_built_from_ops() -> None:
    module: Any = ModuleType("experts")
    module.te = SimpleNamespace()
    with pytest.raises(ImportError, match=r"experts builds no experts from TransformerEngine's ops.* from 0.18 on"):
        integration.install(module)


def test_names_and_defaults_are_transformer_engines() -> None:
    defaults = {
        name: {p.name: p.default for p in inspect.signature(getattr(integration, name)).parameters.values()}
        for name in ("GroupedLinear", "ScaledSwiGLU", "ScaledClampedQGeGLU", "ScaledSReLU")
    }

    assert defaults["GroupedLinear"]["single_grouped_weight"] is False
    assert "scale_bias" in inspect.signature(integration.GroupedLinear.__init__).parameters
    assert defaults["ScaledSwiGLU"] == {"glu_interleave_size": None, "activation_recompute_in_mlp": False}
    assert defaults["ScaledClampedQGeGLU"] == {
        "glu_interleave_size": None,
        "limit": 7.0,
        "alpha": 1.702,
        "glu_linear_offset": 1.0,
        "activation_recompute_in_mlp": False,
    }
    assert (integration.OUTPUT_BUFFER_KEY, integration.GRAD_INPUT_BUFFER_KEY) == ("output", "grad_input")


@pytest.mark.parametrize(
    ("attribute", "switch"),
    [("ep_mxfp8_carrier_input", "moe_dispatch_fwd_dtype"), ("ep_mxfp8_carrier_grad", "moe_combine_bwd_dtype")],
)
def test_dispatch_in_mxfp8_is_refused(attribute: str, switch: str) -> None:
    op = integration.GroupedLinear(E, H, FFN)
    with pytest.raises(NotImplementedError, match=f"{switch}='mxfp8' needs TransformerEngine's"):
        setattr(op, attribute, True)
    setattr(op, attribute, False)


def container(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    fc1 = integration.GroupedLinear(E, H, 2 * FFN, bias=False, **options)
    fc2 = integration.GroupedLinear(E, FFN, H, bias=True, scale_bias=True, **options)
    return integration.Sequential(fc1, integration.ScaledSwiGLU(glu_interleave_size=0), fc2)


def call(model: Any, dtype: torch.dtype = torch.float32, device: str = "cpu", tail: int = 0) -> list[Tensor]:
    """The rows, then the gradients of x, of the scales and of the parameters."""
    rows, generator = sum(SIZES) + tail, torch.Generator().manual_seed(1)
    x = torch.randn(rows, H, generator=generator).to(device, dtype).requires_grad_()
    probs, sizes = torch.rand(rows, generator=generator).to(device).requires_grad_(), torch.tensor(SIZES, device=device)
    y = model(x, sizes, probs, sizes, probs)
    return [y[: sum(SIZES)], *torch.autograd.grad(y, [x, probs, *model.parameters()], torch.ones_like(y))]


def test_ops_of_these_names_fuse_and_may_be_replayed() -> None:
    model = container()
    call(model)

    assert steps(model) == ["GroupedMLP"]
    assert model[0].promises.replayable
    assert model._compiled.last.plan.steps[0].replay_refusal is None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which computes rows of no group, too
def test_results_on_triton() -> None:
    model = container()
    expected = call(model)
    with triton_interpreter.interpreted(), config(backend="triton"):
        torch.testing.assert_close(call(model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("calls", [1, 4])
def test_stashed_rows_on_a_gpu(calls: int) -> None:
    """Only rows of experts come back, as from Megatron's paged stash; in replays too."""
    model, marked = container(torch.bfloat16, "cuda"), []
    plain = call(model, torch.bfloat16, "cuda", 12)

    def forgetful(tensor: Tensor) -> Tensor:
        if not hasattr(tensor, integration.STASH_MARK):
            return tensor
        marked.append(tuple(tensor.shape))
        rest = torch.full_like(tensor, torch.nan)
        rest[: sum(SIZES)] = tensor.detach()[: sum(SIZES)]
        return rest

    with torch.autograd.graph.saved_tensors_hooks(forgetful, lambda tensor: tensor):
        for _ in range(calls):
            came = call(model, torch.bfloat16, "cuda", 12)
    assert len(marked) >= 3 * calls
    torch.testing.assert_close(came, plain, rtol=0, atol=0)
