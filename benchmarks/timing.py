"""Times and peak memory of functions, on CPU and CUDA; and tables in Markdown."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

Function = Callable[..., Any]
_FLUSH_BYTES = 256 * 2**20  # more than the second-level cache of any GPU that we know


def interleaved(
    functions: Mapping[str, Function],
    rounds: int,
    device: torch.device | str = "cpu",
    calls: int = 1,
    steady: bool = False,
    prepare: Mapping[str, Function] | None = None,
) -> dict[str, float]:
    """Median seconds of one call of each function.

    In every round each function has its turn, in a new random order, so a slow moment of the machine affects all of
    them, and no function always follows the same one.

    Args:
        functions: by name.
        rounds: how many measurements of each; one more goes before, uncounted.
        device: where they run; on CUDA, events give the times.
        calls: how many calls make one measurement; more than one for what takes microseconds.
        steady: on CUDA the second-level cache is flushed before each measurement; with ``steady``, an untimed call of
            the same function goes before it instead, as in a run of many.
        prepare: what makes the one argument of each function; anew for every call, and not timed.
    """
    clock = _clock(device, flush=not steady)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for name in _turns(functions, rounds + 1):
        make = prepare[name] if prepare else None
        if steady:
            _prepared(functions[name], make)()
        seconds[name].append(clock([_prepared(functions[name], make) for _ in range(calls)]))
    return {name: median(times[1:]) for name, times in seconds.items()}


def graph_of(function: Callable[[], object], calls: int) -> Function:
    """A CUDA graph of ``calls`` calls, so that the host is not timed."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph.replay


def relative(functions: Mapping[str, Function], rounds: int, device: torch.device | str = "cpu") -> dict[str, float]:
    """Median time of each function as a multiple of the first one's, from neighbouring calls: first, it, it, first.

    A clock that changes within a round affects both. An untimed call precedes the four, which the host queues at once.
    """
    first, *others = functions
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for name in _turns(others, rounds):
        functions[name]()
        marks = [_mark(device)]
        for each in (first, name, name, first):
            functions[each]()
            marks.append(_mark(device))
        before, *its, after = [marks[i + 1](marks[i]) for i in range(4)]
        ratios[name].append(sum(its) / (before + after))
    return {first: 1.0, **{name: median(each) for name, each in ratios.items()}}


def phases_in_a_row(
    run: Callable[[], Iterable[object]], calls: int, device: torch.device | str = "cpu", warm_up: int = 2
) -> list[float]:
    """Mean seconds of each phase of calls that follow one another, without a wait for the device in between.

    So a GPU has the next call queued before it ends one, as in training. The sum over phases is the time of a call.

    Args:
        run: yields after each phase.
        calls: how many are timed; ``warm_up`` more go before, in the same row.
    """
    for _ in range(warm_up):
        for _ in run():
            pass
    marks = [_mark(device)]
    for _ in range(calls):
        marks.extend(_mark(device) for _ in run())
    seconds = [after(before) for before, after in pairwise(marks)]
    phases = len(seconds) // calls
    return [sum(seconds[i::phases]) / calls for i in range(phases)]


class _HostMark:
    """The current time. Called with an earlier mark, it returns the time between them."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def __call__(self, earlier: _HostMark) -> float:
        return self.seconds - earlier.seconds


class _CudaMark:
    """The same for the device's current stream."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def __call__(self, earlier: _CudaMark) -> float:
        self.event.synchronize()
        milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1000


def _mark(device: torch.device | str) -> Any:
    return _CudaMark() if torch.device(device).type == "cuda" else _HostMark()


def sustained(
    functions: Mapping[str, Function], rounds: int, device: torch.device | str = "cpu", seconds: float = 0.2
) -> dict[str, float]:
    """Median seconds of one call of each function, called repeatedly, alone, for ``seconds`` seconds.

    A GPU lowers its clock under such load, as in training. Only the second half is timed. The turns are those of
    :func:`interleaved`.
    """
    clock = _clock(device, flush=False)
    elapsed: dict[str, list[float]] = {name: [] for name in functions}
    for name in _turns(functions, rounds):
        functions[name]()
        calls = [functions[name]] * max(1, round(seconds / 2 / clock([functions[name]])))
        clock(calls)
        elapsed[name].append(clock(calls))
    return {name: median(times) for name, times in elapsed.items()}


def _turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yields every name once a round, in a new random order."""
    order, shuffler = list(names), random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)
        yield from order


def _clock(device: torch.device | str, flush: bool) -> Callable[[Sequence[Function]], float]:
    return _CudaClock(flush) if torch.device(device).type == "cuda" else _host_seconds


def _prepared(function: Function, make: Function | None) -> Function:
    """The function, bound to its argument if it has a function that makes one."""
    return function if make is None else partial(function, make())


def _host_seconds(functions: Sequence[Function]) -> float:
    start = time.perf_counter()
    for function in functions:
        function()
    return (time.perf_counter() - start) / len(functions)


class _CudaClock:
    """Times on the device. The buffer whose reading flushes the cache also keeps the device busy during the launch.

    It is read, not written: otherwise the write-back of the cache would slow the timed function.
    """

    def __init__(self, flush: bool) -> None:
        self._flush = torch.zeros(_FLUSH_BYTES if flush else 1, dtype=torch.int8, device="cuda")

    def __call__(self, functions: Sequence[Function]) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._flush.max()
        start.record()
        for function in functions:
            function()
        end.record()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000 / len(functions)


def peak_bytes(function: Function, device: torch.device | str = "cpu") -> int:
    """The peak memory of tensors during a call, above the memory before it, in bytes."""
    if torch.device(device).type == "cuda":
        gc.collect()  # what earlier calls left in cycles would be freed within this one
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return _peak(_cpu_changes(function)[1])


def kept_bytes(function: Function, device: torch.device | str = "cpu") -> int:
    """The bytes of tensors that a call allocates and that its result keeps alive."""
    if torch.device(device).type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated()
        result = function()
        return torch.cuda.memory_allocated() - before
    result, changes = _cpu_changes(function)
    del result
    return sum(changes)


def _cpu_changes(function: Function) -> tuple[Any, list[int]]:
    """The result of a call, and each change of tensor memory in bytes; the CPU allocator itself records no peak."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        result = function()
    kineto = profile.profiler
    assert kineto is not None
    assert kineto.kineto_results is not None
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    return result, [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def _peak(changes: Iterable[int]) -> int:
    peak = now = 0
    for change in changes:
        now += change
        peak = max(peak, now)
    return peak


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with padded columns: names to the left, numbers to the right."""
    table = [list(heading), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [_padded(row, widths) for row in table]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def _padded(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
