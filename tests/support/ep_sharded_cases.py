"""A router and experts that ranks share, alone and under FSDP2, as docs/expert_parallel.md trains and clips them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._dynamo  # once, not by DDP in every rank
from ep_cases import batch_for
from ep_world import ROOT, TIMEOUT, Batch, H, World, part, same, trained, whole
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fusible import (
    Combine,
    Dispatch,
    Float8Row,
    Float8Tensor,
    GroupedLinear,
    GroupedLoRA,
    Scale,
    Sequential,
    SwiGLU,
    ep,
    quantize_,
)

TOKENS = 11  # of each rank


class Model(NamedTuple):
    """A router, and the layer that it routes to."""

    router: nn.Linear
    layer: nn.Module

    @classmethod
    def of(cls, layer: nn.Module, experts: int) -> Model:
        """One whose router is that of all processes."""
        torch.manual_seed(5)
        return cls(nn.Linear(H, experts, bias=False), layer)

    def loss(self, batch: Batch) -> Tensor:
        """The mean over the tokens of a batch."""
        weights, ids = self.router(batch.x).softmax(-1).topk(batch.ids.shape[1])
        y: Tensor = self.layer(batch.x, top_k_index=ids, top_k_weights=weights)
        return (y * batch.dy).square().sum(1).mean()


def page(name: str = "expert_parallel") -> dict[str, Any]:
    """The functions of a page, without what it runs."""
    text = (ROOT / "docs" / f"{name}.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"^(?:from|import) .*|^def .*\n(?:(?: .*)?\n)+", code, re.M)), names)
    return names


def of_group(process_group: dist.ProcessGroup | None, ranks: int) -> ep.Group:
    """A group of ranks that share eight experts."""
    return ep.Group(
        process_group, num_experts=2 * ranks, max_tokens=TOKENS, top_k=2, hidden=H, dtype=torch.float32,
        capacity="worst", timeout=TIMEOUT,
    )  # fmt: skip


def halved(model: Model, batch: Batch) -> tuple[float, list[Tensor]]:
    """In one process: half of the norm of the gradients, and the gradients that are clipped to it."""
    model.loss(batch).backward()
    parameters = [*model.router.parameters(), *model.layer.parameters()]
    max_norm = float(nn.utils.get_total_norm([p.grad for p in parameters])) / 2
    nn.utils.clip_grad_norm_(parameters, max_norm)
    return max_norm, [p.grad for p in parameters]


def values(parameters: Any) -> list[Tensor]:
    """The whole gradients of parameters that may be sharded."""
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]


def check(world: World, group: ep.Group, ep_group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> None:
    """A step of all ranks has the gradients of one process, clipped by its norm."""
    docs, batch = page(), batch_for(group, (TOKENS,) * world.size)
    max_norm, (of_router, *of_experts) = halved(Model.of(whole(group), group.settings.num_experts), batch)
    model = Model.of(part(group), group.settings.num_experts)
    if mesh is not None:
        docs["shard"](model.layer, model.router, mesh)
        model.layer.set_force_sum_reduction_for_comms(mesh.size(0) > 1)  # as gloo cannot divide in a sum
    model.loss(batch.of(world.rank)).backward()
    if mesh is None:
        for p in model.router.parameters():
            dist.all_reduce(p.grad)
        for p in (*model.router.parameters(), *model.layer.parameters()):
            p.grad /= world.size
    docs["clip"]([*model.layer.parameters()], [*model.router.parameters()], max_norm, ep_group)
    expected = [of_router, *(grad[group.local_experts] for grad in of_experts)]
    came = values((*model.router.parameters(), *model.layer.parameters()))
    torch.testing.assert_close(came, expected, rtol=1e-4, atol=1e-5 * max_norm)


def gradients_are_clipped_by_the_norm_of_the_model(world: World) -> None:
    check(world, of_group(None, world.size), None, None)


def experts_under_fsdp_have_the_gradients_of_one_process(world: World) -> None:
    for shared_by in sorted({2, world.size}):
        mesh = init_device_mesh("cpu", (world.size // shared_by, shared_by), mesh_dim_names=("efsdp", "ep"))
        check(world, of_group(mesh.get_group("ep"), shared_by), mesh.get_group("ep"), mesh)


def experts_beside_ddp_have_the_gradients_of_one_process(world: World) -> None:
    docs, group = page("hosts"), of_group(None, world.size)
    batch = batch_for(group, (TOKENS,) * world.size)
    alone = Model.of(whole(group), group.settings.num_experts)
    alone.loss(batch).backward()
    model = Model.of(part(group), group.settings.num_experts)
    model = model._replace(router=docs["beside_ddp"](model.router))
    model.loss(batch.of(world.rank)).backward()
    docs["as_means"](model.layer)
    expected = [*values(alone.router.parameters()), *(p.grad[group.local_experts] for p in alone.layer.parameters())]
    came = values((*model.router.parameters(), *model.layer.parameters()))
    torch.testing.assert_close(came, expected, rtol=1e-4, atol=1e-6)


def replicas_of_hosts_have_the_gradients_of_one_process(world: World) -> None:
    docs, hosts = page("hosts"), world.size // 2
    settings = {"num_experts": 4, "max_tokens": TOKENS, "top_k": 2, "hidden": H, "dtype": torch.float32}
    group, mesh = docs["group_of_host"]("cpu", hosts, 2, **settings, capacity="worst", timeout=TIMEOUT)
    batch = batch_for(group, (TOKENS,) * world.size)
    alone, model = Model.of(whole(group), 4), Model.of(part(group), 4)
    alone.loss(batch).backward()
    model.loss(batch.of(world.rank)).backward()
    docs["sum_between_hosts"](model.layer, mesh)
    expected = [p.grad[group.local_experts] for p in alone.layer.parameters()]
    came = [grad / world.size for grad in values(model.layer.parameters())]
    torch.testing.assert_close(came, expected, rtol=1e-4, atol=1e-6)


def adapted(first: nn.Module, last: nn.Module, experts: slice) -> nn.Module:
    """Frozen experts with adapters, these of all; drawn alike on all ranks."""
    number, frozen = experts.stop - experts.start, {"bias": False, "dtype": torch.float32}
    linears = [GroupedLoRA(number, *sides, 4, **frozen) for sides in ((H, 2 * H), (H, H))]
    torch.manual_seed(4)
    with torch.no_grad():
        for linear in linears:
            for name, parameter in linear.named_parameters():
                parameter.copy_(torch.randn(16, *parameter.shape[1:])[experts] / 3)
                parameter.requires_grad_(name != "weight")
    return Sequential(first, linears[0], SwiGLU(), Scale(), linears[1], last)


def adapters_of_shared_experts_have_the_gradients_of_one_process(world: World) -> None:
    group = of_group(None, world.size)
    batch, experts = batch_for(group, (TOKENS,) * world.size), group.settings.num_experts
    alone = trained(trains(adapted(Dispatch(experts), Combine(), slice(0, experts))), batch)
    came = trained(
        trains(adapted(ep.EPDispatch(group), ep.EPCombine(group), group.local_experts)), batch.of(world.rank)
    )
    expected = alone.of(batch.counts, group)
    torch.testing.assert_close(came, expected, rtol=1e-5, atol=1e-6)


def trains(layer: nn.Module) -> Any:
    """The layer as what :func:`trained` takes, with the parameters that are not frozen alone."""
    layer.parameters = lambda: (p for p in nn.Module.parameters(layer) if p.requires_grad)  # type: ignore[method-assign]
    return layer


def quantised_experts_have_the_bits_of_one_process(world: World) -> None:
    for recipe in (Float8Row(), Float8Tensor()):
        group = world.group(dtype=torch.bfloat16)
        batch = batch_for(group, (13,) * world.size)
        alone, ours = (trains(quantize_(layer, recipe)) for layer in (whole(group), part(group)))
        same(trained(ours, batch.of(world.rank)), trained(alone, batch).of(batch.counts, group))
        assert all(linear.is_quantized for linear in ours if isinstance(linear, GroupedLinear))


CASES: list[Callable[[World], None]] = [
    gradients_are_clipped_by_the_norm_of_the_model,
    experts_under_fsdp_have_the_gradients_of_one_process,
    experts_beside_ddp_have_the_gradients_of_one_process,
    replicas_of_hosts_have_the_gradients_of_one_process,
    adapters_of_shared_experts_have_the_gradients_of_one_process,
    quantised_experts_have_the_bits_of_one_process,
]
