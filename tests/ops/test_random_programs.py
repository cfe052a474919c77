"""Random programs inside the emulated kernels, both directions, against float64 autograd.

The kernels are those of one function for all (tests/emulation/programs.py). They are compiled whole in
tests/ops/test_function_epilogue.py. In tests/gpu/test_function_epilogue_cuda.py NVRTC compiles 200 of these programs
into its kernels. As many run here with ``--random-programs 200``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from checks import fused
from checks.functions import op_of, random_function
from emulation import build
from emulation.harness import Emulation
from emulation.programs import Programs

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")
TAIL, SIZES = 5, (70, 0, 1, 33)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """As many as are asked for."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(_count(metafunc.config)))


def _count(config: pytest.Config) -> int:
    count: int = config.getoption("random_programs")
    return count


def case_of(seed: int) -> fused.Case:
    """A problem whose last subtile of columns is not full, in one of the tiles."""
    function, count = random_function(seed)
    case = fused.case_of(op_of(function, count), function, sizes=SIZES, tail=TAIL, features=40, columns=72)
    variants = fused.variants(case)
    return replace(case, variant=variants[seed % len(variants)])


@pytest.fixture(scope="module")
def programs(emulation: Emulation, pytestconfig: pytest.Config) -> Programs:
    """All of them."""
    specs = [case_of(seed).spec for seed in range(_count(pytestconfig))]
    return Programs(emulation, [spec.program for spec in specs if spec.program is not None])


def test_random_programs(seed: int, programs: Programs) -> None:
    case = case_of(seed)
    with programs.chosen(seed):
        fused.check_forward("cpu", case)
        fused.check_backward("cpu", replace(case, variant=-1))
