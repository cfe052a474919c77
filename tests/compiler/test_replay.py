"""Calls that are replayed: the same bits as the first, and nothing of a form, a module or a switch that has changed.

They run on the emulated kernels (tests/emulation), whose tensors are on the CPU: a plan is told that they are not.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from emulation import build, harness, stub
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fusible import GLU, Activation, GroupedLinear, ReGLU, Scale, Sequential, SwiGLU, config
from fusible.fuser import DoubleBackwardError, replay
from fusible.fuser.contract import tracing
from fusible.fuser.contract.torch_private import address_function
from fusible.fuser.replay import capture, guards
from fusible.ops.kernels import extension

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")

ROOT = Path(__file__).parents[2]
GROUPS, K, F, SIZES = 3, 16, 16, [5, 0, 9]
T = sum(SIZES) + 2


class Runs:
    """Counts: of launches made one by one, and of replays."""

    def __init__(self) -> None:
        self.one_by_one = 0
        self.before = replay.stats()

    @property
    def again(self) -> int:
        """Replays so far."""
        return replay.stats().replayed - self.before.replayed

    @property
    def captured(self) -> int:
        """Captures so far, of calls and of backwards."""
        return replay.stats().captured - self.before.captured

    def of(self, function: Callable[[], Any]) -> tuple[int, int]:
        one_by_one, again = self.one_by_one, self.again
        function()
        return self.one_by_one - one_by_one, self.again - again


def launches_of(emulation: harness.Emulation) -> set[str]:
    """The functions of the extension that launch."""
    functions = vars(emulation._module).items()
    return {name for name, function in functions if "stream" in (getattr(function, "__text_signature__", None) or "")}


@pytest.fixture
def runs(emulation: harness.Emulation, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    runs = Runs()

    class Counted:
        def __getattr__(self, name: str) -> Any:
            value = getattr(emulation, name)
            if name not in launching:
                return value

            def launch(**fields: Any) -> None:
                runs.one_by_one += 1
                value(**fields)

            return launch

    counted, launching = Counted(), launches_of(emulation)
    monkeypatch.setattr(extension, "library", lambda: counted)
    with replay.simulated("cpu"):
        yield runs


class Experts:
    """A fused MLP and what it is called with."""

    def __init__(self, seed: int = 0, **how: Any) -> None:
        torch.manual_seed(seed)
        how = {"bias": False, "dtype": torch.bfloat16, **how}
        self.fc1, self.fc2 = GroupedLinear(GROUPS, K, 2 * F, **how), GroupedLinear(GROUPS, F, K, **how)
        self.model = Sequential(self.fc1, SwiGLU(), Scale(), self.fc2)
        self.sizes = torch.tensor(SIZES)
        self.give()

    def give(self, rows: int = T) -> None:
        """Other inputs."""
        self.x = torch.randn(rows, K, dtype=torch.bfloat16).requires_grad_()
        self.scales = torch.rand(rows).requires_grad_()
        self.dy = torch.randn(rows, K, dtype=torch.bfloat16)

    def forward(self, **more: Any) -> Tensor:
        y: Tensor = self.model(self.x, split_sizes=self.sizes, scales=self.scales, **more)
        return y

    def step(self) -> list[Tensor]:
        """The output and all gradients."""
        leaves = [self.x, self.scales, *self.model.parameters()]
        for tensor in leaves:
            tensor.grad = None
        y = self.forward()
        y.backward(self.dy)
        assert torch.equal(y[sum(SIZES) :], torch.zeros_like(y[sum(SIZES) :]))
        return [y.detach(), *[t.grad for t in leaves if t.grad is not None]]

    def anew(self) -> list[Tensor]:
        """The results of :meth:`step` for the same values in a copy, which has no state of earlier calls."""
        other = copy(self)
        other.model = deepcopy(self.model)
        for own, parameter in zip(self.model.parameters(), other.model.parameters(), strict=True):
            if isinstance(getattr(own, "main_grad", None), Tensor):
                parameter.main_grad = own.main_grad.clone()
        return other.step()

    def warm(self) -> None:
        """Until both halves are replayed, and the forward without being looked up."""
        for _ in range(5):
            self.step()


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_stub_declares_the_fields_of_every_launch(emulation: harness.Emulation) -> None:
    text = stub.STUB.read_text()

    assert text == stub.written(text, emulation._module.declarations), "run `python -m emulation.stub` in tests"
    assert launches_of(emulation) <= emulation._module.declarations.keys()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": 0, "rows": 1}, "zero_tail: takes no rows"),
        ({"data": "x"}, "zero_tail: data: does not take 'x'"),
        ({"groups": 2**40}, "zero_tail: groups: does not take 1099511627776"),
    ],
)
def test_fields_of_a_launch_are_checked(emulation: harness.Emulation, fields: dict[str, Any], message: str) -> None:
    names = ("device", "stream", "data", "tokens", "row_bytes", "pitch_bytes", "groups", "sizes", "int64_sizes")

    with pytest.raises(TypeError, match=message):
        emulation.zero_tail(**dict.fromkeys(names, 0) | fields)
    with pytest.raises(TypeError, match="zero_tail: needs int64_sizes"):
        emulation.zero_tail(**dict.fromkeys(names[:-1], 0))


def zero_tail_of(emulation: harness.Emulation, rows: Tensor, sizes: Tensor) -> None:
    emulation.zero_tail(
        device=0,
        stream=0,
        data=rows.data_ptr(),
        tokens=rows.shape[0],
        row_bytes=4 * rows.shape[1],
        pitch_bytes=4 * rows.shape[1],
        groups=sizes.shape[0],
        sizes=sizes.data_ptr(),
        int64_sizes=True,
    )


def test_a_launch_on_other_memory_refuses(emulation: harness.Emulation) -> None:
    rows, sizes, refusals = torch.ones(8, 4), torch.tensor([2, 3]), []
    for given in ([rows, sizes], [rows]):
        with capture.Capture(given, 8) as watching:
            zero_tail_of(emulation, rows, sizes)
        refusals.append(watching.recorder.refusal)

    assert torch.equal(rows[:, 0], torch.tensor([1.0] * 5 + [0.0] * 3))
    assert refusals == [None, "a launch reads or writes memory that was neither given nor allocated"]


def test_a_launch_on_memory_of_two_tensors_refuses(emulation: harness.Emulation) -> None:
    rows, sizes, refusals = torch.ones(8, 4), torch.tensor([2, 3]), []
    for part in (rows[4:], rows[:4]):
        with capture.Capture([rows, sizes, part], 8) as watching:
            zero_tail_of(emulation, rows, sizes)
        refusals.append(watching.recorder.refusal)

    assert refusals == [None, "inputs overlap, so that an address does not say whose it is"]


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda x: torch.empty(()), "a result has no dims or is strided"),
        (lambda x: torch.empty(4, 2).mT, "a result has no dims or is strided"),
        (lambda x: torch.empty(8)[:4], "a result is a part of an allocation"),
        (
            lambda x: torch.empty(0),
            "a result is empty, of a type of its own, or neither an input nor all of an allocation",
        ),
        (lambda x: x, "a result is an input"),
        (lambda x: x[2:], "a result is an input"),
        (lambda x: x.detach(), None),
        (lambda x: torch.empty(8).view(2, 4), None),
    ],
)
def test_a_result_that_cannot_be_given_again_refuses(
    emulation: harness.Emulation, result: Callable[[Tensor], Tensor], reason: str | None
) -> None:
    x = torch.ones(8)
    with torch.no_grad(), capture.Capture([x], 8) as watching:
        y = result(x)

    assert watching.finish([y]) == reason


@pytest.mark.parametrize(
    ("kept", "views"),
    [
        (lambda x: x, []),
        (lambda x: x.detach(), [(0, None)]),
        (lambda x: x.view(-1, 2), [(0, (-1, 2))]),
        (lambda x: x.mT, None),
        (lambda x: x[1:], None),
        (lambda x: x[:2], None),
        (lambda x: x.view(torch.int32), None),
        (lambda x: x[0, 0, 0], None),
    ],
)
def test_what_is_kept_of_an_input_is_viewed_again(
    emulation: harness.Emulation, kept: Callable[[Tensor], Tensor], views: list[Any] | None
) -> None:
    x = torch.ones(4, 3, 2)
    with torch.no_grad(), capture.Capture([x], 4) as watching:
        y = kept(x)

    assert watching.finish([], [y]) == ("a result is an input" if views is None else None)
    assert views is None or watching.views == views


def test_two_results_in_one_allocation_refuse(emulation: harness.Emulation) -> None:
    with torch.no_grad(), capture.Capture([torch.ones(8)], 8) as watching:
        y = torch.empty(8)
        flat = y.view(2, 4)

    assert watching.finish([y, flat]) == "two results are one allocation"


def test_an_output_that_is_kept_is_allocated_once(emulation: harness.Emulation) -> None:
    x = torch.ones(8)
    with torch.no_grad(), capture.Capture([x], 8) as watching:
        y = torch.empty(8)

    assert watching.finish([y], [x, y]) is None
    assert watching.results == [1, 0, 1]


def test_inputs_that_are_written_are_known_by_their_versions(emulation: harness.Emulation) -> None:
    tensors = [torch.ones(8) for _ in range(3)]
    with capture.Capture(tensors, 8) as watching:
        torch.autograd.graph.increment_version(tensors[1])

    assert watching.finish([]) is None
    assert watching.written == [1]


FORMS = [
    {},
    {"bias": True},
    {"single_grouped_weight": False},
    {"transposed_weight": True},
    {"bias": True, "single_grouped_bias": False, "single_grouped_weight": False},
]


@pytest.mark.parametrize("how", FORMS)
def test_a_third_call_is_replayed_bit_by_bit(runs: Runs, how: dict[str, Any]) -> None:
    experts = Experts(**how)
    first = experts.step()
    experts.step()
    experts.step()

    assert runs.of(lambda: None) == (0, 0)
    again: list[Tensor] = []
    assert runs.of(lambda: again.extend(experts.step())) == (0, 2)
    assert same(again, first)
    assert len(first) == 3 + len(list(experts.model.parameters()))


def test_large_memory_is_let_go_of_between_launches(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "LARGE", 512)
    experts = Experts()
    first = experts.step()
    experts.step()

    again: list[Tensor] = []
    experts.step()
    assert runs.of(lambda: again.extend(experts.step())) == (0, 2)
    assert same(again, first)


def test_an_inference_call_is_replayed(runs: Runs) -> None:
    experts, outputs = Experts(), []

    with torch.no_grad():
        counts = [runs.of(lambda: outputs.append(experts.forward())) for _ in range(3)]

    assert [again for _, again in counts] == [0, 0, 1]
    assert counts[2][0] == 0
    assert same(outputs[1:], outputs[:1] * 2)


def test_inference_before_training_leaves_gradients(runs: Runs) -> None:
    experts = Experts(single_grouped_weight=False)
    with torch.no_grad():
        experts.forward()

    assert len(experts.step()) == 3 + 2 * GROUPS


def test_other_tensors_of_the_form_are_read(runs: Runs) -> None:
    experts = Experts()
    experts.warm()
    experts.give()
    experts.sizes = torch.tensor([2, 7, 5])

    got: list[Tensor] = []
    assert runs.of(lambda: got.extend(experts.step())) == (0, 2)
    assert same(got, experts.anew())


LENGTHS = [T, T + 3, T + 200, T + 1, 5 * T, T + 600, T]


@pytest.mark.parametrize("how", [*FORMS, {"accumulate_into_main_grad": True}])
@pytest.mark.parametrize("large", [512, 2**20])
def test_rows_may_differ_in_every_step(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], large: int
) -> None:
    monkeypatch.setattr(capture, "LARGE", large)
    experts, counts = Experts(**how), []
    for rows in LENGTHS:
        experts.give(rows)
        for p in experts.model.parameters() if how.get("accumulate_into_main_grad") else ():
            p.main_grad = torch.zeros(p.shape)
        expected, got = experts.anew(), list[Tensor]()
        counts.append(runs.of(lambda got=got: got.extend(experts.step())))
        assert same(got, expected), rows
        assert experts.model.explain() == experts.model.explain(
            experts.x, split_sizes=experts.sizes, scales=experts.scales
        )

    assert counts[3:] == [(0, 2)] * 4
    assert runs.captured == 4


def test_rows_may_differ_without_gradients(runs: Runs) -> None:
    experts, counts = Experts(), []
    with torch.no_grad():
        for rows in LENGTHS:
            experts.give(rows)
            experts.x = experts.x.detach().view(rows, 1, K).expand(rows, 1, K)
            experts.scales = experts.scales.detach().view(rows, 1)
            got, expected = list[Tensor](), copy(experts)
            expected.model = deepcopy(experts.model)
            counts.append(runs.of(lambda got=got: got.append(experts.forward())))
            assert torch.equal(got[0], expected.forward())

    assert counts[3:] == [(0, 1)] * 4


def test_an_input_that_is_flattened_may_have_other_rows(runs: Runs) -> None:
    experts, counts = Experts(), []
    for rows in LENGTHS:
        experts.give(rows)
        experts.x = experts.x.detach().view(rows, 1, K).requires_grad_()
        experts.scales, experts.dy = experts.scales.detach().view(rows, 1), experts.dy.view(rows, 1, K)
        expected, got = copy(experts), list[Tensor]()
        expected.model, leaves = deepcopy(experts.model), [experts.x, *experts.model.parameters()]
        grads = torch.autograd.grad(expected.forward(), [experts.x, *expected.model.parameters()], experts.dy)
        counts.append(runs.of(lambda: got.extend(torch.autograd.grad(experts.forward(), leaves, experts.dy))))  # noqa: B023
        assert same(got, list(grads))

    assert counts[3:] == [(0, 2)] * 4


def test_rows_that_differ_must_still_fit(runs: Runs) -> None:
    experts = Experts()
    for rows in LENGTHS:
        experts.give(rows)
        experts.step()
    experts.scales = torch.rand(LENGTHS[-1] + 1)

    with pytest.raises(ValueError, match="scales"):
        experts.forward()


def test_no_rows_are_not_those_of_others(runs: Runs) -> None:
    experts = Experts()
    for rows in LENGTHS:
        experts.give(rows)
        experts.step()
    experts.give(0)
    experts.fc1.weight.grad = None
    experts.sizes = torch.zeros(GROUPS, dtype=torch.int64)

    y = experts.forward()
    y.backward(experts.dy)
    assert y.shape == (0, K)
    assert not experts.fc1.weight.grad.any()


def test_no_rows_that_came_first_are_not_those_of_others(runs: Runs) -> None:
    experts = Experts()
    experts.sizes = torch.zeros(GROUPS, dtype=torch.int64)
    for rows in (0, T, T + 3, T + 1):
        experts.give(rows)
        experts.forward()

    assert experts.model.explain().replay == "replayed"
    experts.give(0)
    counts = [runs.of(experts.forward) for _ in range(3)]
    assert [again for _, again in counts] == [0, 0, 0]
    assert experts.model.explain().replay.startswith("not replayed: no rows")


def test_sizes_that_nobody_declares_are_replayed_at_their_own_length(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, emulation: harness.Emulation
) -> None:
    def odd(**fields: Any) -> int:
        return int(emulation.backward_workspace_bytes(**fields)) + fields["tokens"] ** 2

    monkeypatch.setattr(extension.library(), "backward_workspace_bytes", odd, raising=False)
    experts, counts = Experts(), []
    for rows in (*LENGTHS, *LENGTHS[:3]):
        experts.give(rows)
        expected, got = experts.anew(), list[Tensor]()
        counts.append(runs.of(lambda got=got: got.extend(experts.step())))
        assert same(got, expected), rows

    assert [again for _, again in counts[3:6]] == [1, 1, 1]  # the forward
    assert counts[-1] == (0, 2)


def test_a_size_may_be_the_number_of_rows_by_chance(runs: Runs) -> None:
    experts, counts = Experts(), []
    experts.sizes = torch.tensor([1, 0, 1])
    for rows in (5, 9, GROUPS, 4, 7):
        experts.give(rows)
        expected, got = experts.anew(), list[Tensor]()
        counts.append(runs.of(lambda got=got: got.extend(experts.step())))
        assert same(got, expected), rows

    assert counts[3:] == [(0, 2)] * 2


def test_workspaces_are_asked_for_at_every_number_of_rows(emulation: harness.Emulation) -> None:
    """Their sizes need not lie on a line, so those of two captures would not tell them."""
    asked = emulation._module.route_workspace_bytes
    captures = [emulation._module.Capture([], rows) for rows in (600, 1300)]
    for each, rows in zip(captures, (600, 1300), strict=True):
        with each:
            size = asked(slots=2 * rows, groups=64)
            assert not each.allocated(2**20, size + rows, False)
            size = asked(slots=2 * rows, groups=64)
            assert each.allocated(2**30, size, False)
    launches = captures[1].launches(captures[0], 2**20)
    sizes = [(asked(slots=2 * rows, groups=64) + 255) // 256 * 256 for rows in range(1, 4000)]

    assert not launches.for_any_rows  # the first is no workspace that anybody was asked for
    assert len(set(sizes)) > 1
    captures = [emulation._module.Capture([], rows) for rows in (600, 1300)]
    for each, rows in zip(captures, (600, 1300), strict=True):
        with each:
            assert each.allocated(2**30, asked(slots=2 * rows, groups=64), False)
    launches = captures[1].launches(captures[0], 2**20)
    assert launches.for_any_rows
    memory = [(torch.ones(0, dtype=torch.uint8).new_empty, ())]
    for rows, size in enumerate(sizes, 1):
        launches.run(scratch := [], memory, address_function, rows, 0)
        assert sum(tensor.nbytes for tensor in scratch if tensor is not None) == size


@pytest.mark.parametrize(("rows", "fits"), [(600, False), (1300, True)])
def test_captures_of_as_many_rows_do_not_tell_what_counts_rows(
    emulation: harness.Emulation, rows: int, fits: bool
) -> None:
    first, second = emulation._module.Capture([], 600), emulation._module.Capture([], rows)
    for each in (first, second):
        each.allocated(2**20, 600, False)

    assert second.launches(first, 2**20).for_any_rows == fits
    assert not second.launches(None, 2**20).for_any_rows


def test_a_form_is_bounded(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures that do not fit one another are dropped once they are many."""
    monkeypatch.setattr(guards, "_MANY", 4)
    form, bounded = guards.Form([torch.ones(2, 2)], 2), []
    for rows in range(1, 10):
        form.file(rows, guards.Refusal("none"))
        bounded.append(len(form))

    assert max(bounded) == 4
    assert form[9] == "none"
    assert form[1] is None


class Lending(Experts):
    """Gives buffers for the output and the gradient of x."""

    def step(self) -> list[Tensor]:
        self.out, self.dx = torch.full_like(self.dy, 7), torch.full_like(self.x.detach(), 7)
        y = self.forward()
        self.x.grad = None
        leaves = [self.x, self.scales, *self.model.parameters()]
        before = self.dx._version
        grads = torch.autograd.grad(y, leaves, self.dy)
        assert y.data_ptr() == self.out.data_ptr()
        assert grads[0].data_ptr() == self.dx.data_ptr()
        assert self.dx._version > before
        assert self.out._version > 0
        assert not y._is_view()
        assert not self.out.requires_grad
        tails = self.out[sum(SIZES) :], self.dx[sum(SIZES) :]
        assert all(torch.equal(tail, torch.full_like(tail, 7)) for tail in tails)
        return [y.detach(), *grads]

    def forward(self, **more: Any) -> Tensor:
        of_op = {0: {"grad_input": self.dx}, 3: {"output": self.out}}
        y: Tensor = self.model(self.x, split_sizes=self.sizes, scales=self.scales, op_kwargs=of_op, **more)
        return y


@pytest.mark.parametrize("lengths", [[T] * 5, LENGTHS])
def test_buffers_of_the_caller_are_written_again(runs: Runs, lengths: list[int]) -> None:
    experts, counts = Lending(), []
    for rows in lengths:
        experts.give(rows)
        expected, got = experts.anew(), list[Tensor]()
        counts.append(runs.of(lambda got=got: got.extend(experts.step())))
        assert same(got, expected), rows

    assert counts[-1] == (0, 2)


def test_a_buffer_that_overlaps_is_refused_every_time(runs: Runs) -> None:
    experts = Lending()
    experts.warm()
    experts.out = experts.x.detach()

    for _ in range(3):
        with pytest.raises(ValueError, match="overlaps"):
            experts.forward()
    experts.out = torch.empty_like(experts.dy)
    assert runs.of(experts.forward) == (0, 1)


def wider(experts: Experts) -> None:
    experts.give(T + 3)


def strided(experts: Experts) -> None:
    experts.x = torch.randn(T, 2 * K, dtype=torch.bfloat16)[:, :K].detach().requires_grad_()


def narrow_sizes(experts: Experts) -> None:
    experts.sizes = experts.sizes.int()


def transposed_gradient(experts: Experts) -> None:
    experts.dy = torch.randn(K, T, dtype=torch.bfloat16).mT


def gradient_of_x_itself(experts: Experts) -> None:
    """In the next test's terms: a form that has been seen, of tensors that overlap."""
    experts.dy = experts.x.detach()


def half_scales(experts: Experts) -> None:
    experts.scales = experts.scales.detach().to(torch.bfloat16).requires_grad_()


def misaligned(experts: Experts) -> None:
    experts.scales = torch.rand(T + 1)[1:].requires_grad_()


def replaced_parameter(experts: Experts) -> None:
    experts.fc1.weight = torch.nn.Parameter(torch.randn_like(experts.fc1.weight))


def other_memory(experts: Experts) -> None:
    experts.fc2.weight.data = torch.randn_like(experts.fc2.weight)


def strided_memory(experts: Experts) -> None:
    experts.fc2.weight.data = torch.randn(GROUPS, K, 2 * F, dtype=torch.bfloat16)[:, :, :F]


def frozen(experts: Experts) -> None:
    experts.fc1.weight.requires_grad_(False)


def other_activation(experts: Experts) -> None:
    """An attribute of a part is assigned: the plan stays."""
    spec = ReGLU().spec
    experts.model[1].spec = spec


def another_op(experts: Experts) -> None:
    experts.model[1] = GLU("gelu")


def into_main_grad(experts: Experts) -> None:
    experts.fc1.weight.main_grad = torch.ones(GROUPS, 2 * F, K)
    experts.fc1.accumulate_into_main_grad = True


@pytest.mark.parametrize(
    "change",
    [
        wider,
        strided,
        narrow_sizes,
        transposed_gradient,
        gradient_of_x_itself,
        half_scales,
        misaligned,
        replaced_parameter,
        other_memory,
        strided_memory,
        frozen,
        other_activation,
        another_op,
        into_main_grad,
    ],
)
def test_what_changes_between_calls_is_seen(runs: Runs, change: Callable[[Experts], None]) -> None:
    experts = Experts()
    experts.warm()
    change(experts)

    expected = experts.anew()
    for _ in range(3):
        experts.fc1.weight.__dict__.get("main_grad", torch.ones(1)).fill_(1)
        assert same(experts.step(), expected)


def test_memory_without_alignment_takes_the_long_way(runs: Runs) -> None:
    experts = Experts()
    experts.warm()

    def misaligned_scales(tensor: Tensor) -> Tensor:
        return torch.empty(T + 1)[1:].copy_(tensor) if tensor.shape == (T,) else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, misaligned_scales):
        assert runs.of(experts.step)[1] == 1
    experts.scales = torch.rand(T + 1)[1:].requires_grad_()

    assert runs.of(experts.step)[1] == 0
    assert experts.model.explain().replay == "not replayed: an address is not aligned to 16 bytes"


def test_tensors_that_overlapped_once_may_differ_later(runs: Runs) -> None:
    experts = Experts()
    experts.step()
    experts.step()
    own = experts.dy
    experts.dy = experts.x.detach()
    experts.step()  # its backward would be recorded
    experts.dy = own

    assert same(experts.step(), experts.anew())
    assert same(experts.step(), experts.anew())


def test_launches_are_made_on_the_current_stream(runs: Runs, emulation: harness.Emulation) -> None:
    experts = Experts()
    first = experts.step()
    experts.warm()
    emulation.streams.clear()
    again: list[Tensor] = []
    with replay.simulated("cpu", stream=16):
        assert runs.of(lambda: again.extend(experts.step())) == (0, 2)

    assert same(again, first)
    assert emulation.streams == [16, 16]


def hooked(experts: Experts) -> Callable[[], None]:
    calls: list[Any] = []
    experts.model[1].register_forward_hook(lambda *arguments: calls.append(1))
    return lambda: calls.remove(1)


def patched_forward(experts: Experts) -> Callable[[], None]:
    calls: list[Any] = []
    forward = experts.model[1].forward
    experts.model[1].forward = lambda *arguments, **keywords: (calls.append(1), forward(*arguments, **keywords))[1]
    return lambda: calls.remove(1)


def profiled(experts: Experts) -> Callable[[], None]:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()

    def check() -> None:
        profiler.stop()
        names = {event.key for event in profiler.key_averages()}
        assert {"fusible::GroupedMLP", "fusible::GroupedMLP.bwd"} <= names

    return check


class Watching(TorchDispatchMode):
    """Sees every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("observe", [hooked, patched_forward, profiled])
def test_who_observes_sees_the_call(runs: Runs, observe: Callable[[Experts], Callable[[], None]]) -> None:
    experts = Experts()
    experts.warm()
    check = observe(experts)
    experts.step()

    check()


def test_a_dispatch_mode_sees_as_much_as_the_first_time(runs: Runs) -> None:
    experts = Experts()
    with Watching() as first:
        experts.forward()
    experts.warm()
    with Watching() as later:
        assert runs.of(experts.forward)[1] == 0

    assert later.seen == first.seen


def test_a_call_that_is_recorded_is_not_captured(runs: Runs) -> None:
    """Its kernels do not run: replays would give memory that nothing has filled."""
    experts = Experts()
    first = experts.step()
    for _ in range(3):
        with tracing.recording() as seen:
            assert runs.of(experts.forward)[1] == 0
        assert seen.calls

    for _ in range(3):
        assert same(experts.step(), first)


def test_a_ready_call_can_be_exported(runs: Runs) -> None:
    model = Sequential(GroupedLinear(GROUPS, K, 2 * F, dtype=torch.bfloat16), SwiGLU())
    x, sizes = torch.randn(T, K, dtype=torch.bfloat16), torch.tensor(SIZES)
    with torch.no_grad():
        expected = [model(x, split_sizes=sizes) for _ in range(3)]
        program = torch.export.export(model, (x,), {"split_sizes": sizes}, strict=False)

    assert torch.equal(program.module()(x, split_sizes=sizes), expected[0])


def test_transforms_are_refused(runs: Runs) -> None:
    experts = Experts()
    experts.warm()

    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(lambda x: experts.model(x, split_sizes=experts.sizes, scales=experts.scales).sum())(experts.x)


@pytest.mark.parametrize("single", [True, False])
def test_a_parameter_of_another_shape_is_an_error(runs: Runs, single: bool) -> None:
    """Kernels would read behind its end."""
    experts, name = Experts(single_grouped_weight=single), "weight" if single else "weight2"
    experts.warm()
    before = getattr(experts.fc2, name)
    setattr(experts.fc2, name, torch.nn.Parameter(before.detach()[..., 8:].contiguous()))

    for _ in range(3):
        with pytest.raises(ValueError, match=rf"op 3 \(GroupedLinear\): {name}: expected"):
            experts.forward()
    setattr(experts.fc2, name, before)
    assert same(experts.step(), experts.anew())


def test_autocast_is_seen(runs: Runs) -> None:
    experts = Experts()
    experts.warm()

    with torch.autocast("cpu", torch.float16):
        assert experts.forward().dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            assert experts.forward().dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert experts.forward().dtype == torch.float16


def test_switches_hold(runs: Runs) -> None:
    experts = Experts()
    experts.warm()

    with config(debug=True):
        assert runs.of(experts.step)[1] == 0
    assert runs.of(experts.step) == (0, 2)


@pytest.mark.parametrize("how", [{}, {"single_grouped_weight": False}])
@pytest.mark.parametrize("flagged", [False, True])
def test_main_grads_are_written_again(runs: Runs, how: dict[str, Any], flagged: bool) -> None:
    experts = Experts(accumulate_into_main_grad=True, **how)
    for p in experts.model.parameters():
        p.main_grad = torch.zeros(p.shape)
        if flagged:
            p.grad_added_to_main_grad = False
    experts.step()
    ones = [p.main_grad.clone() for p in experts.model.parameters()]
    experts.warm()
    for p in experts.model.parameters():
        p.main_grad = torch.zeros(p.shape)  # others than before
        p.__dict__.pop("grad_added_to_main_grad", None)
        if flagged:
            p.grad_added_to_main_grad = False
    before = [p.main_grad._version for p in experts.model.parameters()]

    assert runs.of(experts.step) == (0, 2)
    assert same([p.main_grad for p in experts.model.parameters()], ones)
    assert all(p.main_grad._version > v for p, v in zip(experts.model.parameters(), before, strict=True))
    assert all(
        getattr(p, "grad_added_to_main_grad", None) is (True if flagged else None) for p in experts.model.parameters()
    )


def test_flags_of_main_grads_are_asked_at_every_call(runs: Runs) -> None:
    experts = Experts(accumulate_into_main_grad=True)
    for p in experts.model.parameters():
        p.main_grad = torch.zeros(p.shape)
    experts.step()
    once = [p.main_grad.clone() for p in experts.model.parameters()]
    experts.warm()
    for p in experts.model.parameters():
        p.overwrite_main_grad = True

    for _ in range(3):
        experts.step()
        assert same([p.main_grad for p in experts.model.parameters()], once)
    experts.fc1.weight.main_grad = None
    with pytest.raises(RuntimeError, match=r"weight\.main_grad, which is not set"):
        experts.step()


def test_delayed_gradients_are_not_replayed(runs: Runs) -> None:
    experts, before = Experts(delay_wgrad_compute=True), replay.stats().unsupported
    experts.warm()
    experts.step()
    reasons = {reason for reason, count in replay.stats().unsupported.items() if count > before.get(reason, 0)}

    assert len(experts.fc1._delayed) == 6
    assert reasons == {"GroupedMLP.bwd: a weight gradient is computed later"}


def test_code_that_promises_nothing_runs_every_time(runs: Runs) -> None:
    calls: list[Any] = []

    class Counting(SwiGLU):
        def fwd(self, x: Tensor, **keywords: Any) -> Any:
            calls.append(x)
            return super().fwd(x, **keywords)

    experts = Experts()
    model = Sequential(experts.fc1, Counting(), experts.fc2)
    with config(disable_fusions={"GroupedMLP", "GroupedLinearGLU"}), torch.no_grad():
        for _ in range(5):
            model(experts.x, split_sizes=experts.sizes)

    assert len(calls) == 5
    assert model.explain().replay == "not replayed: op 1 (Counting) does not promise to be replayable"
    assert "replay: not replayed: op 1 (Counting)" in str(model.explain())


def test_a_replayed_backward_can_run_twice(runs: Runs) -> None:
    experts = Experts()
    experts.warm()
    y = experts.forward()

    leaves = experts.x, experts.fc1.weight
    first = torch.autograd.grad(y, leaves, experts.dy, retain_graph=True)
    second: list[Tensor] = []
    assert runs.of(lambda: second.extend(torch.autograd.grad(y, leaves, experts.dy))) == (0, 1)
    assert same(second, list(first))


def test_a_replay_is_not_differentiated(runs: Runs) -> None:
    experts = Experts()
    experts.warm()

    (dx,) = torch.autograd.grad(experts.forward(), experts.x, experts.dy, create_graph=True)
    with pytest.raises(DoubleBackwardError, match="first-order"):
        dx.sum().backward()


def test_what_is_kept_may_not_be_overwritten(runs: Runs) -> None:
    experts = Experts()
    experts.warm()
    x, experts.x = experts.x, experts.x * 1
    y = experts.forward()
    experts.x.detach().zero_()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(experts.dy)
    experts.x = x


@pytest.mark.parametrize("name", ["weight0", "weight1", "weight2"])
@pytest.mark.parametrize("linear", ["fc1", "fc2"])
def test_an_expert_may_not_be_overwritten(runs: Runs, linear: str, name: str) -> None:
    """In a copy, whose parameters have versions of their own."""
    experts = Experts(single_grouped_weight=False)
    experts.model = deepcopy(experts.model)
    experts.fc1, experts.fc2 = experts.model[0], experts.model[3]
    experts.warm()
    ys: list[Tensor] = []
    assert runs.of(lambda: ys.append(experts.forward())) == (0, 1)
    with torch.no_grad():
        getattr(getattr(experts, linear), name).add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ys[0].backward(experts.dy)
    assert runs.of(experts.step) == (0, 2)
    assert same(experts.step(), experts.anew())


@pytest.mark.parametrize("parts", [(0, 1, 2)])
def test_another_form_of_the_memory_of_experts_is_seen(runs: Runs, parts: tuple[int, ...]) -> None:
    experts = Experts(single_grouped_weight=False)
    for _ in range(2):
        experts.warm()
        for i in parts:
            weight = getattr(experts.fc2, f"weight{i}")
            weight.data = weight.data.t()
        assert same(experts.step(), experts.anew())


def test_another_shape_behind_an_expert_is_an_error_before_anything_runs(runs: Runs) -> None:
    experts = Experts(single_grouped_weight=False)
    experts.warm()
    experts.fc2.weight2.data = experts.fc2.weight2.data.view(K // 2, 2 * F)

    for _ in range(3):
        with pytest.raises(ValueError, match=r"op 3 \(GroupedLinear\): weight2: expected"):
            experts.forward()


def test_a_replay_saves_parameters(runs: Runs) -> None:
    experts = Experts(single_grouped_weight=False)
    experts.warm()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        assert runs.of(experts.forward) == (0, 1)

    assert {id(p) for p in experts.model.parameters()} <= {id(t) for t in packed}


def test_hooks_on_saved_tensors_run(runs: Runs) -> None:
    experts = Experts()
    expected = experts.step()
    experts.warm()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.mul(1)):
        assert same(experts.step(), expected)
    assert packed
    assert same(experts.step(), expected)


@pytest.mark.parametrize("how", FORMS)
def test_a_checkpointed_forward_may_be_replayed_or_not(runs: Runs, how: dict[str, Any]) -> None:
    """A forward and its recomputation are two calls, of which the second knows more; they must keep the same."""
    experts = Experts(**how)
    expected, forward = experts.anew(), experts.forward
    experts.forward = lambda: checkpoint(forward, use_reentrant=False)  # type: ignore[method-assign]

    for _ in range(4):
        assert same(experts.step(), expected)
    assert runs.of(experts.step) == (0, 3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_a_tangent_is_not_dropped(runs: Runs) -> None:
    experts = Experts()
    with torch.no_grad():
        for _ in range(3):
            experts.forward()
        with forward_ad.dual_level():
            experts.scales = forward_ad.make_dual(experts.scales.detach(), torch.ones(T))
            with pytest.raises(RuntimeError, match="GroupedMLP: forward-mode gradients are not supported"):
                experts.forward()


def test_a_patched_op_is_no_longer_replayed(runs: Runs) -> None:
    experts = Experts()
    experts.warm()
    calls, fwd = [], experts.fc2.fwd
    experts.fc2.fwd = lambda *args, **kwargs: calls.append(1) or fwd(*args, **kwargs)
    for _ in range(4):
        experts.step()

    assert len(calls) == 4


def with_flagged_main_grads(**how: Any) -> Experts:
    experts = Experts(accumulate_into_main_grad=True, **how)
    for p in experts.model.parameters():
        p.main_grad, p.grad_added_to_main_grad = torch.zeros(p.shape), False
    return experts


@pytest.mark.parametrize("how", [{"accumulate_into_main_grad": True}, {"delay_wgrad_compute": True}])
def test_a_gradient_of_x_alone_does_not_replay_those_of_weights(runs: Runs, how: dict[str, Any]) -> None:
    experts = Experts(**how)
    for p in experts.model.parameters():
        p.main_grad = torch.zeros(p.shape)
    alone = [torch.autograd.grad(experts.forward(), [experts.x], experts.dy)[0] for _ in range(4)]
    counts = runs.of(lambda: torch.autograd.grad(experts.forward(), [experts.x], experts.dy))
    untouched = not any(p.main_grad.any() for p in experts.model.parameters())
    waiting = experts.fc1.has_delayed_wgrad()
    experts.step()
    experts.fc1.backward_dw()

    assert counts == (0, 2)
    assert all(torch.equal(gradient, alone[0]) for gradient in alone)
    assert untouched
    assert not waiting
    weight = experts.fc1.weight
    assert (weight.main_grad if weight.grad is None else weight.grad).any()


def test_weights_of_one_form_in_one_op_are_replayed_with_one_stand_in(runs: Runs) -> None:
    experts = with_flagged_main_grads()
    experts.fc2 = GroupedLinear(GROUPS, K, K, bias=False, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    experts.fc1 = GroupedLinear(GROUPS, K, K, bias=False, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    experts.model = Sequential(experts.fc1, Activation("silu"), Scale(), experts.fc2)
    for p in experts.model.parameters():
        p.main_grad, p.grad_added_to_main_grad = torch.zeros(p.shape), False
    experts.warm()

    assert runs.of(experts.step) == (0, 2)
    grads = [p.grad for p in experts.model.parameters()]
    assert grads[0] is not None
    assert grads[1] is not None
    assert grads[0].data_ptr() == grads[1].data_ptr()


def test_a_replay_refuses_main_grad_in_a_buffer_of_the_backward(runs: Runs) -> None:
    experts = with_flagged_main_grads()
    memory = torch.zeros(experts.fc1.weight.numel())
    experts.fc1.weight.main_grad = memory.view(experts.fc1.weight.shape)
    buffers = [torch.zeros(T, K, dtype=torch.bfloat16), memory.view(torch.bfloat16)[: T * K].view(T, K)]
    for _ in range(4):
        experts.forward(op_kwargs={0: {"grad_input": buffers[0]}}).backward(experts.dy)
    memory.zero_()

    with pytest.raises(RuntimeError, match=r"GroupedMLP: a buffer for a gradient overlaps .* what that of fc1\.weight"):
        experts.forward(op_kwargs={0: {"grad_input": buffers[1]}}).backward(experts.dy)
    assert not memory.any()


def parameters_alive(seen: list[Any]) -> int:
    return sum(ref() is not None for ref in seen)


@pytest.mark.parametrize("how", [{}, {"single_grouped_weight": False}, {"accumulate_into_main_grad": True}])
@pytest.mark.parametrize("trains", [True, False])
def test_what_is_replayed_is_freed_with_its_container(runs: Runs, how: dict[str, Any], trains: bool) -> None:
    experts = Experts(**how)
    seen = []
    for p in experts.model.parameters():
        p.main_grad = torch.zeros(p.shape)
        seen.append(weakref.ref(p))
    del p
    of_first = seen[: len(list(experts.fc1.parameters()))]
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            experts.step() if trains else experts.forward().detach()
        assert runs.again > 0
        experts.fc1 = experts.model[0] = GroupedLinear(GROUPS, K, 2 * F, bias=False, dtype=torch.bfloat16)
        assert parameters_alive(of_first) == 0
        experts.forward()
        del experts
        assert parameters_alive(seen) == 0
    finally:
        gc.enable()


def test_a_number_of_rows_that_comes_once_is_not_captured_where_none_serves_all() -> None:
    """A capture takes several times as long as a call."""

    class Captured(NamedTuple):
        is_for_any_rows: bool = False

    form = guards.Form[Captured]([torch.zeros(8, 4)], 8)
    for rows in (8, 9):  # the second one shows that these do not fit together
        assert form[rows] is None
        form.file(rows, Captured())

    assert form[10] == guards.Refusal()
    assert form[10] is None
    assert form[9] == Captured()
