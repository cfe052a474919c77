"""FSDP2 gathers weights in e4m3: the bits of a gather in 16 bits, from half of its bytes."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation import build, harness
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fusible import (
    MXFP8,
    ArgumentError,
    Combine,
    Delayed,
    Dispatch,
    Float8Block,
    Float8Row,
    Float8Tensor,
    GroupedLinear,
    Scale,
    Sequential,
    SwiGLU,
    config,
    gather_quantized,
    quantize_,
    same_weights,
)
from fusible.benchmarks import gathers
from fusible.benchmarks.problem import PRESETS
from fusible.fuser import replay
from fusible.ops.formats.copies import Weight
from fusible.ops.modules import shard as sharded_modules
from fusible.ops.quantized import activation as quantized_activation
from fusible.ops.quantized import linear as quantized_linear
from fusible.ops.quantized.gathered_weights import MasterWeight

ROOT = Path(__file__).resolve().parents[2]

E, K, N = 2, 160, 136  # blocks that end before 128 x 128
SIZES = torch.tensor([2, 3])
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One process that shards over itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def experts(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Sequential:
    """Experts whose blocks have different scales."""
    torch.manual_seed(0)
    options = {"dtype": dtype, "recipe": Float8Block(), **options}
    first, second = GroupedLinear(E, K, 2 * N, **options), GroupedLinear(E, N, K, **options)
    for linear in (first, second):
        rows, columns = (torch.arange(size, device=linear.weight.device) // 128 for size in linear.weight_shape[1:])
        with torch.no_grad():
            linear.weight.mul_(2.0 ** (rows[:, None] - 2 * columns))
    return Sequential(first, SwiGLU(), second)


def pair(mesh: DeviceMesh, dtype: torch.dtype = torch.bfloat16, frozen: bool = False, **how: Any) -> list[Sequential]:
    """The same experts, gathered in 16 bits and in e4m3."""
    both = experts(dtype), gather_quantized(experts(dtype))
    for model in both:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and "weight" in name))
    return [fully_shard(model, mesh=mesh, **how) for model in both]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_training_has_the_bits_of_a_gather_in_16_bits(
    mesh: DeviceMesh, dtype: torch.dtype, reshard: bool, frozen: bool
) -> None:
    both = pair(mesh, dtype, frozen, mp_policy=BF16, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in both]
    for step in range(3):
        for microbatch in range(2):
            torch.manual_seed(10 * step + microbatch)
            rows = torch.randn(5, K).bfloat16()
            x = [rows.clone().requires_grad_() for _ in both]
            results = [model(each, split_sizes=SIZES) for model, each in zip(both, x, strict=True)]
            for y in results:
                y.float().square().sum().backward()
            assert torch.equal(*results)
            assert torch.equal(x[0].grad, x[1].grad)
        for expected, parameter in zip(*(model.parameters() for model in both), strict=True):
            if expected.requires_grad:
                assert torch.equal(parameter.grad.full_tensor(), expected.grad.full_tensor())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for expected, parameter in zip(*(model.parameters() for model in both), strict=True):
        assert torch.equal(parameter.full_tensor(), expected.full_tensor())
        assert parameter.dtype == dtype
    with torch.no_grad():
        assert torch.equal(*(model(rows, split_sizes=SIZES) for model in both))


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The bytes of the inputs of each gather, by the name of the parameter."""
    seen: dict[str, list[int]] = {}
    inputs: Any = FSDPParam.all_gather_inputs

    def counted(self: Any) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = inputs.fget(self)
        seen.setdefault(self._module_info.param_name, []).append(sum(tensor.nbytes for tensor in tensors))
        return tensors

    monkeypatch.setattr(FSDPParam, "all_gather_inputs", property(counted))
    return seen


def test_about_half_of_the_bytes_are_gathered(mesh: DeviceMesh, gathered: dict[str, list[int]]) -> None:
    in_16_bits, in_8 = pair(mesh)
    in_16_bits(torch.randn(5, K).bfloat16(), split_sizes=SIZES)
    expected = gathered.pop("weight")
    in_8(torch.randn(5, K).bfloat16(), split_sizes=SIZES)

    assert expected == [2 * E * 2 * N * K, 2 * E * N * K]
    assert all(0.5 < bytes / of_16 < 0.51 for bytes, of_16 in zip(gathered["weight"], expected, strict=True))


class Layers(torch.nn.Module):
    """Experts one after the other, whose weights are freed between their uses."""

    def __init__(self, mesh: DeviceMesh, is_gathered_in_8_bits: bool, **options: Any) -> None:
        super().__init__()
        models = [experts(**options) for _ in range(3)]
        models = [gather_quantized(model) if is_gathered_in_8_bits else model for model in models]
        self.layers = torch.nn.ModuleList([fully_shard(model, mesh=mesh) for model in models])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, split_sizes=SIZES)
        return x


WEIGHTS = [(E, *sorted(sizes, reverse=True)) for sizes in ((2 * N, K), (N, K))]


def weights_among(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Bytes of weights, either way round, and their scales."""
    shapes = {*WEIGHTS, *((e, k, n) for e, n, k in WEIGHTS)}
    return [t for t in tensors if t.shape in shapes or (t.dtype == torch.float32 and t.dim() == 3)]


def kept_of(model: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output, and what of weights autograd keeps for the backward."""
    saved: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        y = model(x, split_sizes=SIZES)
    return y, weights_among(saved)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("block", [same_weights, config], ids=["same_weights", ""])
def test_weights_are_freed_between_forward_and_backward(mesh: DeviceMesh, reshard: bool, block: Any) -> None:
    _, in_8 = pair(mesh, reshard_after_forward=reshard)
    with block():
        y, kept = kept_of(in_8, torch.randn(5, K).bfloat16().requires_grad_())

    assert len(kept) == 4  # bytes and scales of both
    assert {tensor.untyped_storage().nbytes() > 0 for tensor in kept} == {not reshard}
    y.sum().backward()
    assert len(kept_of(in_8, torch.randn(5, K).bfloat16())[1]) == 2  # the first linear gives no gradient of rows


@pytest.fixture
def transposed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of weights whose bytes have been transposed."""
    seen: list[tuple[int, ...]] = []
    transpose = quantized_linear.transpose_bytes

    def counted(data: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(data.shape))
        return transpose(data)

    monkeypatch.setattr(quantized_linear, "transpose_bytes", counted)
    return seen


def test_bytes_are_transposed_for_gradients_of_rows_alone(mesh: DeviceMesh, transposed: list[tuple[int, ...]]) -> None:
    _, in_8 = pair(mesh)
    x = torch.randn(5, K).bfloat16()
    with torch.no_grad():
        in_8(x, split_sizes=SIZES)
    y, y_of_rows = in_8(x, split_sizes=SIZES), in_8(x.clone().requires_grad_(), split_sizes=SIZES)
    assert transposed == []
    y.sum().backward()
    assert transposed == [(E, K, N)]
    y_of_rows.sum().backward()
    assert transposed == [(E, K, N), (E, K, N), (E, 2 * N, K)]


def test_transposed_bytes_are_freed_after_their_product(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    transpose, behind = quantized_linear.transpose_bytes, quantized_activation.quantize_activation_backward

    def noted(data: torch.Tensor) -> torch.Tensor:
        out = transpose(data)
        alive.append(weakref.ref(out))
        return out

    def after_the_first(*args: Any, **options: Any) -> Any:
        assert [reference() for reference in alive] == [None]
        return behind(*args, **options)

    monkeypatch.setattr(quantized_linear, "transpose_bytes", noted)
    monkeypatch.setattr(quantized_activation, "quantize_activation_backward", after_the_first)
    in_8 = fully_shard(prepared(bias=False), mesh=mesh)
    in_8(torch.randn(5, K).bfloat16().requires_grad_(), split_sizes=SIZES).sum().backward()

    assert [reference() for reference in alive] == [None, None]


class Checkpointed(torch.nn.Module):
    """Experts whose forward runs again in the backward."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor, split_sizes: torch.Tensor) -> Any:
        return checkpoint(self.experts, x, split_sizes=split_sizes, use_reentrant=False)


def sums_twice(results: list[torch.Tensor]) -> None:
    """A graph that is kept."""
    for retain in (True, False):
        results[-1].sum().backward(retain_graph=retain)


def sums(results: list[torch.Tensor]) -> None:
    for y in results:
        y.sum().backward()


def sums_backwards(results: list[torch.Tensor]) -> None:
    sums(results[::-1])


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("backward", [sums, sums_backwards, sums_twice])
@pytest.mark.parametrize("scope", [config, same_weights, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("wrap", [lambda module: module, Checkpointed], ids=["", "checkpointed"])
def test_lifetimes_of_graphs(mesh: DeviceMesh, wrap: Any, scope: Any, backward: Any, reshard: bool) -> None:
    both = [fully_shard(wrap(m), mesh=mesh, reshard_after_forward=reshard) for m in (experts(), prepared())]
    rows = [torch.randn(5, K).bfloat16() for _ in range(3)]
    x = [[each.clone().requires_grad_() for each in rows] for _ in both]
    with scope():
        for model, inputs in zip(both, x, strict=True):
            backward([model(each, split_sizes=SIZES) for each in inputs])

    for expected, other in zip(*x, strict=True):
        assert (expected.grad is None) == (other.grad is None)
        assert expected.grad is None or torch.equal(expected.grad, other.grad)
    for expected, parameter in zip(*(model.parameters() for model in both), strict=True):
        assert torch.equal(parameter.grad.full_tensor(), expected.grad.full_tensor())


def prepared(**options: Any) -> torch.nn.Module:
    return gather_quantized(experts(**options))


def test_shards_on_the_host(mesh: DeviceMesh) -> None:
    both = pair(mesh, torch.float32, mp_policy=BF16, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for model in both:
        model(torch.ones(5, K).bfloat16().requires_grad_(), split_sizes=SIZES).sum().backward()
    for expected, parameter in zip(*(model.parameters() for model in both), strict=True):
        assert torch.equal(parameter.grad.full_tensor(), expected.grad.full_tensor())


def test_inference_keeps_nothing(mesh: DeviceMesh) -> None:
    in_16_bits, in_8 = pair(mesh, reshard_after_forward=True)
    x = torch.randn(5, K).bfloat16()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y, kept = kept_of(in_8, x)
            assert torch.equal(y, in_16_bits(x, split_sizes=SIZES))
        assert kept == []


def test_a_weight_that_is_not_gathered_again_is_an_error(mesh: DeviceMesh) -> None:
    _, in_8 = pair(mesh, reshard_after_forward=True)
    in_8.set_unshard_in_backward(False)
    y = in_8(torch.randn(5, K).bfloat16(), split_sizes=SIZES)
    with pytest.raises(RuntimeError, match=r"GroupedLinear: weight: FSDP2 .* has freed it since.*set_unshard_in_back"):
        y.sum().backward()


UNFUSED = frozenset({"GroupedMLP", "GroupedLinearGLU", "GroupedLinearChain", "GLUScale", "PointwiseChain"})


def blocks() -> list[Any]:
    """The contexts in which calls are made."""
    settings: tuple[dict[str, Any], ...] = ({}, {"recompute": True}, {"disable_fusions": UNFUSED})
    return [same_weights, *(partial(config, **setting) for setting in settings)]


@pytest.mark.parametrize("block", blocks(), ids=["same_weights", "fused", "recompute", "unfused"])
@pytest.mark.parametrize("recipe", [Float8Block(scales="float32"), Float8Block(wgrad="bfloat16")], ids=str)
def test_microbatches_of_layers_that_are_freed(mesh: DeviceMesh, block: Any, recipe: Float8Block) -> None:
    both = [fully_shard(Layers(mesh, in_8, recipe=recipe), mesh=mesh) for in_8 in (False, True)]
    for _ in range(2):
        with block():
            for _ in range(2):
                rows = torch.randn(5, K).bfloat16()
                x = [rows.clone().requires_grad_() for _ in both]
                results = [model(each) for model, each in zip(both, x, strict=True)]
                for y in results:
                    y.sum().backward()
                assert torch.equal(*results)
                assert torch.equal(x[0].grad, x[1].grad)
        for expected, parameter in zip(*(model.parameters() for model in both), strict=True):
            assert torch.equal(parameter.grad.full_tensor(), expected.grad.full_tensor())
            for each in (parameter, expected):
                each.grad = None
                each.data.mul_(0.5)


def test_routed_experts(mesh: DeviceMesh) -> None:
    def routed() -> Sequential:
        fc1, act, fc2 = experts(bias=False)
        return Sequential(Dispatch(E), fc1, act, Scale(), fc2, Combine())

    both = [fully_shard(model, mesh=mesh) for model in (routed(), gather_quantized(routed()))]
    weights = torch.rand(7, 1)
    call = {"top_k_index": torch.tensor([[0], [1], [1], [0], [1], [1], [1]]), "top_k_weights": weights}
    x = torch.randn(7, K).bfloat16()
    results = [model(x, **call) for model in both]
    for y in results:
        y.sum().backward()

    assert torch.equal(*results)
    assert [step.name for step in both[1].explain().steps] == ["RoutedMLP"]
    for expected, parameter in zip(*(model.parameters() for model in both), strict=True):
        assert torch.equal(parameter.grad.full_tensor(), expected.grad.full_tensor())


@pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")
def test_kernels_read_gathered_bytes(mesh: DeviceMesh) -> None:
    """The kernels of a GPU are emulated."""
    with harness.installed(harness.Emulation(build.build())), replay.simulated("cpu"):
        both, split_sizes = pair(mesh), SIZES.clone()  # the emulation knows what is younger than it
        for _ in range(4):
            x = torch.randn(5, K).bfloat16()
            results = [model(x, split_sizes=split_sizes) for model in both]
            for y in results:
                y.sum().backward()
            assert torch.equal(*results)
        for expected, parameter in zip(*(model.parameters() for model in both), strict=True):
            assert torch.equal(parameter.grad.full_tensor(), expected.grad.full_tensor())
        explanation = both[1].explain()

    assert "FSDP2 gathers the weight in e4m3" in explanation.steps[0].notes[0]
    assert "op 0 (GroupedLinear) does not promise to be replayable" in explanation.replay
    assert "hopper" in explanation.steps[0].kernel


def test_explain_says_so(mesh: DeviceMesh) -> None:
    in_16_bits, in_8 = pair(mesh)
    for model in (in_16_bits, in_8):
        model(torch.randn(5, K).bfloat16().requires_grad_(), split_sizes=SIZES)

    explanations = in_16_bits.explain(), in_8.explain()
    assert "gathers the weight in e4m3" in str(explanations[1])
    assert "e4m3: each" not in str(explanations[0])
    backward = explanations[1].steps[0].backward
    assert backward is not None
    assert [text for text in backward.configurations if "transpose" in text] == [
        f"torch (transpose), {E} x {n} x {k}, {2 * E * n * k / 1e6:.1f} MB" for n, k in ((K, N), (2 * N, K))
    ]
    kept = [each.saved_bytes_per_row * each.rows for each in explanations]
    assert kept[0] - kept[1] > 3 * E * N * K  # which are transposed in the forward


def test_compiled_modules_run_it_eagerly(mesh: DeviceMesh) -> None:
    both, x = pair(mesh), torch.randn(5, K).bfloat16()
    results = [torch.compile(model, backend="eager")(x, split_sizes=SIZES) for model in both]
    for y in results:
        y.sum().backward()

    assert torch.equal(*results)
    for expected, parameter in zip(*(model.parameters() for model in both), strict=True):
        assert torch.equal(parameter.grad.full_tensor(), expected.grad.full_tensor())


def test_state_dicts_have_the_values(mesh: DeviceMesh) -> None:
    in_16_bits, in_8 = pair(mesh)
    file = io.BytesIO()
    torch.save(in_8.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for name, values in in_16_bits.state_dict().items():
        if isinstance(values, DTensor):
            assert type(loaded[name].to_local()) is torch.Tensor
            assert torch.equal(loaded[name].full_tensor(), values.full_tensor())
    for parameter in in_8.parameters():
        torch.nn.init.zeros_(parameter)
    in_8.load_state_dict(loaded)
    with pytest.raises(RuntimeError, match=r"0\.weight is gathered in e4m3, and assign=True would replace"):
        in_8.load_state_dict(loaded, assign=True)
    x = torch.randn(5, K).bfloat16()

    assert torch.equal(in_8(x, split_sizes=SIZES), in_16_bits(x, split_sizes=SIZES))


def test_modules_are_copied_cast_and_made_empty(mesh: DeviceMesh, gathered: dict[str, list[int]]) -> None:
    prepared = gather_quantized(gather_quantized(experts(torch.float32)))
    in_8 = fully_shard(copy.deepcopy(prepared).bfloat16(), mesh=mesh)
    empty = fully_shard(gather_quantized(experts(device="meta")), mesh=mesh).to_empty(device="cpu")
    empty.load_state_dict(in_8.state_dict())
    x = torch.randn(5, K).bfloat16()
    expected = experts(torch.float32).bfloat16()(x, split_sizes=SIZES)

    assert torch.equal(in_8(x, split_sizes=SIZES), expected)
    assert torch.equal(empty(x, split_sizes=SIZES), expected)
    assert max(gathered["weight"]) < 1.1 * E * 2 * N * K  # bytes, not 16 bits


def test_weights_that_linears_share_stay_shared() -> None:
    one, other = (GroupedLinear(2, K, N, recipe=Float8Block()) for _ in range(2))
    other.weight = one.weight
    gather_quantized(Sequential(one, other))

    assert one.weight is other.weight


def test_operations_of_others_read_the_values(mesh: DeviceMesh) -> None:
    op, quantised = fully_shard(gather_quantized(experts()[0]), mesh=mesh), quantize_(experts()[0], Float8Block())
    op.unshard()
    weight, copied = op.weight, Weight(quantised.weight.detach(), quantised.weight_scale_inv)
    expected = Float8Block().weight_values(copied).bfloat16()

    assert isinstance(weight, torch.nn.Parameter)
    assert (weight.dtype, weight.shape) == (torch.bfloat16, (E, 2 * N, K))
    assert torch.equal(weight.mT.float(), expected.mT.float())
    assert torch.equal(torch.stack([torch.ones_like(weight), weight]).sum(0), expected + 1)


def fused_sgd(weight: torch.Tensor) -> None:
    plain, options = torch.zeros(1).bfloat16(), {"weight_decay": 0, "momentum": 0, "dampening": 0, "nesterov": False}
    options |= {"lr": 0.1, "maximize": False, "is_first_step": True}
    torch._fused_sgd_([plain, weight], [plain.clone(), torch.ones(weight.shape).bfloat16()], [], **options)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.zero_(),
        lambda weight: torch.add(torch.ones(weight.shape), 1, out=weight),
        lambda weight: torch._foreach_mul_([weight], 2.0),
        lambda weight: torch._foreach_add_([torch.zeros(weight.shape), weight], 1.0),
        lambda weight: torch._foreach_copy_([weight], [torch.zeros(weight.shape)]),
        fused_sgd,
        lambda weight: torch.optim.SGD([weight.requires_grad_()], lr=0.1, foreach=True).step(),
    ],
    ids=["in place", "out", "foreach mul", "a later one of a list", "foreach copy", "fused", "an optimizer"],
)
def test_no_write_to_a_gathered_weight_is_lost(mesh: DeviceMesh, write: Any) -> None:
    op = fully_shard(gather_quantized(experts()[0]), mesh=mesh)
    op.unshard()
    op.weight.grad = torch.ones_like(op.weight)
    with pytest.raises(RuntimeError, match="gathered in e4m3 cannot be written; write its shards"), torch.no_grad():
        write(op.weight)


def test_gathered_weights_are_read_by_operations_that_write_elsewhere(mesh: DeviceMesh) -> None:
    op = fully_shard(gather_quantized(experts()[0]), mesh=mesh)
    op.unshard()
    values, out = op.weight + 0, torch.zeros(2, *op.weight.shape, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.mul(op.weight, 2, out=out[0])
        torch._foreach_copy_([out[1]], [op.weight])

    assert torch.equal(out, torch.stack([2 * values, values]))


def linear(**options: Any) -> GroupedLinear:
    return GroupedLinear(2, K, N, **{"dtype": torch.bfloat16, "recipe": Float8Block(), **options})


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (lambda: linear(recipe=None), r"recipe=Float8Block\(\), not None"),
        (lambda: linear(recipe=Float8Row()), r"recipe=Float8Block\(\), not Float8Row"),
        (lambda: linear(recipe=Float8Tensor(delayed=Delayed())), r"recipe=Float8Block\(\), not Float8Tensor"),
        (lambda: linear(recipe=MXFP8()), r"recipe=Float8Block\(\), not MXFP8"),
        (lambda: linear(single_grouped_weight=False), "build the op with single_grouped_weight=True"),
        (lambda: linear(transposed_weight=True), "build the op with transposed_weight=False"),
        (lambda: linear(accumulate_into_main_grad=True), "build the op without main_grad and delay_wgrad_compute"),
        (lambda: linear(delay_wgrad_compute=True), "build the op without main_grad and delay_wgrad_compute"),
        (lambda: quantize_(linear(), Float8Block()), "has been quantised, so its bytes are gathered already"),
        (lambda: parametrized(linear()), "computed by a parametrization"),
        (lambda: SwiGLU(), "expected a module with a GroupedLinear, got a SwiGLU"),
    ],
)
def test_what_is_not_gathered_in_8_bits_is_refused(op: Any, why: str) -> None:
    module, other = op(), linear()
    with pytest.raises(ArgumentError, match=f"gather_quantized: .*{why}"):
        gather_quantized(torch.nn.ModuleList([other, module]) if isinstance(module, GroupedLinear) else module)
    assert type(other.weight) is torch.nn.Parameter  # none has changed


def parametrized(op: GroupedLinear) -> GroupedLinear:
    torch.nn.utils.parametrize.register_parametrization(op, "weight", torch.nn.Identity())
    return op


def test_a_module_that_is_sharded_already_or_never_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ArgumentError, match=r"got a DTensor; call it before fully_shard"):
        gather_quantized(fully_shard(linear(), mesh=mesh))
    with pytest.raises(ArgumentError, match=r"weight: gather_quantized has prepared it.*call fully_shard"):
        gather_quantized(linear())(torch.randn(5, K).bfloat16(), split_sizes=SIZES)


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_modules, "dispatch_disabled", None)
    with pytest.raises(ArgumentError, match=r"does not have torch._C._DisableTorchDispatch; gather 16 bits"):
        gather_quantized(linear())


def test_dtypes_that_are_not_quantised_are_refused(mesh: DeviceMesh) -> None:
    x = torch.randn(5, K)
    with pytest.raises(ArgumentError, match=r"not float32; give MixedPrecisionPolicy\(param_dtype=torch.bfloat16\)"):
        fully_shard(gather_quantized(linear(dtype=torch.float32)), mesh=mesh)(x, split_sizes=SIZES)
    policy = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    with pytest.raises(ArgumentError, match="x: "):
        fully_shard(gather_quantized(linear()), mesh=mesh, mp_policy=policy)(x, split_sizes=SIZES)
    changed = fully_shard(gather_quantized(linear()), mesh=mesh)
    changed.recipe = Float8Row()
    with pytest.raises(ArgumentError, match=r"only Float8Block is gathered in e4m3, .* recipe=Float8Row"):
        changed(x.bfloat16(), split_sizes=SIZES)


@pytest.mark.parametrize(
    ("shard", "ranks", "why"),
    [((2, N, K), 3, "4 experts do not divide among 3 ranks"), ((4, N // 2, K), 2, "not a shard of whole experts")],
)
def test_shards_that_are_not_whole_experts_are_refused(shard: tuple[int, ...], ranks: int, why: str) -> None:
    class Mesh:
        def size(self) -> int:
            return ranks

    with pytest.raises(ArgumentError, match=f"GroupedLinear: weight: .*{why}"):
        MasterWeight(torch.zeros(shard)).fsdp_pre_all_gather(Mesh(), torch.Size((4, N, K)), None, linear(), BF16)


def test_what_would_not_read_the_bytes_is_refused(mesh: DeviceMesh) -> None:
    op = fully_shard(gather_quantized(linear()), mesh=mesh)
    x = torch.randn(5, K)
    op(x.bfloat16(), split_sizes=SIZES)  # a root stays gathered

    with pytest.raises(ArgumentError, match=r"x: .*float32"):
        op(x, split_sizes=SIZES)
    op.recipe = Float8Row()
    with pytest.raises(ArgumentError, match=r"was gathered under Float8Block.* recipe=Float8Row"):
        op(x.bfloat16(), split_sizes=SIZES)


SCRIPT = """
import sys, torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fusible import ArgumentError, Float8Block, GroupedLinear, Sequential, SwiGLU, gather_quantized

cuda = torch.cuda.is_available()
dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
ranks = dist.get_world_size()
mesh, policy = init_device_mesh(device.type, (ranks,)), MixedPrecisionPolicy(torch.bfloat16, torch.float32)

def experts(groups):
    torch.manual_seed(0)
    fc1, fc2 = (GroupedLinear(groups, *sizes, recipe=Float8Block()) for sizes in ((160, 272), (136, 160)))
    return Sequential(fc1, SwiGLU(), fc2).to(device)

def layers(prepare, offload):
    how = dict(mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=True)
    return torch.nn.ModuleList([fully_shard(prepare(experts(4)), **how) for _ in range(2)])

def output(model, x):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        for layer in model:
            x = layer(x, split_sizes=torch.tensor([2, 3, 0, 4], device=device))
    bytes_of_weights = [t for t in saved if t.shape in ((4, 272, 160), (4, 160, 136))]
    scales_of_weights = [t for t in saved if t.shape in ((4, 3, 2), (4, 2, 2))]
    return x, bytes_of_weights + scales_of_weights

def train(offload):
    both = [layers(prepare, offload) for prepare in (lambda module: module, gather_quantized)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in both]
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(9, 160, device=device).bfloat16()
        (expected, _), (found, kept) = (output(model, x) for model in both)
        assert len(kept) == 6, "bytes and scales of all but the first linear, whose rows need no gradient"
        assert not any(tensor.untyped_storage().nbytes() for tensor in kept)
        results = expected, found
        for y, optimizer in zip(results, optimizers):
            y.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*results)
    for expected, parameter in zip(*(model.parameters() for model in both)):
        assert torch.equal(parameter.to_local(), expected.to_local())

for offload in (OffloadPolicy(), CPUOffloadPolicy()) if cuda else (OffloadPolicy(),):
    train(offload)
ragged = fully_shard(gather_quantized(experts(3)), mesh=mesh, mp_policy=policy)
try:
    ragged(torch.randn(9, 160, device=device).bfloat16(), split_sizes=torch.tensor([2, 3, 4], device=device))
except ArgumentError as error:
    print(error)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("devices", ["", pytest.param("0,1", marks=pytest.mark.cuda)])
def test_two_processes_train_with_the_bits_of_a_gather_in_16_bits(devices: str, tmp_path: Path) -> None:
    if devices and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    done = trained(tmp_path, 2, devices)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("GroupedLinear: weight: 3 experts do not divide among 2 ranks") == 2


@pytest.mark.cuda
def test_one_gpu_trains_with_the_bits_of_a_gather_in_16_bits(tmp_path: Path) -> None:
    done = trained(tmp_path, 1, "0")

    assert done.returncode == 0, done.stderr


def trained(folder: Path, ranks: int, devices: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": devices,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, str(script)], capture_output=True, text=True, env=environment, check=False, timeout=300
    )


def test_what_the_benchmark_times_differs_in_the_gather_alone(mesh: DeviceMesh) -> None:
    preset, x, sizes = PRESETS["small"], torch.randn(16, 256, dtype=torch.bfloat16), torch.tensor([2] * 8)
    models = [gathers.sharded(partial(build, preset, torch.device("cpu")), 2, mesh) for build in gathers.WAYS.values()]
    plain, cast, bytes_ = (model(x, sizes) for model in models)

    assert torch.equal(cast, bytes_)
    assert not torch.equal(plain, cast)
    torch.testing.assert_close(plain, cast, rtol=0.2, atol=0.2)


def test_a_shard_that_is_moved_stays_one() -> None:
    """As from the host, where ``CPUOffloadPolicy`` keeps it."""
    assert type(MasterWeight(torch.zeros(2, 3, 4)).to("meta")) is MasterWeight
