"""Programs as C++: compiled for the CPU against the emulated instructions, element by element against autograd."""

import ctypes
import subprocess

import pytest
import torch
from checks.functions import PUBLISHED, random_function
from emulation import build
from test_pointwise import FUNCTIONS
from test_uncommon_functions import UNCOMMON

from fusible import Pointwise
from fusible.ops.programs.cpp import boolean, function_type, number

COUNT = 1 << 14
SPECIAL = [0.0, -0.0, 1e-30, -1e-8, 1e-3, 7.0, -7.0, 88.0, -104.0, 1e4, -1e4, torch.inf, -torch.inf, torch.nan]
DIFFERENT_AT_NAN = {"hardswish", "elu", "celu", "selu", "relu6", "hardtanh"}
DIFFERENT_AT_NAN |= {"uncommon: softshrink", "uncommon: hardshrink"}
"""PyTorch's own kernels differ here from its decompositions, at NaN or infinity."""
ROUNDS_IN_FLOAT32 = {"rounding trick", "uncommon: power"}
HALF_STEP = 2.0**-12  # of fp16, relative
WEIGHTED = {
    "sigmoid of a row": (lambda x, r: x * torch.sigmoid(r), 1),
    "lerp by a row": (lambda x, u, r: torch.lerp(x, u, torch.sigmoid(r)), 2),
}
UNUSUAL = {f"uncommon: {name}": function for name, function in UNCOMMON.items()}
RANDOM = {f"seed {seed}": random_function(seed) for seed in range(200)}
ALL = {**FUNCTIONS, **WEIGHTED, **PUBLISHED, **UNUSUAL, **RANDOM}

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


def program_of(name):
    function, gated = ALL[name]
    return Pointwise(function, halves="concat" if gated == 2 else None).program


@pytest.fixture(scope="module")
def library(request, tmp_path_factory):
    """The functions that the tests of this session evaluate: all of them take g++ a dozen seconds."""
    folder = tmp_path_factory.mktemp("pointwise")
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    cases = [item.callspec.params for item in items]
    wanted = {(case["name"], case["fast"]) for case in cases if {"name", "fast"} <= case.keys()}
    text = '#include "headers.h"\n#include "device/functions/pointwise.cuh"\n'
    for i, name in enumerate(ALL):
        for fast in (True, False):
            if (name, fast) not in wanted:
                continue
            rows = len([row for row in program_of(name).inputs if row[0] == "r"])
            row = ", ".join(f"r[{j}][i]" for j in range(rows)) or "0.f"
            text += f"""namespace fusible {{ namespace f{i}_{int(fast)} {{
{function_type(program_of(name), fast=boolean(fast))}
}} }}
extern "C" __attribute__((visibility("default"))) void evaluate_{i}_{int(fast)}(
    int n, const float* x, const float* u, const float* const* r, const float* dy, float* const* to) {{
  using F = fusible::f{i}_{int(fast)}::Function;
  for (int i = 0; i < n; ++i) {{
    const float numbers[] = {{{row}}};
    const auto d = F::backward(x[i], u[i], numbers, dy[i]);
    to[0][i] = F::forward(x[i], u[i], numbers), to[1][i] = d.y, to[2][i] = d.dx, to[3][i] = d.du;
    for (int j = 0; j < F::kRows; ++j) to[4 + j][i] = d.dr[j];
  }}
}}
"""
    (folder / "all.cpp").write_text(text)
    csrc = build.ROOT / "csrc"
    includes = [f"-I{build.HERE / 'include'}", f"-I{build.HERE}", f"-I{csrc}", f"-I{build.find_cuda()}"]
    command = ["g++", *build.FLAGS, "-O1", "-shared", *includes, str(folder / "all.cpp"), "-o", str(folder / "all.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "all.so"))


def operands(inputs):
    generator = torch.Generator().manual_seed(1)
    values = {name: (torch.randn(COUNT, generator=generator) * 3).bfloat16().float() for name in inputs}
    values["dy"] = torch.randn(COUNT, generator=generator)
    values["x"][: len(SPECIAL)] = torch.tensor(SPECIAL)
    if "u" in values:
        values["u"][len(SPECIAL) : 2 * len(SPECIAL)] = torch.tensor(SPECIAL)
    return values


def evaluate(library, name, fast, values):
    """The results of the C++ program: the value of either half, and the gradients."""
    rows = [values[row] for row in values if row[0] == "r"]
    results = [torch.full((COUNT,), -1.0) for _ in range(4 + len(rows))]
    up = values.get("u", torch.ones(COUNT))
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (values["x"], up)]
    arrays = [(ctypes.c_void_p * max(1, len(ts)))(*[t.data_ptr() for t in ts]) for ts in (rows, results)]
    function = getattr(library, f"evaluate_{list(ALL).index(name)}_{int(fast)}")
    function(COUNT, *pointers, arrays[0], ctypes.c_void_p(values["dy"].data_ptr()), arrays[1])
    keys = ["forward", "y", "dx", "du", *[f"d{row}" for row in values if row[0] == "r"]]
    return dict(zip(keys, results, strict=True))


def by_autograd(name, values, dtype):
    leaves = {n: t.to(dtype).requires_grad_() for n, t in values.items() if n != "dy"}
    y = ALL[name][0](*[leaf * 1.0 for leaf in leaves.values()])
    grads = [torch.zeros_like(y)] * len(leaves)
    if y.requires_grad:
        grads = torch.autograd.grad(y, leaves.values(), values["dy"].to(dtype), materialize_grads=True)
    return {"forward": y.detach(), "y": y.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "exact"])
@pytest.mark.parametrize("name", ALL)
def test_generated_code_computes_the_function(library, name, fast):
    values = operands([n for n in program_of(name).inputs if n != "dy"])
    computed = evaluate(library, name, fast, values)
    truth, eager = (by_autograd(name, values, dtype) for dtype in (torch.float64, torch.float32))
    if name in ROUNDS_IN_FLOAT32:
        truth = {key: t.double() for key, t in eager.items()}
    for key, expected in truth.items():
        got, in_float32 = computed[key].double(), eager[key].double()
        same = (got == expected) | (got.isnan() & in_float32.isnan()) | ((expected.abs() > 3.3e38) & got.isinf())
        same |= (~in_float32.isfinite() | values["x"].isnan()) & torch.tensor(name in DIFFERENT_AT_NAN)
        rounding = 4 * (in_float32 - expected).abs().nan_to_num()  # PyTorch's formula in float32 cancels as ours does
        close = (got - expected).abs() <= expected.abs() * HALF_STEP + rounding + 1e-6
        wrong = ~(same | close)
        assert not wrong.any(), (key, values["x"][wrong][:4], got[wrong][:4], expected[wrong][:4])


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "exact"])
@pytest.mark.parametrize(
    ("name", "infinite", "weight"),
    [("sigmoid of a row", "x", "r0"), ("straight through", "x", "u"), ("lerp by a row", "u", "r0")],
)
def test_subnormal_factors_of_infinity_are_zero_in_16_bits(library, name, infinite, weight, fast):
    """As docs/pointwise.md says."""
    values = operands([n for n in program_of(name).inputs if n != "dy"])
    values["x"][:2], values[weight][:2] = 0.0, -88.0
    values[infinite][:2] = torch.tensor([torch.inf, -torch.inf])
    y = evaluate(library, name, fast, values)["forward"][:2]
    assert ALL[name][0](*[t[:2] for n, t in values.items() if n != "dy"]).isinf().all()
    assert y.isnan().all() if fast else y.isinf().all()


def test_numbers_are_those_of_float32():
    assert number(0.1) == "0x1.99999a0000000p-4f"
    assert [number(x) for x in (float("inf"), -float("inf"), float("nan"))] == ["INFINITY", "-INFINITY", "NAN"]


def test_no_text_of_the_user_is_compiled():
    def tricky(x, system_exit):
        return x * system_exit

    text = function_type(Pointwise(tricky).program)
    assert "tricky" not in text
    assert "system_exit" not in text
