"""The unoptimised step's peak: TensorFlow's executor, replayed without an order.

Follows tensorflow/core/common_runtime/executor.cc: a thread that ends a kernel runs the cheap ones that
became ready itself, in order, and one expensive one when there are no cheap ones; the other expensive ones go
to the pool. Which thread is first is a race, so the real peak varies from run to run: this is one likely run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from tfswap.analysis.dataflow import Dataflow
from tfswap.planner.schedule import RUN, Step
from tfswap.planner.simulate import NOTHING_KNOWN, Buffer, Replay, Resident

EXPENSIVE_S = 8e-6
"""Kernels measured below about this (5000 cycles, twice over) run inline."""


def simulate_baseline(
    flow: Dataflow, cost_s: Sequence[float], threads: int, *, resident: Resident = NOTHING_KNOWN
) -> int:
    """Peak bytes of one run of the unordered step on `threads` inter-op threads."""
    steps = [Step(RUN, i) for i in range(len(flow.nodes)) if flow.is_kernel[i]]
    replay = Replay(flow, steps, resident.arena(), resident)
    buffers: dict[int, Buffer] = {}
    for v, buffer in replay.persistent.items():
        buffer.refs = replay.refs[v]
        buffers[v] = buffer
    waiting = [len(deps) for deps in flow.own_deps]
    users: list[list[int]] = [[] for _ in flow.nodes]
    for i, deps in enumerate(flow.own_deps):
        for d in deps:
            users[d].append(i)
    pool: deque[int] = deque(i for i, count in enumerate(waiting) if not count)
    inline: list[deque[int]] = [deque() for _ in range(threads)]
    idle = list(range(threads))
    running: list[tuple[float, int, int, list[int]]] = []
    now, number = 0.0, 0
    while pool or running or any(inline):
        for thread in sorted(idle):
            queue = inline[thread] or pool
            if not queue:
                continue
            i = queue.popleft()
            temps = replay.begin(i, buffers) if flow.is_kernel[i] else []
            cost = cost_s[i] if flow.is_kernel[i] else 0.0
            number += 1
            heapq.heappush(running, (now + cost, number, thread, [i, *temps]))
            idle.remove(thread)
        now, _, thread, (i, *temps) = heapq.heappop(running)
        if flow.is_kernel[i]:
            replay.finish(i, buffers, temps)
        _release(flow, i, users, waiting, cost_s, inline[thread], pool)
        idle.append(thread)
    return replay.arena.peak_bytes


def _release(
    flow: Dataflow,
    i: int,
    users: list[list[int]],
    waiting: list[int],
    cost_s: Sequence[float],
    inline: deque[int],
    pool: deque[int],
) -> None:
    """Kernel `i` has ended: hand on what became ready, as ExecutorState::ScheduleReady does."""
    expensive = -1
    for user in users[i]:
        waiting[user] -= 1
        if waiting[user]:
            continue
        if not flow.is_kernel[user] or cost_s[user] < EXPENSIVE_S:
            inline.append(user)
            continue
        if expensive >= 0:
            pool.append(expensive)
        expensive = user
    if expensive >= 0:
        (pool if inline else inline).append(expensive)
