"""The largest batch of a net in so much of the device's memory, as TensorFlow runs it and with tfswap.

Each batch is tried in a process of its own, since memory of an earlier one may stay allocated. The next one to try is
where a line through what two batches needed comes to the memory there is: their peaks as TensorFlow runs them; with
tfswap, whose peaks follow the limit, the smallest limits that it names where it refuses.
"""

from __future__ import annotations

import fcntl
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from gpu.nets import DEFAULT, PEERS_NET, blocks
from gpu.process import MIB, SMALL, Steps, left_s, machine, prepare

MEMORY_MIB = 384 if SMALL else 8192
TRIES = 8
CLOSE = 0.04
"""The search ends when the largest batch that ran and the smallest that did not are as near as this."""
STEPS, TIMED_STEPS = (1, 2) if SMALL else (2, 5)
PLANNED = "tfswap"
NETS = ("resnet50", PEERS_NET)
HOWS = (DEFAULT, PLANNED)
FIRST = {DEFAULT: 1, PLANNED: 3}
"""The batch that is tried first, as a multiple of one that runs as it is."""


def _cases() -> dict[str, tuple[Callable[[int], Any], int]]:
    """By net, its step and arguments for a batch, and a batch."""
    from papers.harness import nets

    resnet = functools.partial(nets.application, "ResNet50", size=32 if SMALL else 224)
    sizes = {"width": 64, "layers": 2} if SMALL else {"layers": 12, "width": 768, "heads": 12, "length": 512}
    return {
        "resnet50": (lambda batch: resnet(batch=batch), 8 if SMALL else 64),
        PEERS_NET: (lambda batch: blocks(**sizes, batch=batch), 64 if SMALL else 8),
    }


class Tried(NamedTuple):
    """One batch.

    Attributes:
        batch: examples.
        needs_bytes: what it needs, as far as that is known: the unoptimised peak, or the smallest limit.
        example_s: seconds of a step over the batch; None where it did not run.
    """

    batch: int
    needs_bytes: int | None
    example_s: float | None = None


def largest(name: str, how: str, only: str = "") -> dict[str, Any]:
    """The largest batch of a net that runs, with its time for an example, and all that were tried; or one try."""
    build, batch = _cases()[name]
    if only:
        return _try(build, int(only), how)._asdict()
    following: int | None = FIRST[how] * batch
    tried: list[Tried] = []
    longest_s = 0.0
    with machine(fcntl.LOCK_EX):
        while following is not None and len(tried) < TRIES and left_s() > 2 * longest_s:
            began = time.monotonic()
            command = [sys.executable, sys.argv[0], "--child", "batch", name, how, str(following)]
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode:
                raise RuntimeError(f"batch {following} ended with {ran.returncode}: {ran.stderr[-2000:]}")
            tried.append(Tried(**json.loads(ran.stdout.splitlines()[-1])))
            longest_s = max(longest_s, time.monotonic() - began)
            following = next_batch(tried, MEMORY_MIB * MIB)
    best = max((one for one in tried if one.example_s is not None), default=None)
    return {
        "memory_bytes": MEMORY_MIB * MIB,
        "batch": best.batch if best else 0,
        "example_s": best.example_s if best else None,
        "ended": following is None,
        "tried": [one._asdict() for one in tried],
    }


def _try(build: Callable[[int], Any], batch: int, how: str) -> Tried:
    import tensorflow as tf

    import tfswap

    prepare(MEMORY_MIB, deterministic=False)
    try:
        step, arguments = build(batch)
        function = tf.function(step)
        if how == PLANNED:
            function = tfswap.optimize(function, memory_limit=MEMORY_MIB * MIB)
        steps = Steps(lambda: function(*arguments))
        steps.run(STEPS + TIMED_STEPS)
    except tfswap.InfeasibleMemoryLimit as error:
        return Tried(batch, error.floor_bytes)
    except tf.errors.ResourceExhaustedError:
        return Tried(batch, None)
    needs = None if how == PLANNED else max(steps.peaks)
    return Tried(batch, needs, statistics.median(steps.seconds[STEPS:]) / batch)


def next_batch(tried: list[Tried], memory_bytes: int) -> int | None:
    """The batch to try next; None where the search is over."""
    low = max((one.batch for one in tried if one.example_s is not None), default=0)
    high = min((one.batch for one in tried if one.example_s is None), default=None)
    if high is not None and high - low <= max(1, int(CLOSE * low)):
        return None
    aim_bytes = (1 - CLOSE / 4) * memory_bytes  # just below what there is, since one that runs is wanted
    known = [(one.batch, one.needs_bytes) for one in tried if one.needs_bytes is not None]
    guess = 0
    if len(known) > 1 and known[-2][1] != known[-1][1]:
        (x, y), (u, v) = known[-2:]
        guess = int(x + (aim_bytes - y) * (u - x) / (v - y))
    elif len(known) == 1:
        guess = int(known[-1][0] * aim_bytes / known[-1][1])
    if high is None:
        return guess if guess > low else 2 * low
    return guess if low < guess < high else (low + high) // 2
