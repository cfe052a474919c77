"""The behaviour on a torch that lacks a private name: the module is loaded again without it."""

from __future__ import annotations

import threading
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fusible import Pointwise
from fusible.fuser.contract import torch_private
from fusible.fuser.contract.spec import TensorSpec
from fusible.fuser.contract.tracing import NoDataError, Outline, contiguous_strides
from fusible.fuser.replay import calls
from fusible.ops.parameters import group
from fusible.ops.parameters.group import ExpertGroup
from fusible.ops.programs import operations


@pytest.fixture
def without(monkeypatch):
    """Loads the module beside the one in use, as on a torch without a name."""

    def load(name):
        monkeypatch.delattr(name)
        spec = spec_from_file_location("torch_private_of_older_torch", torch_private.__file__)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def views():
    x = torch.randn(4, 6)
    return x, x[1:], x.t(), torch.randn(4, 6)


@pytest.mark.parametrize(
    "name",
    [
        "torch._C._autograd._profiler_enabled",
        "torch._C._are_functorch_transforms_active",
        "torch._C._len_torch_dispatch_stack",
        "torch._C._dynamo.guards.TensorGuards",
        "torch.autograd.forward_ad._current_level",
    ],
)
def test_replay_is_refused_where_torch_cannot_be_asked(without, monkeypatch, name):
    reason = without(name).replay_refusal

    assert torch_private.replay_refusal is None
    assert name in reason
    monkeypatch.setattr(calls, "replay_refusal", reason)
    monkeypatch.setattr(calls, "current_stream", {"cpu": int})
    assert calls.call_key(None, SimpleNamespace(values=[torch.ones(1)]), None) == reason


def test_ranges_are_in_profiles_where_nobody_knows_of_one(without):
    assert without("torch._C._autograd._profiler_enabled").profiler_enabled()
    assert not torch_private.profiler_enabled()


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


def test_autograd_refuses_transforms_where_one_cannot_ask(without, monkeypatch):
    asks = torch_private.transforms_active
    module = without("torch._C._are_functorch_transforms_active")
    assert not module.transforms_active()
    monkeypatch.setattr(torch._C, "_are_functorch_transforms_active", asks, raising=False)  # torch's own apply asks too
    apply, x = module.apply_of(_Double), torch.ones(3, requires_grad=True)

    assert torch.equal(apply(x), torch_private.apply_of(_Double)(x))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(apply)(x)


def test_every_tensor_is_asked_for_its_tangent_where_the_level_is_not_known(without):
    with forward_ad.dual_level():
        level = torch_private.forward_ad_state._current_level

    assert without("torch.autograd.forward_ad._current_level").forward_ad_state._current_level == level == 0


def test_modes_and_batched_gradients_are_not_seen(without):
    assert without("torch._C._len_torch_dispatch_stack").dispatch_mode_depth() == 0
    assert not without("torch._C._functorch.is_legacy_batchedtensor").is_batched_gradient(torch.ones(1))


def test_all_gradients_are_wanted_and_a_warning_says_so(without):
    module = without("torch._C._will_engine_execute_node")

    with pytest.warns(UserWarning, match="leaves out"):
        assert module.engine_will_run(None)


def test_no_form_is_the_same_without_guards(without):
    x, *_, other = views()
    assert torch_private.tensor_guards([x])(other)

    assert not without("torch._C._dynamo.guards.TensorGuards").tensor_guards([x])(other)


def test_storages_are_told_apart_by_their_objects(monkeypatch):
    x, *shared, other = views()
    for identity in (torch_private._storage_by_address, torch_private._storage_by_object):
        assert {identity(t) for t in shared} == {identity(x)} != {identity(other)}


def test_a_subclass_without_torch_function_runs_as_a_tensor(without):
    module = without("torch._C._disabled_torch_function_impl")
    for disabled in (module.disabled_torch_function, torch_private.disabled_torch_function):
        kind = type("Kind", (torch.Tensor,), {"__torch_function__": disabled})
        y = torch.ones(3).as_subclass(kind) + 1
        assert type(y) is torch.Tensor
        assert y.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("torch.utils._python_dispatch._disable_current_modes", "without_dispatch_modes"),
        ("torch._subclasses.fake_tensor.unset_fake_temporarily", "without_fake_tensors"),
    ],
)
def test_modes_stay_where_they_cannot_be_hidden(without, monkeypatch, name, context):
    before, after = torch_private, without(name)
    monkeypatch.undo()  # torch needs it itself
    with torch_private.FakeTensorMode():
        for module, fake in ((before, False), (after, True)):
            with getattr(module, context)():
                assert isinstance(torch.ones(1), torch_private.FakeTensor) == fake


@pytest.mark.parametrize("name", ["FakeTensor", "FakeTensorMode"])
def test_explain_says_that_it_has_no_fake_tensors(without, name):
    module = without(f"torch._subclasses.fake_tensor.{name}")

    assert not isinstance(torch.ones(1), module.FakeTensor)
    with pytest.raises(RuntimeError, match="needs FakeTensorMode"):
        module.FakeTensorMode(allow_non_fake_inputs=True)


@pytest.mark.parametrize("name", ["DataDependentOutputException", "DynamicOutputShapeException"])
def test_exceptions_that_torch_lacks_are_never_raised(without, name):
    assert getattr(without(f"torch._subclasses.fake_tensor.{name}"), name).__base__ is RuntimeError


def test_no_tensor_is_functional_where_torch_has_none(without):
    module = without("torch._subclasses.functional_tensor.FunctionalTensor")

    assert not isinstance(torch.ones(1), module.FunctionalTensor)


def test_streams_are_read_from_objects(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=40 + device))

    assert torch_private._raw_stream(2) == 42


def test_compiled_code_keeps_its_steps_for_good(without):
    import_module("torch._dynamo.symbolic_convert")
    module, step = without("torch._dynamo.symbolic_convert.InstructionTranslator"), object()
    module.keep_with_compiled_code("step", step)

    assert module._kept == [step]


def test_a_graph_ends_without_a_reason(without):
    assert torch_private.graph_break_of_torch() is torch._dynamo.graph_break
    assert without("torch._dynamo.graph_break").graph_break_of_torch()(msg="why") is None


def test_constants_are_marked_in_the_public_way_too(monkeypatch):
    marked, function = list[object](), (lambda: 1)
    monkeypatch.setattr(torch.compiler, "assume_constant_result", marked.append)
    monkeypatch.setattr(torch_private, "_constants", [])
    torch_private.mark_constant(function)
    torch_private.mark_constants_again()

    assert function in marked


def test_kernels_know_fewer_functions_without_decompositions(without):
    assert torch_private.core_decompositions()
    assert without("torch._decomp.core_aten_decompositions").core_decompositions() == {}


def test_named_tuples_stay_what_they_are_where_they_cannot_be_written(without):
    module = without("torch.utils._pytree._register_namedtuple")
    assert module.serialized_as("fusible.TensorSpec")(TensorSpec) is TensorSpec
    assert "torch.utils._pytree._register_namedtuple" in module.missing


def test_functions_are_kept_where_torch_makes_no_graphs(without, monkeypatch):
    module = without("torch.fx.experimental.proxy_tensor.make_fx")
    with pytest.raises(RuntimeError, match=r"does not have torch\.fx\.experimental\.proxy_tensor\.make_fx"):
        module.symbolic_graph(torch.relu, [torch.ones(2)])
    monkeypatch.setattr(operations, "symbolic_graph", module.symbolic_graph)
    assert "does not have" in Pointwise(torch.special.i0).promises.eager_only


def test_memory_is_not_shared_where_torch_has_no_functions_for_it(without):
    pytest.importorskip("torch.distributed._symmetric_memory")

    assert torch_private.symmetric_memory_refusal() is None
    reason = without("torch.distributed._symmetric_memory.rendezvous").symmetric_memory_refusal()
    assert "does not have torch.distributed._symmetric_memory.rendezvous" in reason


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 0, 3), (4, 1, 5)])
def test_strides_are_those_of_a_contiguous_tensor(shape):
    assert contiguous_strides(shape) == torch.empty(shape).stride()


def test_an_outline_is_found_in_lists_of_arguments():
    outline = Outline(TensorSpec.of(torch.ones(2)), "no data here")

    with pytest.raises(NoDataError, match="no data here"):
        torch.cat([torch.ones(2), outline])


def test_addresses_are_asked_in_python_where_torch_has_no_function_for_it(without):
    assert torch_private.address_function
    assert without("torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr").address_function == 0


def test_a_node_that_cannot_run_when_it_is_ready_is_of_one_forward(monkeypatch):
    assert not torch_private.run_when_ready(SimpleNamespace())
    parameters = tuple([torch.nn.Parameter(torch.randn(3)) for _ in range(2)])
    kept = ExpertGroup(parameters)
    assert kept.whole(False) is kept.whole(False)
    monkeypatch.setattr(group, "run_when_ready", torch_private._never)
    fresh = ExpertGroup(parameters)
    assert fresh.whole(False) is not fresh.whole(False)


@pytest.mark.parametrize("name", ["_C._autograd._top_saved_tensors_default_hooks", "utils.checkpoint._CheckpointFrame"])
def test_no_checkpoint_is_seen(without, monkeypatch, name):
    found = []

    def forward(x, module):
        found.append(module.current_recomputation())
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint(forward, x, torch_private, use_reentrant=False)
    owner = found[0].owner
    with_record = torch_private._CheckpointFrame
    assert isinstance(owner, with_record)
    module = without(f"torch.{name}")
    monkeypatch.undo()  # checkpoints of torch 2.14 need the name
    if name.startswith("_C"):
        checkpoint(forward, x, module, use_reentrant=False)
        assert found[1] is None
    else:
        assert not isinstance(owner, module._CheckpointFrame)


def test_the_callers_thread_sets_the_guard_of_devices_before_one_that_ends(monkeypatch):
    """A torch for CUDA without a GPU crashed at the second function: its guard belonged to the thread of the first."""
    threads = []
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: threads.append(threading.get_ident()))
    Pointwise(lambda g, u: torch.special.i0(g) * u, halves="concat")

    assert threads[0] == threading.get_ident()
    assert set(threads) > {threading.get_ident()}
