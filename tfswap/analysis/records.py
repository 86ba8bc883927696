"""Records of the requests of loops, conditionals and ops of lists, found by replaying them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tfswap.analysis.buffers import Buffer, Contents, Element, Part
from tfswap.analysis.heap import Heap
from tfswap.analysis.integer_values import Values
from tfswap.analysis.pools import holds, reached
from tfswap.analysis.request_log import events_of
from tfswap.errors import UnsupportedGraph
from tfswap.ir.graph import Graph, Node
from tfswap.kernels.alignment import round_up
from tfswap.kernels.events import Event
from tfswap.kernels.memory_rules import VARIANT_BYTES
from tfswap.support.reach import reach


class Keeps(NamedTuple):
    """The contents of a list: outputs, numbered as in `Record.events`; values of the step; inputs, with their
    contents.
    """

    outputs: tuple[int, ...]
    values: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass
class Findings:
    """Facts about the decisions of a step: iterations of loops, and branches of conditionals.

    Attributes:
        undetermined: the loops and conditionals whose number of iterations or branch the step decides, so that the
            addresses of their results are unknown. In a record: its node, and nodes of its bodies.
        undecided: the most branches of a conditional whose branch the step decides and whose requests differ.
        repeated: whether such a conditional runs in a loop, so that its branches alternate.
        ends_early: whether a loop may end before its bound, and leave other holes in the arena.
        endless: whether such a loop has no bound, so that its ends cannot all be tried.
        decided: whether the step decides nothing.
        runs: the number of runs of each body.
    """

    undetermined: dict[Node, None] = field(default_factory=dict[Node, None])
    undecided: int = 0
    repeated: bool = False
    ends_early: bool = False
    endless: bool = False
    decided: bool = True
    runs: dict[Graph, float] = field(default_factory=dict[Graph, float])

    def add(self, other: Findings) -> None:
        """Add the findings of another node of the same graph, without its runs."""
        self.undetermined.update(other.undetermined)
        self.undecided = max(self.undecided, other.undecided)
        self.repeated |= other.repeated
        self.ends_early |= other.ends_early
        self.endless |= other.endless
        self.decided &= other.decided


@dataclass(frozen=True)
class Record:
    """The requests and releases of a loop, a conditional or an op of lists.

    Attributes:
        events: as `KernelMemory.events`, and the further kinds of `EventKind`. Output numbers beyond the node's own
            outputs are buffers in its lists.
        part_bytes: the sizes of those buffers.
        alias: for some outputs, the input whose buffer or list it is.
        twins: for some outputs, the earlier output whose buffer or list it is.
        keeps: for outputs that are lists, the buffers in them.
        contents: for outputs that are lists, the known contents.
        integers: for some outputs, the known values.
        exact: whether `events` are exact, and no bound.
        found: the findings of the node and its bodies.
        out_bytes, in_bytes: bytes that copies in the bodies take to the host, and back.
        away_bytes: bytes still in host memory when the node has ended.
        passing_bytes: the most bytes in host memory in addition, while it runs.
    """

    events: tuple[Event, ...] = ()
    part_bytes: tuple[int, ...] = ()
    alias: dict[int, int] = field(default_factory=dict[int, int])
    twins: dict[int, int] = field(default_factory=dict[int, int])
    keeps: dict[int, Keeps] = field(default_factory=dict[int, "Keeps"])
    contents: dict[int, Contents] = field(default_factory=dict[int, Contents])
    integers: dict[int, Values] = field(default_factory=dict[int, Values])
    exact: bool = True
    found: Findings = field(default_factory=Findings)
    out_bytes: int = 0
    in_bytes: int = 0
    away_bytes: int = 0
    passing_bytes: int = 0


class UnboundedLoop(UnsupportedGraph):
    """A loop keeps bytes of each iteration, and the number of iterations is unknown.

    Attributes:
        loop: the name of its node.
    """

    def __init__(self, loop: str, kept_bytes: int):
        super().__init__(
            f"the loop {loop!r} keeps {kept_bytes} bytes of each iteration, and how many iterations there are is not "
            "known before the step runs: its memory has no bound."
        )
        self.loop = loop


def record_of(
    heap: Heap, found: Findings, outputs: Sequence[Buffer], known: Sequence[Values | None], *, covering: bool
) -> Record:
    """The record of a replay with these outputs, and their known integers.

    Args:
        covering: whether an output that is an element of a pool gets a buffer of its own, which holds the pool.
    """
    if covering:
        outputs = [_in_arena(heap, buffer) for buffer in outputs]
    alias: dict[int, int] = {}
    twins: dict[int, int] = {}
    names: dict[int | None, int] = {}  # allocation to output
    for o, buffer in enumerate(outputs):
        if buffer.number is None:
            if buffer.source is not None:
                alias[o] = buffer.source
        elif buffer.number in names:
            twins[o] = names[buffer.number]
        else:
            names[buffer.number] = o
    keeps, part_bytes = _kept_by_lists(outputs, alias, names)
    lists = [o for o, buffer in enumerate(outputs) if o not in alias and _is_list(buffer)]
    return Record(
        tuple(events_of(heap.log, names)),
        tuple(part_bytes),
        alias,
        twins,
        keeps,
        {o: contents_of(outputs[o], names) for o in lists},
        {o: v for o, v in enumerate(known) if v is not None},
        heap.exact,
        found,
        int(heap.out_bytes),
        int(heap.in_bytes),
        heap.away_bytes,
        heap.most_away_bytes - heap.away_bytes,
    )


def _in_arena(heap: Heap, buffer: Buffer) -> Buffer:
    """The output itself; for an element of a pool, a buffer that holds the pool."""
    if buffer.number is not None or buffer.source is not None or not buffer.parts:
        return buffer
    made = heap.allocate(max(1, *(p.nbytes for p in buffer.parts if p is not None)))
    made.parts = buffer.parts
    return made


def _is_list(buffer: Buffer) -> bool:
    if buffer.endless and buffer.source is not None:
        return False
    return bool(buffer.parts) or buffer.nbytes == VARIANT_BYTES


def _kept_by_lists(
    outputs: Sequence[Buffer], alias: Mapping[int, int], names: dict[int | None, int]
) -> tuple[dict[int, Keeps], list[int]]:
    """The contents of outputs that are lists, and the sizes of buffers in lists only, which are added to `names`."""
    keeps: dict[int, Keeps] = {}
    part_bytes: list[int] = []
    for o, buffer in enumerate(outputs):
        if o in alias:
            continue
        kept, values, inputs = dict[int, None](), dict[int, None](), dict[int, None]()
        if buffer.endless and buffer.source is not None:
            inputs[buffer.source] = None
        elements = [p.buffer for p in buffer.parts if p is not None] if buffer.number is not None else []
        for part in reach(elements, holds):
            if part.number is None:
                if part.value is not None:
                    values[part.value] = None
                elif part.source is not None:
                    inputs[part.source] = None
                continue
            if part.number not in names:
                names[part.number] = len(outputs) + len(part_bytes)
                part_bytes.append(part.arena_bytes)
            kept[names[part.number]] = None
        if kept or values or inputs:
            keeps[o] = Keeps(tuple(kept), tuple(values), tuple(inputs))
    return keeps, part_bytes


def contents_of(buffer: Buffer, names: Mapping[int | None, int]) -> Contents:
    """The known contents of a list. `names`: outputs by allocation."""
    return tuple(None if p is None else _element(p, names) for p in buffer.parts)


def _element(part: Part, names: Mapping[int | None, int]) -> Element:
    buffer = part.buffer
    if part.pool is not None:  # whose buffers the lists keep by `Record.keeps`
        pool_bytes = sum(round_up(b.nbytes) for b in reached(buffer)) + round_up(buffer.nbytes)
        return Element(pool_bytes, part.values, is_list=part.is_list, pool=part.pool)
    kept = None if buffer.endless else contents_of(buffer, names)
    return Element(part.nbytes, part.values, buffer.value, names.get(buffer.number), kept, part.is_list, part.pool)
