"""Checks for authors of ops and fusions: tries the promises that the compiler relies on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor

from .compiler.registry import registry
from .container.sequential import Sequential
from .contract.config import active_config, changed
from .contract.errors import ArgumentError
from .contract.op import Op
from .contract.spec import TensorSpec
from .runtime.autograd import Runtime, check, differentiable
from .runtime.call import EagerStep

Leaves = Mapping[str, Tensor]


def check_op(op: Op, x: Tensor, **keywords: object) -> None:
    """Checks the promises of an op, on copies in float64.

    - ``fwd`` writes into none of its arguments but buffers, and returns what ``check`` predicts.
    - Gradients have the shapes of their tensors, and agree with finite differences.
    - A gradient does not depend on the set of wanted gradients.
    - ``bwd`` only depends on what ``fwd`` returned: another call in between changes nothing. It does not write into the
    gradients of outputs.
    - Keywords reach the op in a container, by their names and by ``op_kwargs``.

    Args:
        op: a small op, as finite differences need a call for each number.
        x: the input, in any floating-point dtype.
        **keywords: the keywords of a call.

    Raises:
        AssertionError: a promise does not hold; the message says which.
        ArgumentError: not an op; keywords that do not fit it; an op that delivers a gradient itself, such as to
            ``main_grad``.

    >>> import torch, fusible
    >>> fusible.testing.check_op(fusible.SwiGLU(), torch.randn(3, 4))
    """
    _check_is("check_op", op, Op)
    op, x, keywords = deepcopy(op).double(), _leaf(x, torch.float64), _leaves(keywords, torch.float64)
    op.requires_grad_()
    for delivery in op.deliveries(frozenset(op.input_names())):
        raise ArgumentError(
            f"check_op: {type(op).__name__} delivers the gradient of {delivery.name} itself, "
            "which check_op does not check; give an op that returns it"
        )
    written = [keyword for keyword, declared in op.keywords.items() if declared.buffer]
    keywords |= {name: t.detach() for name in written if isinstance(t := keywords.get(name), Tensor)}
    with torch.no_grad():
        op(x, **keywords)
    _check_fwd_and_bwd(op, x, keywords)
    leaves = _named(x, keywords) | dict(op.named_parameters())
    name, model = type(op).__name__, Sequential(op)

    def run() -> tuple[Tensor, ...]:
        return _floats(op(x, **keywords))

    everything = _check_subsets(name, run, leaves)
    outputs = run()
    op(x.detach() * 2 + 1, **keywords)
    _compare(f"{name}: after another call, which bwd must not see,", _gradients(outputs, leaves), everything)
    _compare(f"{name}: in a container", _numbered(_floats(model(x, **keywords))), _numbered(run()))
    addressed = model(x, op_kwargs={op: keywords}) if keywords else model(x)
    _compare(f"{name}: with op_kwargs", _numbered(_floats(addressed)), _numbered(run()))
    try:
        torch.autograd.gradcheck(lambda *_: run(), tuple(leaves.values()))
    except RuntimeError as error:
        raise AssertionError(
            f"{name}: gradients of {', '.join(leaves)} do not agree with finite differences: {error}"
        ) from None


def check_fusion(name: str, container: Sequential, x: Tensor, *, exact: bool = False, **keywords: object) -> None:
    """Checks that a fusion does not change the results of a call.

    - The fusion fires for this call. Otherwise the message says why it does not.
    - Outputs and all gradients agree with those of the unfused ops: in float64 within rounding, or with ``exact`` bit
    for bit in the given dtypes. They also agree if a single gradient is wanted.
    - The fused op does not write into its arguments, and owns no parameters.

    Args:
        name: the name of the fusion, as in ``explain``.
        container: the container whose call should be fused; a copy is called.
        x: the input.
        exact: see above.
        **keywords: the shared keywords of a call. There is no ``op_kwargs``.

    Raises:
        AssertionError: a promise does not hold; the message says which.
        ArgumentError: not a container.
        KeyError: no fusion has that name.
    """
    _check_is("check_fusion", container, Sequential)
    dtype, container = None if exact else torch.float64, deepcopy(container)
    container = container if exact else container.double()
    x, keywords = _leaf(x, dtype), _leaves(keywords, dtype)
    _check_fires(name, container, x, keywords)
    leaves = _named(x, keywords) | dict(container.named_parameters())

    def run() -> tuple[Tensor, ...]:
        return _floats(container(x, **keywords))

    for wanted in _subsets(leaves):
        with _wanting(leaves, wanted):
            versions = [tensor._version for tensor in leaves.values()]
            fused = _results(run, wanted)
            assert versions == [t._version for t in leaves.values()], f"{name}: the fused op writes into its arguments"
            with changed(disable_fusions=active_config().disable_fusions | {name}):
                unfused = _results(run, wanted)
        _compare(f"{name}: fused, where gradients of {', '.join(wanted)} are wanted,", fused, unfused, exact)


def _check_is(function: str, module: object, kind: type) -> None:
    if not isinstance(module, kind):
        raise ArgumentError(
            f"{function}: expected a fusible.{kind.__name__}, got a {type(module).__module__}.{type(module).__name__}"
        )


def _check_fwd_and_bwd(op: Op, x: Tensor, keywords: dict[str, object]) -> None:
    """Checks the results of ``fwd`` and ``bwd``, called as the runtime calls them."""
    name, inputs = type(op).__name__, differentiable(op, x, keywords)
    promised = check(op, TensorSpec.of(x), keywords, Runtime(True, None))
    with torch.no_grad():
        versions = {key: tensor._version for key, tensor in inputs.items()}
        forward = EagerStep(op, keywords, None, tuple(inputs)).run(x, (True,) * len(inputs))
        for key, tensor in inputs.items():
            assert tensor._version == versions[key], f"{name}.fwd writes into {key}, which is the caller's"
        outputs = dict(zip(("y", *op.extra_outputs), map(TensorSpec.of, forward.outputs), strict=True))
        expected = {"y": promised} if isinstance(promised, TensorSpec) else promised or {}
        for key, spec in expected.items():
            foreseen = spec._replace(requires_grad=outputs[key].requires_grad)  # a check does not predict it
            assert outputs[key] == foreseen, f"{name}.check foresees {spec} for {key}, fwd returns {outputs[key]}"
        tensors, douts = [*forward.kept, *forward.apart], tuple(map(torch.ones_like, forward.outputs))
        grads = forward.context.gradients(tensors, forward.lent, douts, None)
        assert not any(dout._version for dout in douts), f"{name}.bwd writes into the gradient of an output"
        for (key, tensor), gradient in zip(inputs.items(), grads, strict=True):
            _check_gradient(name, key, gradient, tensor)


def _check_gradient(name: str, key: str, gradient: object, tensor: Tensor) -> None:
    if gradient is None:
        return
    assert isinstance(gradient, Tensor), f"{name}.bwd: the gradient of {key} is a {type(gradient).__name__}, no tensor"
    shapes = list(gradient.shape), list(tensor.shape)
    assert shapes[0] == shapes[1], f"{name}.bwd: the gradient of {key} has shape {shapes[0]}, {key} has {shapes[1]}"


def _check_subsets(name: str, run: Callable[[], tuple[Tensor, ...]], leaves: Leaves) -> dict[str, object]:
    """Checks that each gradient is the same if it alone is wanted; returns all of them."""
    everything = _results(run, leaves)
    for wanted in _subsets(leaves):
        with _wanting(leaves, wanted):
            alone = _results(run, wanted)
        _compare(f"{name}: where gradients of {', '.join(wanted)} alone are wanted,", alone, everything)
    return {key: everything[key] for key in leaves}


def _check_fires(name: str, container: Sequential, x: Tensor, keywords: dict[str, object]) -> None:
    fusions = {fusion.name: fusion for fusion in registry}
    if name not in fusions:
        raise KeyError(f"no fusion is named {name!r}; there are {', '.join(fusions)}")
    explanation = container.explain(x, op_kwargs=None, **keywords)
    decisions = [each for each in (*explanation.fusions, *explanation.near_misses) if each.name == name]
    reasons = "; ".join(each.reason for each in decisions) or "its pattern fits nowhere"
    assert any(each.taken for each in decisions), f"{name} does not fire: {reasons}"
    owned = {id(parameter) for parameter in container.parameters()}
    for match in fusions[name].pattern.matches(explanation.graph):
        fused = fusions[name].op(**match.ops())
        foreign = [key for key, parameter in fused.named_parameters() if id(parameter) not in owned]
        assert not foreign, f"{name} owns {', '.join(foreign)}, which no optimizer sees; parameters belong to the parts"


def _subsets(leaves: Leaves) -> Iterator[Leaves]:
    """All leaves together, and each alone."""
    yield leaves
    yield from ({name: leaf} for name, leaf in leaves.items())


@contextmanager
def _wanting(leaves: Leaves, wanted: Leaves) -> Iterator[None]:
    """A context in which the other leaves require no gradient."""
    try:
        for name, leaf in leaves.items():
            leaf.requires_grad_(name in wanted)
        yield
    finally:
        for leaf in leaves.values():
            leaf.requires_grad_(True)


def _results(run: Callable[[], tuple[Tensor, ...]], wanted: Leaves) -> dict[str, Tensor | None]:
    outputs = run()
    return {**_numbered(outputs), **_gradients(outputs, wanted)}


def _gradients(outputs: tuple[Tensor, ...], wanted: Leaves) -> dict[str, Tensor | None]:
    """The gradients by name; None if a leaf is not reached."""
    there = [output for output in outputs if output.requires_grad]
    weights = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y) for y in there]
    if not there or not wanted:
        return dict.fromkeys(wanted)
    grads = torch.autograd.grad(there, list(wanted.values()), weights, allow_unused=True)
    return dict(zip(wanted, grads, strict=True))


def _numbered(outputs: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    return {f"output {i}": output.detach() for i, output in enumerate(outputs)}


def _compare(subject: str, ours: Mapping[str, object], truth: Mapping[str, object], exact: bool = False) -> None:
    """Checks that each of ours equals the truth."""
    tolerance = 0.0 if exact else None
    for name, tensor in ours.items():
        right = truth[name]
        if tensor is None or right is None:
            assert tensor is right, f"{subject} {name} has {'no' if tensor is None else 'a'} gradient, unlike expected"
            continue
        try:
            torch.testing.assert_close(tensor, right, equal_nan=True, rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            raise AssertionError(f"{subject} {name} differs: {error}") from None


def _floats(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The floating-point outputs, which can have a gradient."""
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple([output for output in several if output.is_floating_point()])


def _leaf(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy of a tensor, which requires a gradient; the tensor itself if it cannot."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_()


def _leaves(values: Mapping[str, object], dtype: torch.dtype | None) -> dict[str, object]:
    return {k: _leaf(v, dtype) if isinstance(v, Tensor) else v for k, v in values.items() if v is not None}


def _named(x: Tensor, keywords: Mapping[str, object]) -> dict[str, Tensor]:
    """The arguments whose gradients may be wanted."""
    return {k: t for k, t in {"x": x, **keywords}.items() if isinstance(t, Tensor) and t.requires_grad}
