"""Collectives: in one order on every worker, and those of one group concurrently.

A collective ends when all members of its group have begun it. Workers have different plans, since their arenas differ.
If one of them began another collective first, it would wait for ever. The traced program, and the order in it, is the
same on all workers. So collectives run in their traced order: each waits for the one before it on its device, of any
group.

Where several devices of one worker share an order, the members of a group can't run one after the other. While the step
is planned they are one kernel, `TOGETHER`, with all of their inputs and outputs (`join_collectives`). The graph that
runs has the members, each at that kernel's place in the order (`expand_collectives`). TensorFlow matches members by
counting them per group and device, and so does this pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.analysis.collectives import matching, traced_order
from tfswap.errors import UnsupportedGraph
from tfswap.ir.custom_ops import TOGETHER
from tfswap.ir.devices import within_worker
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import is_collective, is_const
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass


@graph_pass(
    ensures="the collectives of each device run in the order in which they were traced",
)
def order_collectives(graph: Graph, _: Target) -> int:
    """Add the control edges, in `graph` and its bodies, in place; returns how many."""
    return sum(_in_order(part) for part in (graph, *graph.all_bodies()))


def _in_order(graph: Graph) -> int:
    added = 0
    latest: dict[str, Node] = {}
    for node in traced_order(graph):
        device = within_worker(node.device)
        before = latest.get(device)
        if before is not None and before not in node.controls and node not in graph.needed([before]):
            added += graph.add_control(node, before)
        latest[device] = node
    return added


@graph_pass(
    requires="collectives in their traced order",
    ensures="the members of a group on several devices are one kernel",
)
def join_collectives(graph: Graph, _: Target) -> int:
    """Make one kernel of the collectives of a group on several devices, in place; returns how many kernels.

    Raises UnsupportedGraph where it is not known which members match, or where they are in loops or conditionals.
    """
    for node in (each for members in matching(graph) for each in members):
        if not is_collective(node.op):
            raise UnsupportedGraph(
                f"{node.name!r} ({node.op}) runs collectives, and loops and conditionals with collectives on several "
                "devices that share an arena are not planned. An embedding's gradient is such a conditional: make it "
                "dense before replicas add it up, tf.convert_to_tensor(gradient)."
            )
    return join_members(graph)


def join_members(graph: Graph) -> int:
    """Make one node of the members of each group on several devices, in place; returns how many nodes.

    Raises UnsupportedGraph where it is not known which members match.
    """
    together = [members for members in matching(graph) if len(members) > 1]
    for members in together:
        _join(graph, members)
    return len(together)


def _join(graph: Graph, members: Sequence[Node]) -> None:
    made = graph.add(
        TOGETHER,
        graph.unique_name(f"tfswap/together/{members[0].name}"),
        [t for node in members for t in node.inputs],
        controls=dict.fromkeys(c for node in members for c in node.controls),
        attrs={"members": tuple((n.name, n.op, n.attrs, n.device, len(n.inputs), len(n.outputs)) for n in members)},
        outputs=[kind for node in members for kind in node.outputs],
        device=members[0].device,
    )
    graph.join({made: members})


@graph_pass(
    requires="an order",
    ensures="the members of each group are nodes, each at the place of their kernel in the order",
)
def expand_collectives(graph: Graph, _: Target) -> int:
    """Replace each kernel by its members, in place; returns how many."""
    joined = [node for node in graph if node.op == TOGETHER]
    feeds = set(graph.feeds)
    count = 0
    for made in joined:
        inputs, outputs = iter(made.inputs), iter(range(len(made.outputs)))
        stands_for: dict[Output, Output] = {}
        members: list[Node] = []
        # Each waits for all members' inputs: one that begins earlier holds its memory until the others begin.
        read = (t.node for t in made.inputs)
        before = dict.fromkeys((*made.controls, *(n for n in read if n not in feeds and not is_const(n.op))))
        for name, op, attrs, device, reads, gives in made.attrs["members"]:  # pyright: ignore[reportGeneralTypeIssues] written by _join
            numbers = [next(outputs) for _ in range(gives)]
            member = graph.add(
                op,
                graph.unique_name(name),
                [next(inputs) for _ in range(reads)],
                controls=before,
                attrs=attrs,
                outputs=[made.outputs[i] for i in numbers],
                device=device,
            )
            stands_for.update({made.out(number): member.out(i) for i, number in enumerate(numbers)})
            members.append(member)
        for node in graph:
            if any(t.node is made for t in node.inputs):
                node.inputs = tuple(stands_for.get(t, t) for t in node.inputs)
            if made in node.controls:
                node.controls = tuple(c for c in node.controls if c is not made)
                for member in members:
                    graph.add_control(node, member)
            elif any(t.node in members for t in node.inputs):
                for member in members:  # a reader of one of them comes after all
                    graph.add_control(node, member)
        graph.fetches = [stands_for.get(t, t) for t in graph.fetches]
        graph.targets = [m for t in graph.targets for m in (members if t is made else (t,))]
        count += len(members)
    if joined:
        graph.prune()
    return count
