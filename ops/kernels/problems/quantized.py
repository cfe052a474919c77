"""The problems of quantisers and of products of quantised operands.

Scales are decode scales: a value is its byte times its scale. Outputs are allocated by the door. Problems are never
modified; they are not frozen because that makes construction four times slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...formats.copies import Columns, PackedFormat, Rows, Scaling
from ...values.activation_spec import ActivationSpec
from .gemm import Counted, GroupedGemm, Matrices, Operands, SourceRows, first, nbytes


class QuantizedWeight(NamedTuple):
    """The results of quantising a weight in blocks of 128 x 128; flat, as a custom op returns them.

    Blocks restart at each expert, and at each of ``halves`` of its rows: 2 where they are gate and up, else 1.

    Attributes:
        data: e4m3 [E, N, K].
        transposed: e4m3 [E, K, N], the same bytes; None: no product reads them.
        scales: float32 [E, halves * ceil(N / halves / 128), ceil(K / 128)].
    """

    data: Tensor
    transposed: Tensor | None
    scales: Tensor


class RowWeight(NamedTuple):
    """The results of quantising a weight with a scale for each row of either orientation; flat, as a custom op returns
    them.

    Attributes:
        data: e4m3 [E, N, K]; scales: float32 [E, N].
        transposed: e4m3 [E, K, N]; transposed_scales: float32 [E, K]. Both None: no product reads them.
    """

    data: Tensor
    scales: Tensor
    transposed: Tensor | None
    transposed_scales: Tensor | None


@dataclass(slots=True)
class QuantizeRows(SourceRows):
    """Quantises rows of tokens, sorted by group.

    Attributes:
        x: bfloat16 or float16 [T, K], with dense columns; or the bytes of e4m3 values, see ``exponents``.
        split_sizes: int32 or int64 [E], on the device of ``x``. Rows past the last group may become anything.
        power_of_two: whether scales are powers of two.
        rows: the destination of the copy with the layout of ``x``; None: not wanted.
        columns: where the transposed copy goes, in blocks of a group's tokens; None: it is not wanted.
        slot_of_row: int32 [R]: row r is the token ``slot_of_row[r] // top_k`` of ``x``, so the rows of experts are
            gathered; None: row r is ``x[r]``.
        scaling: of whole rows and groups, the rows have a scale each, [T].
        encode: float32 [E], what the values of each group are multiplied by, where groups have the scales; None: that
            follows from the values.
        exponents: e8m0 as uint8 [T, ceil(K / 128)]: the values of e4m3 rows are bytes times these powers of two,
            rounded to bfloat16. Such rows give columns alone, in blocks. None: ``x`` are values.
    """

    x: Tensor
    split_sizes: Tensor
    power_of_two: bool
    rows: Rows | None
    columns: Columns | None
    slot_of_row: Tensor | None = None
    top_k: int = 1
    scaling: Scaling = Scaling.BLOCKS
    encode: Tensor | None = None
    exponents: Tensor | None = None

    @property
    def bytes(self) -> int:
        read = nbytes(self.x) * _reads(self.scaling) + nbytes(self.slot_of_row, self.exponents)
        return read + copy_bytes(self.rows, self.columns)

    def __str__(self) -> str:
        return f"rows {'+'.join(copy_names(self.rows, self.columns))}{_scales_of(self.scaling)}"


@dataclass(slots=True)
class QuantizeWeight:
    """Quantises the matrices of all groups.

    Attributes:
        weight: bfloat16, float16 or float32 [E, N, K], or E matrices [N, K], with any strides.
        halves: 2 where the N rows are as many of a gate and then of an up, which no block spans; else 1.
        power_of_two: whether scales are powers of two.
        out: where the bytes, their transposed copy if it is not None, and the scales go.
        scaling: of blocks into a :class:`QuantizedWeight`, else into a :class:`RowWeight`, whose rows all have the same
            scale if groups have one; ``halves`` is then 1.
        encode: as of :class:`QuantizeRows`.
    """

    weight: Matrices
    halves: int
    power_of_two: bool
    out: QuantizedWeight | RowWeight
    scaling: Scaling = Scaling.BLOCKS
    encode: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """One that it reads, to ask for dtype and device."""
        return first(self.weight)

    @property
    def bytes(self) -> int:
        return nbytes(self.weight) * _reads(self.scaling) + nbytes(*self.out)

    def __str__(self) -> str:
        return f"weight {'both' if self.out.transposed is not None else 'rows'}{_scales_of(self.scaling)}"


@dataclass(slots=True)
class QuantizeActivation(Counted):
    """Quantises ``activation(preact) * scales``, which is rounded to the dtype of ``preact`` first.

    Attributes:
        preact: bfloat16 or float16 [T, C].
        scales: [T], of any floating-point dtype; None for ones.
        rows, columns: of the activation [T, F]; see :class:`QuantizeRows`.
        vectors: the numbers of columns that it reads: see :class:`Activate`.
        kernel: that of a user's function, once a backend has found it.
    """

    preact: Tensor
    split_sizes: Tensor
    activation: ActivationSpec
    scales: Tensor | None
    power_of_two: bool
    rows: Rows | None
    columns: Columns | None
    vectors: Operands = None
    kernel: int = 0

    @property
    def tensor(self) -> Tensor:
        """One that it reads, to ask for dtype and device."""
        return self.preact

    def __str__(self) -> str:
        return f"activation {'+'.join(copy_names(self.rows, self.columns))}"


@dataclass(slots=True)
class QuantizeActivationBackward(Counted):
    """Quantises the gradient of ``preact``, and ``activation(preact) * scales`` computed again.

    Both are rounded to the dtype of ``preact`` first.

    Attributes:
        dpostact: the gradient of ``activation(preact) * scales``: [T, F], of the dtype of ``preact``.
        preact: bfloat16 or float16 [T, C].
        scales: [T], of any floating-point dtype; None for ones.
        rows: of the gradient of ``preact``, [T, C]; None: it is not wanted.
        columns: of the gradient of ``preact``; None: it is not wanted.
        postact_columns: of the activation [T, F]; None: it is not wanted.
        dscales: where the gradient of ``scales`` goes, [T]; zero in the tail. None: it is not wanted.
        vectors, kernel: as of :class:`QuantizeActivation`.
        dvectors: where the gradients of ``vectors`` go; None: they are not wanted.
    """

    dpostact: Tensor
    preact: Tensor
    split_sizes: Tensor
    activation: ActivationSpec
    scales: Tensor | None
    power_of_two: bool
    rows: Rows | None
    columns: Columns | None
    postact_columns: Columns | None
    dscales: Tensor | None
    vectors: Operands = None
    dvectors: Operands = None
    kernel: int = 0

    @property
    def tensor(self) -> Tensor:
        """One that it reads, to ask for dtype and device."""
        return self.preact

    def __str__(self) -> str:
        names = copy_names(self.rows, self.columns)
        return f"activation backward {'+'.join(names + (['hidden columns'] if self.postact_columns else []))}"


class _GroupedProduct:
    """Values that follow from the sizes of a product, whatever its operands."""

    __slots__ = ()
    split_sizes: Tensor

    @property
    def groups(self) -> int:
        return self.split_sizes.shape[0]

    @property
    def mnk(self) -> tuple[int, int, int]:
        raise NotImplementedError

    @property
    def flops(self) -> int:
        m, n, k = self.mnk
        return 2 * m * n * k


@dataclass(slots=True)
class ScaledGemm(_GroupedProduct, Counted):
    """``out = row_scale * (alpha * A W^T + bias_scale * bias)``, by group: rows times quantised weights.

    The sum over blocks b of the depth is ``fma(a_scale[b] * w_scale[b], S_b, y)`` in float32 and increasing b, where
    S_b is the product of the bytes. It is rounded once. Scales of whole rows are factors of the sum of all S_b.

    Attributes:
        a: [T, K].
        weight: e4m3 [E, N, K]. The gradient of rows passes :attr:`QuantizedWeight.transposed`.
        weight_scales: float32 [E, blocks of N, blocks of K], with any strides, since both orientations of a weight
            have one tensor of scales. Or [E, N], where each row of a weight and of ``a`` has one scale.
        halves: 2 where the N rows are two halves that no block spans, of as many blocks each; else 1.
        split_sizes: int32 or int64 [E].
        out: bfloat16, float16 or float32 [T, N]. Rows past the last group are not touched unless ``fresh``.
        bias: [E, N], or E vectors [N]; None: there is none.
        row_scale: [T], a factor of each row; ``alpha``: [E], a factor of each product; ``bias_scale``: [T], a factor of
            the bias in each row.
        fresh: ``out`` was allocated for this. Its rows past the last group must become zero.
        fast_accumulation: all S_b may be summed by the tensor cores, where scales are of whole rows.
    """

    a: Rows
    weight: Tensor
    weight_scales: Tensor
    halves: int
    split_sizes: Tensor
    out: Tensor
    bias: Matrices | None = None
    row_scale: Tensor | None = None
    alpha: Tensor | None = None
    bias_scale: Tensor | None = None
    fresh: bool = False
    fast_accumulation: bool = False

    @property
    def rows(self) -> int:
        """T: rows of the token buffer."""
        return self.a.data.shape[0]

    @property
    def mnk(self) -> tuple[int, int, int]:
        """Rows, columns and depth of the products, with T for the rows of all groups."""
        return self.rows, self.weight.shape[1], self.weight.shape[2]

    def __str__(self) -> str:
        return f"NT {' x '.join(map(str, self.mnk))}{', fast accumulation' if self.fast_accumulation else ''}"


@dataclass(slots=True)
class ActivatedScaledGemm:
    """``activation(product) * scales``, rounded to the dtype of the product and then quantised.

    Attributes:
        product: whose ``out`` is the pre-activation, or has no rows: it is not kept.
        scales: [T], of any floating-point dtype; None for ones.
        power_of_two: whether scales of blocks are powers of two.
        rows: of the activation [T, F]; see :class:`QuantizeRows`.
        vectors, kernel: as of :class:`QuantizeActivation`.
    """

    product: ScaledGemm
    activation: ActivationSpec
    scales: Tensor | None
    power_of_two: bool
    rows: Rows
    vectors: Operands = None
    kernel: int = 0

    @property
    def bytes(self) -> int:
        return self.product.bytes + nbytes(self.scales, self.vectors) + copy_bytes(self.rows)

    def __str__(self) -> str:
        return f"{self.product}, activation rows"


@dataclass(slots=True)
class ScaledWgrad(_GroupedProduct):
    """``out[g] (+)= A_g B_g^T``: for each group the product of two operands in blocks of its tokens.

    The sum over the blocks of a group is ``fma(a_scale * b_scale, S, y)`` in float32 and the order of the tokens. A
    group without tokens gives zeros.

    Attributes:
        a: the operand with M features.
        b: the operand with N features, in the same blocks.
        split_sizes: int32 or int64 [E].
        rows: T, which the number of blocks does not tell.
        out: bfloat16, float16 or float32 [E, M, N], or E matrices [M, N].
        accumulate: whether the product is added to ``out``, before the single rounding.
        fresh: ``out`` was just allocated, so its version need not change.
    """

    a: Columns
    b: Columns
    split_sizes: Tensor
    rows: int
    out: Matrices
    accumulate: bool = False
    fresh: bool = False

    @property
    def mnk(self) -> tuple[int, int, int]:
        """Rows, columns and depth of the products, with T for the depth of all groups."""
        return self.a.data.shape[1], self.b.data.shape[1], self.rows

    @property
    def bytes(self) -> int:
        """Every operand read once, the result written once (and read, if it counts)."""
        return nbytes(*self.a, *self.b) + nbytes(self.out) * (2 if self.accumulate else 1)

    def __str__(self) -> str:
        return f"TN {' x '.join(map(str, self.mnk))}"


@dataclass(slots=True)
class PackedGemm(_GroupedProduct, Counted):
    """``out = row_scale * (alpha * A W^T + bias_scale * bias)``, by group: bfloat16 rows times weights of 8 or 4 bits.

    Attributes:
        a: bfloat16 [T, K].
        data: [E, N, K] or [E, N, K / 2], with ``scales`` [E, N, blocks of K]: as a recipe stores them.
        split_sizes: int32 or int64 [E].
        out: bfloat16, float16 or float32 [T, N]. Rows past the last group are not touched unless ``fresh``.
        bias: [E, N]; None: there is none.
        row_scale, alpha, bias_scale, fresh: as of :class:`ScaledGemm`.
    """

    a: Tensor
    data: Tensor
    scales: Tensor
    format: PackedFormat
    split_sizes: Tensor
    out: Tensor
    bias: Tensor | None = None
    row_scale: Tensor | None = None
    alpha: Tensor | None = None
    bias_scale: Tensor | None = None
    fresh: bool = False

    @property
    def rows(self) -> int:
        return self.a.shape[0]

    @property
    def mnk(self) -> tuple[int, int, int]:
        """Rows, columns and depth of the products, with T for the rows of all groups."""
        return self.rows, self.data.shape[1], self.a.shape[1]

    @property
    def factors(self) -> tuple[Tensor | None, ...]:
        """The factors of the bias in each row, of each row, and of each group."""
        return self.bias_scale, self.row_scale, self.alpha

    def __str__(self) -> str:
        return f"NT {' x '.join(map(str, self.mnk))}, {self.format.value}, {self.bytes / 1e6:.1f} MB"


@dataclass(slots=True)
class StoredGemm:
    """A product of bfloat16 rows and an MXFP4 weight, which is decoded within it.

    Attributes:
        product: the product, where ``b`` is the bytes [E, N, K / 2], which NN contracts over N.
        scales: e8m0 [E, N, K / 32].
    """

    product: GroupedGemm
    scales: Tensor

    @property
    def flops(self) -> int:
        p = self.product
        return 2 * p.rows * first(p.out).shape[1] * (p.a.shape[1] + (0 if p.second is None else p.second.a.shape[1]))

    @property
    def bytes(self) -> int:
        return self.product.bytes + nbytes(self.scales)

    def __str__(self) -> str:
        p = self.product
        sizes = f"{p.rows} x {first(p.out).shape[1]} x {p.a.shape[1]}"
        return f"{p.layout.value} {sizes}, {PackedFormat.MXFP4.value}, {self.bytes / 1e6:.1f} MB"


Quantizing = QuantizeRows | QuantizeWeight | QuantizeActivation | QuantizeActivationBackward
"""The problems of ``quantize.py`` of a backend."""
Multiplying = ScaledGemm | ScaledWgrad
"""The problems of ``scaled_gemm.py`` of a backend."""


def _reads(scaling: Scaling) -> int:
    """The number of reads of each value: two if its scale covers many blocks."""
    return 1 if scaling is Scaling.BLOCKS else 2


def _scales_of(scaling: Scaling) -> str:
    return "" if scaling is Scaling.BLOCKS else f", scales of {scaling.value}"


def copy_bytes(*copies: Rows | Columns | None) -> int:
    """Bytes of copies and their scales."""
    return sum(nbytes(*copy) for copy in copies if copy is not None)


def copy_names(rows: Rows | None, columns: Columns | None) -> list[str]:
    """The names of the wanted operands."""
    return [name for name, copy in (("rows", rows), ("columns", columns)) if copy is not None]
