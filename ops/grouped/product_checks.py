"""Checks of ``grouped_gemm``'s arguments, before anything runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...fuser import ArgumentError
from ...fuser.contract.spec import layout_of, not_dense
from ...fuser.contract.stored_values import check_stores_values
from ...fuser.contract.tracing import has_no_data
from ...fuser.runtime.buffers import overlap
from ..values.checks import is_dense, is_free_to_write, is_narrow_float
from ..values.grouped_tensor import GroupedTensor
from .product import Factor, Product, columns_of, fits, in_words, is_counted_on_the_host, needed, output_shape, shapes


def check_types(**tensors: Any) -> None:
    """Checks that ``a``, ``b`` and ``out`` are tensors or grouped tensors, ``bias`` a tensor, and plain ones dense."""
    for name, tensor in tensors.items():
        types = (Tensor,) if name == "bias" else (Tensor, GroupedTensor)
        if not isinstance(tensor, types if name in ("a", "b") else (*types, type(None))):
            names = " or ".join(t.__name__ for t in types)
            raise ArgumentError(f"grouped_gemm: {name} must be a {names}, got a {type(tensor).__name__}")
        if isinstance(tensor, Tensor) and not is_dense(tensor):
            raise not_dense(f"grouped_gemm: {name}", layout_of(tensor))
        if isinstance(tensor, Tensor):
            check_stores_values(name, tensor, "grouped_gemm")


def check_factors(product: Product, bias: Tensor | None, beta: Factor) -> None:
    """Checks that ``alpha`` and ``beta`` are numbers or one per group, and that the bias has a row for each group."""
    groups, columns = product.a.num_groups, columns_of(product)
    for name, factor in (("alpha", product.alpha), ("beta", beta)):
        if not isinstance(factor, (int, float, Tensor, type(None))):
            raise ArgumentError(
                f"grouped_gemm: {name} must be a number or a tensor [{groups}], got a {type(factor).__name__}"
            )
        if isinstance(factor, Tensor) and not is_dense(factor):
            raise not_dense(f"grouped_gemm: {name}", layout_of(factor))
        if isinstance(factor, Tensor) and factor.requires_grad:
            raise ArgumentError("grouped_gemm: alpha and beta are not differentiable; detach them")
        if isinstance(factor, Tensor) and tuple(factor.shape) not in ((), (groups,)):
            raise ArgumentError(
                f"grouped_gemm: {name} must be a number or a tensor [{groups}], got shape {list(factor.shape)}"
            )
        if isinstance(factor, Tensor):
            _check_reals(name, factor, product, or_on_host=not factor.dim())
    if bias is not None and isinstance(columns, Tensor):
        raise ArgumentError("grouped_gemm: a bias needs an output whose groups have the same number of columns")
    if bias is not None and tuple(bias.shape) != (groups, columns):
        raise ArgumentError(f"grouped_gemm: bias must be [{groups}, {columns}], got shape {list(bias.shape)}")
    if bias is not None:
        _check_reals("bias", bias, product)


def _check_reals(name: str, tensor: Tensor, product: Product, or_on_host: bool = False) -> None:
    is_there = tensor.device == product.a.device or (or_on_host and tensor.device.type == "cpu")
    if tensor.is_complex() or not is_there:
        raise ArgumentError(
            f"grouped_gemm: {name} must hold real numbers, on {product.a.device}; got {tensor.dtype} on {tensor.device}"
        )
    if is_narrow_float(tensor.dtype):
        raise ArgumentError(f"grouped_gemm: {name} must hold numbers of at least 16 bits, got {tensor.dtype}")


def check_output(
    product: Product,
    out: Tensor | GroupedTensor | None,
    out_elements: int | None,
    accumulate: bool,
    beta: Factor,
    tensors: dict[str, Tensor | None],
) -> None:
    """Checks that ``out`` can hold the product, and shares no memory with the operands in ``tensors``."""
    if accumulate and beta is not None:
        raise ArgumentError("grouped_gemm: accumulate is beta = 1; give one of them")
    if out is None and (accumulate or beta is not None):
        raise ArgumentError("grouped_gemm: accumulate and beta need out=")
    if out is None:
        return
    if out_elements is not None:
        raise ArgumentError("grouped_gemm: give out or out_elements, not both")
    data, shape = (out.data if isinstance(out, GroupedTensor) else out), output_shape(product)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (data, *tensors.values())):
        raise ArgumentError("grouped_gemm: out= is not differentiable; leave it out, or use torch.no_grad()")
    if not fits(data, shape) or not data.is_contiguous() or data.device != product.a.device:
        raise ArgumentError(
            f"grouped_gemm: out must be contiguous, of shape {in_words(shape)}, on {product.a.device}; "
            f"got shape {list(data.shape)} on {data.device}"
        )
    if is_counted_on_the_host(product):
        _check_groups(product, out, data)
    if not torch.can_cast(product.a.dtype, data.dtype) or data.is_complex() or is_narrow_float(data.dtype):
        raise ArgumentError(f"grouped_gemm: out of {data.dtype} cannot hold a product of {product.a.dtype}")
    if not is_free_to_write(data):
        raise ArgumentError(
            "grouped_gemm: out was made under torch.inference_mode() and cannot be written outside of it"
        )
    for name, tensor in tensors.items():
        if not has_no_data(data) and overlap(data, tensor):
            raise ArgumentError(f"grouped_gemm: out overlaps {name} in memory; give a tensor of its own")


def _check_groups(product: Product, out: Tensor | GroupedTensor, data: Tensor) -> None:
    """Checks that ``out`` holds the product's groups, with the same shapes."""
    if data.dim() < 3 and needed(product) > data.shape[0]:
        unit = "rows" if data.dim() > 1 else "elements"
        raise ArgumentError(f"grouped_gemm: out must have {needed(product)} {unit} at least, got {data.shape[0]}")
    if isinstance(out, GroupedTensor) and out.shapes() != shapes(product):
        raise ArgumentError(f"grouped_gemm: out must have groups of shapes {shapes(product)}, got {out.shapes()}")
