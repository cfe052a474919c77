"""Adapters beside weights in 8 and 4 bits: products and gradients against float64 of the decoded weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import stored_formats
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import fusible
from fusible import (
    MXFP4,
    NF4,
    ArgumentError,
    Combine,
    Dispatch,
    Float8Block,
    Float8Row,
    Float8Weight,
    GroupedLoRA,
    Int4,
    NVFP4Weight,
    Scale,
    Sequential,
    SwiGLU,
    explain,
)
from fusible.ops.formats.weight_only import WeightOnly, in_words

E, TOKENS, TOP_K = 3, 11, 2  # experts are no multiple of the ranks below
FORMATS = (
    MXFP4(),
    NVFP4Weight(2),
    NF4(),
    NF4(nested=True),
    Int4(),
    Int4(64, zero_points=True),
    *[Float8Weight(scales) for scales in ("blocks", "rows", "tensor")],
)
each_format = pytest.mark.parametrize("format", FORMATS, ids=[in_words(f) for f in FORMATS])


def layer(inner: int, features: int, ranks: tuple[int, int] = (5, 8), dtype: torch.dtype = torch.float32) -> Any:
    """Routed experts with adapters that are not zero; only these and the biases train."""
    torch.manual_seed(0)
    up = GroupedLoRA(E, inner, 2 * features, ranks[0], dtype=dtype)
    down = GroupedLoRA(E, features, inner, ranks[1], dtype=dtype)
    for linear in (up, down):
        linear.weight.requires_grad_(False)
        if linear.rank:
            torch.nn.init.normal_(linear.lora_b, std=0.1)
    return Sequential(Dispatch(E), up, SwiGLU(), down, Scale(), Combine())


def decoded(stored: Any, dtype: torch.dtype) -> Any:
    """The layer with the values of its bytes, by their definition in double precision."""
    plain = copy.deepcopy(stored)
    for name in ("1", "3"):
        linear = plain.get_submodule(name)
        parts, recipe = linear._stored(), linear.recipe
        exact = stored_formats.values(recipe, parts) if isinstance(recipe, WeightOnly) else recipe.weight_values(parts)
        linear.is_quantized, linear.recipe = False, None
        linear._buffers.clear()
        linear.register_parameter("weight", torch.nn.Parameter(exact.detach(), requires_grad=False))
    return plain.to(dtype)


def results(module: Any, inner: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients by name."""
    torch.manual_seed(1)
    x = torch.randn(TOKENS, inner).to(dtype).requires_grad_()
    index, weights = torch.randint(0, E, (TOKENS, TOP_K)), torch.rand(TOKENS, TOP_K).requires_grad_()
    y = module(x, top_k_index=index, top_k_weights=weights)
    y.float().square().sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads}  # type: ignore[dict-item]


def far(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@each_format
@pytest.mark.parametrize("ranks", [(5, 8), (8, 0), (0, 8)])
def test_gradients_are_those_of_the_decoded_weights(format: WeightOnly, ranks: tuple[int, int]) -> None:
    module = fusible.quantize_(layer(128, 64, ranks), format)
    expected = results(decoded(module, torch.float64), 128, torch.float64)
    actual = results(module, 128, torch.float32)

    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert far(value, expected[name]) < 1e-5, name


@pytest.mark.parametrize("features", [704, 1856, 2880, 3072])
@pytest.mark.parametrize("format", [MXFP4(), NF4(), Int4(), NVFP4Weight(2)], ids=repr)
def test_odd_sizes_in_bfloat16(features: int, format: WeightOnly) -> None:
    inner = 64
    if format.size_refusal(features, inner) is not None:
        pytest.skip("a size that the format refuses")
    module = fusible.quantize_(layer(inner, features, (8, 8), torch.bfloat16), format)
    exact = results(decoded(module, torch.float64), inner, torch.float64)
    rounded = results(decoded(module, torch.bfloat16), inner, torch.bfloat16)
    for name, value in results(module, inner, torch.bfloat16).items():
        assert far(value, exact[name]) < max(1.2 * far(rounded[name], exact[name]), 1e-2), name


@pytest.mark.parametrize("scales", ["float32", "power_of_two"])
def test_fp8_bytes_are_multiplied_by_quantised_rows(scales: Any) -> None:
    module = fusible.quantize_(layer(256, 128, (8, 8), torch.bfloat16), Float8Block(scales=scales))
    exact = results(decoded(module, torch.float64), 256, torch.float64)
    for name, value in results(module, 256, torch.bfloat16).items():
        assert far(value, exact[name]) < 0.08, name  # rows in e4m3

    rank_of_base = copy.deepcopy(module)
    for name in ("1", "3"):
        torch.nn.init.zeros_(rank_of_base.get_submodule(name).lora_b)
        module.get_submodule(name).rank = 0
        for factor in ("lora_a", "lora_b"):
            del module.get_submodule(name)._parameters[factor], module.get_submodule(name).per_group[factor]
    assert torch.equal(results(rank_of_base, 256, torch.bfloat16)["y"], results(module, 256, torch.bfloat16)["y"])


@each_format
def test_a_single_linear(format: WeightOnly) -> None:
    linear = layer(128, 64).get_submodule("1")
    stored = fusible.quantize_(linear, format)
    x, sizes = torch.randn(9, 128, requires_grad=True), torch.tensor([4, 0, 3])
    y = stored(x, split_sizes=sizes)
    y.sum().backward()
    exact = stored_formats.values(format, stored._stored()) + stored.lora_b.double() @ stored.lora_a.double()
    expected = torch.zeros(9, 128, dtype=torch.float64)
    for group, rows in ((0, slice(0, 4)), (2, slice(4, 7))):
        expected[rows] = x[rows].double() @ exact[group].mT + stored.bias[group].double()
    assert far(y, expected) < 1e-6
    assert not y[7:].any()


def losses(module: Any, inner: int, dtype: torch.dtype, steps: int = 200) -> Tensor:
    """The losses of steps that fit the adapters to a random goal."""
    torch.manual_seed(3)
    x, goal = torch.randn(2, TOKENS, inner)
    call = {"top_k_index": torch.randint(0, E, (TOKENS, TOP_K)), "top_k_weights": torch.rand(TOKENS, TOP_K)}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer, of_steps = torch.optim.AdamW(trained, 3e-3), []
    for _ in range(steps):
        loss = (module(x.to(dtype), **call).float() - goal).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        of_steps.append(loss.detach())
    return torch.stack(of_steps)


@each_format
def test_two_hundred_steps_are_those_over_decoded_weights(format: WeightOnly) -> None:
    module = fusible.quantize_(layer(64, 64), format)
    expected = losses(decoded(module, torch.float32), 64, torch.float32)
    assert expected[-1] < 0.5 * expected[0]
    torch.testing.assert_close(losses(module, 64, torch.float32), expected, rtol=1e-3, atol=1e-4)


def test_two_hundred_steps_over_fp8_differ_by_its_rounding_of_rows() -> None:
    module = fusible.quantize_(layer(256, 128, (8, 8), torch.bfloat16), Float8Block())
    expected = losses(decoded(module, torch.bfloat16), 256, torch.bfloat16)
    found = losses(module, 256, torch.bfloat16)
    assert expected[-1] < 0.5 * expected[0]
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.01)


def test_what_a_forward_keeps_is_the_bytes() -> None:
    module = fusible.quantize_(layer(128, 192), MXFP4())
    kept: list[Tensor] = []
    x = torch.randn(TOKENS, 128, requires_grad=True)
    index, weights = torch.randint(0, E, (TOKENS, TOP_K)), torch.rand(TOKENS, TOP_K)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x, top_k_index=index, top_k_weights=weights)
    own = {parameter.data_ptr() for parameter in module.parameters()} | {b.data_ptr() for b in module.buffers()}
    others = [tensor for tensor in kept if tensor.data_ptr() not in own]
    assert {1} == {t.element_size() for t in kept if t.dim() == 3 and t.shape[1:] == (384, 64)}
    assert max(tensor.numel() for tensor in others) <= TOKENS * TOP_K * 384


def test_compiled_code_keeps_no_decoded_weight() -> None:
    module = fusible.quantize_(layer(128, 192), NF4())
    expected = results(copy.deepcopy(module), 128, torch.float32)
    kept: list[Tensor] = []

    def forward(graph: Any, inputs: Any) -> Any:
        nodes = graph.graph.find_nodes(op="output")[0].args[0]
        kept.extend(node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), Tensor))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    actual = results(torch.compile(module, backend=backend, fullgraph=True), 128, torch.float32)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name.removeprefix("_orig_mod.")])
    assert kept
    assert not [t.shape for t in kept if t.is_floating_point() and t.numel() >= E * 192 * 128]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    module = fusible.quantize_(layer(128, 64), Int4())
    expected = results(copy.deepcopy(module), 128, torch.float32)

    def run(x: Tensor, **call: Tensor) -> Tensor:
        function = lambda rows: module(rows, **call)  # noqa: E731
        y = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        return y

    run.named_parameters = module.named_parameters  # type: ignore[attr-defined]
    for name, value in results(run, 128, torch.float32).items():
        assert torch.equal(value, expected[name]), name


@each_format
def test_state_dicts_keep_the_bytes_and_the_adapters(format: WeightOnly) -> None:
    module, again = (fusible.quantize_(layer(128, 64), format) for _ in range(2))
    for parameter in again.parameters():
        parameter.data.zero_()
    again.load_state_dict(module.state_dict())
    a, b = (results(each, 128, torch.float32)["y"] for each in (module, again))
    assert torch.equal(a, b)


def test_explain_says_what_is_decoded() -> None:
    module = fusible.quantize_(layer(128, 64), NF4())
    call = {"top_k_index": torch.zeros(4, 2, dtype=torch.long), "top_k_weights": torch.rand(4, 2)}
    text = str(explain(module, torch.randn(4, 128), **call))
    assert "RoutedLoRA" in text
    assert "torch (decode NF4)" in text


def test_what_is_refused() -> None:
    module = fusible.quantize_(layer(128, 64), MXFP4())
    call = {"top_k_index": torch.zeros(4, 2, dtype=torch.long), "top_k_weights": torch.rand(4, 2)}
    with pytest.raises(ArgumentError, match="x: expected bfloat16 or float32, to which the weight is decoded, got"):
        module(torch.randn(4, 128).half(), **call)
    with pytest.raises(ArgumentError, match="adapters need Float8Block, or a weight-only format"):
        fusible.quantize_(layer(128, 64), Float8Row())
    module.get_submodule("1").weight_scale_inv = module.get_submodule("1").weight_scale_inv[:, :-1]
    with pytest.raises(ArgumentError, match="weight_scale_inv: expected"):
        module(torch.randn(4, 128), **call)
