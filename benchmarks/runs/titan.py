"""torchtitan's Qwen3 with mixture-of-experts layers, its experts replaced by ours or not."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

OVERRIDE = "fusible.integrations.torchtitan.grouped_experts"
PUBLISHED, SMALL = "30B-A3B", "debugmodel_moe"  # names of its configurations


class TitanModel(nn.Module):
    """A decoder that returns its loss, as a model of transformers does."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of the next tokens [batch, sequence]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        masks = self.decoder.get_attention_masks(positions=positions)
        logits = self.decoder(input_ids, positions=positions, attention_masks=masks)[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def titan_of(name: str, layers: int, is_ours: bool, dtype: torch.dtype, device: torch.device) -> TitanModel:
    """The first layers of a configuration; weights from torch's generator, the same ones for both kinds of experts."""
    decoder = _built(name, layers, dtype, device)
    if not is_ours:
        return TitanModel(decoder)
    state = decoder.state_dict()
    ours = _built(name, layers, dtype, device, override=True)
    ours.load_state_dict(state)
    return TitanModel(ours)


def _built(name: str, layers: int, dtype: torch.dtype, device: torch.device, override: bool = False) -> Any:
    asked = import_module("torchtitan.models.qwen3").model_registry(name).model
    asked.layers = asked.layers[:layers]
    if override:
        overrides = import_module("torchtitan.config.override")
        overrides.apply_overrides(overrides.OverrideConfig(imports=[OVERRIDE]), asked)
    with device:
        decoder = asked.build().to(dtype)
        decoder.init_states()
    return decoder
