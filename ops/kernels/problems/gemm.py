"""The statement of a grouped GEMM, as the door hands it to a backend."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ....fuser.contract.torch_private import FakeTensor
from ...values.activation_spec import ActivationSpec
from .independent import Independent

Matrices = Tensor | Sequence[Tensor]
"""One stacked tensor [E, rows, columns], or E matrices that lie anywhere."""


Operands = Tensor | Sequence[Tensor | None] | None
"""Several operands of one shape: one by one, None for one that is not there, or all stacked; None for none."""


class Layout(Enum):
    """How the operands of each group are multiplied. T rows are sorted by group; a group's rows are its own."""

    NT = "NT"  # a [T, K], b [E, N, K] -> [T, N]: forward
    NN = "NN"  # a [T, K], b [E, K, N] -> [T, N]: gradient of the rows
    TN = "TN"  # a [T, M], b [T, N] -> [E, M, N]: gradient of the weights; the contraction is ragged

    __hash__ = object.__hash__  # a member is one object; Enum's own hash is Python code


class ActivationGrads(NamedTuple):
    """Gradients of the pre-activation and of the scales; and the activation times the scales, computed again.

    ``bias`` [E, C] and ``vectors`` are for kernels that know groups: the sums of ``preact`` over the rows of each,
    which are the gradient of its bias; and the gradients of the numbers of columns, in their shapes.
    """

    preact: Tensor
    scales: Tensor | None
    postact: Tensor | None
    bias: Tensor | None = None
    vectors: Operands = None

    def rows(self, rows: slice) -> ActivationGrads:
        """Views of some rows."""
        return ActivationGrads(*(None if t is None else t[rows] for t in self[:3]))  # type: ignore[arg-type]


@final
@dataclass(slots=True)
class Activate:
    """Epilogue: ``out`` [T, F] = activation of the product [T, C], times ``scales`` [T].

    Attributes:
        preact: [T, C], where the product itself goes; None: nowhere.
        vectors: [E, F] each, [1, F] of all rows, 2 F of gate and up: the numbers of columns that the activation reads.
        matrices: [T, F] each, 2 F of gate and up: the numbers of elements that it reads.
        tail_unspecified: rows of ``preact`` and ``out`` past the last group may hold anything, for readers that know.
        kernels: those of a user's function, once a backend has found them; a launch then looks for none.
    """

    spec: ActivationSpec
    scales: Tensor | None
    preact: Tensor | None
    vectors: Operands = None
    matrices: Operands = None
    tail_unspecified: bool = False
    kernels: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        """The traffic beside ``out``."""
        return nbytes(self.scales, self.preact, self.vectors, self.matrices)


@final
@dataclass(slots=True)
class ActivateBackward:
    """Epilogue: the product [T, F] is the gradient of ``activation(preact) * scales``; ``out`` is ``grads.preact``.

    Attributes:
        grads: the wanted gradients, and the recomputed activation.
        vectors, kernels: as of :class:`Activate`.
    """

    spec: ActivationSpec
    scales: Tensor | None
    preact: Tensor
    grads: ActivationGrads
    vectors: Operands = None
    kernels: tuple[int, ...] | None = None

    @property
    def bytes(self) -> int:
        """The traffic beside ``out``."""
        return nbytes(self.preact, self.vectors, *self.grads[1:])


Epilogue = Activate | ActivateBackward | None
"""The operation on a product before it is stored; None: none."""

_MANY = 2**30  # the row limit of some kernels


class OperandPair(NamedTuple):
    """A second pair of operands, of another depth, whose product is added to the first before anything else.

    Attributes:
        a: [T, R].
        b: [E, N, R] for NT, [E, R, N] for NN.
    """

    a: Tensor
    b: Tensor


class RowSlots(NamedTuple):
    """The destination of this rank's rows: the slots of their tokens, in the buffers of the tokens' ranks.

    Attributes:
        rank: this rank; ``buffers``: the addresses of all ranks' buffers, in this rank's address space.
        state: the state of the lane; nothing is stored if the lane has failed.
        slot_of_row: int32 [S]: the slot of each row, over all ranks.
        firsts: int32 [R + 1]: the first row of each rank, and the end of the last.
        slots: the number of slots of a rank.
        at: their offset in a buffer, one row each.
    """

    rank: int
    buffers: list[int]
    state: Tensor
    slot_of_row: Tensor
    firsts: Tensor
    slots: int
    at: int

    def arguments(self) -> dict[str, Any]:
        """The arguments of a launch."""
        tensors = {name: getattr(self, name).data_ptr() for name in ("state", "slot_of_row", "firsts")}
        return {"rank": self.rank, "buffers": self.buffers, **tensors, "slots": self.slots, "at": self.at}


class Terms(NamedTuple):
    """The terms around a product A B: ``row_scale * (alpha * A B + bias_scale * bias) + beta * out``.

    None for a term that is not there.

    Attributes:
        alpha, beta, bias, bias_scale, row_scale, second, tail_unspecified: as of :class:`GroupedGemm`.
        slots: where the rows go; the result may hold anything then.
    """

    alpha: float | Tensor | None = None
    beta: float | Tensor | None = None
    bias: Matrices | None = None
    bias_scale: Tensor | None = None
    row_scale: Tensor | None = None
    second: OperandPair | None = None
    tail_unspecified: bool = False
    slots: RowSlots | None = None


NO_TERMS = Terms()
ADDED = Terms(beta=1.0)


class ActivationCall(NamedTuple):
    """The arguments of an activation behind a product.

    Attributes:
        scales: [T]; None for ones.
        keep_preact: whether the product itself is wanted, too.
        tail_unspecified: rows past the last group may hold anything, for readers that know.
        vectors, matrices: the numbers of columns and of elements that it reads: see :class:`Activate`.
    """

    scales: Tensor | None
    keep_preact: bool
    tail_unspecified: bool = False
    vectors: Operands = None
    matrices: Operands = None


@dataclass(slots=True)
class GroupedGemm:
    """``out = row_scale * (alpha * A B + bias_scale * bias) + beta * out``, group by group.

    It is never modified; it is not frozen because that makes construction four times slower.

    Attributes:
        split_sizes: int32 or int64 [E], on the device of ``a``: rows of each group.
        out: the output; rows past the last group are not touched. E matrices are allowed for TN.
        alpha: a factor, or one a group [E]; None for 1.
        beta: the factor of the old values of ``out``, by group if [E]; None: ``out`` is not read.
        fresh: ``out`` was just allocated, so its version need not change.
        bias: [E, N]; ``bias_scale``: [T], scales the bias of a row; ``row_scale``: [T], scales the whole row.
        epilogue: an activation or its backward, applied to the product before it is stored.
        second: a second pair of operands, of NT and NN: A B then stands for the sum of both products.
        tail_unspecified: rows of ``out`` past the last group may hold anything although it is fresh.
        arrived: counters of the blocks of rows of ``a``, which the kernel before this one on its stream brings; see
            :func:`fusible.ops.kernels.hopper.arrivals.counters`. A backend may wait for that kernel instead.
        slots: the slots that the rows of the product are sent to, instead of ``out`` or after it.
        independent: the independent products that it belongs to; a backend may ignore it.
        first_group: under NT and NN, the first group of a run, if ``b`` has only the run's matrices: rows of other
            groups are neither read nor written, except the tail. None: ``b`` has the matrices of all groups.
    """

    layout: Layout
    a: Tensor
    b: Matrices
    split_sizes: Tensor
    out: Matrices
    alpha: float | Tensor | None = None
    beta: float | Tensor | None = None
    bias: Matrices | None = None
    bias_scale: Tensor | None = None
    row_scale: Tensor | None = None
    fresh: bool = False
    epilogue: Epilogue = None
    second: OperandPair | None = None
    tail_unspecified: bool = False
    arrived: Tensor | None = None
    slots: RowSlots | None = None
    independent: Independent | None = None
    first_group: int | None = None

    @property
    def groups(self) -> int:
        return self.split_sizes.shape[0]

    def __str__(self) -> str:
        """``NT 8192 x 1536 x 2048``: the layout, and rows, columns and depth of the products."""
        return f"{self.layout.value} {' x '.join(map(str, self.mnk))}"

    @property
    def rows(self) -> int:
        """T: rows of the token buffer."""
        return self.a.shape[0]

    @property
    def mnk(self) -> tuple[int, int, int]:
        """Rows, columns and depth of the products, with T for whichever is ragged."""
        if self.layout is Layout.TN:
            return self.a.shape[1], self.b.shape[1] if isinstance(self.b, Tensor) else 0, self.rows
        return self.rows, first(self.b).shape[-2 if self.layout is Layout.NT else -1], self.a.shape[1]

    @property
    def cache_key(self) -> tuple[Hashable, ...] | None:
        """The key that decides whether a backend accepts it: everything but T and the addresses; None if that is not
        enough.

        Problems of equal key are accepted alike. Separate matrices and factors [E] have no key.
        """
        a, b, out, sizes = self.a, self.b, self.out, self.split_sizes
        factors = _factors_key(self.alpha, self.beta, self.bias, self.bias_scale, self.row_scale)
        if factors is None or not (isinstance(b, Tensor) and isinstance(out, Tensor)):
            return None
        return (
            *(self.layout, a.dtype, b.dtype, out.dtype, sizes.dtype, a.device, a.shape[1], b.shape[-1], out.shape[-1]),
            *(a.stride(), b.stride(), out.stride(), (a.data_ptr() | b.data_ptr() | out.data_ptr()) & 15),
            *(a.shape[0] < _MANY, sizes.shape[0], sizes.is_contiguous(), factors, self.first_group is None),
        )

    @property
    def of_groups(self) -> FunctionOperands | None:
        """The operands of the epilogue's function beside the product and the scales."""
        epilogue = self.epilogue
        if epilogue is None:
            return None
        matrices = epilogue.matrices if isinstance(epilogue, Activate) else None
        if epilogue.vectors is None and matrices is None:
            return None
        return FunctionOperands(epilogue.vectors, self.split_sizes, matrices, tail_unspecified=True)

    @property
    def is_product_alone(self) -> bool:
        """Whether ``out`` is the product alone, in the dtype of its operands."""
        extras = (self.alpha, self.beta, self.bias, self.bias_scale, self.row_scale)
        return all([extra is None for extra in extras]) and self.a.dtype == first(self.b).dtype == first(self.out).dtype

    @property
    def is_scaled_product(self) -> bool:
        """Whether ``out`` is :attr:`is_product_alone` times ``row_scale``."""
        extras = (self.alpha, self.beta, self.bias, self.bias_scale)
        same = self.a.dtype == first(self.b).dtype == first(self.out).dtype
        return self.row_scale is not None and same and all([extra is None for extra in extras])

    @property
    def flops(self) -> int:
        m, n, k = self.mnk
        return 2 * m * n * (k if self.second is None else k + self.second.a.shape[1])

    @property
    def bytes(self) -> int:
        """Every operand read once, the result written once (and read, if it counts)."""
        moved = nbytes(self.a, self.b, self.bias, self.row_scale, self.bias_scale, *(self.second or ()))
        moved += nbytes(self.out) * (1 if self.beta is None else 2)
        return moved if self.epilogue is None else moved + self.epilogue.bytes


ALL_GROUPS = "multiplies all groups at once, not a run of them"
"""Why some kernels do not take a product with a ``first_group``."""


def factor_refusal(p: GroupedGemm) -> str | None:
    """Why no kernel of ours takes the factors of a problem; None: some do."""
    for name, factor in (("an alpha", p.alpha), ("a beta", p.beta)):
        if isinstance(factor, Tensor) and factor.shape not in ((p.groups,), ()):
            return f"needs {name} for each group or one for all, got shape {list(factor.shape)}"
        if isinstance(factor, Tensor) and factor.dim() and factor.device != p.a.device:
            return f"needs {name} on {p.a.device}, got {factor.device}"
    if p.layout is Layout.TN and (p.row_scale is not None or p.bias_scale is not None):
        return "has no rows to scale in a weight gradient"
    return None


def addresses(matrices: Matrices) -> list[int]:
    """The addresses of matrices, or of the one tensor; without data, offsets from the start of aligned storages."""
    tensors = [matrices] if isinstance(matrices, Tensor) else matrices
    if isinstance(tensors[0], FakeTensor):
        return [int(tensor.storage_offset()) * tensor.element_size() for tensor in tensors]
    return [tensor.data_ptr() for tensor in tensors]


def _factors_key(
    alpha: float | Tensor | None, beta: float | Tensor | None, *vectors: Matrices | None
) -> tuple[Hashable, ...] | None:
    """The part of the key for factors, bias and scales; None if a key is not enough."""
    if isinstance(alpha, Tensor) or isinstance(beta, Tensor):
        return None
    kinds: list[Hashable] = [alpha, beta]
    for vector in vectors:
        if vector is None:
            kinds.append(None)
        elif isinstance(vector, Tensor):
            kinds.append((vector.dtype, vector.device, vector.stride()))
        else:
            return None
    return tuple(kinds)


def first(matrices: Matrices) -> Tensor:
    """One of the matrices, to ask for dtype and device."""
    return matrices if isinstance(matrices, Tensor) else matrices[0]


def stacked(matrices: Matrices) -> Tensor:
    """The matrices as one tensor; a copy where they do not lie as one already."""
    return matrices if isinstance(matrices, Tensor) else torch.stack(list(matrices))


def nbytes(*tensors: Matrices | Operands) -> int:
    """Bytes of all their elements; None has none."""
    present = [t for each in tensors if each is not None for t in ([each] if isinstance(each, Tensor) else each)]
    return sum(m.numel() * m.element_size() for m in present if m is not None)


class Counted:
    """A problem that reads or writes each tensor once; indices of rows do not count."""

    __slots__ = ()

    @property
    def bytes(self) -> int:
        """Every operand read once, the result written once."""
        values = [getattr(self, f.name) for f in fields(self) if f.name not in _OF_GROUPS]  # type: ignore[arg-type]
        return nbytes(*[value for value in values if isinstance(value, Tensor | tuple | list)])


_OF_GROUPS = ("split_sizes", "tokens_per_expert")


class SourceRows:
    """Rows of tokens ``x``: row r is that of the token ``slot_of_row[r] // top_k``; None: row r is ``x[r]``."""

    __slots__ = ()
    x: Tensor
    slot_of_row: Tensor | None
    top_k: int

    @property
    def tensor(self) -> Tensor:
        """One that it reads, to ask for dtype and device."""
        return self.x

    @property
    def tokens(self) -> int:
        """How many rows there are: as many as slots, or T."""
        return (self.x if self.slot_of_row is None else self.slot_of_row).shape[0]

    def gathered(self) -> Tensor:
        """The rows, gathered from their tokens."""
        return self.x if self.slot_of_row is None else self.x.index_select(0, self.slot_of_row // self.top_k)


class FunctionOperands(NamedTuple):
    """The operands of a user's function beside the product and the scales.

    Attributes:
        vectors: the numbers of columns, [groups, F] or [1, F] each.
        split_sizes: [groups], the number of rows of each group.
        matrices: the numbers of elements, [T, F] each.
        tail_unspecified: see :class:`PointwiseRows`.
    """

    vectors: Operands
    split_sizes: Tensor
    matrices: Operands = None
    tail_unspecified: bool = False


class PointwiseRows(NamedTuple):
    """The operands of a pointwise program.

    Attributes:
        x: [rows, C], or [rows, 2 C] where gate and up are in it; None where no wanted gradient reads it.
        block: columns of gate before as many of up; None: one block of each.
        numbers: the numbers of each row, [rows] each, dense; None for one that nothing reads.
        constants: one number for all elements, for each constant of the program.
        vectors: the numbers of each column, [groups, C] or of all rows [1, C] each, dense, 2 C of gate and up; None as
            for numbers.
        split_sizes: [groups], of the groups that the vectors are for; None: there is one, of all rows. A row past the
            last group reads zeros of what groups have.
        matrices: the numbers of each element, [rows, C] each, dense, 2 C of gate and up; None as for numbers.
        tail_unspecified: rows past the last group may hold anything, and count in no sum.
    """

    x: Tensor | None
    block: int | None
    numbers: Operands
    constants: tuple[float, ...] = ()
    vectors: Operands = None
    split_sizes: Tensor | None = None
    matrices: Operands = None
    tail_unspecified: bool = False

    def groups_of_sum(self, name: str) -> Tensor | None:
        """The sizes of the groups over whose rows the gradient of a number of columns is summed; None: all rows."""
        if name[0] == "b":
            return self.split_sizes
        sizes = self.split_sizes if self.tail_unspecified else None
        return None if sizes is None else sizes.sum().view(1)

    @property
    def operands(self) -> list[Tensor | None]:
        """All but x."""
        return [t for each in (self.numbers, self.vectors, self.matrices) if each is not None for t in each]


class PointwiseOperands(NamedTuple):
    """The operands of a pointwise program beside x, as of :class:`PointwiseRows`."""

    block: int | None = None
    numbers: Operands = None
    vectors: Operands = None
    split_sizes: Tensor | None = None
    constants: tuple[float, ...] = ()
    matrices: Operands = None

    def rows(self, x: Tensor | None) -> PointwiseRows:
        """With the rows that the program reads."""
        block, numbers, vectors, split_sizes, constants, matrices = self
        return PointwiseRows(x, block, numbers, constants, vectors, split_sizes, matrices)


class PointwiseGrads(NamedTuple):
    """The gradients of a pointwise program; None for unwanted ones.

    Gradients of numbers are sums by row, those of vectors by column and group.
    """

    x: Tensor | None
    numbers: Operands
    vectors: Operands
    matrices: Operands = None
