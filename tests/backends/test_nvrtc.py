"""Epilogues of the grouped GEMM compiled by NVRTC, which needs no GPU: none spills, and none takes long."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from checks.functions import ACTS_OF_MATRICES, Act, chain, learned_slope, op_of_columns, phish, telu
from emulation import build

from fusible import Bias, Pointwise, SwiGLU, interleaved
from fusible.ops.fused.activation_role import vectors_of
from fusible.ops.kernels.jit import epilogue, nvrtc, quantized
from fusible.ops.kernels.jit.cache import kernel_cache
from fusible.ops.kernels.jit.compilation import compiled, compiler
from fusible.ops.kernels.jit.nvrtc import CompileError, Nvrtc, SpillError
from fusible.ops.kernels.jit.operands import is_concat, is_narrow
from fusible.ops.kernels.problems.gemm import Layout


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
    caches = kernel_cache, epilogue.handles, quantized.handle, compiler
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def form_of(op: Act, backward: bool, scales: bool = True) -> epilogue.EpilogueForm:
    """The form for hidden rows of 512 columns in bf16, as in a fused layer."""
    assert op.link is not None
    spec = op.link.forward_spec
    assert spec is not None
    assert spec.program is not None
    layout, program = Layout.NN if backward else Layout.NT, spec.program
    types = tuple(
        [
            v.dtype
            for v, inputs in zip(vectors_of(op) or (), program.column_operands.values(), strict=True)
            for _ in inputs
        ]
    )
    of_matrices = (torch.bfloat16,) * len(program.matrices)
    operands = types, bool(types) and backward, scales, of_matrices
    blocks = epilogue.blocks_of(program, backward, spec.block, 512)
    return epilogue.EpilogueForm(program, backward, layout, torch.bfloat16, *blocks, False, False, *operands)


FUNCTIONS = {
    "clamped silu glu": Pointwise(lambda gate, up: F.silu(gate.clamp(max=7)) * up, halves="concat"),
    "telu": Pointwise(telu),
    "glu of a row": Pointwise(lambda gate, up, s: torch.tanh(gate * s) * up, halves="concat"),
    "glu of a column": Pointwise(learned_slope, halves="concat", columns={"beta": (1, 1)}),
    "two columns": op_of_columns("shift"),
    "bias of gate and up": chain(Bias(2), SwiGLU()),
    "narrow biases": chain(Bias(2), SwiGLU(layout=interleaved(1)), Bias(1)),
    "glu of a column of 16 bits": Pointwise(
        learned_slope, halves="concat", columns={"beta": torch.zeros(1, 1, dtype=torch.bfloat16)}
    ),
}


def quantising_forms(op: Act, scales: bool) -> list[quantized.QuantizingForm]:
    """The forms for hidden rows of 512 columns in bf16: as the epilogue of an e4m3 product, and over rows both ways."""
    spec, vectors = op.spec, vectors_of(op) or ()
    assert spec is not None
    assert spec.program is not None
    program, lies = spec.program, (spec.program, spec.block, 512)
    inputs = zip(vectors, program.column_operands.values(), strict=True)
    types = tuple([vector.dtype for vector, names in inputs for _ in names])
    concat, narrow = is_concat(*lies), is_narrow(*lies)
    return [
        quantized.ScaledForm(program, torch.bfloat16, concat, narrow, False, types, scales),
        quantized.ScaledForm(program, torch.float16, concat, narrow, True, types, scales),
        *(
            quantized.QuantizerForm(program, backward, torch.bfloat16, narrow, types, backward and bool(types), scales)
            for backward in (False, True)
        ),
    ]


SPILLING = {"narrow biases"}
"""Three numbers of a column in float32, of twice eight columns: beside a product of e4m3 there are no registers for
them, so the kernel that quantises behind it computes the function."""


class Compilation(NamedTuple):
    """One source: the vectors that a lane differentiates at a time, whether it spilled, and seconds of its thread."""

    vectors: int
    spilled: bool
    seconds: float


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Compilation]:
    """The compilations from now on; nothing is loaded."""
    noted, compile_source = list[Compilation](), Nvrtc.compile

    def note(self: Nvrtc, source: str, *rest: Any) -> bytes:
        vectors, start, spilled = re.search(r"kVectors = (\d)", source), time.thread_time(), True
        assert vectors is not None
        try:
            cubin = compile_source(self, source, *rest)
            spilled = False
        finally:
            noted.append(Compilation(int(vectors[1]), spilled, time.thread_time() - start))
        return cubin

    monkeypatch.setattr(Nvrtc, "compile", note)
    monkeypatch.setattr(epilogue, "load", lambda source: len(compiled(source, "sm_90a")))
    return noted


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sources_compile_without_a_spill_in_seconds(compilations: list[Compilation], name: str, backward: bool) -> None:
    form = form_of(FUNCTIONS[name], backward)
    variants, loaded = epilogue.variants(form), epilogue.handles(form)

    assert isinstance(loaded, tuple), loaded
    assert len(loaded) == len(compilations) == len(variants)
    assert not any(each.spilled for each in compilations)
    assert max(each.seconds for each in compilations) < 10


@pytest.mark.parametrize(
    ("name", "scales"),
    [(name, True) for name in FUNCTIONS] + [("glu of a column", False)],  # scales take registers
)
def test_what_quantises_compiles_without_a_spill(compilations: list[Compilation], name: str, scales: bool) -> None:
    forms = quantising_forms(FUNCTIONS[name], scales)
    refused = [form for form in forms if quantized.refusal(form) is not None]
    assert all(isinstance(form, quantized.ScaledForm) for form in refused)
    assert bool(refused) == (name in SPILLING)
    assert len([each for each in compilations if not each.spilled]) == len(forms) - len(refused)


@pytest.mark.parametrize("name", ["clamped silu glu", "two columns", "bias of gate and up"])
def test_two_vectors_at_a_time_fit_without_scales(compilations: list[Compilation], name: str) -> None:
    loaded = epilogue.handles(form_of(FUNCTIONS[name], backward=True, scales=False))

    assert isinstance(loaded, tuple), loaded
    assert all(not each.spilled and (each.vectors == 2 or name == "two columns") for each in compilations)


@pytest.mark.parametrize("name", ACTS_OF_MATRICES)
def test_matrices_compile_without_a_spill(compilations: list[Compilation], name: str) -> None:
    loaded = epilogue.handles(form_of(ACTS_OF_MATRICES[name][0]("concat"), backward=False))

    assert isinstance(loaded, tuple), loaded
    assert not any(each.spilled for each in compilations)


@pytest.mark.parametrize(
    "op",
    [Pointwise(lambda gate, up: phish(gate) * phish(up), halves="concat")],
    ids=["phish"],
)
def test_a_function_that_spills_two_vectors_takes_one(compilations: list[Compilation], op: Act) -> None:
    """It needs more registers than there are for two."""
    loaded = epilogue.handles(form_of(op, backward=True))

    assert isinstance(loaded, tuple), loaded
    assert [(each.vectors, each.spilled) for each in compilations] == [(2, True), (1, False)]


def test_what_spills_anyway_is_refused_with_what_ptxas_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(source: Any) -> int:
        raise SpillError("ptxas: 12 bytes spill")

    monkeypatch.setattr(epilogue, "load", load)
    form = form_of(Pointwise(lambda gate, up: phish(gate) * up, halves="concat"), backward=True)
    reason = epilogue.refusal(form)

    assert reason == f"has no kernel of {form.program.name}: ptxas: 12 bytes spill"


def test_a_compiler_says_what_is_wrong_and_what_spills() -> None:
    spilling = """extern "C" __global__ void __launch_bounds__(1024, 2) kernel(float* p) {
      float x[64];
      for (int i = 0; i < 64; ++i) x[i] = p[i * 7];
      __syncthreads();
      for (int i = 0; i < 64; ++i) p[i * 3] = x[i];
    }"""
    with pytest.raises(CompileError, match=r"identifier .x. is undefined"):
        compiler().compile("int nonsense = x;", {}, "sm_90a")
    with pytest.raises(SpillError, match="bytes spill"):
        compiler().compile(spilling, {}, "sm_90a")


def test_without_any_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find", lambda: None)
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvrtc"):
        compiler()
