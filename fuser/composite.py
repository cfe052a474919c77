"""Ops that consist of several: fused ops, which a pattern builds, and composites, which a user writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .contract.op import RESERVED, Delivery, Gradient, Grads, Keyword, Keywords, Op, Outputs
from .contract.spec import Specs, TensorSpec
from .contract.tracing import promised
from .runtime.autograd import Runtime, check
from .runtime.call import call_bwd, call_fwd, evaluate


class Chain(Op):
    """Parts, by role, run one after the other.

    A part's keyword is the chain's keyword of the same name, or ``role_keyword`` if the chain declares that.
    A part's parameter is named ``role.parameter``. If both halves are inherited, ``Saved`` is a dictionary from the
    role to the part's ``Saved``; an override of one half must return or accept that.
    """

    keywords: Mapping[str, Keyword] = {}
    reserved = {"fwd": RESERVED, "bwd": frozenset({"needs_grad"}), "check": frozenset({"autocast_dtype"})}

    def __init__(self, **parts: Op) -> None:
        super().__init__()
        for role, part in parts.items():
            self.add_module(role, part)
        if type(self).fwd is Chain.fwd:
            self.keywords = self._keywords_of_parts()
            inner = self._inner()
            self.extra_outputs = tuple(
                [n for p in self.parts.values() for n in p.extra_outputs if n not in inner or p.returns(n, True)]
            )

    @property
    def parts(self) -> dict[str, Op]:
        """The ops of the chain, by role, in order."""
        return self._modules  # type: ignore[return-value]

    def inner_ops(self) -> Mapping[str, Op]:
        return self.parts

    def takes(self, role: str, keyword: str) -> str | None:
        """The chain's name of a part's keyword; None if the chain does not take it."""
        long = f"{role}_{keyword}"
        return long if long in self.keywords else keyword if keyword in self.keywords else None

    def input_names(self) -> tuple[str, ...]:
        return tuple([f"{role}.{name}" for role, part in self.parts.items() for name in part.input_names()])

    def input_tensors(self) -> list[Tensor]:
        tensors: list[Tensor] = []
        for part in self.parts.values():
            if part._parameters or part._modules or "_is_replica" in part.__dict__:  # whose parameters are attributes
                tensors += part.input_tensors()
        return tensors

    def device_inputs(self) -> list[Tensor]:
        return [tensor for part in self.parts.values() for tensor in part.device_inputs()]

    def deliveries(self, wanted: frozenset[str], role: str = "") -> Sequence[Delivery]:
        deliveries: list[Delivery] = []
        for name, part in self.parts.items():
            if type(part).deliveries is not Op.deliveries:  # which has none
                deliveries += part.deliveries(wanted, f"{role}{name}.")
        return deliveries

    def fwd(self, x: Tensor, *args: Any, **keywords: Any) -> tuple[Outputs, object]:
        needs_grad, dtype = keywords.pop("needs_grad"), keywords.pop("autocast_dtype")
        inner = keywords.pop("x_is_inner", False)
        needs, saved, extras = self._needs(needs_grad), {}, dict[str, Tensor]()
        for role, part in self.parts.items():
            outputs, saved[role] = call_fwd(
                part, x, self._keywords_for(role, part, keywords, extras), needs[role], dtype, inner
            )
            x, inner = outputs[0], True
            extras.update(zip(part.extra_outputs, outputs[1:], strict=True))
        return {"y": x, **{name: extras[name] for name in self.extra_outputs}} if self.extra_outputs else x, saved

    def bwd(self, saved: Any, dy: Tensor, *args: Any, **keywords: Any) -> Grads:
        needs = self._needs(keywords.pop("needs_grad"))
        grads: dict[str, Any] = {}
        dextras: dict[str, Any] = keywords
        for role, part in reversed(self.parts.items()):
            if not needs[role]:
                break
            if not isinstance(saved, Mapping) or role not in saved:
                raise RuntimeError(
                    f"{type(self).__name__} has the bwd of its parts, so its fwd must return their residuals, a "
                    f"dictionary of {', '.join(self.parts)}; there are none of {role}"
                )
            douts = (dy, *[dextras[name] for name in part.extra_outputs])
            part_grads = call_bwd(part, saved[role], douts, needs[role])
            for name in needs[role] - {"x"}:
                self._add(grads, dextras, role, name, part_grads[name])
            if "x" in needs[role]:
                dy = evaluate(part_grads["x"])  # type: ignore[assignment]
        if "x" in needs[next(iter(needs))]:
            grads["x"] = dy
        return grads

    def check(self, x: TensorSpec, *args: Any, **keywords: Any) -> Specs:
        runtime = Runtime(False, keywords.pop("autocast_dtype"))
        spec: TensorSpec | None = x
        extras, inner = dict[str, TensorSpec](), dict[str, Tensor]()
        for role, part in self.parts.items():
            part_keywords = self._keywords_for(role, part, keywords, inner)
            if spec is None or any(name in self._inner() and name not in part_keywords for name in part.keywords):
                return None
            specs = check(part, spec, part_keywords, runtime)
            named = specs if isinstance(specs, Mapping) else {}
            extras |= {name: named[name] for name in part.extra_outputs if name in named}
            inner |= {name: promised(extras[name]) for name in part.extra_outputs if name in named}
            spec = specs if isinstance(specs, TensorSpec) else named.get("y")
        return spec if spec is None or not extras else {"y": spec, **extras}

    def check_without_x(self, *args: Any, **keywords: Any) -> None:
        for role, part in self.parts.items():
            part.check_without_x(**self._keywords_for(role, part, keywords, {}))

    def _keywords_for(self, role: str, part: Op, keywords: Keywords, extras: Mapping[str, Tensor]) -> dict[str, object]:
        from_call = {k: keywords[name] for k in part.keywords if (name := self.takes(role, k)) and name in keywords}
        return {**{k: extras[k] for k in part.keywords if k in extras}, **from_call}

    def _needs(self, needs_grad: frozenset[str]) -> dict[str, frozenset[str]]:
        """The gradients that each part must compute for those in ``needs_grad``, by role."""
        needs: dict[str, frozenset[str]] = {}
        flows, inner = "x" in needs_grad, self._inner()
        for role, part in self.parts.items():
            names = {n for n in part.input_names() if f"{role}.{n}" in needs_grad} | ({"x"} if flows else set())
            names |= {k for k in part.keywords if self.takes(role, k) in needs_grad or (flows and k in inner)}
            needs[role] = frozenset(names)
            flows = bool(names)
        return needs

    def _add(self, grads: dict[str, Any], dextras: dict[str, Any], role: str, name: str, gradient: Gradient) -> None:
        """Stores a part's gradient under the chain's name; adds the gradients of two parts that read one keyword."""
        part = self.parts[role]
        if name not in part.keywords:
            grads[f"{role}.{name}"] = gradient
            return
        keyword = self.takes(role, name)
        into, key = (grads, keyword) if keyword is not None else (dextras, name)
        into[key] = evaluate(gradient) if key not in into else into[key] + evaluate(gradient)

    def _inner(self) -> set[str]:
        """The extra outputs of parts that later parts read."""
        inner, outputs = set[str](), set[str]()
        for part in self.parts.values():
            inner |= outputs & part.keywords.keys()
            outputs |= set(part.extra_outputs)
        return inner

    def _keywords_of_parts(self) -> dict[str, Keyword]:
        inner = self._inner()
        all_of = [(r, k, kw) for r, p in self.parts.items() for k, kw in p.keywords.items() if k not in inner]
        names = [k for _, k, _ in all_of]
        return {k if names.count(k) == 1 else f"{role}_{k}": kw for role, k, kw in all_of}


class FusedOp(Chain):
    """An op that replaces a run of ops where its pattern matches. It owns no parameters.

    It is built as ``Fused(**roles)``, with None for missing optional roles, and defines ``fwd``, ``bwd``, or both. A
    half that it does not define is the chain of its parts; :class:`Chain` describes the ``Saved`` of that case. A call
    that passes a keyword which its ``fwd`` does not take is not fused.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.fwd is Chain.fwd and cls.bwd is Chain.bwd:
            raise TypeError(f"{cls.__name__} defines neither fwd nor bwd, so it would fuse nothing")

    def __init__(self, *args: object, **roles: Op | None) -> None:
        if args:
            raise TypeError(
                f"{type(self).__name__} is a fused op, which a container builds where its pattern fits; "
                "write its parts in a fusible.Sequential"
            )
        super().__init__(**{role: op for role, op in roles.items() if op is not None})
        self.__dict__.update(roles)  # found at once; nn.Module's look-up of children is slow


class Composite(Chain):
    """Several ops under one name, such as ``ScaledSwiGLU``. A container flattens it; alone it runs as a chain."""
