"""Layrub's two kinds of reuse (Jin et al. 2018), distinguished in a planned step.

Within a layer, the buffer of a gradient, or of a map without further readers, is forwarded to the gradient that
replaces it. Between layers, the memory of evicted tensors is used again. The value of each is the increase of the live
peak without it, chunks aside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.kernels.alignment import round_up
from tfswap.plan.schedule import KERNELS, Step
from tfswap.simulator.memory import simulate_memory


@dataclass(frozen=True)
class Reuse:
    """The savings of reuse, in bytes of the live peak.

    Attributes:
        within_layers_bytes: by buffers that are forwarded.
        forwarded_bytes: bytes of all forwarded buffers of a step.
        between_layers_bytes: by evicted tensors.
    """

    within_layers_bytes: int
    forwarded_bytes: int
    between_layers_bytes: int


def find_reuse(flow: Dataflow, steps: Sequence[Step]) -> Reuse:
    """The reuse in a plan's schedule."""
    planned = simulate_memory(flow, steps, live=True, detail=True)
    apart = dataclasses.replace(flow)
    apart.requests = [tuple(r._replace(candidates=()) for r in requests) for requests in flow.requests]
    stay = [step for step in steps if step.kind in KERNELS]
    taken = {made for made, _ in planned.forwarded}
    return Reuse(
        simulate_memory(apart, steps, live=True).peak_bytes - planned.peak_bytes,
        sum(round_up(flow.values[v].nbytes) for v in taken),
        simulate_memory(flow, stay, live=True).peak_bytes - planned.peak_bytes,
    )


def working_set_bytes(flow: Dataflow, kernel: int) -> int:
    """The least bytes that a kernel needs, without persistent ones: inputs, outputs and temporaries. Inputs whose
    buffers may be forwarded are counted once.
    """
    own = (v for v in (*flow.reads[kernel], *flow.consumes.get(kernel, ())) if flow.values[v].producer != PERSISTENT)
    sizes = {v: round_up(flow.values[v].nbytes) for v in own}
    held = most = sum(sizes.values())
    temporaries: list[int] = []
    for request in flow.requests[kernel]:
        if request.kind == "free":
            held -= temporaries[request.subject]
        elif request.kind == "release":
            held -= sizes.pop(request.subject, 0)
        elif request.kind in ("out", "temp"):
            over = next((v for v in request.candidates if v in sizes), None)
            nbytes = round_up(request.nbytes) if over is None else 0
            if over is not None:
                del sizes[over]
            if request.kind == "temp":
                temporaries.append(nbytes)
            held += nbytes
            most = max(most, held)
    return most


def largest_working_set(flow: Dataflow) -> tuple[int, int]:
    """The kernel with the largest working set, and its bytes."""
    kernels = [i for i, kernel in enumerate(flow.is_kernel) if kernel]
    largest = max(kernels, key=lambda i: working_set_bytes(flow, i), default=-1)
    return largest, working_set_bytes(flow, largest) if kernels else 0
