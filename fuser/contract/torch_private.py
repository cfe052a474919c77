"""Private parts of torch, and the replacements on a torch that lacks them.

Every private name is looked up here, once, when the module is imported, so nothing else breaks if torch renames one.
Functions used by hot calls are bound directly, so that they cost no Python call. Torch 2.11 to 2.14 have all of them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch.fx import GraphModule

T = TypeVar("T")

try:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
except ImportError:

    class FakeTensor(Tensor):  # type: ignore[no-redef]
        """A class without instances; tensors of torch's compiler then count as tensors with data."""

    class FakeTensorMode:  # type: ignore[no-redef]
        """Cannot be made, so ``explain`` says why it cannot run."""

        def __init__(self, **_: object) -> None:
            raise RuntimeError(f"explain() needs FakeTensorMode, which torch {torch.__version__} does not have")


try:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
except ImportError:

    class DataDependentOutputException(RuntimeError):  # type: ignore[no-redef]
        """Never raised; ``explain`` then shows the error that torch raises in its place."""

    class DynamicOutputShapeException(RuntimeError):  # type: ignore[no-redef]
        """Never raised either."""


try:
    from torch._subclasses.functional_tensor import FunctionalTensor
except ImportError:

    class FunctionalTensor(Tensor):  # type: ignore[no-redef]
        """A class without instances."""


__all__ = ["DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode"]
__all__ += ["FunctionalTensor"]


missing: dict[str, None] = {}
"""Names that were looked for, and that this torch does not have, in order."""


def private(path: str) -> Any:
    """The attribute of torch under a dotted name after ``torch.``, or None. Imports no module."""
    value: object = torch
    for name in path.split("."):
        value = getattr(value, name, None)
    return _noted(f"torch.{path}", value)


def private_of_module(module: str, name: str) -> Any:
    """The attribute of a module, or None if either does not exist. Imports the module."""
    try:
        value = getattr(import_module(module), name, None)
    except ImportError:
        value = None
    return _noted(f"{module}.{name}", value)


def _noted(name: str, value: T) -> T:
    if value is None:
        missing[name] = None
    return value


# ---- who observes or transforms calls


def _never(*_: object) -> bool:
    return False


_ASKED_BY_REPLAY = (
    "_C._autograd._profiler_enabled",
    "_C._are_functorch_transforms_active",
    "_C._len_torch_dispatch_stack",
    "_C._dynamo.guards.TensorGuards",
    "autograd.forward_ad._current_level",
)


def _replay_refusal() -> str | None:
    missing = [f"torch.{path}" for path in _ASKED_BY_REPLAY if private(path) is None]
    return f"torch {torch.__version__} does not have {', '.join(missing)}" if missing else None


replay_refusal: str | None = _replay_refusal()
"""The reason why no call is replayed: torch cannot be asked for all facts that a replay depends on. None: it can."""

profiler_enabled: Callable[[], bool] = private("_C._autograd._profiler_enabled") or (lambda: True)
"""Whether a profiler runs. Else: always, so that profiles keep their ranges, and each call pays for them."""

has_transform_query = private("_C._are_functorch_transforms_active") is not None
transforms_active: Callable[[], bool] = private("_C._are_functorch_transforms_active") or _never
"""Whether ``vmap`` or another transform is active. Else: never, and :func:`apply_of` lets autograd refuse them."""

dispatch_mode_depth: Callable[[], int] = private("_C._len_torch_dispatch_stack") or int
"""How many dispatch modes see every operation. Else: 0, and nothing is replayed."""

current_dispatch_mode: Callable[[], object] = private_of_module(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode"
) or (lambda: None)
"""The innermost dispatch mode. Else: None, and products wait for one another while a call is captured."""

forward_ad_state: Any = forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=0)
"""Its ``_current_level`` is the level of forward-mode gradients, -1 outside of them; read without a call.

Else: 0, so that every tensor is asked for its tangent.
"""


SavedTensorsHooks = tuple[Callable[[Tensor], object], Callable[[object], Tensor]]
top_saved_tensors_hooks: Callable[[bool], SavedTensorsHooks | None] = private(
    "_C._autograd._top_saved_tensors_default_hooks"
) or (lambda _: None)
"""Like the next, but asked with ``True``, and without a call in Python."""


def current_saved_tensors_hooks() -> SavedTensorsHooks | None:
    """The hooks of the innermost ``saved_tensors_hooks``, to pack and to unpack. Else: None, as if there were none."""
    return top_saved_tensors_hooks(True)


_CheckpointFrame: type = private_of_module("torch.utils.checkpoint", "_CheckpointFrame") or type(None)


class Recomputation(NamedTuple):
    """The attribute in which a checkpoint keeps the function that it calls again in the backward."""

    owner: object
    attribute: str


def current_recomputation() -> Recomputation | None:
    """Where the innermost checkpoint that runs its first forward keeps it; None: there is none. Else: None.

    A checkpoint packs what autograd saves, with the record of the checkpoint in a closure. A reentrant checkpoint runs
    inside the forward of an autograd function, whose ``ctx`` has its function, as does Megatron's own.
    """
    if not torch.is_grad_enabled():
        return None if is_without_gradients() else _reentrant_recomputation()
    hooks = current_saved_tensors_hooks()
    for cell in () if hooks is None else getattr(hooks[0], "__closure__", None) or ():
        if isinstance(cell.cell_contents, _CheckpointFrame):
            return Recomputation(cell.cell_contents, "recompute_fn")
    return None


def _reentrant_recomputation() -> Recomputation | None:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_varnames[:1] == ("ctx",) and hasattr(frame.f_locals["ctx"], "run_function"):
            return Recomputation(frame.f_locals["ctx"], "run_function")
    return None


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., tuple[Tensor, ...]]:
    """Its ``apply`` without the look at every argument for remains of transforms, which :mod:`runtime` refuses.

    Else: ``apply`` as it is, which refuses transforms itself.
    """
    apply: Callable[..., tuple[Tensor, ...]] = (
        super(torch.autograd.Function, function).apply if has_transform_query else function.apply  # type: ignore[misc]
    )
    return apply


is_batched_gradient: Callable[[Tensor], bool] = private("_C._functorch.is_legacy_batchedtensor") or _never
"""Whether a gradient comes from ``is_grads_batched``. Else: no, and torch's own error is raised."""


# ---- backwards


@cache
def _warn_of_left_out_gradients() -> None:
    warnings.warn(
        f"torch {torch.__version__} does not say which gradients torch.autograd.grad leaves out: every main_grad is "
        "written that the backward could write; call backward() instead",
        stacklevel=2,
    )


def _will_run(node: object) -> bool:
    _warn_of_left_out_gradients()
    return True


engine_will_run: Callable[[object], bool] = private("_C._will_engine_execute_node") or _will_run
"""Whether the running backward will run a node. Else: yes, with a warning, as is true of ``backward()``."""


_FIRST = 2**64 - 1  # the number of the nodes that accumulate gradients


def run_when_ready(node: object) -> bool:
    """Makes a backward run a node as soon as its gradient is there, before nodes that are younger; whether it does.

    So it runs those that accumulate gradients. Else: it does not, and the node is of one forward.
    """
    renumber = getattr(node, "_set_sequence_nr", None)
    if renumber is not None:
        renumber(_FIRST)
    return renumber is not None


_forward_gradients_enabled: Callable[[], bool] = private("_C._is_fwd_grad_enabled") or _never


def is_without_gradients() -> bool:
    """Whether the caller runs under ``no_grad`` or ``inference_mode``.

    The forward of an autograd function, such as a reentrant checkpoint's, switches off gradients of both modes;
    ``no_grad`` leaves forward mode on. Else: ``no_grad`` counts as such a forward.
    """
    if torch.is_grad_enabled():
        return False
    return _forward_gradients_enabled() or torch.is_inference_mode_enabled()


# ---- tensors


Dims = Sequence[Sequence[int | None]] | None
_TensorGuards: Any = private("_C._dynamo.guards.TensorGuards")


def tensor_guards(tensors: Sequence[Tensor], sizes: Dims = None, strides: Dims = None) -> Callable[..., bool]:
    """Checks whether tensors are of the form of these, as torch does before compiled code. None in sizes is any.

    Else: none is, so that nothing is kept by form.
    """
    if _TensorGuards is None:
        return _never
    check: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def _storage_by_address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storage_by_object(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


storage_id = _storage_by_address if hasattr(torch.UntypedStorage, "_cdata") else _storage_by_object
"""The identity of a tensor's storage while it lives. Else: that of the object which torch keeps with the storage."""

implementation_of: Callable[[Tensor], object] = attrgetter("_cdata") if hasattr(Tensor, "_cdata") else id
"""The identity of what autograd knows a tensor by. Else: that of its object, as if ``swap_tensors`` did not exist."""


address_function: int = private("_C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr") or 0
"""The address of a C function that returns the address of a tensor's data. Else: 0, and Python asks each tensor."""


class _WithoutTorchFunction:
    """Runs a function on a subclass as on a tensor. It is an object, so that it does not become a method."""

    def __call__(
        self,
        function: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


disabled_torch_function: Any = private("_C._disabled_torch_function_impl") or _WithoutTorchFunction()
"""The ``__torch_function__`` of a subclass that has none. Else: the same in Python."""

dispatch_disabled: Callable[[], AbstractContextManager[object]] | None = private("_C._DisableTorchDispatch")
"""Runs a body's operations on the memory of subclasses. Else: None, and weights are gathered by FSDP2 in 16 bits."""

without_dispatch_modes: Callable[[], AbstractContextManager[object]] = (
    private_of_module("torch.utils._python_dispatch", "_disable_current_modes") or nullcontext
)
"""Hides a body from dispatch modes. Else: they see it; a function of packed columns is then one no kernel knows."""

without_fake_tensors: Callable[[], AbstractContextManager[object]] = (
    private_of_module("torch._subclasses.fake_tensor", "unset_fake_temporarily") or nullcontext
)
"""Leaves the tensors of a body their data under :class:`FakeTensorMode`. Else: ``explain`` takes them to be aligned."""


# ---- devices


def _raw_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


current_raw_stream: Callable[[int], int] = (
    private("_C._cuda_getCurrentRawStream") or _raw_stream if torch.version.cuda else int
)
"""The address of the current stream of a CUDA device. Else: by an object; any number in a build without CUDA."""

current_cuda_device: Callable[[], int] = (
    private("_C._cuda_getDevice") if torch.version.cuda else None
) or torch.cuda.current_device
"""The index of the current CUDA device. Else: by the public function, which takes longer."""


# ---- memory that the GPUs of a host share: alpha in torch 2.11 and 2.13


_SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"


def symmetric_memory_refusal() -> str | None:
    """Why no memory can be shared; None: torch has functions for it. Imports them."""
    missing = [name for name in ("empty", "rendezvous") if private_of_module(_SYMMETRIC_MEMORY, name) is None]
    return f"torch {torch.__version__} does not have {_SYMMETRIC_MEMORY}.{missing[0]}" if missing else None


def symmetric_memory(nbytes: int, device: torch.device) -> Tensor:
    """Memory of this rank that can be shared, uint8 [nbytes]. Else: :func:`symmetric_memory_refusal` says why not."""
    memory: Tensor = import_module(_SYMMETRIC_MEMORY).empty(nbytes, dtype=torch.uint8, device=device)
    return memory


def symmetric_addresses(memory: Tensor, group_name: str) -> tuple[list[int], object]:
    """The addresses of all ranks' memory, and the handle that keeps them mapped.

    Collective over the process group of that name; else as :func:`symmetric_memory`.
    """
    handle = import_module(_SYMMETRIC_MEMORY).rendezvous(memory, group_name)
    return [int(address) for address in handle.buffer_ptrs], handle


# ---- torch.compile, which takes seconds to import: nothing is looked up before it is asked for


def graph_break_of_torch() -> Callable[..., None]:
    """``torch._dynamo.graph_break``. Else: nothing; a function that is not compiled ends the graph too."""
    function: Callable[..., None] | None = private_of_module("torch._dynamo", "graph_break")
    return function or (lambda msg="": None)


def keep_with_compiled_code(name: str, value: object) -> None:
    """Makes a value a global of the code that is compiled now, so that it lives as long. Else: it lives on."""
    translator = private_of_module("torch._dynamo.symbolic_convert", "InstructionTranslator")
    try:
        translator.current_tx().output.install_global(name, value)
    except AttributeError:
        _kept.append(value)


_kept: list[object] = []
_constants: list[Callable[..., object]] = []


def mark_constant(function: Callable[..., object]) -> None:
    """Does what ``torch.compiler.assume_constant_result`` does, without importing the compiler.

    Else: :func:`mark_constants_again` does it in the public way.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    _constants.append(function)
    if "torch._dynamo" in sys.modules:
        mark_constants_again()


def mark_constants_again() -> None:
    """Marks them in the public way, once the compiler is imported."""
    for function in _constants:
        torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]


def serialized_as(name: str) -> Callable[[type[T]], type[T]]:
    """Lets ``torch.export.save`` write programs that return a named tuple of the class. Else: it refuses them."""

    def register(cls: type[T]) -> type[T]:
        function = private_of_module("torch.utils._pytree", "_register_namedtuple")
        if function is not None:
            function(cls, serialized_type_name=name)
        return cls

    return register


def symbolic_graph(function: Callable[..., object], examples: Sequence[Tensor]) -> GraphModule:
    """The operations of a function as an FX graph module, for tensors of any sizes: equal ones stay equal.

    Raises what torch raises where it cannot follow the function. Else: RuntimeError.
    """
    make_fx = private_of_module("torch.fx.experimental.proxy_tensor", "make_fx")
    if make_fx is None:
        raise RuntimeError(f"torch {torch.__version__} does not have torch.fx.experimental.proxy_tensor.make_fx")
    graph: GraphModule = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    return graph


def set_device_guard() -> None:
    """Sets torch's guard of CUDA devices, which tracing does as well. Else: nothing.

    Without a GPU, a torch that is built for CUDA keeps an object of the first thread that sets it. Once that thread has
    ended, the next trace crashes. So a thread that stays sets it before one that ends.
    """
    set_guard = private_of_module("torch._C", "_ensureCUDADeviceGuardSet")
    if set_guard is not None:
        set_guard()


def core_decompositions() -> dict[OpOverload, Callable[..., object]]:
    """Torch's decompositions into core operations. Else: none, and kernels know fewer functions."""
    table = private_of_module("torch._decomp", "core_aten_decompositions")
    return {} if table is None else dict(table().items())


current_graph_task: Callable[[], int] = private("_C._current_graph_task_id") or (lambda: -1)
"""The id of the backward that runs in this thread; -1: none. Where torch does not say, none ever does."""
