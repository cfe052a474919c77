"""One measurement in processes of its own, one a rank, so that a failure ends nothing else."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

Measure = Callable[[Any], dict[str, Any]]


def run(measure: Measure, setting: Any, ranks: int, device: str, forked_with: Sequence[str] = ()) -> dict[str, Any]:
    """Starts the ranks; returns the results of the first, or ``{"failure": …}`` with the error of one that fails.

    Args:
        measure: a function of a module, called with ``setting`` on every rank.
        device: ``"cuda"`` (a GPU for each rank, over NCCL) or ``"cpu"`` (over gloo).
        forked_with: more modules than that of ``measure`` to import once for all ranks.
    """
    multiprocessing.set_forkserver_preload([measure.__module__, *forked_with])  # once, and not once a process
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(_rank, (measure, setting, ranks, device, folder), ranks, start_method="forkserver")  # type: ignore[no-untyped-call]
        except ProcessException as error:
            print(error, file=sys.stderr)
            return {"failure": reason_of(str(error))}
        return json.loads(Path(folder, "results.json").read_text())  # type: ignore[no-any-return]


def reason_of(error: str) -> str:
    """The line with the reason in the text of an error: the first one behind the last traceback, or the last one."""
    lines = [line for line in error.splitlines() if line.strip()]
    heads = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
    behind = lines[heads[-1] + 1 :] if heads else []
    return next((line for line in behind if not line.startswith(" ")), lines[-1])


def of_rank(device: str) -> torch.device:
    """The device of the calling rank."""
    return torch.device(device, dist.get_rank()) if device == "cuda" else torch.device(device)


def _rank(rank: int, measure: Measure, setting: Any, ranks: int, device: str, folder: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)  # transformers chooses the device by it
    options: dict[str, Any] = {"rank": rank, "world_size": ranks, "init_method": f"file://{folder}/store"}
    if device == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device(device, rank), **options)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **options)
    results = measure(setting)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
