"""Two hosts for the ranks of a test on one machine: network namespaces with names of their own, and a wire between."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAMES = ("fusible-host0", "fusible-host1")
WIRE = "eth0"  # as each host calls its end
_START = 'hostname "$0"; exec "$@"'

Launcher = Callable[[int], list[str]]
"""The rank of a process -> the words in front of its command."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_hosts(ranks: int) -> Iterator[Launcher]:
    """Hosts with half of the ranks each, in order."""
    spaces = [f"fusible{i}.{os.getpid()}" for i in range(2)]
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip("link", "add", WIRE, "netns", spaces[0], "type", "veth", "peer", "name", WIRE, "netns", spaces[1])
        for i, space in enumerate(spaces):
            _ip("-n", space, "addr", "add", f"10.77.0.{i + 1}/24", "dev", WIRE)
            for interface in ("lo", WIRE):
                _ip("-n", space, "link", "set", interface, "up")

        def on_its_host(rank: int) -> list[str]:
            host = 2 * rank // ranks
            within = ["ip", "netns", "exec", spaces[host], "unshare", "--uts", "sh", "-c", _START, NAMES[host]]
            return [*within, "env", f"GLOO_SOCKET_IFNAME={WIRE}"]

        yield on_its_host
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def refusal() -> str | None:
    """The reason why there can be no such hosts here, or None: it makes them."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "no ip or no unshare"
    try:
        with two_hosts(2) as launcher:
            subprocess.run([*launcher(1), "true"], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        return error.stderr.decode().strip() or str(error)
    return None


def cut() -> None:
    """Takes the wire of this host away."""
    _ip("link", "set", WIRE, "down")
