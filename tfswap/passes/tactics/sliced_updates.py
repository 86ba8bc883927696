"""Updates of variables at home on the host in slices of rows.

An optimizer's update of a variable computes element by element from the variable, its slots and its gradient. Here it
is cut into ranges of rows: each slice loads its rows from their homes, computes, and stores the rows of the new values.
So the memory that an update takes does not grow with the variable. Slices come one after the other.

A new value has a home of its own, which all slices fill, and which becomes the variable's after the last one. So other
readers see the old value or the new one, as without slices.

A gradient that adds up rows, as that of an embedding table, is made slice by slice too: each adds up its own rows, in
the same order. So is the product of a dense layer's input and the gradient of its output, where it is larger than
these, and rows of it have the same bits (kernels/products.py). Other gradients stay whole, and slices read their rows
there.

The bits are the same: kernels compute elements of all slices but the last in whole packets (`ELEMENTS`), and those of
the last as the whole kernel does.

Bodies of loops and conditionals access variables in host memory (state_homes.py). Where such an update is cut, the
slices in the body load and store rows as those of the step do.

A step that trains several times has several rounds of updates (update_rounds.py), each in slices of its own.

Not handled: updates of which a part depends on a variable that their round has written by way of other kernels, and
those of variables that inner bodies access too. They stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, cast

from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dims, Dtype, Graph, Node, Output
from tfswap.ir.homes import is_at_home
from tfswap.ir.types import ELEMENT_BYTES, TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_integers, add_scalar, add_slice, restrict_like, without_colocation
from tfswap.passes.prepare.defer_constants import add_defer
from tfswap.passes.tactics.home_values import uses_of
from tfswap.passes.tactics.state_homes import copy_accesses
from tfswap.passes.tactics.update_groups import FILL, PRODUCT, SUM_ROWS, UpdateFacts, UpdateGroup, first_rows

MOST_SLICES: Final = 768
"""The most slices of all updates of a step. Each has some twenty kernels, which are planned one by one."""


@graph_pass(
    requires="variables at home on the host (keep_at_home), and bodies without an order",
    ensures="updates that are larger than a slice, and compute element by element, run in slices",
)
def slice_updates(graph: Graph, target: Target, most_bytes: int) -> int:
    """Cut updates of the graph and its bodies into slices of at most `most_bytes` of a variable, in place; returns how
    many slices there are.

    A slice has at least a few rows, whatever that number is. Raises InvalidModel where there are more than
    `MOST_SLICES`.
    """
    if (count := count_slices(graph, target.device, most_bytes)) > MOST_SLICES:
        raise InvalidModel(
            f"this plan runs the updates of this graph's variables in {count} slices, and plans have at most "
            f"{MOST_SLICES}. Plan again for this graph."
        )
    for body in graph.all_bodies():
        kinds = _kinds_at_home(body)
        cut = {
            update.handle.name for group in _trial(body, target.device, kinds, most_bytes) for update in group.updates
        }
        copy_accesses(body, {handle: kind for handle, kind in kinds.items() if handle.name in cut})
        _slice(body, most_bytes, target, in_body=True)
    _slice(graph, most_bytes, target, in_body=False)
    return count


def _slice(graph: Graph, most_bytes: int, target: Target, *, in_body: bool) -> None:
    """Cut the updates of a graph, without those of its bodies, in place."""
    since, facts = len(graph), UpdateFacts(graph, most_bytes, target.device)
    left_out: dict[Node, Node] = {}  # by write of a value that only slices read: the last write
    groups = [*facts.groups()]
    for group in groups:
        _Slicer(graph, group, facts, in_body=in_body, defers=not target.device.host_is_separate).cut(most_bytes)
        left_out.update({c: update.commits[-1] for update in group.updates for c in update.commits[:-1]})
    if groups:
        graph.bring_forward(since)
        _replace_waits(graph, {node: (last,) for node, last in left_out.items()})
        graph.prune()
        _leave_out_unread(graph)


def count_slices(graph: Graph, device: DeviceModel, most_bytes: int) -> int:
    """The number of slices that `slice_updates` makes; 0 where it changes nothing."""
    groups = [*UpdateFacts(graph, most_bytes, device).groups()]
    for body in graph.all_bodies():
        groups += _trial(body, device, _kinds_at_home(body), most_bytes)
    return sum(len(first_rows(group.updates[0].kind, most_bytes)) for group in groups)


def _kinds_at_home(body: Graph) -> dict[Node, TensorType]:
    """The types of the variables at home on the host that kernels of a body write, by their handles."""
    written = {handle: [use.whole for use in uses if use.whole] for handle, uses in uses_of(body).items()}
    return {handle: kinds[0] for handle, kinds in written.items() if is_at_home(handle) and len(set(kinds)) == 1}


def _trial(body: Graph, device: DeviceModel, kinds: Mapping[Node, TensorType], most_bytes: int) -> list[UpdateGroup]:
    """The groups of updates that can be cut in a copy of a body whose accesses to these variables are copies."""
    if not any((kind.nbytes or 0) > most_bytes for kind in kinds.values()):
        return []
    trial = body.copy()
    copy_accesses(trial, {trial[handle.name]: kind for handle, kind in kinds.items()})
    return [*UpdateFacts(trial, most_bytes, device).groups()]


def slices_of(commit: Node) -> int:
    """The number of slices in which a variable's new value is stored."""
    count, store = 1, commit.inputs[2].node
    while len(store.inputs) > 1:
        count, store = count + 1, store.inputs[1].node
    return count


class _Slicer:
    """Cuts the updates of a group into slices.

    Args:
        facts: those of the graph before any change.
        in_body: a step is planned in several orders, in some of which kernels that read slices of a gradient alone come
            early, so that it can leave. A body has one order and no such choice: all kernels of a slice come after the
            slices before.
        defers: whether slices of one value are kept from TensorFlow, as by passes/prepare/defer_constants.py. It would
            keep each as a constant, all variables' bytes together.
    """

    def __init__(self, graph: Graph, group: UpdateGroup, facts: UpdateFacts, *, in_body: bool, defers: bool):
        self._graph = graph
        self._kernels = group.kernels
        self._members = group.members
        self._updates = {update.handle: update for update in group.updates}
        self._read_only = facts.read_only
        self._facts = facts
        self._in_body = in_body
        self._defers = defers
        self._deferred: dict[Output, Output] = {}  # by value of a whole tensor
        self._reads = {handle: [n for n in facts.followers[handle] if n in facts.version] for handle in self._updates}
        self._kind = group.updates[0].kind
        self._shape = cast("tuple[int, ...]", self._kind.shape)
        self._integers: dict[tuple[int, str, str], Output] = {}
        self._relative: dict[Output, Output] = {}  # by places of rows: the same, less the first row of a slice
        self._made: dict[Output, Output] = {}  # the present slice of each tensor
        self._loads: dict[Node, Node] = {}  # by handle, the latest load of rows
        self._before: list[Node] = []  # what stores the slice before
        self._step = self._begin = self._rows = 0

    def cut(self, most_bytes: int) -> None:
        """Make the slices."""
        begins = first_rows(self._kind, most_bytes)
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

    def _commit(self, handle: Node) -> Node:
        """The last write of a variable."""
        return self._updates[handle].commits[-1]

    def _end(self, handle: Node, value: Output, store: Node, waits: Iterable[Node]) -> None:
        """Have a variable's last write follow the last slice."""
        commit = self._commit(handle)
        commit.inputs = (commit.inputs[0], value, store.out())
        loads = [self._loads[handle]] if handle in self._loads else []  # perhaps for other updates in this slice
        controls = (*self._outer_controls(commit), *self._earlier_reads(handle), *waits, *loads)
        commit.controls = tuple(dict.fromkeys(controls))

    def _earlier_reads(self, handle: Node) -> list[Node]:
        """The reads of the value that is replaced. Kernels that read them came before the write; their slices read the
        variable themselves.
        """
        return [node for node in self._reads[handle] if self._facts.version[node] == self._updates[handle].first]

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
            special = {SUM_ROWS: self._sum, FILL: self._fill, PRODUCT: self._product}
            return special.get(node.op, self._compute)(node)
        rows = {"begin": self._begin, "rows": self._rows}
        kind = TensorType(tensor.type.dtype, (self._rows, *self._shape[1:]))
        handle = node.inputs[0].node if node.op == custom_ops.READ_HOME else None
        update = None if handle is None else self._updates.get(handle)
        if update is not None and self._is_replaced(node):  # what it reads is in this slice too
            return self._slice(update.values[self._facts.version[node] - update.first - 1])
        loads = handle in self._read_only or (update is not None and self._facts.is_in_round(update, node))
        if handle is not None and loads:
            attrs = {**node.attrs, **rows, "shape": Dims(kind.shape or ())}
            controls = (*self._outer_controls(node), *self._before)
            load = self._add(node, node.op, node.inputs, attrs, controls=controls, outputs=(kind,))
            self._loads[handle] = load
            return load.out()
        return self._add(node, custom_ops.ROWS, (tensor,), {"T": Dtype(kind.dtype), **rows}, outputs=(kind,)).out()

    def _compute(self, node: Node) -> Output:
        """A copy of a kernel that computes the present slice."""
        left_out = [t.node for t in node.inputs if self._is_replaced(t.node)]
        controls = [control for each in (node, *left_out) for control in self._outer_controls(each)]
        inputs = [self._slice(tensor) for tensor in node.inputs]
        if self._in_body and all(t not in self._made or self._made[t].node.op == custom_ops.ROWS for t in node.inputs):
            controls += self._before
        kind = TensorType(node.outputs[0].dtype, (self._rows, *self._shape[1:]))
        attrs = without_colocation(node.attrs)
        return self._add(node, node.op, inputs, attrs, controls=controls, outputs=(kind,)).out()

    def _sum(self, node: Node) -> Output:
        """A copy of a sum of rows that makes the present slice. It leaves out rows without a place."""
        values, places, _ = node.inputs
        inputs = (values, self._own_places(places, node.device), self._integer(self._rows, "int32", node.device))
        attrs = {**without_colocation(node.attrs), "Tindices": Dtype("int64"), "Tnumsegments": Dtype("int32")}
        kind = TensorType(node.outputs[0].dtype, (self._rows, *self._shape[1:]))
        controls = (*self._outer_controls(node), *self._before)
        return self._add(node, node.op, inputs, attrs, controls=controls, outputs=(kind,)).out()

    def _product(self, node: Node) -> Output:
        """A copy of a product of which the present slice is some rows: those of some columns of its left factor."""
        left, right = node.inputs
        depth, rows = cast("tuple[int, ...]", left.type.shape)[0], self._rows
        places = (self._integers_of(node, (0, self._begin)), self._integers_of(node, (depth, rows)))
        attrs = {"T": Dtype(left.type.dtype), "Index": Dtype("int32")}
        controls = (*self._outer_controls(node), *self._before)
        read = TensorType(left.type.dtype, (depth, rows))
        columns = self._add(left.node, "Slice", (left, *places), attrs, controls=controls, outputs=(read,))
        kind = TensorType(node.outputs[0].dtype, (rows, *self._shape[1:]))
        attrs = without_colocation(node.attrs)
        return self._add(node, node.op, (columns.out(), right), attrs, controls=controls, outputs=(kind,)).out()

    def _integers_of(self, like: Node, values: tuple[int, ...]) -> Output:
        """A constant vector."""
        name = f"tfswap/{like.name}/{'x'.join(map(str, values))}"
        if name not in self._graph:
            add_integers(self._graph, name, values, like.device)
        return self._graph[name].out()

    def _fill(self, node: Node) -> Output:
        """A copy of a kernel that makes a tensor of one value that makes the present slice."""
        shape = (self._rows, *self._shape[1:])
        kind = TensorType(node.outputs[0].dtype, shape)
        value = node.inputs[1]
        if self._defers and value.node.op != custom_ops.DEFER:
            if value not in self._deferred:
                self._deferred[value] = add_defer(self._graph, value, node.device)
            value = self._deferred[value]
        inputs, controls = (self._integers_of(node, shape), value), (*self._outer_controls(node), *self._before)
        attrs = {**without_colocation(node.attrs), "index_type": Dtype("int32")}
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
        update = self._updates.get(node.inputs[0].node) if node.inputs else None
        return update is not None and self._facts.is_replaced(update, node)

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
        made = add_slice(
            self._graph,
            like,
            op,
            inputs,
            attrs,
            outputs=outputs,
            begin=self._begin,
            controls=controls,
            device=device,
        )
        for index in range(min(len(outputs), len(like.outputs))):
            restrict_like(self._graph, like.out(index), made.out(index))
        return made


def _leave_out_unread(graph: Graph) -> None:
    """Have what waits for copies that nothing reads any more wait for what these wait for, and the step too."""
    while True:
        read = {tensor.node for tensor in graph.fetches} | {tensor.node for node in graph for tensor in node.inputs}
        unread = [node for node in graph if node.op == custom_ops.READ_HOME and node not in read]
        if not unread:
            break
        _replace_waits(graph, {node: node.controls for node in unread})
        graph.prune()  # what only they kept may read others


def _replace_waits(graph: Graph, instead: Mapping[Node, Iterable[Node]]) -> None:
    """Have what waits for some nodes, and the step, wait for others instead, in place."""
    for node in graph:
        if not instead.keys().isdisjoint(node.controls):
            node.controls = tuple(dict.fromkeys(w for c in node.controls for w in instead.get(c, (c,))))
    graph.targets = list(dict.fromkeys(w for t in graph.targets for w in instead.get(t, (t,))))
