"""Chooses the encodings and packings of a step that are worth trying: those that free tensors which wait long.

The choice does not depend on the limit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from tfswap.analysis.dataflow import PERSISTENT
from tfswap.analysis.encodings import Encoding, waits_long
from tfswap.analysis.lossless_forms import SLACK, Form, Packing, sparse_form
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Output
from tfswap.ir.op_traits import reads_metadata_only
from tfswap.kernels.device import DeviceModel
from tfswap.passes.tactics.pack import readers_of
from tfswap.planner.problem import Problem

STAGES = 4
"""The number of stages of swapping tensors saved by loops, and of packing tensors, with equal shares of the bytes."""
LONG_SHARE = 0.02
"""The least wait of a tensor for kernels that can read an encoding, as a share of the step's time."""
LEAST_SHARE = 0.02
"""The least bytes of all tensors that can be encoded, as a share of the live peak. With less, encodings are not
tried."""
SPARSE_SHARE = 0.75
"""The most bytes of sparse rows, as a share of the tensor's bytes. With more, the gain is not worth the time."""
NOWHERE = -1
"""The number of a value that does not exist."""


def worth_encoding(problem: Problem, encodings: Collection[Encoding], least_bytes: float) -> tuple[str, ...]:
    """Names of the kernels whose encodings pay: a tensor waits long for such kernels only, or they need less memory.

    Empty where all these tensors together have fewer than `least_bytes`.

    Args:
        problem: the unchanged step in its first order, or a body.
    """
    flow, uses = problem.flow, problem.uses
    place = {kernel: position for position, kernel in enumerate(problem.order)}
    takers: dict[int, set[int]] = {}  # by value, the positions of kernels that would no longer read it
    dropped: list[tuple[Encoding, set[int]]] = []
    for e in encodings:
        values = {flow.value_of.get((t.node, t.index), NOWHERE) for t in e.dropped}
        read = NOWHERE not in values and all(flow.may(v, "encode") for v in values)
        nbytes, at = e.tensor.type.nbytes or 0, place[flow.place[e.kernel.name]]
        if not read or nbytes < problem.smallest_bytes:
            continue
        positions = uses.positions.get(flow.value_of[e.tensor.node, e.tensor.index], ())
        wait_s = max((uses.starts[b] - uses.starts[a + 1] for a, b in pairwise(positions) if b <= at), default=0.0)
        if e.codec.encode == custom_ops.ENCODE_MASK and not waits_long(wait_s, nbytes, problem.rates):
            continue  # a short wait, as within the forward pass, where the tensor is in the arena anyway
        dropped.append((e, values))
        for v in values:
            takers.setdefault(v, set()).add(at)
    freed = {v for v, at in takers.items() if _waits_for_takers(problem, v, at)}
    chosen = [(e, values) for e, values in dropped if values & freed or e.codec.encode == custom_ops.ENCODE_MAX_POOL]
    matter = set().union(*(values for _, values in chosen))
    if sum(flow.values[v].nbytes for v in matter) < least_bytes:
        return ()
    return tuple(e.kernel.name for e, _ in chosen)


def worth_packing(
    problem: Problem, graph: Graph, encoded: Collection[str], form_of: Callable[[Output], Form | None]
) -> list[tuple[Packing, ...]]:
    """Stages of packing tensors that wait long, up to all of them: first those that free the most bytes for their time.

    Empty where these tensors are small together.

    Args:
        problem: the unchanged step in its first order.
        encoded: names of kernels that read an encoding in place of a tensor.
        form_of: gives the smaller form of a tensor, or None.
    """
    flow, uses = problem.flow, problem.uses
    found: list[tuple[Packing, int, int]] = []  # with the bytes that it frees, and the bytes that its codecs process
    for v, positions in sorted(uses.positions.items()):
        tensor = flow.values[v].tensor
        form = None if v in problem.refusals or not flow.may(v, "encode") else form_of(tensor)
        if form is None:
            continue
        kernels = ((p, flow.nodes[problem.order[p]]) for p in positions[1:])
        called = {p: node.name for p, node in kernels if not reads_metadata_only(node.op)}
        if not readers_of(graph, tensor).keys() <= {*called.values()}:
            continue  # it has readers whose place in the order is not known
        groups = _late(problem, v, [positions[0], *(p for p in called if called[p] not in encoded)])
        if groups:
            readers = tuple(tuple(called[p] for p in group) for group in groups)
            packing = Packing(tensor.name, form.name, readers, form.minimum, form.capacity)
            nbytes = flow.values[v].nbytes
            found.append((packing, nbytes - form.nbytes, nbytes * (1 + len(groups))))
    return _stages(found, LEAST_SHARE * problem.live_peak_bytes)


def in_stages(sizes: Sequence[int]) -> list[int]:
    """For each stage, how many of the first entries it has; each stage adds an equal share of all bytes."""
    taken = list(itertools.accumulate(sizes))
    counts = (
        next(count for count, done in enumerate(taken, 1) if done * STAGES >= taken[-1] * stage)
        for stage in range(1, STAGES + 1)
    )
    return list(dict.fromkeys(counts)) if taken else []


def _stages(found: Collection[tuple[Packing, int, int]], least_bytes: float) -> list[tuple[Packing, ...]]:
    """Packings in stages: first those that free most for their time.

    Args:
        found: each with the bytes that it frees, and the bytes that its codecs process.
        least_bytes: what frees less is not worth a stage.
    """
    ranked = sorted(found, key=lambda entry: -entry[1] / entry[2])
    freed = [nbytes for _, nbytes, _ in ranked]
    stages = [ranked[:count] for count in in_stages(freed) if sum(freed[:count]) >= least_bytes]
    return [tuple(entry[0] for entry in found if entry in stage) for stage in stages]


def measured_sparse(tensor: Output, density: float | None, device: DeviceModel) -> Form | None:
    """Sparse rows of a tensor with this share of nonzero values, where they pay; None where it was not measured."""
    if density is None:
        return None
    elements = tensor.type.num_elements or 0
    form = sparse_form(tensor, min(elements, math.ceil(density * SLACK * elements)), device)
    return form if form is not None and form.nbytes <= SPARSE_SHARE * (tensor.type.nbytes or 0) else None


def _late(problem: Problem, v: int, positions: Collection[int]) -> list[list[int]]:
    """The uses of a tensor after long waits, in groups of uses that follow each other."""
    groups: list[list[int]] = []
    starts, nbytes = problem.uses.starts, problem.flow.values[v].nbytes
    for before, after in pairwise(positions):
        wait_s = starts[after] - starts[before + 1]
        long = waits_long(wait_s, nbytes, problem.rates)
        if long and (groups or wait_s >= LONG_SHARE * starts[-1]):
            groups.append([])
        if groups:
            groups[-1].append(after)
    return groups


def _waits_for_takers(problem: Problem, v: int, takers: Collection[int]) -> bool:
    """Whether a tensor waits long for these kernels only, after all others have read it.

    Args:
        takers: the kernels' positions.
    """
    flow, uses = problem.flow, problem.uses
    if flow.values[v].producer == PERSISTENT or v in flow.fetched:
        return False  # it stays in the arena anyway
    last = max((p for p in uses.positions.get(v, ()) if p not in takers), default=None)
    if last is None:
        return False  # it is small, or from before the step
    wait_s = uses.starts[max(takers)] - uses.starts[last + 1]
    return wait_s >= LONG_SHARE * uses.starts[-1] and waits_long(wait_s, flow.values[v].nbytes, problem.rates)
