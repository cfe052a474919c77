"""The shared memory of our Triton kernels on GPUs that are not here, beside what the choice of tiles counts.

``python tests/support/triton_shared.py sm_90 nt`` prints a line for each tile, dtype and epilogue of a kind of product;
a process of its own, in which kernels are not interpreted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import triton_ahead
from triton._C.libtriton import ir
from triton.compiler import ASTSource

from fusible.ops.kernels.problems.gemm import Activate, ActivateBackward, ActivationGrads, GroupedGemm, Layout
from fusible.ops.kernels.triton import tiles
from fusible.ops.kernels.triton.device import launch
from fusible.ops.kernels.triton.shape import ProgramTile
from fusible.ops.values.activation_spec import ActivationSpec, gated, interleaved

HIDDEN, FEATURES, GROUPS, ROWS = 1024, 768, 2, 4000
SPECS = {
    "ungated": ActivationSpec("silu"),
    "halves": gated("silu", None, 1.0, 0.0, "concat"),
    "pairs": gated("silu", None, 1.0, 0.0, interleaved(1)),
    "blocks": gated("silu", None, 1.0, 0.0, interleaved(32)),
}


class SharedIsKnownError(Exception):
    """The compilation has come as far as the shared memory is given out."""


class Stop:
    """An instrumentation of Triton, which calls it after that pass."""

    module: Any = None

    def load_dialects(self, context: Any) -> None:
        """There are none."""

    def patch(self, point: str, passes: Any, context: Any) -> None:
        passes.run(self.module, point)
        raise SharedIsKnownError


class SharedRecorder(triton_ahead.Recorder):
    """Compiles as far as the shared memory is known, and notes how much it is."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        if self.kernel.__name__ not in triton_ahead.PRODUCTS:
            return
        kwargs = {"debug": False, "instrumentation_mode": "", **kwargs}
        backend, kwargs, bound, specialization, options = self.bind(*args, **kwargs)
        packed, signature, constexprs, attrs = self.kernel._pack_args(backend, kwargs, bound, specialization, options)
        source, context, stages = ASTSource(self.kernel, signature, constexprs, attrs), ir.context(), dict[str, Any]()
        options = backend.parse_options({**packed.__dict__, **source.parse_options()})
        ir.load_dialects(context)
        backend.load_dialects(context)
        backend.add_stages(stages, options, source.language)
        code, modules, stop = backend.get_codegen_implementation(options), backend.get_module_map(), Stop()
        stop.module, metadata = source.make_ir(self.target, options, code, modules, context), {**options.__dict__}
        for name in ("ttir", "ttgir"):
            stop.module = stages[name](stop.module, metadata)
        with patch.object(type(backend), "instrumentation", stop), suppress(SharedIsKnownError):
            stages["llir"](stop.module, metadata)
        self.compiled.append(stop.module.get_int_attr("ttg.shared"))


def epilogues(kind: str, dtype: torch.dtype, out: torch.dtype, layout: Layout) -> Iterator[tuple[str, GroupedGemm]]:
    """Products of a kind with results of the dtype ``out``: with the epilogues that take different memory."""
    if kind in ("activate", "activate_backward"):
        for name in SPECS if kind == "activate" else ("halves", "pairs"):
            yield name, in_layout(activation(kind, SPECS[name], dtype, out), layout)
        return
    mlp = triton_ahead.problems(GROUPS, HIDDEN, FEATURES, ROWS, dtype, False)
    plain = mlp[{"nt": "fc2", "nn": "dgrad1", "tn": "wgrad1"}[kind]]
    plain = replace(plain, out=plain.out.to(out))
    bias = torch.empty(GROUPS, plain.out.shape[-1], dtype=dtype)
    of_rows = {} if kind == "tn" else {"bias_scale": torch.empty(ROWS), "row_scale": torch.empty(ROWS)}
    yield "plain", plain
    yield "all factors", replace(plain, bias=bias, alpha=0.5, beta=1.0, **of_rows)


def activation(kind: str, spec: ActivationSpec, dtype: torch.dtype, out: torch.dtype) -> GroupedGemm:
    """A product that ends in an activation, or its backward, with all that these give."""
    mlp = triton_ahead.problems(GROUPS, HIDDEN, FEATURES, ROWS, dtype, False, spec)
    p = mlp["fc1" if kind == "activate" else "dgrad2"]
    epilogue = p.epilogue
    if isinstance(epilogue, Activate):
        assert epilogue.preact is not None
        return replace(p, out=p.out.to(out), epilogue=replace(epilogue, preact=epilogue.preact.to(out)))
    assert isinstance(epilogue, ActivateBackward)
    preact, scales, postact, *_ = epilogue.grads
    assert postact is not None
    grads = ActivationGrads(preact.to(out), scales, postact.to(out))
    return replace(p, out=grads.preact, epilogue=replace(epilogue, preact=epilogue.preact.to(out), grads=grads))


def in_layout(p: GroupedGemm, layout: Layout) -> GroupedGemm:
    """The product with weights that lie as the layout says."""
    return p if p.layout is layout else replace(p, layout=layout, b=p.b.mT.contiguous())


def tiles_of(architecture: str, kind: str, dtype: torch.dtype) -> list[ProgramTile]:
    """The table's tile, with its epilogue; for 16 bits also that which takes most of the candidates."""
    strict = dtype == torch.float32 and not architecture.startswith("sm_")
    chosen = tiles.choose(architecture, kind, ROWS / GROUPS, dtype.itemsize, strict)._replace(apart=False)
    if dtype == torch.float32:
        return [chosen]
    _, *others = tiles.candidates(architecture, kind)
    return [chosen, max(others, key=lambda tile: tiles.shared_bytes(tile, dtype.itemsize, architecture))]


def problems(architecture: str, kind: str) -> Iterator[tuple[str, ProgramTile, GroupedGemm]]:
    """A name, a tile and a product each, with results of 32 bits: those of 16 take no more memory."""
    layouts = [Layout.TN] if kind == "tn" else [Layout[kind.upper()]] if kind in ("nt", "nn") else list(Layout)[:2]
    for dtype in (torch.bfloat16, torch.float32):
        for tile in tiles_of(architecture, kind, dtype):
            for layout in layouts:
                for name, problem in epilogues(kind, dtype, torch.float32, layout):
                    yield f"{kind} {layout.value} {dtype} {name}", tile, problem


def main(argv: Sequence[str]) -> None:
    architecture, kind = argv
    torch.backends.cuda.matmul.allow_tf32 = True
    available = tiles.SHARED[architecture] * 1024
    for name, tile, problem in problems(architecture, kind):
        with triton_ahead.compiled_for(architecture, SharedRecorder) as shared:
            launch.run(problem, tile)
        counted = tiles.shared_bytes(tile, problem.a.dtype.itemsize, architecture)
        print(f"{shared[0]} {counted} {available} {name} {triton_ahead.short(tile)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
