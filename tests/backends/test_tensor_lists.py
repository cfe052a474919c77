"""Queries on hundreds of tensors at once: the extension agrees with each tensor."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulation import build, harness
from torch import Tensor, nn

from fusible import GroupedLinear
from fusible.fuser.contract import torch_private
from fusible.ops.kernels import tensor_lists
from fusible.ops.parameters.group import ExpertGroup

NAMES = ("weight0", "weight1", "weight2")


pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")


@pytest.fixture(params=[True, False], ids=["extension", "one by one"])
def asked(request: pytest.FixtureRequest, emulation: harness.Emulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extension and without."""
    monkeypatch.setattr(tensor_lists, "is_built", lambda: request.param)


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(part) for name, part in zip(NAMES, torch.randn(3, 2, 4), strict=True)}


def linear() -> GroupedLinear:
    return GroupedLinear(3, 16, 16, bias=False, dtype=torch.bfloat16, single_grouped_weight=False)


def as_numbers(addresses: list[int] | bytes) -> list[int]:
    return list(struct.unpack(f"{len(addresses) // 8}Q", addresses) if isinstance(addresses, bytes) else addresses)


@pytest.mark.usefixtures("asked")
def test_objects_are_compared_by_identity() -> None:
    values = parameters()
    objects = tuple(values.values())

    assert tensor_lists.has_objects(values, NAMES, objects)
    assert tensor_lists.has_objects({**values, "bias": None}, NAMES, objects)
    for name in NAMES:
        assert not tensor_lists.has_objects({**values, name: nn.Parameter(values[name].data)}, NAMES, objects)
        assert not tensor_lists.has_objects({n: v for n, v in values.items() if n != name}, NAMES, objects)


@pytest.mark.usefixtures("asked")
def test_a_mapping_whose_look_ups_may_do_more_is_not_read() -> None:
    values = OrderedDict(parameters())

    assert not tensor_lists.has_objects(values, NAMES, tuple(values.values()))


@pytest.mark.usefixtures("asked")
def test_addresses_are_those_of_the_data() -> None:
    memory = torch.randn(4, 6)
    tensors = [memory, memory[1:], memory.t()[3:], nn.Parameter(memory[2]), memory[:0], torch.empty(0)]

    for sequence in (tensors, tuple(tensors)):
        assert as_numbers(tensor_lists.addresses_of(sequence)) == [t.data_ptr() for t in tensors]


def test_what_is_no_tensor_is_an_error(emulation: harness.Emulation) -> None:
    with pytest.raises(RuntimeError, match="non-tensor"):
        emulation.tensor_addresses([torch.ones(1), "x"], torch_private.address_function)


@pytest.mark.usefixtures("asked")
def test_look_ups_of_a_mapping_of_its_own_run() -> None:
    """As those of libraries that fetch a parameter when it is looked up."""
    seen: list[str] = []

    class Fetching(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            seen.append(name)
            return super().__getitem__(name)

    layer = linear()
    layer(torch.randn(6, 16, dtype=torch.bfloat16), split_sizes=torch.tensor([2, 2, 2]))
    layer._parameters = Fetching(layer._parameters)
    layer(torch.randn(6, 16, dtype=torch.bfloat16), split_sizes=torch.tensor([2, 2, 2]))

    assert set(seen) == set(NAMES)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("how", ["replaced", "other memory", "places changed"])
def test_a_group_sees_what_has_become_of_its_parameters(how: str) -> None:
    layer = linear()
    x, sizes = torch.randn(6, 16, dtype=torch.bfloat16), torch.tensor([2, 2, 2])
    layer(x, split_sizes=sizes)
    parameter = layer._parameters["weight1"]
    assert parameter is not None
    if how == "replaced":
        layer._parameters["weight1"] = nn.Parameter(torch.zeros(16, 16, dtype=torch.bfloat16))
    elif how == "other memory":
        parameter.data = torch.zeros(16, 16, dtype=torch.bfloat16)
    else:
        layer.weight0.data, layer.weight1.data = layer.weight1.data, layer.weight0.data
    expected = [rows @ w.T for rows, w in zip(x.split(2), layer.expert_parameters("weight"), strict=True)]

    assert torch.allclose(layer(x, split_sizes=sizes), torch.cat(expected), atol=0.05)


def _swapped(parameter: nn.Parameter) -> None:
    """Other strides, at the same address."""
    parameter.data = parameter.data.t()


def _of_inference(parameter: nn.Parameter) -> None:
    with torch.inference_mode():
        parameter.data = torch.ones(4, 4)


def _of_a_class(parameter: nn.Parameter) -> None:
    parameter.__class__ = type("Other", (nn.Parameter,), {})


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "a gradient": lambda parameter: parameter.requires_grad_(False),
    "strides": _swapped,
    "sizes": lambda parameter: parameter.set_(parameter.data.view(2, 8)),
    "dims": lambda parameter: parameter.set_(parameter.data.view(16)),
    "a type of elements": lambda parameter: setattr(parameter, "data", parameter.data.view(torch.int32).double()),
    "values negated when read": lambda parameter: setattr(parameter, "data", torch._neg_view(parameter.data)),
    "inference": _of_inference,
    "a class": _of_a_class,
}


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_group_sees_every_change_of_form(change: str, place: int) -> None:
    tensors = tuple([nn.Parameter(part) for part in torch.randn(3, 4, 4)])
    form = ExpertGroup(tensors)._form()
    with torch.no_grad():
        tensors[place].add_(1)
    assert form.matches(*tensors)  # values are no form

    with torch.no_grad():
        CHANGES[change](tensors[place])

    assert not form.matches(*tensors)


@pytest.mark.usefixtures("asked")
def test_names_in_another_order_are_found() -> None:
    values = parameters()
    names = tuple(reversed(values))

    assert tensor_lists.has_objects({"first": None, **values}, names, tuple(map(values.get, names)))
    assert not tensor_lists.has_objects(values, names, tuple(values.values()))
    assert tensor_lists.has_objects(values, ("weight0", "other", "weight2"), (values["weight0"], None, None)) is False
