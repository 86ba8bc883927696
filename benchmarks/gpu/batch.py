"""The largest batch of a net in so much of the device's memory, as TensorFlow runs it and with tfswap.

Batches are tried in one process, which has that much of the device. The next batch to try is where a line through what
the last two needed comes to the memory there is: their peaks, or, where tfswap refuses one, the smallest limit that it
names.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from gpu.nets import blocks
from gpu.process import MIB, SMALL, Steps, machine, prepare

MEMORY_MIB = 1024 if SMALL else 8192
TRIES = 8
CLOSE = 0.04
"""The search ends when the largest batch that ran and the smallest that did not are as near as this."""
STEPS, TIMED_STEPS = 2, 5
PLANNED = "tfswap"


def _cases() -> dict[str, tuple[Callable[[int], Any], int]]:
    """By net, its step and arguments for a batch, and the batch that is tried first."""
    from papers.harness import nets

    resnet = functools.partial(nets.application, "ResNet50", size=64 if SMALL else 224)
    sizes = {"width": 64, "layers": 2} if SMALL else {"layers": 12, "width": 768, "heads": 12, "length": 512}
    return {
        "resnet50": (lambda batch: resnet(batch=batch), 8 if SMALL else 64),
        "blocks": (lambda batch: blocks(**sizes, batch=batch), 8),
    }


NETS = ("resnet50", "blocks")
HOWS = ("default", PLANNED)


class Tried(NamedTuple):
    """One batch.

    Attributes:
        batch: examples.
        needs_bytes: the peak; of a batch that tfswap refuses the smallest limit; None where memory ran out.
        example_s: seconds of a step over the batch; None where it did not run.
    """

    batch: int
    needs_bytes: int | None
    example_s: float | None = None


def largest(name: str, how: str) -> dict[str, Any]:
    """The largest batch of a net that runs, with its time for an example, and all that were tried."""
    with machine(fcntl.LOCK_EX):
        where = prepare(MEMORY_MIB, deterministic=False)
        if where != "GPU:0":
            return {"not_run": "there is no GPU"}
        build, batch = _cases()[name]
        tried: list[Tried] = []
        for _ in range(TRIES):
            tried.append(_try(build, batch, how, where))
            gc.collect()
            following = _next(tried)
            if following is None:
                break
            batch = following
    best = max((one for one in tried if one.example_s is not None), default=None)
    return {
        "memory_bytes": MEMORY_MIB * MIB,
        "batch": best.batch if best else 0,
        "example_s": best.example_s if best else None,
        "tried": [one._asdict() for one in tried],
    }


def _try(build: Callable[[int], Any], batch: int, how: str, where: str) -> Tried:
    import tensorflow as tf

    import tfswap

    try:
        step, arguments = build(batch)
        function = tf.function(step)
        if how == PLANNED:
            function = tfswap.optimize(function, memory_limit=MEMORY_MIB * MIB)
        steps = Steps(where, lambda: function(*arguments))
        steps.run(STEPS + TIMED_STEPS)
    except tfswap.InfeasibleMemoryLimit as error:
        return Tried(batch, error.floor_bytes)
    except tf.errors.ResourceExhaustedError:
        return Tried(batch, None)
    return Tried(batch, max(steps.peaks), statistics.median(steps.seconds[STEPS:]) / batch)


def _next(tried: list[Tried]) -> int | None:
    """The batch to try next; None where the search is over."""
    low = max((one.batch for one in tried if one.example_s is not None), default=0)
    high = min((one.batch for one in tried if one.example_s is None), default=None)
    if high is not None and high - low <= max(1, int(CLOSE * low)):
        return None
    known = [(one.batch, one.needs_bytes) for one in tried if one.needs_bytes is not None]
    guess = 2 * low
    if len(known) >= 2:
        (x, y), (u, v) = known[-2:]
        if u != x and v != y:
            guess = int(x + (MEMORY_MIB * MIB - y) * (u - x) / (v - y))
    between = (low + high) // 2 if high is not None else guess
    if not low < guess < (high or guess + 1):
        guess = between
    return max(guess, low + 1)
