"""Exchanges of tokens that say where they come from: every 16 bytes carry the exchange, the rank and the token.

What a rank must get follows from ids that all ranks draw alike, so it is checked on the device, row by row and sum by
sum, and no host waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from ep_world import World
from torch import Tensor

from fusible import ep

WORDS = 8  # of 16 bits, in 16 bytes
VALUES = 31  # of a row: their sums over eight slots are whole numbers that bfloat16 holds


class Sources(NamedTuple):
    """The rank, token and slot of some rows, int64 [n], and which of the rows exist."""

    rank: Tensor
    token: Tensor
    slot: Tensor
    there: Tensor


def drawn_ids(group: ep.Group, number: int, tokens: int) -> Tensor:
    """Ids for the tokens of all ranks, [R, T, k], the same on every rank; a few have no expert."""
    s, device = group.settings, torch.get_default_device()
    draw = torch.Generator(device).manual_seed(number)
    return torch.rand(group.size, tokens, s.num_experts + 1, generator=draw).topk(s.top_k).indices


def sources_of(ids: Tensor, ends: Tensor, rows: int) -> Sources:
    """The sources of the rows of the experts between two ``ends``: by expert, then rank, token and slot."""
    experts, order = ids.flatten().sort(stable=True)
    first, end = torch.searchsorted(experts, ends)
    number = first + torch.arange(rows)
    there = number < end
    slot = order[number.clamp(max=len(order) - 1)]
    token = slot // ids.shape[2]
    return Sources(token // ids.shape[1], token % ids.shape[1], slot % ids.shape[2], there)


def words_of(number: int, rank: Tensor, token: Tensor, hidden: int) -> Tensor:
    """int16 [n, hidden]: what the tokens of an exchange carry."""
    piece = torch.arange(hidden // WORDS).expand(len(token), -1)
    exchange = torch.full_like(piece, number)
    rank, token = (each.unsqueeze(1).expand_as(piece) for each in (rank, token))
    words = exchange & 0x7FFF, exchange >> 15, rank, token, piece, ~exchange & 0x7FFF, ~rank, ~token
    return torch.stack(words, -1).flatten(1).to(torch.int16)


def values_of(number: int, rank: Tensor, token: Tensor, slot: Tensor, hidden: int) -> Tensor:
    """[n, hidden]: whole numbers that tell rows, and pieces of them, from one another."""
    piece = torch.arange(hidden) // WORDS
    return ((7 * number + 3 * rank + 5 * token + 11 * slot).unsqueeze(-1) + piece) % VALUES


class Carried(NamedTuple):
    """Exchanges of a group.

    Attributes:
        before: called in front of each dispatch and combine, with its name and the number of the exchange: to be late,
            or to poison memory that the next move must write.
    """

    world: World
    group: ep.Group
    tokens: int
    before: Callable[[str, int], Any] = lambda move, number: None

    def mismatches(self, exchanges: int) -> Tensor:
        """How many words of rows and elements of sums are wrong, int64 [2]. Waits for nothing."""
        wrong, experts = torch.zeros(2, dtype=torch.int64), self.group.local_experts
        ends = torch.tensor([experts.start, experts.stop])
        with torch.no_grad():
            for number in range(exchanges):
                wrong += self._exchange(number, ends)
        return wrong

    def _exchange(self, number: int, ends: Tensor) -> Tensor:
        group, hidden, k = self.group, self.group.settings.hidden, self.group.settings.top_k
        ids, mine = drawn_ids(group, number, self.tokens), torch.arange(self.tokens)
        rank = torch.full_like(mine, self.world.rank)
        x = words_of(number, rank, mine, hidden).view(torch.bfloat16)
        self.before("dispatch", number)
        call = {"top_k_index": ids[self.world.rank], "top_k_weights": torch.ones(self.tokens, k)}
        rows, _, _, slots = ep.EPDispatch(group)(x, **call)
        sources = sources_of(ids, ends, len(rows))
        expected = words_of(number, sources.rank, sources.token, hidden)
        wrong_words = ((rows.view(torch.int16) != expected) & sources.there.unsqueeze(1)).sum()
        self.before("combine", number)
        y = ep.EPCombine(group)(self._results(number, sources, rows), row_of_slot=slots)
        slots_of_tokens = torch.broadcast_tensors(rank.unsqueeze(1), mine.unsqueeze(1), torch.arange(k))
        each = values_of(number, *slots_of_tokens, hidden)
        valid = (ids[self.world.rank] < group.settings.num_experts).unsqueeze(2)
        return torch.stack((wrong_words, (y != (each * valid).sum(1)).sum()))

    def _results(self, number: int, sources: Sources, rows: Tensor) -> Tensor:
        """The experts' results: in the group's buffer, if it has one, at every other exchange; NaN in the tail."""
        values = values_of(number, sources.rank, sources.token, sources.slot, rows.shape[1]).to(rows.dtype)
        results = torch.where(sources.there.unsqueeze(1), values, torch.nan)
        buffer = self.group.row_buffer() if number % 2 else None
        return results if buffer is None else buffer.copy_(results)
