"""The cost of float32 experts on a GPU: forward and backward, compared with bfloat16, without and with TF32.

    python -m fusible.benchmarks.float32

Products that no grouped kernel takes run one expert after another, and wait for the split sizes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import fusible
from fusible import GroupedLinear, SwiGLU

from .arguments import positive
from .problem import PRESETS, Preset
from .timing import Function, interleaved, markdown


def step_of(preset: Preset, tokens: int, dtype: torch.dtype, device: str) -> Function:
    """A forward and backward of experts that share ``tokens`` times top-k rows equally."""
    rows = tokens * preset.top_k
    options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
    fc1 = GroupedLinear(preset.experts, preset.features, 2 * preset.hidden, **options)
    fc2 = GroupedLinear(preset.experts, preset.hidden, preset.features, **options)
    model = fusible.Sequential(fc1, SwiGLU(), fc2)
    x = torch.randn(rows, preset.features, device=device, dtype=dtype, requires_grad=True)
    leaves, dy = [x, *model.parameters()], torch.randn_like(x)
    sizes = torch.full((preset.experts,), rows // preset.experts, device=device)
    return lambda: torch.autograd.grad(model(x, split_sizes=sizes), leaves, dy)


@contextmanager
def tf32() -> Iterator[None]:
    """Lets cuBLAS use TF32 for float32 operands within the body."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def seconds(preset: Preset, tokens: int, rounds: int, device: str) -> tuple[float, float, float]:
    """Seconds in bfloat16, float32, and float32 with TF32; measured one after another, as a layer fills much memory."""

    def measured(dtype: torch.dtype) -> float:
        step = {"step": step_of(preset, tokens, dtype, device)}
        return interleaved(step, rounds, device, steady=device == "cuda")["step"]

    short, full = measured(torch.bfloat16), measured(torch.float32)
    with tf32():
        return short, full, measured(torch.float32)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, nargs="+", default=["qwen3", "mixtral", "gpt-oss"])
    parser.add_argument("--tokens", type=positive, default=4096)
    parser.add_argument("--rounds", type=positive, default=5)
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name in args.preset:
            short, *others = seconds(PRESETS[name], args.tokens, args.rounds, device)
            rows.append([name, f"{short * 1e3:.2f}", *[f"{each * 1e3:.2f} ({each / short:.1f} ×)" for each in others]])
    print(markdown([f"{args.tokens} tokens, {device}, ms", "bfloat16", "float32", "float32 with TF32"], rows))


if __name__ == "__main__":
    main()
