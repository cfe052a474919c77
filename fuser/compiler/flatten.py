"""The structure of a container: its ops in order, and the keys of ``op_kwargs`` that address them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple
from weakref import ref

from torch import nn

from ..composite import Chain, Composite
from ..contract.errors import ArgumentError, did_you_mean, shown
from ..contract.op import Op
from ..contract.overrides import hooks_of, is_hooked, overrides_forward, patched_half
from ..contract.parametrized import foreseen


class Container(nn.Sequential):
    """The base of :class:`Sequential`, by which nested containers are recognised.

    Attributes:
        container_forward: the ``forward`` that runs a plan. A container with another ``forward`` is called as a plain
            module.
    """

    container_forward: ClassVar[Callable[..., object]]


class OpEntry:
    """One op, or one module that is not an op, in execution order.

    It does not keep the module alive: graphs consist of entries, and live on in explanations and in reference cycles of
    networkx.

    Attributes:
        label: "1", or "1.0" inside a composite or a nested container.
        index: the position in the outermost container, as in int keys.
        stands_alone: whether the op was called by itself, so that its hooks and its own ``forward`` have already run.
    """

    def __init__(self, label: str, index: int, module: nn.Module, stands_alone: bool = False) -> None:
        self.label, self.index, self.stands_alone = label, index, stands_alone
        self._kind = type(module).__name__
        self._module: ref[nn.Module] | None = ref(module)

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it has been freed."""
        return None if self._module is None else self._module()

    @property
    def op(self) -> Op | None:
        """The module, if it is an op."""
        module = self.module
        return module if isinstance(module, Op) else None

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        module = self.module
        return self._kind if module is None else type(module).__name__

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kind": self.kind, "_module": None}

    def __str__(self) -> str:
        return self.kind if self.stands_alone else f"op {self.label} ({self.kind})"


@dataclass(frozen=True)
class Addressee:
    """The target of a key: a child, or a module deeper down, with its entries."""

    label: str
    module: nn.Module
    entries: tuple[int, ...]

    def __str__(self) -> str:
        return f"op {self.label} ({type(self.module).__name__})"


EntrySlots = tuple[tuple[tuple[str, int], ...], ...]  # entry -> the (keyword, slot) that it is given


class BindRecipe(NamedTuple):
    """The binding of calls of one form: the argument of each slot, and the slots that each op reads."""

    arguments: list[int]
    reads: EntrySlots


class FlatContainer:
    """The entries of a container, or of an op called by itself, and the ways to address them.

    Attributes:
        entries: in execution order; composites and nested containers are flattened.
        channels: (entry, keyword) -> (entry, extra output) for every keyword that reads an earlier op's extra output.
        takers: keyword -> the entries that take it.
        required: the (entry, keyword) that a call must give, in op order, then signature order.
        modules: the modules of the entries.
        ops: the ops among the modules, and the ops inside them.
        holders: the ops with parameters; ``hooks``: the hooks of all ops.
        bound: the bindings by form of the call.
    """

    def __init__(self, container: Container | Op) -> None:
        self.entries: list[OpEntry] = []
        self.modules: list[nn.Module] = []
        self.channels: dict[tuple[int, str], tuple[int, str]] = {}
        self.takers: dict[str, list[int]] = {}
        self.required: list[tuple[int, str]] = []
        self.bound: dict[tuple[object, ...], BindRecipe] = {}
        self._by_index: list[Addressee] = []
        self._by_name: dict[str, Addressee] = {}
        self._by_id: dict[int, list[Addressee]] = {}
        self._seen: list[tuple[nn.Module, tuple[tuple[str, object], ...], bool]] = []
        self._composites: list[tuple[Chain, int]] = []
        self._children = tuple(container._modules.items())
        if isinstance(container, Op):
            self._add_alone(container)
        else:
            for index, (name, module) in enumerate(container._modules.items()):
                self._by_index.append(self._add(module, name, index, (container,)))
        self._connect()
        ops = [module for module in self.modules if isinstance(module, Op)]
        self.ops = [inner for op in ops for inner in op.modules() if isinstance(inner, Op)]
        self.holders = [op for op in ops if op._parameters or op._modules]
        self.hooks = [hooks for op in ops for hooks in hooks_of(op)]

    def is_current(self, container: Container | Op) -> bool:
        """Whether the container, which this object does not keep, and those inside it are unchanged."""
        if tuple(container._modules.items()) != self._children:
            return False
        for module, children, hooked in self._seen:
            if tuple(module._modules.items()) != children or is_hooked(module) != hooked:
                return False
        for composite, version in self._composites:  # noqa: SIM110  # no generator: this is asked at every call
            if composite.decision_version != version:
                return False
        return True

    def refuse_keyword(self, name: str) -> ArgumentError:
        """Raises the error for a keyword that no op takes."""
        keywords, hint = ", ".join(sorted(self.takers)) or "none", did_you_mean(name, self.takers)
        if self.entries and self.entries[0].stands_alone:
            return ArgumentError(f"{self.entries[0]} takes no {shown(name)}; its keywords are: {keywords}{hint}")
        return ArgumentError(f"no op takes the keyword {shown(name)}; the keywords of the ops are: {keywords}{hint}")

    def opened(self) -> Iterator[nn.Module]:
        """The modules inside the container whose children are among the entries."""
        for module, _, _ in self._seen:
            yield module

    def resolve(self, key: object) -> Addressee:
        """The module and entries that a key of ``op_kwargs`` addresses.

        Raises:
            ArgumentError: the key has the wrong type, is not in the container or is there more than once, or takes no
                keywords.
            IndexError: an index out of range.
        """
        if isinstance(key, nn.Module):
            addressee = self._of_module(key)
        elif isinstance(key, str):
            addressee = self._of_name(key)
        elif isinstance(key, int) and not isinstance(key, bool):
            addressee = self._of_index(key)
        else:
            raise ArgumentError(
                f"op_kwargs: {shown(key)} is a {type(key).__name__}; use the op itself, its index or its name"
            )
        if not isinstance(addressee.module, Op):
            inside = "; address the ops inside it by module" if isinstance(addressee.module, nn.Sequential) else ""
            raise ArgumentError(f"op_kwargs: {addressee} is not an Op and takes no keywords{inside}")
        return addressee

    def module_at(self, label: str) -> nn.Module:
        """The module with that label."""
        return self._by_name[label].module

    def _of_module(self, key: nn.Module) -> Addressee:
        addressees = self._by_id.get(id(key), [])
        if not addressees:
            raise ArgumentError(
                f"op_kwargs: this {type(key).__name__} is not in the container, which has {self._all()}"
            )
        if len(addressees) > 1:
            places = " and ".join(t.label for t in addressees)
            way = "a name" if any("." in t.label for t in addressees) else "an index"
            raise ArgumentError(f"op_kwargs: this {type(key).__name__} occurs at {places}: use {way}")
        return addressees[0]

    def _of_name(self, key: str) -> Addressee:
        if key not in self._by_name:
            hint = did_you_mean(key, self._by_name)
            raise ArgumentError(f"op_kwargs: no op is named {shown(key)}; the container has {self._all()}{hint}")
        return self._by_name[key]

    def _of_index(self, key: int) -> Addressee:
        count = len(self._by_index)
        if not -count <= key < count:
            raise IndexError(f"op_kwargs: index {key} is out of range; the container has {count} ops: {self._all()}")
        return self._by_index[key]

    def _all(self) -> str:
        return ", ".join(map(str, self._by_index)) or "none"

    def _note(self, parent: nn.Module) -> None:
        self._seen.append((parent, tuple(parent._modules.items()), is_hooked(parent)))

    def _add(self, module: nn.Module, label: str, index: int, around: tuple[nn.Module, ...]) -> Addressee:
        first = len(self.entries)
        if isinstance(module, Composite):
            self._composites.append((module, module.decision_version))
        if opens(module):
            refuse_itself(module, label, around)
            self._note(module)
            for name, child in () if is_hooked(module) else module._modules.items():
                self._add(child, f"{label}.{name}", index, (*around, module))  # type: ignore[arg-type]
        if not opens(module) or is_hooked(module):
            self.entries.append(OpEntry(label, index, module))
            self.modules.append(module)
            self._check_whole(self.entries[-1], module)
        addressee = Addressee(label, module, tuple(range(first, len(self.entries))))
        self._by_name[label] = addressee
        self._by_id.setdefault(id(module), []).append(addressee)
        return addressee

    def _add_alone(self, op: Op) -> None:
        """Adds the op as the only entry. A composite runs as the chain of its parts."""
        self._composites = [(chain, chain.decision_version) for chain in op.modules() if isinstance(chain, Chain)]
        self.entries.append(OpEntry("0", 0, op, stands_alone=True))
        self.modules.append(op)
        self._by_index.append(Addressee("0", op, (0,)))
        self._by_name["0"] = self._by_index[0]

    def _check_whole(self, entry: OpEntry, module: nn.Module) -> None:
        """Checks a container with hooks, which is called as a whole with ``x`` only: its ops must not need more."""
        if isinstance(module, Container) and opens(module):
            inner = FlatContainer(module)
            for i, name in inner.required:
                raise ArgumentError(
                    f"{entry} has hooks, so it is called with x only, but its {inner.entries[i]} needs {name!r}; "
                    "hook its ops instead"
                )

    def _connect(self) -> None:
        makers: dict[str, tuple[int, str]] = {}
        for i, entry in enumerate(self.entries):
            op = entry.op
            if op is None:
                continue
            twice = sorted(op.keywords.keys() & set(foreseen(op).input_names()))
            if twice:
                raise ArgumentError(f"{entry}: {twice[0]!r} is both a keyword and a parameter; rename one")
            for name, keyword in op.keywords.items():
                self.takers.setdefault(name, []).append(i)
                if name in makers and not keyword.buffer:
                    self.channels[i, name] = makers[name]
                elif keyword.required:
                    self.required.append((i, name))
            for name in op.extra_outputs:
                if name in makers:
                    raise ArgumentError(
                        f"{entry}: extra output {name!r} is made by {self.entries[makers[name][0]]} already"
                    )
                makers[name] = (i, name)


def refuse_itself(module: nn.Module, label: str, around: tuple[nn.Module, ...]) -> None:
    """Raises if a container is nested in itself; ``around``: the containers that it is nested in."""
    if any([module is outer for outer in around]):
        kind = type(module).__name__
        raise ArgumentError(f"op {label} ({kind}) is a container that contains itself; give a copy, or remove it")


def opens(module: nn.Module) -> bool:
    """Whether to flatten a module. Hooks and custom code only run if it is called as a whole."""
    if isinstance(module, Composite):
        kind = type(module)
        overrides = kind.fwd is not Chain.fwd or kind.bwd is not Chain.bwd or kind.check is not Chain.check
        return not (overrides or overrides_forward(module) or patched_half(module) is not None)
    return isinstance(module, Container) and type(module).forward is type(module).container_forward
