"""Updates of variables at home on the host in slices of rows.

An optimizer's update of a variable computes element by element from the variable, its slots and its gradient. Here it
is cut into ranges of rows: each slice loads its rows from their homes, computes, and stores the rows of the new values.
So the memory that an update takes does not grow with the variable. Slices come one after the other.

A new value has a home of its own, which all slices fill, and which becomes the variable's after the last one. So other
readers see the old value or the new one, as without slices.

A gradient that adds up rows, as that of an embedding table, is made slice by slice too: each adds up its own rows, in
the same order. Other gradients stay whole, and slices read their rows there.

The bits are the same: kernels compute elements of all slices but the last in whole packets (`ELEMENTS`), and those of
the last as the whole kernel does.

Not handled: updates in bodies, and those of which a part depends on a variable that they have written by way of other
kernels. They stay whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import gcd, prod
from typing import Final, NamedTuple, cast

from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dims, Dtype, Graph, Node, Output
from tfswap.ir.homes import is_at_home
from tfswap.ir.op_traits import READ_VARIABLE, VARIABLE_SHAPE, is_elementwise
from tfswap.ir.types import ELEMENT_BYTES, TensorType
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_scalar, without_colocation
from tfswap.passes.tactics.home_values import uses_of
from tfswap.support.reach import reach

ELEMENTS: Final = 64
"""A slice has a multiple of this many elements. Kernels compute several elements in one packet, and what is left over
one by one, with other last bits for some functions (Eigen's TensorExecutor.h): a multiple leaves nothing over. It also
aligns slices of each type."""

MOST_SLICES: Final = 768
"""The most slices of all updates of a step. Each has some twenty kernels, which are planned one by one."""
SUM_ROWS: Final = "UnsortedSegmentSum"
"""The op that adds up rows: (rows, their places, the number of places)."""
_READS: Final = frozenset((custom_ops.READ_HOME, READ_VARIABLE, VARIABLE_SHAPE))


class _Update(NamedTuple):
    """All writes of a variable.

    Attributes:
        commits: the nodes that write it, in order.
        values: what each of them writes.
    """

    handle: Node
    commits: tuple[Node, ...]
    values: tuple[Output, ...]

    @property
    def kind(self) -> TensorType:
        """The type of the variable."""
        return self.values[-1].type

    @property
    def nodes(self) -> dict[Node, Output]:
        """The nodes that write new values, and start the copies of these, with these values."""
        writes = zip(self.commits, self.values, strict=True)
        return {node: value for commit, value in writes for node in (commit, commit.inputs[2].node)}


class _Group(NamedTuple):
    """Updates that share tensors, and are cut into slices together.

    Attributes:
        kernels: the nodes that compute element by element, and make rows of gradients, for these updates only.
    """

    updates: list[_Update]
    kernels: set[Node]

    @property
    def members(self) -> set[Node]:
        """The nodes whose work is done in slices."""
        return self.kernels.union(*(update.nodes for update in self.updates))


@graph_pass(
    requires="variables at home on the host (keep_at_home)",
    ensures="updates that are larger than a slice, and compute element by element, run in slices",
)
def slice_updates(graph: Graph, _: Target, most_bytes: int) -> int:
    """Cut updates into slices of at most `most_bytes` of a variable, in place; returns how many slices there are.

    A slice has at least a few rows, whatever that number is. Raises InvalidModel where there are more than
    `MOST_SLICES`.
    """
    since, count = len(graph), 0
    if (wanted := count_slices(graph, most_bytes)) > MOST_SLICES:
        raise InvalidModel(
            f"this plan runs the updates of this graph's variables in {wanted} slices, and plans have at most "
            f"{MOST_SLICES}. Plan again for this graph."
        )
    facts = _Facts(graph, most_bytes)
    left_out: dict[Node, Node] = {}  # by write of a value that only slices read: the last write
    for group in facts.groups():
        count += _Slicer(graph, group, facts).cut(most_bytes)
        left_out.update({c: update.commits[-1] for update in group.updates for c in update.commits[:-1]})
    if count:
        graph.bring_forward(since)
        _replace_waits(graph, {node: (last,) for node, last in left_out.items()})
        graph.prune()
        _leave_out_unread(graph)
        graph.prune()
    return count


def count_slices(graph: Graph, most_bytes: int) -> int:
    """The number of slices that `slice_updates` makes; 0 where it changes nothing."""
    facts = _Facts(graph, most_bytes)
    return sum(len(_begins(group.updates[0].kind, most_bytes)) for group in facts.groups())


def slices_of(commit: Node) -> int:
    """The number of slices in which a variable's new value is stored."""
    count, store = 1, commit.inputs[2].node
    while len(store.inputs) > 1:
        count, store = count + 1, store.inputs[1].node
    return count


def _begins(kind: TensorType, most_bytes: int) -> range:
    """The first rows of the slices of a tensor."""
    rows, *inner = cast("tuple[int, ...]", kind.shape)
    elements = prod(inner)
    step = ELEMENTS // gcd(ELEMENTS, elements)
    return range(0, rows, max(1, most_bytes // (step * elements * ELEMENT_BYTES[kind.dtype])) * step)


class _Facts:
    """What can be cut into slices in a graph.

    Attributes:
        updates: by handle, the writes of variables that are larger than a slice.
        read_only: handles of variables at home that the step does not write.
        version: by node that reads a variable of `updates`, the number of writes before it.
    """

    def __init__(self, graph: Graph, most_bytes: int):
        self._nodes = graph.topological()
        self.followers: dict[Node, list[Node]] = {node: [] for node in self._nodes}
        for node in self._nodes:
            for source in {*(tensor.node for tensor in node.inputs), *node.controls}:
                self.followers[source].append(node)
        self._kept = {tensor.node for tensor in graph.fetches} | {*graph.targets}
        self.updates: dict[Node, _Update] = {}
        self.read_only: set[Node] = set()
        self.version: dict[Node, int] = {}
        for handle, uses in uses_of(graph).items():
            if not is_at_home(handle) or any(use.graph is not graph for use in uses):
                continue
            writes = tuple(node for node in self.followers[handle] if node.op not in _READS)
            if not writes:
                self.read_only.add(handle)
            elif all(node.op == custom_ops.COMMIT_HOME and len(node.inputs) == 3 for node in writes):
                update = _Update(handle, writes, tuple(node.inputs[1] for node in writes))
                if _is_cut(update.kind, most_bytes):
                    self._add(update)

    def _add(self, update: _Update) -> None:
        self.updates[update.handle] = update
        version = 0
        for node in self.followers[update.handle]:  # in order: accesses wait for writes before them
            version += node in update.commits
            if node.op in _READS:
                self.version[node] = version

    def groups(self) -> Iterator[_Group]:
        """The groups of updates that can be cut into slices."""
        kernels, updates = self._in_slices()
        joined = {update: [update] for update in updates}
        owner: dict[Output, _Update] = {update.handle.out(): update for update in updates}
        parts: dict[_Update, set[Node]] = {}
        for update in updates:
            found = list(reach(update.values, lambda tensor: _read_in_slices(tensor, kernels)))
            parts[update] = {tensor.node for tensor in found} & kernels
            read = [t.node.inputs[0] for t in found if t.node.op == custom_ops.READ_HOME]
            for tensor in (*found, *(handle for handle in read if handle in owner)):
                others = joined[owner.setdefault(tensor, update)]
                if others is not joined[update]:
                    others += joined[update]
                    joined.update(dict.fromkeys(joined[update], others))
        for group in {id(group): group for group in joined.values()}.values():
            made = _Group(group, set[Node]().union(*(parts[update] for update in group)))
            if self._is_independent(made):
                yield made

    def _in_slices(self) -> tuple[set[Node], list[_Update]]:
        """The nodes that compute slices, and the updates that do so for all that they write."""
        updates = list(self.updates.values())
        while True:
            kernels = self._kernels(updates)
            left = [update for update in updates if self._is_computed(update, kernels)]
            if left == updates:
                return kernels, updates
            updates = left

    def _kernels(self, updates: Iterable[_Update]) -> set[Node]:
        """The nodes that compute slices: all that follows them computes slices too, or stores them."""
        found: set[Node] = set()
        stored = {node: value for update in updates for node, value in update.nodes.items()}
        for node in reversed(self._nodes):
            after = self.followers[node]
            if node in self._kept or not after or not (_is_elementwise(node) or is_sum_of_rows(node)):
                continue
            made = node.out()
            if all(
                stored[each] == made if each in stored else each in found and each.outputs[0].shape == made.type.shape
                for each in after
            ):
                found.add(node)
        return found

    def _is_computed(self, update: _Update, kernels: Collection[Node]) -> bool:
        """Whether slices compute all values that are written, and nothing else reads those between the writes."""
        inner = {*kernels, *update.nodes}
        between = (n for n in self.followers[update.handle] if 0 < self.version.get(n, 0) < len(update.commits))
        return all(value.node in kernels for value in update.values) and all(
            inner.issuperset(self.followers[node]) for node in between
        )

    def _is_independent(self, group: _Group) -> bool:
        """Whether all slices can come before all that waits for one of the new values, other than these updates."""
        members = group.members
        commits = {commit for update in group.updates for commit in update.commits}
        handles = (update.handle for update in group.updates)
        replaced = commits.union(n for handle in handles for n in self.followers[handle] if self.version.get(n))
        later = reach(commits, lambda node: [n for n in self.followers[node] if n not in members])
        return all(node in replaced or members.isdisjoint(self.followers[node]) for node in later)


def _read_in_slices(tensor: Output, kernels: Collection[Node]) -> list[Output]:
    """The tensors whose slices the slices of a tensor are computed from."""
    if tensor.node not in kernels or tensor.node.op == SUM_ROWS:
        return []
    return [t for t in tensor.node.inputs if t.type.shape == tensor.type.shape]


def _is_cut(kind: TensorType, most_bytes: int) -> bool:
    """Whether a variable of this type has several slices."""
    if not kind.shape or None in kind.shape or kind.bound:
        return False
    return (kind.nbytes or 0) > most_bytes and len(_begins(kind, most_bytes)) > 1


def _is_elementwise(node: Node) -> bool:
    """Whether each element of a node's output is computed from elements of the same place, or of each row's place."""
    if not is_elementwise(node.op) or len(node.outputs) != 1 or node.outputs[0].bound:
        return False
    shape = node.outputs[0].shape
    if not shape or None in shape:
        return False
    return all(t.type.shape == shape or _is_same_in_rows(t.type, len(shape)) for t in node.inputs)


def _is_same_in_rows(kind: TensorType, rank: int) -> bool:
    """Whether each row of a tensor of this rank reads the same elements of a tensor."""
    shape = kind.shape
    return shape is not None and (len(shape) < rank or (len(shape) == rank and shape[0] == 1))


def is_sum_of_rows(node: Node) -> bool:
    """Whether a node adds up rows, each at the place that another tensor has for it."""
    if node.op != SUM_ROWS:
        return False
    rows, places, shape = node.inputs[0].type, node.inputs[1].type, node.outputs[0].shape
    return bool(
        shape and rows.shape and places.shape == rows.shape[:1] and rows.shape[1:] == shape[1:] and None not in shape
    )


class _Slicer:
    """Cuts the updates of a group into slices.

    Args:
        facts: those of the graph before any change.
    """

    def __init__(self, graph: Graph, group: _Group, facts: _Facts):
        self._graph = graph
        self._kernels = group.kernels
        self._members = group.members
        self._updates = {update.handle: update for update in group.updates}
        self._read_only = facts.read_only
        self._version = facts.version
        self._reads = {handle: [n for n in facts.followers[handle] if n in facts.version] for handle in self._updates}
        self._kind = group.updates[0].kind
        self._shape = cast("tuple[int, ...]", self._kind.shape)
        self._integers: dict[tuple[int, str, str], Output] = {}
        self._relative: dict[Output, Output] = {}  # by places of rows: the same, less the first row of a slice
        self._made: dict[Output, Output] = {}  # the present slice of each tensor
        self._before: list[Node] = []  # what stores the slice before
        self._step = self._begin = self._rows = 0

    def cut(self, most_bytes: int) -> int:
        """Make the slices; returns how many."""
        begins = _begins(self._kind, most_bytes)
        self._step = begins.step
        stores: dict[Node, Node] = {}
        waits: dict[Node, list[Node]] = {handle: [] for handle in self._updates}
        for self._begin in begins:
            self._rows, self._made = min(begins.step, self._shape[0] - self._begin), {}
            values = {handle: self._slice(update.values[-1]) for handle, update in self._updates.items()}
            stores = {h: self._store(self._commit(h).inputs[2].node, v, stores.get(h)) for h, v in values.items()}
            self._before = list(stores.values())
            for handle, value in values.items():
                if self._begin != begins[-1]:
                    inputs, attrs = (value, stores[handle].out()), {"T": Dtype(value.type.dtype)}
                    kind = custom_ops.AWAIT_STORE
                    waits[handle].append(self._add(self._commit(handle), kind, inputs, attrs, outputs=()))
                else:
                    self._end(handle, value, stores[handle], waits[handle])
        return len(begins)

    def _commit(self, handle: Node) -> Node:
        """The last write of a variable."""
        return self._updates[handle].commits[-1]

    def _end(self, handle: Node, value: Output, store: Node, waits: Iterable[Node]) -> None:
        """Have a variable's last write follow the last slice."""
        commit = self._commit(handle)
        commit.inputs = (commit.inputs[0], value, store.out())
        # Other updates in this slice may read the variable.
        controls = (*self._outer_controls(commit), *self._earlier_reads(handle), *waits, *self._before)
        commit.controls = tuple(dict.fromkeys(c for c in controls if c is not store))

    def _earlier_reads(self, handle: Node) -> list[Node]:
        """The reads of a variable before it is written. Kernels that read them came before the write; their slices read
        the variable themselves.
        """
        return [node for node in self._reads[handle] if not self._version[node]]

    def _slice(self, tensor: Output) -> Output:
        """The present slice of a tensor; the tensor where each row reads all of it."""
        if tensor.type.shape != self._shape:
            return tensor
        if tensor not in self._made:
            self._made[tensor] = self._make(tensor)
        return self._made[tensor]

    def _make(self, tensor: Output) -> Output:
        node = tensor.node
        if node in self._kernels:
            return self._sum(node) if node.op == SUM_ROWS else self._compute(node)
        rows = {"begin": self._begin, "rows": self._rows}
        kind = TensorType(tensor.type.dtype, (self._rows, *self._shape[1:]))
        handle = node.inputs[0].node if node.op == custom_ops.READ_HOME else None
        if handle in self._updates and self._version[node]:
            return self._slice(self._updates[handle].values[self._version[node] - 1])  # which has just been computed
        if handle in self._updates or handle in self._read_only:
            attrs = {**node.attrs, **rows, "shape": Dims(kind.shape or ())}
            controls = (*self._outer_controls(node), *self._before)
            return self._add(node, node.op, node.inputs, attrs, controls=controls, outputs=(kind,)).out()
        return self._add(node, custom_ops.ROWS, (tensor,), {"T": Dtype(kind.dtype), **rows}, outputs=(kind,)).out()

    def _compute(self, node: Node) -> Output:
        """A copy of a kernel that computes the present slice."""
        left_out = [t.node for t in node.inputs if self._is_replaced(t.node)]
        controls = [control for each in (node, *left_out) for control in self._outer_controls(each)]
        kind = TensorType(node.outputs[0].dtype, (self._rows, *self._shape[1:]))
        attrs = without_colocation(node.attrs)
        return self._add(node, node.op, map(self._slice, node.inputs), attrs, controls=controls, outputs=(kind,)).out()

    def _sum(self, node: Node) -> Output:
        """A copy of a sum of rows that makes the present slice. It leaves out rows without a place."""
        values, places, _ = node.inputs
        inputs = (values, self._own_places(places, node.device), self._integer(self._rows, "int32", node.device))
        attrs = {**without_colocation(node.attrs), "Tindices": Dtype("int64"), "Tnumsegments": Dtype("int32")}
        kind = TensorType(node.outputs[0].dtype, (self._rows, *self._shape[1:]))
        controls = (*self._outer_controls(node), *self._before)
        return self._add(node, node.op, inputs, attrs, controls=controls, outputs=(kind,)).out()

    def _own_places(self, places: Output, device: str) -> Output:
        """The places of rows in the present slice; -1 for rows of other slices."""
        if places not in self._made:
            wide = TensorType("int64", places.type.shape)
            before, like = self._relative.get(places), places.node
            if before is not None:
                first = (before, self._integer(self._step, "int64", device))
                relative = self._add(like, "Sub", first, {"T": Dtype("int64")}, outputs=(wide,), device=device).out()
            elif places.type.dtype == "int64":
                relative = places
            else:
                attrs = {"SrcT": Dtype(places.type.dtype), "DstT": Dtype("int64"), "Truncate": False}
                relative = self._add(like, "Cast", (places,), attrs, outputs=(wide,), device=device).out()
            self._relative[places] = relative
            end = self._integer(self._rows, "int64", device)
            kind = TensorType("bool", wide.shape)
            within = self._add(like, "Less", (relative, end), {"T": Dtype("int64")}, outputs=(kind,), device=device)
            chosen = (within.out(), relative, self._integer(-1, "int64", device))
            own = self._add(like, "SelectV2", chosen, {"T": Dtype("int64")}, outputs=(wide,), device=device)
            self._made[places] = own.out()
        return self._made[places]

    def _store(self, whole: Node, value: Output, before: Node | None) -> Node:
        """A node that starts the copy of a slice to the home of the new value.

        Args:
            whole: the node that does that for the whole value.
            before: the node that does it for the slice before.
        """
        earlier = () if before is None else (before.out(),)
        attrs = {**whole.attrs, "N": len(earlier), "begin": self._begin, "rows": self._shape[0]}
        others = [store for store in self._before if store is not before]
        return self._add(whole, whole.op, (value, *earlier), attrs, controls=others, outputs=whole.outputs)

    def _integer(self, value: int, dtype: str, device: str) -> Output:
        """A constant."""
        key = value, dtype, device
        if key not in self._integers:
            name = f"tfswap/{next(iter(self._updates)).name}/{value}"
            content = value.to_bytes(ELEMENT_BYTES[dtype], "little", signed=True)
            made = add_scalar(self._graph, name, dtype, device, content)
            self._graph.small_constants[made] = (value,)
            self._integers[key] = made.out()
        return self._integers[key]

    def _outer_controls(self, node: Node) -> list[Node]:
        """What a node waits for that is neither done in slices nor a read of what slices write."""
        return [c for c in node.controls if c not in self._members and not self._is_replaced(c)]

    def _is_replaced(self, node: Node) -> bool:
        """Whether a node reads a value that slices have just computed."""
        return bool(self._version.get(node)) and node.inputs[0].node in self._updates

    def _add(
        self,
        like: Node,
        op: str,
        inputs: Iterable[Output],
        attrs: Mapping[str, object],
        *,
        outputs: Sequence[TensorType],
        controls: Iterable[Node] = (),
        device: str = "",
    ) -> Node:
        """Add a node of the present slice, named after the node that it is like."""
        name = self._graph.unique_name(
            f"tfswap/{like.name.removeprefix('tfswap/')}/{op.rpartition('>')[2]}/{self._begin}"
        )
        made = self._graph.add(
            op,
            name,
            inputs,
            controls=dict.fromkeys(controls),
            attrs=attrs,
            outputs=outputs,
            device=device or like.device,
        )
        for index in range(min(len(outputs), len(like.outputs))):
            if (permit := self._graph.permits.get(like.out(index))) is not None:
                self._graph.restrict(made.out(index), permit)
        return made


def _leave_out_unread(graph: Graph) -> None:
    """Have what waits for copies that nothing reads any more wait for what these wait for, and the step too."""
    read = {tensor.node for tensor in graph.fetches} | {tensor.node for node in graph for tensor in node.inputs}
    unread = {node for node in graph if node.op == custom_ops.READ_HOME and node not in read}
    _replace_waits(graph, {node: node.controls for node in unread})


def _replace_waits(graph: Graph, instead: Mapping[Node, Iterable[Node]]) -> None:
    """Have what waits for some nodes, and the step, wait for others instead, in place."""
    for node in graph:
        if not instead.keys().isdisjoint(node.controls):
            node.controls = tuple(dict.fromkeys(w for c in node.controls for w in instead.get(c, (c,))))
    graph.targets = list(dict.fromkeys(w for t in graph.targets for w in instead.get(t, (t,))))
