"""Checks a rewritten graph: nothing may read a tensor that is not in memory.

Requires nothing. Raises `VerificationError` for the first fault found: a cycle, a copy that no node waits for, a reload
that can run before its offload, a swapped tensor whose buffer is never freed.
"""

from __future__ import annotations

from collections.abc import Callable

from tfswap.errors import TfswapError
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node


class VerificationError(TfswapError):
    """A rewritten graph would not run as planned: a defect of tfswap."""


def verify(graph: Graph) -> int:
    """Check `graph` and its bodies; returns how many swap nodes there are."""
    return _verify(graph) + sum(_verify(body) for body in graph.all_bodies())


def _verify(graph: Graph) -> int:
    try:
        order = graph.topological()
    except ValueError as error:
        raise VerificationError(f"the rewritten graph can't run: {error}. Please report this.") from error
    is_released = _releases_before(order)
    fetched = {fetch.node for fetch in graph.fetches}
    users: dict[Node, list[Node]] = {}
    for node in order:
        for read in node.inputs:
            users.setdefault(read.node, []).append(node)
    live = graph.live_nodes()
    swaps = [node for node in order if node.op in custom_ops.ALL]
    for node in swaps:
        if node not in live:
            raise VerificationError(f"nothing keeps {node.name!r} in the graph: it would never run")
    for node in swaps:
        readers = users.get(node, [])
        if node.op == custom_ops.SWAP_OUT:
            releases = [n for n in readers if n.op == custom_ops.RELEASE]
            loads = [n for n in readers if n.op == custom_ops.SWAP_IN]
            listed = len(readers) > len(releases) + len(loads)  # on a list, for another body
            if len(releases) != 1 or not (loads or listed):
                raise VerificationError(
                    f"{node.name!r} has {len(releases)} releases and {len(loads)} reloads: one release and at "
                    "least one reload are needed"
                )
            early = [n.name for n in loads if not is_released(releases[0], n)]
            if early:
                raise VerificationError(f"{early[0]!r} can run before {releases[0].name!r} frees the buffer")
        elif node.op in custom_ops.STARTED and (node in fetched or any(n.op != custom_ops.AWAIT for n in readers)):
            raise VerificationError(f"{node.name!r} is read before its copy has ended")
        elif node.op == custom_ops.AWAIT and not readers and node not in fetched:
            raise VerificationError(f"{node.name!r} brings back a tensor that nothing reads")
    return len(swaps)


def require_stock(graph: Graph) -> None:
    """Raise VerificationError where `graph` or a body of it has an op, or a kernel, of tfswap's own."""
    for part in (graph, *graph.all_bodies()):
        own = next((n for n in part if n.op.startswith(custom_ops.NAMESPACE) or custom_ops.KERNEL in n.attrs), None)
        if own is not None:
            raise VerificationError(f"{own.op} {own.name!r} is tfswap's own, in a portable model. Please report this.")


def _releases_before(order: list[Node]) -> Callable[[Node, Node], bool]:
    """Whether a path of edges makes a reload (second) wait for a release (first)."""
    bit = {node: 1 << i for i, node in enumerate(n for n in order if n.op == custom_ops.RELEASE)}
    last_use = {source: node for node in order for source in _sources(node)}
    before: dict[Node, int] = {}  # bits of the releases that must run before each node
    loads: dict[Node, int] = {}
    for node in order:
        mask = bit.get(node, 0)
        for source in _sources(node):
            mask |= before[source]
        if node.op == custom_ops.SWAP_IN:
            loads[node] = mask
        before[node] = mask
        for source in _sources(node):
            if last_use[source] is node:
                del before[source]
    return lambda release, load: bool(loads[load] & bit[release])


def _sources(node: Node) -> set[Node]:
    return {*(read.node for read in node.inputs), *node.controls}
