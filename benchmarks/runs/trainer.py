"""A training of a slice by one contestant, on one GPU or several."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from fusible.examples.moe_lm import read_text

from ..processes import of_rank
from ..timing import peak_bytes, phases_in_a_row
from .main_weights import MainWeights, adamw, groups_of, state_of
from .regions import OPTIMIZER, profiled
from .slices import SLICES, config_of, model_of
from .titan import PUBLISHED, SMALL, TitanModel, titan_of
from .ways import WAYS, Way, hold_all_rows, routed

PHASES = ("forward", "backward", "optimizer")


class Job(NamedTuple):
    """The task of one contestant, the same on every rank.

    Attributes:
        exchange: how tokens reach experts of other ranks; None: every rank has all experts.
        tokens: of a step and rank, in whole sequences of ``sequence``.
        seeds: of the weights; a loss curve of ``steps`` steps for each, the last one's model is timed.
    """

    preset: str
    way: str
    layers: int
    shrink: int
    sequence: int
    tokens: int
    steps: int
    rounds: int
    device: str
    checkpointing: bool = False
    exchange: str | None = None
    seeds: tuple[int, ...] = (0,)
    is_profiled: bool = True


class Trainer:
    """A model, its optimizer, and a step."""

    def __init__(self, job: Job, seed: int) -> None:
        gc.collect()  # models hold themselves
        self.way, self.device = WAYS[job.way], of_rank(job.device)
        torch.manual_seed(seed)
        is_alone = dist.get_world_size() == 1
        self.model = _model(job, self.way, torch.bfloat16 if is_alone else torch.float32, self.device)
        if job.checkpointing:
            checkpoint_layers(self.model)
        if is_alone and self.way.compiled:
            self.model.compile()
        if not is_alone:
            self.model = _sharded(self.model, self.way, job.exchange)
        self.optimizer: Any = MainWeights(groups_of(self.model)) if is_alone else adamw(self.model.parameters())

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of the next tokens [batch, sequence]."""
        out = self.model(input_ids=ids, labels=ids)
        loss: Tensor = out if isinstance(out, Tensor) else out.loss
        return loss

    def phases(self, ids: Tensor) -> Iterator[Tensor | None]:
        """A step, which yields after each of :data:`PHASES`; first the loss."""
        with self.way.switches():
            loss = self.forward(ids)
            yield loss.detach()
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
        yield None
        self.optimizer.step()
        self.model.zero_grad()
        yield None

    def step(self, ids: Tensor) -> Tensor:
        """Runs all phases; returns the loss."""
        loss, *_ = self.phases(ids)
        assert loss is not None
        return loss

    def gradients(self, ids: Tensor) -> None:
        """Runs forward and backward, and drops the gradients."""
        for _ in islice(self.phases(ids), 2):
            pass
        self.model.zero_grad()

    def held_bytes(self) -> int:
        """The bytes that weights and optimizer hold on this rank."""
        of_optimizer = self.optimizer.tensors() if isinstance(self.optimizer, MainWeights) else state_of(self.optimizer)
        return sum(map(_bytes, [*self.model.parameters(), *self.model.buffers(), *of_optimizer]))


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.nbytes)


def _model(job: Job, way: Way, dtype: torch.dtype, device: torch.device) -> Any:
    if way.titan:
        return titan_of(PUBLISHED if job.shrink == 1 else SMALL, job.layers, way.is_ours, dtype, device)
    import fusible.integrations.transformers  # noqa: F401

    config = config_of(job.preset, job.layers, job.shrink, job.sequence)
    config.use_cache = False
    attention = SLICES[job.preset].attention if device.type == "cuda" else None
    return routed(model_of(config, way.implementation, dtype, device, attention).train(), way)


def checkpoint_layers(model: Any) -> None:
    if not isinstance(model, TitanModel):
        is_newer = hasattr(model, "activation_checkpointing_enable")  # in transformers 5.24
        (model.activation_checkpointing_enable if is_newer else model.gradient_checkpointing_enable)()
        return
    for name, layer in model.decoder.layers.items():
        model.decoder.layers[name] = checkpoint_wrapper(layer)


def _sharded(model: Any, way: Way, exchange: str | None) -> Any:
    """The model under FSDP2, its experts on all ranks if there is an exchange; by transformers' own plans."""
    distributed: Any = import_module("transformers.distributed")
    if way.compiled:
        for layer in model.model.layers:
            compile_layer(layer, exchange is not None)
    ranks = dist.get_world_size()
    if exchange is not None:
        hold_all_rows()
    experts = {} if exchange is None else {"ep_size": ranks, "ep_implementation": exchange}
    asked = distributed.DistributedConfig(fsdp_size=ranks, fsdp_mixed_precision=True, **experts)
    asked, _, meshes = type(model).prepare_distribute_model(asked)
    return type(model).maybe_distribute_model(model, asked, meshes)


def compile_layer(layer: nn.Module, experts_apart: bool) -> None:
    """Compiles a layer; if its experts are sharded apart, all but these.

    The hooks of their shards would break the graph, and a checkpointed layer would run eagerly as a whole.
    """
    if not experts_apart:
        layer.compile()
        return
    for child in layer.children():
        experts = getattr(child, "experts", None)
        for part in [child] if experts is None else child.children():
            if part is not experts:
                part.compile()


# ---- batches


def random_batches(job: Job, vocabulary: int, device: torch.device) -> Iterator[Tensor]:
    """Tokens of the whole vocabulary, as experts get them in a trained model: to be timed."""
    draw = torch.Generator(device).manual_seed(dist.get_rank())
    while True:
        yield torch.randint(vocabulary, _shape(job), generator=draw, device=device)


def text_batches(job: Job, vocabulary: int, device: torch.device) -> Iterator[Tensor]:
    """Bytes of text, the same for every contestant and seed: to be learnt."""
    text = read_text() % vocabulary
    draw = torch.Generator().manual_seed(dist.get_rank())
    rows, length = _shape(job)
    while True:
        starts = torch.randint(len(text) - length, (rows,), generator=draw).tolist()
        yield torch.stack([text[start : start + length] for start in starts]).to(device)


def _shape(job: Job) -> tuple[int, int]:
    return job.tokens // job.sequence, job.sequence


# ---- what is measured


def measure(job: Job) -> dict[str, Any]:
    """Loss curves, steady times of the phases, peak memory and parts of a step; on all ranks together.

    Forward and backward are profiled. The optimizer's part is its steady time.
    """
    curves = [losses(Trainer(job, seed), job) for seed in job.seeds[:-1]]  # one model at a time
    trainer = Trainer(job, job.seeds[-1])
    curves.append(losses(trainer, job))
    batches = random_batches(job, _vocabulary(trainer.model), trainer.device)
    seconds = phases_in_a_row(lambda: trainer.phases(next(batches)), job.rounds, job.device)
    peak: float = trainer.held_bytes() + peak_bytes(lambda: trainer.step(next(batches)), job.device)
    peak, *seconds = _highest_of_ranks([peak, *seconds], trainer.device)
    measured: dict[str, Any] = {"losses": curves, "peak": int(peak)}
    measured["seconds"] = dict(zip(PHASES, seconds, strict=True))
    if not job.is_profiled or trainer.way.compiled:
        return measured
    gradients = profiled(trainer.model, lambda: trainer.gradients(next(batches)), trainer.device)
    parts = {**gradients.parts, OPTIMIZER: measured["seconds"][OPTIMIZER]}
    return {**measured, "parts": parts, "kernels": gradients.kernels}


def losses(trainer: Trainer, job: Job) -> list[float]:
    """Trains; returns the means over ranks, read at the end, so that steps follow one another."""
    batches = text_batches(job, _vocabulary(trainer.model), trainer.device)
    all_losses = torch.stack([trainer.step(next(batches)).float() for _ in range(job.steps)])
    dist.all_reduce(all_losses)
    return (all_losses / dist.get_world_size()).tolist()


def _vocabulary(model: nn.Module) -> int:
    embedding = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    return embedding.num_embeddings


def _highest_of_ranks(numbers: list[float], device: torch.device) -> list[float]:
    highest = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return highest.tolist()
