"""A case that does not end, for the tests of ``ep_world``."""

import subprocess
import time
from collections.abc import Callable

from ep_world import World


def a_rank_and_its_child_sleep(world: World) -> None:
    print("asleep", flush=True)
    subprocess.run(["sleep", "300"])
    time.sleep(300)


CASES: list[Callable[[World], None]] = [a_rank_and_its_child_sleep]
