"""Chooses kernels of a body that run as a group: each as soon as its inputs are computed, on all threads.

TensorFlow's lowered loops run all kernels so, and most kernels are too small to be divided among threads. A body in one
order runs them one after another. A group is faster and takes more memory: chunks for all its kernels are requested
before the first of them starts, and are freed when the last has ended (csrc/core/group_ops.cc). So the record of the
body stays exact, and its peak rises.

Invariant: in the order of the body, only kernels of the group are between two kernels of a group.

Not handled: smaller groups, where a limit has room for a part of a group; copies back that a group's first kernels do
not read, for which the whole group waits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tfswap.analysis.cost import group_cores, unordered_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.op_traits import is_pure, uses_tensor_list
from tfswap.ir.types import REFERENCES
from tfswap.kernels.hardware import Rates
from tfswap.planner.pairing import has_one_result
from tfswap.support.reach import reach

LEAST_GAIN_S = 20e-6
"""The least seconds that a group must save: calling another thread takes a part of them."""
SMALL_BYTES = 1024
"""Kernels of lists that request at most these bytes may be moved in the order: their elements are live anyway."""


def find_groups(
    flow: Dataflow, order: Sequence[int], cost_s: Sequence[float], rates: Rates
) -> tuple[list[int], list[list[int]]]:
    """`order`, with kernels that gain by running as a group next to one another, and the groups.

    Args:
        flow: the facts of a body, without names of results.
    """
    can = {i for i in order if can_join(flow, i)}
    made: list[int] = []
    groups: list[list[int]] = []
    for run in _runs(flow, order, can):
        made += run
        if run[0] in can and len(run) > 1 and _joins(flow, run) and _gain_s(flow, run, cost_s, rates):
            groups.append(run)
    return made, groups


def can_join(flow: Dataflow, i: int) -> bool:
    """Whether a kernel can be in a group: it has no effects but its results and its requests."""
    node = flow.nodes[i]
    kinds = (*(t.type for t in node.inputs), *node.outputs)
    return (
        is_pure(node.op)
        and not uses_tensor_list(node.op)
        and not flow.updates[i]
        and i not in flow.inexact_kernels
        and i not in flow.runs
        and has_one_result(flow, i)
        and all(kind.dtype not in REFERENCES for kind in kinds)
        and all(request.kind in ("out", "temp", "free") for request in flow.requests[i])
    )


def _runs(flow: Dataflow, order: Sequence[int], can: Collection[int]) -> list[list[int]]:
    """The order, divided into runs of kernels that can all join a group, and of kernels that can't.

    Kernels of lists are moved in the order, for longer runs.
    """
    deps = {i: flow.kernels_before(i) for i in order}
    lists = {
        i
        for i in order
        if uses_tensor_list(flow.nodes[i].op) and sum(r.nbytes for r in flow.requests[i]) <= SMALL_BYTES
    }
    waiting, done = list(order), set[int]()
    runs: list[list[int]] = []

    def take(wanted: Collection[int]) -> None:
        """Take ready kernels of `wanted`, up to the first that can't join and is not of a list."""
        taken: list[int] = []
        for i in waiting:
            if deps[i] <= done and i in wanted:
                taken.append(i)
                done.add(i)
            elif i not in can and i not in lists:
                break  # it keeps its place
        if taken:
            runs.append(taken)
            waiting[:] = [i for i in waiting if i not in done]

    while waiting:
        before = len(waiting)
        take(lists)
        take(can)
        if len(waiting) == before:
            runs.append([waiting.pop(0)])
            done.add(runs[-1][0])
    return runs


def _gain_s(flow: Dataflow, part: Sequence[int], cost_s: Sequence[float], rates: Rates) -> float:
    """The seconds that a group saves; 0 where that is too little."""
    before = {i: n for n, i in enumerate(part)}
    waits_for = [[before[d] for d in flow.kernels_before(i) if d in before] for i in part]
    alone_s = [cost_s[i] for i in part]
    cores = [group_cores(flow.nodes[i], cost_s[i], rates) for i in part]
    saved_s = sum(alone_s) - unordered_seconds(alone_s, cores, waits_for, rates)
    return saved_s if saved_s > LEAST_GAIN_S else 0.0


def _joins(flow: Dataflow, part: Sequence[int]) -> bool:
    """Whether all nodes between kernels of a group can be in it too."""
    members, users = set(part), flow.users

    def passes_on(edges: Sequence[Sequence[int]]) -> set[int]:
        """The nodes that are not kernels and are reached from the group through such nodes only."""
        found = reach(part, lambda i: [j for j in edges[i] if not flow.is_kernel[j]])
        return set(found) - members

    # Nodes that are neither kernels nor constants pass buffers on.
    between = passes_on(users) & passes_on(flow.deps)
    return all(flow.nodes[i].inputs and flow.nodes[i] not in flow.constants for i in between)
