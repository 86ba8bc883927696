"""A copy of a node has all facts about it: its own, and those that its graph has."""

from __future__ import annotations

from tfswap.ir.graph import Graph
from tfswap.ir.node_copies import add_copy
from tfswap.ir.permits import Permit
from tfswap.ir.text import parse_graph

STEP = """\
%p = Placeholder() {dtype=bool} -> bool[]
%axes = Const() {dtype=int32, value=tensor<0803>} -> int32[2] = (0, -1)
%chosen = StatelessIf(%p, %axes) -> int32[2]
feeds %p
fetches %chosen
"""


def _step() -> Graph:
    step = parse_graph(STEP)
    branch = parse_graph("%x = Placeholder() -> int32[2]\n%same = Neg(%x) -> int32[2]\nfeeds %x\nfetches %same\n")
    step.bodies[step["chosen"]] = branch, branch.copy()
    return step


def test_a_copy_in_another_graph_has_the_facts_of_its_source():
    step, other = _step(), Graph()
    permit = Permit(frozenset({"swap"}), "the user's")
    step.restrict(step.tensor("chosen"), permit)
    made = {}
    for node in step:
        made[node] = add_copy(other, node, node.name, [made[t.node].out(t.index) for t in node.inputs], source=step)
    axes, chosen = made[step["axes"]], made[step["chosen"]]
    assert other.small_constants == {axes: (0, -1)}
    assert [[node.name for node in body] for body in other.bodies[chosen]] == [["x", "same"]] * 2
    assert other.permits == {chosen.out(): permit}
    other.bodies[chosen][0].fetches.clear()
    assert step.bodies[step["chosen"]][0].fetches, "the bodies of the two are not the same graphs"


def test_a_copy_in_the_same_graph_has_a_name_of_its_own_and_no_facts_of_the_graph():
    step = _step()
    axes = step["axes"]
    copy = add_copy(step, axes, "axes", (), device="/device:CPU:0")
    assert (copy.name, copy.op, copy.attrs, copy.outputs) == ("axes_1", "Const", axes.attrs, axes.outputs)
    assert copy.device == "/device:CPU:0"
    assert copy not in step.small_constants
