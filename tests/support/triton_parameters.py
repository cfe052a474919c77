"""Prints of kernels compiled for a GPU whether their parameters are those that a launch of the extension gives them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton_ahead
from triton_ahead import compiled_for, launch, problems, run_rows

from fusible.ops.kernels.triton import tiles
from fusible.ops.kernels.triton.device.foreign import KernelParameters

BYTES = {"64": 8, "32": 4, "16": 2, "8": 1}


def sizes_in_text(kernel: Any) -> list[int]:
    """The bytes of each parameter in the PTX of a kernel."""
    declared = kernel.asm["ptx"].partition(".entry")[2].partition("{")[0]
    found = re.findall(r"\.param (?:\.align \d+ )?\.[busf](\d+)[^\[,]*(?:\[(\d+)\])?", declared)
    return [int(count) if count else BYTES[bits] for bits, count in found]


class Recorder(triton_ahead.Recorder):
    """Keeps the arguments of what it compiles."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        super().compile(*args, **kwargs)
        self.compiled[-1] = (self.compiled[-1], args)


def launches(architecture: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Kernels of an MLP and of passes over rows, with and without bulk copies, and what they are launched with."""
    with compiled_for(architecture, Recorder) as compiled:
        persistent = tiles.TABLE["sm_90"]["nt"]._replace(tma=architecture != "sm_80")
        for tile in (persistent, tiles.TABLE["sm_80"]["nt"]._replace(apart=True)):
            for problem in problems(4, 64, 32, 70, torch.bfloat16, True).values():
                launch.run(problem, tile)
        run_rows(5, 2, 4, 64, torch.bfloat16)
        launch._table(torch.zeros(3, 16, 64, dtype=torch.bfloat16).unbind(0))
    yield from compiled


def main(argv: Sequence[str]) -> None:
    for kernel, arguments in launches(argv[0]):
        parameters = KernelParameters(getattr(kernel.metadata, "tensordesc_meta", None) or ())
        for kind, value in zip(kernel.src.signature.values(), arguments, strict=False):
            parameters.add(kind, value)
        expected = sizes_in_text(kernel)
        parameters.fill(expected)  # an error where they differ
        scratch = [getattr(kernel.metadata, f"{name}_scratch_size", 0) for name in ("global", "profile")]
        print(kernel.name, len(parameters.maps) > 0, parameters.sizes == expected and not any(scratch))


if __name__ == "__main__":
    main(sys.argv[1:])
