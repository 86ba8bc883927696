"""Loops around a step, for programs of tests: AutoGraph needs the sources of what it converts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STEPS = 4


def over_range(batches: Any) -> Callable[[Any], None]:
    import tensorflow as tf

    batch = next(iter(batches))

    def loop(step: Any) -> None:
        for _ in tf.range(STEPS):
            step(batch)

    return loop


def over_iterator(batches: Any) -> Callable[[Any], None]:
    import tensorflow as tf

    iterator = iter(batches)

    def loop(step: Any) -> None:
        for _ in tf.range(STEPS):
            step(next(iterator))

    return loop


def over_dataset(batches: Any) -> Callable[[Any], None]:
    def loop(step: Any) -> None:
        for batch in batches.take(STEPS):
            step(batch)

    return loop


LOOPS = (over_range, over_iterator, over_dataset)
