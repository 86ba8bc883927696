"""Snapshots of an arena before a step, and simulated arenas with that content.

An arena gives addresses, as TensorFlow's allocator does (bfc_allocator.py). A ledger only counts bytes, where holes do
not matter.

Not handled: which tensors the chunks of a snapshot hold. device/memory_owners.py finds that out.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.alignment import ALIGNMENT_BYTES, SPLIT_SLACK_BYTES, round_up
from tfswap.simulator.bfc_allocator import Arena, Chunk

TAKEN_PART, MOST_TAKEN_BYTES = 64, 16 << 10
"""The share of each hole that is assumed taken in an unseen arena: some dozens of the smallest chunks, but a small part
of a hole.
"""


class Allocator(Protocol):
    in_use_bytes: int
    peak_bytes: int

    def allocate(self, size_bytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def split(self, sizes: Sequence[int]) -> list[int]: ...

    def split_all(self) -> None: ...


class Ledger:
    """Counts bytes as if memory never fragmented: the live bytes, rounded.

    Attributes:
        widest: whether each request counts as the largest chunk that the allocator may hand out for it.
    """

    def __init__(self) -> None:
        self.widest = False
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self._sizes: list[int] = []

    def allocate(self, size_bytes: int) -> int:
        if size_bytes <= 0:
            return -1
        rounded = round_up(size_bytes)
        if self.widest:
            rounded += min(rounded, SPLIT_SLACK_BYTES) - ALIGNMENT_BYTES
        self._sizes.append(rounded)
        self.in_use_bytes += rounded
        if self.in_use_bytes > self.peak_bytes:
            self.peak_bytes = self.in_use_bytes
        return len(self._sizes) - 1

    def copy(self) -> Ledger:
        made = Ledger()
        made.in_use_bytes, made.peak_bytes, made._sizes = self.in_use_bytes, self.peak_bytes, self._sizes.copy()
        return made

    def split(self, sizes: Sequence[int]) -> list[int]:
        return []  # it has no chunks

    def split_all(self) -> None:
        pass

    def free(self, address: int) -> None:
        if address >= 0:
            self.in_use_bytes -= self._sizes[address]


class Variable(NamedTuple):
    """Where a variable of the step is before it.

    Attributes:
        feed: the name of its handle.
        address: of its chunk; 0 where it is at home on the host. Of an arena whose chunks are not known, any number.
        nbytes: its bytes.
    """

    feed: str
    address: int
    nbytes: int


@dataclass(frozen=True)
class ArenaSnapshot:
    """The content of the arena before the step.

    Attributes:
        total_bytes: bytes in use; 0 where unknown: then the step's own variables, arguments and constants.
        chunks: the arena's chunks as (address, bytes, in use), in order of address; empty where unknown. The
            step's variables and arguments are among them.
        instantiated: whether the step's constants are among them too.
        limit_bytes: the most bytes of the arena; None where unknown: it then counts as endless.
        collects: whether the arena frees unused regions, to make room for a larger one.
        shared: feeds of the step that are handles of variables whose buffers other tensors share: the first update of
            each requests another buffer, and the shared one stays.
        variables: where the step's variables are, as far as known.
    """

    total_bytes: int = 0
    chunks: tuple[Chunk, ...] = ()
    instantiated: bool = False
    limit_bytes: int | None = None
    collects: bool = False
    shared: frozenset[str] = frozenset()
    variables: tuple[Variable, ...] = ()

    @property
    def growth_bytes(self) -> int:
        """The bytes of regions that the arena may still add; 0 where unknown."""
        if not self.chunks or self.limit_bytes is None:
            return 0
        return (
            max(0, self.limit_bytes - sum(nbytes for _, nbytes, _ in self.chunks)) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        )

    def with_at_home(self, names: Collection[str]) -> ArenaSnapshot:
        """This content with the variables behind these feeds at home on the host, and all others in the arena.

        A chunk is free once all variables that share it are at home. The memory of a variable that is not an
        allocator's, such as a NumPy array's, is no chunk.
        """
        if not self.chunks:
            moved_bytes = sum(round_up(variable.nbytes) for variable in self.variables if variable.feed in names)
            return self if not moved_bytes else dataclasses.replace(self, total_bytes=self.total_bytes - moved_bytes)
        in_arena = {address for address, _, in_use in self.chunks if in_use}
        staying = {v.address for v in self.variables if v.feed not in names}
        leaving = {v.address for v in self.variables if v.address and v.feed in names} & in_arena - staying
        coming = [v for v in self.variables if not v.address and v.feed not in names]
        if not leaving and not coming:
            return self
        arena = self.arena()
        for address in sorted(leaving):
            arena.free(address)
        for variable in coming:
            arena.allocate(variable.nbytes)
        variables = tuple([v._replace(address=0) if v.feed in names else v for v in self.variables])
        return dataclasses.replace(
            self, total_bytes=arena.in_use_bytes, chunks=tuple(arena.chunks), variables=variables
        )

    def unseen(self) -> ArenaSnapshot:
        """An arena that a step planned now may have when it runs. Small tensors may be allocated until then. The peak
        depends most on holes that several tensors just fit into, so the beginning of each hole is in use.
        """
        if not self.chunks:
            return self
        chunks: list[Chunk] = []
        total_bytes = self.total_bytes
        for address, size, in_use in self.chunks:
            if not in_use and size > ALIGNMENT_BYTES:
                taken = round_up(min(size // TAKEN_PART, MOST_TAKEN_BYTES)) or ALIGNMENT_BYTES
                chunks.append((address, taken, True))
                address, size = address + taken, size - taken
                total_bytes += taken
            chunks.append((address, size, in_use))
        return dataclasses.replace(self, total_bytes=total_bytes, chunks=tuple(chunks))

    def with_allocations(self, sizes: Sequence[int]) -> ArenaSnapshot:
        """This content and further tensors of these sizes, in bytes."""
        if not self.chunks or not sizes:
            return self
        arena = self.arena()
        for size in sizes:
            arena.allocate(size)
        return dataclasses.replace(self, total_bytes=arena.in_use_bytes, chunks=tuple(arena.chunks))

    def arena(self) -> Arena:
        """A fresh arena with this content."""
        return Arena(self.chunks, self.limit_bytes, self.collects)

    def ledger(self) -> Ledger:
        """A fresh ledger with this content."""
        made = Ledger()
        self.enter(made)
        return made

    def enter(self, ledger: Ledger) -> None:
        """Count this content in an empty ledger, which `fill` does not add in parts."""
        if self.chunks:
            ledger.allocate(self.total_bytes)


NOTHING_KNOWN = ArenaSnapshot()


def fill(arena: Allocator, sizes: Sequence[int], snapshot: ArenaSnapshot) -> list[int]:
    """Allocate the contents before a step in an arena that has `snapshot`'s chunks, as far as they are known.

    Args:
        sizes: as of `added_bytes`.

    Returns the addresses of the persistent values; -1 where they are among the chunks.
    """
    addresses = [arena.allocate(size) for size in sizes]
    arena.allocate(snapshot.total_bytes - arena.in_use_bytes)
    return addresses


def added_bytes(flow: Dataflow, snapshot: ArenaSnapshot) -> tuple[int, ...]:
    """Per persistent value the bytes that it takes besides `snapshot`'s chunks."""
    if not snapshot.chunks:
        return tuple([flow.values[v].nbytes for v in flow.persistent])
    if snapshot.instantiated:
        return (0,) * len(flow.persistent)
    values = [flow.values[v] for v in flow.persistent]
    made = flow.made_with_step
    return tuple([value.nbytes if value.tensor.node in made else 0 for value in values])


@lru_cache(maxsize=8)
def _filled(snapshot: ArenaSnapshot, sizes: tuple[int, ...], live: bool) -> tuple[Arena | Ledger, list[int]]:
    """Plans are judged by the dozen in one arena, and graphs have thousands of constants."""
    arena = snapshot.ledger() if live else snapshot.arena()
    return arena, fill(arena, sizes, snapshot)


def filled(flow: Dataflow, snapshot: ArenaSnapshot, live: bool = False) -> tuple[Arena | Ledger, list[int]]:
    """A new arena, or a ledger, with the contents before the step; the addresses as of `fill`."""
    arena, addresses = _filled(snapshot, added_bytes(flow, snapshot), live)
    return arena.copy(), addresses


def bytes_before(flow: Dataflow, snapshot: ArenaSnapshot) -> int:
    """Bytes in use before the step, as of `filled`."""
    return _filled(snapshot, added_bytes(flow, snapshot), True)[0].in_use_bytes


def located(flow: Dataflow, addresses: Sequence[int], snapshot: ArenaSnapshot) -> list[int]:
    """The `addresses` of the persistent values, with a chunk of its size for each whose own is not known, in order of
    address: a variable whose buffer is replaced frees the old one. Of several chunks of one size any is used.
    """
    used = sorted((size, address) for address, size, in_use in snapshot.chunks if in_use)
    sizes = [round_up(flow.values[v].nbytes) for v in flow.persistent]
    found = list(addresses)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], flow.persistent[i])):
        at = bisect_left(used, (sizes[i], 0))
        if found[i] < 0 < sizes[i] and at < len(used) and used[at][0] < 2 * sizes[i]:
            found[i] = used.pop(at)[1]
    return found
