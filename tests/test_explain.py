"""``explain``: what a call runs and why, without running anything."""

from __future__ import annotations

import json
import re
from functools import partial
from xml.etree import ElementTree

import models
import pytest
import torch
from torch import Tensor, nn

from fusible import (
    AddExtraInput,
    ArgumentError,
    ConstantScale,
    GroupedLinear,
    Identity,
    Linear,
    MakeExtraOutput,
    Op,
    Sequential,
    SwiGLU,
    config,
    explain,
)

E, K, F, T = 4, 64, 32, 128
SIZES = torch.tensor([T // E] * E)


mlp = partial(models.mlp, E, K, F, bias=False, dtype=torch.bfloat16)


def arguments(dtype=torch.bfloat16, x_grad=True, scales_grad=True):
    x, scales = torch.randn(T, K, dtype=dtype), torch.rand(T)
    return x.requires_grad_(x_grad), SIZES, scales.requires_grad_(scales_grad), SIZES


class Unready(nn.Module):
    """Cannot run on tensors without data."""

    def forward(self, x):
        return x * x.sum().item()


# ------------------------------------------------------------------------------------------------- without running


def test_explain_before_a_call_raises():
    with pytest.raises(ArgumentError, match="there was no call yet; give it what you would give forward"):
        mlp().explain()


@pytest.mark.parametrize("given", [{"split_sizes": SIZES}, {"op_kwargs": {0: {"split_sizes": SIZES}}}])
def test_explain_with_arguments_but_without_x_raises(given):
    model = mlp()
    model(*arguments())

    with pytest.raises(ArgumentError, match="x: expected a tensor, got a NoneType"):
        model.explain(**given)


def test_explain_after_a_call_explains_that_call():
    model, args = mlp(), arguments()
    model(*args)

    assert model.explain().to_dict() == model.explain(*args).to_dict()


def test_explain_takes_what_forward_takes():
    model, (x, sizes, scales, _) = mlp(), arguments()
    expected = model.explain(x, sizes, scales, sizes).to_dict()
    addressed = {0: {"split_sizes": sizes}, model[2]: {"scales": scales}, "3": {"split_sizes": sizes}}

    assert model.explain(x, split_sizes=sizes, scales=scales).to_dict() == expected
    assert model.explain(x=x, op_kwargs=addressed).to_dict() == expected
    assert explain(model, x, sizes, scales, sizes).to_dict() == expected


def test_explain_refuses_what_forward_refuses():
    model, (x, sizes, scales, _) = mlp(), arguments()
    overlapping = {3: {"output": x.detach()}}

    for wrong in (
        {"scales": scales[1:]},
        {"nothing": 1, "scales": scales},
        {"scales": scales, "op_kwargs": overlapping},
    ):
        with pytest.raises(ArgumentError):
            model.explain(x, split_sizes=sizes, **wrong)


@pytest.mark.parametrize("before", [True, False], ids=["after a call", "with arguments"])
def test_explain_changes_nothing(before):
    norm = nn.BatchNorm1d(K, dtype=torch.bfloat16)
    model = Sequential(*mlp(accumulate_into_main_grad=True), norm, nn.Dropout())
    for op in (model[0], model[3]):
        op.weight.main_grad = torch.full(op.weight.shape, 7.0)
    args, output = arguments(), torch.full((T, K), 7.0, dtype=torch.bfloat16)
    if before:
        model(*args)
    versions = [t._version for t in (*model.parameters(), *args)]
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    model.explain() if before else model.explain(*args, op_kwargs={3: {"output": output}})

    assert versions == [t._version for t in (*model.parameters(), *args)]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all((op.weight.main_grad == 7).all() and op.weight.grad is None for op in (model[0], model[3]))
    assert (output == 7).all()


def test_explain_runs_no_op_on_real_data():
    seen = []

    class Looks(Identity):
        def fwd(self, x):
            seen.append(type(x).__name__)
            return x, None

    Sequential(Looks()).explain(torch.ones(2))

    assert seen == ["FakeTensor"]


def test_explain_runs_no_hooks():
    linear, seen = nn.Linear(K, K), []
    linear.register_forward_hook(lambda *_: seen.append(1))
    Sequential(linear).explain(torch.ones(T, K))

    assert not seen


def test_explain_works_on_meta_tensors():
    x, sizes, scales = (a.detach().to("meta") for a in arguments()[:3])

    assert mlp().to("meta").explain(x, split_sizes=sizes, scales=scales).flops == mlp().explain(*arguments()).flops


# ------------------------------------------------------------------------------------------------- steps


def test_step_of_a_fusion_stands_for_its_ops():
    (step,) = mlp().explain(*arguments()).steps

    assert (step.name, step.ops, step.labels, step.shape) == ("GroupedMLP", (0, 1, 2, 3), ("0", "1", "2", "3"), (T, K))


def test_kernel_and_the_reason_for_it_are_named():
    (step,) = mlp().explain(*arguments()).steps

    assert step.kernel == "loop"
    assert step.reason == "hopper needs a CUDA device, got cpu; grouped_mm needs a CUDA device, got cpu"


def test_backend_that_was_asked_for_needs_no_reason():
    with config(backend="loop"):
        (step,) = mlp().explain(*arguments()).steps

    assert (step.kernel, step.reason) == ("loop", "")


def test_ops_count_in_the_outermost_container():
    model = Sequential(nn.Identity(), Sequential(Identity(), ConstantScale(2.0)))
    steps = model.explain(torch.ones(2)).steps

    assert [(s.name, s.ops, s.labels) for s in steps] == [
        ("Identity", (0,), ("0",)),
        ("Identity", (1,), ("1.0",)),
        ("ConstantScale", (1,), ("1.1",)),
    ]


def test_other_module_is_a_step_with_a_reason():
    (step,) = Sequential(nn.Linear(K, 3)).explain(torch.ones(T, K)).steps

    assert (step.name, step.kernel, step.reason) == ("Linear", "module", "not an Op: runs as it is")
    assert step.shape == (T, 3)


class Counts(Op):
    """Reads its input's values."""

    def fwd(self, x: Tensor):
        return x * x.sum().item(), None

    def bwd(self, saved, dy): ...


@pytest.mark.parametrize(
    ("module", "reason"),
    [(Counts(), "it reads values, so it cannot run without data"), (Unready(), "not an Op: runs as it is")],
)
def test_behind_what_needs_data_nothing_is_known(module, reason):
    steps = Sequential(module, Identity()).explain(torch.ones(2)).steps

    assert [s.reason for s in steps] == [reason, "its input is not known without data"]
    assert [s.shape for s in steps] == [None, None]


class Keeps(Op):
    """The rows whose first number is positive."""

    def fwd(self, x: Tensor):
        return x[x[:, 0] > 0], None

    def bwd(self, saved, dy): ...


@pytest.mark.parametrize("first", [True, False], ids=["explained", "called before"])
def test_shapes_behind_an_op_of_as_many_rows_as_the_data_say_are_unknown_in_words(first):
    model, x = Sequential(Linear(K, K), Keeps(), Linear(K, 3), nn.Identity()), torch.randn(T, K)
    if not first:
        with torch.no_grad():
            model(x)
    explanation = model.explain(x) if first else model.explain()
    behind = "its shapes depend on data: on what op 1 (Keeps) gives"

    assert [s.shape for s in explanation.steps] == [(T, K), None, None, None]
    assert [s.reason for s in explanation.steps] == ["", "the shape of its output depends on data", behind, behind]
    assert "3 of 4 steps, of unknown shapes, are not counted" in str(explanation)
    assert explanation.to_dict()["steps"][0]["shape"] == (T, K)


def test_output_of_integers_carries_no_grad():
    class Ranks(Identity):
        extra_outputs = ("ranks",)

        def fwd(self, x):
            return {"y": x * 2, "ranks": x.argsort(-1)}, None

    model = Sequential(Ranks(), Identity())

    assert [s.shape for s in model.explain(torch.ones(2, 3, requires_grad=True)).steps] == [(2, 3)] * 2


def test_output_of_another_module_carries_grad_on():
    frozen, trained = nn.Linear(K, K).requires_grad_(False), nn.Linear(K, K)
    after = [Sequential(m, SwiGLU()).explain(torch.ones(T, K)).steps[1].saved_bytes for m in (frozen, trained)]

    assert after == [0, T * K * 4]


@pytest.mark.parametrize("x_grad", [True, False])
def test_module_that_gives_no_tensor_is_unknown_behind(x_grad):
    steps = Sequential(nn.LSTM(4, 4), nn.Identity()).explain(torch.ones(3, 4, requires_grad=x_grad)).steps

    assert [s.shape for s in steps] == [None, None]


# ------------------------------------------------------------------------------------------------- sizes


def test_flops_are_those_of_the_products():
    explanation = mlp().explain(*arguments())

    assert explanation.flops == explanation.steps[0].flops == 2 * T * K * 2 * F + 2 * T * F * K


def test_bytes_are_at_least_every_operand_once():
    weights = 2 * (E * 2 * F * K + E * F * K)
    x_and_y = 2 * (T * K + T * K)

    assert mlp().explain(*arguments()).bytes >= weights + x_and_y


def saved(model, *args, **kwargs):
    return model.explain(*args, **kwargs).saved_bytes_per_row


def test_fused_mlp_saves_x_and_the_pre_activation_only():
    small = 4 + SIZES.numel() * 8 / T  # a float32 scale a row, and the split sizes

    assert saved(mlp(), *arguments()) == 2 * K + 4 * F + small


def test_unfused_ops_save_more():
    with config(disable_fusions={"GroupedMLP", "GroupedLinearGLU", "GLUScale"}):
        explanation = mlp().explain(*arguments())

    assert explanation.saved_bytes_per_row > 2 * K + 4 * F + 2 * F
    assert [s.name for s in explanation.steps] == ["GroupedLinear", "SwiGLU", "Scale", "GroupedLinear"]


def test_saved_bytes_are_those_that_autograd_keeps():
    model, args, packed = mlp(), arguments(), {}

    def pack(t):
        packed[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(*args)
    for parameter in model.parameters():
        packed.pop(parameter.data_ptr(), None)

    assert sum(packed.values()) / T == saved(model, *args)


def test_frozen_first_linear_needs_no_x():
    model = mlp()
    model[0].requires_grad_(False)

    assert saved(model, *arguments()) == saved(mlp(), *arguments()) - 2 * K


def test_nothing_is_saved_for_a_frozen_model():
    model = mlp().requires_grad_(False)

    assert saved(model, *arguments(x_grad=False, scales_grad=False)) == 0


def test_only_fc2_frozen_and_no_gradient_before_it_saves_nothing_of_x():
    model = mlp()
    model[0].requires_grad_(False)
    bytes_ = saved(model, *arguments(x_grad=False, scales_grad=False))

    assert bytes_ < 2 * K + 4 * F


def test_nothing_is_saved_under_no_grad():
    with torch.no_grad():
        assert saved(mlp(), *arguments()) == 0


def test_tensor_that_two_steps_keep_counts_once():
    model, x = Sequential(MakeExtraOutput("r"), Linear(K, K), AddExtraInput("r"), Linear(K, K)), torch.ones(T, K)

    assert saved(model, x) == 2 * 4 * K


# ------------------------------------------------------------------------------------------------- notes and fusions


@pytest.mark.parametrize(("sizes", "notes"), [([T // E] * E, ("split_sizes are copied to cpu",)), (SIZES, ())])
def test_copied_split_sizes_are_noted(sizes, notes):
    x, _, scales, _ = arguments()

    assert mlp().explain(x, split_sizes=sizes, scales=scales).steps[0].notes == notes


def test_fusions_say_whether_they_were_taken_and_why():
    fusions = mlp().explain(*arguments()).fusions

    assert [(f.name, f.ops, f.taken, f.reason) for f in fusions] == [
        ("GroupedMLP", (0, 1, 2, 3), True, "every condition holds"),
        ("GroupedLinearGLU", (0, 1, 2), False, "GroupedMLP has taken one of the ops"),
        ("GroupedLinearGLU", (0, 1), False, "GroupedMLP has taken one of the ops"),
        ("GLUScale", (1, 2), False, "GroupedMLP has taken one of the ops"),
    ]


def test_refused_fusion_gives_its_reason():
    x, sizes, scales, _ = arguments()
    explanation = mlp().explain(x, sizes, scales, sizes.clone())

    assert explanation.fusions[0].reason == "fc1 and fc2 read different split_sizes"
    assert [s.name for s in explanation.steps] == ["GroupedLinearGLU", "GroupedLinear"]


# ------------------------------------------------------------------------------------------------- as text and pictures


def test_to_dict_is_plain_data():
    explanation = mlp().explain(*arguments())
    plain = json.loads(json.dumps(explanation.to_dict()))

    assert plain["steps"][0]["name"] == "GroupedMLP"
    assert plain["fusions"][0]["taken"] is True
    assert (plain["rows"], plain["flops"]) == (T, explanation.flops)


def test_printed_tables_show_steps_fusions_and_totals():
    text = str(mlp().explain(*arguments()))

    for part in (
        "GroupedMLP  0 1 2 3  loop    128x64",
        "needs a CUDA device",
        "260 saved bytes a row",
        "taken",
        "refused",
    ):
        assert part in text


def test_printed_tables_say_where_nothing_fits_or_is_known():
    text = str(Sequential(Unready(), Identity()).explain(torch.ones(2)))

    assert "no fusion fits" in text
    assert "?" in text


def residual():
    ops = [MakeExtraOutput("r"), ConstantScale(2.0), AddExtraInput("r"), GroupedLinear(E, K, K), SwiGLU()]
    return Sequential(*ops).explain(torch.ones(T, K), SIZES)


def test_mermaid_shows_nodes_edges_and_a_box_around_a_fusion():
    lines = residual().to_mermaid().splitlines()

    assert lines[0] == "flowchart LR"
    assert '  n2["0: MakeExtraOutput"]' in lines
    assert '  n1(["split_sizes"])' in lines
    assert "  n2 -->|r| n4" in lines
    assert "  n2 --> n3" in lines
    box = lines.index('  subgraph f0["GroupedLinearGLU 3 4"]')
    assert [line.strip() for line in lines[box + 1 : box + 4]] == ["n5", "n6", "end"]


def test_dot_shows_nodes_edges_and_a_cluster():
    text = residual().to_dot()

    assert text.startswith("digraph fusible {")
    assert '"0" -> "2" [label="r"];' in text
    assert 'subgraph cluster_0 { label="GroupedLinearGLU 3 4"; "3"; "4"; }' in text
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize("explanation", [residual(), Sequential().explain(torch.ones(2))], ids=["residual", "empty"])
def test_svg_is_well_formed(explanation):
    root = ElementTree.fromstring(explanation.to_svg())

    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root[-1].text in ("split_sizes", "x")


def test_svg_has_a_frame_for_every_op_and_fusion_and_a_line_for_every_edge():
    tags = [element.tag.rpartition("}")[2] for element in ElementTree.fromstring(residual().to_svg())]

    assert tags.count("rect") == 5 + 1
    assert tags.count("line") == 5 + 1 + 1


def test_svg_shows_ops_channels_and_fusions():
    words = [e.text for e in ElementTree.fromstring(residual().to_svg()) if e.text]

    assert {"0: MakeExtraOutput", "r", "GroupedLinearGLU 3 4"} <= set(words)
    assert words.count("split_sizes") == 1


def boxes(root, colour):
    """(left, top, right, bottom) of the rectangles with that outline."""
    found = [
        [float(e.get(k)) for k in ("x", "y", "width", "height")]
        for e in root
        if e.get("stroke") == colour and e.get("x")
    ]
    return [(x, y, x + width, y + height) for x, y, width, height in found]


def test_svg_places_lines_on_ops_and_frames_around_them():
    root = ElementTree.fromstring(residual().to_svg())
    ops, ((left, top, right, bottom),) = boxes(root, "black"), boxes(root, "teal")
    ends = [[float(e.get(k)) for k in ("x1", "y1", "x2", "y2")] for e in root if e.get("x1")]

    assert all(any(x2 in (a, (a + c) / 2) and b <= y2 <= d for a, b, c, d in ops) for _, _, x2, y2 in ends)
    assert all(any(x1 == (a + c) / 2 and y1 == d for a, b, c, d in ops) for x1, y1, x2, y2 in ends if x1 > 300)
    assert [left < a and top < b and c < right and d < bottom for a, b, c, d in ops] == [False] * 3 + [True] * 2
    assert bottom <= float(root.get("height"))


def test_text_drawing_shows_every_op():
    text = residual().to_text()

    for part in ("0 MakeExtraOutput", "2 AddExtraInput", "4 SwiGLU", "x"):
        assert part in text


HOSTILE = 'x"]; click n0 "javascript:alert(1)\\" \n \x00 \ud800 <b>#|`&'


@pytest.fixture
def hostile():
    """An explanation in which a class, a child and a keyword have such a name."""
    name = HOSTILE.replace("\x00", "").replace("\ud800", "")  # neither of which a class may have in its name
    branches = [type(name, (kind,), {})("r") for kind in (MakeExtraOutput, AddExtraInput)]
    branches[0].extra_outputs, branches[1].keywords = (HOSTILE,), {HOSTILE: branches[1].keywords["r"]}
    model = Sequential()
    for i, op in enumerate([branches[0], ConstantScale(2.0), branches[1], GroupedLinear(E, K, K), SwiGLU()]):
        model.add_module(HOSTILE.replace(".", "") + str(i), op)
    return model.explain(torch.ones(T, K), split_sizes=SIZES)


def test_mermaid_takes_names_as_text(hostile):
    quoted = re.compile(r'\["[^"\]<>|`&\\]*"\]|\|[^"\]<>|`&\\]*\|')

    for line in hostile.to_mermaid().splitlines():
        outside = quoted.sub("", line).replace("-->", "")
        assert not set(outside) & set('"<>|`&;')
        assert "javascript" not in outside


def test_dot_takes_names_as_text(hostile):
    text = hostile.to_dot()
    outside = re.sub(r'"(?:[^"\\\n]|\\.)*"', "", text)

    assert "javascript" in text
    assert "javascript" not in outside
    assert '"' not in outside
    assert text.isprintable() or text.replace("\n", "").isprintable()


def test_svg_is_well_formed_whatever_the_names(hostile):
    words = [e.text for e in ElementTree.fromstring(hostile.to_svg().encode()) if e.text]

    assert sum("click n0" in word for word in words) >= 3
