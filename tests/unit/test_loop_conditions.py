"""Conditions of loops that a body may compute too."""

from __future__ import annotations

import pytest

from tfswap.analysis.loop_conditions import next_arguments, repeatable_condition
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.simulator.decisions import decisions_seen, end_of
from tfswap.simulator.lowered_graph import Scope, callee

pytestmark = pytest.mark.fast

LOOP = """\
%x = Placeholder() {{dtype=float32}} -> float32[64]
%n = Placeholder() {{dtype=int32}} -> int32[]
%loop = While(%n, %x) -> int32[], float32[64]
body %loop
  %i = Placeholder() {{dtype=int32}} -> int32[]
  %a = Placeholder() {{dtype=float32}} -> float32[64]
  %zero = Const() {{dtype=int32, value=tensor<00000000>}} -> int32[]
{condition}
  feeds %i, %a
  fetches %more
body %loop
  %i = Placeholder() {{dtype=int32}} -> int32[]
  %a = Placeholder() {{dtype=float32}} -> float32[64]
  %less = Neg(%i) {{T=int32}} -> int32[]
  %sum = AddN(%a, %a, %a) {{N=3, T=float32}} -> float32[64]
  %whole = Cast(%sum) {{SrcT=float32, DstT=int32}} -> int32[]
  feeds %i, %a
  fetches %{counter}, %sum
feeds %x, %n
fetches %loop:1
"""
COUNTS = "  %more = Greater(%i, %zero) {T=int32} -> bool[]"
RANDOM = """\
  %u = RandomUniform(%zero) {T=int32, dtype=float32} -> float32[]
  %more = Greater(%u, %u) {T=float32} -> bool[]"""
LARGE = """\
  %axes = Const() {dtype=int32, value=tensor<00000000>} -> int32[1]
  %big = Max(%a, %axes) {T=float32, Tidx=int32} -> float32[]
  %more = Greater(%big, %big) {T=float32} -> bool[]"""


def loop(condition: str = COUNTS, counter: str = "less") -> Graph:
    text = LOOP.format(condition=condition, counter=counter)
    return parse_graph(text.replace("float32[64]", "float32[640]"))


def test_a_condition_that_is_cheap_and_has_no_effects_may_run_twice() -> None:
    condition, body = bodies(loop())
    found = repeatable_condition(condition)
    assert found is not None
    assert {node.name for node in found} == {"i", "zero", "more"}
    assert [(feed.name, node.name) for feed, node in next_arguments(condition, body).items()] == [("i", "less")]


@pytest.mark.parametrize("condition", [RANDOM, LARGE])
def test_other_conditions_run_once(condition: str) -> None:
    assert repeatable_condition(bodies(loop(condition))[0]) is None


@pytest.mark.parametrize(("counter", "seen"), [("less", True), ("whole", False)])
def test_a_sum_does_not_see_an_end_that_depends_on_it(counter: str, seen: bool) -> None:
    graph = loop(counter=counter)
    body = callee(Scope("", graph, None, 0, None, -1), graph["loop"], 1, 0)
    end = end_of(body)
    assert end is not None
    found = decisions_seen(body, body.graph["sum"], {end: body}, lambda part, node: part.needed([node]))
    assert [decision.previous for decision in found] == ([False, True] if seen else [True])


def bodies(graph: Graph) -> tuple[Graph, Graph]:
    condition, body = graph.bodies[graph["loop"]]
    return condition, body
