"""Gives sums the bits of the unordered step: each adds in the order of TensorFlow's executor.

AddN begins with the first input whose buffer has no other holder when it runs, and swaps it with the first input
(tensorflow/core/kernels/aggregate_ops.h): AddN(m, m, s) is m + m + s while another kernel reads s, and s + m + m once
that has ended. A plan's order, swaps and recomputation change when other kernels read, and must not change the input
that is added first. So it is fixed here, before anything is planned:

- The executor's runs of the step as it was given are replayed, with loops and conditionals lowered as TensorFlow lowers
  them (simulator/sum_order.py). The input that a sum begins with in most runs becomes its first input. Where all other
  readers must run before the sum, or after it, the runs agree. Where threads race, TensorFlow's own bits may differ
  from run to run.
- A sum that adds terms as they are ready (AccumulateNV2) becomes one that adds them in the order of most runs
  (passes/prepare/accumulated_sums.py).
- In loops the order can differ from iteration to iteration: tensors of the first one are still held outside, and the
  last one overlaps with none after it. Such a sum has an order by iteration of all loops around it, as attributes.
- Where it depends on the branches that conditionals take, or on whether an iteration is the last of a loop whose length
  values decide, these decisions are inputs of the sum, which is then tfswap's own op with an order by decision too
  (passes/prepare/shared_decisions.py).
- The sum runs tfswap's own kernel, which adds inputs in their order for any holders (csrc/core/sum_ops.cc). A portable
  model has no such kernel and adds two tensors at a time, since a + b is b + a, in the order of most iterations.

Invariant: a sum adds the same numbers in the same order in every plan of a graph for a device.

Not handled: sums of two inputs and of integers, which need nothing. Loops whose length values decide, where the order
depends on how many iterations follow the next one. Branches, where AccumulateNV2's order depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tfswap.analysis.cost import Costs
from tfswap.analysis.owners import solely_owned
from tfswap.ir.custom_ops import FIRST, FIRST_SHAPE, KERNEL, OWN_KERNEL, SUM, TO_DEVICE, TO_HOST
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.op_traits import control_flow, depends_on_owners
from tfswap.ir.sums import decisions_of
from tfswap.ir.types import is_rounded
from tfswap.ir.unneeded import prune_as_lowered, restore_lowered
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.prepare.accumulated_sums import add_by_kernels, add_in_order, sums_by_kernels
from tfswap.passes.prepare.common_subexpressions import merge_as_executed
from tfswap.passes.prepare.shared_decisions import SharedDecisions
from tfswap.passes.prepare.split_add_n import split_into_pairs
from tfswap.simulator.iteration_table import IterationTable
from tfswap.simulator.sum_order import SumOrders, simulate_sums
from tfswap.simulator.sum_samples import FirstTerm

EXACT = 2
"""A sum of this many inputs, or fewer, does not depend on their order."""


@graph_pass(
    requires="the step as it was given: with the readers that TensorFlow's executor sees",
    ensures="each sum of three or more rounded terms adds in the order of the unoptimised step, whatever is planned",
)
def order_sums(graph: Graph, target: Target) -> int:
    """Fix the order in which sums of the given `graph` and of its bodies add, in place; returns how many."""
    parts = {"": graph, **graph.named_bodies()}
    sums = {name: found for name, part in parts.items() if (found := _sums(part))}
    add_by_kernels(graph)
    accumulated = sums_by_kernels(graph)
    by_iteration = target.own_ops and target.device.has_own_kernels
    first, ready = SumOrders({}, {})
    if sums or accumulated:
        first, ready = target.shared.alike.get((order_sums, target), lambda: _orders(graph, target, by_iteration))
    decisions = SharedDecisions(graph)
    for name, found in sums.items():
        for node in found:
            begins = first.get((name, node.name), FirstTerm(IterationTable.of(0), ()))
            if by_iteration:
                table = _read_decisions(parts[name], node, begins, decisions)
                _begin_by_iteration(node, table)
            else:
                _begin_with(node, begins.table.middle)
        fix_order(parts[name], [node for node in found if node.op != SUM], target)
    decisions.arrange()
    for node in accumulated:
        if node.name in ready:  # other sums of this kind are not needed
            in_order = [graph[name] for name in ready[node.name]]
            add_in_order(graph, node, in_order)
    graph.prune()
    return sum(map(len, sums.values())) + len(accumulated)


def fix_order(graph: Graph, sums: Sequence[Node], target: Target) -> None:
    """Have sums of `graph` add their inputs in their order, for any holders, in place."""
    if target.own_ops:
        for node in sums:
            node.attrs = {**node.attrs, KERNEL: OWN_KERNEL.encode()}
    else:
        split_into_pairs(graph, sums)


def fix_iteration(graph: Graph, nodes: Iterable[Node], iteration: int, inside: int = 0) -> None:
    """Have sums among `nodes` of `graph`, and in their bodies, add as in this iteration of the loop around, in place.

    Args:
        inside: how many loops of that loop's body `graph` is in.
    """
    for node in nodes:
        if FIRST in node.attrs:
            shape, values = node.attrs[FIRST_SHAPE], node.attrs[FIRST]
            assert isinstance(shape, tuple) and isinstance(values, tuple)
            begins, loops = IterationTable(shape, values), len(shape) - decisions_of(node)
            node.attrs = {key: value for key, value in node.attrs.items() if key not in (FIRST, FIRST_SHAPE)}
            _begin_by_iteration(node, begins.fixed(loops - 1 - inside, iteration))
        flow = control_flow(node.op)
        if flow is not None:
            for body in graph.bodies.get(node, ()):
                fix_iteration(body, body, iteration, inside + flow.is_loop)


def _read_decisions(graph: Graph, node: Node, begins: FirstTerm, decisions: SharedDecisions) -> IterationTable:
    """Have a sum read the decisions that its first term depends on, in place; returns the table with these."""
    read: list[Output] = []
    table, axis = begins.table, len(begins.table.shape) - len(begins.decisions)
    for decision in () if table.is_uniform else begins.decisions:
        tensor = decisions.at(decision)
        if node in graph.needed([tensor.node]):  # other sums read what decides this one's
            table = table.fixed(axis, 0)
        else:
            read.append(tensor)
            axis += 1
    if read:
        types = tuple(Dtype(tensor.type.dtype) for tensor in read)
        node.attrs = {"N": len(node.inputs), "T": node.attrs["T"], "Tdecisions": types}
        node.op, node.inputs = SUM, (*node.inputs, *read)
    return table


def _begin_by_iteration(node: Node, begins: IterationTable) -> None:
    if begins.is_uniform:
        _begin_with(node, begins.values[0])
    else:
        node.attrs = {**node.attrs, FIRST: begins.values, FIRST_SHAPE: begins.shape}


def _begin_with(node: Node, k: int) -> None:
    if k:
        inputs = list(node.inputs)
        inputs[0], inputs[k] = inputs[k], inputs[0]
        node.inputs = tuple(inputs)


def _sums(graph: Graph) -> list[Node]:
    """The sums whose bits depend on other holders of their inputs."""
    return [n for n in graph if depends_on_owners(n.op) and len(n.inputs) > EXACT and is_rounded(n.outputs[0].dtype)]


def _orders(graph: Graph, target: Target, by_decision: bool) -> SumOrders:
    """The orders in which sums add in the unordered step."""
    device = target.device
    step = graph.copy()
    step.arrange_as_executed()
    step.fetches += map(step.tensor, target.held)
    _hold_copied(step)
    parts = (step, *step.named_bodies().values())
    for part in parts:
        restore_lowered(part)
    twins = merge_as_executed(step)
    for part in parts:
        prune_as_lowered(part)
    additions = {kernel.name: node.name for node, kernels in sums_by_kernels(step).items() for kernel in kernels}
    if not additions and not any(_is_undecided(part, device) for part in parts):
        return SumOrders({}, {})
    found = simulate_sums(step, device, Costs.of(device).seconds, additions, by_decision)
    found.first.update({twin: found.first[first] for twin, first in twins.items() if first in found.first})
    return found


def _hold_copied(step: Graph) -> None:
    """Have `step` hold, as TensorFlow does, what passes between functions by host memory instead, in place: what one
    returns, and what the other is given (runtime/separate_passes.py).
    """
    feeds = set(step.feeds)
    given = {node.out(): node.inputs[0] for node in step if node.op == TO_DEVICE and node.inputs[0].node in feeds}
    for node in step if given else ():
        node.inputs = tuple(given.get(tensor, tensor) for tensor in node.inputs)
    step.fetches += [node.inputs[0] for node in step if node.op == TO_HOST]


def _is_undecided(part: Graph, device: DeviceModel) -> bool:
    """Whether a sum may begin with another input than one of the first two."""
    sums = _sums(part)
    if not sums:
        return False
    alone = solely_owned(part, device)
    return not all(any(map(alone, node.inputs[:EXACT])) for node in sums)
