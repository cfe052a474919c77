"""The compiled extension: CUDA kernels behind plain integers. `ops/backends/hopper.py` is its only caller."""

from typing import TypedDict

class DeviceProperties(TypedDict):
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block: int
    l2_bytes: int

def cuda_version() -> int: ...
def device_properties(device: int) -> DeviceProperties: ...
