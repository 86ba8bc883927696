"""The buffers of a replay of bodies: their reference counts, and their requests and releases in order.

Reference counts are those of the runtime (functional_ops.cc). The caller holds a node's inputs until the node has
ended. A body owns its arguments from the iteration before, and can write over them. Tensor lists and optionals are
scalars in the arena, or in host memory on a GPU. Their elements are in the arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tfswap.analysis.buffers import Buffer, Contents, Element, Part
from tfswap.analysis.groups import Chunks, Served
from tfswap.analysis.output_bytes import is_on_host, tensor_bytes
from tfswap.analysis.pools import is_pooled
from tfswap.analysis.request_log import Logged
from tfswap.ir.custom_ops import READ_HOME
from tfswap.ir.graph import Node
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.memory_rules import KernelMemory


class Kernel(NamedTuple):
    """A node's kernel, as all its runs need it.

    Attributes:
        memory: its requests.
        forward, temp_forward: as of `KernelMemory`, by output and by temporary.
        out_bytes: the bytes of each output.
        on_host: whether each output is in host memory.
    """

    node: Node
    memory: KernelMemory
    forward: dict[int, tuple[int, ...]]
    temp_forward: dict[int, tuple[int, ...]]
    out_bytes: tuple[int, ...]
    on_host: tuple[bool, ...]

    @classmethod
    def of(cls, node: Node, memory: KernelMemory, device: DeviceModel) -> Kernel:
        return cls(
            node,
            memory,
            dict(memory.forward),
            dict(memory.temp_forward),
            tuple([kind.nbytes or 0 for kind in node.outputs]),
            tuple([is_on_host(node, output, device) for output in range(len(node.outputs))]),
        )


class Heap:
    """The buffers of one replay.

    Attributes:
        log: the requests and releases.
        exact: whether the log is exact, and no bound.
        live_bytes, peak_bytes: bytes that the replay holds in the arena, now and at most.
        weight: the number of iterations that the current one represents.
        out_bytes, in_bytes: bytes copied to the host, and back, times `weight`.
        away_bytes, most_away_bytes: bytes in host memory, now and at most.
    """

    def __init__(self, device: DeviceModel, *, frees_inputs: bool = False, covering: bool = False):
        """An empty heap.

        Args:
            frees_inputs: whether the node's inputs are released with their last reference.
            covering: whether the replay covers all courses of the step: only then there are pools.
        """
        self.device = device
        self._covering = covering
        self._frees_inputs = frees_inputs
        self.log: list[Logged] = []
        self.exact = True
        self.live_bytes = self.peak_bytes = 0
        self.weight = 1.0
        self.out_bytes = self.in_bytes = 0.0
        self.away_bytes = self.most_away_bytes = 0
        self._requests = 0
        self._group_requests = 0  # requests so far of the running kernel of a group
        self._served: dict[Node, list[Served]] = {}  # of the running group
        self._chunks: list[Buffer] = []  # the latest buffer in each of its chunks
        self._kept: list[Buffer] | None = None  # dropped when the group has ended; None outside of groups

    def inputs(self, node: Node, contents: Sequence[Contents | None]) -> list[Buffer]:
        """The buffers of a node's inputs, with the known contents of lists."""
        known = [c if t.type.dtype == "variant" else () for t, c in zip(node.inputs, contents, strict=True)]
        return [self.given(i, tensor_bytes(t.type), known[i]) for i, t in enumerate(node.inputs)]

    def given(self, source: int, nbytes: int, contents: Contents | None) -> Buffer:
        """The buffer of an input: the node's caller holds it."""
        made = Buffer(None, nbytes, source)
        made.endless = contents is None
        made.parts = _given_parts(contents, source)
        return made

    def give_up(self, buffer: Buffer, value: int | None) -> None:
        """Make the node the owner of an input, and of all elements of its list."""
        buffer.value, buffer.refs = value, 1
        seen: set[int | None] = {None}
        pending = list(buffer.parts)
        while pending:
            part = pending.pop()
            if part is not None:
                pending += part.buffer.parts
                part.buffer.refs = 1
                if part.buffer.value in seen:
                    part.buffer.value = None
                seen.add(part.buffer.value)

    def allocate(self, nbytes: int, on_host: bool = False) -> Buffer:
        """A new buffer with one reference."""
        made = Buffer(None, nbytes)
        made.refs, made.on_host = 1, on_host
        if nbytes > 0:
            made.number = self._requests
            self._requests += 1
            arena_bytes = 0 if on_host else nbytes
            self.log.append(("request", made.number, arena_bytes))
            self.live_bytes += round_up(arena_bytes)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return made

    def allocate_on_host(self, nbytes: int) -> Buffer:
        """A new buffer, such as a list's scalar, that is in host memory on a GPU, and in the arena on a CPU."""
        return self.allocate(nbytes, on_host=self.device.host_is_separate)

    def hold(self, buffer: Buffer) -> Buffer:
        """Add a reference."""
        buffer.refs += 1
        return buffer

    def drop(self, buffer: Buffer) -> None:
        """Remove a reference, and release the buffer with the last one."""
        if self._kept is not None:
            self._kept.append(buffer)
            return
        buffer.refs -= 1
        given = buffer.number is None and buffer.source is not None
        if buffer.refs or (given and not self._frees_inputs):
            return
        self.away_bytes -= buffer.away_bytes
        for part in buffer.parts:
            if part is not None:
                self.drop(part.buffer)
        if buffer.ahead is not None:
            self.drop(buffer.ahead)
        if given and buffer.value is not None:
            self.log.append(("release", buffer.value, 0))
        if buffer.number is None:
            return
        self.log.append(("free", buffer.number, 0))
        self.live_bytes -= round_up(buffer.arena_bytes)

    def drop_all(self, buffers: Iterable[Buffer]) -> None:
        """As `drop`, one after another."""
        if self._kept is not None:
            self._kept.extend(buffers)
            return
        for buffer in buffers:
            if buffer.refs > 1:
                buffer.refs -= 1
            else:
                self.drop(buffer)

    def is_dying(self, buffer: Buffer) -> bool:
        """Whether the running kernel has the only reference."""
        return buffer.refs == 1 and buffer.number is not None and self._kept is None

    def is_pooled(self, buffer: Buffer) -> bool:
        """Whether it is a list whose contents are a pool."""
        return self._covering and is_pooled(buffer)

    def split(self, sizes: Iterable[int]) -> None:
        """Give the next requests chunks of their own sizes."""
        self.log.extend(("split", size, 0) for size in sizes)
        self.log.append(("part", 0, 0))

    def free_rest(self) -> None:
        """Free the rests of those chunks."""
        self.log.append(("rest", 0, 0))

    def copies_out(self, nbytes: int, handle: Buffer | None = None, away_bytes: int = 0) -> None:
        """Start a copy to the host.

        Args:
            handle: the handle with which the bytes in host memory exist that are taken for it.
            away_bytes: these bytes.
        """
        self.out_bytes += self.weight * round_up(nbytes)
        if handle is not None:
            handle.away_bytes = round_up(away_bytes)
            self.away_bytes += handle.away_bytes
            self.most_away_bytes = max(self.most_away_bytes, self.away_bytes)

    def copies_in(self, nbytes: int) -> None:
        """Start a copy back."""
        self.in_bytes += self.weight * round_up(nbytes)

    # --- kernels ---------------------------------------------------------------------------------------------

    def begin_group(self, chunks: Chunks) -> None:
        """Begin a group: the next kernels' requests are served from its chunks."""
        self._served, self._chunks = chunks.served, []
        self._kept = [self.allocate(chunks.reserved)] if chunks.reserved else []

    def end_group(self) -> None:
        """End a group: drop the buffers that its kernels have read and made."""
        kept, self._kept = self._kept or [], None
        self.drop_all(kept)

    def run_kernel(self, kernel: Kernel, inputs: Sequence[Buffer]) -> list[Buffer]:
        """Run a kernel; returns its outputs, with one reference each."""
        memory = kernel.memory
        if kernel.node.op == READ_HOME:
            self.copies_in(sum(kernel.out_bytes))
        self.exact &= memory.exact
        outputs: list[Buffer | None] = [None] * len(kernel.out_bytes)
        temps: list[Buffer | None] = []
        self._group_requests = 0
        for event, amount in memory.events:
            if event == "out":
                taken = self._dying(inputs, kernel.forward.get(amount, ()))
                outputs[amount] = self.hold(taken) if taken else self._output(kernel, amount)
            elif event == "temp":
                taken = self._dying(inputs, kernel.temp_forward.get(len(temps), ()))
                temps.append(None if taken else self._request(kernel.node, amount))
            elif event == "free" and (temp := temps[amount]) is not None:
                self.drop(temp)
                temps[amount] = None
        for temp in reversed(temps):
            if temp is not None:
                self.drop(temp)
        for output, source in memory.alias:
            if outputs[output] is None:
                outputs[output] = self.hold(inputs[source])
        return [self.hold(Buffer(None, 0)) if output is None else output for output in outputs]

    def _dying(self, inputs: Sequence[Buffer], candidates: Iterable[int]) -> Buffer | None:
        """The first of some inputs that the running kernel has the only reference to."""
        for candidate in candidates:
            if self.is_dying(inputs[candidate]):
                return inputs[candidate]
        return None

    def _output(self, kernel: Kernel, output: int) -> Buffer:
        """A new buffer for an output."""
        nbytes = kernel.out_bytes[output]
        return self.allocate(nbytes, on_host=True) if kernel.on_host[output] else self._request(kernel.node, nbytes)

    def _request(self, node: Node, nbytes: int) -> Buffer:
        """A new buffer for an output or a temporary in the arena."""
        in_group = nbytes > 0 and self._kept is not None and node in self._served
        return self._serve(node, nbytes) if in_group else self.allocate(nbytes)

    def _serve(self, node: Node, nbytes: int) -> Buffer:
        """A buffer for the next request of a group's kernel, in the chunk that serves it."""
        chunk = self._served[node][self._group_requests].chunk
        self._group_requests += 1
        if chunk == len(self._chunks):
            self._chunks.append(self.allocate(nbytes))
        else:
            last, made = self._chunks[chunk], Buffer(None, nbytes)
            made.number, last.number, made.refs = last.number, None, 1
            self._chunks[chunk] = made
        return self._chunks[chunk]


def _given_element(element: Element, source: int) -> Buffer:
    """The buffer of an element of an input's list."""
    made = Buffer(None, element.nbytes, source, element.value)
    made.parts = _given_parts(element.parts, source)
    made.endless = element.parts is None
    return made


def _given_parts(contents: Contents | None, source: int) -> list[Part | None]:
    return [
        None if e is None else Part(_given_element(e, source), e.nbytes, e.values, e.is_list, e.pool)
        for e in contents or ()
    ]
