"""PyTorch decodes a stored weight by the definition of its format, a run of groups at a time."""

from __future__ import annotations

import torch

from ....fuser.replay import capture
from ..problems.decoding import WeightDecoding


def run(p: WeightDecoding) -> None:
    capture.refuse(f"PyTorch decodes {p.name}")
    with torch.no_grad():
        p.define(p.out)
