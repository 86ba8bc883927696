"""The versions of a step's variables: the one that a read returns, and the new one after a write.

Invariant: every write waits for the readers of the version before it, where that closes no cycle. If a read were still
held, the update would copy the variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tfswap.analysis.dataflow import PERSISTENT, Dataflow, Update, Value, reached, users_of
from tfswap.analysis.variables import resources_used, sparsely_accessed
from tfswap.ir.custom_ops import ASSIGN_IN_PLACE, COMMIT_HOME
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.homes import is_at_home
from tfswap.ir.op_traits import turns_off_copy_on_read, turns_on_copy_on_read
from tfswap.kernels.kernel_memory import KernelMemory


class VariableVersions:
    """The versions of variables. Resources and versions are values of the dataflow, by number.

    Attributes:
        used: for each loop and conditional, its bodies' accesses to variables.
        copied_on_read: resources whose reads are copies.
        at_home: resources of variables at home on the host: their versions take no bytes of the arena.
    """

    def __init__(self, graph: Graph, flow: Dataflow):
        self._flow = flow
        self._version: dict[int, int] = {}  # the current one of each resource
        self._readers: dict[int, list[int]] = {}  # kernels that read a version
        self.used = {node: resources_used(node, bodies) for node, bodies in graph.bodies.items()}
        self.copied_on_read: set[int] = set()
        self.at_home: set[int] = set()
        # After a sparse access (ResourceGather), every read of the variable is a copy.
        sparsely_read = sparsely_accessed(graph, self.used)
        # Where the graph turns this mode off, it is off at each dense access (passes/prepare/copy_on_read.py).
        self._sparsely_read = sparsely_read - {n.inputs[0].node for n in graph if turns_off_copy_on_read(n.op)}

    def add_resource(self, node: Node, resource: int) -> None:
        """Add the resource of `node`."""
        if node in self._sparsely_read:
            self.copied_on_read.add(resource)
        if is_at_home(node):
            self.at_home.add(resource)

    def read(self, resource: int, output: Output) -> int:
        """The current version of a resource, for a read with the result `output`."""
        if resource not in self._version:
            self._begin(resource, output, output.type.nbytes or 0)
        return self._version[resource]

    def read_in_bodies(self, node: Node, position: int, resource: int) -> int:
        """The current version of a resource that the bodies of `node` read, as its input at this position."""
        if resource not in self._version:
            self._begin(resource, node.inputs[position], self.used[node].nbytes.get(position, 0))
        return self._version[resource]

    def note_reads(self, kernel: int, values: Iterable[int]) -> None:
        """Record the values that a kernel reads, among which are versions."""
        for value in values:
            if value in self._readers:
                self._readers[value].append(kernel)

    def write(self, node: Node, memory: KernelMemory, inputs: Sequence[int]) -> tuple[Update, ...]:
        """The updates of a node.

        Args:
            inputs: the values of its inputs; -1 for none.
        """
        writes: list[tuple[int, int | None]] = [(inputs[r], None) for r in memory.updates]
        if memory.retains:
            writes.append((inputs[0], inputs[memory.retains[0]]))
        result: list[Update] = []
        for resource, adopted in writes:
            if resource < 0:
                continue
            if node in self.used:
                self.read_in_bodies(node, inputs.index(resource), resource)
            # A variable that is never read is as large as the largest input of its update.
            old = self.read(resource, max(node.inputs, key=lambda t: t.type.nbytes or 0))
            self._flow.written.setdefault(resource, old)
            new = self._begin(resource, self._flow.values[old].tensor, self._flow.values[old].nbytes)
            in_place = node.op in (ASSIGN_IN_PLACE, COMMIT_HOME) or turns_on_copy_on_read(node.op)
            copies = resource in self.copied_on_read and not in_place
            result.append(Update(old, new, adopted, copies))
        return tuple(result)

    def _begin(self, resource: int, tensor: Output, nbytes: int) -> int:
        """A new version of a resource."""
        there_bytes = 0 if resource in self.at_home else nbytes
        made = self._version[resource] = self._flow.add(Value(tensor, there_bytes, PERSISTENT))
        self._readers[made] = []
        return made

    def order_writes_after_reads(self) -> None:
        """Add the dependencies of the invariant to `deps`. `own_deps` has those of the graph."""
        flow = self._flow
        flow.own_deps = list(flow.deps)
        users = users_of(flow.deps)
        forward = True  # whether all edges lead to nodes with a higher index, as they do at first
        for i, updates in enumerate(flow.updates):
            extra = {r for u in updates for r in self._readers[u.old] if r != i}
            if not extra:
                continue
            if not forward or max(extra) > i:
                extra -= reached(i, users)
                forward = forward and max(extra, default=i) <= i
            flow.deps[i] = tuple(sorted({*flow.deps[i], *extra}))
            for r in extra:
                users[r].append(i)
