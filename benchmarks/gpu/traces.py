"""What a profile (an XSpace of tf.profiler) says of a GPU's streams: when kernels ran, and when copies did.

cupti_collector.cc writes a plane "/device:GPU:n" with a line "Stream #..." per stream, and an event per kernel and per
copy on it. A copy is named after its direction (cupti_tracer.cc, GetTraceEventTypeName), a kernel after its function.
Other lines of the plane are made of the streams' events again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

Span = tuple[float, float]
"""When something began and ended, in seconds."""

OUT, IN = "MemcpyD2H", "MemcpyH2D"
OTHERS = ("Memcpy", "Memset")


class Streams(NamedTuple):
    """What ran on the GPUs' streams, in no order."""

    kernels: list[Span]
    out: list[Span]
    back: list[Span]


def read_profile(folder: str) -> Streams:
    """The streams of the profile that tf.profiler wrote under `folder`."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    for path in Path(folder).rglob("*.xplane.pb"):
        space.MergeFromString(path.read_bytes())
    return streams_of(space)


def streams_of(space: Any) -> Streams:
    found = Streams([], [], [])
    for plane in space.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        names = {i: metadata.name for i, metadata in plane.event_metadata.items()}
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                name = names[event.metadata_id]
                began_s = line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12
                span = (began_s, began_s + event.duration_ps * 1e-12)
                if name == OUT:
                    found.out.append(span)
                elif name == IN:
                    found.back.append(span)
                elif not name.startswith(OTHERS):
                    found.kernels.append(span)
    return found


def union(spans: Iterable[Span]) -> list[Span]:
    """The same times, as spans that do not meet, in order."""
    merged: list[Span] = []
    for began, ended in sorted(spans):
        if merged and began <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], ended)
        else:
            merged.append((began, ended))
    return merged


def total_s(spans: Iterable[Span]) -> float:
    """Seconds in which any of `spans` lasts."""
    return sum(ended - began for began, ended in union(spans))


def overlap_s(some: Iterable[Span], others: Iterable[Span]) -> float:
    """Seconds in which one of `some` and one of `others` overlap."""
    some, others = union(some), union(others)
    both, at = 0.0, 0
    for began, ended in some:
        while at < len(others) and others[at][1] <= began:
            at += 1
        for other_began, other_ended in others[at:]:
            if other_began >= ended:
                break
            both += min(ended, other_ended) - max(began, other_began)
    return both
