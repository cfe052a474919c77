"""Random numbers by counter, which every device computes alike: Philox 4x32-10 (Salmon et al., 2011)."""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF


def new_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """int64 [1], from a generator of PyTorch; without one from the default one, whose state a checkpoint keeps."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), device=device, generator=generator)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits, as int64, for each of the counters: four words, too, that broadcast.

    A product of two words overflows int64, whose bits are those of the unsigned product.
    """
    a, b, c, d = counter
    low, high = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        p, q = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (q >> 32 & _WORD) ^ b ^ low, q & _WORD, (p >> 32 & _WORD) ^ d ^ high, p & _WORD
        low, high = low + _STEPS[0] & _WORD, high + _STEPS[1] & _WORD
    return a, b, c, d


def uniform_of_rows(seed: Tensor, copy: int, group: Tensor, row: Tensor, features: int) -> Tensor:
    """float32 [..., features], from 0 inclusive to 1 exclusive in steps of 2 ** -16, for each row of a group.

    Eight rows of a feature share a counter, so that the thread of their column needs one counter.

    Args:
        copy: number of the copy of a tensor, each of which has numbers of its own.
        group, row: int64 [...], the group of each row, and its number in the group.
    """
    feature = torch.arange(features, device=seed.device)
    octet, group, index = row.unsqueeze(-1) // 8, group.unsqueeze(-1), row.unsqueeze(-1) % 8
    words = torch.stack(philox((octet, feature, group, torch.full_like(group, copy)), seed))
    word = words.gather(0, (index // 2).expand(words.shape[1:]).unsqueeze(0)).squeeze(0)
    return (word >> index % 2 * 16 & 0xFFFF).float() / 2**16
