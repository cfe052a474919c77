"""Compiles our Triton kernels for GPUs that are not here, and says what came of it.

``python tests/support/triton_ahead.py [sm_80 ...] [--dtype bfloat16]`` prints registers, spills, shared memory and
matrix instructions of the kernels of an MLP; a process of its own, in which kernels are not interpreted.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from checks import fused, gemm
from checks.functions import ACTS_OF_COLUMNS, ACTS_OF_MATRICES
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from fusible.ops.kernels.problems.gemm import Activate, ActivateBackward, ActivationGrads, GroupedGemm, Layout
from fusible.ops.kernels.triton import gemm as triton_gemm
from fusible.ops.kernels.triton import tiles
from fusible.ops.kernels.triton.device import launch, passes, permutation, plan
from fusible.ops.kernels.triton.shape import ProgramTile
from fusible.ops.values.activation_spec import ActivationSpec, gated

SWIGLU = gated("silu", None, 1.0, 0.0, "concat")
ROWS = {"long": 65536, "middle": 128 * 40, "short": 1024}
PRODUCTS = ("rows_kernel", "weights_kernel")
WITH_EPILOGUE = (*PRODUCTS, "epilogue_kernel")


class Recorder:
    """Stands for a kernel: compiles each launch for a target instead of launching it."""

    def __init__(self, kernel: JITFunction, target: GPUTarget, compiled: list[Any]) -> None:
        self.kernel, self.target, self.compiled = kernel, target, compiled

    def __getitem__(self, grid: Any) -> Any:
        return self.compile

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments, of which their types and what the kernel is compiled for, and the options."""
        backend = make_backend(self.target)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        return backend, kwargs, *bind(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        kwargs = {"debug": False, "instrumentation_mode": "", **kwargs}
        backend, kwargs, bound, specialization, options = self.bind(*args, **kwargs)
        packed, signature, constexprs, attrs = self.kernel._pack_args(backend, kwargs, bound, specialization, options)
        source = ASTSource(self.kernel, signature, constexprs, attrs)
        self.compiled.append(triton.compile(source, target=self.target, options=packed.__dict__))


class FormRecorder(Recorder):
    """Notes what each launch would compile a kernel for."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        _, _, _, specialization, _ = self.bind(*args, **{"debug": False, "instrumentation_mode": "", **kwargs})
        self.compiled.append(f"{self.kernel.__name__} {specialization}")


def target_of(name: str) -> GPUTarget:
    return GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[3:]), 32)


@contextmanager
def compiled_for(name: str, recorder: type[Recorder] = Recorder) -> Iterator[list[Any]]:
    """In the body, launches become compilations for ``sm_80`` and the like; gives the list of what they compiled."""
    compiled = list[Any]()
    saved = [
        (module, key, value)
        for module in (launch, passes, permutation, plan)
        for key, value in vars(module).items()
        if isinstance(value, JITFunction) and key.endswith("kernel")
    ]
    for module, key, value in saved:
        setattr(module, key, recorder(value, target_of(name), compiled))
    architecture_of, launch.architecture_of = launch.architecture_of, lambda device: name
    try:
        yield compiled
    finally:
        launch.architecture_of = architecture_of
        for module, key, value in saved:
            setattr(module, key, value)


def problems(
    groups: int, hidden: int, features: int, rows: int, dtype: torch.dtype, wide: bool, spec: ActivationSpec = SWIGLU
) -> dict[str, GroupedGemm]:
    """The six products of an MLP, with a bias; of tensors that nothing reads.

    Args:
        wide: weight gradients are added to float32.
    """

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    sizes, columns = torch.zeros(groups, dtype=torch.int64), features * (2 if spec.gated else 1)
    x, y, h, a = empty(rows, hidden), empty(rows, hidden), empty(rows, columns), empty(rows, features)
    w1, w2, p = empty(groups, columns, hidden), empty(groups, hidden, features), torch.empty(rows)
    fc1 = GroupedGemm(
        Layout.NT, x, w1, sizes, a, bias=empty(groups, columns), fresh=True, epilogue=Activate(spec, p, h)
    )
    dfc2 = GroupedGemm(Layout.NN, y, w2, sizes, empty(rows, columns), fresh=True)
    grads = ActivationGrads(dfc2.out, torch.empty(rows), empty(rows, features))  # type: ignore[arg-type]
    dfc2.epilogue = ActivateBackward(spec, p, h, grads)
    out, beta = torch.float32 if wide else dtype, 1.0 if wide else None
    return {
        "fc1": fc1,
        "fc2": GroupedGemm(Layout.NT, a, w2, sizes, y, fresh=True),
        "dgrad2": dfc2,
        "dgrad1": GroupedGemm(Layout.NN, h, w1, sizes, empty(rows, hidden), fresh=True),
        "wgrad2": GroupedGemm(Layout.TN, y, a, sizes, empty(groups, hidden, features, dtype=out), beta=beta),
        "wgrad1": GroupedGemm(Layout.TN, h, x, sizes, empty(groups, columns, hidden, dtype=out), beta=beta),
    }


def with_operands(architecture: str) -> list[Any]:
    """The kernels of products of matrices anywhere in memory, and of a function that reads columns and elements.

    The interpreter takes tuples that the compiler does not.
    """
    with compiled_for(architecture) as compiled, patch.object(triton_gemm, "triton_refusal", lambda rows: None):
        for layout in Layout:
            form = {"bias": torch.bfloat16, "alpha": "groups", "beta": "groups", "accumulate": True, "separate": True}
            gemm.Problem("cpu", gemm.Case(layout, (70, 0, 30), backend="triton", **form)).launch()  # type: ignore[arg-type]
        make, function = ACTS_OF_MATRICES["added to gate and up"]
        fused.forward(fused.Tensors("cpu", fused.case_of(make("concat"), function, sizes=(70, 0), backend="triton")))
        make, function = ACTS_OF_COLUMNS["slopes of gate and up"]
        tensors = fused.Tensors("cpu", fused.case_of(make("concat"), function, sizes=(70, 0), backend="triton"))
        fused.backward(tensors, tensors.rows(tensors.case.width))
    return products_of(compiled)


def with_a_residual(architecture: str) -> list[Any]:
    """The kernels of a gate that is added to elements: with the pre-activation stored, and without."""
    make, function = ACTS_OF_MATRICES["residual"]
    tensors = fused.Tensors("cpu", fused.case_of(make("concat"), function, sizes=(70, 0), backend="triton"))
    with compiled_for(architecture) as compiled, patch.object(triton_gemm, "triton_refusal", lambda rows: None):
        for keep in (True, False):
            fused.forward(tensors, keep)
    return products_of(compiled)


def products_of(compiled: list[Any]) -> list[Any]:
    return [kernel for kernel in compiled if kernel.name in PRODUCTS]


def run_rows(tokens: int, slots: int, experts: int, columns: int, dtype: torch.dtype) -> None:
    """Every pass over rows that is not a product, of tensors that nothing reads."""
    ids, weights = torch.zeros(tokens, slots, dtype=torch.int64), torch.zeros(tokens, slots, dtype=dtype)
    found = permutation.route(ids, experts, weights)
    sizes, place = found.tokens_per_expert, found.row_of_slot
    x, rows = torch.zeros(tokens, columns, dtype=dtype), torch.zeros(tokens * slots, columns, dtype=dtype)
    permutation.permute(x, place, sizes, rows, True)
    permutation.permute(x, place, sizes, rows, False)
    permutation.unpermute(rows, place, sizes, x)
    permutation.of_slots(weights.view(-1).float(), place, sizes, weights)
    vectors, dots = torch.zeros(experts, columns, dtype=dtype), torch.zeros(tokens * slots)
    passes.column_sums(rows, sizes[:-1], vectors, dots)
    passes.row_dots(rows, vectors, sizes[:-1], dots)
    passes.zero_tail(rows, sizes[:-1])
    passes.sum_dots(torch.zeros(tokens * slots, 3), sizes[:-1], dots)


def of_rows(architecture: str) -> list[Any]:
    """The kernels of passes over rows."""
    with compiled_for(architecture) as compiled:
        run_rows(300, 8, 128, 2048, torch.bfloat16)
        run_rows(5, 1, 1, 1, torch.float32)
        run_rows(5, 3, 4096, 1407, torch.float16)
    return compiled


def forms(tokens: int) -> list[str]:
    """The forms of the kernels that an MLP of so many tokens compiles, and of those that move its rows."""
    with compiled_for("sm_90", FormRecorder) as compiled:
        for problem in problems(4, 64, 32, tokens, torch.bfloat16, False).values():
            launch.run(problem, tiles.TABLE["sm_80"]["nt"])
        for problem in problems(4, 64, 32, tokens, torch.bfloat16, False).values():
            launch.run(problem, tiles.TABLE["sm_90"]["nt"])
        run_rows(tokens, 2, 4, 64, torch.bfloat16)
        apart = torch.zeros(64, 16, 64, dtype=torch.bfloat16).unbind(0)
        shifted = [each.view(-1)[tokens % 2 :][:512].view(8, 64) for each in apart]
        launch._table(shifted)
    return compiled


def report(architecture: str, problem: GroupedGemm, apart: bool = False) -> Iterator[str]:
    """A line on each kernel of a problem, which says ``over`` where the card has less shared memory.

    That of an epilogue without a product starts with ``alone``.
    """
    with compiled_for(architecture) as compiled:
        tile = launch.tile_of(problem)
        tile = tile._replace(apart=True) if apart else tile
        launch.run(problem, tile)
    for kernel in [each for each in compiled if each.name in WITH_EPILOGUE]:
        over = "over" if kernel.metadata.shared > tiles.SHARED[tiles.nearest(architecture)] * 1024 else "fits"
        yield f"{'alone ' * (kernel.name not in PRODUCTS)}{over} {short(tile):28} {summary(kernel)}"


def summary(kernel: Any) -> str:
    """Registers, spilled bytes, shared memory, and which matrix instructions and copies a kernel has."""
    text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    names = r"wgmma\.mma_async|mma\.sync|tcgen05\.mma|cp\.async\.bulk\.tensor|cp\.async\.c[ag]|v_mfma_\w+|fma\.rn\.f32"
    counts = collections.Counter(re.findall(names, text))
    used = ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))
    registers, spills = ptxas(kernel) if "ptx" in kernel.asm else of_amd(text)
    return f"{registers} registers, {spills} spilled, {kernel.metadata.shared / 1024:.1f} KB; {used}"


def of_amd(text: str) -> tuple[int, int]:
    """Registers of a thread, and its bytes in memory; scalars that spill go to registers, not to memory."""
    found = {name: int(n) for name, n in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", text)}
    return found["vgpr_count"], found["private_segment_fixed_size"]


def ptxas(kernel: Any) -> tuple[int, int]:
    """Registers of a thread and spilled bytes, as ptxas says."""
    capability = kernel.metadata.target.arch
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(kernel.asm["ptx"])
        name = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={name}", str(path), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
    found = re.search(r"Used (\d+) registers", said)
    return int(found[1]) if found else 0, spills


def short(tile: ProgramTile) -> str:
    flags = "".join(c for c, on in (("t", tile.tma), ("f", tile.flatten)) if on)
    return f"{tile.m}x{tile.n}x{tile.k}/{tile.warps}w{tile.stages}s{tile.per_sm}p{'.' + flags if flags else ''}"


OTHERS = {"passes": of_rows, "operands": with_operands, "residual": with_a_residual}


def arguments_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*", default=["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", nargs="*", default=["long"])
    parser.add_argument("--sizes", nargs=2, type=int, default=(2048, 768), help="hidden and inner features")
    parser.add_argument("--products", nargs="*", default=["fc1", "fc2", "dgrad2", "dgrad1", "wgrad1"])
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--apart", action="store_true", help="epilogues are kernels of their own")
    parser.add_argument("--tf32", action="store_true", help="float32 may be rounded")
    parser.add_argument("--instead", choices=OTHERS, help="other kernels than those of an MLP")
    parser.add_argument("--forms", nargs="*", help="what kernels are compiled for, of so many tokens, instead")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    arguments = arguments_of(argv)
    torch.backends.cuda.matmul.allow_tf32 = arguments.tf32
    if arguments.forms:
        for tokens in arguments.forms:
            print("\n".join(f"{tokens} {form}" for form in forms(int(tokens))))
    elif arguments.instead:
        for architecture in arguments.targets:
            for kernel in OTHERS[arguments.instead](architecture):
                print(f"{architecture:7} {kernel.name:20} {summary(kernel)}", flush=True)
    else:
        for architecture, rows in product(arguments.targets, arguments.rows):
            of_mlp = problems(128, *arguments.sizes, ROWS[rows], getattr(torch, arguments.dtype), arguments.wide)
            for name in arguments.products:
                for line in report(architecture, of_mlp[name], arguments.apart):
                    print(f"{architecture:7} {rows:6} {name:7} {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
