"""Checkpoints of others: every format there and back, what load_state_dict reads by itself, what state_dict writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusible import (
    Activation,
    Bias,
    GroupedLinear,
    GroupedLoRA,
    Identity,
    Linear,
    Pointwise,
    Scale,
    ScaledSwiGLU,
    Sequential,
    SwiGLU,
    interleaved,
)
from fusible.examples.torchtitan_experts import FusedExperts
from fusible.integrations import checkpoints
from fusible.integrations.state_dicts import layouts

E, K, F = 3, 6, 4
NAMES = ("0", "3")
CALL = {"split_sizes": torch.tensor([2, 0, 3]), "scales": torch.arange(1.0, 6.0).double()}


def container(
    *, layout: Any = "concat", gated: bool = True, bias: bool = True, hidden: int = F, **how: Any
) -> Sequential:
    activation = SwiGLU(layout=layout) if gated else Activation("relu2")
    fc1 = GroupedLinear(E, K, (1 + gated) * hidden, bias=bias, **how)
    return Sequential(fc1, activation, Scale(), GroupedLinear(E, hidden, K, bias=bias, **how)).double()


def result(model: Any) -> Tensor:
    x = torch.randn(5, K, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return model(x, **CALL).detach()


def saying(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """As conversions return it: it says that gate rows stand before up rows."""
    return state | {f"{prefix}0._extra_state": torch.tensor(0)}


def gated(rows: Tensor, weights: dict[str, Tensor], *, transposed: bool = False) -> Tensor:
    """transformers' arithmetic for the rows of one expert; gate and up halves."""
    up, down = (weights[n].mT if transposed else weights[n] for n in ("gate_up_proj", "down_proj"))
    gate, linear = (rows @ up.mT).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * linear) @ down.mT


def test_the_prefix_of_a_state_may_be_given_by_position() -> None:
    model = container(layout=interleaved(2))
    with pytest.warns(FutureWarning, match="Positional args"):
        found = model.state_dict(None, "p.")

    assert_same_states(found, {f"p.{name}": value for name, value in model.state_dict().items()})


# --- conversions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("interleaved_", [True, False])
def test_hugging_face_there_and_back(transposed: bool, interleaved_: bool) -> None:
    state = container().state_dict(prefix="model.layers.7.experts.") | {"lm_head.weight": torch.ones(2)}
    flags = {"transposed": transposed, "interleaved": interleaved_}
    prefix = "model.layers.7.experts."
    theirs = checkpoints.to_hugging_face(saying(state, prefix), NAMES, **flags)

    assert theirs.keys() == {
        "lm_head.weight",
        *(f"{prefix}{n}" for n in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")),
    }
    assert theirs[f"{prefix}gate_up_proj"].shape == ((E, K, 2 * F) if transposed else (E, 2 * F, K))
    assert_same_states(checkpoints.from_hugging_face(theirs, NAMES, **flags), saying(state, prefix))


def assert_same_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [n for n, t in expected.items() if not torch.equal(found[n], t)] == []


def test_hugging_face_weights_compute_what_they_did() -> None:
    weights = {"gate_up_proj": torch.randn(E, 2 * F, K).double(), "down_proj": torch.randn(E, K, F).double()}
    model = container(bias=False)
    model.load_state_dict(checkpoints.from_hugging_face(weights, NAMES))
    x = torch.randn(5, K, dtype=torch.float64)
    one = {name: tensor[2] for name, tensor in weights.items()}

    torch.testing.assert_close(model(x, split_sizes=[0, 0, 5], scales=torch.ones(5).double()).detach(), gated(x, one))


def test_interleaved_columns_of_gpt_oss() -> None:
    up = torch.arange(2 * F).double().view(1, 1, 2 * F).expand(E, K, 2 * F)
    state = checkpoints.from_hugging_face(
        {"gate_up_proj": up, "down_proj": torch.zeros(E, F, K)}, NAMES, transposed=True, interleaved=True
    )

    assert state["0.weight"][0, :, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_torchtitan_there_and_back() -> None:
    state = container(bias=False).state_dict(prefix="experts.")
    theirs = checkpoints.to_torchtitan(state, NAMES)

    assert {n: tuple(t.shape) for n, t in theirs.items()} == {
        "experts.w1": (E, F, K),
        "experts.w2": (E, K, F),
        "experts.w3": (E, F, K),
    }
    assert torch.equal(theirs["experts.w1"], state["experts.0.weight"][:, :F])
    assert_same_states(checkpoints.from_torchtitan(theirs, NAMES), saying(state, "experts."))


def test_torchtitan_suffixes_and_stacked_gate_and_up() -> None:
    state = container(bias=False).state_dict()
    theirs = checkpoints.to_torchtitan(state, NAMES)
    suffixed = {"w1_EFD": theirs["w1"], "w3_EFD": theirs["w3"], "w2_EDF": theirs["w2"]}
    stacked = {"w13": torch.stack([theirs["w1"], theirs["w3"]], 2), "w2": theirs["w2"]}

    assert_same_states(checkpoints.from_torchtitan(suffixed, NAMES), saying(state))
    assert_same_states(checkpoints.from_torchtitan(stacked, NAMES), saying(state))


def test_torchtitan_has_no_biases() -> None:
    with pytest.raises(ValueError, match="no biases"):
        checkpoints.to_torchtitan(container().state_dict(), NAMES)


@pytest.mark.parametrize("size", [None, 2])
def test_transformer_engine_there_and_back(size: int | None) -> None:
    state = container().state_dict(prefix="mlp.")
    theirs = checkpoints.to_transformer_engine(state, NAMES, glu_interleave_size=size)
    expected = state["mlp.0.weight"][1] if size is None else layouts.interleave(state["mlp.0.weight"][1], size, -2)

    assert set(theirs) == {f"mlp.{op}.{kind}{i}" for op in (0, 2) for kind in ("weight", "bias") for i in range(E)}
    assert torch.equal(theirs["mlp.0.weight1"], expected)
    theirs["mlp.0._extra_state"] = None
    found = checkpoints.from_transformer_engine(theirs, NAMES, glu_interleave_size=size)
    assert_same_states(found, saying(state, "mlp."))


def test_missing_part_is_named() -> None:
    with pytest.raises(ValueError, match=r"a\.down_proj is missing; there are gate_up_proj"):
        checkpoints.from_hugging_face({"a.gate_up_proj": torch.zeros(E, 8, 6)}, NAMES)


@pytest.mark.parametrize("name", ["mlp.experts.0.gate_proj", "block_sparse_moe.experts.12.w2"])
def test_files_of_one_tensor_an_expert_are_refused(name: str) -> None:
    state = {"lm_head.weight": torch.zeros(2, 2), f"model.layers.1.{name}.weight": torch.zeros(F, K)}

    with pytest.raises(ValueError, match=rf"^model\.layers\.1\.{name}\.weight holds one expert.* stacks them when it"):
        checkpoints.from_hugging_face(state, NAMES)


@pytest.mark.parametrize("names", ["up", ("up",), ("up", "up"), ("up", 1), None], ids=str)
@pytest.mark.parametrize(
    "convert",
    [
        checkpoints.from_hugging_face,
        checkpoints.to_hugging_face,
        checkpoints.from_mxfp4,
        checkpoints.from_torchtitan,
        checkpoints.to_torchtitan,
        checkpoints.from_transformer_engine,
        checkpoints.to_transformer_engine,
        lambda state, names: checkpoints.from_transformer_engine(state, NAMES, te_names=names),
        lambda state, names: checkpoints.to_transformer_engine(state, NAMES, te_names=names),
    ],
)
def test_names_that_are_not_two_are_refused(convert: Any, names: Any) -> None:
    """The letters of "up" named two linears, and of two linears of one name the second replaced the first."""
    with pytest.raises(ValueError, match=r"names of two linears expected, such as \('up', 'down'\), got "):
        convert({}, names)


def test_dense_layers_are_left_alone() -> None:
    state = {"mlp.w1": torch.zeros(4, 4), "mlp.down_proj": torch.zeros(4, 4), "0.weight": torch.zeros(4, 4)}

    for convert in (checkpoints.from_torchtitan, checkpoints.from_hugging_face, checkpoints.to_torchtitan):
        assert_same_states(convert(state, NAMES), state)


# --- load_state_dict --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{}, {"layout": interleaved(2)}, {"single_grouped_weight": False}, {"layout": interleaved(1)}]
)
@pytest.mark.parametrize("source", ["ours", "torchtitan", "hugging_face", "transformer_engine"])
def test_load_state_dict_reads(source: str, how: dict[str, Any]) -> None:
    original = container(bias=source != "torchtitan")
    state: dict[str, Any] = original.state_dict()
    if source == "transformer_engine":
        state = checkpoints.to_transformer_engine(state, NAMES, te_names=NAMES)
    elif source != "ours":
        state = getattr(checkpoints, f"to_{source}")(state, NAMES)
    if source in ("ours", "transformer_engine"):
        state = checkpoints.with_layout(state, "0", "concat")
    model = torch.nn.ModuleDict({"experts": container(bias=source != "torchtitan", **how)})
    model.load_state_dict({f"experts.{name}": tensor for name, tensor in state.items()})

    torch.testing.assert_close(result(model["experts"]), result(original))


LAYOUTS = ["concat", interleaved(1), interleaved(2), interleaved(4)]


def nested(layout: Any) -> Sequential:
    """The experts of :func:`container`, with the first linear in a container of its own."""
    flat = container(layout=layout)
    return Sequential(Sequential(flat[0]), *flat[1:])


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("of", LAYOUTS)
@pytest.mark.parametrize("to", LAYOUTS)
def test_state_dict_of_any_layout_loads_into_any(of: Any, to: Any, single: bool) -> None:
    original, model = container(layout=of), container(layout=to, single_grouped_weight=single)
    state = original.state_dict()
    for loaded in (state, state if of == "concat" else {n: t.clone() for n, t in state.items()}):
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        model.load_state_dict(loaded)
        torch.testing.assert_close(result(model), result(original))


@pytest.mark.parametrize("make", [container, nested])
@pytest.mark.parametrize("single", [True, False])
def test_state_dict_holds_the_parameters_as_they_are(make: Any, single: bool) -> None:
    model = (
        container(layout=interleaved(2), single_grouped_weight=single) if make is container else nested(interleaved(2))
    )
    parameters, state = dict(model.named_parameters()), model.state_dict()
    path = "0" if make is container else "0.0"

    assert set(state) == {*parameters, f"{path}._extra_state"}
    assert int(state.pop(f"{path}._extra_state")) == 2
    assert [n for n, p in parameters.items() if state[n].data_ptr() != p.data_ptr()] == []
    assert all(model.state_dict(keep_vars=True)[n] is p for n, p in parameters.items())


def test_note_stands_under_the_prefix_on_the_host() -> None:
    model = container(layout=interleaved(2))
    holder = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"b": model})})
    with torch.device("meta"), pytest.warns(FutureWarning, match="Positional args"):
        by_position = model.state_dict(None, "a.b.")
    for state in (by_position, model.state_dict(prefix="a.b."), holder.state_dict()):
        assert [name for name in state if name.endswith("_extra_state")] == ["a.b.0._extra_state"]
        assert state["a.b.0._extra_state"].device.type == "cpu"
        assert state._metadata["a.b"]["interleaved"] == {"0": 2}
    assert "aa0._extra_state" in model.state_dict(prefix="aa")  # no dot, which torch allows


def test_state_dict_of_others_holds_no_more_than_the_parameters() -> None:
    for model in (container(), container(gated=False), nested("concat")):
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("make", [container, nested])
def test_functional_call_with_the_state_dict(make: Any) -> None:
    model = make(layout=interleaved(2))
    x = torch.randn(5, K, dtype=torch.float64)
    for _ in range(3):
        found = torch.func.functional_call(model, model.state_dict(), (x,), CALL)
        assert torch.equal(found, model(x, **CALL))


@pytest.mark.parametrize("of", LAYOUTS)
@pytest.mark.parametrize("to", LAYOUTS)
def test_nested_linear_is_in_the_order_of_the_flat_one(of: Any, to: Any) -> None:
    original, model = container(layout=of), nested(to)
    state = checkpoints.with_layout(original.state_dict(), "0", of)
    model.load_state_dict({name.replace("0.", "0.0.", 1) if name[0] == "0" else name: t for name, t in state.items()})
    again = nested(of)
    again.load_state_dict(model.state_dict())

    torch.testing.assert_close(result(model), result(original))
    torch.testing.assert_close(result(again), result(original))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ops_in_between_that_keep_columns(layout: Any) -> None:
    def make(layout: Any) -> Sequential:
        return Sequential(Linear(K, 2 * F), Scale(), Sequential(Identity(), SwiGLU(layout=layout))).double()

    original, model = make("concat"), make(layout)
    model.load_state_dict(original.state_dict())
    x, scales = torch.randn(5, K).double(), CALL["scales"]
    torch.testing.assert_close(model(x, scales=scales), original(x, scales=scales))


def test_files_from_before_there_were_notes() -> None:
    """Gate before up, however the GLU reads; where a container was nested, they do not say."""
    original, model = container(), container(layout=interleaved(2))
    state = original.state_dict()
    for about in state._metadata.values():
        about.pop("interleaved", None)
    model.load_state_dict(state)
    old = nested("concat").state_dict()
    del old._metadata[""]["interleaved"]

    torch.testing.assert_close(result(model), result(original))
    nested("concat").load_state_dict(old)
    with pytest.raises(RuntimeError, match=r"0\.0\.weight may have rows .* in blocks of 2.*does not say.*with_layout"):
        nested(interleaved(2)).load_state_dict(old)


def test_order_that_nothing_tells_is_refused() -> None:
    model = torch.nn.ModuleDict({"experts": container(layout=interleaved(2))})
    before, state = result(model["experts"]), dict(model.named_parameters())
    told = checkpoints.with_layout(state, "experts.0", interleaved(2))

    with pytest.raises(
        RuntimeError, match=r"experts: experts\.0\.weight may have .*with_layout\(state, 'experts\.0', "
    ):
        model.load_state_dict(state)
    model.load_state_dict(told)
    assert torch.equal(result(model["experts"]), before)
    with pytest.raises(ValueError, match="no parameter of '7'"):
        checkpoints.with_layout(state, "7", "concat")


def test_note_that_does_not_fit_is_refused() -> None:
    model = container()

    with pytest.raises(RuntimeError, match=r"0\.weight: 3 does not divide its rows"):
        model.load_state_dict(checkpoints.with_layout(model.state_dict(), "0", interleaved(3)))
    interleaved_linear = {"weight": model[0].weight, "bias": model[0].bias, "_extra_state": torch.tensor(2)}
    with pytest.raises(RuntimeError, match="alternate in blocks of 2, and no GLU of a container reads them"):
        model[0].load_state_dict(interleaved_linear)


@pytest.mark.parametrize("to", ["hugging_face", "torchtitan", "transformer_engine"])
def test_conversions_of_interleaved_rows(to: str) -> None:
    plain, model = container(bias=to != "torchtitan"), container(layout=interleaved(2), bias=to != "torchtitan")
    model.load_state_dict(plain.state_dict())
    convert = getattr(checkpoints, f"to_{to}")

    assert_same_states(convert(model.state_dict(), NAMES), convert(plain.state_dict(), NAMES))


def test_composite_with_interleaved_gate() -> None:
    fc1, fc2 = GroupedLinear(E, K, 2 * F).double(), GroupedLinear(E, F, K).double()
    model = Sequential(fc1, ScaledSwiGLU(layout=interleaved(2)), fc2)
    plain = Sequential(GroupedLinear(E, K, 2 * F), ScaledSwiGLU(), GroupedLinear(E, F, K)).double()
    plain.load_state_dict(model.state_dict())

    torch.testing.assert_close(result(plain), result(model))


def test_ungated_experts_of_transformers() -> None:
    original = container(gated=False)
    theirs = checkpoints.to_hugging_face(original.state_dict(), NAMES, gated=False, transposed=True)
    model = container(gated=False)
    model.load_state_dict(theirs)

    assert "up_proj" in theirs
    assert torch.equal(result(model), result(original))


def test_transposed_storage_is_filled_as_it_lies() -> None:
    original = container()
    theirs = checkpoints.to_hugging_face(original.state_dict(), NAMES)
    model = container(transposed_weight=True)
    model.load_state_dict(theirs)

    assert model[0].weight.shape == (E, K, 2 * F)
    torch.testing.assert_close(result(model), result(original))


@pytest.mark.parametrize(
    ("model", "to", "message"),
    [
        (
            container(),
            {"transposed": True},
            r"gate and up may alternate: convert .*\(transposed=True, interleaved=\.\.\.\)",
        ),
        (container(gated=False, hidden=K), {"gated": False}, r"matrices are square.*\(transposed=\.\.\.\)"),
        (
            container(hidden=F + 1),
            {},
            r"expected up and down of shapes .*; got down_proj \[3, 6, 4\], .*, gate_up_proj \[3, 8, 6\]",
        ),
    ],
)
def test_what_is_ambiguous_or_does_not_fit_is_refused(model: Sequential, to: dict[str, Any], message: str) -> None:
    source = container() if "gated" not in to else container(gated=False, hidden=K)
    state = checkpoints.to_hugging_face(source.state_dict(), NAMES, **to)

    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state)


def test_other_containers_are_left_alone() -> None:
    model = Sequential(GroupedLinear(E, K, F))

    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**model.state_dict(), "w1": torch.zeros(1), "w2": torch.zeros(1), "w3": torch.zeros(1)})


def of_transformer_engine(state: dict[str, Any], *ops: str) -> dict[str, Any]:
    """With the extra state that every op there has, an activation too: bytes."""
    return state | {f"{op}._extra_state": torch.empty(0, dtype=torch.uint8) for op in ops}


def test_extra_state_of_transformer_engine_is_left_out() -> None:
    original, model = container(gated=False), container(gated=False)
    theirs = checkpoints.to_transformer_engine(original.state_dict(), NAMES, te_names=NAMES)
    model.load_state_dict(of_transformer_engine(theirs, "0", "1", "3"))

    assert_same_states(model.state_dict(), original.state_dict())


@pytest.mark.parametrize("theirs", LAYOUTS)
@pytest.mark.parametrize("ours", LAYOUTS)
def test_gated_experts_of_transformer_engine_need_their_layout(theirs: Any, ours: Any) -> None:
    """Their files do not say what the activation there read."""
    original, model = container(), container(layout=ours)
    size = None if theirs == "concat" else theirs.block
    file = checkpoints.to_transformer_engine(original.state_dict(), NAMES, te_names=NAMES, glu_interleave_size=size)
    file = of_transformer_engine(file, "0", "1", "3")

    with pytest.raises(RuntimeError, match=r"0\.weight is TransformerEngine's, whose files do not say.*with_layout"):
        model.load_state_dict(file)
    model.load_state_dict(checkpoints.with_layout(file, "0", theirs))
    torch.testing.assert_close(result(model), result(original))


def test_lone_linears_of_transformer_engine() -> None:
    grouped, dense = GroupedLinear(E, K, F), Linear(K, F)
    parts = {f"{kind}{i}": t for kind, p in grouped.named_parameters() for i, t in enumerate(p.detach().clone())}
    parts = of_transformer_engine({f"0.{name}": t for name, t in parts.items()}, "0")
    ops = {"basic_ops.0.weight": dense.weight.detach().clone(), "basic_ops.1.bias": dense.bias.detach().clone()}
    ops = of_transformer_engine({f"0.{name}": t for name, t in ops.items()}, "0.basic_ops.0", "0.basic_ops.1")
    for op, file in ((grouped, parts), (dense, ops)):
        expected = {name: p.detach().clone() for name, p in op.named_parameters()}
        for module, state in ((op, {n.removeprefix("0."): t for n, t in file.items()}), (Sequential(op), file)):
            for parameter in op.parameters():
                torch.nn.init.zeros_(parameter)
            module.load_state_dict(state)
            assert_same_states(op.state_dict(), expected)


def test_gated_dense_layers_of_transformer_engine_need_their_layout() -> None:
    original, model = (Sequential(Linear(K, 2 * F, bias=b), SwiGLU(layout=how)) for b, how in [(False, "concat")] * 2)
    file = of_transformer_engine({"0.basic_ops.0.weight": original[0].weight.detach()}, "0.basic_ops.0", "1")

    with pytest.raises(RuntimeError, match=r"0\.weight is TransformerEngine's"):
        model.load_state_dict(file)
    model.load_state_dict(checkpoints.with_layout(file, "0", "concat"))
    assert torch.equal(model[0].weight, original[0].weight)


def test_our_own_names_come_first() -> None:
    original = container(bias=False)
    both = original.state_dict() | checkpoints.to_torchtitan(container(bias=False).state_dict(), NAMES)
    model = container(bias=False)

    with pytest.raises(RuntimeError, match=r'Unexpected key.*"w1", "w2", "w3"'):
        model.load_state_dict(both)
    assert_same_states(model.state_dict(), original.state_dict())


W1, W2, W3 = torch.zeros(E, F, K), torch.zeros(E, K, F), torch.zeros(E, F, K)


@pytest.mark.parametrize(
    ("how", "state", "message"),
    [
        ({}, {"w1": W1, "w2": W2, "w3": W3[0]}, r"experts: .*; got w1 \[3, 4, 6\], w2 \[3, 6, 4\], w3 \[4, 6\]"),
        ({}, {"w13": torch.zeros(E, 2 * F, K), "w2": W2}, r"do not fit one another .*; got w13 \[3, 8, 6\]"),
        ({"layout": interleaved(2)}, {"0.weight": torch.zeros(E, 6, K)}, r"size mismatch for experts\.0\.weight"),
        ({}, {f"0.weight{i}": torch.zeros(2 * F + (i == 1), K) for i in range(E)}, r"Unexpected .*experts\.0\.weight0"),
    ],
)
def test_shapes_that_do_not_fit_are_named(how: dict[str, Any], state: dict[str, Tensor], message: str) -> None:
    model = torch.nn.ModuleDict({"experts": container(bias=False, **how)})

    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict({f"experts.{name}": tensor for name, tensor in state.items()})


@pytest.mark.parametrize(
    ("convert", "state", "message"),
    [
        (
            "from_torchtitan",
            {"a.w1": W1, "a.w2": W2.mT, "a.w3": W3},
            r"^a\.up \[3, 8, 6\] and down \[3, 4, 6\] do not fit",
        ),
        (
            "from_hugging_face",
            {"a.gate_up_proj": W1.mT, "a.down_proj": W1},
            r"^a\.up \[3, 6, 4\] and down \[3, 4, 6\] do",
        ),
        (
            "to_torchtitan",
            {"0.weight": W1, "3.weight": W2},
            r"up \[3, 4, 6\] and down \[3, 6, 4\] do .* of gated experts",
        ),
        ("to_hugging_face", {"0.weight": W1, "3.weight": W2}, "of gated experts"),
        (
            "from_transformer_engine",
            {"0.weight0": W1[0], "0.weight2": W1[2], "2.weight0": W2[0]},
            "^weight1 is missing",
        ),
    ],
)
def test_conversions_of_what_does_not_fit_are_refused(convert: str, state: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(checkpoints, convert)(state, NAMES)


def adapted(layout: Any) -> Sequential:
    """Experts with adapters that are not zero."""
    model = Sequential(GroupedLoRA(E, K, 2 * F, 2), SwiGLU(layout=layout), GroupedLoRA(E, F, K, 2)).double()
    for op in (model[0], model[2]):
        torch.nn.init.normal_(op.lora_b)
    return model


def with_function(layout: Any) -> Sequential:
    gate = Pointwise(lambda gate, up: torch.relu(gate) * up, halves=layout)
    return Sequential(GroupedLinear(E, K, 2 * F), gate, GroupedLinear(E, F, K)).double()


def behind(*between: Any) -> Callable[[Any], Sequential]:
    """A container with modules between its linear and its GLU."""

    def make(layout: Any) -> Sequential:
        parts = [part() for part in between]
        return Sequential(GroupedLinear(E, K, 2 * F), Sequential(*parts, SwiGLU(layout=layout))).double()

    return make


def drawn_bias() -> Bias:
    op = Bias(2 * F)
    torch.nn.init.normal_(op.bias)
    return op


def with_columns() -> Pointwise:
    return Pointwise(lambda x, beta: x * torch.sigmoid(beta * x), columns={"beta": torch.randn(2 * F)})


ORDERS = {
    "adapters": adapted,
    "function": with_function,
    "bias": behind(drawn_bias),
    "activation": behind(lambda: Activation("relu2")),
    "function before": behind(lambda: Pointwise(torch.tanh)),
    "columns": behind(with_columns, drawn_bias),
    "dropout": behind(lambda: torch.nn.Dropout(0.0), torch.nn.Identity),
    "linear of torch": lambda layout: Sequential(torch.nn.Linear(K, 2 * F), SwiGLU(layout=layout)).double(),
}


def rows_of(model: Sequential) -> Tensor:
    x = torch.randn(5, K, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    takes = {} if isinstance(model[0], torch.nn.Linear) else {"split_sizes": CALL["split_sizes"]}
    return model(x, **takes).detach()


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("of", LAYOUTS)
@pytest.mark.parametrize("to", LAYOUTS)
def test_rows_follow_the_order_whatever_has_and_reads_them(of: Any, to: Any, kind: str) -> None:
    original, model = ORDERS[kind](of), ORDERS[kind](to)
    state = original.state_dict()
    for loaded in (state, state if of == "concat" else dict(state)):
        model.load_state_dict(loaded)
        torch.testing.assert_close(rows_of(model), rows_of(original))
    assert torch.equal(torch.func.functional_call(original, state, *call_of(original)), rows_of(original))
    if to != "concat":
        with pytest.raises(RuntimeError, match="does not say: say it with"):
            model.load_state_dict(dict(original.named_parameters()))


def call_of(model: Sequential) -> tuple[Any, ...]:
    x = torch.randn(5, K, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return (x,) if isinstance(model[0], torch.nn.Linear) else ((x,), {"split_sizes": CALL["split_sizes"]})


@pytest.mark.parametrize("of", LAYOUTS)
@pytest.mark.parametrize("to", LAYOUTS)
def test_base_of_any_order_loads_beside_adapters(of: Any, to: Any) -> None:
    base = Sequential(GroupedLinear(E, K, 2 * F), SwiGLU(layout=of), GroupedLinear(E, F, K)).double()
    model = adapted(to)
    found = model.load_state_dict(base.state_dict(), strict=False)
    for op in (model[0], model[2]):
        torch.nn.init.zeros_(op.lora_b)

    assert found.unexpected_keys == []
    assert len(found.missing_keys) == 4
    torch.testing.assert_close(rows_of(model), rows_of(base))


def test_adapters_alone_are_told_their_order() -> None:
    original, model = adapted(interleaved(2)), adapted("concat")
    factors = {name: tensor for name, tensor in original.state_dict().items() if "lora" in name}
    model.load_state_dict(original.state_dict())
    torch.nn.init.zeros_(model[0].lora_b)
    model.load_state_dict(checkpoints.with_layout(factors, "0", interleaved(2)), strict=False)

    torch.testing.assert_close(rows_of(model), rows_of(original))


@pytest.mark.parametrize("to", ["hugging_face", "torchtitan", "transformer_engine"])
def test_conversions_of_rows_with_adapters(to: str) -> None:
    interleaved_, plain = adapted(interleaved(2)), adapted("concat")
    for model in (interleaved_, plain):
        for op in (model[0], model[2]) if to == "torchtitan" else ():
            del op.per_group["bias"], op.bias
    plain.load_state_dict(checkpoints.with_layout(interleaved_.state_dict(), "0", "concat"))
    for name, dim in (("weight", -2), ("bias", -1), ("lora_b", -2)):
        if (rows := plain[0]._parameters.get(name)) is not None:
            rows.data = layouts.deinterleave(rows.data, 2, dim)
    convert = getattr(checkpoints, f"to_{to}")

    assert_same_states(convert(interleaved_.state_dict(), ("0", "2")), convert(plain.state_dict(), ("0", "2")))


@pytest.mark.parametrize("to", ["hugging_face", "torchtitan", "transformer_engine"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_conversions_of_parameters_need_their_order(layout: Any, to: str) -> None:
    model, convert = container(layout=layout, bias=False), getattr(checkpoints, f"to_{to}")
    parameters = {f"layers.1.{name}": p.detach() for name, p in model.named_parameters()}

    with pytest.raises(ValueError, match=r"layers\.1\.0\.weight may have .*with_layout\(state, 'layers\.1\.0', "):
        convert(parameters, NAMES)
    told = convert(checkpoints.with_layout(parameters, "layers.1.0", layout), NAMES)
    assert_same_states(told, convert(model.state_dict(prefix="layers.1."), NAMES))


class Shuffled(torch.nn.Module):
    """Keeps no column where it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1)


@pytest.mark.parametrize(("between", "key"), [(Shuffled, "0"), (lambda: torch.nn.LayerNorm(2 * F), "1.0")])
def test_columns_of_an_unknown_module_stay_in_their_order(between: Any, key: str) -> None:
    make = behind(between)
    original, same, other = make(interleaved(2)), make(interleaved(2)), make("concat")
    same.load_state_dict(original.state_dict())

    assert torch.equal(rows_of(same), rows_of(original))
    with pytest.raises(RuntimeError, match=rf"{key}: rows of gate and up are in blocks of 2, and are read here gate b"):
        other.load_state_dict(original.state_dict())
    other.load_state_dict(checkpoints.with_layout(original.state_dict(), key, "concat"))


def test_rows_of_a_parametrized_weight_stay_in_their_order() -> None:
    models = [container(layout=layout) for layout in (interleaved(2), "concat")]
    for model in models:
        torch.nn.utils.parametrizations.weight_norm(model[0])

    models[0].load_state_dict(models[0].state_dict())
    with pytest.raises(RuntimeError, match=r"how the rows of parametrizations\.weight\.original0 lie is not known"):
        models[1].load_state_dict(models[0].state_dict())


def test_experts_of_torchtitan_keep_their_path() -> None:
    """Where torchtitan has them: under a name that ends as that of the container in them."""
    model = torch.nn.ModuleDict({"routed_experts": torch.nn.ModuleDict({"inner_experts": FusedExperts(K, F, E)})})
    state, prefix = model.state_dict(), "routed_experts.inner_experts."
    stacked = {f"{prefix}w13": torch.stack([state[f"{prefix}w3"], state[f"{prefix}w1"]], 2)}

    assert set(state) == {f"{prefix}{name}" for name in ("w1", "w2", "w3")}
    model.load_state_dict(state)
    model.load_state_dict({**stacked, f"{prefix}w2": state[f"{prefix}w2"]})
    assert torch.equal(model.state_dict()[f"{prefix}w1"], state[f"{prefix}w3"])
