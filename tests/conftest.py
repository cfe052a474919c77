"""The initial state of every test: one seed, and only the fusions of the package."""

from __future__ import annotations

import gc
import os
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import other_backend
import pytest
import torch
from emulation import build, harness

from fusible.fuser import registry

pytest.register_assert_rewrite("checks")
if "PYTEST_XDIST_WORKER" in os.environ:
    # a dozen workers with a thread a core each wait for one another: the GPU's suite took over ten minutes, not two
    torch.set_num_threads(1)

# else inductor asks g++ whether it knows the instructions of this CPU, which takes ten seconds
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# workers share a GPU, of which each jax would take three quarters at its first array
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# without a GPU Triton interprets kernels; its own functions, too, if it is told so before any file imports it
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# four CPUs for shard_map: read once jax is asked for a device, by whichever file asks first
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

SLOW = {
    "test_arriving_rows": "starts processes, compiles csrc with g++",
    "test_benchmarks": "times and draws",
    "test_building": "builds with stand-ins for compilers",
    "test_chains_in_epilogues": "runs the kernels on the CPU",
    "test_compile": "compiles with torch.compile",
    "test_compile_functional": "compiles with torch.compile",
    "test_compile_guards": "compiles with torch.compile",
    "test_computed_parameters": "compiles with torch.compile",
    "test_configuration": "compiles csrc with g++",
    "test_demo": "trains",
    "test_dynamic_sizes": "compiles with torch.compile",
    "test_docs": "runs the examples of the docs",
    "test_emulation": "compiles csrc with g++, runs the kernels on the CPU",
    "test_ep": "starts processes",
    "test_ep_proof": "starts processes",
    "test_ep_reduced": "starts processes, compiles csrc with g++",
    "test_ep_symmetric": "starts processes, compiles csrc with g++",
    "test_fsdp": "starts processes, compiles csrc with g++",
    "test_fsdp_bytes": "starts processes, compiles csrc with g++",
    "test_function_fusions": "every fusion with functions of users",
    "test_functions_on_pytorch": "compiles with torch.compile",
    "test_functions_under_recipes": "every recipe with functions of users",
    "test_hosts": "starts processes",
    "test_independent": "compiles csrc with g++, runs the kernels on the CPU",
    "test_installation": "starts processes",
    "test_jax": "compiles with jax",
    "test_jax_bench": "compiles with jax",
    "test_jax_example": "trains",
    "test_jax_setup": "starts processes",
    "test_jax_transforms": "compiles with jax",
    "test_library": "compiles with torch.compile",
    "test_lifetimes": "collects garbage after every call",
    "test_megatron": "starts processes",
    "test_megatron_dispatcher": "starts processes, compiles csrc with g++",
    "test_nvrtc": "compiles functions of users with NVRTC",
    "test_on_import": "starts processes",
    "test_other_engines": "starts processes",
    "test_peers": "runs stand-ins of other libraries",
    "test_peft": "models of transformers",
    "test_pointwise_chain": "draws hundreds of chains",
    "test_pointwise_cpp": "compiles functions of users with g++",
    "test_properties": "draws hundreds of examples",
    "test_random_experts": "thousands of problems",
    "test_recipes": "models under every recipe",
    "test_recipes_emulated": "runs the kernels on the CPU",
    "test_release": "builds a wheel",
    "test_replay": "compiles csrc with g++",
    "test_runs": "trains models of transformers, starts processes",
    "test_sample": "starts processes",
    "test_structure": "counts the calls of whole trees",
    "test_torchtitan_dispatcher": "starts processes",
    "test_transformers": "models of transformers",
    "test_transformers_classes": "models of transformers",
    "test_transformers_compile": "compiles with torch.compile",
    "test_transformers_ep": "starts processes, compiles csrc with g++",
    "test_transformers_float8": "models of transformers",
    "test_triton": "runs the kernels on the CPU",
    "test_triton_ahead": "compiles with Triton",
    "test_triton_compiled": "compiles with Triton",
    "test_triton_containers": "runs the kernels on the CPU",
    "test_triton_drawn": "runs the kernels on the CPU",
    "test_triton_replay": "runs the kernels on the CPU, compiles csrc with g++",
    "test_triton_routing": "runs the kernels on the CPU",
    "test_without_jax": "starts processes",
}
"""What ``make test`` leaves out, by file, and why it takes so long; ``make test-all`` runs it."""

LONGEST = (
    "test_transformers_ep",
    "test_ep",
    "test_emulation",
    "test_function_epilogue",
    "test_docs",
    "test_fsdp",
    "test_hosts",
    "test_quantised_checkpoints",
    "test_ep_symmetric",
    "test_packaging",
    "test_fsdp_bytes",
    "test_ep_reduced",
    "test_peft",
    "test_structure",
    "test_library",
    "test_router",
    "test_imports",
)
"""The longest files of a part. They begin first, so that no worker waits for another at the end; the Makefile keeps
xdist from ordering files by their number of tests."""


WHOLE = {
    "test_cli": "each case is another command",
    "test_docs": "each case is another page",
    "test_imports": "each case is another module",
    "test_packaging": "each case is another module",
}
"""Files of which ``--sample`` leaves out nothing, and why."""

ONCE = {
    "test_benchmarks",
    "test_demo",
    "test_ep_proof",
    "test_jax_bench",
    "test_jax_example",
    "test_release",
    "test_runs",
    "test_triton_compiled",
}
"""Files of which ``--sample`` runs each case in one part: those that test benchmarks and other tools, not the package,
and one that compiles dozens of kernels in each case."""

ALIKE = {
    "test_chains_in_epilogues": "kernels with a function, each compiled by g++",
    "test_function_epilogue": "kernels with a function, each compiled by g++",
    "test_functions_under_recipes_emulated": "kernels with a function, each compiled by g++",
    "test_jax": "compiled by jax",
    "test_jax_transforms": "compiled by jax",
    "test_nvrtc": "kernels with a function, each compiled by NVRTC",
    "test_pointwise_chain": "random chains",
    "test_scaled_activation": "the kernels of Float8Block on the CPU",
    "test_transformers_compile": "models of transformers under torch.compile",
    "test_triton_replay": "calls on interpreted kernels",
}
"""Files whose tests exercise the same code and take seconds each, and the reason of their time. In each part
``--sample`` runs a quarter of their tests, so each test runs in four parts."""

PARTS, QUARTERS = 16, 4


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much is run of what costs minutes."""
    parser.addoption("--random-programs", type=int, default=25, help="programs inside the emulated kernels, of 200")
    parser.addoption(
        "--sample", type=int, choices=range(PARTS), help="run of each test the first case and this sixteenth"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says what was left out."""
    if "not slow" not in config.option.markexpr:
        return
    terminalreporter.section("left out as slow: make test-all runs it")
    for name, why in SLOW.items():
        terminalreporter.line(f"{name}: {why}")
    terminalreporter.line(
        "and in other files, what runs the kernels on the CPU; of the cases of each test, fifteen of sixteen"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that are left out are not imported: what they need takes longer than many tests."""
    return True if "not slow" in config.option.markexpr and collection_path.stem in SLOW else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is slow; of several workers, none is left alone with a long file at the end."""
    if (part := config.getoption("--sample")) is not None:
        items[:], left_out = sample(items, part)
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    for item in items:
        if item.path.stem in SLOW or "emulation" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


def sample(items: list[pytest.Item], part: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The cases that run, and those that are left out.

    The first case of each test runs, and the cases that a checksum of their names puts into this part: the same on
    every worker and in every run. Of the files in ``ALIKE`` only every fourth test runs.
    """
    tests = defaultdict[str, dict[object, int]](dict)  # of each file, in order
    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        function, file, digest = getattr(item, "function", item), item.path.stem, zlib.crc32(item.name.encode())
        is_first = function not in tests[file]
        number = tests[file].setdefault(function, len(tests[file]))
        runs = file in WHOLE or (is_first and file not in ONCE) or digest % PARTS == part
        if file in ALIKE:
            in_quarter = is_first or digest % (PARTS // QUARTERS) == part // QUARTERS
            runs = number % QUARTERS == part % QUARTERS and in_quarter
        (kept if runs else left_out).append(item)
    return kept, left_out


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Under ``FUSIBLE_BACKEND`` skips what cannot hold there."""
    if item.get_closest_marker("hopper") and other_backend.of_run() not in other_backend.HOPPER:
        pytest.skip("is about our Hopper kernels")
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        if (why := other_backend.reason(error, other_backend.of_run())) is not None:
            pytest.skip(why)
        raise


def pytest_collection_finish() -> None:
    """Keeps imported modules and collected tests out of garbage collection."""
    harness.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _restored_registry() -> Iterator[None]:
    before = tuple(registry)
    yield
    registry._set(before)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing that torch has compiled outlives a test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def emulation() -> Iterator[harness.Emulation]:
    """Our kernels on tensors of the CPU, for all tests of a module; where :func:`build.missing` says nothing."""
    emulation = harness.Emulation(build.build())
    with harness.installed(emulation):
        yield emulation
    harness.freeze()


@pytest.fixture
def collector_off() -> Iterator[None]:
    """Disables the garbage collector: only reference counting frees objects in the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
