"""Digests of every result by name, to check whether two trees compute the same bits.

``python -m fusible.benchmarks.bits OUT.json`` runs each op, fusion, recipe and backend with fixed seeds, on the GPU if
there is one, and writes the SHA-256 of every output, gradient, ``main_grad`` and buffer. ``PYTHONPATH`` names the tree.
``python -m fusible.benchmarks.bits compare A.json B.json`` prints what differs, and exits with 1 if anything does. Only
files from one device and one torch can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusible
from fusible import GroupedLinear, Pointwise, QuantizedGroupedTensor, Sequential, ep, interleaved

EXPERTS, HIDDEN, FFN, ROWS, TOKENS, TOP_K = 4, 256, 128, 208, 80, 2
SIZES = (130, 0, 37, 32)  # 9 rows are in the tail
CALLS = 3 if torch.cuda.is_available() else 2  # on a GPU the later ones are replayed
BF16 = torch.bfloat16
BACKENDS = ("auto", "hopper", "grouped_mm", "loop")
RECIPES: dict[str, Any] = {
    "none": None,
    "block": fusible.Float8Block(),
    "block-float32": fusible.Float8Block(scales="float32"),
    "block-e5m2": fusible.Float8Block(gradient="e5m2"),
    "block-wgrad": fusible.Float8Block(wgrad="bfloat16"),
    "row": fusible.Float8Row(),
    "row-float32": fusible.Float8Row(scales="float32"),
    "row-fast": fusible.Float8Row(fast_accumulation=True),
    "row-e5m2-wgrad": fusible.Float8Row(gradient="e5m2", wgrad="bfloat16"),
    "tensor": fusible.Float8Tensor(),
    "tensor-e5m2": fusible.Float8Tensor(gradient="e5m2"),
    "tensor-wgrad": fusible.Float8Tensor(wgrad="bfloat16"),
    "delayed": fusible.Float8Tensor(delayed=fusible.Delayed(history=2, margin=1)),
    "delayed-power": fusible.Float8Tensor(scales="power_of_two", delayed=fusible.Delayed(history=3)),
    "mxfp8": fusible.MXFP8(),
    "mxfp8-fast": fusible.MXFP8(compute="fast"),
    "nvfp4": fusible.NVFP4(),
    "nvfp4-plain": fusible.NVFP4(stochastic_rounding=False, hadamard=False),
    "mxfp4": fusible.MXFP4(),
}
FEW = ("none", "block", "row", "tensor", "nvfp4")
KEPT = [name for name, recipe in RECIPES.items() if recipe is not None and not name.startswith("delayed")]

Results = dict[str, Tensor]


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=7.0)) * (up.clamp(-7.0, 7.0) + 1)


def _capped(x: Tensor, cap: Tensor) -> Tensor:
    return cap * torch.tanh(x / cap)


ACTIVATIONS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "swiglu": lambda: [fusible.SwiGLU()],
    "interleaved": lambda: [fusible.SwiGLU(layout=interleaved(1))],
    "blocks": lambda: [fusible.GEGLU("tanh", layout=interleaved(32))],
    "clamped": lambda: [fusible.ClampedSwiGLU()],
    "scaled": lambda: [fusible.ScaledSwiGLU()],
    "gelu": lambda: [fusible.Activation("gelu")],
    "relu2-scaled": lambda: [fusible.ScaledActivation("relu2")],
    "function": lambda: [Pointwise(_clamped, halves="concat")],
    "function-rows": lambda: [Pointwise(lambda gate, up, scales: F.mish(gate) * up * scales, halves="concat")],
    "function-columns": lambda: [
        Pointwise(lambda x, beta: x * torch.sigmoid(beta * x), columns={"beta": torch.ones(EXPERTS, FFN)})
    ],
    "function-constant": lambda: [Pointwise(_capped, constants={"cap": 3.0})],
    "chain": lambda: [fusible.Bias(FFN, dtype=BF16), fusible.Activation("silu"), fusible.ConstantScale(0.5)],
}
GATED = ("swiglu", "interleaved", "blocks", "clamped", "scaled", "function", "function-rows")
SCALED = ("scaled", "relu2-scaled", "function-rows")
LINEARS: dict[str, dict[str, Any]] = {
    "stacked": {},
    "without-bias": {"bias": False},
    "per-expert": {"single_grouped_weight": False, "single_grouped_bias": False},
    "transposed": {"transposed_weight": True},
    "main-grad": {"accumulate_into_main_grad": True},
    "main-grad-per-expert": {"accumulate_into_main_grad": True, "single_grouped_weight": False, "bias": False},
    "delayed-wgrad": {"delay_wgrad_compute": True},
    "delayed-main-grad": {"delay_wgrad_compute": True, "accumulate_into_main_grad": True, "bias": False},
}


class Bench(NamedTuple):
    """Makes inputs and layers that are the same on every device."""

    device: torch.device

    def tensor(self, *shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
        """Normal random numbers from a seed."""
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return numbers.to(dtype).to(self.device)

    def sizes(self) -> dict[str, Tensor]:
        return {"split_sizes": torch.tensor(SIZES, device=self.device)}

    def choices(self) -> dict[str, Tensor]:
        """The experts of each token and their weights; one slot has no expert."""
        ids = torch.randint(EXPERTS, (TOKENS, TOP_K), generator=torch.Generator().manual_seed(3))
        ids[5, 1] = -1
        weights = self.tensor(TOKENS, TOP_K, seed=4, dtype=torch.float32).abs()
        return {"top_k_index": ids.to(self.device), "top_k_weights": weights}

    def layer(self, *ops: nn.Module) -> Sequential:
        """A container on the device whose parameters are drawn on the host."""
        model = Sequential(*ops)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        return model.to(self.device)

    def linear(self, recipe: Any = None, dtype: torch.dtype = BF16, **options: Any) -> Sequential:
        """One grouped linear."""
        return self.layer(GroupedLinear(EXPERTS, HIDDEN, FFN, recipe=recipe, dtype=dtype, **options))

    def experts(self, act: str = "swiglu", recipe: Any = None, dtype: torch.dtype = BF16, **options: Any) -> Sequential:
        """Linear, activation, linear."""
        width = 2 * FFN if act in GATED else FFN
        options = {"recipe": recipe, "dtype": dtype, **options}
        first, second = GroupedLinear(EXPERTS, HIDDEN, width, **options), GroupedLinear(EXPERTS, FFN, HIDDEN, **options)
        return self.layer(first, *ACTIVATIONS[act](), second)

    def routed(self, act: str = "swiglu", scale: bool = True, recipe: Any = None, **options: Any) -> Sequential:
        """The experts behind a dispatch, from tokens to tokens."""
        between = [fusible.Scale()] if scale else []
        experts = self.experts(act, recipe, **options)
        return self.layer(fusible.Dispatch(EXPERTS), *experts, *between, fusible.Combine())

    def lora(self, frozen: bool = False) -> Sequential:
        """The experts with adapters; the weights may be frozen."""
        first = fusible.GroupedLoRA(EXPERTS, HIDDEN, 2 * FFN, 8, dtype=BF16)
        second = fusible.GroupedLoRA(EXPERTS, FFN, HIDDEN, 8, dtype=BF16)
        ends = fusible.Scale(), fusible.Combine()
        model = self.layer(fusible.Dispatch(EXPERTS), first, fusible.SwiGLU(), second, *ends)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or "lora" in name)
        return model

    def ranks(self, recipe: Any) -> Sequential:
        """The experts between the dispatch and combine of a group with one rank."""
        sizes: dict[str, Any] = {"num_experts": EXPERTS, "max_tokens": TOKENS, "top_k": TOP_K, "hidden": HIDDEN}
        group = ep.Group(**sizes, capacity="worst")
        experts = self.experts("scaled", recipe, bias=False)
        return self.layer(ep.EPDispatch(group), *experts, ep.EPCombine(group))


# ---- calls


Build = Callable[[], nn.Module]


def training(bench: Bench, build: Build, x: Tensor, keywords: Mapping[str, Tensor], **switches: Any) -> Results:
    """Outputs and gradients of several calls with different inputs, and ``main_grad`` and buffers after them."""
    results: Results = {}
    model = build()
    for parameter in model.parameters():
        if _to_main_grad(model, parameter):
            parameter.main_grad = torch.full_like(parameter, 0.5, dtype=torch.float32)  # type: ignore[attr-defined]
    for call in range(CALLS):
        torch.manual_seed(call)
        results |= {f"{call}.{name}": value for name, value in _step(bench, model, x * (1 + call), keywords, switches)}
    return results | {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}


def _step(
    bench: Bench, model: nn.Module, x: Tensor, keywords: Mapping[str, Tensor], switches: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    model.zero_grad()
    leaves = {name: _leaf(value) for name, value in {"x": x, **keywords}.items()}
    with fusible.config(**switches):
        outputs = model(leaves["x"], **{name: leaf for name, leaf in leaves.items() if name != "x"})
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    floats = [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]
    torch.autograd.backward(floats, [bench.tensor(*y.shape, seed=7 + i, dtype=y.dtype) for i, y in enumerate(floats)])
    for module in model.modules():
        if getattr(module, "delay_wgrad_compute", False):
            module.backward_dw()  # type: ignore[operator]
    yield from ((f"y{i}", y.detach().clone()) for i, y in enumerate(outputs) if isinstance(y, Tensor))
    yield from ((f"grad.{name}", leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None)
    for name, parameter in model.named_parameters():
        if (total := getattr(parameter, "main_grad", None)) is not None:
            yield f"main_grad.{name}", total.clone()
        elif parameter.grad is not None:
            yield f"grad.{name}", parameter.grad.clone()


def _leaf(value: Tensor) -> Tensor:
    leaf = value.detach().clone()
    return leaf.requires_grad_() if value.is_floating_point() else leaf


def _to_main_grad(model: nn.Module, parameter: nn.Parameter) -> bool:
    owners = [m for m in model.modules() if any(p is parameter for p in m.parameters(recurse=False))]
    is_weight = any(p is parameter and "weight" in n for m in owners for n, p in m.named_parameters(recurse=False))
    return is_weight and any(getattr(m, "accumulate_into_main_grad", False) for m in owners)


def inference(build: Build, x: Tensor, keywords: Mapping[str, Tensor], **switches: Any) -> Results:
    """Outputs of several calls without gradients."""
    results: Results = {}
    model = build()
    with torch.no_grad(), fusible.config(**switches):
        for call in range(CALLS):
            results[f"{call}.y"] = model(x * (1 + call), **keywords).clone()
    return results


# ---- cases


class BitsCase(NamedTuple):
    """A name and a function that computes results."""

    name: str
    run: Callable[[], Results]


def linears(bench: Bench) -> Iterator[BitsCase]:
    """A grouped linear: each form of its parameters under each recipe, 16-bit and float32 products by each backend."""
    x, sizes = bench.tensor(ROWS, HIDDEN), bench.sizes()
    few_rows = {"split_sizes": torch.tensor((4, 0, 3, 2), device=bench.device)}
    scale = {"bias_scale": bench.tensor(ROWS, seed=5)}
    for name, recipe in RECIPES.items():
        for form, options in LINEARS.items():
            build = partial(bench.linear, recipe=recipe, **options)
            yield BitsCase(f"linear.{name}.{form}", partial(training, bench, build, x, sizes))
        build = partial(bench.linear, recipe=recipe)
        yield BitsCase(f"linear.{name}.inference", partial(inference, build, x, sizes))
        yield BitsCase(f"linear.{name}.few-rows", partial(training, bench, build, x[:9], few_rows))
        yield BitsCase(f"linear.{name}.config", partial(training, bench, bench.linear, x, sizes, recipe=recipe))
    for name in FEW:
        for dtype in (torch.float32, torch.float16):
            build = partial(bench.linear, recipe=RECIPES[name], dtype=dtype)
            yield BitsCase(f"linear.{name}.{dtype}", partial(training, bench, build, x.to(dtype), sizes))
        build = partial(bench.linear, recipe=RECIPES[name], scale_bias=True)
        yield BitsCase(f"linear.{name}.bias-scale", partial(training, bench, build, x, {**sizes, **scale}))
        yield BitsCase(f"linear.{name}.buffers", partial(_with_buffers, bench, RECIPES[name]))
        for backend, dtype in itertools.product(BACKENDS, (BF16, torch.float32)):
            build = partial(bench.linear, recipe=RECIPES[name], dtype=dtype)
            run = partial(training, bench, build, x.to(dtype), sizes, backend=backend)
            yield BitsCase(f"linear.{name}.{backend}.{dtype}", run)


def _with_buffers(bench: Bench, recipe: Any) -> Results:
    """Results in buffers of the caller, whose tails stay unchanged."""
    model = bench.linear(recipe=recipe)
    y, dx = torch.full((ROWS, FFN), 3.0), torch.full((ROWS, HIDDEN), 5.0)
    lent = {"output": y.to(bench.device, BF16), "grad_input": dx.to(bench.device, BF16)}
    model(_leaf(bench.tensor(ROWS, HIDDEN)), **bench.sizes(), **lent).backward(bench.tensor(ROWS, FFN, seed=7))
    return lent


def experts(bench: Bench) -> Iterator[BitsCase]:
    """Experts of each activation under some recipes, and one activation under each recipe, fused and op by op."""
    x, sizes = bench.tensor(ROWS, HIDDEN), bench.sizes()
    scale = {"scales": bench.tensor(ROWS, seed=5, dtype=torch.float32).abs()}
    apart = frozenset({"GroupedMLP", "GroupedLinearGLU", "GroupedLinearChain", "PointwiseChain", "GLUScale"})
    for act, name, bias in itertools.product(ACTIVATIONS, FEW[:4], (False, True)):
        keywords = {**sizes, **scale} if act in SCALED else sizes
        build = partial(bench.experts, act, RECIPES[name], bias=bias)
        yield BitsCase(f"experts.{name}.{act}.{bias}", partial(training, bench, build, x, keywords))
    for name, recipe in RECIPES.items():
        for form, options in LINEARS.items():
            build = partial(bench.experts, recipe=recipe, **options)
            yield BitsCase(f"experts.{name}.{form}", partial(training, bench, build, x, sizes))
        build = partial(bench.experts, recipe=recipe)
        yield BitsCase(f"experts.{name}.apart", partial(training, bench, build, x, sizes, disable_fusions=apart))
        yield BitsCase(f"experts.{name}.recompute", partial(training, bench, build, x, sizes, recompute=True))
        yield BitsCase(f"experts.{name}.inference", partial(inference, build, x, sizes))
    for name, backend in itertools.product(FEW, BACKENDS):
        build = partial(bench.experts, recipe=RECIPES[name])
        yield BitsCase(f"experts.{name}.{backend}", partial(training, bench, build, x, sizes, backend=backend))


def routed(bench: Bench) -> Iterator[BitsCase]:
    """Routed layers with and without adapters: as ops, as a function, and as a group with one rank."""
    x, choices = bench.tensor(TOKENS, HIDDEN), bench.choices()
    for name, recipe in RECIPES.items():
        build = partial(bench.routed, recipe=recipe)
        yield BitsCase(f"routed.{name}", partial(training, bench, build, x, choices))
        yield BitsCase(f"routed.{name}.inference", partial(inference, build, x, choices))
    for act, name in itertools.product(("interleaved", "scaled", "function", "chain"), FEW[:4]):
        build = partial(bench.routed, act, act not in SCALED, RECIPES[name], bias=False)
        yield BitsCase(f"routed.{name}.{act}", partial(training, bench, build, x, choices))
    for backend in BACKENDS:
        yield BitsCase(f"routed.{backend}", partial(training, bench, bench.routed, x, choices, backend=backend))
        yield BitsCase(f"routed-lora.{backend}", partial(training, bench, bench.lora, x, choices, backend=backend))
    yield BitsCase("routed.recompute", partial(training, bench, bench.routed, x, choices, recompute=True))
    yield BitsCase("routed-lora.frozen", partial(training, bench, partial(bench.lora, frozen=True), x, choices))
    yield BitsCase("routed-experts", partial(_routed_experts, bench))
    yield BitsCase("moe", partial(training, bench, partial(_OutputOf, bench), x, {}))
    for name in ("none", "block", "tensor"):
        yield BitsCase(f"ranks.{name}", partial(training, bench, partial(bench.ranks, RECIPES[name]), x, choices))


class _OutputOf(nn.Module):
    """Wraps a whole layer with its router, and returns only the output of its record."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        torch.manual_seed(1)
        moe = fusible.MoE(HIDDEN, FFN, EXPERTS, TOP_K, shared_ffn=FFN, dtype=BF16)
        self.layer = moe.to(bench.device)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x).y
        return y


def _routed_experts(bench: Bench) -> Results:
    """The experts as a function of the caller's weights, and its gradients."""
    leaves: dict[str, Any] = {
        "x": _leaf(bench.tensor(TOKENS, HIDDEN)),
        "w_up": _leaf(bench.tensor(EXPERTS, 2 * FFN, HIDDEN, seed=1) / 16),
        "w_down": _leaf(bench.tensor(EXPERTS, HIDDEN, FFN, seed=2) / 16),
    }
    y: Any = fusible.functional.routed_experts(**leaves, **dict[str, Any](bench.choices()))
    y.backward(bench.tensor(*y.shape, seed=7))
    return {"y": y, **{f"grad.{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


def chains(bench: Bench) -> Iterator[BitsCase]:
    """Linears with the ops fused behind them, pointwise ops alone and in chains, adapters, and a plain linear."""
    x, sizes, pairs = bench.tensor(ROWS, HIDDEN), bench.sizes(), bench.tensor(ROWS, 2 * FFN)
    rows = {"scales": bench.tensor(ROWS, seed=5, dtype=torch.float32)}
    residual = {"extra": bench.tensor(ROWS, FFN, seed=6)}
    biases = fusible.Bias(FFN, dtype=BF16), fusible.Scale(), fusible.ConstantScale(0.5)
    for name in FEW:
        narrow = partial(GroupedLinear, EXPERTS, HIDDEN, FFN, dtype=BF16, recipe=RECIPES[name])
        wide = partial(GroupedLinear, EXPERTS, HIDDEN, 2 * FFN, dtype=BF16, recipe=RECIPES[name])
        yield _chain(bench, f"{name}.scaled", [narrow(), *biases], x, {**sizes, **rows})
        yield _chain(bench, f"{name}.glu", [wide(), fusible.SwiGLU()], x, sizes)
        yield _chain(bench, f"{name}.function", [wide(), *ACTIVATIONS["function"]()], x, sizes)
        yield _chain(bench, f"{name}.residual", [narrow(), fusible.AddExtraInput("extra")], x, {**sizes, **residual})
    branch = fusible.MakeExtraOutput("branch", output_to_caller=True)
    yield _chain(bench, "branch", [branch, fusible.Identity(), fusible.AddExtraInput("branch")], x, {})
    yield _chain(bench, "glu-scale", [fusible.SwiGLU(), fusible.Scale()], pairs, rows)
    yield _chain(bench, "linear", [fusible.Linear(HIDDEN, FFN, dtype=BF16)], x, {})
    for rank in (0, 16):
        adapted = fusible.GroupedLoRA(EXPERTS, HIDDEN, FFN, rank, dtype=BF16)
        transposed = fusible.GroupedLoRA(EXPERTS, HIDDEN, FFN, rank, dtype=BF16, bias=False, transposed_weight=True)
        yield _chain(bench, f"lora.{rank}", [adapted], x, sizes)
        yield _chain(bench, f"lora.{rank}.transposed", [transposed], x, sizes)
    for act in ACTIVATIONS:
        keywords = {**(rows if act in SCALED else {}), **(sizes if act == "function-columns" else {})}
        yield _chain(bench, act, ACTIVATIONS[act](), pairs if act in GATED else pairs[:, :FFN], keywords)


def _chain(bench: Bench, name: str, ops: Sequence[nn.Module], x: Tensor, keywords: Mapping[str, Tensor]) -> BitsCase:
    return BitsCase(f"chain.{name}", partial(training, bench, partial(bench.layer, *ops), x, keywords))


def kept_weights(bench: Bench) -> Iterator[BitsCase]:
    """Weights that stay quantised: stored bytes, results, gradients of x; and weights quantised within a block."""
    for name in KEPT:
        for form in ("stacked", "transposed"):
            build = partial(bench.experts, recipe=None, **LINEARS[form])
            yield BitsCase(f"kept.{name}.{form}", partial(_kept, bench, build, RECIPES[name]))
        yield BitsCase(f"kept.{name}.routed", partial(_kept, bench, bench.routed, RECIPES[name]))
    for name in RECIPES:
        yield BitsCase(f"same-weights.{name}", partial(_same_weights, bench, RECIPES[name]))


def _kept(bench: Bench, build: Build, recipe: Any) -> Results:
    model = fusible.quantize_(build(), recipe)
    is_routed = any(isinstance(op, fusible.Dispatch) for op in model.children())
    x, keywords = (TOKENS, bench.choices()) if is_routed else (ROWS, bench.sizes())
    few = bench.tensor(9, HIDDEN), {"split_sizes": torch.tensor((4, 0, 3, 2), device=bench.device)}
    results = training(bench, lambda: model, bench.tensor(x, HIDDEN), keywords)
    results |= {} if is_routed else {f"few.{n}": y for n, y in inference(lambda: model, *few).items()}
    return results | {f"state.{name}": value for name, value in model.state_dict().items()}


def _same_weights(bench: Bench, recipe: Any) -> Results:
    model = bench.experts(recipe=recipe)
    with fusible.same_weights():
        return training(bench, lambda: model, bench.tensor(ROWS, HIDDEN), bench.sizes())


def tensors(bench: Bench) -> Iterator[BitsCase]:
    """Quantised tensors: tokens, gradients and weights, of each dtype; their bytes and values."""
    for name, dtype in itertools.product(KEPT, (BF16, torch.float16, torch.float32)):
        if name != "mxfp4":
            yield BitsCase(f"tensor.{name}.{dtype}", partial(_quantised_tokens, bench, RECIPES[name], dtype))
        yield BitsCase(f"tensor.{name}.{dtype}.weights", partial(_quantised_weights, bench, RECIPES[name], dtype))


def _quantised_tokens(bench: Bench, recipe: Any, dtype: torch.dtype) -> Results:
    """Bytes and values of quantised tokens; values alone for the column copy, whose unused blocks are not written."""
    results: Results = {}
    x, sizes = bench.tensor(sum(SIZES), HIDDEN, dtype=dtype), bench.sizes()["split_sizes"]
    for is_gradient in (False, True):
        torch.manual_seed(2)
        quantised = QuantizedGroupedTensor.quantize(x, recipe, sizes, columnwise=True, is_gradient=is_gradient)
        rows = {} if quantised.rowwise is None else {"bytes": quantised.rowwise}
        results |= {f"{is_gradient}.{name}": value for name, value in {**rows, **_values(quantised)}.items()}
    return results


def _quantised_weights(bench: Bench, recipe: Any, dtype: torch.dtype) -> Results:
    results: Results = {}
    for count, both in itertools.product((1, 2), (False, True)):
        weights = bench.tensor(EXPERTS, 2 * FFN, HIDDEN, dtype=dtype)
        both = both and not isinstance(recipe, fusible.MXFP4)
        quantised = QuantizedGroupedTensor.quantize(weights, recipe, columnwise=both, halves=count)
        stored = {name: value for name, value in quantised.state().items() if isinstance(value, Tensor)}
        results |= {f"{count}.{both}.{name}": v for name, v in {**stored, **_values(quantised)}.items()}
    return results


def _values(quantised: QuantizedGroupedTensor) -> Results:
    copies = {False: quantised.rowwise, True: quantised.columnwise}
    wanted = [columnwise for columnwise, copy in copies.items() if copy is not None]
    return {f"values.{columnwise}": quantised.dequantize(torch.float32, columnwise=columnwise) for columnwise in wanted}


def products(bench: Bench) -> Iterator[BitsCase]:
    """``grouped_gemm`` in each layout, by each backend."""
    for layout, dtype, backend in itertools.product(("NT", "NN", "TN"), (BF16, torch.float32), BACKENDS):
        yield BitsCase(f"gemm.{layout}.{dtype}.{backend}", partial(_product, bench, layout, dtype, backend))


def _product(bench: Bench, layout: str, dtype: torch.dtype, backend: str) -> Results:
    """The product: plain, with factors and a bias, and accumulated; and its gradients."""
    b_shape = {"NT": (EXPERTS, FFN, HIDDEN), "NN": (EXPERTS, HIDDEN, FFN), "TN": (ROWS, FFN)}[layout]
    a, b = (_leaf(bench.tensor(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(((ROWS, HIDDEN), b_shape)))
    sizes, out_shape = bench.sizes()["split_sizes"], (EXPERTS, HIDDEN, FFN) if layout == "TN" else (ROWS, FFN)
    multiply: Callable[..., Any] = partial(fusible.grouped_gemm, a, b, sizes, layout=layout)
    alpha, bias = bench.tensor(EXPERTS, dtype=torch.float32), bench.tensor(EXPERTS, FFN, seed=4, dtype=dtype)
    with fusible.config(backend=backend):
        y = multiply()
        y.backward(bench.tensor(*y.shape, seed=7, dtype=dtype))
        results: dict[str, Any] = {"y": y, "grad.a": a.grad, "grad.b": b.grad, "alpha": multiply(alpha=alpha)}
        with torch.no_grad():
            results["sum"] = multiply(out=bench.tensor(*out_shape, seed=9, dtype=dtype), accumulate=True)
            results["float32"] = multiply(out=bench.tensor(*out_shape, seed=9, dtype=torch.float32), beta=0.5)
            if layout != "TN":
                results["bias"] = multiply(bias=bias, alpha=2.0)
    return results


# ---- digests


def digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and bytes."""
    host = tensor.detach().cpu().contiguous()
    content = host.reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{host.dtype} {list(host.shape)} ".encode() + content).hexdigest()


def digests(case: BitsCase) -> dict[str, str]:
    """The digest of each result by name; the type of the error if the backend refuses the case."""
    torch.manual_seed(0)
    try:
        return {f"{case.name}/{name}": digest(tensor) for name, tensor in case.run().items()}
    except (ValueError, RuntimeError, TypeError) as error:
        return {f"{case.name}/error": type(error).__name__}


PARTS = (linears, experts, routed, chains, kept_weights, tensors, products)


def record(path: Path, only: str) -> None:
    """Runs the cases whose names begin with ``only``, and writes their digests."""
    torch.set_num_threads(1)  # sums on the host depend on the number of threads
    bench = Bench(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    hashes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if bench.device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, init_method=f"file://{folder}/ranks", rank=0, world_size=1)
        for part in PARTS:
            begin = time.perf_counter()
            for case in part(bench):
                hashes |= digests(case) if case.name.startswith(only) else {}
            print(f"{part.__name__}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        torch.distributed.destroy_process_group()
    path.write_text(json.dumps(hashes, indent=0, sort_keys=True))
    errors = sum(name.endswith("/error") for name in hashes)
    print(f"{len(hashes)} digests, {errors} cases refused")


def compare(before: Path, after: Path) -> int:
    """Prints the names whose digests differ or that one file lacks; returns their number."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    different = [name for name in sorted(old | new) if old.get(name) != new.get(name)]
    for name in different:
        both = old.get(name, "missing"), new.get(name, "missing")
        print(name, *(value[:12] for value in both))
    print(f"{len(old | new)} names, {len(different)} differ")
    return len(different)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", help="OUT.json, or: compare A.json B.json")
    parser.add_argument("--only", default="", help="the beginning of names")
    options = parser.parse_args(arguments)
    if options.files[0] == "compare":
        if len(options.files) != 3:
            parser.error(f"compare: expected two files, got {len(options.files) - 1}")
        before, after = options.files[1:]
        return int(compare(Path(before), Path(after)) > 0)
    record(Path(options.files[0]), options.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
