"""The counts of ``MoE.update_bias``: each trained token once, however often its forward runs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fusible import MoE, Router, SwitchLoss
from fusible.ops.kernels.pytorch.choice import tokens_per_expert
from fusible.ops.layers.balance import balancing_step

pytestmark = pytest.mark.usefixtures("fresh_compiler")
H = 4


def layer(**how: Any) -> MoE:
    """Two experts; the sign of a token's first feature chooses."""
    torch.manual_seed(0)
    moe = MoE(H, 8, experts=2, top_k=1, bias_update_rate=1e-3, **how)
    with torch.no_grad():
        moe.router.weight.copy_(torch.tensor([[5.0, 0, 0, 0], [-5.0, 0, 0, 0]]))
    return moe


def loss_of(logits: Tensor) -> Tensor:
    """The balance loss of these logits."""
    router = Router(logits.shape[1], logits.shape[1], 1, losses=(SwitchLoss(1.0),))
    router.gate = nn.Identity()
    router.gate.forward = lambda x, **keywords: x
    loss: Tensor = router(logits).loss
    return loss


def tokens(first: int, second: int) -> Tensor:
    return torch.cat([torch.ones(first, H), -torch.ones(second, H)])


def y_of(moe: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: moe(x).y


def recomputed(moe: nn.Module, x: Tensor, reentrant: bool = False) -> Tensor:
    y: Tensor = checkpoint(y_of(moe), x, use_reentrant=reentrant)
    return y


def _reentrant(moe: MoE, x: Tensor) -> None:
    recomputed(moe, x.requires_grad_(), True).sum().backward()


def _nested(moe: MoE, x: Tensor) -> None:
    checkpoint(lambda t: 2 * recomputed(moe, t), x, use_reentrant=False).sum().backward()


def _nested_reentrant(moe: MoE, x: Tensor) -> None:
    checkpoint(lambda t: 2 * recomputed(moe, t), x.requires_grad_(), use_reentrant=True).sum().backward()


def _microbatches(moe: MoE, x: Tensor) -> None:
    """As a pipeline has them in flight, one of them recomputed."""
    first, second = moe(x[:6]).y, recomputed(moe, x[6:])
    second.sum().backward()
    first.sum().backward()


def _two_backwards(moe: MoE, x: Tensor) -> None:
    y = moe(x).y.sum()
    y.backward(retain_graph=True)
    y.backward()


def _inference(moe: MoE, x: Tensor) -> None:
    with torch.inference_mode():
        moe(x)


def _frozen_experts(moe: MoE, x: Tensor) -> None:
    moe.experts.requires_grad_(False)
    moe(x).y.sum().backward()


def _in_place(moe: MoE, x: Tensor) -> None:
    moe(x).y.add_(1).sum().backward()


def _compiled(moe: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(moe, fullgraph=True, backend="aot_eager")
    return compiled


def _compiled_checkpoint(moe: MoE, x: Tensor) -> None:
    torch.compile(lambda t: recomputed(moe, t), fullgraph=True, backend="aot_eager")(x).sum().backward()


CASES: dict[str, tuple[Callable[[MoE, Tensor], object], list[int]]] = {
    "plain": (lambda m, x: m(x).y.sum().backward(), [7, 3]),
    "checkpoint": (lambda m, x: recomputed(m, x).sum().backward(), [7, 3]),
    "reentrant checkpoint": (_reentrant, [7, 3]),
    "nested checkpoints": (_nested, [7, 3]),
    "checkpoint in a reentrant one": (_nested_reentrant, [7, 3]),
    "microbatches in flight": (_microbatches, [7, 3]),
    "autograd.grad": (lambda m, x: torch.autograd.grad(m(x).y.sum(), m.experts.up.weight), [7, 3]),
    "written in place": (_in_place, [7, 3]),
    "no backward": (lambda m, x: m(x), [7, 3]),
    "no_grad": (lambda m, x: torch.no_grad()(m)(x), [0, 0]),
    "inference_mode": (_inference, [0, 0]),
    "eval": (lambda m, x: m.eval()(x).y.sum().backward(), [0, 0]),
    "frozen": (lambda m, x: m.requires_grad_(False)(x), [0, 0]),
    "frozen, gradient of x": (lambda m, x: m.requires_grad_(False)(x.requires_grad_()).y.sum().backward(), [7, 3]),
    "frozen experts": (_frozen_experts, [7, 3]),
    "two backwards": (_two_backwards, [7, 3]),
    "compiled": (lambda m, x: _compiled(m)(x).y.sum().backward(), [7, 3]),
    "compiled, no_grad": (lambda m, x: torch.no_grad()(_compiled(m))(x), [0, 0]),
    "checkpoint of compiled code": (lambda m, x: recomputed(_compiled(m), x).sum().backward(), [7, 3]),
    "compiled checkpoint": (_compiled_checkpoint, [7, 3]),
}


@pytest.mark.parametrize("name", CASES)
def test_counts_each_token_that_trains_once(name: str) -> None:
    moe, (train, expected) = layer(shared_ffn=8), CASES[name]
    train(moe, tokens(7, 3))

    assert moe.load is not None
    assert moe.load.tolist() == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_of_the_batch_may_be_recomputed(reentrant: bool) -> None:
    moe = layer()
    recomputed(moe, tokens(10, 0).requires_grad_(), reentrant).sum().backward()
    moe(tokens(0, 15)).y.sum().backward()
    moe.update_bias()

    assert moe.router.selection_bias.tolist() == pytest.approx([1e-3, -1e-3])


def _in_two_processes(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        moe = layer()
        model = DistributedDataParallel(moe)  # broadcast_buffers=True
        x = tokens(10, 0) if rank == 0 else tokens(0, 15)
        model(x).y.sum().backward()
        recomputed(model, x).sum().backward()
        assert moe.load is not None
        assert moe.load.tolist() == ([20, 0] if rank == 0 else [0, 30])
        moe.update_bias(group=dist.group.WORLD)
        assert moe.router.selection_bias.tolist() == pytest.approx([1e-3, -1e-3])
        assert not moe.load.any()
    finally:
        dist.destroy_process_group()


def test_counts_of_a_rank_stay_its_own_under_ddp(tmp_path: Path) -> None:
    mp.spawn(_in_two_processes, (os.fspath(tmp_path / "store"),), 2)


def test_counts_are_no_state_and_keep_their_dtype() -> None:
    moe = layer()
    assert not any("load" in name for name in (*dict(moe.named_buffers()), *moe.state_dict()))
    moe.load.add_(2**40 + 1)
    casts = [lambda m: m.bfloat16(), lambda m: m.type(torch.float16), lambda m: m.double(), copy.deepcopy]
    for cast in casts:
        moe = cast(moe)
        assert moe.load.dtype == torch.int64
        assert moe.load.tolist() == [2**40 + 1] * 2


def _assigned(moe: MoE, state: dict[str, Tensor]) -> None:
    moe.load_state_dict(state, assign=True)


def _emptied(moe: MoE, state: dict[str, Tensor]) -> None:
    moe.to_empty(device="cpu")
    moe.load_state_dict(state)


@pytest.mark.parametrize("fill", [_assigned, _emptied])
def test_a_layer_that_was_built_without_data_counts(fill: Callable[[MoE, dict[str, Tensor]], None]) -> None:
    with torch.device("meta"):
        moe = MoE(H, 8, experts=2, top_k=1, bias_update_rate=1e-3)
    fill(moe, layer().state_dict())
    assert moe.load.tolist() == [0, 0]
    moe(tokens(7, 3)).y.sum().backward()
    assert moe.load.tolist() == [7, 3]
    moe.update_bias()

    assert moe.router.selection_bias.tolist() == pytest.approx([-1e-3, 1e-3])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_ids_of_no_expert_are_not_counted(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 2], [3, 1], [200, 2]], dtype=dtype)
    ids[0, 0] = -1 if dtype.is_signed else 255

    assert tokens_per_expert(ids, 3).tolist() == [0, 1, 2]


def test_a_step_of_the_bias_compares_whole_numbers() -> None:
    counts = torch.tensor([2**24 + 1, 2**24, 2**24 - 1])

    assert balancing_step(counts, 1.0).tolist() == [-1, 0, 1]
    assert balancing_step(counts, 0.5).dtype == torch.float32


def test_a_token_that_is_no_number_is_left_out_of_the_balance_loss() -> None:
    torch.manual_seed(0)
    moe, x = MoE(H, 8, experts=4, top_k=2, balance_loss=1.0), torch.randn(20, H)
    expected = moe(x).balance_loss
    loss = moe(torch.cat([torch.full((1, H), torch.nan), x])).balance_loss

    torch.testing.assert_close(loss, expected)


def test_the_gradient_of_the_balance_loss_stays_out_of_rows_that_are_no_numbers() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rows = torch.cat([logits, torch.full((1, 3), torch.nan)]).detach().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(rows), rows)
    (expected,) = torch.autograd.grad(loss_of(logits), logits)

    assert torch.equal(grad[:5], expected)
    assert not grad[5].any()


def test_without_any_number_the_balance_loss_is_zero() -> None:
    assert loss_of(torch.full((3, 2), torch.nan, requires_grad=True)) == 0
