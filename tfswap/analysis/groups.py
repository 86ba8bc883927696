"""The chunks of a body's group of kernels, and the requests that each chunk serves.

A group's kernels run as soon as their inputs are ready (csrc/core/group_ops.cc), so only their edges order them. A
chunk serves another request where all users of the chunk so far end, by these edges, before the requesting kernel
starts. A kernel writes over an input that no other kernel reads.

Invariant: no two values that may exist at the same time are in the same chunk.

Not handled: writing over inputs from outside of the group; a chunk for requests of different sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import is_pure
from tfswap.kernels.alignment import round_up
from tfswap.kernels.memory_rules import KernelMemory

if TYPE_CHECKING:
    from tfswap.analysis.dataflow import Dataflow


class Served(NamedTuple):
    """The place of an output or temporary of a group's kernel.

    Attributes:
        chunk: the number of its chunk.
        over: the position of the input that the kernel writes over. None: it makes a request.
        offset: the offset in the chunk, in bytes.
    """

    chunk: int
    over: int | None = None
    offset: int = 0


@dataclass
class Chunks:
    """The chunks of a group.

    Attributes:
        sizes: the bytes of each chunk, in the order of their requests.
        reserved: the bytes of the kernels' requests from the process's allocator. They are requested before the chunks
            and freed before the first kernel starts.
        served: the places of each kernel's outputs and temporaries, in the order of its events.
    """

    sizes: list[int] = field(default_factory=list[int])
    reserved: int = 0
    served: dict[Node, list[Served]] = field(default_factory=dict[Node, list[Served]])


@dataclass
class Concurrent:
    """The schedule of a group.

    Attributes:
        order: its kernels in the order of their starts.
        sizes: the bytes of its chunks. The first has the values that only the group reads, each other chunk has one
            value that other nodes read.
        kept: the values that other nodes read, in the order of their chunks.
        served: the places of each kernel's outputs and temporaries.
        waits: the kernels that each kernel waits for in addition to its inputs.
        reserved: as of `Chunks`.
        seconds: its predicted time.
    """

    order: list[int]
    sizes: list[int] = field(default_factory=list[int])
    kept: list[int] = field(default_factory=list[int])
    served: dict[int, list[Served]] = field(default_factory=dict[int, list[Served]])
    waits: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    reserved: int = 0
    seconds: float = 0.0


class _Value:
    """A buffer that a kernel of the group makes.

    Attributes:
        users: the nodes that make, view or read it, as bits.
        reads: the number of inputs of the group's nodes that it is.
        stays: whether a node outside of the group reads it.
        viewed: whether it has views.
    """

    __slots__ = ("chunk", "reads", "stays", "users", "viewed")

    def __init__(self, maker: int):
        self.chunk = -1
        self.users = 1 << maker
        self.reads = 0
        self.stays = self.viewed = False


def with_views(group: Sequence[Node], order: Sequence[Node]) -> list[Node]:
    """A group's kernels and the views between them, in their order.

    Args:
        order: the body's nodes, in topological order.
    """
    kernels = set(group)
    places = [p for p, node in enumerate(order) if node in kernels]
    span = order[places[0] : places[-1] + 1]
    after, before = set(kernels), set(kernels)
    for node in span:
        if any(t.node in after for t in node.inputs):
            after.add(node)
    for node in reversed(span):
        if node in before:
            before.update(t.node for t in node.inputs)
    return [node for node in span if node in kernels or (node in after and node in before)]


def reserved_bytes(process_bytes: Iterable[int], threads: int) -> int:
    """The most bytes that concurrent kernels, one per thread, hold from the process's allocator at one time.

    Args:
        process_bytes: `KernelMemory.process_bytes` of each kernel.
    """
    return sum(sorted(map(round_up, process_bytes), reverse=True)[:threads])


def chunks_of(body: Graph, group: Sequence[Node], memory: Mapping[Node, KernelMemory], threads: int) -> Chunks:
    """The chunks of a group of kernels, and views between them, in their order.

    Args:
        threads: the number of threads that run kernels.
    """
    number = {node: n for n, node in enumerate(group)}
    values = _values(body, group, number, memory)
    made = Chunks(reserved=reserved_bytes((memory[node].process_bytes for node in group), threads))
    last: dict[int, list[_Value]] = {}  # the latest value in each chunk, by bytes
    ended: list[int] = []  # for each node, the nodes that end before it starts, as bits
    for n, node in enumerate(group):
        bits = 0
        for tensor in node.inputs:
            if tensor.node in number:
                bits |= ended[number[tensor.node]] | 1 << number[tensor.node]
        ended.append(bits)
        made.served[node] = []
        forward = dict(memory[node].forward)
        for output, nbytes in _requests(node, memory[node]):
            value = values[node, output] if output >= 0 else _Value(n)
            lie = last.setdefault(round_up(nbytes), [])
            over = _overwritten(node, forward.get(output, ()), values, lie)
            found = values[node.inputs[over]] if over is not None else None
            if found is None:
                found = next((v for v in reversed(lie) if not (v.stays or v.users & ~bits)), None)
            if found is None:
                value.chunk = len(made.sizes)
                made.sizes.append(round_up(nbytes))
            else:
                value.chunk = found.chunk
                lie.remove(found)
            lie.append(value)
            made.served[node].append(Served(value.chunk, over))
    return made


def _values(
    body: Graph, group: Sequence[Node], number: Mapping[Node, int], memory: Mapping[Node, KernelMemory]
) -> dict[tuple[Node, int], _Value]:
    """The buffer of each output of the group's kernels and views."""
    values: dict[tuple[Node, int], _Value] = {}
    for n, node in enumerate(group):
        requested = {output for output, _ in _requests(node, memory[node])}
        for tensor in node.inputs:
            if tensor in values:
                values[tensor].users |= 1 << n
                values[tensor].reads += 1
        for output, source in memory[node].alias:
            viewed = values.get(node.inputs[source])
            if output not in requested and viewed is not None:
                values[node, output] = viewed
                viewed.viewed = True
        for output in requested:
            if output >= 0:
                values[node, output] = _Value(n)
    outside = [t for node in body if node not in number for t in node.inputs]
    for tensor in (*outside, *body.fetches):
        if tensor in values:
            values[tensor].stays = True
    return values


def _requests(node: Node, memory: KernelMemory) -> list[tuple[int, int]]:
    """A kernel's requests: (output, or -1 for a temporary; bytes)."""
    found: list[tuple[int, int]] = []
    for event, amount in memory.events:
        if event == "temp":
            found.append((-1, amount))
        elif event == "out":
            found.append((amount, node.outputs[amount].nbytes or 0))
    return [(output, nbytes) for output, nbytes in found if nbytes > 0]


def _overwritten(
    node: Node, candidates: Sequence[int], values: Mapping[tuple[Node, int], _Value], lie: Sequence[_Value]
) -> int | None:
    """The position of an input that no other node reads, for the kernel to write over; None where there is none."""
    for position in candidates:
        value = values.get(node.inputs[position])
        if value is not None and value in lie and value.reads == 1 and not (value.stays or value.viewed):
            return position
    return None


def passes_on_buffers(flow: Dataflow, i: int) -> bool:
    """Whether a node is no kernel, and may be part of a group where it is between two of its kernels."""
    node = flow.nodes[i]
    return bool(node.inputs) and not flow.is_kernel[i] and node not in flow.constants and is_pure(node.op)
