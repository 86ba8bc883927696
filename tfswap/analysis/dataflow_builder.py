"""Collects the facts of a graph node by node, in topological order (dataflow.py).

The builder knows what small integers, lists and variables hold as far as the graph says it. Sizes of requests,
elements of lists and versions of variables follow from that.

Invariant: a node's facts depend on the nodes before it, and on the course that is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tfswap.analysis.buffers import Contents, Element
from tfswap.analysis.constants import folds, kept_constants
from tfswap.analysis.control_flow import record, record_list
from tfswap.analysis.dataflow import PERSISTENT, SMALL_BYTES, Dataflow, Update, Value, reached, users_of
from tfswap.analysis.function_runs import Bodies, Course, Seconds, deciding
from tfswap.analysis.integer_values import AtMost, Values, known_results
from tfswap.analysis.output_bytes import output_bytes, record_bytes
from tfswap.analysis.permits import permits_of_values
from tfswap.analysis.records import Record
from tfswap.analysis.tensor_lists import uses_lists
from tfswap.analysis.variables import resources_used
from tfswap.ir.custom_ops import ASSIGN_IN_PLACE
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import (
    control_flow,
    reads_variable,
    runs_python,
    turns_off_copy_on_read,
    turns_on_copy_on_read,
    uses_tensor_list,
)
from tfswap.ir.python_calls import held_until
from tfswap.kernels import kernel_memory
from tfswap.kernels.device import DeviceModel


def _note_requests(
    flow: Dataflow, i: int, memory: kernel_memory.KernelMemory, inputs: Sequence[int], made: Mapping[int, int]
) -> None:
    """Notes what a kernel requests of values that it reads (-1 for none) and makes (by output)."""

    def known(candidates: Sequence[int]) -> tuple[int, ...]:
        return tuple(inputs[c] for c in candidates if inputs[c] >= 0)

    flow.forwards.append(tuple((made[o], known(candidates)) for o, candidates in memory.forward if o in made))
    flow.events.append(memory.events)
    if memory.process_bytes:
        flow.process_bytes[i] = memory.process_bytes
    if memory.temp_forward:
        flow.temp_forwards[i] = {k: known(candidates) for k, candidates in memory.temp_forward}


class Builder:
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
        self.graph = graph
        # What is known already, by the builder of the same facts for another course.
        self.before = before
        self.prepared: Bodies = {} if before is None else before.prepared
        self.records: dict[Node, tuple[list[Contents | None], list[Values | None], Record]] = {}
        self.course = course
        self.covering = covering
        self.undetermined: dict[Node, None] = {}
        self.undecided = 0
        self.choices: set[Node] = set()  # conditionals whose branch the step decides
        self.repeated = False
        self.ends_early = self.endless = False
        self.strict = strict
        self.lowered = lowered
        self.feeds = set(graph.feeds)
        self.device = device
        self.flow = Dataflow(graph.topological())
        self.flow.place = {node.name: i for i, node in enumerate(self.flow.nodes)}
        self.index = {node: i for i, node in enumerate(self.flow.nodes)}
        # Variables that are read in part (ResourceGather): from then on every read copies them.
        self.copied_on_read: set[int] = set()
        self.sparsely_read = {
            t.node
            for node in graph
            if turns_on_copy_on_read(node.op)
            for t in node.inputs
            if t.type.dtype == "resource"
        }
        self.used = {node: resources_used(node, bodies) for node, bodies in graph.bodies.items()}
        for node, used in self.used.items():
            self.sparsely_read.update(node.inputs[p].node for p in used.sparsely_read)
        # Where the graph turns that off, it is off at each access to the whole (passes/prepare/copy_on_read.py).
        self.sparsely_read -= {node.inputs[0].node for node in graph if turns_off_copy_on_read(node.op)}
        self.integers: dict[tuple[Node, int], Values] = {(n, 0): v for n, v in graph.small_constants.items()}
        self.contents: dict[tuple[Node, int], Contents] = {}
        self.version: dict[int, int] = {}  # current value of the variable that a resource value stands for
        self.readers: dict[int, list[int]] = {}  # kernels that read a variable's version, by value

    def build(self) -> Dataflow:
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
                self._value(node.out(), node.outputs[0].nbytes or 0, PERSISTENT)
                flow.constants.add(node)
        self._order_writes_after_reads()
        flow.permits = permits_of_values(self.graph, flow.value_of)
        return flow

    def _value(self, output: Output, nbytes: int, producer: int) -> int:
        self.flow.values.append(Value(output, nbytes, producer))
        return len(self.flow.values) - 1

    def _node(self, i: int, node: Node) -> None:
        flow = self.flow
        integers = self.integers
        memory = kernel_memory.kernel_memory(
            node.op,
            node.attrs,
            [source.outputs[o] for source, o in node.inputs],
            node.outputs,
            self.device,
            {p: known for p, t in enumerate(node.inputs) if not isinstance(known := integers.get(t), AtMost | None)},
        )
        record_ = self._record(node)
        if record_ is not None:
            flow.runs[i] = record_.runs
            flow.inner_out_bytes += record_.out_bytes
            flow.inner_in_bytes += record_.in_bytes
            flow.inner_away_bytes += record_.away_bytes
            flow.passing_bytes = max(flow.passing_bytes, record_.passing_bytes)
            memory = memory._replace(
                events=record_.events,
                alias=tuple(record_.alias.items()),
                forward=memory.forward if uses_tensor_list(node.op) else (),  # zeros and sums of lists are new ones
                updates=self.used[node].written if node in self.used else (),
                exact=record_.exact,
            )
        inputs = [flow.value_of.get(t, -1) for t in node.inputs]
        if reads_variable(node.op) and not memory.events and inputs and inputs[0] in self.copied_on_read:
            memory = memory._replace(alias=(), events=(("out", 0),))
        works = memory.events or memory.updates or memory.retains or memory.held_bytes or memory.writes
        works = works or record_ is not None
        free = node in self.feeds or not works
        if free and node.controls and any(t.type.dtype != "resource" for t in node.inputs):
            free = False  # a view that waits for something else holds what it views until then
        if free and node not in self.feeds:
            shared = {source for _, source in memory.alias}
            free = not any(self._is_made(v) for p, v in enumerate(inputs) if p not in shared)
        folded = self._is_folded(node)
        free = free or folded
        deps = {self.index[source] for source, _ in node.inputs}
        deps.update(self.index[c] for c in node.controls)
        flow.deps.append(tuple(sorted(deps)))
        flow.is_kernel.append(not free)
        certain = memory.exact and not runs_python(node.op)
        if not free and (not certain or any(t.bound for t in (*node.outputs, *(t.type for t in node.inputs)))):
            flow.inexact.append(i)
            if record_ is None and any(event != "out" for event, _ in memory.events):
                flow.bounded.append(i)
                if memory.usual is not None:
                    flow.usual[i] = memory.usual
        makes: list[tuple[int, int]] = []
        aliases = dict(memory.alias)
        twins = record_.twins if record_ is not None else {}
        for o, kind in enumerate(node.outputs):
            if o in twins:
                if (node, twins[o]) in flow.value_of:
                    flow.value_of[node, o] = flow.value_of[node, twins[o]]
            elif not folded and o in aliases and inputs[aliases[o]] >= 0:
                viewed = inputs[aliases[o]]
                if kind.dtype != "resource" and node.inputs[aliases[o]].type.dtype == "resource":
                    viewed = self._variable_version(viewed, node.out(o))
                flow.value_of[node, o] = viewed
            elif memory.held_bytes:
                flow.value_of[node, o] = self._value(node.out(o), memory.held_bytes, PERSISTENT)
                flow.holders.add(node)
            elif folded or (free and not node.inputs):  # a constant, an argument, or a variable's handle
                flow.value_of[node, o] = self._value(node.out(o), output_bytes(node, o, self.device), PERSISTENT)
                if node not in self.feeds:
                    flow.constants.add(node)
                if node in self.sparsely_read:
                    self.copied_on_read.add(flow.value_of[node, o])
            elif not free:
                nbytes = self._fresh_bytes(node, o) if record_ is None else record_bytes(node, o, self.device)
                value = self._value(node.out(o), nbytes, i)
                flow.value_of[node, o] = value
                makes.append((o, value))
        self._keep(i, node, record_, aliases, makes)
        flow.makes.append(tuple(makes))
        if free:
            flow.reads.append(())
            flow.forwards.append(())
            flow.events.append(())
            flow.updates.append(())
            return
        reads = tuple([r for v, t in zip(inputs, node.inputs, strict=True) for r in (v, *self._kept(t)) if r >= 0])
        reads += tuple([v for t in held_until(node) if (v := flow.value_of.get((t.node, t.index), -1)) >= 0])
        consumed = [v for kind, v in memory.events if kind == "release"]
        if consumed:
            left = Counter(reads)
            left.subtract(consumed)
            flow.consumes[i], reads = tuple(consumed), tuple(left.elements())
        flow.reads.append(reads)
        for v in reads:
            if v in self.readers:
                self.readers[v].append(i)
        _note_requests(flow, i, memory, inputs, dict(makes))
        flow.updates.append(self._updates(memory, inputs, node))

    def _fresh_bytes(self, node: Node, o: int) -> int:
        """What an output asks for. One of unknown size is small: it takes a chunk, unless it is known to be empty."""
        unknown = 0 if self.integers.get((node, o)) == () else SMALL_BYTES
        return output_bytes(node, o, self.device, unknown)

    def _is_made(self, v: int) -> bool:
        """Whether a value comes from a kernel of the step: whoever reads it holds it until then, such as a reshape its
        shape, or an assertion.
        """
        return v >= 0 and self.flow.values[v].producer != PERSISTENT

    def _record(self, node: Node) -> Record | None:
        """What a loop, a conditional or an op of lists does; None for other nodes. Notes what is known of integers."""
        bodies = self.graph.bodies.get(node)
        if bodies is None and not uses_lists(node):
            results = known_results(node, [self.integers.get(t) for t in node.inputs])
            self.integers.update({(node, o): values for o, values in results.items()})
            return None
        if self.course is not None and self.before is not None and node in self.before.choices:
            # What decides is known from here on: the gradient's conditional reads it too.
            assert bodies is not None
            if isinstance(self.integers.get(node.inputs[0]), AtMost | None):
                self.integers[node.inputs[0]] = deciding(node, self.course.branch(0, len(bodies)))
        known = [self.integers.get(t) for t in node.inputs]
        contents = [self.contents.get(t) for t in node.inputs]
        if bodies is None:
            made = record_list(node, self.device, contents, known, covering=self.covering)
        elif self.before is not None and (kept := self.before.records.get(node)) and kept[:2] == (contents, known):
            made = kept[2]
        else:
            given_up = [self.flow.value_of.get(t) for t in node.inputs] if self.lowered is not None else ()
            made = record(
                node,
                bodies,
                self.device,
                contents,
                known,
                strict=self.strict,
                given_up=given_up,
                lowered=self.lowered,
                course=self.course,
                covering=[self._held_bytes(t) for t in node.inputs] if self.covering else None,
                prepared=self.prepared,
            )
            if made.decided:
                self.records[node] = contents, known, made
            self.undetermined.update(dict.fromkeys(made.undetermined))
            self.undecided = max(self.undecided, made.undecided)
            kind = control_flow(node.op)
            if made.undecided and kind is not None and not kind.is_loop:
                self.choices.add(node)
            self.repeated |= made.repeated
            self.ends_early |= made.ends_early
            self.endless |= made.endless
        self.integers.update({(node, o): v for o, v in made.integers.items()})
        return made

    def _held_bytes(self, tensor: Output) -> int:
        """What is held with a tensor: all of what it is a view of."""
        v = self.flow.value_of.get(tensor)
        return 0 if v is None else self.flow.values[v].nbytes

    def _kept(self, tensor: Output) -> tuple[int, ...]:
        return self.flow.kept.get(tensor, ())

    def _keep(
        self, i: int, node: Node, made: Record | None, aliases: dict[int, int], makes: list[tuple[int, int]]
    ) -> None:
        """Note what lists keep: elements that the node makes, and what its inputs are or keep; and what they are."""
        flow = self.flow
        for o, source in aliases.items():
            tensor = node.inputs[source]
            if kept := self._kept(tensor):
                flow.kept[node, o] = kept
            if (contents := self.contents.get(tensor)) is not None:
                self.contents[node, o] = contents
        if made is None:
            return
        number = dict(makes)
        owner: dict[int, int] = {}  # of several lists that keep it the first
        for k, keeps in made.keeps.items():
            for o in keeps.outputs:
                owner.setdefault(o, k)
        for o, nbytes in enumerate(made.part_bytes, len(node.outputs)):
            if node in flow.constants:  # TensorFlow folds lists too, with all that they keep
                number[o] = self._value(node.out(owner[o]), nbytes, PERSISTENT)
                continue
            number[o] = self._value(node.out(owner[o]), nbytes, i)
            makes.append((o, number[o]))
        for o, keeps in made.keeps.items():
            kept = [*(number[p] for p in keeps.outputs), *keeps.values]
            for source in keeps.inputs:
                tensor = node.inputs[source]
                value = flow.value_of.get((tensor.node, tensor.index))
                kept += [*([] if value is None or tensor.type.dtype == "resource" else [value]), *self._kept(tensor)]
            flow.kept[node, o] = tuple(dict.fromkeys(kept))
        for o, contents in made.contents.items():
            self.contents[node, o] = _numbered(contents, number)

    def _is_folded(self, node: Node) -> bool:
        return node not in self.graph.bodies and folds(node, self.flow.constants)

    def _drop_folded_inputs(self) -> None:
        """Constants that only folded nodes read are gone once those are computed: they take no bytes."""
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

    def _variable_version(self, resource: int, output: Output) -> int:
        """The value that a read of the variable behind `resource` sees now."""
        if resource not in self.version:
            self.version[resource] = self._value(output, output.type.nbytes or 0, PERSISTENT)
            self.readers[self.version[resource]] = []
        return self.version[resource]

    def _updates(self, memory: kernel_memory.KernelMemory, inputs: list[int], node: Node) -> tuple[Update, ...]:
        writes: list[tuple[int, int | None]] = [(inputs[r], None) for r in memory.updates]
        if memory.retains:
            writes.append((inputs[0], inputs[memory.retains[0]]))
        result: list[Update] = []
        for resource, adopted in writes:
            if resource < 0:
                continue
            old = self.version.get(resource)
            if old is None and node in self.used:
                size = self.used[node].nbytes.get(inputs.index(resource), 0)
                old = self.version[resource] = self._value(node.inputs[inputs.index(resource)], size, PERSISTENT)
                self.readers[old] = []
            if old is None:  # written and never read: as large as the largest of what it is updated with
                old = self._variable_version(resource, max(node.inputs, key=lambda t: t.type.nbytes or 0))
            self.flow.written.setdefault(resource, old)
            new = self._value(self.flow.values[old].tensor, self.flow.values[old].nbytes, PERSISTENT)
            self.version[resource] = new
            self.readers[new] = []
            in_place = node.op == ASSIGN_IN_PLACE or turns_on_copy_on_read(node.op)
            copies = resource in self.copied_on_read and not in_place
            result.append(Update(old, new, adopted, copies))
        return tuple(result)

    def _order_writes_after_reads(self) -> None:
        """Let every write wait for the readers of the version that it ends, where that makes no cycle.

        A read still held when its variable is updated would make the update copy the variable.
        """
        flow = self.flow
        flow.own_deps = list(flow.deps)
        users = users_of(flow.deps)
        forward = True  # whether all edges lead to nodes with a higher index, as they do at first
        for i, updates in enumerate(flow.updates):
            extra = {r for u in updates for r in self.readers[u.old] if r != i}
            if not extra:
                continue
            if not forward or max(extra) > i:
                extra -= reached(i, users)
                forward = forward and max(extra, default=i) <= i
            flow.deps[i] = tuple(sorted({*flow.deps[i], *extra}))
            for r in extra:
                users[r].append(i)


def _numbered(contents: Contents, number: Mapping[int, int]) -> Contents:
    """What is known of a list, with the values that a node's outputs are, by `number`."""
    numbered: list[Element | None] = []
    for element in contents:
        if element is not None and element.parts:
            element = element._replace(parts=_numbered(element.parts, number))
        if element is not None and element.output is not None:
            element = element._replace(value=number.get(element.output), output=None)
        numbered.append(element)
    return tuple(numbered)
