"""Epilogues of the grouped GEMM compiled by NVRTC, which needs no GPU: none spills, and none takes long."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checks.functions import phish, telu
from emulation import build

from fusible import Pointwise
from fusible.ops.kernels.hopper import extension
from fusible.ops.kernels.jit import epilogue
from fusible.ops.kernels.jit.cache import kernel_cache
from fusible.ops.kernels.jit.compilation import compiled
from fusible.ops.kernels.jit.nvrtc import CompileError, SpillError, compiler
from fusible.ops.kernels.problem import Layout


def missing() -> str | None:
    """Why nothing can be compiled here; the emulation says what the extension would of its parameters."""
    try:
        compiler()
    except CompileError as error:
        return str(error)
    return build.missing()


pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=f"cannot be compiled: {missing()}"),
    pytest.mark.usefixtures("emulation"),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FUSIBLE_CACHE_DIR", str(tmp_path))
    kernel_cache.cache_clear()
    yield
    kernel_cache.cache_clear()


def form_of(op: Pointwise, backward: bool, dtype: torch.dtype = torch.bfloat16) -> epilogue.EpilogueForm:
    """Of hidden rows of 512 columns, as a fused layer asks for it."""
    assert op.spec is not None
    assert op.spec.program is not None
    layout = Layout.NN if backward else Layout.NT
    return epilogue.form(op.spec.program, backward, layout, dtype, None, 512, bias=False)


FUNCTIONS = {
    "clamped silu glu": Pointwise(lambda gate, up: F.silu(gate.clamp(max=7)) * up, halves="concat"),
    "telu": Pointwise(telu),
    "glu of a row": Pointwise(lambda gate, up, s: torch.tanh(gate * s) * up, halves="concat"),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sources_compile_without_a_spill_in_seconds(name: str, backward: bool) -> None:
    """What spills is an error of the compiler."""
    variants = extension.library().BACKWARD_VARIANTS if backward else extension.library().ACTIVATION_VARIANTS
    for variant in variants:
        start = time.process_time()
        cubin = compiled(epilogue.source(form_of(FUNCTIONS[name], backward), variant, vectors=1), "sm_90a")
        assert time.process_time() - start < 10
        assert cubin.startswith(b"\x7fELF")


def test_a_function_that_spills_two_vectors_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phish of gate and up needs more registers than there are, so two vectors at a time are tried and given up."""
    tried, handle = list[tuple[int, bool]](), 77

    def load(text: str) -> int:
        vectors = re.search(r"kVectors = (\d)", text)
        assert vectors is not None
        tried.append((int(vectors[1]), False))
        compiled(text, "sm_90a")
        tried[-1] = int(vectors[1]), True
        return handle

    monkeypatch.setattr(epilogue, "load", load)
    op = Pointwise(lambda gate, up: phish(gate) * phish(up), halves="concat")

    assert epilogue.handles(form_of(op, backward=True)) == (handle,)
    assert tried == [(2, False), (1, True)]


def test_what_spills_anyway_is_refused_with_what_ptxas_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(text: str) -> int:
        raise SpillError("ptxas: 12 bytes spill")

    monkeypatch.setattr(epilogue, "load", load)
    form = form_of(Pointwise(lambda gate, up: phish(gate) * up, halves="concat"), backward=True)
    reason = epilogue.refusal(form)

    assert reason == f"has no kernel of function {form.program.digest}: ptxas: 12 bytes spill"


def test_a_source_that_is_wrong_is_a_compile_error_with_its_log() -> None:
    with pytest.raises(CompileError, match="nonsense"):
        compiled("nonsense;", "sm_90a")
