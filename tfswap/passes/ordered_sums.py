"""Sums have the bits of the unordered step: each adds in the order in which TensorFlow's executor lets it add.

AddN begins with the first input whose buffer nobody else holds when it runs, and puts the first input in its place
(tensorflow/core/kernels/aggregate_ops.h): AddN(m, m, s) is m + m + s while another kernel reads s, and s + m + m once
that has ended. A plan's order, swaps and recomputation decide when others read, and must not decide what is added
first. So it is fixed here, before anything is planned:

- The executor's runs of the step as it was given are replayed (planner/baseline.py). What a sum begins with in most of
  them becomes its first input. Where all other readers must run before the sum, or after it, the runs agree. Where
  threads race, TensorFlow's own bits may differ from run to run.
- The sum runs tfswap's own kernel, which adds inputs in their order whoever else holds them (csrc/core/sum_ops.cc).
  A portable model has no such kernel and adds two tensors at a time, since a + b is b + a.

Invariant: a sum adds the same numbers in the same order in every plan of a graph for a device.

Not handled: sums of two inputs and of integers, which need nothing. A loop's sum that begins otherwise in the first
iteration, while what the loop was given is still held outside, adds as in the later iterations.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import PERSISTENT, Dataflow, analyse_dataflow
from tfswap.analysis.device import DeviceModel
from tfswap.analysis.owners import solely_owned
from tfswap.ir.graph import Graph, Node
from tfswap.ir.ops import control_flow, depends_on_owners
from tfswap.ir.types import is_rounded
from tfswap.oplib.names import KERNEL, OWN_KERNEL
from tfswap.passes.share import apply_share
from tfswap.passes.split_sums import split_into_pairs
from tfswap.planner.baseline import simulate_forwarding

EXACT = 2
"""A sum of so many inputs has one value, whatever their order."""


def apply_ordered_sums(graph: Graph, device: DeviceModel, *, held: Sequence[str] = (), portable: bool = False) -> int:
    """Fix the order in which sums of `graph`, as it was given, and of its bodies add, in place; returns how many.

    Args:
        held: names of tensors that the unordered step holds until its end.
        portable: with TensorFlow's own ops and kernels alone.
    """
    parts = {"": graph, **graph.named_bodies()}
    sums = {name: found for name, part in parts.items() if (found := _sums(part))}
    first = _first_inputs(graph, device, held) if sums else {}
    for name, found in sums.items():
        for node in found:
            if (k := first.get((name, node.name))) is not None:
                inputs = list(node.inputs)
                inputs[0], inputs[k] = inputs[k], inputs[0]
                node.inputs = tuple(inputs)
            if not portable:
                node.attrs = {**node.attrs, KERNEL: OWN_KERNEL.encode()}
        if portable:
            split_into_pairs(parts[name], found)
    return sum(map(len, sums.values()))


def _sums(graph: Graph) -> list[Node]:
    """Those whose bits depend on who else holds their inputs."""
    return [n for n in graph if depends_on_owners(n.op) and len(n.inputs) > EXACT and is_rounded(n.outputs[0].dtype)]


def _first_inputs(graph: Graph, device: DeviceModel, held: Sequence[str]) -> dict[tuple[str, str], int]:
    """What sums begin with in the unordered step, by their part's name and their own, where it is none of the first two
    inputs.
    """
    step = graph.copy()
    if step.executed:
        step.arrange({step[name]: rank for rank, name in enumerate(step.executed)})
    step.fetches += map(step.tensor, held)
    found: dict[tuple[str, str], int] = {}
    _visit(step, "", device, lambda _: (), found)
    return found


def _visit(
    part: Graph,
    name: str,
    device: DeviceModel,
    own: Callable[[Dataflow], Collection[int]],
    found: dict[tuple[str, str], int],
) -> None:
    """Add to `found` what the sums of a part and of its bodies begin with.

    Args:
        name: the part's; "" of the step itself.
        own: from the part's facts to those of its arguments that nobody outside holds.
    """
    apply_share(part)  # as TensorFlow does when it makes a step
    part.prune()
    facts = functools.cache(lambda: analyse_dataflow(part, device, strict=False, lowered=Costs.of(device).seconds))
    alone = solely_owned(part, device)
    undecided = [node for node in _sums(part) if not any(map(alone, node.inputs[:EXACT]))]
    if undecided:
        flow = facts()
        kernels = [i for node in undecided if flow.makes[i := flow.place[node.name]]]
        seconds = Costs.of(device).of_step(flow)
        for i, k in simulate_forwarding(flow, seconds, device, kernels, own(flow), is_body=bool(name)).items():
            if k is not None and k >= EXACT:
                found[name, flow.nodes[i].name] = k
    for node, bodies in part.bodies.items():
        for n, body in enumerate(bodies):
            arguments = functools.partial(_own_arguments, node, n, body, facts)
            _visit(body, f"{name}{'/' if name else ''}{node.name}[{n}]", device, arguments, found)


def _own_arguments(node: Node, n: int, body: Graph, outside: Callable[[], Dataflow], flow: Dataflow) -> set[int]:
    """Values of the arguments that nobody holds who is not in the n-th body of `node`, which TensorFlow lowers.

    A loop's body gets what the iteration before has made; what its condition reads the body waits for.

    Args:
        outside: gives the facts of the part that `node` is in.
        flow: the body's facts.
    """
    kind = control_flow(node.op)
    assert kind is not None
    feeds = [flow.value_of.get((feed, 0)) for feed in body.feeds]
    if kind.is_loop:
        return {v for v in feeds if v is not None} if n else set()
    around = outside()
    held = Counter(v for reads in (*around.reads, *around.consumes.values()) for v in reads)
    own: set[int] = set()
    for v, tensor in zip(feeds, node.inputs[kind.first_argument :], strict=True):
        given = around.value_of.get((tensor.node, tensor.index))
        if v is None or given is None or given in around.fetched:
            continue
        if around.values[given].producer != PERSISTENT and held[given] == 1:
            own.add(v)
    return own
