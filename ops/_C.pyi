"""The compiled extension: CUDA kernels behind plain integers. `ops/backends` is its only caller."""

from collections.abc import Callable
from typing import TypedDict

TILE_VARIANTS: list[list[int]]  # of each layout, for results of 16 bits
WIDE_TILE_VARIANTS: list[list[int]]  # for results of 32
ACTIVATION_VARIANTS: list[int]
BACKWARD_VARIANTS: list[int]

LAUNCHES: dict[str, list[int]]

class Launches:
    """Keeps launches: for each function in LAUNCHES a method of patches (fuser/replay/captured.py), then arguments."""

    def run(self, addresses: list[int], rows: int, stream: int) -> None: ...
    def __getattr__(self, name: str) -> Callable[..., None]: ...

class DeviceProperties(TypedDict):
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block: int
    l2_bytes: int

def cuda_version() -> int: ...
def device_properties(device: int) -> DeviceProperties: ...
def grouped_gemm(
    layout: int,
    operand: int,
    output: int,
    device: int,
    stream: int,
    groups: int,
    tokens: int,
    m: int,
    n: int,
    k: int,
    a: int,
    a_pitch: int,
    b: int,
    b_pitch: int,
    b_group: int,
    out: int,
    out_pitch: int,
    out_group: int,
    sizes: int,
    int64_sizes: bool,
    accumulate: bool,
    bias: int = 0,
    bias_type: int = 0,
    bias_pitch: int = 0,
    row_scale: int = 0,
    bias_scale: int = 0,
    alphas: int = 0,
    alpha: float = 1.0,
    betas: int = 0,
    beta: float = 1.0,
    workspace: int = 0,
    variant: int = -1,
    b_addresses: list[int] = ...,
    out_addresses: list[int] = ...,
    bias_addresses: list[int] = ...,
    zero_tail: bool = False,
) -> None: ...
def ragged_gemm(
    layout: int,
    operand: int,
    output: int,
    device: int,
    stream: int,
    groups: int,
    a: tuple[int, int, int, bool, int, int, bool, int],
    b: tuple[int, int, int, bool, int, int, bool, int],
    out: int,
    out_elements: int,
    zero_tail: bool,
    accumulate: bool,
    bias: int,
    bias_type: int,
    bias_pitch: int,
    alphas: int,
    alpha: float,
    betas: int,
    beta: float,
    workspace: int,
) -> None: ...
def ragged_workspace_bytes(groups: int) -> int: ...
def workspace_bytes(groups: int) -> int: ...
def grouped_gemm_config(
    layout: int,
    operand: int,
    output: int,
    device: int,
    groups: int,
    tokens: int,
    m: int,
    n: int,
    k: int,
    scale_bias: bool = False,
) -> str: ...
def activate(
    curve: int,
    gated: bool,
    alpha: float,
    limit: float,
    linear_offset: float,
    block: int,
    device: int,
    stream: int,
    type: int,
    rows: int,
    columns: int,
    pre: int,
    scales: int,
    scales_type: int,
    hidden: int,
) -> None: ...
def activate_backward(
    curve: int,
    gated: bool,
    alpha: float,
    limit: float,
    linear_offset: float,
    block: int,
    device: int,
    stream: int,
    type: int,
    rows: int,
    columns: int,
    dhidden: int,
    pre: int,
    scales: int,
    scales_type: int,
    dpre: int,
    dscales: int,
    hidden: int,
) -> None: ...
def linear_activation(
    curve: int,
    gated: bool,
    alpha: float,
    limit: float,
    linear_offset: float,
    block: int,
    device: int,
    stream: int,
    layout: int,
    operand: int,
    groups: int,
    tokens: int,
    n: int,
    k: int,
    a: int,
    a_pitch: int,
    b: int,
    b_pitch: int,
    b_group: int,
    b_addresses: list[int],
    sizes: int,
    int64_sizes: bool,
    bias: int,
    bias_type: int,
    bias_pitch: int,
    bias_addresses: list[int],
    bias_scale: int,
    scales: int,
    scales_type: int,
    pre: int,
    hidden: int,
    workspace: int,
    variant: int = -1,
) -> None: ...
def linear_activation_backward(
    curve: int,
    gated: bool,
    alpha: float,
    limit: float,
    linear_offset: float,
    block: int,
    device: int,
    stream: int,
    layout: int,
    operand: int,
    groups: int,
    tokens: int,
    n: int,
    k: int,
    a: int,
    a_pitch: int,
    b: int,
    b_pitch: int,
    b_group: int,
    b_addresses: list[int],
    sizes: int,
    int64_sizes: bool,
    scales: int,
    scales_type: int,
    pre: int,
    dpre: int,
    dscales: int,
    hidden: int,
    dbias: int,
    dbias_type: int,
    workspace: int,
    variant: int = -1,
) -> None: ...
def linear_activation_config(
    backward: bool,
    gated: bool,
    block: int,
    operand: int,
    device: int,
    groups: int,
    tokens: int,
    n: int,
    k: int,
    scale_bias: bool = False,
) -> str: ...
def backward_workspace_bytes(groups: int, tokens: int, columns: int, dscales: bool, bias_columns: int) -> int: ...
def zero_tail(
    device: int,
    stream: int,
    data: int,
    tokens: int,
    row_bytes: int,
    pitch_bytes: int,
    sizes: int,
    groups: int,
    int64_sizes: bool,
) -> None: ...
def column_sums_workspace(tokens: int, columns: int, groups: int) -> int: ...
def column_sums(
    device: int,
    stream: int,
    rows: int,
    type: int,
    tokens: int,
    columns: int,
    pitch: int,
    sizes: int,
    groups: int,
    int64_sizes: bool,
    scale: int,
    out: int,
    out_type: int,
    workspace: int,
) -> None: ...
def row_dots(
    device: int,
    stream: int,
    rows: int,
    type: int,
    tokens: int,
    columns: int,
    pitch: int,
    sizes: int,
    groups: int,
    int64_sizes: bool,
    vectors: int,
    vectors_type: int,
    out: int,
) -> None: ...
def route_workspace_bytes(slots: int, groups: int) -> int: ...
def route(
    device: int,
    stream: int,
    ids: int,
    int64_ids: bool,
    slots: int,
    groups: int,
    weights: int,
    weights_type: int,
    sizes: int,
    order: int,
    place: int,
    scales: int,
    counts: int,
) -> None: ...
def spread_rows(
    device: int,
    stream: int,
    type: int,
    tokens: int,
    columns: int,
    slots: int,
    place: int,
    all: int,
    from_: int,
    from_pitch: int,
    to: int,
    to_pitch: int,
    fill: bool,
) -> None: ...
def sum_rows(
    device: int,
    stream: int,
    type: int,
    tokens: int,
    columns: int,
    slots: int,
    place: int,
    all: int,
    from_: int,
    from_pitch: int,
    to: int,
    to_pitch: int,
) -> None: ...
def numbers_of_slots(
    device: int, stream: int, rows: int, place: int, all: int, slots: int, to: int, type: int
) -> None: ...

class RoutedMlp:
    def __init__(
        self,
        curve: int,
        gated: bool,
        alpha: float,
        limit: float,
        linear_offset: float,
        block: int,
        type: int,
        groups: int,
        features: int,
        columns: int,
        transposed: bool,
        separate: bool,
        up: tuple[int, int, int],
        down: tuple[int, int, int],
        up_bias: int,
        up_bias_pitch: int,
        down_bias: int,
        down_bias_pitch: int,
        bias_type: int,
    ) -> None: ...
    def workspace_bytes(self, slots: int) -> int: ...
    def run(
        self,
        device: int,
        stream: int,
        tokens: int,
        slots: int,
        x: int,
        pitch: int,
        ids: int,
        int64_ids: bool,
        weights: int,
        weights_type: int,
        out: int,
        workspace: int,
    ) -> None: ...
