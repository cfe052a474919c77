"""E matrices in one tensor, of one shape or ragged in rows, columns or both."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import SupportsIndex

import torch
from torch import Tensor

from ...fuser import ArgumentError
from ...fuser.contract.spec import layout_of, not_dense
from ...fuser.contract.stored_values import check_stores_values
from .checks import is_dense, is_free_to_read


class GroupedTensor:
    """E matrices, each contiguous by rows, one after another in ``data``.

    ==================  ==========================  ==============================================
    ragged in           ``data``                    group g
    ==================  ==========================  ==============================================
    nothing             [E, M, N]                   ``data[g]``
    rows                [T, N], T >= sum(M_g)       its ``first_dims[g]`` rows
    columns             flat, M * sum(N_g)          [M, ``last_dims[g]``]; ``rows=M`` must be given
    both                flat, sum(M_g * N_g)        [``first_dims[g]``, ``last_dims[g]``]
    ==================  ==========================  ==============================================

    Args:
        data: the elements, contiguous; elements after the last group belong to no group.
        first_dims: rows of each group, int32 or int64 [E], on the device of ``data``; None if all groups have equally
            many.
        last_dims: columns of each group, likewise.
        rows: M, if only the columns are ragged.

    Raises:
        ValueError: ``data`` is not contiguous or has the wrong number of dimensions, or the dims do not fit.
    """

    def __init__(
        self,
        data: Tensor,
        first_dims: Tensor | None = None,
        last_dims: Tensor | None = None,
        *,
        rows: int | None = None,
    ) -> None:
        _check(data, first_dims, last_dims, rows)
        self.data, self.first_dims, self.last_dims = data, first_dims, last_dims
        self._rows = rows

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> GroupedTensor:
        """Copies matrices of one dtype and device into one; ragged where their shapes differ.

        Raises:
            ValueError: no matrices, not all of them two-dimensional, or of different dtypes or devices.
        """
        if other := [t for t in tensors if not isinstance(t, Tensor)]:
            raise ArgumentError(f"from_tensors: expected matrices, got a {type(other[0]).__name__}")
        kinds = {(t.dim(), t.dtype, t.device) for t in tensors}
        if len(kinds) != 1 or tensors[0].dim() != 2:
            raise ValueError(f"from_tensors: expected matrices of one dtype and device, got {kinds or 'none'}")
        firsts, lasts = ([t.shape[i] for t in tensors] for i in (0, 1))
        device = tensors[0].device
        first_dims = None if len(set(firsts)) == 1 else torch.tensor(firsts, device=device)
        last_dims = None if len(set(lasts)) == 1 else torch.tensor(lasts, device=device)
        if last_dims is not None:
            flat = torch.cat([t.reshape(-1) for t in tensors])
            return cls(flat, first_dims, last_dims, rows=firsts[0] if first_dims is None else None)
        return cls(torch.stack(list(tensors)) if first_dims is None else torch.cat(list(tensors)), first_dims)

    @property
    def num_groups(self) -> int:
        """The number of groups, E."""
        dims = self.first_dims if self.first_dims is not None else self.last_dims
        return int(self.data.shape[0] if dims is None else dims.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def rows(self) -> Tensor | int:
        """Rows of each group [E], or the common number."""
        if self.first_dims is not None:
            return self.first_dims
        return int(self.data.shape[1]) if self.last_dims is None else self._rows or 0

    @property
    def columns(self) -> Tensor | int:
        """Columns of each group [E], or the common number."""
        return int(self.data.shape[-1]) if self.last_dims is None else self.last_dims

    @property
    def offsets(self) -> Tensor:
        """int64 [E + 1] on the device: the first element of each group, and the end of the last."""
        rows = torch.as_tensor(self.rows, device=self.device, dtype=torch.int64)
        sizes = (rows * self.columns).expand(self.num_groups)
        return torch.nn.functional.pad(sizes.cumsum(0), (1, 0))

    def shapes(self) -> list[tuple[int, int]]:
        """The shape of every group, on the host; waits for the device if the dims are there."""
        rows, columns = (
            d.tolist() if isinstance(d, Tensor) else [d] * self.num_groups for d in (self.rows, self.columns)
        )
        return list(zip(rows, columns, strict=True))

    def split(self) -> list[Tensor]:
        """The matrices, as views. Waits for the device if the dims are there."""
        flat, start, parts = self.data.reshape(-1), 0, []
        for rows, columns in self.shapes():
            parts.append(flat[start : start + rows * columns].view(rows, columns))
            start += rows * columns
        return parts

    def with_data(self, data: Tensor) -> GroupedTensor:
        """The same groups in another tensor of the same shape."""
        return GroupedTensor(data, self.first_dims, self.last_dims, rows=self._rows)

    def __repr__(self) -> str:
        ragged = {"rows": self.first_dims, "columns": self.last_dims}
        names = " and ".join(name for name, dims in ragged.items() if dims is not None) or "nothing"
        return f"GroupedTensor({self.num_groups} groups, data {list(self.data.shape)}, {self.dtype}, ragged in {names})"


def _check(data: Tensor, first_dims: Tensor | None, last_dims: Tensor | None, rows: int | None) -> None:
    dims = 3 if first_dims is None and last_dims is None else 2 if last_dims is None else 1
    if not isinstance(data, Tensor):
        raise ArgumentError(f"GroupedTensor: data must be a tensor, got a {type(data).__name__}")
    if not is_dense(data):
        raise not_dense("GroupedTensor: data", layout_of(data))
    check_stores_values("data", data, "GroupedTensor")
    if data.dim() != dims or not data.is_contiguous():
        raise ValueError(f"GroupedTensor: expected contiguous data of {dims} dimensions, got shape {list(data.shape)}")
    if (rows is not None) != (first_dims is None and last_dims is not None):
        raise ValueError("GroupedTensor: rows= is for groups that are ragged in their columns only, and needed there")
    if rows is not None and (not isinstance(rows, SupportsIndex) or rows < 0):
        raise ValueError(f"GroupedTensor: rows must be an int that is not negative, got {rows!r}")
    for name, sizes in (("first_dims", first_dims), ("last_dims", last_dims)):
        if sizes is None:
            continue
        if (
            not isinstance(sizes, Tensor)
            or sizes.dim() != 1
            or sizes.dtype not in (torch.int32, torch.int64)
            or sizes.device != data.device
        ):
            raise ValueError(f"GroupedTensor: {name} must be int32 or int64 [E] on {data.device}, got {sizes!r}")
    if first_dims is not None and last_dims is not None and first_dims.shape != last_dims.shape:
        raise ValueError(f"GroupedTensor: {first_dims.shape[0]} first_dims, but {last_dims.shape[0]} last_dims")
    _check_values(data, first_dims, last_dims, rows)


def _check_values(data: Tensor, first_dims: Tensor | None, last_dims: Tensor | None, rows: int | None) -> None:
    """Checks that the groups fit into the data, if that needs no synchronisation."""
    named = {"first_dims": first_dims, "last_dims": last_dims}
    ragged = {name: sizes for name, sizes in named.items() if sizes is not None}
    if not ragged or not all(is_free_to_read(sizes) for sizes in ragged.values()):
        return
    listed = {name: sizes.tolist() for name, sizes in ragged.items()}  # numbers of Python, whose products do not wrap
    for name, sizes in listed.items():
        if sizes and min(sizes) < 0:
            raise ValueError(f"GroupedTensor: {name} must not be negative, got {min(sizes)}")
    held = sum(map(prod, zip(*listed.values(), strict=True))) * (1 if rows is None else rows)
    if held > data.shape[0]:
        unit = "rows" if last_dims is None else "elements"
        raise ValueError(f"GroupedTensor: groups of {held} {unit} do not fit into {data.shape[0]}")
