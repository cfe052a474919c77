"""The time of forward and backward by part of the model, and by kernel.

Modules mark their forward in torch's profile. A node of the backward has the sequence number of its forward op, and
belongs to the same part. In compiled code the ops are gone: their time belongs to no part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "part: "
OPTIMIZER, REST, LOSS, SHARDS = "optimizer", "rest", "head and loss", "shards"
ADVICE = {
    "attention": "choose a faster attn_implementation (flash_attention_3 on Hopper), or pack shorter sequences",
    "shared experts": "compile the layer: torch.compile fuses the functions between their products",
    "router": "compile the layer: torch.compile fuses softmax, top-k and the casts around the router's product",
    "norm": "compile the model: torch.compile fuses norms with the additions around them",
    LOSS: "compute the loss in chunks of tokens, or by a fused linear cross entropy; more layers dilute it",
    OPTIMIZER: "accumulate gradients over several batches for each step, or shard the state over GPUs",
    SHARDS: "keep weights gathered (reshard_after_forward=False), take more tokens a step, or spread the experts",
    REST: "compile the model: it is additions, casts and copies between the parts",
}


class Profile(NamedTuple):
    """Seconds of one call by part, and of the largest kernels (on a CPU: ops) with their part.

    Kernels that run side by side count in full, such as gathers of shards beside products.
    """

    parts: dict[str, float]
    kernels: list[tuple[str, str, float]]


def part_of(name: str, module: nn.Module) -> str | None:
    """The part that a module of a model is, by its name; None for those that contain several."""
    last = name.rpartition(".")[2]
    if last in ("experts", "inner_experts"):
        return "experts"
    if last == "shared_experts":
        return "shared experts"
    if last in ("self_attn", "attention"):
        return "attention"
    if last in ("gate", "router"):
        return "router"
    if last in ("lm_head", "embed_tokens", "tok_embeddings"):
        return LOSS
    return "norm" if "norm" in type(module).__name__.lower() else None


@contextmanager
def marked(model: nn.Module) -> Iterator[None]:
    """Marks the forward of each part in the body of the ``with``."""
    handles = []
    for name, module in model.named_modules():
        if (part := part_of(name, module)) is not None:
            ranges: list[Any] = []
            handles.append(module.register_forward_pre_hook(_enter(ranges, part)))
            handles.append(module.register_forward_hook(_leave(ranges), always_call=True))
    loss = getattr(model, "loss_function", None)  # of models of transformers
    if loss is not None:
        model.loss_function = record_function(MARK + LOSS)(loss)
    try:
        yield
    finally:
        if loss is not None:
            model.loss_function = loss
        for handle in handles:
            handle.remove()


def _enter(ranges: list[Any], part: str) -> Callable[..., None]:
    def enter(*_: Any) -> None:
        ranges.append(record_function(MARK + part))
        ranges[-1].__enter__()

    return enter


def _leave(ranges: list[Any]) -> Callable[..., None]:
    def leave(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    return leave


def profiled(model: nn.Module, step: Callable[[], object], device: torch.device, most: int = 15) -> Profile:
    """Profiles one call of ``step``, and of its kernels the ``most`` largest."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
    with marked(model), profile(activities=activities) as record:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return summary([*record.events()], device.type == "cuda", most)


def summary(events: list[Any], cuda: bool, most: int) -> Profile:
    """The seconds of the events of a profile."""
    forward = _forward_parts(events)
    parts: dict[str, float] = defaultdict(float)
    kernels: dict[tuple[str, str], float] = defaultdict(float)
    for event in _launchers(events) if cuda else events:
        part = _enclosing(event, forward) or REST
        for name, seconds in _times(event, cuda):
            parts[part] += seconds
            kernels[name, part] += seconds
    largest = sorted(kernels.items(), key=lambda item: -item[1])[:most]
    return Profile(dict(parts), [(name, part, seconds) for (name, part), seconds in largest])


def _launchers(events: list[Any]) -> list[Any]:
    """The events that launched kernels, in the order of time.

    torch also lists an op's kernels under records that have its id: calls of CUDA that by chance have its number, and
    each wait of the host while the launch queue is full. An optimizer's op has many such waits.
    """
    first: dict[int, Any] = {}
    for event in events:
        if event.kernels and not event.name.startswith("cu"):
            first.setdefault(event.id, event)
    return [*first.values()]


def _times(event: Any, cuda: bool) -> list[tuple[str, float]]:
    """Names and seconds: on CUDA of the kernels that an op launched, on a CPU of the op without those inside it.

    A marked range has one entry of its own name among its kernels: the range on the device, kernels of others included.
    """
    if cuda:
        return [(kernel.name, kernel.duration / 1e6) for kernel in event.kernels if kernel.name != event.name]
    return [] if event.name.startswith(MARK) else [(event.name, event.self_cpu_time_total / 1e6)]


def _forward_parts(events: list[Any]) -> dict[tuple[int, int], str]:
    """The part of each forward op that has a mark around it, by thread and sequence number.

    Each thread counts its own ops: with checkpointing on a GPU, autograd's thread runs forward ops, too.
    """
    forward: dict[tuple[int, int], str] = {}
    for event in events:
        part = _enclosing(event, {})
        if part is not None and event.sequence_nr >= 0:
            forward.setdefault((event.thread, event.sequence_nr), part)
    return forward


def _enclosing(event: Any, forward: Mapping[tuple[int, int], str]) -> str | None:
    """The part of the nearest event around, itself included, that has one."""
    while event is not None:
        if event.name.startswith(MARK):
            return str(event.name.removeprefix(MARK))
        if event.name.startswith("FSDP::"):
            return SHARDS
        op = event.fwd_thread, event.sequence_nr
        if event.name.startswith("autograd::engine") and op in forward:
            return forward[op]
        event = event.cpu_parent
    return None


def bottleneck(parts: Mapping[str, float]) -> str:
    """The largest part outside the experts, its share, and what a user can do."""
    others = {part: seconds for part, seconds in parts.items() if part != "experts"}
    largest = max(others, key=lambda part: others[part])
    share = others[largest] / sum(parts.values())
    return f"next after the experts: {largest}, {share:.0%} of the step; {ADVICE[largest]}"
