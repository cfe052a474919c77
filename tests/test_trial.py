from __future__ import annotations
import pytest, torch
from dataclasses import replace
from checks import fused, gemm
from fusible.ops.kernels.problem import Layout
from fusible.ops.activation_spec import ActivationSpec, gated, interleaved
import test_emulation as te
pytestmark = pytest.mark.usefixtures("emulation")
V = {Layout.NT: (12, 13, 14, 15, 16, 17), Layout.NN: (12, 13, 14, 15, 16, 17), Layout.TN: (9, 10, 11)}
T = [(l, v) for l in V for v in V[l]]

@pytest.mark.parametrize(("layout", "variant"), T)
def test_shapes(layout, variant):
    te.check(layout, k=136, n=264, variant=variant)
    te.check(layout, (300, 0, 129), k=72, n=520, tail=0, variant=variant)
    te.check(layout, (500, 390, 1), k=264, n=392, variant=variant)
    te.check(layout, (161, 320, 0, 333), k=64, n=520, variant=variant)
    te.check(layout, (200, 70, 250), k=200, n=520, variant=variant, dtype=torch.float16)
    if layout is Layout.NT:
        import random
        r = random.Random(3)
        te.check(layout, tuple(r.choice((0, 1, 20, 90, 170, 230, 400)) for _ in range(40)), k=64, n=264, variant=variant)
        te.check(layout, tuple(r.choice((0, 1, 3, 40)) for _ in range(300)), k=64, n=136, variant=variant)
    for size in (1, 17, 63, 64, 65, 128, 129, 159, 160, 161, 193, 193+64, 320):
        te.check(layout, (size,), k=72, n=136, tail=size % 5, variant=variant)

@pytest.mark.parametrize("name", fused.SPECS)
def test_act(name):
    for sizes, more in (((131, 0, 77, 1, 64), {}), ((300, 0, 161, 170), {}), ((320, 150, 5), {"features": 72, "columns": 320}), ((200, 310), {"dtype": torch.float16, "scales": None, "transposed": True})):
        case = fused.Case(fused.SPECS[name], sizes, **more)
        if fused.fits(case.spec, 6):
            fused.check_forward("cpu", replace(case, variant=15))
            fused.check_forward("cpu", replace(case, variant=17))
