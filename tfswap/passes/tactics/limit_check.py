"""Writes a saved step's requests and limit into its gate, which checks the limit where the step is loaded.

Requires: the graph has a gate. Ensures: the gate has the limit, the step's requests, and the arguments whose sizes
these depend on. Before each step it replays the requests in the present arena (csrc/core/limit_check.h). A step makes
the same requests in every arena; only addresses differ.

Not handled: steps of more requests than MOST_EVENTS. Their gate only checks the bytes in use before they begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tfswap.ir.custom_ops import GATE
from tfswap.ir.graph import Dims, Dtype, Graph, Node
from tfswap.ir.op_traits import is_feed
from tfswap.kernels.alignment import ALIGNMENT_BYTES, round_up
from tfswap.kernels.host_memory import HOST_INPUTS
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.simulator.requests import END_ABOVE, EXACT_CHUNKS, FREE_REST, SPLIT_ABOVE

MOST_EVENTS = 1 << 22
"""kMostEvents in csrc/core/arena_replay.h is more."""
COMPARED = 16
"""How many events are compared to find where a loop's iteration repeats the one before."""

# The lowest two bits of a varint, and what stands above them: RecordedRequests in csrc/core/arena_replay.h.
_REQUEST, _RELEASE, _CONTROL, _SPLIT = range(4)
_FREE_REST, _END_OF_SPLIT, _REPEAT, _SPLIT_ALL = range(4)

HOST_DTYPES = frozenset(("int32", "string"))
"""Arguments of a step on a GPU that are in host memory."""
HANDLE_DTYPES = frozenset(("resource", "variant"))


@graph_pass(
    requires="a gate",
    ensures="the gate checks before each step whether the limit is kept in the present arena",
)
def write_limit(graph: Graph, target: Target, limit_bytes: int, extremes: Sequence[Sequence[int]]) -> int:
    """Write the limit into the gate of `graph`, in place; returns 1.

    Args:
        extremes: the requests of one step, as of `Requests`.
    """
    gate = next(node for node in graph if node.op == GATE)
    read = [feed for feed in graph.feeds if _has_size(feed)]
    separate = target.device.host_is_separate
    on_host = tuple(i for i, feed in enumerate(read) if separate and feed.outputs[0].dtype in HOST_DTYPES)
    encoded = () if any(len(events) > MOST_EVENTS for events in extremes) else tuple(map(encode, extremes))
    gate.inputs = tuple(feed.out() for feed in read)
    gate.attrs = {
        **gate.attrs,
        "T": tuple(Dtype(feed.outputs[0].dtype) for feed in read),
        "limit": limit_bytes,
        "requests": encoded,
        "exact": bool(encoded),
        "sizes": tuple(Dims(feed.outputs[0].shape or ()) for feed in read),
        **({HOST_INPUTS: on_host} if on_host else {}),
    }
    return 1


@graph_pass(
    ensures="the gate, where there is one, has this number, by which it is asked what it found",
)
def number_gate(graph: Graph, _: Target, number: int) -> int:
    """Give the gate of `graph` a number in place of a file's, in place; returns the number of gates."""
    gates = [node for node in graph if node.op == GATE]
    for gate in gates:
        gate.attrs = {**gate.attrs, "gate": number}
    return len(gates)


def _has_size(feed: Node) -> bool:
    kind = feed.outputs[0]
    return is_feed(feed.op) and bool(kind.shape) and kind.nbytes is not None and kind.dtype not in HANDLE_DTYPES


def encode(events: Sequence[int]) -> bytes:
    """A step's requests as varints. Events that an iteration of a loop repeats from the one before are written once."""
    return b"".join(map(_varint, _repeated(list(_relative(events)))))


def _relative(events: Iterable[int]) -> Iterator[int]:
    """Events as numbers that are the same in each iteration of a loop: releases count back from the latest request."""
    requests = 0
    for event in events:
        if event < 0:
            yield (requests + event) << 2 | _RELEASE  # of the request of number -1 - event
        elif event == FREE_REST:
            yield _FREE_REST << 2 | _CONTROL
        elif event < SPLIT_ABOVE:
            requests += 1
            yield round_up(event) // ALIGNMENT_BYTES << 2 | _REQUEST
        elif event == SPLIT_ABOVE:
            yield _END_OF_SPLIT << 2 | _CONTROL
        elif event == EXACT_CHUNKS:
            yield _SPLIT_ALL << 2 | _CONTROL
        else:
            at_end = event >= END_ABOVE
            nbytes = event - (END_ABOVE if at_end else SPLIT_ABOVE)
            yield (round_up(nbytes) // ALIGNMENT_BYTES << 1 | at_end) << 2 | _SPLIT


def _repeated(events: list[int]) -> Iterator[int]:
    latest: dict[tuple[int, ...], int] = {}  # by the events that follow a place, that place
    i = 0
    while i < len(events):
        key = tuple(events[i : i + COMPARED])
        before = latest.get(key)
        latest[key] = i
        times, period = 0, 0 if before is None else i - before
        # The last one first: it differs as a rule where there is no repetition.
        if before is not None and i + period <= len(events) and events[i + period - 1] == events[i - 1]:
            iteration = events[before:i]
            while events[i + times * period : i + (times + 1) * period] == iteration:
                times += 1
        if times * period > COMPARED:
            yield from (_REPEAT << 2 | _CONTROL, period, times)
            i += times * period
        else:
            yield events[i]
            i += 1


def _varint(number: int) -> bytes:
    made = bytearray()
    while number >= 0x80:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)
