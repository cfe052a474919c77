"""Models of transformers with expert parallelism, on several ranks: a training run of one process; see ``ep_world``.

The model of each case is loaded twice: sharded, and whole. The whole one sees the batches of all ranks.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import transformers
from ep_sharded_cases import page
from ep_world import World
from hugging_face import COMMON, experts_of, make, relative
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import fusible
from fusible import ep
from fusible.integrations import transformers_ep

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

CASES: list[Callable[[World], None]] = []
ON_FOUR: list[Callable[[World], None]] = []
SYMMETRIC: list[Callable[[World], None]] = []
STEPS = 2


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    CASES.append(function)
    return function


def case_on_four(function: Callable[[World], None]) -> Callable[[World], None]:
    ON_FOUR.append(function)
    return function


def case_symmetric(function: Callable[[World], None]) -> Callable[[World], None]:
    SYMMETRIC.append(function)
    return function


class Way(NamedTuple):
    """How a model is spread and run.

    Attributes:
        reference: the experts of the whole model.
        change: what is done to both models before they train.
    """

    fsdp: int = 1
    tp: int = 1
    ep: int = 2
    experts: str = "fusible"
    exchange: str = "fusible"
    reference: str = "fusible"
    model: str = "qwen3"
    change: Callable[[Any], None] = lambda model: None

    def models(self) -> tuple[Any, Any]:
        """The sharded model, and the whole one."""
        sizes = {"fsdp_size": self.fsdp, "tp_size": self.tp, "ep_size": self.ep}
        layout = DistributedConfig(ep_implementation=self.exchange, **sizes)
        loaded = load(self.model, self.experts, distributed_config=layout), load(self.model, self.reference)
        for model in loaded:
            self.change(model.train())
        return loaded

    def replica(self, world: World) -> int:
        """The batch of this rank: ranks of a tensor-parallel group have one."""
        return world.rank // self.tp


@cache
def saved(name: str) -> str:
    """The folder of a tiny model that rank 0 has written. Collective."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    if dist.get_rank() == 0:
        make(name).save_pretrained(box[0])
    dist.barrier()
    return box[0]


def load(name: str, experts: str, **how: Any) -> Any:
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": str(dist.get_rank())}  # as torchrun does
    how |= {"experts_implementation": experts, "dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(saved(name), **how).to(torch.get_default_device())


def batches(number: int) -> list[Tensor]:
    """A sequence for each replica, of other lengths; the same wherever they go."""
    draw, here = torch.Generator("cpu").manual_seed(1), torch.get_default_device()
    drawn = [torch.randint(2, 64, (1, length), generator=draw, device="cpu") for length in (13, 8, 5, 11)[:number]]
    return [ids.to(here) for ids in drawn]


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_near(ours: Any, alone: Any, values: Callable[[nn.Parameter], Tensor], bound: float) -> None:
    """Whether parameters, or their gradients, are as of one process."""
    for (name, a), b in zip(ours.named_parameters(), alone.parameters(), strict=True):
        assert relative(whole(values(a)), values(b)) < bound, name


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def check(world: World, way: Way, bound: float = 5e-6) -> Any:
    """Training steps of all ranks: logits, gradients and weights are as of one process; returns the sharded model.

    Args:
        bound: of the relative error of logits in float32; products have other bits beside other rows.
    """
    ours, alone = way.models()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in (ours, alone)]
    everyone, replica = batches(way.fsdp), way.replica(world)
    for _ in range(STEPS):
        came = ours(input_ids=everyone[replica], labels=everyone[replica])
        came.loss.backward()
        expected = [alone(input_ids=ids, labels=ids) for ids in everyone]
        (sum(one.loss for one in expected) / way.fsdp).backward()
        assert relative(came.logits, expected[replica].logits) < bound
        assert_near(ours, alone, gradient, 10 * bound)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_near(ours, alone, lambda parameter: parameter, 10 * bound)
    return ours


def implementations(model: nn.Module) -> list[transformers_ep.FusibleEP]:
    return [found for m in model.modules() if (found := m.__dict__.get(transformers_ep._ATTRIBUTE)) is not None]


def group_of(model: Any) -> ep.Group:
    """The group that all layers share."""
    (group,) = {one._built[0][0] for one in implementations(model) if one._built is not None}
    return group


def assert_fused(model: Any, exchanges: int) -> None:
    """Whether each layer is one op, keeps no parameter, and so many exchanges were made since the last call."""
    layers = fusible.explain(model).layers
    assert [layer.explanation.steps[0].name for layer in layers] == ["EPGroupedMLP"] * 2
    assert [layer.explanation.steps[0].backward is not None for layer in layers] == [True] * 2
    assert all(p.is_meta for one in implementations(model) for p in one._built[1].parameters())
    assert group_of(model).statistics().exchanges == exchanges


@contextmanager
def all_tokens_to_rank_0() -> Iterator[None]:
    """To two experts, one of them twice; the other ranks own no row."""
    forward = Qwen3MoeTopKRouter.forward

    def on_rank_0(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, ids = forward(self, x)
        return logits, scores, ids % 2

    with patch.object(Qwen3MoeTopKRouter, "forward", on_rank_0):
        yield


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable()


def experts_of_bytes() -> Any:
    """The experts of a tiny FP8 checkpoint; the same on all ranks."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 4, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(**COMMON | sizes)
    config._experts_implementation = "fusible"
    model = transformers.MixtralForCausalLM(config).bfloat16()
    options = FineGrainedFP8Config()
    (experts,) = experts_of(replace_with_fp8_linear(model, quantization_config=options, pre_quantized=True))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in experts.to_empty(device="cpu").named_parameters():
            drawn = torch.rand(parameter.shape) / 10 if name.endswith("scale_inv") else torch.randn(parameter.shape)
            parameter.copy_(drawn)
    return experts


def spread(experts: Any) -> None:
    """Leaves this rank its part of the experts, as transformers does by a model's plan."""
    values = {f"experts.{name}": parameter.detach().clone() for name, parameter in experts.named_parameters()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    plan = {**dict.fromkeys(values, "grouped_gemm"), "experts": "ep_dispatch_experts"}
    holder = apply_expert_parallelism(nn.ModuleDict({"experts": experts}), mesh["ep"], mesh["tp"], plan, "fusible")
    with torch.no_grad():
        for name, parameter in holder.named_parameters():
            parameter.to_local().copy_(values[name].chunk(mesh["ep"].size())[mesh["ep"].get_local_rank()])


# ----------------------------------------------------------------------------------------------------- training


@case
def sharded_by_fsdp(world: World) -> None:
    transformers_ep.exchange_ops.cache_clear()
    model = check(world, Way(fsdp=2))
    assert_fused(model, STEPS * 2)


@case
def on_tensor_parallel_ranks(world: World) -> None:
    transformers_ep.exchange_ops.cache_clear()
    model = check(world, Way(tp=2))
    assert_fused(model, STEPS * 2)


@case
def a_loop_clips_experts_apart_as_the_page_says(world: World) -> None:
    """A Trainer clips so as well. torch's own function refuses parameters of two meshes."""
    (ours, alone), everyone = Way(fsdp=2).models(), batches(2)
    ours(input_ids=everyone[world.rank], labels=everyone[world.rank]).loss.backward()
    (sum(alone(input_ids=ids, labels=ids).loss for ids in everyone) / 2).backward()
    with pytest.raises(RuntimeError, match="must have the same mesh"):
        nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
    experts, rest = ([p for name, p in ours.named_parameters() if ("experts" in name) == is_one] for is_one in (1, 0))
    page()["clip"](experts, rest, max_norm=0.1, ep_group=dist.new_subgroups(1)[0])
    nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    assert_near(ours, alone, gradient, 5e-5)


@case
def a_rank_without_rows(world: World) -> None:
    with all_tokens_to_rank_0():
        check(world, Way(fsdp=2))
        check(world, Way(tp=2))


@case
def a_fixed_number_of_rows(world: World) -> None:
    transformers_ep.register("fixed", capacity=2.0, max_tokens=16)
    model = check(world, Way(fsdp=2, exchange="fixed"))
    assert group_of(model).local_capacity == 2 * 16 * 3


@case
def checkpointing_exchanges_again(world: World) -> None:
    transformers_ep.exchange_ops.cache_clear()
    model = check(world, Way(fsdp=2, change=checkpointed))
    assert_fused(model, STEPS * 2 * 2)


@case
def other_experts_get_rows(world: World) -> None:
    way = Way(fsdp=2, experts="grouped_mm", reference="grouped_mm")
    model = check(world, way, 1e-5)
    with all_tokens_to_rank_0():
        check(world, way, 1e-5)
    reasons = {layer.reason for layer in fusible.explain(model).layers}
    assert reasons == {
        "'grouped_mm' runs on the rows of an exchange: experts_implementation='fusible' would be one op with it"
    }


@case
def rows_with_a_tail(world: World) -> None:
    transformers_ep.register("fixed", capacity=2.0, max_tokens=16)
    check(world, Way(tp=2, experts="grouped_mm", reference="grouped_mm", exchange="fixed"), 1e-5)


@case
def experts_in_8_bits_get_rows(world: World) -> None:
    whole_ones, ours = experts_of_bytes(), experts_of_bytes()
    spread(ours)
    draw = torch.Generator().manual_seed(world.rank)
    x = torch.randn(9, 128, generator=draw).bfloat16().requires_grad_()
    ids, weights = torch.rand(9, 4, generator=draw).argsort(-1)[:, :2], torch.rand(9, 2, generator=draw)
    came, expected = (module(x, ids, weights) for module in (ours, whole_ones))
    assert relative(came, expected) < 0.006
    dx = [torch.autograd.grad(y.float().sum(), x)[0] for y in (came, expected)]
    assert relative(*dx) < 0.026  # rounding to e4m3; the routing weights are applied before it, to 16 bits
    assert "rows of an exchange: gate_up_proj is float8_e4m3fn" in str(fusible.explain(nn.ModuleList([ours])))


@case
def our_experts_behind_their_exchange(world: World) -> None:
    check(world, Way(fsdp=2, exchange="all_to_all"), 1e-5)


@case
def other_models(world: World) -> None:
    check(world, Way(fsdp=2, model="mixtral"))
    check(world, Way(tp=2, model="gpt-oss"))  # biases, transposed weights
    check(world, Way(fsdp=2, model="deepseek-v3"))  # a dense layer, and a shared expert


@case
def layers_are_explained_before_the_first_call(world: World) -> None:
    model, _ = Way(fsdp=2).models()
    assert {layer.reason for layer in fusible.explain(model).layers} == {"no call yet"}


# ------------------------------------------------------------------------------------- inference, files, copies


@case
def generated_tokens_are_those_of_one_process(world: World) -> None:
    for way in (Way(fsdp=2), Way(tp=2)):
        ours, alone = way.models()
        ids = batches(way.fsdp)[way.replica(world)]
        tokens = [model.eval().generate(ids, max_new_tokens=6, do_sample=False) for model in (ours, alone)]
        assert torch.equal(*tokens)


@case
def a_batch_that_all_have_is_not_sent(world: World) -> None:
    model, _ = Way(tp=2).models()
    with torch.no_grad():
        model(batches(1)[0])
    assert all(one._built is None for one in implementations(model))
    assert {layer.explanation.steps[0].name for layer in fusible.explain(model).layers} == {"RoutedMLP"}


@case
def decoding_of_such_a_batch_compiles_in_one_graph(world: World) -> None:
    model, _ = Way(tp=2).models()
    ids = batches(1)[0]
    with torch.no_grad():
        expected = model.eval()(ids).logits
        for layer in model.model.layers:
            layer.mlp.compile(backend="eager", fullgraph=True)
        assert relative(model(ids).logits, expected) < 1e-6


@case
def saved_weights_are_those_of_the_model(world: World) -> None:
    ours = check(world, Way(fsdp=2))
    box = [tempfile.mkdtemp() if world.rank == 0 else None]
    dist.broadcast_object_list(box)
    ours.save_pretrained(box[0])
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(box[0], dtype=torch.float32).state_dict()
    for name, parameter in ours.named_parameters():
        assert torch.equal(again[name], whole(parameter)), name


@case
def copies_leave_the_exchange_out(world: World) -> None:
    model, _ = Way(tp=2).models()
    experts = model.model.layers[0].mlp.experts
    copied = copy.deepcopy(experts.__dict__[transformers_ep._ATTRIBUTE])
    assert copied is None


@case
def under_autocast_tokens_travel_in_its_dtype(world: World) -> None:
    ours, alone = Way(fsdp=2).models()
    everyone = batches(2)
    with torch.autocast("cpu", torch.bfloat16):
        ours(input_ids=everyone[world.rank], labels=everyone[world.rank]).loss.backward()
        (sum(alone(input_ids=ids, labels=ids).loss for ids in everyone) / 2).backward()
    assert group_of(ours).settings.dtype == torch.bfloat16
    assert_near(ours, alone, gradient, 0.05)


@case
def compiled_around_the_exchange(world: World) -> None:
    ours, alone = Way(fsdp=2).models()
    ids = batches(2)[world.rank]
    for layer in ours.model.layers:
        layer.mlp.compile(backend="aot_eager")
    ours(input_ids=ids, labels=ids).loss.backward()
    everyone = batches(2)
    (sum(alone(input_ids=ids, labels=ids).loss for ids in everyone) / 2).backward()
    assert_near(ours, alone, gradient, 5e-5)


# ------------------------------------------------------------------------------------------------------- errors


@case
def the_first_call_fixes_the_number_of_tokens(world: World) -> None:
    transformers_ep.register("first", capacity="worst")
    model, _ = Way(fsdp=2, exchange="first").models()
    model(batches(2)[world.rank])
    assert group_of(model).settings.max_tokens == 13
    longer = torch.randint(2, 64, (1, 17))
    words = r"this rank has 17 tokens, and no rank had more than 13 in the first call, .*register\(NAME, max_tokens=17,"
    with pytest.raises(fusible.ArgumentError, match=words):
        model(longer)


@case
def adapters_of_experts_are_refused(world: World) -> None:
    peft = pytest.importorskip("peft")
    model, _ = Way(fsdp=2).models()
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.down_proj"])
    words = r"Qwen3MoeExperts\.down_proj: PEFT cannot adapt experts that ranks share .* without ep_size, or leave"
    with pytest.raises(ValueError, match=words):
        peft.get_peft_model(model, config)
    beside = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    ids = batches(2)[world.rank]
    beside(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad.isfinite().all() for name, p in beside.named_parameters() if "lora_" in name)


@case
def options_of_an_exchange_are_those_of_its_group(world: World) -> None:
    """Rows that do not fit are dropped, as the error of too many rows proposes."""
    transformers_ep.register("dropping", capacity=3, max_tokens=16, overflow="drop", overlap=8, overlap_dispatch=4)
    model, _ = Way(fsdp=2, exchange="dropping").models()
    ids = batches(2)[world.rank]
    model(input_ids=ids, labels=ids).loss.backward()
    group = group_of(model)
    assert group.statistics().dropped > 0
    assert (group.settings.overlap, group.settings.overlap_dispatch) == (8, 4)


@case
def an_exchange_that_is_misspelt(world: World) -> None:
    with pytest.raises(TypeError, match="max_token"):
        transformers_ep.register("wrong", max_token=3)


# --------------------------------------------------------------------------------------------------- four ranks


@case_on_four
def two_copies_of_each_expert(world: World) -> None:
    check(world, Way(fsdp=4, ep=2))


@case_on_four
def tensor_parallel_replicas(world: World) -> None:
    check(world, Way(fsdp=2, tp=2, ep=4))
    check(world, Way(fsdp=2, tp=2, ep=2))


@case_on_four
def replicas_between_hosts(world: World) -> None:
    """As the page on hosts loads them."""
    ours, alone = page("hosts")["load"](saved("qwen3"), 2, 2, "fusible"), load("qwen3", "fusible")
    everyone = batches(4)
    ours.train()(input_ids=everyone[world.rank], labels=everyone[world.rank]).loss.backward()
    (sum(alone(input_ids=ids, labels=ids).loss for ids in everyone) / 4).backward()
    assert group_of(ours).size == 2
    assert_near(ours, alone, gradient, 5e-5)


@case_on_four
def experts_of_all_ranks(world: World) -> None:
    with all_tokens_to_rank_0():
        check(world, Way(fsdp=4, ep=4))


# ---------------------------------------------------------------------------------------- the transport "symmetric"


@case_symmetric
def by_the_memory_of_one_host(world: World) -> None:
    for way in (Way(fsdp=2, exchange="fusible_symmetric"), Way(tp=2, exchange="fusible_symmetric")):
        model = check(world, way)
        group = group_of(model)
        assert group.transport == "symmetric"
        assert group.settings.capacity == transformers_ep.CAPACITY
        group.check(synchronize=True)


@case_symmetric
def rows_by_the_memory_of_one_host(world: World) -> None:
    way = Way(fsdp=2, experts="grouped_mm", reference="grouped_mm", exchange="fusible_symmetric")
    check(world, way, 1e-5)


@case_symmetric
def more_rows_than_fit_are_an_error(world: World) -> None:
    model, _ = Way(fsdp=2, exchange="fusible_symmetric").models()

    def run() -> None:
        model(batches(1)[0])
        group_of(model).check(synchronize=True)

    with all_tokens_to_rank_0(), pytest.raises(ep.CapacityError, match="rank 0 had to own 78 rows, its capacity is 59"):
        run()
