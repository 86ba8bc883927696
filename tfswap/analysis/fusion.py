"""Finds blocks of kernels that XLA can compile into one: chains of element-wise ops, broadcasts and reductions.

A block is convex: no path leaves it and comes back. Each node has a level, which grows where a path enters a block and
where it leaves one. The connected kernels of a level that XLA knows are a block. So all blocks together can be replaced
by one node each, and the graph has no cycle.

A block may recompute what it reads of an earlier block: a minimum cut through the earlier block decides which of its
tensors are kept for later ones (as in PyTorch's min-cut partitioner). So a backward block of GELU reads GELU's input,
and nothing that lies between. It does so where that is predicted to take no longer than to keep what it reads.

A block stays where its predicted time is below that of TensorFlow's kernels. Where memory is scarce bytes have a price,
in seconds: then a block also stays for the bytes that it does not keep.

Not handled: kernels with other types than float32, sizes that are not known, bodies of loops and conditionals, kernels
with effects, scalars. They are in no block.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tfswap.analysis.block_time import block_seconds, in_place_seconds
from tfswap.analysis.cost import Costs
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import is_const, is_feed, is_pure, is_view, reads_variable
from tfswap.kernels.fused import FUSABLE, REDUCTIONS, composed_of
from tfswap.support.reach import reach

LONGEST_ROW = 16_384
"""The most elements that a reduction adds up: of larger images TensorFlow's kernels add faster."""
LARGE_BYTES = 1 << 14
"""Kernels of a level that read the same tensor of at least this size are one block."""
SMALL_CONSTANT = 64
"""Constants with up to this number of elements are part of a block."""
MOST_NODES = 50_000
"""Larger steps have no blocks: finding them takes long."""
UNBOUNDED = 1 << 60


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        members: the nodes that it replaces, in topological order.
        nodes: those that it computes: members, recomputed nodes of earlier blocks, and constants; in topological order.
        inputs: the tensors that it reads.
        outputs: the members' tensors that others read; none where later blocks recompute all of it.
        seconds: its predicted time, with the launch.
        unfused_s: that of TensorFlow's kernels for its members.
    """

    members: tuple[Node, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[Output, ...]
    outputs: tuple[Output, ...]
    seconds: float
    unfused_s: float

    @property
    def gain_s(self) -> float:
        """The seconds of a step that it is predicted to save; negative where it loses time."""
        return self.unfused_s - self.seconds

    @property
    def most_bytes(self) -> int:
        """What it holds at most while it runs: what it reads and makes, and what several of its nodes read."""
        uses = Counter(t for node in self.nodes for t in {*node.inputs})
        made = {node.out() for node in self.nodes if not (is_view(node.op) or is_const(node.op))}
        shared = {t for t in made if uses[t] > 1 or t.node.op in REDUCTIONS}
        return _nbytes({*self.inputs, *self.outputs, *shared})

    @property
    def freed_bytes(self) -> int:
        """The bytes of its members' tensors that are in no memory of the step."""
        return _nbytes({node.out() for node in self.members if not is_view(node.op)} - {*self.outputs})


def find_blocks(
    graph: Graph,
    costs: Costs,
    keeps: Callable[[str], bool] = lambda _: False,
    price_s: float = 0.0,
    room_bytes: float = math.inf,
) -> list[Block]:
    """The blocks that gain something, in an order in which each reads from earlier ones only.

    Args:
        keeps: whether the node of this name must stay in the graph.
        price_s: the seconds that are worth one byte less.
        room_bytes: the most that a block may hold.
    """

    def is_worth(block: Block) -> bool:
        return block.gain_s + price_s * block.freed_bytes > 0 and block.most_bytes <= room_bytes

    blocks = candidate_blocks(graph, costs, keeps, price_s)
    while True:
        worth = [block for block in blocks if is_worth(block)]
        if len(worth) == len(blocks):
            return blocks
        # What left-out kernels read is kept: cut again.
        blocks = _Cutter(graph, [block.members for block in worth], costs, price_s).blocks()


def candidate_blocks(
    graph: Graph, costs: Costs, keeps: Callable[[str], bool] = lambda _: False, price_s: float = 0.0
) -> list[Block]:
    """All blocks that a step may have, whatever they gain. Arguments as of `find_blocks`."""
    if len(graph) > MOST_NODES:
        return []
    return _Cutter(graph, _groups(graph, graph.topological(), keeps), costs, price_s).blocks()


def _nbytes(tensors: Iterable[Output]) -> int:
    return sum(tensor.type.nbytes or 0 for tensor in tensors)


def _groups(graph: Graph, order: Iterable[Node], keeps: Callable[[str], bool]) -> list[tuple[Node, ...]]:
    """The connected fusable nodes of each level, by level, with at least two kernels."""
    from networkx.utils import UnionFind

    levels: dict[Node, int] = {}
    fusable: dict[Node, None] = {}
    pinned = {tensor.node for tensor in graph.permits} | {fetch.node for fetch in graph.fetches} | set(graph.targets)
    joined: UnionFind[Node] = UnionFind()
    readers: dict[tuple[Output, int], Node] = {}  # by what is read and the level: a fusable node of a block
    for node in order:
        fuses = node not in pinned and not keeps(node.name) and _is_fusable(node)
        sources = _sources(node) if fuses else {*(tensor.node for tensor in node.inputs), *node.controls}
        level = max((levels[s] + (fuses != (s in fusable) and not is_const(s.op)) for s in sources), default=0)
        levels[node] = level
        if not fuses:
            continue
        fusable[node] = None
        joined.union(node, *(source for source in sources if source in fusable and levels[source] == level))
        for tensor in node.inputs:
            if (tensor.type.nbytes or 0) >= LARGE_BYTES:  # one block reads it once
                joined.union(node, readers.setdefault((tensor, level), node))
    members: dict[Node, list[Node]] = {}
    for node in fusable:
        members.setdefault(joined[node], []).append(node)
    found = [tuple(group) for group in members.values() if sum(not is_view(node.op) for node in group) > 1]
    return sorted(found, key=lambda group: levels[group[0]])


def _sources(node: Node) -> set[Node]:
    """What a kernel of a block waits for. A small constant is part of the block, and what it waits for is not."""
    found = {*(tensor.node for tensor in node.inputs), *node.controls}
    return {source for each in found for source in (each.controls if _is_small_constant(each) else (each,))}


def _is_fusable(node: Node) -> bool:
    if node.op not in FUSABLE or len(node.outputs) != 1 or any(map(_has_effects, _awaited(node))):
        return False
    if any(op not in FUSABLE for op in composed_of(node)):
        return False
    made = node.outputs[0]
    if made.dtype not in ("float32", "bool") or made.bound or not made.shape or made.nbytes is None:
        return False
    for tensor in node.inputs:
        kind = tensor.type
        if kind.dtype not in ("float32", "bool") and not _is_small_constant(tensor.node):
            return False
        if kind.nbytes is None or kind.bound:
            return False
    if node.op in REDUCTIONS:
        return _reduced(node) <= LONGEST_ROW
    return True


def _awaited(node: Node) -> Iterator[Node]:
    """What a kernel of a block waits for by control edges, its small constants' included."""
    yield from node.controls
    for tensor in node.inputs:
        if _is_small_constant(tensor.node):
            yield from tensor.node.controls


def _has_effects(node: Node) -> bool:
    """Whether a kernel that waits for this node may have another value without that."""
    return not (is_pure(node.op) or is_const(node.op) or is_feed(node.op) or reads_variable(node.op))


def _reduced(node: Node) -> int:
    """How many elements one of a reduction's results adds up."""
    return (node.inputs[0].type.num_elements or 0) // max(1, node.outputs[0].num_elements or 1)


def _is_small_constant(node: Node) -> bool:
    return is_const(node.op) and "value" in node.attrs and (node.outputs[0].num_elements or 1) <= SMALL_CONSTANT


class _Cutter:
    """Decides what each block recomputes, and what it reads and makes.

    Args:
        groups: the members of each block, so that later ones read from earlier ones only.
        price_s: as of `find_blocks`.
    """

    def __init__(self, graph: Graph, groups: list[tuple[Node, ...]], costs: Costs, price_s: float):
        self._groups, self._costs, self._price_s = groups, costs, price_s
        self._axes = graph.small_constants
        self._group_of = {node: k for k, group in enumerate(groups) for node in group}
        self._place = {node: place for place, node in enumerate(graph.topological())}
        self._again: list[set[Node]] = [set() for _ in groups]
        self._read: list[set[Output]] = [set() for _ in groups]
        self._blocks_reading: dict[Output, set[int]] = {}
        self._read_outside: set[Output] = set(graph.fetches)
        self._uses = Counter(tensor for node in graph for tensor in {*node.inputs})
        for node in graph:
            if node not in self._group_of:
                self._read_outside.update(node.inputs)
        for k, group in enumerate(groups):
            self._set_read(k, {t for node in group for t in node.inputs if self._group_of.get(t.node) != k})

    def blocks(self) -> list[Block]:
        for k in reversed(range(len(self._groups))):
            self._cut(k)
        return [self._block(k) for k in range(len(self._groups))]

    def _set_read(self, k: int, tensors: set[Output]) -> None:
        for tensor in self._read[k] - tensors:
            self._blocks_reading[tensor].discard(k)
        for tensor in tensors - self._read[k]:
            self._blocks_reading.setdefault(tensor, set()).add(k)
        self._read[k] = tensors

    def _cut(self, k: int) -> None:
        """Replace what later blocks read of block k by what they compute it from, where that is worth it."""
        later: dict[int, set[Output]] = {}
        for node in self._groups[k]:
            for j in self._blocks_reading.get(node.out(), ()):
                later.setdefault(j, set()).add(node.out())
        wanted = {t for tensors in later.values() for t in tensors} - self._read_outside
        if not wanted:
            return
        before = {j: (self._read[j], self._again[j]) for j in later}
        kept_s = self._seconds(k, later)
        cut = self._least_cut(k, wanted, {t for j in later for t in self._read[j]})
        for j, tensors in later.items():
            self._recompute(j, k, tensors, cut)
        if self._seconds(k, later) > kept_s:
            for j, (read, again) in before.items():
                self._set_read(j, read)
                self._again[j] = again

    def _seconds(self, k: int, later: Iterable[int]) -> float:
        """The seconds of block k and of these later ones, and the price of what block k keeps for them."""
        own = self._block(k)
        return own.seconds + sum(self._block(j).seconds for j in later) + self._price_s * _nbytes(own.outputs)

    def _recompute(self, j: int, k: int, tensors: set[Output], cut: set[Output]) -> None:
        """Have block j read these tensors of block k no more, but compute them from the cut."""
        read, again = self._read[j] - tensors, set(self._again[j])
        waiting, seen = list(tensors), set[Output]()
        while waiting:
            tensor = waiting.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            if tensor in cut or tensor in self._read_outside or self._group_of.get(tensor.node) != k:
                read.add(tensor)
            else:
                again.add(tensor.node)
                waiting += tensor.node.inputs
        self._set_read(j, read)
        self._again[j] = again

    def _least_cut(self, k: int, wanted: Collection[Output], read: Collection[Output]) -> set[Output]:
        """The tensors of block k, and its inputs, of the fewest bytes from which the wanted ones can be computed. Of
        several such sets the one nearest to the inputs.

        Args:
            read: what the later blocks read in any case.
        """
        import networkx

        nx: Any = networkx
        flow = nx.DiGraph()  # from what is wanted to the inputs: networkx gives the cut that is nearest to the end
        tensors: set[Output] = set()

        def add(tensor: Output) -> None:
            free = (tensor in self._read_outside and tensor.node in self._group_of) or is_const(tensor.node.op)
            free = free or (self._group_of.get(tensor.node) != k and (tensor in read or is_feed(tensor.node.op)))
            flow.add_edge((tensor, 1), (tensor, 0), capacity=0 if free else tensor.type.nbytes or 0)
            tensors.add(tensor)

        for node in self._groups[k]:
            add(node.out())
            for tensor in node.inputs:
                if self._group_of.get(tensor.node) != k:
                    add(tensor)
                    flow.add_edge((tensor, 0), "inputs", capacity=UNBOUNDED)
                flow.add_edge((node.out(), 0), (tensor, 1), capacity=UNBOUNDED)
        for tensor in wanted:
            flow.add_edge("wanted", (tensor, 1), capacity=UNBOUNDED)
        reached: set[Any] = nx.minimum_cut(flow, "wanted", "inputs")[1][0]
        return {t for t in tensors if (t, 1) in reached and (t, 0) not in reached}

    def _block(self, k: int) -> Block:
        group = self._groups[k]
        constants = {t.node for t in self._read[k] if _is_small_constant(t.node)}
        read = {t for t in self._read[k] if t.node not in constants}
        made = (node.out() for node in group)
        outputs = tuple(t for t in made if t in self._read_outside or self._blocks_reading.get(t))
        inside = {*group, *self._again[k], *constants}
        needed = reach([t.node for t in outputs], lambda node: [t.node for t in node.inputs if t.node in inside])
        place = self._place.__getitem__
        nodes = tuple(sorted(needed, key=place))
        used = {t for node in nodes for t in node.inputs}
        inputs = tuple(sorted(read & used, key=lambda t: (place(t.node), t.index)))
        fused_s = block_seconds(nodes, outputs, self._costs.rates, self._axes) if outputs else 0.0
        return Block(group, nodes, inputs, outputs, fused_s, self._unfused_s[k])

    @functools.cached_property
    def _unfused_s(self) -> list[float]:
        """The seconds of each block's members as TensorFlow's kernels."""

        def seconds(node: Node) -> float:
            return self._costs.seconds(node) + in_place_seconds(node, self._uses, self._costs.rates)

        return [sum(seconds(node) for node in group if not is_view(node.op)) for group in self._groups]
