"""The kernels of a training step of a model's experts, and why they run; here, or on a GPU of another machine."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import Explanation, GroupedLinear, Scale, Sequential, SwiGLU
from ..benchmarks.arguments import command, device, file
from ..benchmarks.problem import Sizes, add_size_arguments, sizes_of
from ..ops.kernels.architecture import Capability
from ..ops.kernels.extension import assume

ARCHITECTURES = {"sm_80": Capability(8, 0), "sm_90": Capability(9, 0), "sm_100": Capability(10, 0)}
WITHOUT_DATA = "These kernels serve tensors without data. --arch sm_90 shows the kernels of a Hopper GPU."


def main(argv: Sequence[str]) -> None:
    """Prints or writes the explanation."""
    args = _arguments(argv)
    explanation = at_a_desk(sizes_of(args), ARCHITECTURES[args.arch]) if args.arch else on(args.device, sizes_of(args))
    if args.device == "meta" and args.arch is None:
        print(WITHOUT_DATA, file=sys.stderr)
    text = shown(explanation, args)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)


def shown(explanation: Explanation, args: Namespace) -> str:
    """Tables, a drawing or data."""
    if args.json:
        return json.dumps(explanation.to_dict(), indent=1)
    return str(getattr(explanation, f"to_{args.draw}")() if args.draw else explanation)


def on(device: str, sizes: Sizes) -> Explanation:
    """The explanation of experts on a device, or on the meta device."""
    return flagship(sizes).to_empty(device=device).explain(op_kwargs=None, **inputs(sizes, device))


def at_a_desk(sizes: Sizes, capability: Capability) -> Explanation:
    """The explanation of experts on a GPU of this compute capability, which need not exist here; allocates nothing."""
    model = flagship(sizes)
    with FakeTensorMode():
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")))
        call = inputs(sizes, "cuda")
    with assume(capability):
        return replace(model.explain(op_kwargs=None, **call), replay="")  # stand-ins are never replayed


def inputs(sizes: Sizes, device: str) -> dict[str, object]:
    """Arguments of a training step, without values."""
    return {
        "x": torch.empty(sizes.rows, sizes.features, device=device, dtype=torch.bfloat16, requires_grad=True),
        "split_sizes": torch.empty(sizes.experts, device=device, dtype=torch.int64),
        "scales": torch.empty(sizes.rows, device=device, requires_grad=True),
    }


def flagship(sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Sequential:
    """The experts of a mixture-of-experts layer, on the meta device, as only sizes count."""
    with torch.device("meta"):
        return Sequential(
            GroupedLinear(sizes.experts, sizes.features, 2 * sizes.hidden, bias=False, dtype=dtype),
            SwiGLU(),
            Scale(),
            GroupedLinear(sizes.experts, sizes.hidden, sizes.features, bias=False, dtype=dtype),
        )


def device_or_meta(text: str) -> str:
    """The device if it exists here, else the meta device."""
    return text if text == "meta" else device(text)


def _arguments(argv: Sequence[str]) -> Namespace:
    parser = command("explain", __doc__)
    add_size_arguments(parser, tokens=8192)
    here = "cuda" if torch.cuda.is_available() else "meta"
    parser.add_argument(
        "--device", type=device_or_meta, default=here, help="where the experts are; meta needs no memory"
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, help="of a GPU that need not be here, for --device meta")
    parser.add_argument("--draw", choices=("text", "mermaid", "dot", "svg"), help="a drawing instead of tables")
    parser.add_argument("--out", type=file, help="write it there")
    args = parser.parse_args(argv)
    if args.arch and args.device != "meta":
        parser.error(f"argument --arch: is for --device meta, got {args.device}")
    if args.draw and args.json:
        parser.error("argument --draw: not allowed with argument --json")
    return args
