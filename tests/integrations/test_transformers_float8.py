"""FP8 experts of the installed transformers on our containers, against the class's own forward."""

from __future__ import annotations

import types
import warnings

import pytest
import torch
from torch import nn
from transformers.integrations.moe import use_experts_implementation

import fusible
from fusible.integrations import transformers  # noqa: F401  registers
from fusible.integrations.hugging_face import float8_experts
from fusible.ops.formats import reference
from fusible.ops.formats.copies import Weight

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
E, H, F, TOP_K = 4, 160, 128, 2


def dequantised(weight, scales):
    return reference.dequantize_weight(Weight(weight, scales.float()), 1)


def linear(rows, weight, scales, *_):
    """The promise of ``fp8_linear``, whose kernels need a GPU: rows in blocks of 128 times the weight."""
    is_power_of_two = scales.dtype != torch.float32
    rows = reference.dequantize_rows(reference.quantize_rows(rows, is_power_of_two))
    return (rows @ dequantised(weight[None], scales[None])[0].mT).bfloat16()


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(fp8, "fp8_linear", linear)


def experts(scale_fmt="float", intermediate=F, **config):
    """Filled with the bytes of random weights."""
    values = {
        "hidden_size": H,
        "moe_intermediate_size": intermediate,
        "num_experts": E,
        "hidden_act": "silu",
        "_experts_implementation": "eager",
    }
    made = fp8.FP8Experts(
        types.SimpleNamespace(**{"_experts_implementation": "eager", **values, **config}),
        block_size=(128, 128),
        scale_fmt=scale_fmt,
    )
    made.is_transposed, made.is_concatenated, made._is_expert_parallel = False, True, False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            weight, scales = getattr(made, name), getattr(made, f"{name}_scale_inv")
            values = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
            copies = reference.quantize_weight(values, 1, scale_fmt == "ue8m0")
            weight.copy_(copies.data)
            scales.copy_(copies.scales)
    return made


def inputs(tokens=33):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    weights, index = torch.rand(tokens, E, generator=generator).topk(TOP_K)
    return x, index, weights


def forward():
    return fp8.FP8ExpertsInterface().get_interface("fusible", None)


def far(a, b):
    a, b = a.detach().float(), b.detach().float()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("config", [{}, {"swiglu_limit": 0.5}, {"swiglu_limit": 0.5, "swiglu_alpha": 1.5}])
def test_experts_give_what_their_class_gives(scale_fmt, config):
    module, tensors = experts(scale_fmt, **config), inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = forward()(module, *tensors)

    assert y.dtype == torch.bfloat16
    assert far(y, module(*tensors)) < 0.02


def test_nothing_is_copied_and_weights_that_are_written_are_seen():
    module, tensors = experts(), inputs()
    forward()(module, *tensors)
    container = float8_experts.built_of(module).container
    assert container.fc1.weight.data_ptr() == module.gate_up_proj.data_ptr()
    assert container.fc1.weight_scale_inv.data_ptr() == module.gate_up_proj_scale_inv.data_ptr()
    with torch.no_grad():
        module.down_proj_scale_inv.mul_(-2)

    assert far(forward()(module, *tensors), module(*tensors)) < 0.02
    assert float8_experts.built_of(module).container is container


def test_scales_of_8_bits_that_are_written_are_seen():
    module, tensors = experts("ue8m0"), inputs()
    before = forward()(module, *tensors)
    with torch.no_grad():
        module.down_proj_scale_inv.copy_(module.down_proj_scale_inv.float() * 4)

    assert torch.equal(forward()(module, *tensors), before * 4)


def test_parameters_that_are_replaced_are_seen():
    module, tensors = experts(), inputs()
    before = forward()(module, *tensors)
    module.down_proj_scale_inv = nn.Parameter(module.down_proj_scale_inv.detach() * 2)

    assert torch.equal(forward()(module, *tensors), before * 2)


def exactly(module, x, index, weights):
    """The experts on dequantised weights, without any quantisation of rows."""
    up = dequantised(module.gate_up_proj.detach(), module.gate_up_proj_scale_inv.detach())
    down = dequantised(module.down_proj.detach(), module.down_proj_scale_inv.detach())
    total = 0
    for slot in range(TOP_K):
        ids = index[:, slot]
        gate, value = (up[ids] @ x.float().unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        hidden = nn.functional.silu(gate) * value
        total = total + (down[ids] @ hidden.unsqueeze(-1)).squeeze(-1) * weights[:, slot, None]
    return total


def test_gradients_of_tokens_and_routing_weights_flow():
    module, (x, index, weights) = experts(), inputs()
    leaves = [(x.clone().requires_grad_(), weights.clone().requires_grad_()) for _ in range(2)]
    for run, (leaf, factors) in zip((forward(), exactly), leaves, strict=True):
        run(module, leaf, index, factors).sum().backward()

    for ours, theirs in zip(*leaves, strict=True):
        assert far(ours.grad, theirs.grad) < 0.1


def test_ids_of_no_expert_add_nothing():
    module, (x, index, weights) = experts(), inputs()
    absent = index.clone()
    absent[:, 1] = E
    y = forward()(module, x, absent, weights)

    assert far(y, forward()(module, x, index[:, :1], weights[:, :1])) < 1e-2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"activation_scheme": "static"}, "its activation_scheme is 'static'"),
        ({"block_size": (64, 128)}, r"its block_size is \(64, 128\)"),
        ({"block_size": None}, "its block_size is None"),
        ({"gate_up_proj": nn.Parameter(torch.zeros(E, 2 * F, H))}, "its weights are torch.float32"),
        ({"down_proj_scale_inv": nn.Parameter(torch.zeros(E, 3, 3))}, r"its scales have shape \[4, 3, 3\]"),
    ],
)
def test_what_does_not_fit_runs_through_stock_with_a_warning(monkeypatch, change, why):
    module = experts()
    for name, value in change.items():
        setattr(module, name, value)
    monkeypatch.setattr(fp8, "fp8_grouped_mm_experts_forward", lambda self, x, *_: x + 1)
    x, index, weights = inputs()
    with pytest.warns(UserWarning, match=why):
        assert torch.equal(forward()(module, x, index, weights), x + 1)


@pytest.mark.parametrize("name", ["gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"])
def test_tensors_that_are_missing_are_named(name):
    module = experts()
    setattr(module, name, None)

    with pytest.raises(fusible.ArgumentError, match=f"^FP8Experts: {name} is None; bytes have no meaning"):
        forward()(module, *inputs())


def test_a_model_is_explained_once_its_experts_have_run():
    kind = use_experts_implementation(experts_class=fp8.FP8Experts, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    module = experts(_experts_implementation="fusible")
    module.__class__ = kind
    before = str(fusible.explain(module))
    module(*inputs())

    assert "no call yet" in before
    assert "RoutedMLP" in str(fusible.explain(module))


def test_the_experts_are_one_fused_step():
    module, (x, index, weights) = experts(), inputs()
    explanation = float8_experts.built_of(module).container.explain(x, top_k_index=index, top_k_weights=weights)

    assert [step.name for step in explanation.steps] == ["RoutedMLP"]


class Layer(nn.Module):
    """FP8 experts as a model calls them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *tensors):
        return forward()(self.inner, *tensors)


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_compiled_experts_give_the_same_bits(scale_fmt):
    torch._dynamo.reset()
    layer, tensors = Layer(experts(scale_fmt)), inputs()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)
        expected = layer(*tensors)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(*tensors), expected)
        layer.inner.down_proj.data.zero_()
        assert not compiled(*tensors).any()


def test_gradients_of_compiled_experts_are_the_same():
    torch._dynamo.reset()
    layer, (x, index, weights) = Layer(experts()), inputs()
    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        function(leaves[0], index, leaves[1]).float().square().sum().backward()
        results.append([leaf.grad for leaf in leaves])

    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
