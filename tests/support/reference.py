"""Every op in plain torch, for autograd to differentiate, and what "as good as plain torch" means.

The plain functions run in any dtype. In float64 they are the truth; in the dtype of a test they are the yardstick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
}

Act = Callable[[Tensor], Tensor]


def split_glu(x: Tensor, block: int | None) -> tuple[Tensor, Tensor]:
    """Gate and up columns; ``block`` None is one block each."""
    pieces = x.split(block or x.shape[-1] // 2, dim=-1)
    return torch.cat(pieces[::2], -1), torch.cat(pieces[1::2], -1)


def glu(
    name: str,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    linear_offset: float = 0.0,
    block: int | None = None,
) -> Act:
    """The gated unit with these parameters."""

    def act(x: Tensor) -> Tensor:
        gate, up = split_glu(x, block)
        if limit is not None:
            gate, up = at_most(limit, gate), -at_most(limit, -at_most(limit, up))
        value = gate * torch.sigmoid(alpha * gate) if name == "silu" else ACTIVATIONS[name](gate)
        return value * (up + linear_offset)

    return act


def at_most(limit: float, x: Tensor) -> Tensor:
    """``x.clamp(max=limit)`` that passes gradients at the limit, as that of torch 2.14 does not."""
    return torch.where(x > limit, limit, x)


def passes_gradients_at_limits() -> bool:
    """Whether ``clamp`` does so: torch 2.13 does, torch 2.14 does not."""
    x = torch.zeros(1, requires_grad=True)
    return bool(torch.autograd.grad(x.clamp(min=0.0), x)[0])


def scale(x: Tensor, scales: Tensor | None) -> Tensor:
    """Row scales, never rounded to the dtype of ``x`` first."""
    return x if scales is None else (x * scales[..., None]).to(x.dtype)


def grouped_linear(
    x: Tensor,
    sizes: Sequence[int],
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor] | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """One linear a group of rows; the tail is zero.

    Rows and weights are split, not indexed. Of an index, autograd makes a gradient as large as all groups together.
    """
    groups, rows = len(sizes), x.reshape(-1, x.shape[-1])
    *inputs, tail = rows.split([*sizes, rows.shape[0] - sum(sizes)])
    weights, biases = ([None] * groups if each is None else list(each) for each in (weight, bias))
    scales = [None] * groups if bias_scale is None else bias_scale.reshape(-1, 1)[: sum(sizes)].split(list(sizes))
    parts = []
    for part, w, b, s in zip(inputs, weights, biases, scales, strict=True):
        product = part @ w.T
        parts.append(product if b is None else (product + (b if s is None else s * b)).to(product.dtype))
    parts.append(parts[0].new_zeros(tail.shape[0], parts[0].shape[1]))
    return torch.cat(parts).view(*x.shape[:-1], parts[0].shape[1])


def mlp(x: Tensor, sizes: Sequence[int], act: Act, **t: Tensor | None) -> Tensor:
    """Linear, activation, scales, linear, out_scales; ``t`` names w1, b1, s1 (bias scale), scales, w2, b2, s2, out."""
    hidden = act(grouped_linear(x, sizes, t["w1"], t.get("b1"), t.get("s1")))  # type: ignore[arg-type]
    hidden = scale(hidden, t.get("scales"))
    y = grouped_linear(hidden, sizes, t["w2"], t.get("b2"), t.get("s2"))  # type: ignore[arg-type]
    return scale(y, t.get("out"))


def run(function: Callable[..., Tensor], tensors: Mapping[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    """``y``, and the gradients of those tensors that require one, by name."""
    y = function(**tensors)
    wanted = {k: t for k, t in tensors.items() if t.requires_grad}
    return {"y": y.detach(), **dict(zip(wanted, torch.autograd.grad(y, [*wanted.values()], dy.detach()), strict=True))}


def leaves(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copies that require grad where the originals do, in ``dtype`` if given."""
    copied = {k: t.detach().to("cpu", dtype or t.dtype, copy=True) for k, t in tensors.items()}
    return {k: t.requires_grad_(tensors[k].requires_grad) for k, t in copied.items()}


def by_parameter(results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for "w1.0", "w1.1", …: parameters of one expert each are judged as stacked ones are."""
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in results.items():
        parts.setdefault(name.partition(".")[0], []).append(tensor)
    return {name: tensors[0] if len(tensors) == 1 else torch.stack(tensors) for name, tensors in parts.items()}


def by_group(results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As :func:`by_parameter`; the weight of a group is one row, as its bias is."""
    return {name: t.flatten(1) if name[0] == "w" else t for name, t in by_parameter(results).items()}


def assert_as_good(
    ours: Mapping[str, Tensor],
    plain: Callable[..., Tensor],
    tensors: Mapping[str, Tensor],
    dy: Tensor,
    rows: int = -1,
    judged: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = by_parameter,
) -> None:
    """Every result is at most twice as far from the truth as that of ``plain`` in the dtype of ``tensors``.

    ``rows`` bounds the rows of row-shaped results that count: those before the tail. ``judged`` says what a row is.
    """
    truth = run(plain, leaves(tensors, torch.float64), dy.to("cpu", torch.float64))
    yardstick = run(plain, leaves(tensors), dy.cpu())
    assert ours.keys() == truth.keys()
    ours, yardstick, truth = map(judged, (ours, yardstick, truth))
    for name, exact in truth.items():
        mine, theirs = ours[name].cpu(), yardstick[name]
        assert mine.dtype == theirs.dtype, name
        if rows >= 0 and exact.shape[:1] == dy.shape[:1]:
            mine, theirs, exact = mine[:rows], theirs[:rows], exact[:rows]
        assert_close_to(mine, theirs, exact, name)


def assert_close_to(ours: Tensor, yardstick: Tensor, truth: Tensor, name: str = "") -> None:
    """Relative Frobenius error, of the whole and of the worst row, against twice the yardstick's."""
    assert ours.shape == truth.shape, name
    tiny = torch.finfo(ours.dtype).eps * (64 if ours.dtype == torch.float64 else 0.5)
    for kind, error in {"whole": relative_error, "worst row": _worst_row}.items():
        got, allowed = error(ours, truth), 2 * error(yardstick, truth) + tiny
        assert got <= allowed, f"{name}: error of the {kind} is {got:.3e}, allowed {allowed:.3e}"


def unit(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    """Unit-variance data."""
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def named_grads(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """The ``.grad`` of each parameter."""
    return {name: p.grad for name, p in module.named_parameters()}


def assert_same(a: Any, b: Any) -> None:
    """Bit for bit, for tensors and mappings of them."""
    if isinstance(a, Mapping):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    else:
        assert a == b


def relative_error(a: Tensor, b: Tensor) -> float:
    """Frobenius; of zeros, that of the difference."""
    difference, norm = (a.double() - b.double()).norm(), b.double().norm()
    return float(difference / norm if norm else difference)


def _worst_row(a: Tensor, b: Tensor) -> float:
    if not b.numel():
        return 0.0
    a, b = (t.double().reshape(-1, t.shape[-1] if t.dim() > 1 else t.numel()) for t in (a, b))
    scale_of_all = b.norm() / b.shape[0] ** 0.5
    return float(((a - b).norm(dim=1) / scale_of_all.clamp(min=1e-300)).max())
