"""Two ways to decode greedily with a model of transformers: its own ``generate``, and one CUDA graph a token.

``generate`` runs Python between two tokens: it extends masks and positions, checks guards of compiled code, and looks
for a reason to stop. With one prompt that takes longer than the kernels of a small model.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

WARM_UP = 2  # steps before a graph is captured


class Options(NamedTuple):
    """The way to decode.

    Attributes:
        new: tokens that follow a prompt.
        compiled: whether the step of a token runs under ``torch.compile``.
        tuned: compiled products of one row are kernels of Inductor, whose tiles are timed.
        experts: the experts implementation of transformers that decodes; None: that of the prompts, or, in
            ``generate``, transformers' choice.
    """

    new: int
    compiled: bool = False
    tuned: bool = False
    experts: str | None = None


class Ticks:
    """A streamer of transformers that keeps the time of each token; the first is that of the prompt."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with each token, on the host."""
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Called behind the last token."""


class Generate:
    """The loop of transformers' ``generate``, on a static cache; compiled steps run in CUDA graphs."""

    def __init__(self, model: Any, ids: Tensor, options: Options) -> None:
        self._model, self._ids, self._options = model, ids, options

    def __call__(self, new: int | None = None) -> list[float]:
        """Generates tokens for each prompt; returns the time of the prompts and of each token."""
        ticks, ids = Ticks(), self._ids
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new or self._options.new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=not self._options.compiled,
            streamer=ticks,
        )
        return ticks.at

    def small(self) -> None:
        """Two tokens, with all the memory that more would take."""
        self(2)


class OneGraph:
    """A static cache, and a CUDA graph that decodes a token for each prompt and makes it the input of the next replay.

    Prompts [batch, sequence] are of one length. On a CPU there is no graph.

    Attributes:
        tokens: those of the last call, for each prompt.
    """

    def __init__(self, model: Any, ids: Tensor, options: Options) -> None:
        self._model, self._ids, self._options = model, ids, options
        self.tokens: list[list[int]] = []
        length = ids.shape[1] + options.new
        self._cache = import_module("transformers").StaticCache(config=model.config, max_cache_len=length)
        self._token, self._position = torch.zeros_like(ids[:, :1]), torch.zeros_like(ids[:1, :1])
        self._named_cache = {_name_of_cache(model): self._cache, "use_cache": True}
        self._constants = _Constants()
        self._step: Callable[[], object] = self._decode_eagerly
        if options.compiled:
            tuning: dict[str, Any] | None = {"coordinate_descent_tuning": True} if options.tuned else None
            self._step = torch.compile(self._decode, dynamic=False, options=tuning)
        self._replay: Callable[[], object] | None = None

    def __call__(self) -> list[float]:
        """Generates tokens for each prompt; returns the time of the prompts and of each token."""
        step, read = self._captured(), []
        _wait(self._ids)
        ticks = [time.perf_counter()]
        self._start()
        for left in reversed(range(self._options.new)):
            read.append(self._token[:, 0].tolist())  # as a user reads each token
            ticks.append(time.perf_counter())
            if left:
                step()
        self.tokens = [list(of_prompt) for of_prompt in zip(*read, strict=True)]
        return ticks

    def small(self) -> None:
        """The prompts and a token, without a graph."""
        self._start()
        self._next()

    def kernels(self) -> tuple[int, float]:
        """The number of kernels and copies of a token, and their seconds."""
        step = self._captured()
        self._start()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
            step()
            _wait(self._ids)
        ran = [e for e in record.events() if e.device_type.name == "CUDA" and not e.is_user_annotation]
        return len(ran), sum(event.time_range.elapsed_us() for event in ran) / 1e6

    def _start(self) -> None:
        """Runs the prompts on an empty cache."""
        self._cache.reset()
        logits = self._model(input_ids=self._ids, logits_to_keep=1, **self._named_cache).logits
        self._token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self._position.fill_(self._ids.shape[1])

    def _decode(self) -> None:
        logits = self._model(input_ids=self._token, position_ids=self._position, **self._named_cache).logits
        self._token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self._position.add_(1)

    def _decode_eagerly(self) -> None:
        with self._constants:
            self._decode()

    def _captured(self) -> Callable[[], object]:
        """Replays the graph of a step; on a CPU, the step. Steps before the capture leave nothing behind."""
        if self._replay is not None:
            return self._replay
        for _ in range(WARM_UP):
            self._start()
            self._next()
        self._replay = self._graph().replay if self._ids.is_cuda else self._next
        return self._replay

    def _graph(self) -> torch.cuda.CUDAGraph:
        self._start()
        _check_windows(self._cache, self._ids.shape[1])
        graph = torch.cuda.CUDAGraph()
        # watchdogs of NCCL look at events
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._next()
        return graph

    def _next(self) -> None:
        """A step by the experts that decode."""
        if self._options.experts is None:
            self._step()
            return
        of_prompts = self._model.config._experts_implementation
        self._model.set_experts_implementation(self._options.experts)
        try:
            self._step()
        finally:
            self._model.set_experts_implementation(of_prompts)


class _Constants(TorchFunctionMode):
    """Makes each tensor of Python's numbers once and returns copies of it: a CUDA graph cannot take them from the host.

    transformers' static cache makes one for every token once a sliding window is full.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors = dict[str, Tensor]()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the function, unless it makes a tensor that is known."""
        kwargs = kwargs or {}
        if function is not torch.tensor or any(isinstance(each, Tensor) for each in args):
            return function(*args, **kwargs)
        key = repr((args, kwargs))
        if key not in self._tensors:
            self._tensors[key] = function(*args, **kwargs)
        return self._tensors[key].clone()


LOOPS: dict[str, type[OneGraph | Generate]] = {"graph": OneGraph, "generate": Generate}


def _name_of_cache(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.22


def _check_windows(cache: Any, prompt: int) -> None:
    """A window that is not full yet counts its tokens on the host, where a graph does not."""
    shortest = max([layer.max_cache_len for layer in cache.layers if layer.is_sliding], default=0)
    if prompt < shortest:
        raise ValueError(f"prompts of {prompt} tokens do not fill a window of {shortest}: use --loop generate")


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()
