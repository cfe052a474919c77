"""Writes the curves of the built-in activations as C++: ``csrc/device/functions/functions.cuh``.

Run ``python -m emulation.curves`` in ``tests`` after a change of :data:`CURVES`, or of how programs are built or
printed. Building the extension needs the file and no PyTorch.
"""

from __future__ import annotations

from emulation import build

from fusible.ops.programs.activations import CURVES
from fusible.ops.programs.cpp import function_type
from fusible.ops.programs.tracing import trace

FILE = build.ROOT / "csrc" / "device" / "functions" / "functions.cuh"
_VECTORS = {"silu": 2}
"""How many vectors a lane of an epilogue differentiates at a time, if not one: a short function has the registers."""


def source() -> str:
    """The text of the file."""
    types = [_type(curve) for curve in CURVES]
    cases = [f"    case Curve::k{_name(curve)}: return body({_name(curve)}<kFast>());\n" for curve in CURVES]
    numbers = " && ".join([f"Curve::k{_name(curve)} == Curve{{{i}}}" for i, curve in enumerate(CURVES)])
    return f"""\
// SPDX-License-Identifier: Apache-2.0
// Written by `python -m emulation.curves`, run in tests, from ops/programs/activations.py: the curves of the built-in
// activations, of one constant, the slope inside silu. Functions: see device/functions/pointwise.cuh.
// clang-format off
#pragma once
#include "device/functions/pointwise.cuh"
#include "fusible/activation_kind.h"

namespace fusible {{

{"".join(types)}// body(curve).
template <bool kFast, class Body>
DEVICE void with_curve(Curve curve, Body body) {{
  switch (curve) {{
{"".join(cases)}  }}
}}
static_assert({numbers}, "the order of Python's table");

}}  // namespace fusible
"""


def _type(curve: str) -> str:
    program = trace(CURVES[curve], ("x",), (1.25,))
    text = function_type(program, _name(curve), fast="kFast", vectors=_VECTORS.get(curve, 1))
    return f"template <bool kFast>\n{text}\n"


def _name(curve: str) -> str:
    return curve.title().replace("_", "")


if __name__ == "__main__":
    FILE.write_text(source())
