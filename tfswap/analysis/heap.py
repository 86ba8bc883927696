"""The buffers of a replay of bodies: their holders, and their requests and releases in order.

Reference counts are those that the runtime keeps (functional_ops.cc): what a node is given is held until the node has
ended; a body's arguments from the iteration before are its own, and can be written over. Tensor lists and optionals are
scalars of the arena, or of host memory on a GPU; their elements are in the arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tfswap.analysis.buffers import Buffer, Contents, Element, Part
from tfswap.analysis.groups import Chunks, Served
from tfswap.analysis.output_bytes import is_on_host, tensor_bytes
from tfswap.analysis.request_log import Logged
from tfswap.ir.graph import Node
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.memory_rules import KernelMemory


class Heap:
    """The buffers of one replay.

    Attributes:
        log: what was requested and released.
        exact: whether the log is exact, or a bound.
        live_bytes, peak_bytes: of the arena that the replay holds, now and at most.
        weight: how many iterations of a loop the one that runs stands for.
        out_bytes, in_bytes: copied to the host, and back, weighted so.
        away_bytes, most_away_bytes: in host memory, now and at most.
    """

    def __init__(self, device: DeviceModel, *, frees_inputs: bool = False):
        """An empty heap.

        Args:
            frees_inputs: whether what the node is given is released when nobody holds it any more.
        """
        self.device = device
        self._frees_inputs = frees_inputs
        self.log: list[Logged] = []
        self.exact = True
        self.live_bytes = self.peak_bytes = 0
        self.weight = 1.0
        self.out_bytes = self.in_bytes = 0.0
        self.away_bytes = self.most_away_bytes = 0
        self._requests = 0
        self._group_requests = 0  # of a group's kernel
        self._served: dict[Node, list[Served]] = {}  # of the group that runs
        self._chunks: list[Buffer] = []  # of it, what lies in each
        self._kept: list[Buffer] | None = None  # what is freed when the kernels of a group have ended

    def inputs(self, node: Node, contents: Sequence[Contents | None]) -> list[Buffer]:
        """A node's inputs, of which its lists' contents may be known."""
        known = [c if t.type.dtype == "variant" else () for t, c in zip(node.inputs, contents, strict=True)]
        return [self.given(i, tensor_bytes(t.type), known[i]) for i, t in enumerate(node.inputs)]

    def given(self, source: int, nbytes: int, contents: Contents | None) -> Buffer:
        """The buffer of an input: the node's caller holds it."""
        made = Buffer(None, nbytes, source)
        made.endless = contents is None
        made.parts = _given_parts(contents, source)
        return made

    def give_up(self, buffer: Buffer, value: int | None) -> None:
        """Make an input the node's own, with all of its list's elements."""
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
        """A new buffer, held by its maker."""
        made = Buffer(None, nbytes)
        made.refs, made.on_host = 1, on_host
        if nbytes > 0:
            made.number = self._requests
            self._requests += 1
            self.log.append(("request", made.number, made.arena_bytes))
            self.live_bytes += round_up(made.arena_bytes)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return made

    def allocate_on_host(self, nbytes: int) -> Buffer:
        """What a GPU's kernel has in host memory, such as a list's scalar, and a CPU's in the arena."""
        return self.allocate(nbytes, on_host=self.device.is_gpu)

    def hold(self, buffer: Buffer) -> Buffer:
        """Count one more owner."""
        buffer.refs += 1
        return buffer

    def drop(self, buffer: Buffer) -> None:
        """Count one owner less, and release what has none."""
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

    def is_dying(self, buffer: Buffer) -> bool:
        """Whether only the running kernel holds it."""
        return buffer.refs == 1 and buffer.number is not None and self._kept is None

    def split(self, sizes: Iterable[int]) -> None:
        """Give the next requests chunks of their own sizes."""
        self.log.extend(("split", size, 0) for size in sizes)
        self.log.append(("part", 0, 0))

    def free_rest(self) -> None:
        """Release the separators of those chunks."""
        self.log.append(("rest", 0, 0))

    def copies_out(self, nbytes: int, handle: Buffer) -> None:
        """Start a copy to the host, which exists for as long as its handle."""
        self.out_bytes += self.weight * round_up(nbytes)
        handle.away_bytes = round_up(nbytes)
        self.away_bytes += handle.away_bytes
        self.most_away_bytes = max(self.most_away_bytes, self.away_bytes)

    def copies_in(self, nbytes: int) -> None:
        """Start a copy back."""
        self.in_bytes += self.weight * round_up(nbytes)

    # --- kernels ---------------------------------------------------------------------------------------------

    def begin_group(self, chunks: Chunks) -> None:
        """The kernels that follow are a group's, whose requests are served from its chunks."""
        self._served, self._chunks = chunks.served, []
        self._kept = [self.allocate(chunks.reserved)] if chunks.reserved else []

    def end_group(self) -> None:
        """The kernels of a group have all ended: what they have read and made is released."""
        kept, self._kept = self._kept or [], None
        for buffer in kept:
            self.drop(buffer)

    def run_kernel(self, node: Node, memory: KernelMemory, inputs: Sequence[Buffer]) -> list[Buffer]:
        """A kernel's outputs, each held once."""
        self.exact &= memory.exact
        forward = dict(memory.forward)
        temp_forward = dict(memory.temp_forward)
        outputs: dict[int, Buffer] = {}
        temps: list[Buffer | None] = []
        self._group_requests = 0

        def request(nbytes: int) -> Buffer:
            in_group = nbytes > 0 and self._kept is not None and node in self._served
            return self._serve(node, nbytes) if in_group else self.allocate(nbytes)

        def fresh(index: int) -> Buffer:
            nbytes = node.outputs[index].nbytes or 0
            return self.allocate(nbytes, on_host=True) if is_on_host(node, index, self.device) else request(nbytes)

        for event, amount in memory.events:
            if event == "out":
                taken = [inputs[c] for c in forward.get(amount, ()) if self.is_dying(inputs[c])]
                outputs[amount] = self.hold(taken[0]) if taken else fresh(amount)
            elif event == "temp":
                taken = [c for c in temp_forward.get(len(temps), ()) if self.is_dying(inputs[c])]
                temps.append(None if taken else request(amount))
            elif event == "free" and (temp := temps[amount]) is not None:
                self.drop(temp)
                temps[amount] = None
        for temp in reversed(temps):
            if temp is not None:
                self.drop(temp)
        for output, source in memory.alias:
            if output not in outputs:
                outputs[output] = self.hold(inputs[source])
        return [outputs[o] if o in outputs else self.hold(Buffer(None, 0)) for o in range(len(node.outputs))]

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
    """An element of a list that comes with an input."""
    made = Buffer(None, element.nbytes, source, element.value)
    made.parts = _given_parts(element.parts, source)
    made.endless = element.parts is None
    return made


def _given_parts(contents: Contents | None, source: int) -> list[Part | None]:
    return [
        None if e is None else Part(_given_element(e, source), e.nbytes, e.values, e.is_list, e.pool)
        for e in contents or ()
    ]
