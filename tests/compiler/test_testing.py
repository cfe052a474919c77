"""``fusible.testing``: what it finds in ops and fusions that are wrong, and that ours pass."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fusible import (
    Activation,
    ArgumentError,
    Combine,
    ConstantScale,
    Dispatch,
    FusedOp,
    Grads,
    GroupedLinear,
    Linear,
    Op,
    Pattern,
    Scale,
    Sequential,
    SwiGLU,
    TensorSpec,
    register_fusion,
    unregister,
)
from fusible.testing import check_fusion, check_op

X = torch.randn(4, 6)
SIZES = torch.tensor([1, 0, 3])
CUSTOM = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "custom_fusion.py"))
for fusion in ("BiasSoftcap", "ResidualLinear"):
    unregister(fusion)


class Times(Op):
    """``factor * x * w``, right in everything; the wrong ops below differ in one thing each."""

    class Saved(NamedTuple):
        x: Tensor
        w: Tensor
        factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(6) + 1)

    def check(self, x: TensorSpec, *, factor: Tensor) -> TensorSpec:
        return x

    def fwd(self, x: Tensor, *, factor: Tensor) -> tuple[Tensor, Any]:
        return factor * x * self.w, self.Saved(x, self.w, factor)

    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        x, w, factor = saved
        return {
            "x": lambda: dy * w * factor,
            "w": lambda: (dy * x * factor).sum(0),
            "factor": lambda: (dy * x * w).sum().view_as(factor),
        }


class WrongGradient(Times):
    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        return {**super().bwd(saved, dy), "w": lambda: dy.sum(0)}


class WrongShape(Times):
    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        return {**super().bwd(saved, dy), "x": lambda: dy[1:]}


class NoTensor(Times):
    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        return {**super().bwd(saved, dy), "x": lambda: 3.0}  # type: ignore[dict-item, return-value]


class WritesIntoX(Times):
    def fwd(self, x: Tensor, *, factor: Tensor) -> tuple[Tensor, Any]:
        return x.mul_(factor) * self.w, self.Saved(x, self.w, factor)


class RemembersX(Times):
    def fwd(self, x: Tensor, *, factor: Tensor) -> tuple[Tensor, Any]:
        self.last = x.detach()
        return super().fwd(x, factor=factor)

    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        return super().bwd(saved._replace(x=self.last), dy)


class WritesIntoDy(Times):
    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        return {**super().bwd(saved, dy), "x": dy.mul_(saved.w * saved.factor)}


class ForeseesWrongly(Times):
    def check(self, x: TensorSpec, *, factor: Tensor) -> TensorSpec:
        return x._replace(shape=(*x.shape[:-1], 7))


class DependsOnWhatIsWanted(Times):
    def bwd(self, saved: Any, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        grads = super().bwd(saved, dy)
        return grads if "w" in needs_grad else {**grads, "x": lambda: dy}


OURS: dict[str, tuple[Op, dict[str, Any]]] = {
    "SwiGLU": (SwiGLU(), {}),
    "Linear": (Linear(6, 3), {}),
    "Scale": (Scale(), {"scales": torch.rand(4)}),
    "GroupedLinear": (GroupedLinear(3, 6, 2), {"split_sizes": SIZES}),
    "one parameter an expert": (GroupedLinear(3, 6, 2, single_grouped_weight=False), {"split_sizes": SIZES}),
    "scaled bias": (GroupedLinear(3, 6, 2, scale_bias=True), {"split_sizes": SIZES, "bias_scale": torch.rand(4)}),
    "Dispatch": (Dispatch(3), {"top_k_index": torch.tensor([[0], [2], [2], [1]]), "top_k_weights": torch.rand(4, 1)}),
    "of an example": (CUSTOM["Softcap"](2.0), {}),
    "of this file": (Times(), {"factor": torch.tensor(1.5)}),
}


@pytest.mark.parametrize("name", OURS)
def test_ops_that_are_right_pass(name: str) -> None:
    op, keywords = OURS[name]
    before = {key: tensor.clone() for key, tensor in op.state_dict().items()}
    check_op(op, X, **keywords)

    assert all(torch.equal(tensor, before[key]) for key, tensor in op.state_dict().items())
    assert all(parameter.grad is None for parameter in op.parameters())


def test_a_buffer_may_be_written() -> None:
    buffer = torch.zeros(4, 2)
    check_op(GroupedLinear(3, 6, 2), X, split_sizes=SIZES, output=buffer, grad_input=torch.zeros(4, 6))

    assert not buffer.any()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (WrongGradient, "WrongGradient: gradients of x, factor, w do not agree with finite differences"),
        (WrongShape, r"WrongShape.bwd: the gradient of x has shape \[3, 6\], x has \[4, 6\]"),
        (NoTensor, "NoTensor.bwd: the gradient of x is a float, no tensor"),
        (WritesIntoX, "WritesIntoX.fwd writes into x, which is the caller's"),
        (RemembersX, "RemembersX: after another call, which bwd must not see, .* differs"),
        (WritesIntoDy, "WritesIntoDy.bwd writes into the gradient of an output"),
        (ForeseesWrongly, r"ForeseesWrongly.check foresees .*\(4, 7\)"),
        (DependsOnWhatIsWanted, "DependsOnWhatIsWanted: where gradients of x alone are wanted, x differs"),
    ],
)
def test_ops_that_are_wrong_do_not(kind: type[Op], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_op(kind(), X, factor=torch.tensor(2.0))


def test_what_is_frozen_is_checked_as_well() -> None:
    op = Times().requires_grad_(False)
    check_op(op, X, factor=torch.tensor(1.5))
    with pytest.raises(AssertionError, match="gradients of x, factor, w do not agree"):
        check_op(WrongGradient().requires_grad_(False), X, factor=torch.tensor(1.5))

    assert not op.w.requires_grad


def test_a_keyword_that_is_none_counts_as_not_given() -> None:
    check_op(GroupedLinear(3, 6, 2), X, split_sizes=SIZES, output=None)


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (nn.Tanh(), "check_op: expected a fusible.Op, got a torch"),
        (SwiGLU(), "SwiGLU takes no 'split_sizes'"),
        (
            GroupedLinear(3, 6, 2, delay_wgrad_compute=True),
            "check_op: GroupedLinear delivers the gradient of weight itself",
        ),
    ],
)
def test_what_cannot_be_checked_says_so(op: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        check_op(op, X, split_sizes=SIZES)


def test_a_container_of_torch_is_none() -> None:
    with pytest.raises(ArgumentError, match=r"check_fusion: expected a fusible\.Sequential, got a torch"):
        check_fusion("GLUScale", nn.Sequential(SwiGLU()), X)  # type: ignore[arg-type]


class Doubled(FusedOp):
    """Two :class:`ConstantScale`."""

    first: ConstantScale
    second: ConstantScale
    wrong = 1.0

    class Saved(NamedTuple):
        pass

    def fwd(self, x: Tensor) -> tuple[Tensor, Any]:
        return x * (self.first.scale * self.second.scale), self.Saved()

    def bwd(self, saved: Any, dy: Tensor) -> Grads:
        return {"x": dy * (self.first.scale * self.second.scale * self.wrong)}


def doubled(**changes: Any) -> None:
    """Registers a fusion with these attributes."""
    register_fusion(Pattern.path(first=ConstantScale, second=ConstantScale))(type("Doubled", (Doubled,), changes))


def scales() -> Sequential:
    return Sequential(ConstantScale(2.0), ConstantScale(4.0))


@pytest.mark.parametrize("exact", [False, True])
def test_a_fusion_that_is_right_passes(exact: bool) -> None:
    doubled()
    check_fusion("Doubled", scales(), X, exact=exact)


def test_our_fusions_pass() -> None:
    mlp = Sequential(GroupedLinear(3, 6, 8), SwiGLU(), Scale(), GroupedLinear(3, 4, 6))
    check_fusion("GroupedMLP", mlp, X, split_sizes=SIZES, scales=torch.rand(4))

    layer = Sequential(Dispatch(3), GroupedLinear(3, 6, 8), SwiGLU(), GroupedLinear(3, 4, 6), Scale(), Combine())
    check_fusion("RoutedMLP", layer, X, **OURS["Dispatch"][1])
    assert all(parameter.dtype == torch.float32 and parameter.grad is None for parameter in layer.parameters())


def test_wrong_maths_is_found() -> None:
    doubled(wrong=1.5)
    with pytest.raises(AssertionError, match="Doubled: fused, where gradients of x are wanted, x differs"):
        check_fusion("Doubled", scales(), X)


def test_what_is_right_but_for_rounding_is_not_exact() -> None:
    third = Sequential(ConstantScale(1 / 3), ConstantScale(1 / 7))
    doubled()
    check_fusion("Doubled", third, X)
    with pytest.raises(AssertionError, match="output 0 differs"):
        check_fusion("Doubled", third, torch.randn(64, 64), exact=True)


def test_a_fused_op_that_writes_into_its_input_is_found() -> None:
    def fwd(self: Any, x: Tensor) -> tuple[Tensor, Any]:
        return x.detach().mul_(self.first.scale * self.second.scale), self.Saved()

    doubled(fwd=fwd)
    with pytest.raises(AssertionError, match="Doubled: the fused op writes into its arguments"):
        check_fusion("Doubled", scales(), X)


def test_a_fused_op_with_parameters_is_found() -> None:
    def init(self: Any, **roles: Any) -> None:
        FusedOp.__init__(self, **roles)
        self.w = nn.Parameter(torch.ones(1))

    doubled(__init__=init)
    with pytest.raises(AssertionError, match="Doubled owns w, which no optimizer sees"):
        check_fusion("Doubled", scales(), X)


def test_a_fusion_that_does_not_fire_says_why() -> None:
    mlp = Sequential(GroupedLinear(3, 6, 4), nn.SiLU(), GroupedLinear(3, 4, 6))
    with pytest.raises(AssertionError, match=r"GroupedMLP does not fire: would fit, but op 1 \(SiLU\)"):
        check_fusion("GroupedMLP", mlp, X, split_sizes=SIZES)
    with pytest.raises(AssertionError, match="GroupedMLP does not fire: its pattern fits nowhere"):
        check_fusion("GroupedMLP", Sequential(Activation("relu")), X)
    with pytest.raises(KeyError, match="no fusion is named 'GroupedMPL'"):
        check_fusion("GroupedMPL", mlp, X, split_sizes=SIZES)
