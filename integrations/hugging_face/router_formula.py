"""The formula of a transformers model's router, found by trial.

The router's own code runs on random numbers. A rule of :func:`fusible.functional.route` is its formula if it gives the
same logits to the bit, the same experts, and within rounding the same weights and gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...ops.layers.route import Groups
from ...ops.layers.route import route as choose
from ...ops.routed.choose import SCORES, log_scores, wide

NARROW = torch.bfloat16, torch.float16  # in which a sharded model of float32 weights may run
_TOKENS, _SEEDS = 64, range(3)


class Outputs(NamedTuple):
    """The results of a router: logits [T, E], weights and ids [T, k]."""

    logits: Tensor
    weights: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Formula:
    """The formula of a router.

    Attributes:
        weight, logit_bias, selection_bias: names of its tensors.
        reads_argument: the selection bias is the second argument of ``forward``.
        in_float32: the product is computed in float32; ``widened``: its result is brought to float32.
        dtype: of the hidden states that it was tried with.
        narrow: the weights have that dtype, else float32.
    """

    weight: str
    logit_bias: str | None
    in_float32: bool
    widened: bool
    dtype: torch.dtype
    selection_bias: str | None = None
    reads_argument: bool = False
    narrow: bool = False
    top_k: int = 1
    scores: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: Groups | None = None

    def logits(self, router: nn.Module, x: Tensor) -> Tensor:
        """[T, E], from hidden states [..., H]."""
        weight = tensor_of(router, self.weight)
        bias = None if self.logit_bias is None else tensor_of(router, self.logit_bias)
        x = x.reshape(-1, weight.shape[1])
        if self.in_float32:
            return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        logits = F.linear(x, weight, bias)
        return logits.float() if self.widened else logits

    def bias(self, router: nn.Module, arguments: tuple[Tensor, ...]) -> Tensor | None:
        """The selection bias; ``arguments``: the arguments of ``forward`` after the first."""
        if self.reads_argument:
            return arguments[0]
        return None if self.selection_bias is None else tensor_of(router, self.selection_bias).detach().reshape(-1)

    def run(self, router: nn.Module, x: Tensor, arguments: tuple[Tensor, ...], valid: Tensor | None = None) -> Outputs:
        """The results of the router; tokens that are not valid go to no expert."""
        logits, bias = self.logits(router, x), self.bias(router, arguments)
        routes = choose(
            *(logits, self.top_k),
            scores=self.scores,
            normalize=self.normalize,
            scale=self.scale,
            groups=self.groups,
            bias=bias,
            valid=valid,
        )
        return Outputs(logits, routes.top_k_weights.to(x.dtype) if self.narrow else routes.top_k_weights, routes[0])

    def agrees(self, trial: Trial) -> bool:
        """Whether it gives the experts, weights and gradients of a trial; of equal keys any expert."""
        ours, theirs = self.run(trial.router, trial.x, trial.arguments), trial.theirs
        keys = self._keys(theirs.logits.detach(), self.bias(trial.router, trial.arguments))
        best, chosen = (keys.gather(-1, ids).sort(-1).values for ids in (ours.ids, theirs.ids))
        same = (ours.ids.sort(-1).values == theirs.ids.sort(-1).values).all(-1)
        if not _near(best, chosen, 2.0**-20) or same.sum() < _TOKENS // 2 or ours.weights.dtype != theirs.weights.dtype:
            return False
        pairs = zip(trial.gradients(ours, same), trial.gradients(theirs, same), strict=True)
        return all(_near(*pair, _error(pair[1].dtype)) for pair in ((_by_id(ours)[same], _by_id(theirs)[same]), *pairs))

    def _keys(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        logits = wide(logits)
        if bias is None:
            return logits
        return (logits.softmax(-1) if self.scores == "softmax" else log_scores(logits, self.scores).exp()) + bias


class Trial:
    """A router's own code on random numbers.

    Attributes:
        router: a copy with random tensors.
        x: the hidden states; ``arguments``: the argument after them, if there is one.
        theirs: the results of the router's own code.
    """

    def __init__(self, router: nn.Module, dtype: torch.dtype, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.router = deepcopy(router).cpu().requires_grad_()
        for tensor in (*self.router.parameters(), *self.router.buffers()):
            if tensor.is_floating_point():
                tensor.data = self._draw(*tensor.shape).to(tensor.dtype)
        experts, hidden = next(p.shape for p in self.router.parameters() if p.dim() == 2)
        self.x = self._draw(_TOKENS, hidden).mul_(50 / hidden**0.5).to(dtype).requires_grad_()
        self.arguments = (self._draw(experts),) if _takes_bias(self.router) else ()
        self.theirs = self._run(False)
        if not all(torch.equal(*pair) for pair in zip(self.theirs, self._run(True), strict=True)):
            raise ValueError("it computes something else in training")

    def gradients(self, outputs: Outputs, rows: Tensor) -> list[Tensor]:
        """The gradients of the hidden states and all parameters by the weights of some rows."""
        draw = torch.randn(outputs.ids.shape, generator=torch.Generator().manual_seed(0), device="cpu")
        leaves = [self.x, *self.router.parameters()]
        grads = torch.autograd.grad(
            (_by_id(outputs).float() * draw * rows.unsqueeze(-1)).sum(), leaves, allow_unused=True, retain_graph=True
        )
        return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]

    def vectors(self) -> list[str]:
        """The names of the tensors that can be biases."""
        named = {**dict(self.router.named_parameters()), **dict(self.router.named_buffers())}
        experts = self.theirs.logits.shape[1]
        return [name for name, t in named.items() if t.numel() == experts == t.shape[-1] and t.is_floating_point()]

    def numbers(self) -> list[float]:
        """The numbers that the router has as attributes."""
        return sorted({value for value in vars(self.router).values() if type(value) in (int, float)})

    def _draw(self, *shape: int) -> Tensor:
        return 0.2 * torch.randn(shape, generator=self._generator, device="cpu")

    def _run(self, training: bool) -> Outputs:
        self.router.train(training)
        outputs = type(self.router).forward(self.router, self.x * 1, *self.arguments)
        if not isinstance(outputs, tuple) or len(outputs) != 3 or outputs[2].is_floating_point():
            raise ValueError("it does not return logits, weights and ids")
        logits, weights, ids = outputs
        if ids.shape != weights.shape or logits.shape[0] != _TOKENS or ids.shape[0] != _TOKENS:
            raise ValueError("it does not return logits [T, E], weights and ids [T, k]")
        return Outputs(logits, weights, ids)


Formulas = dict[tuple[torch.dtype, torch.dtype], Formula]
"""By the dtypes of hidden states and weight."""


def formulas_of(router: nn.Module, dtype: torch.dtype) -> Formulas | str:
    """The formulas for hidden states of ``dtype`` and, if it is float32, of 16 bits; or why there is none for it."""
    formula = recognized(router, dtype)
    if isinstance(formula, str):
        return formula
    formulas = {(dtype, tensor_of(router, formula.weight).dtype): formula}
    for narrow in NARROW if dtype == torch.float32 else ():
        copied = deepcopy(router)
        for parameter in copied.parameters():
            parameter.data = parameter.data.to(narrow)
        if isinstance(formula := recognized(copied, narrow), Formula):
            formulas[narrow, narrow] = formula
    return formulas


def recognized(router: nn.Module, dtype: torch.dtype) -> Formula | str:
    """The formula of a router for hidden states of ``dtype``, or the reason why none is known."""
    if "forward" in vars(router):
        return "its forward was replaced"
    tensors = [*router.parameters(), *router.buffers()]
    if any(type(t) not in (Tensor, nn.Parameter, nn.Buffer) or t.is_meta for t in tensors):
        return "its tensors are sharded, quantised or without data"
    try:
        narrow = Trial(router, dtype, 0)
        product_of = _product(narrow)
        exact = [Trial(deepcopy(router).float(), torch.float32, seed) for seed in _SEEDS]
        for candidate in _candidates(exact[0], product_of):
            if all(map(candidate.agrees, exact)):
                formula = replace(candidate, dtype=dtype, narrow=narrow.theirs.weights.dtype != torch.float32)
                return formula if formula.agrees(narrow) else f"it rounds scores to {narrow.theirs.logits.dtype}"
    except Exception as error:  # a model's code may raise anything where it is tried out
        return str(error)
    return "no rule of fusible.functional.route gives its experts and weights"


def _product(trial: Trial) -> Formula:
    """A formula without a choice that gives the logits of a trial to the bit."""
    weights = [name for name, p in trial.router.named_parameters() if p.dim() == 2]
    forms = (False, False), (False, True), (True, False)
    for weight, bias, form in product(weights, (None, *trial.vectors()), forms):
        formula = Formula(weight, bias, *form, trial.x.dtype)
        try:
            logits = formula.logits(trial.router, trial.x)
        except RuntimeError:  # the dtypes or sizes do not fit
            continue
        if logits.dtype == trial.theirs.logits.dtype and torch.equal(logits, trial.theirs.logits):
            return formula
    raise ValueError("its logits are not the product of its input and a weight")


def _candidates(trial: Trial, product_of: Formula) -> Iterator[Formula]:
    """The formulas that have the numbers of a router and make its choice in a trial."""
    biases = [None, *(name for name in trial.vectors() if name != product_of.logit_bias)]
    arguments = (True, False) if trial.arguments else (False,)
    rules = product(SCORES, biases, arguments, _groups(trial), (True, False))
    for scores, bias, reads_argument, groups, normalize in rules:
        formula = replace(
            product_of,
            selection_bias=bias,
            reads_argument=reads_argument,
            top_k=trial.theirs.ids.shape[1],
            scores=scores,
            normalize=normalize,
            groups=groups,
            dtype=torch.float32,
        )
        with torch.no_grad():
            ratio = trial.theirs.weights.sum() / formula.run(trial.router, trial.x, trial.arguments).weights.sum()
        for scale in {1.0, *map(float, trial.numbers())}:
            if abs(scale - float(ratio)) <= 1e-5 * abs(scale):
                yield replace(formula, scale=scale)


def _groups(trial: Trial) -> Iterator[Groups | None]:
    yield None
    experts, sizes = trial.theirs.logits.shape[1], [n for n in trial.numbers() if type(n) is int and n > 0]
    for count, keep, best in product(sizes, sizes, (2, 1)):
        fits = keep < count and experts % count == 0 and experts // count * keep >= trial.theirs.ids.shape[1]
        if fits:
            yield Groups(count, keep, best)


def _takes_bias(router: nn.Module) -> bool:
    _, _, *others = inspect.signature(type(router).forward).parameters
    if len(others) > 1 or (others and "bias" not in others[0]):
        raise ValueError(f"its forward reads {', '.join(others)}")
    return bool(others)


def tensor_of(router: nn.Module, name: str) -> Tensor:
    """A parameter or a buffer of a router or of a child."""
    path, _, last = name.rpartition(".")
    tensor: Tensor = getattr(router.get_submodule(path) if path else router, last)
    return tensor


def _by_id(outputs: Outputs) -> Tensor:
    """The weights of each token in the order of its experts."""
    return outputs.weights.gather(-1, outputs.ids.argsort(-1))


def _error(dtype: torch.dtype) -> float:
    """How far numbers of this dtype may be apart that two orders of operations round."""
    return 8 * torch.finfo(dtype).eps + 2.0**-17


def _near(ours: Tensor, theirs: Tensor, error: float) -> bool:
    return bool((ours.float() - theirs.float()).norm() <= error * theirs.float().norm() + 1e-12)
