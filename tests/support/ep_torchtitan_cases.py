"""torchtitan's routed experts on several ranks: its all-to-all dispatcher against ours; see ``ep_world``."""

from __future__ import annotations

import ast
import inspect
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from absent import triton_if_missing
from ep_world import World
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

with triton_if_missing(), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import (
        AllToAllTokenDispatcher,
        HybridEPTokenDispatcher,
        LocalTokenDispatcher,
        MinimalAsyncEPTokenDispatcher,
    )
    from torchtitan.overrides import fused_swiglu  # noqa: F401

    from fusible.integrations import torchtitan_dispatcher as integration
    from fusible.integrations.exchanges.shared_exchange import ExchangeOptions, exchange_ops

set_spmd_backend("default")  # that of types sends lists of unequal tensors, which gloo does not

CASES: list[Callable[[World], None]] = []
OWNED, TOP_K, TOKENS, D, HIDDEN = 3, 2, 14, 16, 32
NAMES = ("w1_EFD", "w2_EDF", "w3_EFD")
OVERRIDE = "fusible.integrations.torchtitan_dispatcher.token_dispatcher"
SYMMETRIC = "fusible.integrations.torchtitan_dispatcher.symmetric_token_dispatcher"
OUR_EXPERTS = "fusible.integrations.torchtitan.grouped_experts"


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    CASES.append(function)
    return function


class Step(NamedTuple):
    """The results of a training step: the sums, and the gradients of tokens, scores and weights."""

    y: Tensor
    dx: Tensor
    dscores: Tensor
    weights: tuple[Tensor, ...]


def draw(tensor: Tensor) -> None:
    nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5)


def configuration(experts: int, overrides: list[Any]) -> RoutedExperts.Config:
    """The configuration of a layer with the kind of dispatcher that the overrides replace, after they are applied."""
    kind, how = AllToAllTokenDispatcher, {}
    if any(SYMMETRIC in entry for entry in overrides):
        kind, how = HybridEPTokenDispatcher, {"non_blocking_capacity_factor": 1.0, "num_max_tokens_per_rank": TOKENS}
    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(
            dim=D, hidden_dim=HIDDEN, num_experts=OWNED, param_init=dict.fromkeys(NAMES, draw)
        ),
        token_dispatcher=kind.Config(num_experts=experts, top_k=TOP_K, **how),
    )
    apply_overrides(OverrideConfig(imports=overrides), config)
    return config


def layer_on(world: World, overrides: list[Any], seed: int = 0, wired: bool = True) -> Any:
    """Their layer, with the experts of this rank; what is in it is decided by overrides."""
    layer = configuration(OWNED * (world.size if wired else 1), overrides).build()
    torch.manual_seed(100 * seed + world.rank)
    layer.init_states()
    if OUR_EXPERTS in overrides:  # which draw theirs at once: the numbers are those of the stock layer
        layer.inner_experts.load_state_dict(layer_on(world, [], seed).inner_experts.state_dict())
    mesh = init_device_mesh(torch.get_default_device().type, (world.size,), mesh_dim_names=("ep",)) if wired else None
    layer.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return layer


def routed(world: World, dtype: torch.dtype, experts: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of this rank, scores, experts, and how many tokens each expert has of them."""
    experts = OWNED * world.size if experts is None else experts
    generator = torch.Generator().manual_seed(7 + world.rank)
    x = torch.randn(TOKENS, D, generator=generator).to(dtype)
    scores, ids = torch.rand(TOKENS, experts, generator=generator).topk(TOP_K)
    return x, scores, ids, torch.bincount(ids.flatten(), minlength=experts)


def trained(layer: Any, world: World, dtype: torch.dtype = torch.float32, experts: int | None = None) -> Step:
    x, scores, ids, counts = routed(world, dtype, experts)
    x, scores = x.requires_grad_(), scores.requires_grad_()
    batched = "x_BLD" in inspect.signature(RoutedExperts.forward).parameters  # with a dimension more, up to 0.3
    tokens = [t.unsqueeze(0) if batched else t for t in (x, scores, ids)]
    y = layer(*tokens, counts).view(TOKENS, D)
    y.backward(torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(5)).to(dtype))
    inner = getattr(layer, "inner_experts", None)
    return Step(y.detach(), x.grad, scores.grad, tuple(p.grad for p in inner.parameters()) if inner else ())


def near(came: Step, expected: Step) -> None:
    """Rows have the same bits; sums of them are in another order."""
    for name, a, b in zip(Step._fields[:3], came, expected, strict=False):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
    for a, b in zip(came.weights, expected.weights, strict=True):
        assert torch.equal(a, b)


@case
def a_step_is_that_of_the_all_to_all_dispatcher(world: World) -> None:
    stock, ours = layer_on(world, []), layer_on(world, [OVERRIDE])
    assert type(stock.token_dispatcher) is AllToAllTokenDispatcher
    assert type(ours.token_dispatcher) is integration.FusibleTokenDispatcher
    near(trained(ours, world), trained(stock, world))


@case
def sums_are_as_exact_as_theirs_in_bfloat16(world: World) -> None:
    wide = trained(layer_on(world, []), world, torch.float32)
    stock, ours = (trained(layer_on(world, o), world, torch.bfloat16) for o in ([], [OVERRIDE]))
    for name, a, b, exact in zip(Step._fields[:3], ours, stock, wide, strict=False):
        error, theirs = ((t.float() - exact).norm() / exact.norm() for t in (a, b))
        assert a.dtype == b.dtype
        assert error < 1.2 * theirs < 0.02, f"{name}: {error}, {theirs}"


@case
def a_tail_changes_nothing(world: World) -> None:
    options = {"capacity": "worst", "max_tokens": TOKENS + 3}
    for experts in ([], [OUR_EXPERTS]):
        ours = layer_on(world, [*experts, (OVERRIDE, options)])
        near(trained(ours, world), trained(layer_on(world, experts), world))
    assert exchange_ops.cache_info().currsize > 1


@case
def both_overrides_go_together(world: World) -> None:
    stock, ours = layer_on(world, [OUR_EXPERTS]), layer_on(world, [OUR_EXPERTS, OVERRIDE])
    near(trained(ours, world), trained(stock, world))
    theirs, y = trained(layer_on(world, []), world).y, trained(ours, world).y
    torch.testing.assert_close(y, theirs, rtol=0.03, atol=0.03)


@case
def layers_share_a_group(world: World) -> None:
    exchange_ops.cache_clear()
    first, second = (layer_on(world, [OVERRIDE], seed) for seed in (0, 1))
    trained(first, world)
    trained(second, world)
    x = torch.empty(TOKENS, D)
    group = first.token_dispatcher._ops(x).group
    assert second.token_dispatcher._ops(x).group is group
    assert group.statistics().exchanges == 2
    assert exchange_ops.cache_info().currsize == 1


@case
def checkpointing_exchanges_again(world: World) -> None:
    ours = layer_on(world, [OVERRIDE])
    expected = trained(ours, world)
    ours.zero_grad()
    again = trained(lambda *args: checkpoint(ours, *args, use_reentrant=False), world)
    for a, b in zip(again[:3], expected[:3], strict=True):
        assert torch.equal(a, b)
    for parameter, grad in zip(ours.inner_experts.parameters(), expected.weights, strict=True):
        assert torch.equal(parameter.grad, grad)


@case
def compiled_around_the_exchange(world: World) -> None:
    ours = layer_on(world, [OVERRIDE])
    expected = trained(ours, world)
    ours.zero_grad()
    came = trained(torch.compile(ours, backend="aot_eager"), world)
    torch.testing.assert_close(came.y, expected.y, rtol=0.02, atol=0.02)
    torch.testing.assert_close(came.dx, expected.dx, rtol=0.02, atol=0.02)


@case
def without_a_mesh_it_is_the_local_dispatcher(world: World) -> None:
    ours = layer_on(world, [OVERRIDE], wired=False)
    came = trained(ours, world, experts=OWNED)
    ours.zero_grad()
    ours.token_dispatcher = LocalTokenDispatcher.Config(num_experts=OWNED, top_k=TOP_K).build()
    for a, b in zip(came[:3], trained(ours, world, experts=OWNED)[:3], strict=True):
        assert torch.equal(a, b)


@case
def a_capacity_needs_the_number_of_tokens(world: World) -> None:
    ours = layer_on(world, [(OVERRIDE, {"capacity": 2.0})])
    with pytest.raises(ValueError, match=r"max_tokens is needed for capacity 2.0 with transport 'collective'"):
        trained(ours, world)


@case
def types_of_shards_are_refused(world: World) -> None:
    ours = layer_on(world, [OVERRIDE])
    with (
        patch.object(integration, "get_spmd_backend", lambda: "spmd_types"),
        patch.object(integration.spmd, "is_type_checking", lambda: True),
        pytest.raises(NotImplementedError, match="has no types of sharded tensors; switch"),
    ):
        trained(ours, world)


@case
def results_are_those_of_the_experts(world: World) -> None:
    """Against a loop over all experts in float64, from what bfloat16 holds of rows and weights."""
    ours = layer_on(world, [OVERRIDE])
    x, scores, ids, _ = routed(world, torch.float32)
    experts = [layer_on(World(rank, world.size), []).inner_experts for rank in range(world.size)]
    expected = torch.zeros(TOKENS, D, dtype=torch.float64)
    for token, slot in itertools.product(range(TOKENS), range(TOP_K)):
        owner, e = divmod(int(ids[token, slot]), OWNED)
        w1, w2, w3 = (getattr(experts[owner], name)[e].bfloat16().double() for name in NAMES)
        row = x[token].bfloat16().double()
        expected[token] += scores[token, slot].double() * (w2 @ (F.silu(w1 @ row) * (w3 @ row)))
    torch.testing.assert_close(trained(ours, world).y.double(), expected, rtol=0.02, atol=0.02)


# ----------------------------------------------------------------------------------------------------- CUDA graphs


def check_of_cuda_graphs() -> Callable[[Any], None]:
    """The method of torchtitan's trainer, which is read, not imported: it would need all that a trainer needs."""
    import torchtitan

    source = Path(torchtitan.__path__[0], "trainer.py").read_text()
    name = "_validate_cuda_graphs"
    found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == name]
    kinds = (LocalTokenDispatcher, HybridEPTokenDispatcher, MinimalAsyncEPTokenDispatcher)
    names: dict[str, Any] = {kind.__name__: kind for kind in kinds}
    exec(compile(ast.Module(found, []), "torchtitan", "exec"), names)
    return names[name]


@case
def cuda_graphs_take_the_symmetric_dispatcher_alone(world: World) -> None:
    """As the launches in the documentation say."""

    def checked(overrides: list[Any], disabled: bool = False) -> None:
        check_of_cuda_graphs()(
            SimpleNamespace(
                training=SimpleNamespace(disable_cuda_graphs=disabled),
                parallelism=SimpleNamespace(pipeline_parallel_degree=1, expert_parallel_degree=world.size),
                model_spec=SimpleNamespace(model=configuration(OWNED * world.size, overrides)),
            )
        )

    checked([SYMMETRIC])
    checked([OUR_EXPERTS, SYMMETRIC])
    checked([OVERRIDE], disabled=True)
    for refused in ([], [OVERRIDE]):
        with pytest.raises(ValueError, match=r"CUDA graphs support only .*--training.disable_cuda_graphs"):
            checked(refused)


@case
def the_symmetric_dispatcher_gives_a_step_of_theirs(world: World) -> None:
    """Its settings by default, but for the transport, which needs GPUs."""
    ours = layer_on(world, [(SYMMETRIC, {"transport": "collective"})])
    assert type(ours.token_dispatcher) is integration.FusibleSymmetricTokenDispatcher
    assert ours.token_dispatcher._options == ExchangeOptions(max_tokens=TOKENS, capacity="worst")
    near(trained(ours, world), trained(layer_on(world, []), world))
    by_default = configuration(OWNED * world.size, [SYMMETRIC]).token_dispatcher
    assert by_default.exchange == ExchangeOptions(max_tokens=TOKENS, capacity="worst", transport="symmetric")


@case
def padding_is_refused(world: World) -> None:
    padded = HybridEPTokenDispatcher.Config(num_experts=OWNED, top_k=TOP_K, pad_multiple=32)
    with pytest.raises(ValueError, match="pads no expert's tokens: pad_multiple=32 must go"):
        integration.symmetric_token_dispatcher(padded)
