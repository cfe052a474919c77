"""``Group``: the ranks that share the experts of a layer, and exchange rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch
from torch import distributed as dist

from . import memory
from .barrier import barrier
from .collective import CollectiveTransport
from .errors import CapacityError, PeerError
from .rails import Hosts, RailsTransport, settings_inside
from .settings import Settings
from .symmetric import SymmetricTransport
from .transport import Exchange, Table, Transport


class Statistics(NamedTuple):
    """Counters of a group.

    Attributes:
        exchanges: calls of its dispatches on this rank.
        required: the largest number of rows that any rank had to own in one exchange.
        dropped: rows of all ranks that were dropped for lack of capacity.
    """

    exchanges: int
    required: int
    dropped: int


class Lane:
    """A sequence of exchanges, one at a time."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.exchanges = 0
        self._open: Table | None = None

    def begin(self) -> Exchange:
        """Begins the next exchange.

        Raises:
            RuntimeError: the last one was not ended by a combine.
        """
        if self._open is not None:
            raise RuntimeError(
                f"EPDispatch: exchange {self._open.exchange.number} on lane {self.index} has had no EPCombine yet; "
                "use another lane of the group for exchanges that overlap, or group.reset() after an exception"
            )
        self.exchanges += 1
        return Exchange(self.index, self.exchanges - 1)

    def opened(self, table: Table) -> None:
        """Notes that the rows have been dispatched."""
        self._open = table

    def end(self, row_of_slot: torch.Tensor) -> Table:
        """Ends the open exchange and returns its table.

        Raises:
            RuntimeError: there is none, or it has other slots.
        """
        table = self._open
        if table is None:
            raise RuntimeError(
                f"EPCombine: no EPDispatch is open on lane {self.index}; each EPDispatch takes one EPCombine, "
                "of the same group and lane"
            )
        if table.row_of_slot.data_ptr() != row_of_slot.data_ptr() or table.row_of_slot.shape != row_of_slot.shape:
            raise RuntimeError(
                f"EPCombine: row_of_slot is not from the EPDispatch that is open on lane {self.index}; "
                "pass the row_of_slot that it returned, or combine on the other group and lane"
            )
        self._open = None
        return table

    def under_way(self) -> Table:
        """The table of the open exchange.

        Raises:
            RuntimeError: there is none.
        """
        if self._open is None:
            raise RuntimeError(f"Group: no EPDispatch is open on lane {self.index}; call it first")
        return self._open

    def reset(self) -> None:
        """Forgets the open exchange."""
        self._open = None


class Moving(NamedTuple):
    """A context with the transport of a group, for moves of rows. A peer that fails in the body fails the group."""

    group: Group

    def __enter__(self) -> Transport:
        self.group.check()
        return self.group.mover

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, self.group.mover.final):
            self.group._ended = _without_frames(error)


class Group:
    """Ranks that share the experts of layers: each owns ``num_experts / ranks`` of them, in order.

    The constructor is collective: every rank of the process group must call it with the same arguments. A group serves
    any number of layers. :class:`EPDispatch` and :class:`EPCombine` are built with it.

    Args:
        process_group: a group of ``torch.distributed``; None: all ranks.
        num_experts: E, the total number of experts; a multiple of the number of ranks.
        max_tokens: the largest number of tokens of a rank in a call. Ranks may give different numbers, or none.
        top_k: k, the number of experts that each token chooses.
        hidden: H, the columns of a token.
        dtype: the dtype of tokens and rows.
        capacity: the number of rows that a rank can own at once: a factor of ``max_tokens * top_k`` (a float), a number
            of rows (an int), ``"worst"`` for the maximum possible, or ``"exact"`` for the number that arrives, for
            which the host waits.
        overflow: ``"raise"``: too many rows raise :class:`CapacityError` on all ranks. ``"drop"``: the last rows in the
            order of experts are dropped, deterministically, and counted.
        combine: ``"exact"``: the token's own rank sums its rows in float32, in the order of its slots, and rounds once:
            bit-identical to one process with all experts. ``"reduced"``: each rank sums its rows of a token, and sends
            one row per token. That moves less data and rounds twice; bits depend on the number of ranks. It excludes
            ``overlap_combine=True`` of transport ``"symmetric"``.
        transport: ``"collective"``: ``all_to_all_single`` of the process group. ``"symmetric"``: GPUs of one host read
            one another's memory; the host does not wait, so a later call or :meth:`check` raises errors. ``"rails"``:
            for several hosts with equally many GPUs, ``"symmetric"`` inside each host and equal collectives between
            GPUs of one local rank; needs ``combine="reduced"``, as each host rounds its sums. ``"auto"``:
            ``"collective"``, which runs everywhere.
        lanes: the number of exchanges that may be open at once, for overlapping microbatches.
        timeout: seconds to wait for a peer, from 0.001; 0: forever.
        overlap: with transport ``"symmetric"``, the number of multiprocessors that sum the gradients of tokens in an
            :class:`EPGroupedMLP` while the others compute gradients of weights; 0: no overlap. None: 32, or a quarter
            of a smaller device, unless there are too few rows.
        overlap_dispatch: with transport ``"symmetric"``, the number of multiprocessors that bring rows to an
            :class:`EPGroupedMLP` in bfloat16 while the others multiply the rows that have arrived; 0: no overlap. None:
            16 if that gains in training, judged by rows, dtype, recipe and ranks; ``explain()`` says why.
        overlap_combine: with transport ``"symmetric"``, whether the second linear of an :class:`EPGroupedMLP` sends its
            rows to the ranks of their tokens as it computes them (in bfloat16; otherwise right after it), so that each
            rank sums from its own memory. It takes memory for ``max_tokens * top_k`` more rows in each lane. None: if
            that gains, as above.
        float8_gradients: whether the gradients of combined tokens are quantised before they are sent, to e4m3 with a
            power of two for each 128 values, which halves the traffic; for a group in bfloat16. The gradients of
            dispatched tokens are summed in 16 bits.

    Attributes:
        rank, size: the index of this rank; the number of ranks.
        devices: the device types that tokens may be on: those of the process group.
        local_experts: the slice of the experts that this rank owns.
        local_capacity: Q, the number of rows that :class:`EPDispatch` returns; None: the number that arrives.
        device: the device that tokens must be on; None: any device of these types.
        transport: the name of the transport; ``transport_reason``: the reason of the choice.

    Raises:
        ValueError: an argument is wrong, ranks differ in one, a rank cannot use the transport, or this process is not
            of ``process_group``.
        RuntimeError: a GPU cannot access the memory of another.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        max_tokens: int,
        top_k: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        capacity: float | int | str = 2.0,
        overflow: str = "raise",
        combine: str = "exact",
        transport: str = "auto",
        lanes: int = 1,
        timeout: float = 60.0,
        overlap: int | None = None,
        overlap_dispatch: int | None = None,
        overlap_combine: bool | None = None,
        float8_gradients: bool = False,
    ) -> None:
        self.settings = Settings(
            *(num_experts, max_tokens, top_k, hidden, dtype, capacity, overflow, combine),
            *(transport, lanes, timeout, overlap, overlap_dispatch, overlap_combine, float8_gradients),
        )
        self.process_group = process_group if process_group is not None else _world()
        self.rank, self.size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        if self.rank < 0:
            raise ValueError("Group: this process is no rank of the process group; make the group on its ranks alone")
        number = _agree(self.settings, self.size, self.process_group)
        owned = num_experts // self.size
        self.local_experts = slice(self.rank * owned, (self.rank + 1) * owned)
        self.local_capacity = self.settings.rows(self.size)
        self.devices = frozenset(_devices(self.process_group))
        self.device: torch.device | None = None
        self.mover: Transport = CollectiveTransport(self.settings, self.process_group, number)
        self.transport_reason = "the one transport that runs on every backend"
        if transport == "symmetric":
            self._share_memory()
        if transport == "rails":
            self._lay_rails()
        self.transport = self.mover.name
        self.lanes = [Lane(i) for i in range(lanes)]
        self._ended: Exception | None = None

    def _share_memory(self) -> None:
        """Maps the memory of all ranks, so that GPUs can read one another's rows."""
        self._refuse(SymmetricTransport.refusal(self.settings, self.size))
        here = memory.Location.here(memory.device())
        self._refuse(here.unreachable(self._of_ranks(here)))
        self._move_by(SymmetricTransport(self.settings, self.process_group))

    def _lay_rails(self) -> None:
        """Maps the memory of the ranks of each host, and connects hosts."""
        here = memory.Location.here(memory.device())
        of_ranks = self._of_ranks(here)
        hosts = Hosts.of(of_ranks, self.rank)
        self._refuse(hosts.refusal(of_ranks))
        self._refuse(SymmetricTransport.refusal(settings_inside(self.settings, hosts), hosts.each))
        self._refuse(here.unreachable([each if each.host == here.host else here for each in of_ranks]))
        self._move_by(RailsTransport(self.settings, hosts, self.process_group))

    def _move_by(self, mover: SymmetricTransport | RailsTransport) -> None:
        self.mover, self.device = mover, mover.device
        self.devices, self.transport_reason = frozenset({mover.device.type}), "as the group was asked for"

    def _of_ranks(self, value: Any) -> list[Any]:
        """Gathers a value from each rank. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self.process_group)
        return values

    def _refuse(self, refusal: str | None) -> None:
        """Raises on all ranks if one cannot use the transport. Collective."""
        for rank, each in enumerate(self._of_ranks(refusal)):
            if each is not None:
                raise ValueError(f"Group: transport {self.settings.transport!r} cannot serve rank {rank}: it {each}")

    @property
    def num_local_experts(self) -> int:
        """The number of experts that this rank owns, E / R."""
        return self.local_experts.stop - self.local_experts.start

    def row_buffer(self, lane: int = 0) -> torch.Tensor | None:
        """Returns transport memory [Q, H] for the ``output`` of the last linear; None if any memory will do.

        The :class:`EPCombine` of the open exchange does not copy rows that are in this memory. All exchanges of a lane
        share it.

        Args:
            lane: the lane of the open exchange.

        Raises:
            RuntimeError: there is no open exchange.
        """
        self.check()
        return self.mover.row_buffer(self.lanes[lane].under_way())

    def check(self, synchronize: bool = False) -> None:
        """Raises the error that has ended the group, if any.

        Args:
            synchronize: whether to wait for the device first.

        Raises:
            CapacityError: with transport ``"symmetric"``, a rank would have owned too many rows; see :meth:`reset`.
            PeerError: a rank did not take part in an exchange.
            RuntimeError: the group is closed.
        """
        if self._ended is not None:
            raise _without_frames(self._ended)
        if synchronize:
            self.mover.finish()
        try:
            self.mover.check()
        except self.mover.final as error:
            self._ended = _without_frames(error)
            raise

    def statistics(self) -> Statistics:
        """Returns the counters so far; with transport ``"rails"`` those of the ranks of this host."""
        return Statistics(sum(lane.exchanges for lane in self.lanes), **self.mover.statistics())

    def reset(self) -> None:
        """Forgets exchanges that an exception left open. Collective: all ranks must call it.

        Raises:
            PeerError, RuntimeError: the group has failed or is closed.
            CapacityError: with transport ``"rails"``, which does not go on after one.
        """
        with suppress(CapacityError):
            self.check(synchronize=True)
        if self._ended is not None:  # others may not come
            raise _without_frames(self._ended)
        for lane in self.lanes:
            lane.reset()
        barrier(self.process_group)
        self.mover.reset()
        self.mover.finish()
        barrier(self.process_group)

    def close(self) -> None:
        """Closes the group; its ops then raise.

        Collective, so that no rank still needs another; if the group has failed, it waits for no rank.
        """
        if self._ended is None:
            with suppress(CapacityError, PeerError):
                self.check(synchronize=True)
        if self._ended is None:
            barrier(self.process_group)
            self._ended = RuntimeError("the expert-parallel group is closed; make another one")

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a copy of a layer exchanges its rows with the same ranks

    def __reduce__(self) -> NoReturn:
        raise TypeError("an expert-parallel Group cannot be pickled; save the state_dict of the model")

    def __repr__(self) -> str:
        s = self.settings
        return f"Group(rank {self.rank} of {self.size}, {s.num_experts} experts, {self.transport})"


def _world() -> dist.ProcessGroup:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("Group: call torch.distributed.init_process_group() first, or give a process group")
    world = dist.group.WORLD
    assert world is not None
    return world


def _devices(process_group: dist.ProcessGroup) -> Iterator[str]:
    """The device types whose tensors a process group moves."""
    for pair in dist.get_backend_config(process_group).split(","):
        yield pair.partition(":")[0]


_groups: Counter[str] = Counter()  # how many each process group has had, by its name


def _agree(settings: Settings, ranks: int, process_group: dist.ProcessGroup) -> int:
    """Checks that the settings of all ranks are right and equal; returns the number of the new group.

    Raises:
        ValueError: on all ranks, if they are not.
    """
    of_ranks: list[Any] = [None] * ranks
    problem, name = settings.problem(ranks), process_group.group_name
    dist.all_gather_object(of_ranks, (settings, problem, _groups[name]), process_group)
    if problem is not None:
        raise ValueError(f"Group: {problem}")
    for rank, (_, other, _) in enumerate(of_ranks):
        if other is not None:
            raise ValueError(f"Group: on rank {rank}, {other}")
    difference = settings.difference([theirs for theirs, *_ in of_ranks])
    if difference is not None:
        raise ValueError(f"Group: {difference}")
    number: int = max(count for *_, count in of_ranks)  # a process that was restarted begins at 0
    _groups[name] = number + 1
    return number


def _without_frames(error: Exception) -> Exception:
    """A copy to keep, or to raise once more: a raised error keeps the locals of all frames alive."""
    return type(error)(str(error))
