"""Patterns: where a shape matches a graph of ops, and the reason where a condition does not hold."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from fusible import (
    AddExtraInput,
    ConstantScale,
    FusedOp,
    Identity,
    Linear,
    MakeExtraOutput,
    Match,
    Op,
    OpGraph,
    Pattern,
    Scale,
    Sequential,
    SwiGLU,
    optional,
)
from fusible.fuser.compiler import legality
from fusible.fuser.compiler.flatten import OpEntry

X = torch.ones(3, 4)


def graph(*modules, **keywords):
    """The op graph of a call."""
    model = Sequential(*modules)
    model(X, **keywords)
    return kept(model.explain().graph, model)


def kept(found, *modules):
    """The graph, which keeps its modules from now on."""
    found.nx.graph["modules"] = modules
    return found


def matched(pattern, *modules, **keywords):
    """By match, the nodes of its roles."""
    return [match.nodes for match in pattern.matches(graph(*modules, **keywords))]


def refusal(pattern, *modules, **keywords):
    """The reason against the only match."""
    (match,) = pattern.matches(graph(*modules, **keywords))
    return pattern.refusal(match)


# ------------------------------------------------------------------------------------------------- shapes


def test_path_matches_ops_that_feed_one_another():
    pattern = Pattern.path(a=ConstantScale, b=Identity)

    assert matched(pattern, Identity(), ConstantScale(2.0), Identity()) == [{"a": "1", "b": "2"}]


def test_path_matches_at_every_place_in_execution_order():
    pattern, ops = Pattern.path(a=Identity, b=Identity), [Identity() for _ in range(12)]

    assert matched(pattern, *ops) == [{"a": str(i), "b": str(i + 1)} for i in range(11)]


def test_path_does_not_match_across_another_op_or_module():
    pattern = Pattern.path(a=Identity, b=Identity)

    assert matched(pattern, Identity(), ConstantScale(2.0), Identity(), nn.ReLU(), Identity()) == []


def test_path_matches_subclasses_and_any_of_several_types():
    pattern = Pattern.path(a=(Identity, ConstantScale))

    class Child(Identity): ...

    assert matched(pattern, Child(), SwiGLU(), ConstantScale(2.0)) == [{"a": "0"}, {"a": "2"}]


@pytest.mark.parametrize(
    ("types", "nodes"),
    [
        ([Identity, Scale, Linear], [{"a": "0", "s": "1", "b": "2"}]),
        ([Identity, Linear], [{"a": "0", "b": "1"}]),
        ([Identity, SwiGLU, Linear], []),
    ],
)
def test_optional_role_may_be_missing_in_the_middle(types, nodes):
    pattern = Pattern.path(a=Identity, s=optional(Scale), b=Linear)
    build = {Identity: Identity, Scale: Scale, SwiGLU: SwiGLU, Linear: lambda: Linear(2 if SwiGLU in types else 4, 4)}
    keywords = {"scales": torch.ones(3)} if Scale in types else {}

    assert matched(pattern, *[build[t]() for t in types], **keywords) == nodes


def test_longest_choice_of_optional_roles_comes_first():
    pattern = Pattern.path(a=Identity, s=optional(ConstantScale))

    assert matched(pattern, Identity(), ConstantScale(2.0)) == [{"a": "0", "s": "1"}, {"a": "0"}]


def test_pattern_of_optional_roles_only_matches_no_empty_place():
    pattern = Pattern.path(a=optional(Identity), b=optional(ConstantScale))

    assert matched(pattern, Identity(), ConstantScale(2.0)) == [{"a": "0", "b": "1"}, {"a": "0"}, {"b": "1"}]


def test_edge_joins_roles_at_a_port():
    pattern = Pattern.path(make=MakeExtraOutput, act=ConstantScale, add=AddExtraInput).edge("make", "add", "r")
    branch = MakeExtraOutput("r"), ConstantScale(2.0), AddExtraInput("r")

    assert matched(pattern, *branch) == [{"make": "0", "act": "1", "add": "2"}]


def test_edge_that_is_not_there_does_not_match():
    pattern = Pattern.path(make=MakeExtraOutput, act=ConstantScale, add=AddExtraInput).edge("make", "add", "r")
    other = MakeExtraOutput("q"), ConstantScale(2.0), AddExtraInput("r")

    assert matched(pattern, *other, r=X) == []


def test_path_does_not_match_where_ops_are_joined_otherwise_too():
    pattern = Pattern.path(make=MakeExtraOutput, act=ConstantScale, add=AddExtraInput)

    assert matched(pattern, MakeExtraOutput("r"), ConstantScale(2.0), AddExtraInput("r")) == []


def test_path_does_not_match_where_a_second_port_joins_the_same_ops():
    pattern = Pattern.path(make=MakeExtraOutput, add=AddExtraInput)

    assert matched(pattern, MakeExtraOutput("r"), AddExtraInput("r")) == []


def test_a_port_that_may_be_read_decides_nothing():
    path = Pattern.path(make=MakeExtraOutput, act=ConstantScale, add=AddExtraInput)
    read = MakeExtraOutput("r"), ConstantScale(2.0), AddExtraInput("r")
    given = MakeExtraOutput("q"), ConstantScale(2.0), AddExtraInput("r")
    all_three = [{"make": "0", "act": "1", "add": "2"}]

    assert matched(path.may_read("make", "add", "r"), *read) == all_three
    assert matched(path.may_read("make", "add", "r"), *given, r=X) == all_three
    assert matched(path.may_read("make", "add", "s"), *read) == []
    assert matched(path.may_read("make", "act", "r"), *read) == []


def test_a_port_that_may_be_read_is_beside_one_that_must():
    path = Pattern.path(make=MakeExtraOutput, add=AddExtraInput).edge("make", "add", "r")

    assert matched(path.may_read("make", "add", "s"), MakeExtraOutput("r"), AddExtraInput("r")) == [
        {"make": "0", "add": "1"}
    ]


def test_two_ports_between_the_same_ops_are_one_edge():
    pattern = Pattern.path(make=MakeExtraOutput, add=AddExtraInput).edge("make", "add", "r")

    assert matched(pattern, MakeExtraOutput("r"), AddExtraInput("r")) == [{"make": "0", "add": "1"}]


# ------------------------------------------------------------------------------------------------- conditions


def test_shares_holds_for_one_tensor_and_refuses_two_equal_ones():
    pattern = Pattern.path(a=Scale, b=Scale).shares("scales", "a", "b")
    ops, scales = [Scale(), Scale()], torch.ones(3)

    assert refusal(pattern, *ops, scales=scales) is None
    (match,) = pattern.matches(graph_with(ops, scales, scales.clone()))
    assert pattern.refusal(match) == "a and b read different scales"


def graph_with(ops, *scales):
    model = Sequential(*ops)
    model(X, *scales)
    return model.explain().graph


def test_shares_ignores_missing_roles():
    pattern = Pattern.path(a=Scale, b=optional(ConstantScale), c=Scale).shares("scales", "a", "b", "c")

    assert refusal(pattern, Scale(), Scale(), scales=torch.ones(3)) is None


class Optionally(Identity):
    def check(self, x, **keywords):
        return x

    def fwd(self, x: Tensor, *, extra: Tensor | None = None, mode: str = ""):
        return x, None


@pytest.mark.parametrize(("keywords", "reason"), [({}, None), ({"extra": X}, "a has 'extra'")])
def test_absent_refuses_a_keyword_that_is_given(keywords, reason):
    pattern = Pattern.path(a=Optionally).absent("extra", "a")

    assert refusal(pattern, Optionally(), **keywords) == reason


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_where_gives_its_reason(factor):
    pattern = Pattern.path(a=ConstantScale).where("the factor is not 2", lambda m: m.a.scale == 2.0)

    assert refusal(pattern, ConstantScale(factor)) == (None if factor == 2.0 else "the factor is not 2")


def test_first_condition_that_fails_gives_the_reason():
    no = Pattern.path(a=Identity).where("first", lambda m: True)
    no = no.where("second", lambda m: False).where("third", lambda m: False)

    assert refusal(no, Identity()) == "second"


class Tripled(ConstantScale):
    def fwd(self, x):
        return 3 * x, None


class Straight(ConstantScale):
    def bwd(self, saved, dy):
        return {"x": dy}


@pytest.mark.parametrize("half", [Tripled, Straight], ids=["fwd", "bwd"])
def test_subclass_that_computes_something_else_is_refused(half):
    reason = f"a is a {half.__name__}, which overrides ConstantScale"

    assert refusal(Pattern.path(a=ConstantScale), half(2.0)) == reason
    assert refusal(Pattern.path(a=half), half(2.0)) is None
    assert refusal(Pattern.path(a=Op), half(2.0)) is None


@pytest.mark.parametrize(
    "build",
    [
        lambda p: p.edge("a", "z", "x"),
        lambda p: p.shares("scales", "a", "z"),
        lambda p: p.absent("scales", "z"),
    ],
)
def test_role_that_the_pattern_has_not_raises(build):
    with pytest.raises(ValueError, match="no role 'z' in this pattern; it has a, b"):
        build(Pattern.path(a=Scale, b=optional(Scale)))


def test_a_pattern_is_a_value():
    base = Pattern.path(a=Identity)
    base.where("no", lambda m: False)

    assert refusal(base, Identity()) is None


# ------------------------------------------------------------------------------------------------- matches


def match_of(*modules, pattern=None, **keywords):
    pattern = pattern or Pattern.path(a=Optionally, b=optional(ConstantScale))
    return pattern.matches(graph(*modules, **keywords))[0]


def test_match_gives_ops_by_role_and_none_where_missing():
    op = Optionally()
    match = match_of(op)

    assert match.a is op
    assert match.b is None
    assert match.ops() == {"a": op, "b": None}


def test_match_refuses_an_unknown_role():
    with pytest.raises(AttributeError, match="no role 'c' in this match; it has a, b"):
        _ = match_of(Optionally()).c


def test_match_tells_what_a_port_is_given():
    match = match_of(Optionally(), extra=X.double().requires_grad_(), mode="fast")

    assert match.reads("a", "extra")
    assert not match.reads("a", "other")
    assert not match.reads("b", "extra")
    assert match.info("a", "extra").dtype == torch.float64
    assert match.info("a", "extra").requires_grad
    assert match.info("a", "mode") is None
    assert match.info("a", "other") is None


def test_match_has_no_info_on_what_an_op_computes():
    match = match_of(Identity(), Optionally())

    assert match.source("a", "x") == ("0", "y")
    assert match.info("a", "x") is None
    assert match.source("b", "x") is None


# ------------------------------------------------------------------------------------------------- legality


class Anything(FusedOp):
    def fwd(self, x): ...


class GivesR(Anything):
    extra_outputs = ("r",)


def illegal(pattern, *modules, fused=Anything, **keywords):
    (match,) = pattern.matches(graph(*modules, **keywords))
    return legality.refusal(match, fused(**match.ops()))


def test_path_of_ops_is_legal():
    assert illegal(Pattern.path(a=Identity, b=ConstantScale), Identity(), ConstantScale(2.0)) is None


@pytest.mark.parametrize(
    ("fused", "reason"), [(GivesR, None), (Anything, "the extra output 'r' of op 0 is wanted outside")]
)
def test_extra_output_wanted_outside_needs_a_fused_op_that_has_it(fused, reason):
    pattern = Pattern.path(a=MakeExtraOutput, b=ConstantScale)
    ops = MakeExtraOutput("r"), ConstantScale(2.0)

    for readers in ([], [AddExtraInput("r")]):
        assert illegal(pattern, *ops, *readers, fused=fused) == reason


def test_extra_output_read_inside_and_outside_is_refused():
    pattern = Pattern.path(make=MakeExtraOutput, a=ConstantScale, add=AddExtraInput).edge("make", "add", "r")
    ops = MakeExtraOutput("r"), ConstantScale(2.0), AddExtraInput("r"), AddExtraInput("r")

    assert illegal(pattern, *ops) == "the extra output 'r' of op 0 is wanted outside"


def hand_made(edges, nodes):
    """A match of the nodes in a graph that no container builds; edges are (source, reader, port, output)."""
    made = nx.DiGraph()
    made.add_node("in", spec=None)
    ops = {"a": MakeExtraOutput("r"), "b": Identity(), "c": Identity()}
    for position, (name, op) in enumerate(ops.items()):
        made.add_node(name, entry=OpEntry(name, position, op), position=position)
    for source, reader, port, output in edges:
        made.add_edge(source, reader, port=port, ports={port: output})
    return Match(kept(OpGraph(made), *ops.values()), {node: node for node in nodes}, tuple(nodes))


@pytest.mark.parametrize(
    ("edges", "nodes", "reason"),
    [
        (
            [("in", "a", "x", "y"), ("a", "b", "x", "y"), ("a", "c", "x", "y")],
            "ab",
            "another op reads the output of op a",
        ),
        ([("in", "a", "x", "y"), ("in", "b", "x", "y")], "ab", "the ops have more than one output"),
        (
            [("in", "a", "x", "y"), ("in", "c", "x", "y"), ("a", "c", "r", "r")],
            "ac",
            "the ops have more than one output",
        ),
        ([("in", "a", "x", "y"), ("a", "b", "x", "y"), ("b", "c", "x", "y")], "ac", "the ops read more than one x"),
        (
            [
                ("in", "a", "x", "y"),
                ("a", "c", "x", "y"),
                ("in", "b", "x", "y"),
                ("a", "b", "r", "r"),
                ("b", "c", "k", "z"),
            ],
            "ac",
            "op b must run between the ops",
        ),
    ],
)
def test_graphs_that_no_container_builds_yet_are_refused(edges, nodes, reason):
    match = hand_made(edges, nodes)

    assert legality.refusal(match, GivesR(**match.ops())).startswith(reason)
