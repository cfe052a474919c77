"""Properties that every op and every fusion has, whichever kernels run: checks of one subject, on a CPU or a GPU.

A subject is a model that ends where the property is looked at: an op, a fusion, or the same ops one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from kernels_asked import grouped_mm_on_cpu
from reference import (
    Act,
    assert_as_good,
    assert_close_to,
    assert_same,
    by_group,
    glu,
    grouped_linear,
    leaves,
    mlp,
    run,
    scale,
    unit,
)
from torch import Tensor, nn

from fusible import GroupedLinear, Scale, Sequential, SwiGLU, config
from fusible.ops.kernels.pytorch import grouped_mm

K, F, N = 16, 32, 24
SIZES, ROWS = (31, 0, 43), 80
SPLITS = (SIZES, (0, 0, 0), (0, 80, 0), (27, 27, 26), (7, 1, 0))
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FUSIONS = frozenset({"GroupedMLP", "GroupedLinearGLU", "GLUScale"})


class Setting(NamedTuple):
    """The settings of a check."""

    sizes: tuple[int, ...] = SIZES
    rows: int = ROWS
    dtype: torch.dtype = FP64
    device: str = "cpu"
    main_grad: bool = False


class Subject(NamedTuple):
    """Which ops a model has, whether they are fused, and what plain torch computes."""

    ops: str  # of "fc1", "act", "scale", "fc2", "out"
    fused_to: tuple[str, ...] | None  # None: fusions are disabled, the ops run one by one
    plain: Callable[..., Tensor]
    stacked: bool = True
    scaled: bool = True  # the biases
    compiled: bool = False

    @property
    def zeroes_tail(self) -> bool:
        """Elementwise ops know no groups; what a grouped linear writes has a tail of zeros."""
        return self.ops.split()[-1] in ("fc1", "fc2")

    @property
    def grouped(self) -> bool:
        return "fc1" in self.ops


class Case:
    """A subject with arguments: the tensors that a call differentiates, by their names in :mod:`reference`."""

    def __init__(self, subject: Subject, setting: Setting, frozen: frozenset[str] = frozenset()) -> None:
        self.subject, self.setting = subject, setting
        names = subject.ops.split()
        self.ops = [make_op(name, subject, setting) for name in names]
        self.model = Sequential(*self.ops)
        self.keywords = {n: (op, k) for name, op in zip(names, self.ops, strict=True) for n, k in arguments(name, op)}
        scales = FP32 if setting.dtype == BF16 else setting.dtype  # wider ones and equal ones
        width = K if subject.grouped else 2 * F
        self.tensors = {"x": self._rows(width)} | {name: self._numbers(scales) for name in self.keywords}
        for name, op in zip(names, self.ops, strict=True):
            self.tensors |= parameters(name, op)
        for name in frozen:
            self.tensors[name].requires_grad_(False)
        self.dy = self._rows({"fc1": 2 * F, "act": F, "scale": F}.get(names[-1], N)).requires_grad_(False)
        self.function = compiled(self._run_model) if subject.compiled else self._run_model

    @property
    def valid(self) -> int:
        return sum(self.setting.sizes) if self.subject.grouped else self.setting.rows

    def run(self, dy: Tensor | None = None) -> dict[str, Tensor]:
        """The result and all gradients, by the ops or the fusion that the subject is."""
        fused = self.subject.fused_to
        with config(disable_fusions=FUSIONS) if fused is None else nullcontext():
            results = run(self.function, self.tensors, self.dy if dy is None else dy)
        if not self.subject.compiled:
            names = tuple(step.name for step in self.model.explain().steps)
            assert names == (fused or tuple(type(op).__name__ for op in self.ops))
        return results

    def plain(self, **tensors: Tensor) -> Tensor:
        return self.subject.plain(sizes=self.setting.sizes, **listed(tensors))

    def check(self, truth_rows: int = -1) -> None:
        assert_as_good(self.run(), self.plain, self.tensors, self.dy, truth_rows)

    def poison_tail(self, value: float) -> None:
        for tensor in (self.dy, *(self.tensors[name] for name in ("x", *self.keywords))):
            tensor.data[self.valid :] = value

    def before_tail(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t[: self.valid] if self.is_by_row(name) else t for name, t in results.items()}

    def is_by_row(self, name: str) -> bool:
        return name in ("x", "y", *self.keywords)

    def _rows(self, *columns: int, dtype: torch.dtype | None = None) -> Tensor:
        rows = unit(self.setting.rows, *columns, dtype=dtype or self.setting.dtype, grad=False)
        return rows.to(self.setting.device).requires_grad_()

    def _numbers(self, dtype: torch.dtype) -> Tensor:
        """A positive number for each row, as routing weights are: products of two stay within a factor of nine."""
        numbers = torch.rand(self.setting.rows, dtype=torch.float64) + 0.5
        return numbers.to(self.setting.device, dtype).requires_grad_()

    def _run_model(self, x: Tensor, **tensors: Tensor) -> Tensor:
        sizes = torch.tensor(self.setting.sizes, device=x.device)
        op_kwargs: dict[Any, dict[str, Tensor]] = {}
        for name, (op, keyword) in self.keywords.items():
            op_kwargs.setdefault(self.ops.index(op), {})[keyword] = tensors[name]
        shared = {"split_sizes": sizes} if self.subject.grouped else {}
        y: Tensor = self.model(x, op_kwargs=op_kwargs, **shared)
        return y


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()  # no graph of an earlier case counts as one too many
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def make_op(name: str, subject: Subject, setting: Setting) -> nn.Module:
    if name == "act":
        return SwiGLU()
    if name in ("scale", "out"):
        return Scale()
    sizes = (K, 2 * F) if name == "fc1" else (F, N)
    return GroupedLinear(
        len(setting.sizes),
        *sizes,
        scale_bias=subject.scaled,
        single_grouped_weight=subject.stacked,
        single_grouped_bias=subject.stacked,
        accumulate_into_main_grad=setting.main_grad,
        dtype=setting.dtype,
        device=setting.device,
    )


def arguments(name: str, op: nn.Module) -> list[tuple[str, str]]:
    """The tensors that an op takes beside x: their names in the reference, and as keywords."""
    if isinstance(op, GroupedLinear):
        return [(f"s{name[-1]}", "bias_scale")] if op.scale_bias else []
    return [("scales" if name == "scale" else "out", "scales")] if isinstance(op, Scale) else []


def parameters(name: str, op: nn.Module) -> dict[str, Tensor]:
    """By their names in the reference: "w1", or "w1.0" and so on for one per expert."""
    found = {}
    for full, parameter in op.named_parameters():
        number = full.removeprefix("weight").removeprefix("bias")
        found[f"{full[0]}{name[-1]}" + (f".{number}" if number else "")] = parameter
    return found


def listed(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """One entry for the parameters of all experts."""
    joined: dict[str, Any] = {}
    for name, tensor in tensors.items():
        head, dot, _ = name.partition(".")
        if dot:
            joined.setdefault(head, []).append(tensor)
        else:
            joined[name] = tensor
    return joined


# ---- subjects

ACT: Act = glu("silu")


def plain_linear(x: Tensor, sizes: tuple[int, ...], w1: Any, b1: Any, s1: Tensor | None = None) -> Tensor:
    return grouped_linear(x, sizes, w1, b1, s1)


def plain_mlp(x: Tensor, sizes: tuple[int, ...], **tensors: Any) -> Tensor:
    return mlp(x, sizes, ACT, **tensors)


def plain_first_half(x: Tensor, sizes: tuple[int, ...], scales: Tensor | None = None, **linear: Any) -> Tensor:
    return scale(ACT(plain_linear(x, sizes, **linear)), scales)


def plain_glu_scale(x: Tensor, sizes: tuple[int, ...], scales: Tensor) -> Tensor:
    return scale(ACT(x), scales)


SCALES = {"no scales": ("", ""), "before": ("scale ", ""), "after": ("", " out"), "both": ("scale ", " out")}
EXPERTS = {name: f"fc1 act {before}fc2{after}" for name, (before, after) in SCALES.items()}
BOTH = EXPERTS["both"]
SUBJECTS = {
    "linear": Subject("fc1", None, plain_linear, scaled=False),
    "linear, scaled bias": Subject("fc1", None, plain_linear),
    "linear, one per expert": Subject("fc1", None, plain_linear, stacked=False, scaled=False),
    "linear, one per expert, scaled bias": Subject("fc1", None, plain_linear, stacked=False),
    "GLUScale": Subject("act scale", ("GLUScale",), plain_glu_scale),
    "GroupedLinearGLU": Subject("fc1 act", ("GroupedLinearGLU",), plain_first_half),
    "GroupedLinearGLU, scales": Subject("fc1 act scale", ("GroupedLinearGLU",), plain_first_half),
    **{f"GroupedMLP, {name}": Subject(ops, ("GroupedMLP",), plain_mlp) for name, ops in EXPERTS.items()},
    **{f"MLP unfused, {name}": Subject(ops, None, plain_mlp) for name, ops in EXPERTS.items()},
    "GroupedMLP, one per expert": Subject(BOTH, ("GroupedMLP",), plain_mlp, stacked=False),
    "GroupedMLP, compiled": Subject(BOTH, ("GroupedMLP",), plain_mlp, compiled=True),
}


@contextmanager
def backend_of(name: str, device: str) -> Iterator[None]:
    """Which implementation of the grouped GEMM runs. On a CPU, grouped_mm runs as it does on a GPU, but slowly."""
    if name == "grouped_mm" and device == "cpu":
        aligned = grouped_mm._misaligned
        refusal = lambda p: aligned(p) if p.a.dtype == BF16 else f"needs bfloat16, got {p.a.dtype}"  # noqa: E731
        with patch.object(grouped_mm, "refusal", refusal), grouped_mm_on_cpu():
            yield
    else:
        with config(backend=name):
            yield


# ---- properties


def as_good_as_plain_torch(subject: Subject, setting: Setting) -> None:
    Case(subject, setting).check(sum(setting.sizes))


def many_groups(subject: Subject, setting: Setting) -> None:
    """Groups of at most one row, whose gradients of weights are one rounded number times a token each.

    These are judged by group. The worst of 17,000 roundings is more than twice that of plain torch in 3 of 40 draws
    even where each operation is rounded correctly, and no sum over rows makes up for it.
    """
    sizes = tuple(torch.randint(0, 2, (512,)).tolist())
    case = Case(subject, setting._replace(sizes=sizes, rows=600))
    assert_as_good(case.run(), case.plain, case.tensors, case.dy, sum(sizes), by_group)


def no_rows(subject: Subject, setting: Setting) -> None:
    """All gradients of parameters are zeros, and results are empty."""
    case = Case(subject, setting._replace(sizes=(0, 0, 0), rows=0))
    results = case.run()

    assert results["y"].shape == case.dy.shape
    assert all(t.shape == (case.tensors[name].shape if name != "y" else t.shape) for name, t in results.items())
    assert all(t.eq(0).all() for t in results.values())


def nan_in_the_tail_reaches_nothing(subject: Subject, setting: Setting) -> None:
    for sizes in SPLITS[: 1 if subject.compiled else None]:
        case, results = Case(subject, setting._replace(sizes=sizes)), []
        for poison in (0.0, float("nan")):
            case.poison_tail(poison)
            results.append(case.before_tail(case.run()))

        assert_same(*results)
        assert all(t.isfinite().all() for t in results[0].values())


def tail_of_results_is_zero(subject: Subject, setting: Setting) -> None:
    case = Case(subject, setting)
    case.poison_tail(float("nan"))
    results = case.run()

    assert case.valid < setting.rows
    assert results["x"][case.valid :].eq(0).all()
    if subject.zeroes_tail:
        assert results["y"][case.valid :].eq(0).all()
    if subject.scaled:
        assert results["s1"][case.valid :].eq(0).all()


def empty_groups_get_gradients_of_zero(subject: Subject, setting: Setting) -> None:
    case = Case(subject, setting)
    results = listed(case.run())

    assert setting.sizes[1] == 0
    assert all(results[name][1].eq(0).all() for name in results if name[0] in "wb")
    assert all(results[name][0].ne(0).any() for name in results if name[0] in "wb")


def same_bits_from_run_to_run(subject: Subject, setting: Setting) -> None:
    case = Case(subject, setting._replace(sizes=(40,) * 5, rows=200))

    assert_same(case.run(), case.run())


def frozen_parts_change_no_other_gradient(subject: Subject, setting: Setting) -> None:
    """Each part frozen alone, and each as the only one that is not. Of compiled code one part, as graphs take long."""
    names = frozenset(Case(subject, setting).tensors)
    for name in ("w1",) if subject.compiled else sorted(names):
        for frozen in (frozenset({name}), names - {name}):
            Case(subject, setting, frozen).check(sum(setting.sizes))


def autocast_computes_in_low_precision(subject: Subject, setting: Setting) -> None:
    """As good as plain torch under autocast; gradients have the dtypes of what they are the gradients of."""
    case = Case(subject, setting._replace(dtype=FP32))
    dy = case.dy.to(setting.dtype)
    with torch.autocast(setting.device, setting.dtype):
        results = case.run(dy)
    with torch.autocast("cpu", setting.dtype):
        yardstick = run(case.plain, leaves(case.tensors), dy.cpu())
    truth = run(case.plain, leaves(case.tensors, FP64), dy.cpu().double())

    for name, exact in case.before_tail(truth).items():
        got, allowed = (case.before_tail(t)[name].cpu() for t in (results, yardstick))
        assert got.dtype == allowed.dtype == (setting.dtype if name == "y" else FP32), name
        assert_close_to(got, allowed, exact, name)


def main_grad_gets_the_gradients_of_weights(subject: Subject, setting: Setting) -> None:
    """In fp32 and in the dtype of the weight: what stands there stays, and the gradient is added."""
    for dtype in {FP32 if setting.dtype != FP64 else FP64, setting.dtype}:
        case = Case(subject, setting._replace(main_grad=True))
        weights = {name: p for name, p in case.tensors.items() if name.startswith("w")}
        for parameter in weights.values():
            parameter.main_grad = torch.full_like(parameter, 0.5, dtype=dtype)  # type: ignore[attr-defined]
        fused = subject.fused_to
        with config(disable_fusions=FUSIONS) if fused is None else nullcontext():
            case.function(**case.tensors).backward(case.dy)
        copies = leaves(case.tensors)
        yardstick = run(case.plain, copies, case.dy.cpu())
        truth = run(case.plain, leaves(case.tensors, FP64), case.dy.cpu().double())

        for name, parameter in weights.items():
            allowed = (0.5 + yardstick[name].to(dtype)).to(dtype)
            assert_close_to(parameter.main_grad.cpu(), allowed, 0.5 + truth[name], name)  # type: ignore[attr-defined]


# ---- the table


class Property(NamedTuple):
    """A check, the dtypes that it is worth, and the subjects to which it applies."""

    check: Callable[[Subject, Setting], None]
    dtypes: tuple[torch.dtype, ...]
    applies: Callable[[Subject], bool] = lambda subject: subject.grouped


def has_all_parts(subject: Subject) -> bool:
    """Whether the subject has scales in both places; such experts represent the others in slow checks."""
    return subject.grouped and (subject.ops == BOTH or "fc2" not in subject.ops)


def is_eager(subject: Subject) -> bool:
    """Compiled code refuses to write ``main_grad`` (tests/compiler/test_compile_guards.py)."""
    return subject.grouped and not subject.compiled


PROPERTIES = {
    "as good as plain torch": Property(as_good_as_plain_torch, (FP64, BF16, FP16), lambda subject: True),
    "many groups": Property(many_groups, (FP32, BF16), has_all_parts),
    "no rows": Property(no_rows, (FP64, BF16)),
    "NaN in the tail": Property(nan_in_the_tail_reaches_nothing, (FP64, BF16, FP16)),
    "tail of zeros": Property(tail_of_results_is_zero, (FP64, FP32, BF16, FP16)),
    "empty groups": Property(empty_groups_get_gradients_of_zero, (FP64, BF16)),
    "run to run": Property(same_bits_from_run_to_run, (FP32, BF16)),
    "frozen parts": Property(frozen_parts_change_no_other_gradient, (FP64, BF16), lambda subject: True),
    "autocast": Property(autocast_computes_in_low_precision, (BF16, FP16)),
    "main_grad": Property(main_grad_gets_the_gradients_of_weights, (FP64, BF16), is_eager),
}
BACKENDS = {  # by device, with the dtypes that are worth a column
    "cpu": {"loop": (FP64, FP32, BF16, FP16), "grouped_mm": (BF16,)},
    "cuda": {"auto": (BF16, FP16), "triton": (BF16, FP32), "grouped_mm": (BF16,), "loop": (FP64, FP32)},
}


class Cell(NamedTuple):
    """One cell of the table."""

    prop: str
    subject: str
    backend: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.prop}: {self.subject}: {self.backend}, {str(self.dtype).removeprefix('torch.')}"

    def check(self, device: str) -> None:
        with backend_of(self.backend, device):
            PROPERTIES[self.prop].check(SUBJECTS[self.subject], Setting(dtype=self.dtype, device=device))


def cells(device: str) -> list[Cell]:
    """All that apply; a compiled subject in one dtype, as a graph takes seconds."""
    return [
        Cell(prop, name, backend, dtype)
        for prop, (_, wanted, applies) in PROPERTIES.items()
        for name, subject in SUBJECTS.items()
        for backend, dtypes in BACKENDS[device].items()
        for dtype in dtypes
        if dtype in wanted and applies(subject) and (not subject.compiled or dtype in (BF16, FP32))
    ]
