"""The compiled extension: CUDA kernels behind plain integers. `ops/kernels/hopper` calls it, and jax its handlers."""

from collections.abc import Callable, Sequence

from torch import Tensor

TILE_VARIANTS: list[list[int]]  # of each layout, for results of 16 bits
FP32_OUTPUT_TILE_VARIANTS: list[list[int]]  # for results of 32
ACTIVATION_VARIANTS: list[int]
DEEP_ACTIVATION_VARIANT: int  # without a bias or a second pair of operands
BACKWARD_VARIANTS: list[int]
PAIR_VARIANTS: list[int]  # of products with a second pair of operands
SPLIT_K: int  # the one that splits the depth of weight gradients
ACTIVATION_PARAMS_BYTES: int  # of what the kernels with an activation take
PAIR_ACTIVATION_PARAMS_BYTES: int  # with a second pair of operands
XLA_FFI_API: tuple[int, int]  # the version of XLA's foreign function interface that the handlers were compiled for
MAX_RANKS: int  # that read one another's memory
SIGNAL_BYTES: int  # from one of their signals to the next
LANE_STATE_BYTES: int
declarations: dict[str, str]  # of the launches, by name, as they stand at the end of this file
TENSOR_MAP_ALIGNMENT: int  # as the CUDA that the extension was built with has it

Activation = tuple[int, bool, float, float, float, int, int, int, int]
"""Curve, whether it is gated, alpha, limit, linear offset, block, and the kernels of a user's function."""

class Capture:
    """Notes the launches of this thread while it is entered; ``fuser/replay`` says what its methods do."""

    refusal: str | None
    def __init__(self, spans: list[tuple[int, int]], rows: int, owned: list[int] = ...) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def allocated(self, address: int, bytes: int, per_row: bool) -> bool: ...
    def refuse(self, reason: str) -> None: ...
    def result(self, address: int, bytes: int, first_size: int) -> int: ...
    def launches(self, first: Capture | None, large: int) -> Launches: ...

class Launches:
    """Captured launches, to be made again."""

    for_any_rows: bool
    def run(
        self,
        tensors: list[Tensor | None],
        memory: list[tuple[Callable[..., Tensor], tuple[int, ...]]],
        function: int,
        rows: int,
        stream: int,
    ) -> None: ...

def is_capturing() -> bool: ...
def refuse(reason: str) -> None: ...
def cuda_version() -> int: ...
def xla_handlers() -> dict[str, object]: ...
def raise_wrong_sizes(device: int) -> None: ...
def wrong_size_word(device: int) -> int: ...
def has_objects(values: dict[str, object], names: tuple[str, ...], objects: tuple[object, ...]) -> bool: ...
def tensor_addresses(tensors: Sequence[Tensor], function: int) -> bytes: ...
def ragged_workspace_bytes(groups: int) -> int: ...
def gemm_workspace_bytes(layout: int, output: int, groups: int, tokens: int, m: int, n: int, variant: int) -> int: ...
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
    second_k: int = 0,
) -> str: ...
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
    second_k: int = 0,
    function: bool = False,
) -> str: ...

# what follows is written by `python -m emulation.stub`, run in tests
def activate(
    *, activation: Activation, device: int, stream: int, type: int, rows: int, columns: int, preact: int, postact: int,
    scales: int = ..., scales_type: int = ...,
) -> None: ...
def activate_backward(
    *, activation: Activation, device: int, stream: int, type: int, rows: int, columns: int, dpostact: int,
    preact: int, scales: int = ..., scales_type: int = ..., dpreact: int = ..., dscales: int = ..., postact: int = ...,
) -> None: ...
def backward_workspace_bytes(
    *, groups: int, tokens: int, columns: int, dscales: bool, bias_columns: int, dvectors: int,
) -> int: ...
def choose(
    *, device: int, stream: int, logits: int, type: int, tokens: int, experts: int, top_k: int, scores: int,
    normalize: bool, scale: float, groups: int, keep: int, best: int, bias: int, valid: int, given: int, ids: int,
    weights: int, counts: int, slots: int, sums: int, squares: int, workspace: int,
) -> None: ...
def choose_backward(
    *, device: int, stream: int, logits: int, type: int, tokens: int, experts: int, top_k: int, scores: int,
    normalize: bool, scale: float, ids: int, d_weights: int, d_sums: int, d_squares: int, d_logits: int,
) -> None: ...
def choose_workspace(*, tokens: int, experts: int, tallied: bool) -> int: ...
def column_sums(
    *, device: int, stream: int, rows: int, type: int, tokens: int, columns: int, pitch: int, groups: int, sizes: int,
    int64_sizes: bool, scale: int, out: int, out_type: int, workspace: int,
) -> None: ...
def column_sums_workspace(*, tokens: int, columns: int, groups: int) -> int: ...
def decode_weight(
    *, device: int, stream: int, groups: int, n: int, k: int, codes: int, data: int, stored_scale: int, scales: int,
    rows_of_scale: int, columns_of_scale: int, decoders: int, decoders_of_group: int, divides: bool, type: int,
    out: int,
) -> None: ...
def divide_rows(
    *, device: int, stream: int, rank: int, buffers: list[int], state: int, report: int, exchange: int,
    tokens_per_expert: int, experts: int, capacity: int, fails: bool, firsts: int, split_sizes: int,
) -> None: ...
def fake_quantize_rows(
    *, device: int, stream: int, format: int, type: int, tokens: int, features: int, x: int, pitch: int, groups: int,
    sizes: int, int64_sizes: bool, rows: int, columns: int, slot_of_row: int = ..., top_k: int = ...,
    is_transformed: bool = ..., row_amax: int = ..., column_amax: int = ..., seed: int = ...,
) -> None: ...
def fake_quantize_weight(
    *, device: int, stream: int, format: int, type: int, groups: int, n: int, k: int, weight: int, pitch: int,
    group_stride: int, addresses: list[int], rows: int, columns: int, amax: int = ...,
) -> None: ...
def gather_slots(
    *, device: int, stream: int, values: int, row_of_slot: int, num_rows: int, slots: int, out: int, type: int,
) -> None: ...
def gemm_to_slots(
    *, layout: int, operand: int, device: int, stream: int, groups: int, tokens: int, n: int, k: int, a: int,
    a_pitch: int, b: int, b_pitch: int, b_group: int, b_addresses: list[int], sizes: int, int64_sizes: bool, rank: int,
    buffers: list[int], state: int, slot_of_row: int, firsts: int, slots: int, at: int, bias: int = ...,
    bias_type: int = ..., bias_pitch: int = ..., bias_addresses: list[int] = ..., bias_scale: int = ...,
    row_scale: int = ..., workspace: int = ..., variant: int = ...,
) -> None: ...
def grouped_gemm(
    *, layout: int, operand: int, device: int, stream: int, groups: int, tokens: int, n: int, k: int, a: int,
    a_pitch: int, b: int, b_pitch: int, b_group: int, b_addresses: list[int], sizes: int, int64_sizes: bool,
    output: int, m: int, out: int, out_pitch: int, out_group: int, out_addresses: list[int], accumulate: bool,
    bias: int = ..., bias_type: int = ..., bias_pitch: int = ..., bias_addresses: list[int] = ...,
    bias_scale: int = ..., row_scale: int = ..., alphas: int = ..., alpha: float = ..., betas: int = ...,
    beta: float = ..., workspace: int = ..., variant: int = ..., workspace_bytes: int = ..., zero_tail: bool = ...,
    second_k: int = ..., second_a: int = ..., second_a_pitch: int = ..., second_b: int = ...,
    second_b_pitch: int = ..., second_b_group: int = ..., followers: list[int] = ..., follows: bool = ...,
    first_group: int = ..., run_groups: int = ...,
) -> None: ...
def launch_foreign(
    *, device: int, stream: int, function: int, blocks_x: int, blocks_y: int, threads: int, shared_bytes: int,
    parameters: list[int], numbers: list[int], maps: list[int], addresses: list[int],
) -> None: ...
def linear_activation(
    *, activation: Activation, layout: int, operand: int, device: int, stream: int, groups: int, tokens: int, n: int,
    k: int, a: int, a_pitch: int, b: int, b_pitch: int, b_group: int, b_addresses: list[int], sizes: int,
    int64_sizes: bool, preact: int, postact: int, bias: int = ..., bias_type: int = ..., bias_pitch: int = ...,
    bias_addresses: list[int] = ..., bias_scale: int = ..., scales: int = ..., scales_type: int = ...,
    vectors: list[int] = ..., workspace: int = ..., variant: int = ..., second_k: int = ..., second_a: int = ...,
    second_a_pitch: int = ..., second_b: int = ..., second_b_pitch: int = ..., second_b_group: int = ...,
    arrived: int = ..., pieces: int = ...,
) -> None: ...
def linear_activation_backward(
    *, activation: Activation, layout: int, operand: int, device: int, stream: int, groups: int, tokens: int, n: int,
    k: int, a: int, a_pitch: int, b: int, b_pitch: int, b_group: int, b_addresses: list[int], sizes: int,
    int64_sizes: bool, preact: int, dpreact: int, scales: int = ..., scales_type: int = ..., dscales: int = ...,
    postact: int = ..., dbias: int = ..., dbias_type: int = ..., vectors: list[int] = ..., dvectors: list[int] = ...,
    dvector_types: list[int] = ..., dvectors_of_both: list[int] = ..., dvectors_of_all_rows: list[int] = ...,
    workspace: int = ..., variant: int = ..., second_k: int = ..., second_a: int = ..., second_a_pitch: int = ...,
    second_b: int = ..., second_b_pitch: int = ..., second_b_group: int = ...,
) -> None: ...
def low_rank_pass(
    *, device: int, stream: int, rows: int, type: int, tokens: int, columns: int, pitch: int, groups: int, sizes: int,
    int64_sizes: bool, rank: int, by_columns: bool, slot_of_row: int, top_k: int, gathered: int, factor: int,
    product: int, low: int, gradient: int, gradient_type: int, workspace: int,
) -> None: ...
def low_rank_workspace(*, tokens: int, columns: int, rank: int, gradient: bool, device: int) -> int: ...
def numbers_to_rows(
    *, device: int, stream: int, rank: int, buffers: list[int], state: int, report: int, exchange: int,
    number_bytes: int, slots: int, row_of_slot: int, firsts: int, capacity: int, at: int, out: int,
) -> None: ...
def packed_gemm(
    *, device: int, stream: int, format: int, tokens: int, n: int, k: int, a: int, a_pitch: int, b: int, b_scales: int,
    groups: int, sizes: int, int64_sizes: bool, output: int, out: int, out_pitch: int, bias: int = ...,
    bias_type: int = ..., bias_scale: int = ..., row_scale: int = ..., alphas: int = ..., zero_tail: bool = ...,
) -> None: ...
def permute(
    *, device: int, stream: int, type: int, tokens: int, columns: int, top_k: int, row_of_slot: int, num_rows: int,
    source: int, source_pitch: int, out: int, out_pitch: int, fill: bool,
) -> None: ...
def pointwise(
    *, function: int, device: int, stream: int, rows: int, columns: int, block: int, x: int, dy: int, y: int, dx: int,
    numbers: list[int], dnumbers: list[int], vectors: list[int], dcolumns: list[int], matrices: list[int],
    dmatrices: list[int], groups: int, sizes: int, int64_sizes: bool, constants: tuple[float, ...],
) -> None: ...
def publish(
    *, device: int, stream: int, rank: int, buffers: list[int], state: int, report: int, exchange: int,
    signals_at: int, kind: int, timeout: int, ids: int = ..., int64_ids: bool = ..., slots: int = ...,
    most_slots: int = ..., experts: int = ..., ids_at: int = ..., numbers: int = ..., number_bytes: int = ...,
    numbers_at: int = ...,
) -> None: ...
def pull(
    *, device: int, stream: int, rank: int, buffers: list[int], state: int, report: int, exchange: int, type: int,
    tokens: int, columns: int, top_k: int, row_of_slot: int, firsts: int, capacity: int, at: int, out: int, fill: bool,
) -> None: ...
def pull_blocks(
    *, device: int, stream: int, rank: int, buffers: list[int], state: int, report: int, exchange: int, type: int,
    tokens: int, columns: int, top_k: int, row_of_slot: int, firsts: int, capacity: int, at: int, out: int,
    slot_of_row: int, arrived: int, blocks: int, fill: bool,
) -> None: ...
def pull_numbers(
    *, device: int, stream: int, rank: int, buffers: list[int], state: int, report: int, exchange: int,
    number_bytes: int, slots: int, row_of_slot: int, firsts: int, capacity: int, at: int, out: int,
) -> None: ...
def pull_sum(
    *, device: int, stream: int, rank: int, buffers: list[int], state: int, report: int, exchange: int, type: int,
    tokens: int, columns: int, top_k: int, row_of_slot: int, firsts: int, capacity: int, at: int, out: int,
    blocks: int, at_slots: bool = ...,
) -> None: ...
def push_sums(
    *, device: int, stream: int, rank: int, buffers: list[int], state: int, report: int, exchange: int, type: int,
    tokens: int, columns: int, top_k: int, row_of_slot: int, firsts: int, capacity: int, at: int, out: int,
    source: int, pitch: int, blocks: int,
) -> None: ...
def quantize_activation(
    *, activation: Activation, device: int, stream: int, type: int, tokens: int, features: int, preact: int,
    groups: int, sizes: int, int64_sizes: bool, power_of_two: bool, rows: int, row_scales: int, columns: int,
    column_scales: int, scales: int = ..., scales_type: int = ..., vectors: list[int] = ...,
) -> None: ...
def quantize_activation_backward(
    *, activation: Activation, device: int, stream: int, type: int, tokens: int, features: int, dpostact: int,
    preact: int, groups: int, sizes: int, int64_sizes: bool, power_of_two: bool, rows: int, row_scales: int,
    columns: int, column_scales: int, postact_columns: int = ..., postact_scales: int = ..., scales: int = ...,
    scales_type: int = ..., dscales: int = ..., workspace: int = ..., vectors: list[int] = ...,
    dvectors: list[int] = ..., dvector_types: list[int] = ..., dvectors_of_both: list[int] = ...,
    dvectors_of_all_rows: list[int] = ...,
) -> None: ...
def quantize_backward_workspace(*, tokens: int, features: int, groups: int = ..., dvectors: int = ...) -> int: ...
def quantize_rows(
    *, device: int, stream: int, type: int, tokens: int, features: int, x: int, pitch: int, groups: int, sizes: int,
    int64_sizes: bool, power_of_two: bool, rows: int, row_scales: int, columns: int, column_scales: int,
    exponents: int = ..., slot_of_row: int = ..., top_k: int = ..., scaling: int = ..., amax: int = ...,
    encode: int = ...,
) -> None: ...
def quantize_weight(
    *, device: int, stream: int, type: int, groups: int, n: int, k: int, weight: int, pitch: int, group_stride: int,
    addresses: list[int], halves: int, power_of_two: bool, data: int, transposed: int, scales: int,
    scales_transposed: bool, scaling: int = ..., amax: int = ..., encode: int = ..., transposed_scales: int = ...,
) -> None: ...
def quantize_workspace(*, scaling: int, rows: int, groups: int, features: int) -> int: ...
def ragged_gemm(
    *, layout: int, operand: int, output: int, device: int, stream: int, groups: int, a: int, a_elements: int,
    a_rows: int, a_rows_int64: bool, a_rows_uniform: int, a_columns: int, a_columns_int64: bool,
    a_columns_uniform: int, b: int, b_elements: int, b_rows: int, b_rows_int64: bool, b_rows_uniform: int,
    b_columns: int, b_columns_int64: bool, b_columns_uniform: int, out: int, out_elements: int, zero_tail: bool,
    accumulate: bool, bias: int, bias_type: int, bias_pitch: int, alphas: int, alpha: float, betas: int, beta: float,
    workspace: int,
) -> None: ...
def route(
    *, device: int, stream: int, ids: int, int64_ids: bool, slots: int, groups: int, tokens_per_expert: int,
    slot_of_row: int, row_of_slot: int, workspace: int, weights: int = ..., weights_type: int = ..., scales: int = ...,
) -> None: ...
def route_workspace_bytes(*, slots: int, groups: int) -> int: ...
def routed_mlp(
    *, activation: Activation, type: int, groups: int, features: int, columns: int, transposed: bool, unfused: bool,
    up: int, up_pitch: int, up_group: int, down: int, down_pitch: int, down_group: int, up_bias: int,
    up_bias_pitch: int, down_bias: int, down_bias_pitch: int, bias_type: int, device: int, stream: int, tokens: int,
    top_k: int, x: int, pitch: int, ids: int, int64_ids: bool, weights: int, weights_type: int, out: int,
    workspace: int,
) -> None: ...
def routed_workspace_bytes(
    *, gated: bool, type: int, groups: int, features: int, columns: int, unfused: bool, slots: int,
) -> int: ...
def row_dots(
    *, device: int, stream: int, rows: int, type: int, tokens: int, columns: int, pitch: int, groups: int, sizes: int,
    int64_sizes: bool, vectors: int, vectors_type: int, out: int,
) -> None: ...
def row_scaled_gemm(
    *, device: int, stream: int, groups: int, tokens: int, n: int, a: int, a_scales: int, b: int, b_scales: int,
    sizes: int, int64_sizes: bool, output: int, out: int, out_pitch: int, workspace: int, variant: int, k: int,
    a_pitch: int, b_pitch: int, b_group: int, b_scales_group: int, b_scales_row: int, fast: bool, bias: int = ...,
    bias_type: int = ..., bias_pitch: int = ..., bias_addresses: list[int] = ..., bias_scale: int = ...,
    row_scale: int = ..., alphas: int = ..., zero_tail: bool = ...,
) -> None: ...
def scaled_activation(
    *, activation: Activation, device: int, stream: int, groups: int, tokens: int, n: int, a: int, a_scales: int,
    b: int, b_scales: int, sizes: int, int64_sizes: bool, output: int, out: int, out_pitch: int, workspace: int,
    variant: int, k: int, a_pitch: int, b_pitch: int, b_group: int, b_scales_group: int, b_scales_row: int,
    b_scales_column: int, halves: bool, power_of_two: bool, rows: int, row_scales: int, bias: int = ...,
    bias_type: int = ..., bias_pitch: int = ..., bias_addresses: list[int] = ..., bias_scale: int = ...,
    scales: int = ..., scales_type: int = ..., zero_tail: bool = ..., vectors: list[int] = ...,
) -> None: ...
def scaled_gemm(
    *, device: int, stream: int, groups: int, tokens: int, n: int, a: int, a_scales: int, b: int, b_scales: int,
    sizes: int, int64_sizes: bool, output: int, out: int, out_pitch: int, workspace: int, variant: int, k: int,
    a_pitch: int, b_pitch: int, b_group: int, b_scales_group: int, b_scales_row: int, b_scales_column: int,
    halves: bool, bias: int = ..., bias_type: int = ..., bias_pitch: int = ..., bias_addresses: list[int] = ...,
    bias_scale: int = ..., row_scale: int = ..., alphas: int = ..., zero_tail: bool = ...,
) -> None: ...
def scaled_wgrad(
    *, device: int, stream: int, groups: int, tokens: int, n: int, a: int, a_scales: int, b: int, b_scales: int,
    sizes: int, int64_sizes: bool, output: int, out: int, out_pitch: int, workspace: int, variant: int, m: int,
    out_group: int, out_addresses: list[int], accumulate: bool,
) -> None: ...
def stage_rows(
    *, device: int, stream: int, rank: int, buffers: list[int], state: int, report: int, exchange: int, type: int,
    tokens: int, columns: int, top_k: int, row_of_slot: int, firsts: int, capacity: int, at: int, out: int,
    source: int, pitch: int, slot_of_row: int = ..., slots: int = ...,
) -> None: ...
def stored_gemm(
    *, layout: int, operand: int, device: int, stream: int, groups: int, tokens: int, n: int, k: int, a: int,
    a_pitch: int, b: int, b_pitch: int, b_group: int, b_addresses: list[int], sizes: int, int64_sizes: bool,
    b_scales: int, out: int, out_pitch: int, workspace: int, bias: int = ..., bias_type: int = ...,
    bias_pitch: int = ..., bias_addresses: list[int] = ..., bias_scale: int = ..., row_scale: int = ...,
    zero_tail: bool = ..., second_k: int = ..., second_a: int = ..., second_a_pitch: int = ..., second_b: int = ...,
    second_b_pitch: int = ..., second_b_group: int = ...,
) -> None: ...
def sum_parts(
    *, device: int, stream: int, rank: int, buffers: list[int], state: int, report: int, exchange: int, type: int,
    tokens: int, columns: int, top_k: int, row_of_slot: int, firsts: int, capacity: int, at: int, out: int,
) -> None: ...
def transpose_bytes(
    *, device: int, stream: int, groups: int, rows: int, columns: int, source: int, out: int,
) -> None: ...
def unpermute(
    *, device: int, stream: int, type: int, tokens: int, columns: int, top_k: int, row_of_slot: int, num_rows: int,
    source: int, source_pitch: int, out: int, out_pitch: int,
) -> None: ...
def zero_tail(
    *, device: int, stream: int, data: int, tokens: int, row_bytes: int, pitch_bytes: int, groups: int, sizes: int,
    int64_sizes: bool,
) -> None: ...
