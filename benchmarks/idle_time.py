"""How long a call would take if nothing else ran on the machine, estimated on one where other programs do.

Linux says of each thread how long it has run and how long it has waited for a core (`/proc/self/task/*/schedstat`). In
an interval in which k threads could run on average, work of r core seconds takes r / min(k, cores) on an idle machine;
where no thread could run, the interval itself. On an idle machine that is the elapsed time. Where others kept both of
two cores busy, ten products of 1500 x 1500 took 0.29 to 0.54 s and were estimated at 0.15 to 0.19.

Not handled: caches and memory bandwidth that others take.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

INTERVAL_S = 0.008


class Took(NamedTuple):
    """Seconds of one call: elapsed, of all cores together, and estimated for an idle machine."""

    elapsed_s: float
    cpu_s: float
    idle_s: float


def timed(call: Callable[[], Any]) -> Took:
    """Time a call that leaves the interpreter's lock to others, as TensorFlow's do."""
    sampler = _Sampler()
    sampler.start()
    sampler.ready.wait()
    began = time.perf_counter()
    call()
    elapsed_s = time.perf_counter() - began
    sampler.ended.set()
    sampler.join()
    return Took(elapsed_s, sampler.cpu_s, sampler.idle_s)


class _Sampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ready, self.ended = threading.Event(), threading.Event()
        self.cpu_s = self.idle_s = 0.0

    def run(self) -> None:
        cores = len(os.sched_getaffinity(0))
        before, at = self._threads(), time.perf_counter()
        self.ready.set()
        last = False
        while not last:
            last = self.ended.wait(INTERVAL_S)
            now, then = self._threads(), time.perf_counter()
            ran_s, waited_s = (
                sum(times[i] - before.get(thread, (0, 0))[i] for thread, times in now.items()) * 1e-9 for i in (0, 1)
            )
            runnable = (ran_s + waited_s) / (then - at)
            self.cpu_s += ran_s
            self.idle_s += ran_s / min(runnable, cores) if runnable > 1e-6 else then - at
            before, at = now, then

    def _threads(self) -> dict[str, tuple[int, int]]:
        """Of each other thread of this process, the nanoseconds that it has run, and waited for a core."""
        found: dict[str, tuple[int, int]] = {}
        for thread in os.listdir("/proc/self/task"):
            if int(thread) != threading.get_native_id():
                try:
                    with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
                        ran, waited, _ = file.read().split()
                except OSError:
                    continue  # it has just ended
                found[thread] = int(ran), int(waited)
        return found
