"""Nodes that nothing needs and TensorFlow runs."""

from __future__ import annotations

from tfswap.ir.text import parse_graph
from tfswap.ir.unneeded import prune_as_lowered, prune_traced, restore_lowered

STEP = """\
%p = Placeholder() {dtype=bool} -> bool[]
%x = Placeholder() {dtype=float32} -> float32[4]
%a = Tanh(%x) -> float32[4]
%read = Sin(%a) -> float32[4]
%sum = AddN(%a, %a, %x) {N=3} -> float32[4]
%unneeded = StatelessIf(%p, %read) -> float32[4]
%dropped = Tanh(%unneeded) -> float32[4]
%shuffled = RandomShuffle(%a) -> float32[4]
feeds %p, %x
fetches %sum
"""


def test_what_tensorflow_runs_all_the_same_is_kept_and_restored():
    graph = parse_graph(STEP)
    prune_traced(graph)
    assert [node.name for node in graph] == ["p", "x", "a", "sum"]
    step = graph.copy()
    restore_lowered(step)
    assert [node.name for node in step] == ["p", "x", "a", "read", "sum", "unneeded", "shuffled"]
    assert step["read"].inputs == (step.tensor("a"),)
    assert step["unneeded"].inputs == (step.tensor("p"), step.tensor("read"))
    prune_as_lowered(step)
    assert "unneeded" in step
    assert len(graph) == 4


def test_a_graph_where_all_is_needed_has_no_other_form():
    graph = parse_graph(STEP.replace("fetches %sum", "fetches %sum, %dropped, %shuffled"))
    prune_traced(graph)
    assert graph.unpruned is None
    restore_lowered(graph)
    assert len(graph) == 8
