"""The contract of an op: its signature declares it, ``fwd`` and ``bwd`` are all that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fusible import (
    Activation,
    ArgumentError,
    Buffer,
    Composite,
    ConstantScale,
    DoubleBackwardError,
    FusedOp,
    GroupedLinear,
    Identity,
    Op,
    Scale,
    Sequential,
    SwiGLU,
    config,
)
from fusible.fuser import Keyword

if TYPE_CHECKING:
    from fusible import Buffer as LaterBuffer


class Affine(Op):
    """``x * factor + shift + bias``; counts how often each gradient is computed."""

    class Saved(NamedTuple):
        x: Tensor
        factor: Tensor

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))
        self.computed = []

    def fwd(self, x: Tensor, *, factor: Tensor, shift: float = 0.0) -> tuple[Tensor, Saved]:
        return x * factor + shift + self.bias, self.Saved(x, factor)

    def bwd(self, saved: Saved, dy: Tensor):
        return {
            "x": lambda: self._gradient("x", dy * saved.factor),
            "factor": lambda: self._gradient("factor", dy * saved.x),
            "bias": lambda: self._gradient("bias", dy.sum(0)),
        }

    def _gradient(self, name, value):
        self.computed.append(name)
        return value


class Square(Op):
    """Keeps its input, as nested as a ``Saved`` can be."""

    def fwd(self, x: Tensor):
        return x * x, ("note", {"deep": (x, None)}, [1])

    def bwd(self, saved, dy: Tensor):
        note, tree, numbers = saved
        assert (note, numbers) == ("note", [1])
        return {"x": 2 * dy * tree["deep"][0]}


class Returning(Op):
    """An op whose backward returns what it is told to."""

    def __init__(self, grads):
        super().__init__()
        self.grads = grads

    def fwd(self, x: Tensor):
        return x * 1, None

    def bwd(self, saved, dy: Tensor):
        return self.grads


def inputs(*shape, count=2):
    return [torch.randn(shape or (3, 4), requires_grad=True) for _ in range(count)]


# ------------------------------------------------------------------------------------------------- the signature


def test_keywords_are_the_keyword_only_parameters_of_fwd():
    class Everything(Op):
        def fwd(
            self,
            x: Tensor,
            *,
            tensor: Tensor,
            maybe: Tensor | None = None,
            out: Buffer | None = None,
            number: int = 3,
            needs_grad: frozenset[str],
            autocast_dtype: torch.dtype | None,
        ): ...
        def bwd(self, saved, dy): ...

    assert Everything.keywords == {
        "tensor": Keyword(required=True, tensor=True),
        "maybe": Keyword(required=False, tensor=True),
        "out": Keyword(required=False, tensor=False, buffer=True),
        "number": Keyword(required=False, tensor=False),
    }


def test_types_imported_for_checkers_only_are_read_by_name():
    class Later(Op):
        def fwd(self, x: Tensor, *, out: LaterBuffer | None = None, scales: Tensor | Unknown): ...  # noqa: F821
        def bwd(self, saved, dy): ...

    assert Later.keywords == {"out": Keyword(False, False, buffer=True), "scales": Keyword(True, True)}


def test_unannotated_keyword_is_a_tensor():
    class Plain(Op):
        def fwd(self, x, *, other): ...
        def bwd(self, saved, dy): ...

    assert Plain.keywords == {"other": Keyword(required=True, tensor=True)}


def test_subclass_inherits_keywords_and_reserved_names():
    class Child(Affine): ...

    assert Child.keywords == Affine.keywords


def test_override_with_var_keywords_takes_what_it_overrides():
    class Doubled(Scale):
        def fwd(self, x, **keywords):
            y, saved = super().fwd(x, **keywords)
            return 2 * y, saved

    x, scales = torch.randn(3, 4), torch.rand(3)

    assert torch.equal(Doubled()(x, scales=scales), 2 * Scale()(x, scales=scales))


def _two_inputs(self, x, other): ...
def _no_x(self, *, other): ...
def _other_name(self, y): ...
def _positional(self, x, *rest): ...
def _nothing(self): ...


@pytest.mark.parametrize("fwd", [_two_inputs, _no_x, _other_name, _positional, _nothing])
def test_bad_signature_raises_at_definition(fwd):
    with pytest.raises(TypeError, match=r"Bad\.fwd must be fwd\(self, x, \*, \.\.\.\)"):
        type("Bad", (Op,), {"fwd": fwd, "bwd": lambda self, saved, dy: {}})


def test_op_without_bwd_is_abstract():
    class Half(Op):
        def fwd(self, x): ...

    with pytest.raises(TypeError, match="bwd"):
        Half()


@pytest.mark.parametrize("model", [Affine(), Sequential(Affine())], ids=["alone", "container"])
def test_op_runs_alone_as_in_a_container(model):
    x, factor = inputs()
    y = model(x, factor=factor, shift=2.0)

    assert torch.equal(y, x * factor + 2.0 + 1)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"factor": torch.ones(4), "other": 1}, "Affine takes no 'other'; its keywords are: factor, shift"),
        ({"shift": 1.0}, "missing: Affine needs 'factor'"),
        ({"factor": None}, "missing: Affine needs 'factor'"),
    ],
)
def test_op_alone_refuses_other_keywords(keywords, message):
    with pytest.raises(ArgumentError, match=message):
        Affine()(torch.ones(3, 4), **keywords)


def test_op_alone_without_keywords_says_so():
    with pytest.raises(ArgumentError, match="Identity takes no 'scales'; its keywords are: none"):
        Identity()(torch.ones(2), scales=torch.ones(2))


def test_op_alone_refuses_what_is_no_tensor():
    with pytest.raises(ArgumentError, match="x: expected a tensor, got a list"):
        Identity()([1.0])


def test_check_names_the_op_that_runs_alone():
    with pytest.raises(ArgumentError, match=r"^Scale: scales: expected shape \[3\]"):
        Scale()(torch.ones(3, 4), scales=torch.ones(2))


def test_fwd_must_return_a_pair():
    class Single(Identity):
        def fwd(self, x):
            return x

    with pytest.raises(RuntimeError, match=r"Single\.fwd must return \(y, Saved\), it returned a Tensor"):
        Single()(torch.ones(2, 4))


def test_outputs_must_be_the_declared_ones():
    class Extra(Identity):
        extra_outputs = ("side",)

        def fwd(self, x):
            return {"y": x, "other": x}, None

    with pytest.raises(RuntimeError, match=r"Extra\.fwd returned outputs y, other; expected y, side"):
        Extra()(torch.ones(2))


def test_output_that_is_nothing_is_named():
    class Nothing(Identity):
        def fwd(self, x):
            return None, None

    with pytest.raises(RuntimeError, match=r"Nothing\.fwd returned outputs a NoneType; expected y"):
        Nothing()(torch.ones(2))


def test_keyword_named_like_a_parameter_raises():
    class Clash(Op):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def fwd(self, x: Tensor, *, scale: Tensor): ...
        def bwd(self, saved, dy): ...

    with pytest.raises(ArgumentError, match=r"op 0 \(Clash\): 'scale' is both a keyword and a parameter"):
        Sequential(Clash())(torch.ones(2, 4), scale=torch.ones(4))


# ------------------------------------------------------------------------------------------------- gradients by name


def test_gradients_arrive_by_name():
    op, (x, factor), dy = Affine(), inputs(), torch.randn(3, 4)
    op(x, factor=factor).backward(dy)

    assert torch.equal(x.grad, dy * factor)
    assert torch.equal(factor.grad, dy * x)
    assert torch.equal(op.bias.grad, dy.sum(0))


def test_a_buffer_is_not_differentiated():
    class Doubled(Op):
        def fwd(self, x: Tensor, *, out: Buffer):
            return out.copy_(2 * x).detach(), None

        def bwd(self, saved, dy: Tensor):
            return {"x": 2 * dy}

    x, out = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    Doubled()(x, out=out).sum().backward()

    assert x.grad.eq(2).all()
    assert out.grad is None


@pytest.mark.parametrize("wrap", [lambda op: op, Sequential])
def test_a_parameter_that_is_registered_between_calls_is_missed_in_the_backward(wrap):
    op, x = GroupedLinear(2, 4, 4, bias=False), torch.ones(3, 4)
    model = wrap(op)
    model(x, split_sizes=[1, 2])
    op.register_parameter("extra", nn.Parameter(torch.ones(4)))

    with pytest.raises(RuntimeError, match=r"GroupedLinear\.bwd returned no gradient for \['extra'\]"):
        model(x, split_sizes=[1, 2]).sum().backward()


def test_parameters_of_inner_modules_are_named_by_their_path():
    class Wrapped(Op):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def fwd(self, x: Tensor):
            return x @ self.inner.weight.T, x

        def bwd(self, saved, dy: Tensor):
            return {"x": dy @ self.inner.weight, "inner.weight": dy.T @ saved}

    op, (x,) = Wrapped(), inputs(count=1)
    op(x).sum().backward()

    torch.testing.assert_close(op.inner.weight.grad, torch.ones(4, 3) @ x)


@pytest.mark.parametrize("frozen", ["x", "factor", "bias"])
def test_no_gradient_is_computed_for_what_is_frozen(frozen):
    op, (x, factor) = Affine(), inputs()
    {"x": x, "factor": factor, "bias": op.bias}[frozen].requires_grad_(False)
    op(x, factor=factor).sum().backward()

    assert sorted(op.computed) == sorted({"x", "factor", "bias"} - {frozen})


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({}, r"Returning\.bwd returned no gradient for \['x'\]"),
        (
            {"x": torch.ones(3, 4), "z": None},
            r"gradients for \['z'\], which it does not read; it returned \['x', 'z'\]",
        ),
    ],
)
def test_wrong_names_of_gradients_raise(grads, message):
    y = Returning(grads)(torch.ones(3, 4, requires_grad=True))

    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def test_gradient_may_be_none():
    x = torch.ones(3, 4, requires_grad=True)
    Returning({"x": None})(x).sum().backward()

    assert x.grad is None


def test_needs_grad_names_what_is_wanted():
    seen = []

    class Watching(Affine):
        def fwd(self, x, *, factor: Tensor, needs_grad: frozenset[str]):
            seen.append(needs_grad)
            return super().fwd(x, factor=factor)

        def bwd(self, saved, dy, *, needs_grad: frozenset[str]):
            seen.append(needs_grad)
            return super().bwd(saved, dy)

    x, factor = inputs()
    Watching()(x, factor=factor.detach()).sum().backward()

    assert seen == [{"x", "bias"}, {"x", "bias"}]


# ------------------------------------------------------------------------------------------------- saved


def test_nested_saved_comes_back():
    (x,) = inputs(count=1)
    Square()(x).sum().backward()

    assert torch.equal(x.grad, 2 * x)


def test_saved_tensors_hooks_see_the_tensors():
    (x,), packed = inputs(count=1), []
    with saved_tensors_hooks(lambda t: packed.append(t) or len(packed) - 1, lambda i: 10 * packed[i]):
        y = Square()(x)
    y.sum().backward()

    assert len(packed) == 1
    assert torch.equal(x.grad, 20 * x)


def test_changing_a_saved_tensor_raises():
    (x,) = inputs(count=1)
    y = Square()(x)
    with torch.no_grad():
        x.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_without_grad_mode(mode):
    kept = []
    with mode(), saved_tensors_hooks(kept.append, lambda t: t):
        y = Sequential(Square(), Affine())(torch.ones(3, 4), factor=torch.ones(4))

    assert not kept
    assert not y.requires_grad


def test_backward_twice_with_retain_graph():
    (x,) = inputs(count=1)
    y = Sequential(Square())(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()

    assert torch.equal(x.grad, 4 * x)


def test_backward_twice_without_retain_graph_raises():
    y = Sequential(Square())(*inputs(count=1))
    y.sum().backward()

    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_activation_checkpointing_runs_the_forward_again():
    runs = []

    class Counted(Square):
        def fwd(self, x):
            runs.append(1)
            return super().fwd(x)

    (x,) = inputs(count=1)
    checkpoint(Sequential(Counted()), x, use_reentrant=False).sum().backward()

    assert len(runs) == 2
    assert torch.equal(x.grad, 2 * x)


def test_op_that_forgets_its_extra_outputs_is_named():
    class Forgetful(Square):
        extra_outputs = ("residual",)

    with pytest.raises(RuntimeError, match=r"Forgetful\.fwd returned outputs a Tensor; expected y, residual"):
        Forgetful()(torch.randn(3))


# ------------------------------------------------------------------------------------------------- first order only


def test_second_derivative_raises_a_named_error():
    (x,) = inputs(count=1)
    (dx,) = torch.autograd.grad(Square()(x).sum(), x, create_graph=True)

    with pytest.raises(DoubleBackwardError, match="Square has first-order gradients only"):
        dx.sum().backward()


EXPERTS = (GroupedLinear(2, 4, 8), SwiGLU(), GroupedLinear(2, 4, 4))
CURVED = {
    "frozen experts": (EXPERTS, {"split_sizes": torch.tensor([2, 2])}),
    "a frozen linear and its gate": (EXPERTS[:2], {"split_sizes": torch.tensor([2, 2])}),
    "one program": ((ConstantScale(2.0), Activation("silu")), {}),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CURVED)
def test_a_derivative_of_what_fwd_computed_is_no_constant(name: str, fused: bool):
    """Nothing that they save requires a gradient, so a penalty on the gradient was a constant without a word."""
    ops, keywords = CURVED[name]
    x = torch.randn(4, 4, requires_grad=True)
    with config(disable_fusions=set() if fused else {"GroupedMLP", "GroupedLinearGLU", "PointwiseChain"}):
        y = Sequential(*ops).requires_grad_(False)(x, **keywords)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)

    with pytest.raises(DoubleBackwardError, match="first-order gradients only"):
        dx.square().sum().backward()


@pytest.mark.parametrize(
    ("op", "keywords"),
    [
        (Scale(), {"scales": torch.rand(4)}),
        (GroupedLinear(2, 4, 4).requires_grad_(False), {"split_sizes": torch.tensor([2, 2])}),
        (
            GroupedLinear(2, 4, 4, single_grouped_weight=False).requires_grad_(False),
            {"split_sizes": torch.tensor([2, 2])},
        ),
    ],
    ids=["scale", "linear", "linear of several parameters"],
)
def test_a_constant_derivative_may_be_used_again(op: Op, keywords: dict[str, torch.Tensor]):
    x = torch.randn(4, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(op(x, **keywords).sum(), x, create_graph=True)

    assert not dx.requires_grad


def test_create_graph_that_nobody_uses_is_fine():
    (x,) = inputs(count=1)
    (dx,) = torch.autograd.grad(Square()(x).sum(), x, create_graph=True)

    assert torch.equal(dx, 2 * x)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.functionalize])
def test_torch_func_transforms_raise(transform):
    with pytest.raises(RuntimeError, match=r"Square: torch\.func transforms and vmap are not supported"):
        transform(lambda x: Square()(x).sum())(torch.ones(4))


@pytest.mark.parametrize("in_container", [False, True])
def test_batched_gradients_raise(in_container):
    op, x = GroupedLinear(1, 4, 4), torch.ones(2, 4, requires_grad=True)
    y = (Sequential(op) if in_container else op)(x, split_sizes=[2])

    with pytest.raises(RuntimeError, match=r"GroupedLinear: batched gradients \(is_grads_batched, .* not supported"):
        torch.autograd.grad(y, x, torch.ones(3, 2, 4), is_grads_batched=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("tangent_of", ["x", "scales"])
@pytest.mark.parametrize("in_container", [False, True])
def test_forward_mode_gradients_raise(tangent_of, in_container):
    given = {"x": torch.ones(2, 4), "scales": torch.ones(2)}
    op = Sequential(Scale()) if in_container else Scale()
    with forward_ad.dual_level():
        assert torch.equal(op(**given), given["x"])  # nothing has a tangent
        given[tangent_of] = forward_ad.make_dual(given[tangent_of], torch.ones_like(given[tangent_of]))
        with pytest.raises(RuntimeError, match=r"Scale: forward-mode gradients are not supported; use backward"):
            op(**given)


# ------------------------------------------------------------------------------------------------- autocast


class Recorder(Op):
    """Notes the autocast that it is told of, and the one that torch functions would see."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def fwd(self, x: Tensor, *, autocast_dtype: torch.dtype | None):
        self.seen.append((autocast_dtype, torch.is_autocast_enabled("cpu")))
        return x * 1, None

    def bwd(self, saved, dy: Tensor):
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return {"x": dy}


@pytest.mark.parametrize("wrap", [lambda op: op, Sequential], ids=["alone", "container"])
def test_autocast_is_told_to_the_op_and_off_inside(wrap):
    op = Recorder()
    with torch.autocast("cpu", torch.bfloat16):
        wrap(op)(torch.ones(2, requires_grad=True)).sum().backward()

    assert op.seen == [(torch.bfloat16, False), False]


def test_without_autocast_the_op_is_told_none():
    op = Recorder()
    op(torch.ones(2))

    assert op.seen == [(None, False)]


def test_check_is_told_of_autocast():
    class Checked(Recorder):
        def check(self, x, *, autocast_dtype):
            self.seen.append(autocast_dtype)

    op = Checked()
    with torch.autocast("cpu", torch.bfloat16):
        Sequential(op)(torch.ones(2))

    assert op.seen[0] is torch.bfloat16


# ------------------------------------------------------------------------------------------------- half-defined fusions


class Twice(Op):
    def fwd(self, x: Tensor):
        return 2 * x, None

    def bwd(self, saved, dy: Tensor):
        return {"x": lambda: 2 * dy}


class ForwardOnly(FusedOp):
    """``Affine`` then ``Twice``; its backward is theirs."""

    def fwd(self, x: Tensor, *, factor: Tensor):
        return 2 * (x * factor + self.first.bias), {"first": Affine.Saved(x, factor), "second": None}


class BackwardOnly(FusedOp):
    """Its forward is that of its parts."""

    def bwd(self, saved, dy: Tensor):
        first = saved["first"]
        return {"x": 2 * dy * first.factor, "factor": 2 * dy * first.x, "first.bias": 2 * dy.sum(0)}


@pytest.mark.parametrize("fused", [ForwardOnly, BackwardOnly])
def test_half_that_a_fused_op_lacks_is_that_of_its_parts(fused):
    (x, factor), dy, first = inputs(), torch.randn(3, 4), Affine()
    y = fused(first=first, second=Twice())(x, factor=factor)
    y.backward(dy)

    assert torch.equal(y, 2 * (x * factor + first.bias))
    for got, want in [(x.grad, 2 * dy * factor), (factor.grad, 2 * dy * x), (first.bias.grad, 2 * dy.sum(0))]:
        torch.testing.assert_close(got, want)


def test_fused_op_that_defines_neither_half_raises():
    with pytest.raises(TypeError, match="Nothing defines neither fwd nor bwd"):
        type("Nothing", (FusedOp,), {})


def test_missing_optional_role_is_none():
    assert ForwardOnly(first=Affine(), second=None).second is None


def test_parts_not_wanted_cost_no_backward():
    ran = []

    class Noted(Twice):
        def bwd(self, saved, dy):
            ran.append(1)
            return super().bwd(saved, dy)

    op = Composite(first=Noted(), second=Affine())
    op(torch.ones(3, 4), factor=torch.ones(4)).sum().backward()

    assert not ran
    assert op.second.bias.grad is not None


def test_keywords_of_two_parts_are_told_apart_by_role():
    x, scales = torch.randn(3, 4), torch.rand(3, requires_grad=True)
    twice = Composite(one=Scale(), two=Scale())
    twice(x, one_scales=scales, two_scales=scales).sum().backward()

    torch.testing.assert_close(scales.grad, (2 * scales.detach().unsqueeze(-1) * x).sum(-1))
