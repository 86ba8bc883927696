"""Judges a rewritten graph, whoever rewrote it: nothing may read a tensor that is not there.

Requires nothing. Raises `VerificationError` on the first thing that is wrong: a cycle, a copy that nobody
waits for, a reload that can run before its offload, a swapped tensor whose buffer is never let go.
"""

from __future__ import annotations

from tfswap.errors import TfswapError
from tfswap.ir.graph import Graph, Node
from tfswap.oplib import names


class VerificationError(TfswapError):
    """A rewritten graph would not run as planned: a defect of tfswap."""


def verify(graph: Graph) -> int:
    """Check `graph`; returns how many swap nodes it has."""
    try:
        order = graph.topological()
    except ValueError as error:
        raise VerificationError(f"the rewritten graph can't run: {error}. Please report this.") from error
    place = {node: i for i, node in enumerate(order)}
    users: dict[Node, list[Node]] = {}
    for node in order:
        for read in node.inputs:
            users.setdefault(read.node, []).append(node)
    count = 0
    live = graph.live_nodes()
    for node in order:
        if node.op not in names.ALL:
            continue
        count += 1
        if node not in live:
            raise VerificationError(f"nothing keeps {node.name!r} in the graph: it would never run")
        readers = users.get(node, [])
        if node.op == names.SWAP_OUT:
            releases = [n for n in readers if n.op == names.RELEASE]
            loads = [n for n in readers if n.op == names.SWAP_IN]
            if len(releases) != 1 or not loads:
                raise VerificationError(
                    f"{node.name!r} has {len(releases)} releases and {len(loads)} reloads: one release and at "
                    "least one reload are needed"
                )
            early = [n.name for n in loads if place[n] < place[releases[0]]]
            if early:
                raise VerificationError(f"{early[0]!r} can run before {releases[0].name!r} lets the buffer go")
        elif node.op == names.SWAP_IN and any(n.op != names.AWAIT for n in readers):
            raise VerificationError(f"{node.name!r} is read before its copy has ended")
        elif node.op == names.AWAIT and not readers:
            raise VerificationError(f"{node.name!r} brings back a tensor that nothing reads")
    return count
