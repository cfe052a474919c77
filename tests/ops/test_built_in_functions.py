"""The built-in activations: their programs against PyTorch's fused curves, and the C++ that is generated from them."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import build, curves
from torch import Tensor

from fusible import GLU, Activation, Pointwise, Scale, Sequential, interleaved
from fusible.ops.programs.activations import ACTIVATIONS, CURVES
from fusible.ops.programs.halves import join, split
from fusible.ops.values.activation_spec import ActivationSpec

ROOT = Path(__file__).parents[2]
INF, NAN = torch.inf, torch.nan
SPECIAL = [0.0, -0.0, 1e-30, -1e-8, 1e-3, 2.0, -2.0, 2.5, -2.5, 7.0, -7.0, 88.0, -104.0, 1e4, -1e4, INF, -INF, NAN]
LIMITED = {"limit": 2.0, "linear_offset": 0.5}
GATED: list[tuple[str, dict[str, Any]]] = [
    *[(name, numbers) for name in ACTIVATIONS for numbers in ({}, LIMITED, {"limit": 2.0}, {"linear_offset": -1.0})],
    ("silu", {"alpha": -0.5}),
    ("silu", {"alpha": 1.702, **LIMITED}),
]
DTYPES = [torch.float64, torch.float32]
HALF_STEP = 2.0**-12  # of fp16, relative


def numbers(*shape: int, dtype: torch.dtype, first: int = 0) -> Tensor:
    """Random ones, and the special ones from the column ``first`` on."""
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(first)) * 3
    x[:, first : first + len(SPECIAL)] = torch.tensor(SPECIAL, dtype=dtype)
    return x


def gates(name: str, *shape: int, dtype: torch.dtype) -> Tensor:
    """The same, but for infinity where PyTorch's code for vectors computes NaN."""
    x = numbers(*shape, dtype=dtype)
    return x.nan_to_num(NAN, 88.0, -INF) if name == "gelu" and dtype == torch.float32 else x


def run_program(spec: ActivationSpec, x: Tensor, scales: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The outputs of the program's lines, which kernels and the op compute."""
    program, block = spec.function, spec.block
    arguments = zip(program.arguments, split(x, len(program.arguments), block), strict=True)
    inputs = {"r0": scales[:, None, None], "dy": split(dy, 1, block)[0], **dict(arguments)}
    computed = {name: value.expand(inputs["dy"].shape) for name, value in program.run(inputs).items()}
    grads = tuple([computed[f"d{name}"] for name in program.arguments])
    return {
        "y": join((computed["y"],), torch.empty_like(dy)),
        "x": join(grads, torch.empty_like(x)),
        "scales": computed["dr0"].sum((-2, -1)),
    }


def run_op(op: Any, x: Tensor, scales: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x, scales = x.clone().requires_grad_(), scales.clone().requires_grad_()
    y = Sequential(op, Scale())(x, scales=scales)
    dx, dscales = torch.autograd.grad(y, (x, scales), dy)
    return {"y": y.detach(), "x": dx, "scales": dscales}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in a:
        rounding = 1000 * torch.finfo(a[name].dtype).eps
        torch.testing.assert_close(a[name], b[name], rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_its_program(name, dtype):
    x, dy = gates(name, 3, 40, dtype=dtype), numbers(3, 40, dtype=dtype, first=20).nan_to_num(1.0, 2.0, 3.0)
    op, scales = Activation(name), torch.tensor([1.0, -0.5, 2.0], dtype=dtype)

    assert_same(run_op(op, x, scales, dy), run_program(op.spec, x, scales, dy))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [None, 1, 8])
@pytest.mark.parametrize(("name", "options"), GATED)
def test_glu_is_its_program(name, options, block, dtype):
    gate, up = gates(name, 3, 64, dtype=dtype), numbers(3, 64, dtype=dtype, first=30)
    op = GLU(name, layout="concat" if block is None else interleaved(block), **options)
    x, dy = join(tuple(split(t, 1, block)[0] for t in (gate, up)), gate.new_empty(3, 128)), torch.ones_like(gate)
    scales = torch.tensor([1.0, -0.5, 2.0], dtype=dtype)

    assert_same(run_op(op, x, scales, dy), run_program(op.spec, x, scales, dy))


def test_function_of_every_spec():
    users = Pointwise(lambda x: x.tanh()).spec

    assert users.function is users.program
    assert ActivationSpec("silu").function is ActivationSpec("silu").function
    assert ActivationSpec("quick_gelu").function == ActivationSpec("silu", alpha=1.702).function


def test_generated_functions_are_committed():
    assert curves.FILE.read_text() == curves.source(), "run `python -m emulation.curves` in tests"


SPECS = [*map(ActivationSpec, ACTIVATIONS), *[ActivationSpec(name, gated=True, **options) for name, options in GATED]]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The generated functions and the choice among them, for the CPU."""
    if build.missing() is not None:
        pytest.skip(str(build.missing()))
    folder = tmp_path_factory.mktemp("functions")
    text = """#include "headers.h"
#include "device/functions/activation.cuh"
template <bool kFast>
void evaluate_all(const fusible::Activation& a, int n, float* const* at) {
  const auto body = [&](auto function) {
    for (int i = 0; i < n; ++i) {
      const auto d = function.backward(at[0][i], at[1][i], &at[2][i], at[3][i]);
      at[4][i] = function.forward(at[0][i], at[1][i], &at[2][i]);
      at[5][i] = d.y, at[6][i] = d.dx, at[7][i] = d.du, at[8][i] = d.dr[0];
    }
  };
  if (a.gated) fusible::with_function<kFast>(a, body);
  else fusible::with_unlimited_function<kFast>(a, body);
}
extern "C" __attribute__((visibility("default"))) void evaluate(bool fast, int curve, bool gated, float alpha,
                                                                float limit, float offset, int n, float* const* at) {
  const fusible::Activation a{static_cast<fusible::Curve>(curve), gated, alpha, limit, offset};
  fast ? evaluate_all<true>(a, n, at) : evaluate_all<false>(a, n, at);
}
"""
    (folder / "all.cpp").write_text(text)
    includes = [f"-I{build.HERE / 'include'}", f"-I{build.HERE}", f"-I{ROOT / 'csrc'}", f"-I{build.find_cuda()}"]
    command = ["g++", *build.FLAGS, "-O1", "-shared", *includes, str(folder / "all.cpp"), "-o", str(folder / "all.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "all.so"))


def evaluate(library: ctypes.CDLL, spec: ActivationSpec, fast: bool, operands: list[Tensor]) -> dict[str, Tensor]:
    tensors = [*operands, *[torch.empty_like(operands[0]) for _ in range(5)]]
    addresses = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
    values = [spec.curve.alpha, INF if spec.limit is None else spec.limit, spec.linear_offset]
    curve = list(CURVES).index(spec.curve.name)
    floats = [ctypes.c_float(value) for value in values]
    library.evaluate(fast, curve, spec.gated, *floats, operands[0].numel(), addresses)
    return dict(zip(("forward", "y", "dx", "du", "dr0"), tensors[4:], strict=True))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_generated_functions_compute_the_programs(library, spec, fast):
    x, u = (numbers(1, 4096, dtype=torch.float32, first=first)[0].bfloat16().float() for first in (0, 30))
    r, dy = (torch.randn(4096, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
    computed = evaluate(library, spec, fast, [x, u if spec.gated else torch.ones_like(u), r, dy])

    inputs = {"x": x, "u": u, "r0": r, "dy": dy}
    wide = {name: inputs[name].double() for name in spec.function.inputs}
    exact, rounded = (spec.function.run({name: t.to(d) for name, t in wide.items()}) for d in DTYPES)
    for name, value in {**exact, "forward": exact["y"]}.items():
        ours, theirs = computed[name].double(), rounded["y" if name == "forward" else name].double()
        tolerance = (HALF_STEP if fast else 2.0**-20) * (1.0 + value.abs()) + 4 * (theirs - value).abs().nan_to_num()
        assert ((ours - value).abs() <= tolerance)[value.isfinite()].all(), name
        assert torch.equal(ours.isnan(), theirs.isnan()), name
