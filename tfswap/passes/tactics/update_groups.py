"""Finds updates of variables at home on the host that compute element by element: slices of rows can be computed one
after the other (sliced_updates.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Final, NamedTuple, cast

from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.homes import is_at_home
from tfswap.ir.op_traits import is_elementwise, is_sum, writes_variable
from tfswap.ir.types import ELEMENT_BYTES, TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.products import same_in_rows
from tfswap.kernels.slices import rows_of_packets
from tfswap.kernels.temporaries import known_shape
from tfswap.passes.nodes import followers
from tfswap.passes.tactics.home_values import uses_of
from tfswap.passes.tactics.update_rounds import rounds_of
from tfswap.support.reach import reach

SUM_ROWS: Final = "UnsortedSegmentSum"
"""The op that adds up rows: (rows, their places, the number of places)."""
FILL: Final = "Fill"
"""The op that makes a tensor of one value: (its shape, the value)."""
PRODUCT: Final = "MatMul"
"""The op of the gradient of a dense layer's weights: (the layer's input, the gradient of its output)."""


class Update(NamedTuple):
    """The writes of a variable in one round.

    Attributes:
        first: the number of its writes in earlier rounds.
        commits: the nodes that write it, in order.
        values: what each of them writes.
    """

    handle: Node
    first: int
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


class UpdateGroup(NamedTuple):
    """Updates that share tensors, and are cut into slices together.

    Attributes:
        kernels: the nodes that compute element by element, or make rows, for these updates only.
    """

    updates: list[Update]
    kernels: set[Node]

    @property
    def commits(self) -> set[Node]:
        """The nodes that write the variables."""
        return {commit for update in self.updates for commit in update.commits}

    @property
    def members(self) -> set[Node]:
        """The nodes whose work is done in slices."""
        return self.kernels.union(*(update.nodes for update in self.updates))


def first_rows(kind: TensorType, most_bytes: int) -> range:
    """The first rows of the slices of a tensor."""
    shape = cast("tuple[int, ...]", kind.shape)
    step = rows_of_packets(shape)
    return range(0, shape[0], max(1, most_bytes // (step * prod(shape[1:]) * ELEMENT_BYTES[kind.dtype])) * step)


class UpdateFacts:
    """What can be cut into slices in a graph.

    Each round of updates (update_rounds.py) is cut by itself: other kernels read its new values before the next one.

    Attributes:
        rounds: by handle, the updates of each round whose variables are larger than a slice.
        read_only: handles of variables at home that the step does not write.
        version: by node that reads a variable of `rounds`, the number of writes before it.
    """

    def __init__(self, graph: Graph, most_bytes: int, device: DeviceModel):
        self._nodes = graph.topological()
        self._most_bytes, self._device = most_bytes, device
        self.followers = followers(self._nodes)
        self._kept = {tensor.node for tensor in graph.fetches} | {*graph.targets}
        self.read_only: set[Node] = set()
        self.version: dict[Node, int] = {}
        written: dict[Node, list[Node]] = {}
        for handle, uses in uses_of(graph).items():
            if not is_at_home(handle) or any(use.graph is not graph or use.node in graph.bodies for use in uses):
                continue
            writes = [node for node in self.followers[handle] if writes_variable(node.op)]
            if not writes:
                self.read_only.add(handle)
            elif all(map(_stores_whole, writes)) and _is_cut(writes[-1].inputs[1].type, most_bytes):
                written[handle] = writes
        self.rounds = self._rounds(written)

    def _rounds(self, written: Mapping[Node, Sequence[Node]]) -> list[dict[Node, Update]]:
        """The updates of each round.

        Args:
            written: by handle, the nodes that write the variable, in order.
        """
        round_of = rounds_of(self._nodes, {node for writes in written.values() for node in writes})
        rounds: dict[int, dict[Node, Update]] = {}
        for handle, writes in written.items():
            first = version = 0
            for number, commits in groupby(writes, round_of.__getitem__):
                group = tuple(commits)
                update = Update(handle, first, group, tuple(node.inputs[1] for node in group))
                rounds.setdefault(number, {})[handle] = update
                first += len(group)
            for node in self.followers[handle]:  # in order: accesses wait for writes before them
                version += node in writes
                if node not in writes:
                    self.version[node] = version
        return [rounds[number] for number in sorted(rounds)]

    def is_replaced(self, update: Update, node: Node) -> bool:
        """Whether a node is a copy of what `update` has written."""
        return node.op == custom_ops.READ_HOME and self.version.get(node, 0) > update.first

    def is_in_round(self, update: Update, node: Node) -> bool:
        """Whether a read of the variable gets the value before `update`, or one that this has written."""
        return self.version[node] >= update.first

    def groups(self) -> Iterator[UpdateGroup]:
        """The groups of updates that can be cut into slices, those of earlier rounds first."""
        ends: dict[Node, set[Node]] = {}  # by member of a group that is cut, what ends the group
        for updates in self.rounds:
            for group in self._groups(updates):
                if self._is_independent(group, ends):
                    ends.update(dict.fromkeys(group.members, group.commits))
                    yield group

    def _groups(self, of_round: Mapping[Node, Update]) -> Iterator[UpdateGroup]:
        """The groups of one round's updates whose new values slices compute."""
        kernels, updates = self._in_slices(list(of_round.values()))
        joined = {update: [update] for update in updates}
        owner: dict[Output, Update] = {update.handle.out(): update for update in updates}
        parts: dict[Update, set[Node]] = {}
        for update in updates:
            found = list(reach(update.values, lambda tensor: _read_in_slices(tensor, kernels)))
            parts[update] = {tensor.node for tensor in found} & kernels
            read = [t.node for t in found if t.node.op == custom_ops.READ_HOME]
            handles = (
                node.inputs[0]
                for node in read
                if node.inputs[0] in owner and self.is_in_round(of_round[node.inputs[0].node], node)
            )
            for tensor in (*found, *handles):
                others = joined[owner.setdefault(tensor, update)]
                if others is not joined[update]:
                    others += joined[update]
                    joined.update(dict.fromkeys(joined[update], others))
        for group in {id(group): group for group in joined.values()}.values():
            yield UpdateGroup(group, set[Node]().union(*(parts[update] for update in group)))

    def _in_slices(self, updates: list[Update]) -> tuple[set[Node], list[Update]]:
        """The nodes that compute slices, and those of these updates that do so for all that they write."""
        while True:
            kernels = self._kernels(updates)
            left = [update for update in updates if self._is_computed(update, kernels)]
            if left == updates:
                return kernels, updates
            updates = left

    def _kernels(self, updates: Iterable[Update]) -> set[Node]:
        """The nodes that compute slices: all that follows them computes slices too, or stores them."""
        found: set[Node] = set()
        stored = {node: value for update in updates for node, value in update.nodes.items()}
        for node in reversed(self._nodes):
            after = self.followers[node]
            if node in self._kept or not after:
                continue
            if not (_is_elementwise(node) or _makes_rows(node) or self._is_product(node)):
                continue
            made = node.out()
            if all(
                stored[each] == made if each in stored else each in found and each.outputs[0].shape == made.type.shape
                for each in after
            ):
                found.add(node)
        return found

    def _is_product(self, node: Node) -> bool:
        """Whether a node is a product whose rows have the same bits in slices, and which is larger than its factors:
        all slices read one of these whole.
        """
        attrs, device = node.attrs, self._device
        if node.op != PRODUCT or not attrs.get("transpose_a") or attrs.get("transpose_b"):
            return False
        left, right, made = (known_shape(kind) for kind in (*(t.type for t in node.inputs), node.outputs[0]))
        proven = device.has_own_kernels and not device.onednn and node.outputs[0].dtype == "float32"
        if left is None or right is None or made is None or not proven:
            return False
        (depth, rows), (_, columns) = left, right
        if depth * (rows + columns) >= rows * columns or not _is_cut(node.outputs[0], self._most_bytes):
            return False
        begins = first_rows(node.outputs[0], self._most_bytes)
        return all(same_in_rows(n, rows, columns, depth, device) for n in {begins.step, rows - begins[-1]})

    def _is_computed(self, update: Update, kernels: Collection[Node]) -> bool:
        """Whether slices compute all values that are written, and nothing else reads those between the writes."""
        inner = {*kernels, *update.nodes}
        end = update.first + len(update.commits)
        between = (n for n in self.followers[update.handle] if update.first < self.version.get(n, 0) < end)
        return all(value.node in kernels for value in update.values) and all(
            inner.issuperset(self.followers[node]) for node in between
        )

    def _is_independent(self, group: UpdateGroup, ends: Mapping[Node, Collection[Node]]) -> bool:
        """Whether all slices can come before all that waits for one of the new values, other than these updates.

        Args:
            ends: by member of other groups that are cut, the nodes that come after all of that group's slices.
        """
        members, commits = group.members, group.commits
        replaced = commits.union(
            n for update in group.updates for n in self.followers[update.handle] if self.is_replaced(update, n)
        )

        def after(node: Node) -> list[Node]:
            return [*(n for n in self.followers[node] if n not in members), *ends.get(node, ())]

        later = reach(commits, after)
        return all(node in replaced or members.isdisjoint(self.followers[node]) for node in later)


def _read_in_slices(tensor: Output, kernels: Collection[Node]) -> list[Output]:
    """The tensors whose slices the slices of a tensor are computed from."""
    if tensor.node not in kernels or tensor.node.op in (SUM_ROWS, FILL, PRODUCT):
        return []
    return [t for t in tensor.node.inputs if t.type.shape == tensor.type.shape]


def _stores_whole(node: Node) -> bool:
    """Whether a write of a variable at home stores all of its value."""
    return node.op == custom_ops.COMMIT_HOME and len(node.inputs) == 3


def _is_cut(kind: TensorType, most_bytes: int) -> bool:
    """Whether a variable of this type has several slices."""
    if not kind.shape or None in kind.shape or kind.bound:
        return False
    return (kind.nbytes or 0) > most_bytes and len(first_rows(kind, most_bytes)) > 1


def _is_elementwise(node: Node) -> bool:
    """Whether each element of a node's output is computed from elements of the same place, or of each row's place."""
    adds_pair = is_sum(node.op) and len(node.inputs) == 2  # the order in which it adds does not matter
    if not (is_elementwise(node.op) or adds_pair) or len(node.outputs) != 1 or node.outputs[0].bound:
        return False
    shape = node.outputs[0].shape
    if not shape or None in shape:
        return False
    return all(t.type.shape == shape or _is_same_in_rows(t.type, len(shape)) for t in node.inputs)


def _is_same_in_rows(kind: TensorType, rank: int) -> bool:
    """Whether each row of a tensor of this rank reads the same elements of a tensor."""
    shape = kind.shape
    return shape is not None and (len(shape) < rank or (len(shape) == rank and shape[0] == 1))


def _makes_rows(node: Node) -> bool:
    """Whether a node makes rows alone: of one value, or sums of rows, each at the place that another tensor has."""
    if node.op != SUM_ROWS:
        return node.op == FILL and bool(node.outputs[0].shape) and None not in (node.outputs[0].shape or ())
    rows, places, shape = node.inputs[0].type, node.inputs[1].type, node.outputs[0].shape
    return bool(
        shape and rows.shape and places.shape == rows.shape[:1] and rows.shape[1:] == shape[1:] and None not in shape
    )
