"""One step of a plan: an op, a fused op, or a module that is not an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

from torch import Tensor, nn

from ..contract import tracing as trace
from ..contract.errors import ArgumentError
from ..contract.op import Keywords, Op
from ..contract.overrides import input_may_change, outputs_of, patched_half
from ..contract.parametrized import computed
from ..contract.spec import Specs, TensorSpec
from ..runtime.autograd import Runtime, StepCapture, calling, check, check_foreseen, check_without_x, run
from ..runtime.buffers import NamedValue, SlotValues, run_beside
from .flatten import OpEntry

KeywordSlots = tuple[tuple[str, int], ...]  # (keyword, slot)
PartSlots = tuple[tuple[str, int | None], ...]  # None if it is made inside the step


@dataclass(frozen=True)
class Step:
    """One thing to run: an op, a fused op, or a module that is not an op. Slots are places in the list of values."""

    module: nn.Module
    entries: tuple[OpEntry, ...]
    ops: tuple[Op | None, ...]  # of the entries
    roles: tuple[str, ...]  # of each entry, which part of a fused op it is; "" for the module itself
    entry_reads: tuple[PartSlots, ...]
    reads: KeywordSlots
    x: int
    outputs: tuple[int, ...]
    input_names: tuple[str, ...] | None  # of the op; None where the module must be called as such
    reads_step_outputs: bool  # outputs of an earlier step, besides x
    has_parametrized_inputs: bool  # some parameters of its ops are computed
    x_is_inner: bool = False  # an earlier step has made x
    last_uses: tuple[int, ...] = ()  # slots of outputs that nothing reads after it
    beside: tuple[NamedValue, ...] = ()  # for a module that is not an op: the extra outputs that are read later

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def check(
        self, x: TensorSpec | None, values: SlotValues, runtime: Runtime, extras: dict[str, TensorSpec]
    ) -> TensorSpec | None:
        """Lets every op of the step check its own arguments; returns the spec of the step's output, if known.

        Args:
            x: the spec of ``x``, or None if unknown: then the ops check what can be checked without it.
            values: the values known so far.
            extras: specs of extra outputs that are not computed yet, by name; the step adds its own.
        """
        whole, look = self.input_names is None, check_foreseen if self.has_parametrized_inputs else check
        for i, (op, reads) in enumerate(zip(self.ops, self.entry_reads)):  # noqa: B905
            if op is None or (whole and input_may_change(self.module)):
                return None
            try:
                keywords = {name: values[slot] for name, slot in reads} if reads else {}  # type: ignore[index]
            except (IndexError, TypeError):  # a slot that is not there yet, or none
                keywords = None
            try:
                if x is None or keywords is None:
                    x = _check_part(look, op, x, reads, values, runtime, extras)
                else:
                    specs = look(op, x, keywords, runtime)
                    x = _noted(op, specs, extras) if op.extra_outputs else specs  # type: ignore[assignment]
            except ArgumentError as error:
                raise error.located(str(self.entries[i])) from None
        if not whole or not self.module._forward_hooks:
            return x
        for name in self.ops[0].extra_outputs:  # type: ignore[union-attr]
            extras.pop(name, None)
        return None  # hooks may give out something else

    @property
    def replay_refusal(self) -> str | None:
        """The reason why the step cannot be replayed; None if all its ops promise that they can."""
        if self.input_names is None:
            return f"{self.entries[0]} is called as a module"
        if isinstance(self.module, Op) and self.module.promises.passes_x_on:
            return f"{self.entries[0]} passes x on"
        for op in self.module.modules():
            if isinstance(op, Op) and not op.promises.replayable:
                return f"{self._label(op)} does not promise to be replayable"
            if isinstance(op, Op) and (method := patched_half(op)) is not None:
                return f"the {method} of {self._label(op)} is set on the object"
        return None

    def _label(self, op: Op) -> str:
        """The name of an op in errors, or the class of a fused op."""
        labels = (str(entry) for entry, candidate in zip(self.entries, self.ops, strict=True) if candidate is op)
        return next(labels, self.name)

    def with_op(self, op: Op) -> Step:
        """The same step with another op, or a view of it."""
        parts = tuple([_part(op, role) for role in self.roles])
        return replace(self, module=op, ops=parts)

    def computed(self) -> Step:
        """The same step on parameters computed for one run, whose forms may differ from the checked ones."""
        assert isinstance(self.module, Op)
        op = computed(self.module)
        return replace(self.with_op(op), has_parametrized_inputs=False, input_names=op.input_names())

    def run(self, values: SlotValues, runtime: Runtime, session: StepCapture | None = None) -> None:
        """Runs on the values so far, and appends its outputs."""
        module, x, keywords = self.module, values[self.x], {}
        for name, slot in self.reads:  # a comprehension would be a call more
            keywords[name] = values[slot]
        if self.input_names is not None:
            if self.has_parametrized_inputs:
                step = self.computed()
                step.check(TensorSpec.of(x), values, runtime, {})
                return step.run(values, runtime)
            inner = self.x_is_inner or runtime.x_is_inner
            values += run(module, x, keywords, runtime, self.input_names, session, inner)  # type: ignore[arg-type]
        elif isinstance(module, Op):
            values.extend(self._called(module, x, keywords))
        else:
            beside = self.beside
            values.append(run_beside(module, str(self.entries[0]), x, beside, values) if beside else module(x))
        for slot in self.last_uses:
            values[slot] = None

    def _called(self, op: Op, x: Tensor, keywords: Keywords) -> tuple[object, ...]:
        try:
            with calling(self.x_is_inner):
                result = op(x, **keywords)
        except ArgumentError as error:
            raise ArgumentError(f"{self.entries[0]}: {str(error).removeprefix(f'{self.name}: ')}") from None
        return outputs_of(op, str(self.entries[0]), result)


def _part(op: Op, role: str) -> Op:
    """The op that has a role in a fused one, or in a run that has one; the op itself for none."""
    return reduce(lambda whole, name: whole.inner_ops()[name], role.split("."), op) if role else op


def _check_part(
    look: Callable[..., Specs],
    op: Op,
    x: TensorSpec | None,
    reads: PartSlots,
    values: SlotValues,
    runtime: Runtime,
    extras: dict[str, TensorSpec],
) -> TensorSpec | None:
    """Lets an op check the known arguments; returns the spec of its output, if known."""
    keywords = {name: values[slot] for name, slot in reads if slot is not None and slot < len(values)}
    promised = {n: trace.promised(extras[n]) for n, _ in reads if n not in keywords and n in extras}
    try:
        if x is None or len(keywords) + len(promised) < len(reads):
            check_without_x(op, keywords)
        else:
            return _noted(op, look(op, x, keywords | promised, runtime), extras)
    except trace.NoDataError:
        pass  # it looks at values that are not there yet, and is asked again once they are
    return None


def _noted(op: Op, specs: Specs, extras: dict[str, TensorSpec]) -> TensorSpec | None:
    """The spec of ``y`` in a check's result; adds the specs of extra outputs to ``extras``."""
    if specs is None or isinstance(specs, TensorSpec):
        return specs
    extras.update({name: specs[name] for name in op.extra_outputs if name in specs})
    return specs.get("y")
