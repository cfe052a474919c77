"""The compiled extension: CUDA kernels behind plain integers. `ops/kernels/hopper` calls it, and jax its handlers."""

from collections.abc import Callable, Sequence
from typing import NotRequired, TypedDict, Unpack

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

class DeviceProperties(TypedDict):
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block: int
    l2_bytes: int

def refuse(reason: str) -> None: ...
def cuda_version() -> int: ...
def xla_handlers() -> dict[str, object]: ...
def device_properties(device: int) -> DeviceProperties: ...
def raise_wrong_sizes(device: int) -> None: ...
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

class OnStream(TypedDict):
    device: int
    stream: int

class Split(TypedDict):
    """Groups of rows, whose sizes are on the device."""

    groups: int
    sizes: int
    int64_sizes: bool

class Operands(TypedDict):
    """Of a product: rows of `a`, `n` columns, `b`, and how deep it is."""

    tokens: int
    n: int
    k: int
    a: int
    a_pitch: int
    b: int

class Weights(TypedDict):
    """Where each group has its own `b`."""

    b_pitch: int
    b_group: int

class ScaledOperands(TypedDict):
    """Of 8 bits."""

    a_scales: int
    b_scales: int
    b_scales_group: int
    b_scales_row: int

class BlockScales(TypedDict):
    """Scales of blocks; rows of gate and up are halves of the weights."""

    b_scales_column: int
    halves: bool

class Results(TypedDict):
    """Rows of results."""

    output: int
    out: int
    out_pitch: int

class Bias(TypedDict):
    bias: NotRequired[int]
    bias_type: NotRequired[int]
    bias_scale: NotRequired[int]

class BiasOfGroups(TypedDict):
    """Where each group has its own."""

    bias_pitch: NotRequired[int]
    bias_addresses: NotRequired[list[int]]

class SecondPair(TypedDict):
    """A second pair of operands, whose product is added."""

    second_k: NotRequired[int]
    second_a: NotRequired[int]
    second_a_pitch: NotRequired[int]
    second_b: NotRequired[int]
    second_b_pitch: NotRequired[int]
    second_b_group: NotRequired[int]

class RowScales(TypedDict):
    """Factors of rows."""

    scales: NotRequired[int]
    scales_type: NotRequired[int]

class VectorGradients(TypedDict):
    """Gradients of numbers of columns."""

    dvectors: NotRequired[list[int]]
    dvector_types: NotRequired[list[int]]
    dvectors_of_both: NotRequired[list[int]]
    dvectors_of_all_rows: NotRequired[list[int]]

class Ranks(TypedDict):
    """That read one another's memory."""

    rank: int
    buffers: list[int]
    state: int

class Exchange(TypedDict):
    """One of theirs."""

    report: int
    exchange: int

class SlotRows(TypedDict):
    """Rows of experts, brought from the tokens of all ranks."""

    type: int
    tokens: int
    columns: int
    top_k: int
    row_of_slot: int
    firsts: int
    capacity: int
    at: int
    out: int

class QuantizedRows(TypedDict):
    row_scales: int
    columns: int
    column_scales: int
    power_of_two: bool
    rows: int

class GroupedGemm(OnStream, Split, Operands, Weights, Results, Bias, BiasOfGroups, SecondPair):
    layout: int
    operand: int
    b_addresses: list[int]
    m: int
    out_group: int
    out_addresses: list[int]
    accumulate: bool
    row_scale: NotRequired[int]
    alphas: NotRequired[int]
    alpha: NotRequired[float]
    betas: NotRequired[int]
    beta: NotRequired[float]
    workspace: NotRequired[int]
    variant: NotRequired[int]
    workspace_bytes: NotRequired[int]
    zero_tail: NotRequired[bool]
    followers: NotRequired[list[int]]
    follows: NotRequired[bool]

class ScaledGemm(OnStream, Split, Operands, Weights, ScaledOperands, BlockScales, Results, Bias, BiasOfGroups):
    workspace: int
    variant: int
    row_scale: NotRequired[int]
    alphas: NotRequired[int]
    zero_tail: NotRequired[bool]

class ScaledActivation(
    OnStream, Split, Operands, Weights, ScaledOperands, BlockScales, Results, Bias, BiasOfGroups, RowScales
):
    activation: Activation
    workspace: int
    variant: int
    power_of_two: bool
    rows: int
    row_scales: int
    zero_tail: NotRequired[bool]
    vectors: NotRequired[list[int]]

class RowScaledGemm(OnStream, Split, Operands, Weights, ScaledOperands, Results, Bias, BiasOfGroups):
    workspace: int
    variant: int
    fast: bool
    row_scale: NotRequired[int]
    alphas: NotRequired[int]
    zero_tail: NotRequired[bool]

class PackedGemm(OnStream, Split, Operands, Results, Bias):
    format: int
    b_scales: int
    row_scale: NotRequired[int]
    alphas: NotRequired[int]
    zero_tail: NotRequired[bool]

class ScaledWgrad(OnStream, Split, Results):
    tokens: int
    n: int
    a: int
    a_scales: int
    b: int
    b_scales: int
    workspace: int
    variant: int
    m: int
    out_group: int
    out_addresses: list[int]
    accumulate: bool

class RaggedGemm(OnStream):
    layout: int
    operand: int
    output: int
    groups: int
    a: int
    a_elements: int
    a_rows: int
    a_rows_int64: bool
    a_rows_uniform: int
    a_columns: int
    a_columns_int64: bool
    a_columns_uniform: int
    b: int
    b_elements: int
    b_rows: int
    b_rows_int64: bool
    b_rows_uniform: int
    b_columns: int
    b_columns_int64: bool
    b_columns_uniform: int
    out: int
    out_elements: int
    zero_tail: bool
    accumulate: bool
    bias: int
    bias_type: int
    bias_pitch: int
    alphas: int
    alpha: float
    betas: int
    beta: float
    workspace: int

class Activate(OnStream, RowScales):
    activation: Activation
    type: int
    rows: int
    columns: int
    preact: int
    postact: int

class ActivateBackward(OnStream, RowScales):
    activation: Activation
    type: int
    rows: int
    columns: int
    dpostact: int
    preact: int
    dpreact: NotRequired[int]
    dscales: NotRequired[int]
    postact: NotRequired[int]

class Pointwise(OnStream, Split):
    function: int
    rows: int
    columns: int
    block: int
    x: int
    dy: int
    y: int
    dx: int
    numbers: list[int]
    dnumbers: list[int]
    vectors: list[int]
    dcolumns: list[int]
    matrices: list[int]
    dmatrices: list[int]
    constants: tuple[float, ...]

class LinearActivation(OnStream, Split, Operands, Weights, Bias, BiasOfGroups, SecondPair, RowScales):
    activation: Activation
    layout: int
    operand: int
    b_addresses: list[int]
    preact: int
    postact: int
    vectors: NotRequired[list[int]]
    workspace: NotRequired[int]
    variant: NotRequired[int]
    arrived: NotRequired[int]
    pieces: NotRequired[int]

class LinearActivationBackward(OnStream, Split, Operands, Weights, SecondPair, RowScales, VectorGradients):
    activation: Activation
    layout: int
    operand: int
    b_addresses: list[int]
    preact: int
    dpreact: int
    dscales: NotRequired[int]
    postact: NotRequired[int]
    dbias: NotRequired[int]
    dbias_type: NotRequired[int]
    vectors: NotRequired[list[int]]
    workspace: NotRequired[int]
    variant: NotRequired[int]

class BackwardWorkspaceBytes(TypedDict):
    groups: int
    tokens: int
    columns: int
    dscales: bool
    bias_columns: int
    dvectors: int

class ZeroTail(OnStream, Split):
    data: int
    tokens: int
    row_bytes: int
    pitch_bytes: int

class ColumnSumsWorkspace(TypedDict):
    tokens: int
    columns: int
    groups: int

class ColumnSums(OnStream, Split):
    rows: int
    type: int
    tokens: int
    columns: int
    pitch: int
    scale: int
    out: int
    out_type: int
    workspace: int

class RowDots(OnStream, Split):
    rows: int
    type: int
    tokens: int
    columns: int
    pitch: int
    vectors: int
    vectors_type: int
    out: int

class LowRankWorkspace(TypedDict):
    tokens: int
    columns: int
    rank: int
    gradient: bool
    device: int

class LowRankPass(OnStream, Split):
    rows: int
    type: int
    tokens: int
    columns: int
    pitch: int
    rank: int
    by_columns: bool
    slot_of_row: int
    top_k: int
    gathered: int
    factor: int
    product: int
    low: int
    gradient: int
    gradient_type: int
    workspace: int

class ChoiceRule(OnStream):
    logits: int
    type: int
    tokens: int
    experts: int
    top_k: int
    scores: int
    normalize: bool
    scale: float

class Choose(ChoiceRule):
    groups: int
    keep: int
    best: int
    bias: int
    valid: int
    given: int
    ids: int
    weights: int
    counts: int
    slots: int
    sums: int
    squares: int
    workspace: int

class ChoiceWorkspace(TypedDict):
    tokens: int
    experts: int
    tallied: bool

class ChooseBackward(ChoiceRule):
    ids: int
    d_weights: int
    d_sums: int
    d_squares: int
    d_logits: int

class RouteWorkspaceBytes(TypedDict):
    slots: int
    groups: int

class Route(OnStream):
    ids: int
    int64_ids: bool
    slots: int
    groups: int
    tokens_per_expert: int
    slot_of_row: int
    row_of_slot: int
    workspace: int
    weights: NotRequired[int]
    weights_type: NotRequired[int]
    scales: NotRequired[int]

class Permute(OnStream):
    type: int
    tokens: int
    columns: int
    top_k: int
    row_of_slot: int
    num_rows: int
    source: int
    source_pitch: int
    out: int
    out_pitch: int
    fill: bool

class Unpermute(OnStream):
    type: int
    tokens: int
    columns: int
    top_k: int
    row_of_slot: int
    num_rows: int
    source: int
    source_pitch: int
    out: int
    out_pitch: int

class GatherSlots(OnStream):
    values: int
    row_of_slot: int
    num_rows: int
    slots: int
    out: int
    type: int

class Publish(OnStream, Ranks, Exchange):
    signals_at: int
    kind: int
    timeout: int
    ids: NotRequired[int]
    int64_ids: NotRequired[bool]
    slots: NotRequired[int]
    most_slots: NotRequired[int]
    experts: NotRequired[int]
    ids_at: NotRequired[int]
    numbers: NotRequired[int]
    number_bytes: NotRequired[int]
    numbers_at: NotRequired[int]

class DivideRows(OnStream, Ranks, Exchange):
    tokens_per_expert: int
    experts: int
    capacity: int
    fails: bool
    firsts: int
    split_sizes: int

class StageRows(OnStream, Ranks, Exchange, SlotRows):
    source: int
    pitch: int
    slot_of_row: NotRequired[int]
    slots: NotRequired[int]

class Pull(OnStream, Ranks, Exchange, SlotRows):
    fill: bool

class PullBlocks(OnStream, Ranks, Exchange, SlotRows):
    slot_of_row: int
    arrived: int
    blocks: int
    fill: bool

class PullSum(OnStream, Ranks, Exchange, SlotRows):
    blocks: int
    at_slots: NotRequired[bool]

class GemmToSlots(OnStream, Split, Operands, Weights, Bias, BiasOfGroups, Ranks):
    layout: int
    operand: int
    b_addresses: list[int]
    slot_of_row: int
    firsts: int
    slots: int
    at: int
    row_scale: NotRequired[int]
    workspace: NotRequired[int]
    variant: NotRequired[int]

class NumbersToRows(OnStream, Ranks, Exchange):
    number_bytes: int
    slots: int
    row_of_slot: int
    firsts: int
    capacity: int
    at: int
    out: int

class PullNumbers(OnStream, Ranks, Exchange):
    number_bytes: int
    slots: int
    row_of_slot: int
    firsts: int
    capacity: int
    at: int
    out: int

class RoutedMlp(OnStream):
    activation: Activation
    type: int
    groups: int
    features: int
    columns: int
    transposed: bool
    unfused: bool
    up: int
    up_pitch: int
    up_group: int
    down: int
    down_pitch: int
    down_group: int
    up_bias: int
    up_bias_pitch: int
    down_bias: int
    down_bias_pitch: int
    bias_type: int
    tokens: int
    top_k: int
    x: int
    pitch: int
    ids: int
    int64_ids: bool
    weights: int
    weights_type: int
    out: int
    workspace: int

class RoutedWorkspaceBytes(TypedDict):
    gated: bool
    type: int
    groups: int
    features: int
    columns: int
    unfused: bool
    slots: int

class QuantizeRows(OnStream, Split, QuantizedRows):
    type: int
    tokens: int
    features: int
    x: int
    pitch: int
    slot_of_row: NotRequired[int]
    top_k: NotRequired[int]
    tiles: NotRequired[int]
    scaling: NotRequired[int]
    amax: NotRequired[int]
    encode: NotRequired[int]

class QuantizeWorkspace(TypedDict):
    scaling: int
    rows: int
    groups: int
    features: int

class QuantizeWeight(OnStream):
    type: int
    groups: int
    n: int
    k: int
    weight: int
    pitch: int
    group_stride: int
    addresses: list[int]
    halves: int
    power_of_two: bool
    data: int
    transposed: int
    scales: int
    scales_transposed: bool
    scaling: NotRequired[int]
    amax: NotRequired[int]
    encode: NotRequired[int]
    transposed_scales: NotRequired[int]

class FakeQuantizeRows(OnStream, Split):
    format: int
    type: int
    tokens: int
    features: int
    x: int
    pitch: int
    rows: int
    columns: int
    slot_of_row: NotRequired[int]
    top_k: NotRequired[int]
    is_transformed: NotRequired[bool]
    row_amax: NotRequired[int]
    column_amax: NotRequired[int]
    seed: NotRequired[int]

class FakeQuantizeWeight(OnStream):
    format: int
    type: int
    groups: int
    n: int
    k: int
    weight: int
    pitch: int
    group_stride: int
    addresses: list[int]
    rows: int
    columns: int
    amax: NotRequired[int]

class PermuteScales(OnStream):
    tokens: int
    top_k: int
    features: int
    slot_of_row: int
    num_rows: int
    source: int
    out: int

class TransposeBytes(OnStream):
    groups: int
    rows: int
    columns: int
    source: int
    out: int

class QuantizeActivation(OnStream, Split, RowScales, QuantizedRows):
    activation: Activation
    type: int
    tokens: int
    features: int
    preact: int
    tiles: NotRequired[int]
    vectors: NotRequired[list[int]]

class QuantizeActivationBackward(OnStream, Split, RowScales, VectorGradients, QuantizedRows):
    activation: Activation
    type: int
    tokens: int
    features: int
    dpostact: int
    preact: int
    postact_columns: NotRequired[int]
    postact_scales: NotRequired[int]
    dscales: NotRequired[int]
    workspace: NotRequired[int]
    tiles: NotRequired[int]
    vectors: NotRequired[list[int]]

class QuantizeBackwardWorkspace(TypedDict):
    tokens: int
    features: int
    groups: NotRequired[int]
    dvectors: NotRequired[int]

def grouped_gemm(**launch: Unpack[GroupedGemm]) -> None: ...
def scaled_gemm(**launch: Unpack[ScaledGemm]) -> None: ...
def scaled_activation(**launch: Unpack[ScaledActivation]) -> None: ...
def row_scaled_gemm(**launch: Unpack[RowScaledGemm]) -> None: ...
def packed_gemm(**launch: Unpack[PackedGemm]) -> None: ...
def scaled_wgrad(**launch: Unpack[ScaledWgrad]) -> None: ...
def ragged_gemm(**launch: Unpack[RaggedGemm]) -> None: ...
def activate(**launch: Unpack[Activate]) -> None: ...
def activate_backward(**launch: Unpack[ActivateBackward]) -> None: ...
def pointwise(**launch: Unpack[Pointwise]) -> None: ...
def linear_activation(**launch: Unpack[LinearActivation]) -> None: ...
def linear_activation_backward(**launch: Unpack[LinearActivationBackward]) -> None: ...
def backward_workspace_bytes(**launch: Unpack[BackwardWorkspaceBytes]) -> int: ...
def zero_tail(**launch: Unpack[ZeroTail]) -> None: ...
def column_sums_workspace(**launch: Unpack[ColumnSumsWorkspace]) -> int: ...
def column_sums(**launch: Unpack[ColumnSums]) -> None: ...
def row_dots(**launch: Unpack[RowDots]) -> None: ...
def low_rank_workspace(**launch: Unpack[LowRankWorkspace]) -> int: ...
def low_rank_pass(**launch: Unpack[LowRankPass]) -> None: ...
def choose_workspace(**launch: Unpack[ChoiceWorkspace]) -> int: ...
def choose(**launch: Unpack[Choose]) -> None: ...
def choose_backward(**launch: Unpack[ChooseBackward]) -> None: ...
def route_workspace_bytes(**launch: Unpack[RouteWorkspaceBytes]) -> int: ...
def route(**launch: Unpack[Route]) -> None: ...
def permute(**launch: Unpack[Permute]) -> None: ...
def unpermute(**launch: Unpack[Unpermute]) -> None: ...
def gather_slots(**launch: Unpack[GatherSlots]) -> None: ...
def publish(**launch: Unpack[Publish]) -> None: ...
def divide_rows(**launch: Unpack[DivideRows]) -> None: ...
def stage_rows(**launch: Unpack[StageRows]) -> None: ...
def pull(**launch: Unpack[Pull]) -> None: ...
def pull_blocks(**launch: Unpack[PullBlocks]) -> None: ...
def pull_sum(**launch: Unpack[PullSum]) -> None: ...
def gemm_to_slots(**launch: Unpack[GemmToSlots]) -> None: ...
def numbers_to_rows(**launch: Unpack[NumbersToRows]) -> None: ...
def pull_numbers(**launch: Unpack[PullNumbers]) -> None: ...
def routed_mlp(**launch: Unpack[RoutedMlp]) -> None: ...
def routed_workspace_bytes(**launch: Unpack[RoutedWorkspaceBytes]) -> int: ...
def quantize_rows(**launch: Unpack[QuantizeRows]) -> None: ...
def quantize_workspace(**launch: Unpack[QuantizeWorkspace]) -> int: ...
def quantize_weight(**launch: Unpack[QuantizeWeight]) -> None: ...
def fake_quantize_rows(**launch: Unpack[FakeQuantizeRows]) -> None: ...
def fake_quantize_weight(**launch: Unpack[FakeQuantizeWeight]) -> None: ...
def permute_scales(**launch: Unpack[PermuteScales]) -> None: ...
def transpose_bytes(**launch: Unpack[TransposeBytes]) -> None: ...
def quantize_activation(**launch: Unpack[QuantizeActivation]) -> None: ...
def quantize_activation_backward(**launch: Unpack[QuantizeActivationBackward]) -> None: ...
def quantize_backward_workspace(**launch: Unpack[QuantizeBackwardWorkspace]) -> int: ...
