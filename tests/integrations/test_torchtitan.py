"""torchtitan's own classes against the override of their experts: results, checkpoints, initial values, shards."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from absent import triton_if_missing
from torch import Tensor, nn
from torch.nn import functional as F

try:
    with triton_if_missing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchtitan.models.common.moe import GroupedExperts
        from torchtitan.overrides import fused_swiglu  # noqa: F401
except ImportError as error:
    pytest.skip(f"torchtitan cannot be imported: {error}", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import derive
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.protocols.sharding import ShardingConfig

import fusible
from fusible.integrations import torchtitan as integration

E, D, HIDDEN, SIZES = 4, 32, 64, [5, 0, 11, 4]
NAMES = ("w1_EFD", "w2_EDF", "w3_EFD")
OVERRIDE = "fusible.integrations.torchtitan.grouped_experts"


def draw(tensor: Tensor) -> None:
    nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5)


def configuration(**how: Any) -> GroupedExperts.Config:
    return GroupedExperts.Config(dim=D, hidden_dim=HIDDEN, num_experts=E, param_init=dict.fromkeys(NAMES, draw), **how)


def both(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Their experts and ours, with the same weights."""
    torch.manual_seed(0)
    stock = configuration().build()
    stock.init_states()
    ours = integration.grouped_experts(configuration()).build()
    ours.load_state_dict(stock.state_dict())
    return stock.to(dtype), ours.to(dtype)


def inputs(dtype: torch.dtype = torch.float32, padding: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES) + padding, D, generator=generator).to(dtype)
    return x.requires_grad_(), torch.tensor(SIZES)


def gradients(experts: Any, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    """By torchtitan's names."""
    torch.manual_seed(2)
    named = dict(experts.named_parameters())
    found = dict(zip(["x", *named], torch.autograd.grad(y, [x, *named.values()], torch.randn_like(y)), strict=True))
    w13 = found.pop("w13", None)
    return found if w13 is None else {**found, "w1_EFD": w13[:, :, 0], "w3_EFD": w13[:, :, 1]}


def exact(stock: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """In float64, from what bfloat16 holds of the rows and the weights."""
    leaves = {"x": x, **{name: getattr(stock, name) for name in NAMES}}
    wide = {name: t.detach().bfloat16().double().requires_grad_() for name, t in leaves.items()}
    parts, start = [], 0
    for e, size in enumerate(SIZES):
        rows = wide["x"][start : start + size]
        hidden = F.silu(rows @ wide["w1_EFD"][e].T) * (rows @ wide["w3_EFD"][e].T)
        parts.append(hidden @ wide["w2_EDF"][e].T)
        start += size
    y = torch.cat(parts)
    torch.manual_seed(2)
    dy = torch.randn(y.shape, dtype=x.dtype).double()
    return y, dict(zip(wide, torch.autograd.grad(y, list(wide.values()), dy), strict=True))


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach()).norm() / b.detach().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_as_exact_as_theirs(dtype: torch.dtype) -> None:
    (stock, ours), (x, sizes) = both(dtype), inputs(dtype)
    theirs, y = stock(x, sizes), ours(x, sizes)
    truth, true_gradients = exact(stock, x)
    their_gradients, our_gradients = gradients(stock, theirs, x), gradients(ours, y, x)

    assert y.dtype == theirs.dtype == dtype
    assert distance(y, truth) < 1.2 * distance(theirs, truth) < 0.02
    assert our_gradients.keys() == their_gradients.keys() == true_gradients.keys()
    for name, gradient in true_gradients.items():
        assert our_gradients[name].dtype == their_gradients[name].dtype
        assert distance(our_gradients[name], gradient) < 1.2 * distance(their_gradients[name], gradient) < 0.02, name


def test_the_experts_run_as_one_op() -> None:
    _, ours = both()
    model = nn.Sequential(ours)
    assert fusible.explain(model).layers[0].reason == "no call yet"
    ours(*inputs())
    (layer,) = fusible.explain(model).layers

    assert [step.name for step in layer.explanation.steps] == ["GroupedMLP"]
    assert layer.kind == "FusibleGroupedExperts"


def test_rows_of_padding_give_zeros() -> None:
    _, ours = both()
    y = ours(*inputs(padding=6))

    assert y.shape[0] == sum(SIZES) + 6
    assert not y[sum(SIZES) :].any()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.float32])
def test_numbers_of_tokens_of_any_dtype(kind: torch.dtype) -> None:
    _, ours = both()
    x, sizes = inputs()

    assert torch.equal(ours(x, sizes.to(kind)), ours(x, sizes))


# ------------------------------------------------------------------------------------------ checkpoints, initial values


def test_checkpoints_are_torchtitans() -> None:
    stock, ours = both()
    theirs, saved = stock.state_dict(), ours.state_dict()

    assert saved.keys() == theirs.keys() == set(NAMES)
    assert all(torch.equal(saved[name], tensor) for name, tensor in theirs.items())
    assert not stock.load_state_dict(saved).missing_keys


def test_initial_values_come_after_the_meta_device() -> None:
    drawn = {name: float(i) for i, name in enumerate(NAMES, 1)}
    param_init = {name: (lambda t, v=value: nn.init.constant_(t, v)) for name, value in drawn.items()}
    config = derive(configuration(), GroupedExperts.Config, param_init=param_init)
    with torch.device("meta"):
        ours = integration.grouped_experts(config).build()
    ours.to_empty(device="cpu")
    ours.init_states()

    assert {name: tensor.unique().tolist() for name, tensor in ours.state_dict().items()} == {
        name: [value] for name, value in drawn.items()
    }


# ---------------------------------------------------------------------------------------------------- the override


def layer(experts: GroupedExperts.Config) -> RoutedExperts.Config:
    dispatcher = LocalTokenDispatcher.Config(num_experts=E, top_k=2)
    return RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher)


def test_the_override_replaces_the_experts_of_a_layer() -> None:
    config = layer(configuration())
    apply_overrides(OverrideConfig(imports=[OVERRIDE]), config)
    torch.manual_seed(0)
    ours = config.build()
    stock = layer(configuration()).build()
    stock.init_states()
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(10, D)
    scores, ids = torch.rand(10, E).topk(2)
    batched = "x_BLD" in inspect.signature(RoutedExperts.forward).parameters  # with a dimension more, up to 0.3
    tokens = [t.unsqueeze(0) if batched else t for t in (x, scores, ids)]
    routed = *tokens, torch.bincount(ids.flatten(), minlength=E)

    assert isinstance(ours.inner_experts, integration.FusibleGroupedExperts)
    torch.testing.assert_close(ours(*routed), stock(*routed), rtol=0.03, atol=0.03)


@pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"),
    reason=f"torchtitan's models need torch.distributed.fsdp.DataParallelMeshDims, torch {torch.__version__} has none",
)
def test_experts_of_a_subclass_stay_theirs() -> None:
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    config = GptOssGroupedExperts.Config(dim=D, hidden_dim=HIDDEN, num_experts=E)

    assert integration.grouped_experts(config) is config


def test_sharding_follows_the_parameters() -> None:
    sharding = ShardingConfig(state_shardings=dict(zip(NAMES, ("gate", "down", "gate"), strict=True)))  # type: ignore[arg-type]
    config = integration.grouped_experts(configuration(sharding_config=sharding))

    assert config.sharding_config.state_shardings == {"w2_EDF": "down", "w13": "gate"}


def test_products_of_a_converter_run() -> None:
    class Converted(integration.FusibleGroupedExperts):
        seen: list[Any] = []

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            self.seen.append(A.shape)
            raise NotImplementedError

    _, ours = both()
    ours.__class__ = Converted
    with pytest.raises(NotImplementedError):
        ours(*inputs())

    assert Converted.seen
    assert "torchtitan's own products run" in fusible.explain(nn.Sequential(ours)).layers[0].reason


# ------------------------------------------------------------------------------------------------------- sharded


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Two ranks of which this is the first; nothing here communicates."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


def test_local_experts_of_dtensors(mesh: Any) -> None:
    _, ours = both()
    sharded = copy.deepcopy(ours)
    for name, parameter in ours.named_parameters():
        half = DTensor.from_local(parameter.detach()[: E // 2].clone(), mesh, [Shard(0)], run_check=False)
        setattr(sharded, name, nn.Parameter(half))
    x, sizes = inputs()
    rows = sum(SIZES[: E // 2])
    local = x[:rows].detach().requires_grad_()
    y, expected = sharded(local, sizes[: E // 2]), ours(local, sizes[: E // 2].new_tensor([*SIZES[: E // 2], 0, 0]))
    y.sum().backward()
    grads = torch.autograd.grad(expected.sum(), [ours.w13, ours.w2_EDF])

    assert sharded.w13.shape[0] == E
    torch.testing.assert_close(y, expected)
    for parameter, grad in zip((sharded.w13, sharded.w2_EDF), grads, strict=True):
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.to_local(), grad[: E // 2])


def test_local_columns_of_dtensors(mesh: Any) -> None:
    """Sharded over the hidden rows: each rank has a part of the sum."""
    _, ours = both()
    sharded = copy.deepcopy(ours)
    halves = {"w13": (ours.w13[:, : HIDDEN // 2], 1), "w2_EDF": (ours.w2_EDF[:, :, : HIDDEN // 2], 2)}
    for name, (half, dim) in halves.items():
        local = DTensor.from_local(half.detach().clone(), mesh, [Shard(dim)], run_check=False)
        setattr(sharded, name, nn.Parameter(local))
    x, sizes = inputs()
    y = sharded(x, sizes)
    rest = copy.deepcopy(ours)
    rest.w13 = nn.Parameter(ours.w13.detach()[:, HIDDEN // 2 :].clone())
    rest.w2_EDF = nn.Parameter(ours.w2_EDF.detach()[:, :, HIDDEN // 2 :].clone())

    torch.testing.assert_close(y + rest(x, sizes), ours(x, sizes), rtol=0.03, atol=0.03)


# ---------------------------------------------------------------------------------------------------- other ways to run


def test_compiled_whole() -> None:
    _, ours = both()
    x, sizes = inputs()
    y, compiled = ours(x, sizes), torch.compile(ours, backend="aot_eager", fullgraph=True)
    expected = gradients(ours, y, x)
    traced = compiled(x, sizes)

    torch.testing.assert_close(traced, y, rtol=0.02, atol=0.02)
    for name, gradient in gradients(ours, traced, x).items():
        assert distance(gradient, expected[name].double()) < 0.02, name


def test_copies_and_checkpointing() -> None:
    _, ours = both()
    x, sizes = inputs()
    y = ours(x, sizes)
    again = torch.utils.checkpoint.checkpoint(copy.deepcopy(ours), x, sizes, use_reentrant=False)

    assert torch.equal(again, y)


def test_no_weight_outlives_a_call() -> None:
    _, ours = both()
    ours(*inputs())
    container = ours._container[0]

    assert all(parameter.is_meta for parameter in container.parameters())
    assert [name for name, _ in ours.named_modules()] == [""]
