"""The compiled extension: CUDA kernels behind plain integers. `ops/kernels/hopper` is its only caller."""

from typing import TypedDict

TILE_VARIANTS: list[list[int]]  # of each layout, for results of 16 bits
FP32_OUTPUT_TILE_VARIANTS: list[list[int]]  # for results of 32
ACTIVATION_VARIANTS: list[int]
BACKWARD_VARIANTS: list[int]
ACTIVATION_PARAMS_BYTES: int  # of what the kernels with an activation take
TENSOR_MAP_ALIGNMENT: int  # as the CUDA that the extension was built with has it

Activation = tuple[int, bool, float, float, float, int, int, int]
"""Curve, whether it is gated, alpha, limit, linear offset, block, and the kernels of a user's function."""

class Capture:
    """Notes the launches of this thread while it is entered; ``fuser/replay`` says what its methods do."""

    refusal: str | None
    def __init__(self, spans: list[tuple[int, int]], rows: int) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def allocated(self, address: int, bytes: int, per_row: bool) -> bool: ...
    def find(self, address: int) -> tuple[int, int]: ...
    def launches(self, other: Capture, apart: list[int]) -> Launches | None: ...

class Launches:
    """Captured launches, to be made again."""

    def scratch_bytes(self, rows: int) -> int: ...
    def run(self, addresses: list[int], rows: int, stream: int) -> None: ...

class DeviceProperties(TypedDict):
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block: int
    l2_bytes: int

def cuda_version() -> int: ...
def device_properties(device: int) -> DeviceProperties: ...
def raise_wrong_sizes(device: int) -> None: ...
def grouped_gemm(
    *,
    layout: int,
    operand: int,
    device: int,
    stream: int,
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
    output: int,
    m: int,
    out: int,
    out_pitch: int,
    out_group: int,
    out_addresses: list[int],
    accumulate: bool,
    bias: int = ...,
    bias_type: int = ...,
    bias_pitch: int = ...,
    bias_addresses: list[int] = ...,
    bias_scale: int = ...,
    row_scale: int = ...,
    alphas: int = ...,
    alpha: float = ...,
    betas: int = ...,
    beta: float = ...,
    workspace: int = ...,
    variant: int = ...,
    zero_tail: bool = ...,
) -> None: ...
def ragged_gemm(
    *,
    layout: int,
    operand: int,
    output: int,
    device: int,
    stream: int,
    groups: int,
    a: int,
    a_elements: int,
    a_rows: int,
    a_rows_int64: bool,
    a_rows_uniform: int,
    a_columns: int,
    a_columns_int64: bool,
    a_columns_uniform: int,
    b: int,
    b_elements: int,
    b_rows: int,
    b_rows_int64: bool,
    b_rows_uniform: int,
    b_columns: int,
    b_columns_int64: bool,
    b_columns_uniform: int,
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
    *,
    activation: Activation,
    device: int,
    stream: int,
    type: int,
    rows: int,
    columns: int,
    preact: int,
    postact: int,
    scales: int = ...,
    scales_type: int = ...,
) -> None: ...
def activate_backward(
    *,
    activation: Activation,
    device: int,
    stream: int,
    type: int,
    rows: int,
    columns: int,
    dpostact: int,
    preact: int,
    scales: int = ...,
    scales_type: int = ...,
    dpreact: int = ...,
    dscales: int = ...,
    postact: int = ...,
) -> None: ...
def pointwise(
    *,
    function: int,
    device: int,
    stream: int,
    rows: int,
    columns: int,
    block: int,
    x: int,
    dy: int,
    y: int,
    dx: int,
    numbers: list[int],
    dnumbers: list[int],
    vectors: list[int],
    dcolumns: list[int],
    groups: int,
    sizes: int,
    int64_sizes: bool,
    constants: tuple[float, ...],
) -> None: ...
def linear_activation(
    *,
    activation: Activation,
    layout: int,
    operand: int,
    device: int,
    stream: int,
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
    preact: int,
    postact: int,
    bias: int = ...,
    bias_type: int = ...,
    bias_pitch: int = ...,
    bias_addresses: list[int] = ...,
    bias_scale: int = ...,
    scales: int = ...,
    scales_type: int = ...,
    vectors: int = ...,
    vectors_count: int = ...,
    workspace: int = ...,
    variant: int = ...,
) -> None: ...
def linear_activation_backward(
    *,
    activation: Activation,
    layout: int,
    operand: int,
    device: int,
    stream: int,
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
    preact: int,
    dpreact: int,
    scales: int = ...,
    scales_type: int = ...,
    dscales: int = ...,
    postact: int = ...,
    dbias: int = ...,
    dbias_type: int = ...,
    vectors: int = ...,
    vectors_count: int = ...,
    dvectors: int = ...,
    dvectors_type: int = ...,
    workspace: int = ...,
    variant: int = ...,
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
def backward_workspace_bytes(
    *,
    groups: int,
    tokens: int,
    columns: int,
    dscales: bool,
    bias_columns: int,
    dvectors: int,
) -> int: ...
def zero_tail(
    *,
    device: int,
    stream: int,
    data: int,
    tokens: int,
    row_bytes: int,
    pitch_bytes: int,
    groups: int,
    sizes: int,
    int64_sizes: bool,
) -> None: ...
def column_sums_workspace(
    *,
    tokens: int,
    columns: int,
    groups: int,
) -> int: ...
def column_sums(
    *,
    device: int,
    stream: int,
    rows: int,
    type: int,
    tokens: int,
    columns: int,
    pitch: int,
    groups: int,
    sizes: int,
    int64_sizes: bool,
    scale: int,
    out: int,
    out_type: int,
    workspace: int,
) -> None: ...
def row_dots(
    *,
    device: int,
    stream: int,
    rows: int,
    type: int,
    tokens: int,
    columns: int,
    pitch: int,
    groups: int,
    sizes: int,
    int64_sizes: bool,
    vectors: int,
    vectors_type: int,
    out: int,
) -> None: ...
def route_workspace_bytes(
    *,
    slots: int,
    groups: int,
) -> int: ...
def route(
    *,
    device: int,
    stream: int,
    ids: int,
    int64_ids: bool,
    slots: int,
    groups: int,
    tokens_per_expert: int,
    slot_of_row: int,
    row_of_slot: int,
    workspace: int,
    weights: int = ...,
    weights_type: int = ...,
    scales: int = ...,
) -> None: ...
def permute(
    *,
    device: int,
    stream: int,
    type: int,
    tokens: int,
    columns: int,
    top_k: int,
    row_of_slot: int,
    num_rows: int,
    source: int,
    source_pitch: int,
    out: int,
    out_pitch: int,
    fill: bool,
) -> None: ...
def unpermute(
    *,
    device: int,
    stream: int,
    type: int,
    tokens: int,
    columns: int,
    top_k: int,
    row_of_slot: int,
    num_rows: int,
    source: int,
    source_pitch: int,
    out: int,
    out_pitch: int,
) -> None: ...
def gather_slots(
    *,
    device: int,
    stream: int,
    values: int,
    row_of_slot: int,
    num_rows: int,
    slots: int,
    out: int,
    type: int,
) -> None: ...
def routed_mlp(
    *,
    activation: Activation,
    type: int,
    groups: int,
    features: int,
    columns: int,
    transposed: bool,
    unfused: bool,
    up: int,
    up_pitch: int,
    up_group: int,
    down: int,
    down_pitch: int,
    down_group: int,
    up_bias: int,
    up_bias_pitch: int,
    down_bias: int,
    down_bias_pitch: int,
    bias_type: int,
    device: int,
    stream: int,
    tokens: int,
    top_k: int,
    x: int,
    pitch: int,
    ids: int,
    int64_ids: bool,
    weights: int,
    weights_type: int,
    out: int,
    workspace: int,
) -> None: ...
def routed_workspace_bytes(
    *, gated: bool, type: int, groups: int, features: int, columns: int, unfused: bool, slots: int
) -> int: ...
