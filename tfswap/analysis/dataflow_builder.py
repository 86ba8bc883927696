"""Collects the facts of a graph node by node, in topological order (dataflow.py).

Small integers, contents of lists and versions of variables are propagated as far as they are known (node_records.py,
variable_versions.py). They decide sizes of requests and the values that nodes read.

Invariant: a node's facts depend on the nodes before it, and on the requested course.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfswap.analysis.constants import folds, kept_constants
from tfswap.analysis.dataflow import PERSISTENT, SMALL_BYTES, Dataflow, Value
from tfswap.analysis.function_runs import Course, Seconds
from tfswap.analysis.node_records import NodeRecords
from tfswap.analysis.output_bytes import output_bytes, record_bytes
from tfswap.analysis.permits import permits_of_values
from tfswap.analysis.records import Findings, Record
from tfswap.analysis.variable_versions import VariableVersions
from tfswap.ir.custom_ops import READ_HOME, RECEIVE, SEND, TO_DEVICE, TO_HOST
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import reads_variable, runs_python, uses_tensor_list
from tfswap.ir.python_calls import held_until
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.kernel_memory import KernelMemory, node_memory

CROSSING = frozenset({TO_HOST, SEND, RECEIVE})
"""Ops by which a tensor goes to another device. Where they allocate nothing, they are kernels all the same: what they
read is held until they have run, and kernels of both devices wait for them.
"""


class _Facts(NamedTuple):
    """The facts of a node.

    Attributes:
        memory: its kernel's requests.
        record: the record of a loop, a conditional or an op of lists; None for other nodes.
        inputs: the values of its inputs; -1 for none.
        free: whether it is no kernel: a feed, a view, or a constant.
        folded: whether TensorFlow computes it once, before the step.
    """

    memory: KernelMemory
    record: Record | None
    inputs: list[int]
    free: bool
    folded: bool


class Builder:
    """Collects the facts of one course of a step, or a bound for all.

    Attributes:
        flow: the facts.
    """

    def __init__(
        self,
        graph: Graph,
        device: DeviceModel,
        strict: bool,
        lowered: Seconds | None,
        course: Course | None = None,
        before: Builder | None = None,
        *,
        covering: bool = False,
    ):
        """
        Args:
            strict, lowered: as of `analyse_dataflow`.
            course: the decisions of the step. None: facts are upper bounds.
            before: a builder of the same graph for another course, whose caches are used.
            covering: collect facts that cover all courses.
        """
        self.graph = graph
        self.device = device
        self.flow = Dataflow(graph.topological())
        self.flow.place = {node.name: i for i, node in enumerate(self.flow.nodes)}
        self._index = {node: i for i, node in enumerate(self.flow.nodes)}
        self._feeds = set(graph.feeds)
        self._on_host = _copied_from_host(graph)
        self._variables = VariableVersions(graph, self.flow)
        self._records = NodeRecords(
            graph,
            device,
            strict=strict,
            lowered=lowered,
            course=course,
            before=None if before is None else before._records,
            covering=covering,
        )

    @property
    def found(self) -> Findings:
        """Facts about the step's decisions."""
        return self._records.found

    def build(self) -> Dataflow:
        """Collect all facts."""
        flow = self.flow
        for i, node in enumerate(flow.nodes):
            self._node(i, node)
        flow.fetched = frozenset(
            v
            for f in self.graph.fetches
            for v in (flow.value_of.get((f.node, f.index)), *self._kept(f))
            if v is not None
        )
        self._drop_folded_inputs()
        for body in self.graph.all_bodies():
            for node in kept_constants(body):
                flow.add(Value(node.out(), node.outputs[0].nbytes or 0, PERSISTENT))
                flow.constants.add(node)
        self._variables.order_writes_after_reads()
        flow.permits = permits_of_values(self.graph, flow.value_of)
        return flow

    def _node(self, i: int, node: Node) -> None:
        flow = self.flow
        facts = self._facts(node)
        deps = {self._index[source] for source, _ in node.inputs}
        deps.update(self._index[c] for c in node.controls)
        flow.deps.append(tuple(sorted(deps)))
        flow.is_kernel.append(not facts.free)
        if facts.record is not None:
            self._note_record(i, facts.record)
        if not facts.free:
            self._note_bounds(i, node, facts)
        makes = self._outputs(i, node, facts)
        self._keep(i, node, facts, makes)
        flow.makes.append(tuple(makes))
        if facts.free:
            flow.reads.append(())
            flow.forwards.append(())
            flow.events.append(())
            flow.updates.append(())
            return
        self._note_reads(i, node, facts)
        _note_requests(flow, i, facts.memory, facts.inputs, dict(makes))
        flow.updates.append(self._variables.write(node, facts.memory, facts.inputs))

    def _facts(self, node: Node) -> _Facts:
        values = self._records.small_constants(node)
        memory = node_memory(node, self.device, values)
        record = self._records.record(node, self.flow.value_of, self._held_bytes)
        if record is not None:
            used = self._variables.used.get(node)
            memory = memory._replace(
                events=record.events,
                alias=tuple(record.alias.items()),
                forward=memory.forward if uses_tensor_list(node.op) else (),  # zeros and sums of lists are new lists
                updates=() if used is None else used.written,
                exact=record.exact,
            )
        inputs = [self.flow.value_of.get(t, -1) for t in node.inputs]
        if reads_variable(node.op) and not memory.events and inputs and inputs[0] in self._variables.copied_on_read:
            memory = memory._replace(alias=(), events=(("out", 0),))
        folded = node not in self.graph.bodies and folds(node, self.flow.constants)
        free = folded or (record is None and self._is_free(node, memory, inputs))
        return _Facts(memory, record, inputs, free, folded)

    def _is_free(self, node: Node, memory: KernelMemory, inputs: Sequence[int]) -> bool:
        """Whether a node without a record, which is not folded, is no kernel."""
        is_feed = node in self._feeds
        works = memory.events or memory.updates or memory.retains or memory.held_bytes or memory.writes
        if (works or node.op in CROSSING) and not is_feed:
            return False
        if node.controls and any(t.type.dtype != "resource" for t in node.inputs):
            return False  # a view with control inputs holds its buffer until it has run
        shared = {source for _, source in memory.alias}
        return is_feed or not any(self._is_made(v) for p, v in enumerate(inputs) if p not in shared)

    def _is_made(self, v: int) -> bool:
        """Whether a kernel of the step makes a value. Any reader then holds it, as a Reshape its shape."""
        return v >= 0 and self.flow.values[v].producer != PERSISTENT

    def _note_record(self, i: int, record: Record) -> None:
        flow = self.flow
        flow.runs[i] = record.found.runs
        flow.inner_out_bytes += record.out_bytes
        flow.inner_in_bytes += record.in_bytes
        flow.inner_away_bytes += record.away_bytes
        flow.passing_bytes = max(flow.passing_bytes, record.passing_bytes)

    def _note_bounds(self, i: int, node: Node, facts: _Facts) -> None:
        """Record a kernel whose requests are bounds."""
        flow, memory = self.flow, facts.memory
        certain = memory.exact and not runs_python(node.op)
        if certain and not any(t.bound for t in (*node.outputs, *(t.type for t in node.inputs))):
            return
        flow.inexact.append(i)
        if facts.record is None and any(event != "out" for event, _ in memory.events):
            flow.bounded.append(i)
            if memory.usual is not None:
                flow.usual[i] = memory.usual

    def _outputs(self, i: int, node: Node, facts: _Facts) -> list[tuple[int, int]]:
        """Record the values of a node's outputs; returns the new ones, by output."""
        flow, inputs, memory = self.flow, facts.inputs, facts.memory
        makes: list[tuple[int, int]] = []
        aliases = dict(memory.alias)
        twins = {} if facts.record is None else facts.record.twins
        for o, kind in enumerate(node.outputs):
            if o in twins:
                if (node, twins[o]) in flow.value_of:
                    flow.value_of[node, o] = flow.value_of[node, twins[o]]
            elif not facts.folded and o in aliases and inputs[aliases[o]] >= 0:
                viewed = inputs[aliases[o]]
                if kind.dtype != "resource" and node.inputs[aliases[o]].type.dtype == "resource":
                    viewed = self._variables.read(viewed, node.out(o))
                flow.value_of[node, o] = viewed
            elif memory.held_bytes:
                flow.value_of[node, o] = flow.add(Value(node.out(o), memory.held_bytes, PERSISTENT))
                flow.holders.add(node)
            elif facts.folded or (facts.free and not node.inputs):  # a constant, an argument, or a variable's handle
                nbytes = 0 if node in self._on_host else output_bytes(node, o, self.device)
                value = flow.value_of[node, o] = flow.add(Value(node.out(o), nbytes, PERSISTENT))
                if node not in self._feeds:
                    flow.constants.add(node)
                self._variables.add_resource(node, value)
            elif not facts.free:
                fresh = facts.record is None
                nbytes = self._fresh_bytes(node, o) if fresh else record_bytes(node, o, self.device)
                value = flow.value_of[node, o] = flow.add(Value(node.out(o), nbytes, i))
                makes.append((o, value))
        return makes

    def _fresh_bytes(self, node: Node, o: int) -> int:
        """The bytes of an output. One of unknown size is small: it takes a chunk, unless it is known to be empty."""
        unknown = 0 if self._records.integers.get((node, o)) == () else SMALL_BYTES
        return output_bytes(node, o, self.device, unknown)

    def _note_reads(self, i: int, node: Node, facts: _Facts) -> None:
        """Record the values that a kernel reads, with the elements of lists, and the values that it releases."""
        flow = self.flow
        pairs = zip(facts.inputs, node.inputs, strict=True)
        reads = tuple([r for v, t in pairs for r in (v, *self._kept(t)) if r >= 0])
        if node.op == READ_HOME:
            reads += (self._variables.read(facts.inputs[0], node.out()),)
        reads += tuple([v for t in held_until(node) if (v := flow.value_of.get((t.node, t.index), -1)) >= 0])
        consumed = [v for kind, v in facts.memory.events if kind == "release"]
        if consumed:
            left = Counter(reads)
            left.subtract(consumed)
            flow.consumes[i], reads = tuple(consumed), tuple(left.elements())
        flow.reads.append(reads)
        self._variables.note_reads(i, reads)

    def _held_bytes(self, tensor: Output) -> int:
        """The bytes held with a tensor: those of the buffer that it is a view of."""
        v = self.flow.value_of.get(tensor)
        return 0 if v is None else self.flow.values[v].nbytes

    def _kept(self, tensor: Output) -> tuple[int, ...]:
        return self.flow.kept.get(tensor, ())

    def _keep(self, i: int, node: Node, facts: _Facts, makes: list[tuple[int, int]]) -> None:
        """Record the elements of the node's lists: new ones, and its inputs or their elements.

        Args:
            makes: new elements are appended.
        """
        flow, record, known = self.flow, facts.record, self._records.contents
        for o, source in facts.memory.alias:
            tensor = node.inputs[source]
            if kept := self._kept(tensor):
                flow.kept[node, o] = kept
            if (contents := known.get(tensor)) is not None:
                known[node, o] = contents
        if record is None:
            return
        number = dict(makes)
        owner: dict[int, int] = {}  # the first list with the element
        for k, keeps in record.keeps.items():
            for o in keeps.outputs:
                owner.setdefault(o, k)
        for o, nbytes in enumerate(record.part_bytes, len(node.outputs)):
            if node in flow.constants:  # TensorFlow folds lists too, with their elements
                number[o] = flow.add(Value(node.out(owner[o]), nbytes, PERSISTENT))
                continue
            number[o] = flow.add(Value(node.out(owner[o]), nbytes, i))
            makes.append((o, number[o]))
        for o, keeps in record.keeps.items():
            kept = [*(number[p] for p in keeps.outputs), *keeps.values]
            for source in keeps.inputs:
                kept += [*self._kept_input(node, source, facts), *self._kept(node.inputs[source])]
            flow.kept[node, o] = tuple(dict.fromkeys(kept))
        self._records.note_contents(node, record, number)

    def _kept_input(self, node: Node, source: int, facts: _Facts) -> Sequence[int]:
        """The value of an input that is an element of a list of the node. Of a variable: what its bodies have read."""
        value, variables = facts.inputs[source], self._variables
        if value < 0 or node.inputs[source].type.dtype != "resource":
            return [value] if value >= 0 else []
        if node not in variables.used or source in facts.memory.updates or value in variables.copied_on_read:
            return []  # the elements are copies, or versions that the bodies have replaced
        return [variables.read_in_bodies(node, source, value)]

    def _drop_folded_inputs(self) -> None:
        """Set the bytes of constants that only folded nodes read to 0: they are freed before the step."""
        flow = self.flow
        kept = {t.node for node in flow.nodes if node not in flow.constants for t in node.inputs}
        kept.update(f.node for f in self.graph.fetches)
        lists = [
            node.out(o) for node in flow.constants & kept for o, k in enumerate(node.outputs) if k.dtype == "variant"
        ]
        in_lists = {v for made in lists for v in self._kept(made)}
        for node in flow.constants - kept:
            for o in range(len(node.outputs)):
                for v in {flow.value_of[node, o], *self._kept(node.out(o))} - in_lists:
                    flow.values[v] = flow.values[v]._replace(nbytes=0)


def _note_requests(
    flow: Dataflow, i: int, memory: KernelMemory, inputs: Sequence[int], made: Mapping[int, int]
) -> None:
    """Record a kernel's requests.

    Args:
        inputs: the values that it reads; -1 for none.
        made: the values that it makes, by output.
    """

    def known(candidates: Sequence[int]) -> tuple[int, ...]:
        return tuple(inputs[c] for c in candidates if inputs[c] >= 0)

    flow.forwards.append(tuple((made[o], known(candidates)) for o, candidates in memory.forward if o in made))
    flow.events.append(memory.events)
    if memory.process_bytes:
        flow.process_bytes[i] = memory.process_bytes
    if memory.temp_forward:
        flow.temp_forwards[i] = {k: known(candidates) for k, candidates in memory.temp_forward}


def _copied_from_host(graph: Graph) -> set[Node]:
    """The arguments that are in host memory, outside of every arena: those that are only copied from there."""
    copied, read = set[Node](), {tensor.node for tensor in graph.fetches}
    for node in graph:
        (copied if node.op == TO_DEVICE else read).update(tensor.node for tensor in node.inputs)
    return (copied - read).intersection(graph.feeds)
