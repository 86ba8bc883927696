"""Which encodings and packings of a step are worth trying: those that free tensors which wait long.

Nothing here depends on the limit.
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
"""In so many steps what loops save is swapped, and tensors wait in a smaller form, each taking as much of the bytes."""
LONG_SHARE = 0.02
"""Of the step's time, which a tensor must wait for kernels that can take an encoding of it, and for them alone."""
LEAST_SHARE = 0.02
"""Of the live peak: where all tensors that can be encoded have less, plans are not looked for twice."""
SPARSE_SHARE = 0.75
"""Of a tensor's bytes, which its sparse rows take at most: what is won with more is not worth the time."""
NOWHERE = -1
"""Stands for the value of a tensor that has none."""


def worth_encoding(problem: Problem, encodings: Collection[Encoding], least_bytes: float) -> tuple[str, ...]:
    """Names of the kernels that gain by their encodings: a tensor waits long for nothing else, or they need less.

    Tensor by tensor; of none where all of them together hardly matter.

    Args:
        problem: the step as it is, in the order that is planned first; or a body.
        least_bytes: what all tensors that gain must have.
    """
    flow, uses = problem.flow, problem.uses
    place = {kernel: position for position, kernel in enumerate(problem.order)}
    takers: dict[int, set[int]] = {}  # by value, the positions of those who would read an encoding of it, or nothing
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
            continue  # of the forward pass, it may be: the tensor is there all the same
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
    """What waits long in full and could wait in a smaller form: what frees most for its time, more, and all of it.

    Nothing where that hardly matters.

    Args:
        problem: the step as it is, in the order that is planned first.
        encoded: names of kernels that take an encoding, and read no tensor for it.
        form_of: the smaller form that a tensor has, where there is one.
    """
    flow, uses = problem.flow, problem.uses
    found: list[tuple[Packing, int, int]] = []  # with the bytes that it frees, and those that are gone through for it
    for v, positions in sorted(uses.positions.items()):
        tensor = flow.values[v].tensor
        form = None if v in problem.refusals or not flow.may(v, "encode") else form_of(tensor)
        if form is None:
            continue
        kernels = ((p, flow.nodes[problem.order[p]]) for p in positions[1:])
        called = {p: node.name for p, node in kernels if not reads_metadata_only(node.op)}
        if not readers_of(graph, tensor).keys() <= {*called.values()}:
            continue  # of some it is not known when they run
        groups = _late(problem, v, [positions[0], *(p for p in called if called[p] not in encoded)])
        if groups:
            readers = tuple(tuple(called[p] for p in group) for group in groups)
            packing = Packing(tensor.name, form.name, readers, form.minimum, form.capacity)
            nbytes = flow.values[v].nbytes
            found.append((packing, nbytes - form.nbytes, nbytes * (1 + len(groups))))
    return _stages(found, LEAST_SHARE * problem.live_peak_bytes)


def in_stages(sizes: Sequence[int]) -> list[int]:
    """How many of these, from the first on, each stage takes: one after the other the same share of all bytes."""
    taken = list(itertools.accumulate(sizes))
    counts = (
        next(count for count, done in enumerate(taken, 1) if done * STAGES >= taken[-1] * stage)
        for stage in range(1, STAGES + 1)
    )
    return list(dict.fromkeys(counts)) if taken else []


def _stages(found: Collection[tuple[Packing, int, int]], least_bytes: float) -> list[tuple[Packing, ...]]:
    """Packings in stages: first those that free most for their time.

    Args:
        found: each with the bytes that it frees, and those that are gone through for it.
        least_bytes: what frees less is not worth a stage.
    """
    ranked = sorted(found, key=lambda entry: -entry[1] / entry[2])
    freed = [nbytes for _, nbytes, _ in ranked]
    stages = [ranked[:count] for count in in_stages(freed) if sum(freed[:count]) >= least_bytes]
    return [tuple(entry[0] for entry in found if entry in stage) for stage in stages]


def measured_sparse(tensor: Output, density: float | None, device: DeviceModel) -> Form | None:
    """Sparse rows of a tensor of which such a share is not zero, where that pays; None where it was not measured."""
    if density is None:
        return None
    elements = tensor.type.num_elements or 0
    form = sparse_form(tensor, min(elements, math.ceil(density * SLACK * elements)), device)
    return form if form is not None and form.nbytes <= SPARSE_SHARE * (tensor.type.nbytes or 0) else None


def _late(problem: Problem, v: int, positions: Collection[int]) -> list[list[int]]:
    """Of the uses of a tensor those that come when it has waited long, together that follow each other."""
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
    """Whether a tensor waits long, and for these kernels alone, once all others have read it.

    Args:
        takers: their positions.
    """
    flow, uses = problem.flow, problem.uses
    if flow.values[v].producer == PERSISTENT or v in flow.fetched:
        return False  # it stays all the same
    last = max((p for p in uses.positions.get(v, ()) if p not in takers), default=None)
    if last is None:
        return False  # a small one, or there from before
    wait_s = uses.starts[max(takers)] - uses.starts[last + 1]
    return wait_s >= LONG_SHARE * uses.starts[-1] and waits_long(wait_s, flow.values[v].nbytes, problem.rates)
