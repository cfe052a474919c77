"""When weights are quantised: at every forward, once in a block, or for good."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusible
from fusible.ops.formats import reference

E, K, N = 3, 160, 272
RECIPE = fusible.Float8Block()
SIZES = torch.tensor([70, 0, 200])


def tokens(columns=K, seed=0):
    return torch.randn(300, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear(recipe=RECIPE, **options):
    torch.manual_seed(1)
    return fusible.GroupedLinear(E, K, N, dtype=torch.bfloat16, recipe=recipe, **options)


def call(op, x=None):
    return op(tokens() if x is None else x, split_sizes=SIZES)


@pytest.fixture
def count(monkeypatch):
    """The weights that were quantised so far."""
    from fusible.ops.quantized import operands as quantized_operands

    seen, quantize = [], quantized_operands.quantize_weight
    monkeypatch.setattr(quantized_operands, "quantize_weight", lambda w, **k: seen.append(w) or quantize(w, **k))
    return seen


@pytest.mark.parametrize("write", ["adamw", "data", "flat"])
def test_every_forward_sees_the_weight_as_it_is(write):
    """None of these counts in the version of a parameter, or need do so."""
    op = linear(bias=False)
    if write == "flat":
        flat = op.weight.detach().clone().flatten()
        op.weight.data = flat.view_as(op.weight)
    before = call(op).detach()
    if write == "adamw":
        optimizer = torch.optim.AdamW(op.parameters(), lr=0.1, fused=True)
        call(op).sum().backward()
        optimizer.step()
    elif write == "data":
        op.weight.data.copy_(op.weight.detach() * -2)
    else:
        flat.mul_(-2)
    fresh = linear(bias=False)
    fresh.weight.data.copy_(op.weight.detach())

    assert not torch.equal(call(op), before)
    assert torch.equal(call(op), call(fresh))


def test_a_block_quantises_once_and_sees_no_change(count):
    op = linear(bias=False)
    with fusible.same_weights():
        first = call(op)
        op.weight.data.mul_(-2)
        second = call(op)
        (first.sum() + second.sum()).backward()
    inside = len(count)
    after = call(op)

    assert inside == 1
    assert len(count) == 2
    assert torch.equal(first, second)
    assert torch.equal(after, call(linear(bias=False)) * -2)


def test_gradients_of_a_block_are_those_outside():
    op, other = linear(), linear()
    with fusible.same_weights():
        for seed in (0, 1):
            call(op, tokens(seed=seed)).sum().backward()
    for seed in (0, 1):
        call(other, tokens(seed=seed)).sum().backward()

    assert torch.equal(op.weight.grad, other.weight.grad)


def test_the_transposed_bytes_may_be_wanted_later(count):
    op = linear()
    with fusible.same_weights():
        with torch.no_grad():
            call(op)
        x = tokens().requires_grad_()
        call(op, x).sum().backward()
        call(op, x)
        with torch.no_grad():
            call(op)

    assert len(count) == 2


def test_blocks_nest_and_keep_other_switches(count):
    op = linear(None)
    with fusible.config(recipe=RECIPE), fusible.same_weights():
        with fusible.same_weights(), fusible.config(debug=True):
            call(op)
        call(op)

    assert len(count) == 1


def test_two_recipes_of_one_weight_have_their_own_copies():
    op = linear(None)
    with fusible.same_weights():
        results = []
        for scales in ("power_of_two", "float32"):
            with fusible.config(recipe=fusible.Float8Block(scales=scales)):
                results.append(call(op))
    with fusible.config(recipe=fusible.Float8Block(scales="float32")):
        expected = call(op)

    assert torch.equal(results[1], expected)
    assert not torch.equal(*results)


def mlp(recipe=RECIPE):
    torch.manual_seed(1)
    options = {"bias": False, "dtype": torch.bfloat16, "recipe": recipe}
    return fusible.Sequential(
        fusible.GroupedLinear(E, K, 2 * N, **options), fusible.SwiGLU(), fusible.GroupedLinear(E, N, K, **options)
    )


@pytest.mark.parametrize("options", [{}, {"transposed_weight": True}, {"bias": False}])
def test_a_weight_that_stays_quantised_gives_the_same_bits(options):
    op, x = linear(**options), tokens().requires_grad_()
    y = call(op, x)
    y.backward(tokens(N, seed=2))
    dx, x.grad = x.grad, None
    weight = op.matrices("weight").detach()
    stays = fusible.quantize_(copy.deepcopy(op), RECIPE)
    other = call(stays, x)
    other.backward(tokens(N, seed=2))
    data, scales, *_ = reference.quantize_weight(weight, 1, True)

    assert torch.equal(y, other)
    assert torch.equal(dx, x.grad)
    assert stays.weight.grad is None
    assert torch.equal(stays.weight.float(), data.float())
    assert torch.equal(stays.weight_scale_inv, scales)
    assert {*stays.state_dict()} == {*op.state_dict()} | {"weight_scale_inv"}


def test_experts_that_stay_quantised_are_fused():
    model = mlp()
    x = tokens().requires_grad_()
    y = model(x, split_sizes=SIZES)
    y.backward(tokens(seed=2))
    dx, x.grad = x.grad, None
    assert fusible.quantize_(model, RECIPE) is model
    explanation = model.explain(x, split_sizes=SIZES)
    other = model(x, split_sizes=SIZES)
    other.backward(tokens(seed=2))

    assert [step.name for step in explanation.steps] == ["GroupedMLP"]
    assert not any("weight" in line for line in explanation.steps[0].configurations)
    assert torch.equal(y, other)
    assert torch.equal(dx, x.grad)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("scales", [torch.ones(E, 3, 2), torch.ones(E, 2, 2).double(), None])
def test_scales_that_are_replaced_after_a_call_are_checked(lora, scales):
    kind = partial(fusible.GroupedLoRA, rank=4) if lora else fusible.GroupedLinear
    up, down = kind(E, K, N, dtype=torch.bfloat16), kind(E, N // 2, K, dtype=torch.bfloat16)
    parts = fusible.Dispatch(E), up, fusible.SwiGLU(), down, fusible.Scale(), fusible.Combine()
    model = fusible.quantize_(fusible.Sequential(*parts), RECIPE)
    routes = {"top_k_index": torch.arange(300)[:, None] % E, "top_k_weights": torch.ones(300, 1)}
    model(tokens(), **routes)
    down._buffers["weight_scale_inv"] = scales

    with pytest.raises(fusible.ArgumentError, match=r"op 3 .*weight_scale_inv"):
        model(tokens(), **routes)


def test_quantising_twice_changes_nothing():
    op = fusible.quantize_(linear(), RECIPE)
    weight = op.weight
    fusible.quantize_(op, fusible.Float8Block(scales="float32"))

    assert op.weight is weight
    assert op.recipe == RECIPE


def test_a_quantised_module_is_copied_saved_and_moved():
    op = fusible.quantize_(linear(), RECIPE)
    y, file = call(op), io.BytesIO()
    torch.save(op, file)
    file.seek(0)

    assert torch.equal(call(copy.deepcopy(op)), y)
    assert torch.equal(call(torch.load(file, weights_only=False)), y)
    assert torch.equal(call(op.to("cpu")), y)


def test_a_state_dict_of_either_kind_is_loaded():
    op = linear()
    stays, again, rounded = fusible.quantize_(linear(), RECIPE), fusible.quantize_(linear(), RECIPE), linear()
    with torch.no_grad():
        op.weight.mul_(3)
    stays.load_state_dict(op.state_dict())
    again.load_state_dict(stays.state_dict())
    with pytest.warns(UserWarning, match="weight is quantised and the module is not"):
        rounded.load_state_dict(stays.state_dict())

    assert torch.equal(call(stays), call(op))
    assert torch.equal(call(again), call(op))
    assert torch.equal(call(rounded), call(op))


@pytest.mark.parametrize(
    ("recipe", "options", "why"),
    [
        (fusible.Float8Tensor(delayed=fusible.Delayed()), {}, "has no earlier steps; use Float8Tensor()"),
        (fusible.NoRecipe(), {}, r"recipe must be one such as fusible.Float8Block\(\)"),
        ("float8", {}, r"recipe must be one such as fusible.Float8Block\(\)"),
    ],
)
def test_what_cannot_stay_quantised_says_why(recipe, options, why):
    op = linear(**options)
    with pytest.raises(fusible.ArgumentError, match=why):
        fusible.quantize_(op, recipe)

    assert not op.is_quantized


def test_a_quantised_weight_takes_rows_of_16_bits():
    op = fusible.quantize_(linear(), RECIPE)
    with pytest.raises(
        fusible.ArgumentError, match=r"x: the weight is quantised, and .* bfloat16 or float16, not float32; cast it"
    ):
        call(op, tokens().float())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(op, tokens().float()), call(op))
    op.to(torch.float32)
    with pytest.raises(fusible.ArgumentError, match="expected a frozen parameter of 8 bits"):
        call(op)


def test_compiled_code_reads_a_quantised_weight():
    op = fusible.quantize_(linear(), RECIPE)
    x = tokens().requires_grad_()
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)(x, split_sizes=SIZES)

    assert torch.equal(compiled, call(op, x))


class Elsewhere:
    """Another thread, which runs one function after the other, and waits for each."""

    def __enter__(self):
        self._pool = ThreadPoolExecutor(1)
        return self

    def __exit__(self, *_):
        self._pool.shutdown()

    def __call__(self, function, *args):
        return self._pool.submit(function, *args).result(60)


def in_a_block(op):
    with fusible.same_weights():
        return call(op).detach()


def test_a_block_of_another_thread_keeps_no_copies_of_this_one():
    op, block = linear(bias=False), fusible.same_weights()
    with Elsewhere() as other:
        other(block.__enter__)
        in_a_block(op)
        with torch.no_grad():
            op.weight.zero_()
        after = in_a_block(op)
        other(block.__exit__, None, None, None)

    assert not after.any()


def test_a_block_that_ends_in_another_thread_leaves_this_one_its_copies(count):
    op = linear(bias=False)
    with Elsewhere() as other, fusible.same_weights():
        call(op)
        other(in_a_block, linear(bias=False))
        with fusible.same_weights():
            call(op)
        other(in_a_block, linear(bias=False))
        call(op)

    assert len(count) == 3


def test_threads_that_share_a_weight_read_it_as_it_was_when_their_own_block_began():
    op = linear(bias=False)
    with Elsewhere() as other, fusible.same_weights():
        before = call(op).detach()
        with torch.no_grad():
            op.weight.zero_()
        assert not other(in_a_block, op).any()
        assert torch.equal(call(op), before)


@pytest.mark.parametrize("where", ["this thread", "another thread"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_after_its_block_leaves_nothing_to_the_next(where, reentrant):
    """Backwards on a GPU run in a thread of autograd's, which has no block; here another thread stands for it."""
    op, x = linear(bias=False), tokens().requires_grad_()
    with fusible.same_weights():
        y = checkpoint(lambda x: call(op, x), x, use_reentrant=reentrant)
    with Elsewhere() as other:
        (other if where == "another thread" else lambda f, *args: f(*args))(y.sum().backward)
        with torch.no_grad():
            op.weight.zero_()
        after = in_a_block(op)
        assert not after.any()
        assert not other(in_a_block, op).any()


def test_a_recomputation_in_a_thread_of_autograd_has_the_gradients_of_the_block():
    """It runs while the other thread, whose block it is, goes on; the weight stays, so the bits are the same."""
    results = []
    for block in (fusible.same_weights, nullcontext):
        op, x = linear(bias=False), tokens().requires_grad_()
        with Elsewhere() as other, block():
            y = checkpoint(lambda x, op=op: call(op, x), x, use_reentrant=False)
            done = other._pool.submit(y.sum().backward)
            with torch.no_grad():
                call(op)
            done.result(60)
        results.append((x.grad, op.weight.grad))

    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
