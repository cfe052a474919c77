"""The shared memory of our Triton kernels on GPUs that are not here, beside what the choice of tiles counts.

``python tests/support/triton_shared.py sm_90`` prints a line for each kind of product, tile, dtype and epilogue; a
process of its own, in which kernels are not interpreted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton_ahead
from triton._C.libtriton import ir
from triton.compiler import ASTSource

from fusible.ops.kernels.problems.gemm import Activate, ActivateBackward, ActivationGrads, GroupedGemm, Layout
from fusible.ops.kernels.triton import tiles
from fusible.ops.kernels.triton.device import launch
from fusible.ops.kernels.triton.shape import ProgramTile
from fusible.ops.values.activation_spec import ActivationSpec, gated, interleaved

HIDDEN, FEATURES, GROUPS, ROWS = 2048, 768, 4, 8000
SPECS = {
    "ungated": ActivationSpec("silu"),
    "halves": gated("silu", None, 1.0, 0.0, "concat"),
    "pairs": gated("silu", None, 1.0, 0.0, interleaved(1)),
    "blocks": gated("silu", None, 1.0, 0.0, interleaved(32)),
}


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
        code, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        module, metadata = source.make_ir(self.target, options, code, modules, context), {**options.__dict__}
        for name in ("ttir", "ttgir", "llir"):
            module = stages[name](module, metadata)
        self.compiled.append(metadata["shared"])


def epilogues(kind: str, dtype: torch.dtype, out: torch.dtype, layout: Layout) -> Iterator[tuple[str, GroupedGemm]]:
    """Products of a kind with results of the dtype ``out``: with each sort of epilogue that there is."""
    if kind in ("activate", "activate_backward"):
        for name, spec in SPECS.items():
            yield name, in_layout(activation(kind, spec, dtype, out), layout)
        return
    mlp = triton_ahead.problems(GROUPS, HIDDEN, FEATURES, ROWS, dtype, False)
    plain = mlp[{"nt": "fc2", "nn": "dgrad1", "tn": "wgrad1"}[kind]]
    plain = replace(plain, out=plain.out.to(out))
    bias = torch.empty(GROUPS, plain.out.shape[-1], dtype=dtype)
    of_rows = {} if kind == "tn" else {"bias_scale": torch.empty(ROWS), "row_scale": torch.empty(ROWS)}
    yield "plain", plain
    yield "biased", replace(plain, bias=bias)
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


def tiles_of(architecture: str, kind: str, dtype: torch.dtype, out: torch.dtype) -> list[ProgramTile]:
    """The table's tile, with its epilogue; for 16 bits into 32 also that which takes most of the candidates."""
    strict = dtype == torch.float32 and not architecture.startswith("sm_")
    chosen = tiles.choose(architecture, kind, ROWS / GROUPS, dtype.itemsize, strict)._replace(apart=False)
    if out == dtype:
        return [chosen]
    _, *others = tiles.candidates(architecture, kind)
    return [chosen, max(others, key=lambda tile: tiles.shared_bytes(tile, dtype.itemsize))]


def problems(architecture: str) -> Iterator[tuple[str, ProgramTile, GroupedGemm]]:
    """A name, a tile and a product each."""
    for kind in tiles.TABLE["sm_80"]:
        layouts = [Layout.TN] if kind == "tn" else [Layout[kind.upper()]] if kind in ("nt", "nn") else list(Layout)[:2]
        for dtype, out in ((torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float32,) * 2):
            for tile in tiles_of(architecture, kind, dtype, out):
                for layout in layouts:
                    for name, problem in epilogues(kind, dtype, out, layout):
                        yield f"{kind} {layout.value} {dtype} {out} {name}", tile, problem


if __name__ == "__main__":
    architecture, torch.backends.cuda.matmul.allow_tf32 = sys.argv[1], True
    available = tiles.SHARED[architecture] * 1024
    for name, tile, problem in problems(architecture):
        with triton_ahead.compiled_for(architecture, SharedRecorder) as shared:
            launch.run(problem, tile)
        counted = tiles.shared_bytes(tile, problem.a.dtype.itemsize)
        print(f"{shared[0]} {counted} {available} {name} {triton_ahead.short(tile)}", flush=True)
