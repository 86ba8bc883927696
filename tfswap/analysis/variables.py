"""Which of a step's feeds are variables that it writes, and the bytes that callers and updates hold of its tensors."""

from __future__ import annotations

from collections.abc import Collection

from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.ir.graph import Graph
from tfswap.kernels.alignment import round_up


def written_variables(graph: Graph, flow: Dataflow) -> list[int]:
    """The positions of the feeds that are variables which the step writes.

    Other handles that a writer is given, such as the iterator or the table that a loop takes, are not.
    """
    return [p for p, feed in enumerate(graph.feeds) if flow.first_versions([feed.name])]


def written_in_bodies(graph: Graph, flow: Dataflow) -> frozenset[str]:
    """The names of those feeds that are variables which bodies of loops and conditionals write."""
    inner = {u.old for i in flow.runs for u in flow.updates[i]}
    return frozenset(feed.name for feed in graph.feeds if flow.first_versions([feed.name]) & inner)


def copied_bytes(flow: Dataflow, shared: Collection[str]) -> int:
    """The bytes of the variables behind the feeds `shared`: an update copies one where something else holds it."""
    return sum(round_up(flow.values[v].nbytes) for v in flow.first_versions(shared))


def fetched_bytes(flow: Dataflow) -> int:
    """The bytes of what the step returns and nothing else holds."""
    values = (flow.values[v] for v in flow.fetched)
    return sum(round_up(value.nbytes) for value in values if value.producer != PERSISTENT)
