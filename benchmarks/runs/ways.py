"""The contestants of a run: who computes the experts, under what."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import fusible
from fusible.integrations.routers import route

FORKED_WITH = ("fusible.integrations.transformers",)
"""Modules that a process of ranks imports once, and the command line never: it may be missing."""


class Way(NamedTuple):
    """A contestant.

    Attributes:
        implementation: the experts implementation of transformers.
        compiled: whether the model runs under ``torch.compile``.
        recipe: quantises the experts' products, as :func:`fusible.config` takes it.
        titan: whether the model is torchtitan's; its experts are ours if ``implementation`` is ``"fusible"``.
        base: the contestant whose losses it must have.
    """

    implementation: str
    compiled: bool = False
    recipe: Any = None
    titan: bool = False
    base: str = "grouped_mm"

    @property
    def is_ours(self) -> bool:
        return self.implementation == "fusible"

    @property
    def decoding_experts(self) -> tuple[str | None, ...]:
        """The experts implementations that may decode; transformers has two. None: that of the prompts."""
        return ("batched_mm", "grouped_mm") if self.implementation == "grouped_mm" else (None,)

    def switches(self) -> AbstractContextManager[Any]:
        """The switches of forward and backward."""
        return nullcontext() if self.recipe is None else fusible.config(recipe=self.recipe)


WAYS = {
    "grouped_mm": Way("grouped_mm"),
    "grouped_mm+compile": Way("grouped_mm", compiled=True),
    "fusible": Way("fusible"),
    "fusible+compile": Way("fusible", compiled=True),
    "fusible+Float8Block": Way("fusible", recipe=fusible.Float8Block()),
    "torchtitan": Way("grouped_mm", titan=True, base="torchtitan"),
    "torchtitan+fusible": Way("fusible", titan=True, base="torchtitan"),
}


def routed(model: Any, way: Way) -> Any:
    """The model of transformers; beside experts of ours, its routers choose by :func:`fusible.functional.route`."""
    if way.is_ours:
        route(model)
    return model


def refusal(way: Way, preset: str, ranks: int, device: str) -> str | None:
    """The reason why a contestant cannot take part; None: it can."""
    if not way.titan:
        return None
    reasons = {
        "torchtitan is not installed": find_spec("torchtitan") is None,
        "of these models it has Qwen3 alone": preset != "qwen3",
        "it shards by its own trainer": ranks > 1,
        "its attention has no backward on a CPU": device == "cpu",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def exchanges(way: Way) -> list[str]:
    """The registered ways of transformers to bring tokens to experts of other ranks: its own, and ours to ours."""
    if way.titan:
        return []
    try:
        import_module("fusible.integrations.transformers_ep")  # registers ours
        names = [*import_module("transformers.distributed.expert_parallel").EPImplementationInterface()]
    except (ImportError, AttributeError):  # before 5.24
        return []
    ours = [name for name in names if name.startswith("fusible") and way.is_ours]
    return ["all_to_all", *ours]


def hold_all_rows() -> None:
    """Registers ``fusible_symmetric`` with memory for all rows: routers of random weights are far from even."""
    ours: Any = import_module("fusible.integrations.transformers_ep")
    ours.register("fusible_symmetric", transport="symmetric", capacity="worst")
