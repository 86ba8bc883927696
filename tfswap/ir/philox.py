"""Ops that draw random numbers from a key and a counter: where a part of their output begins.

TensorFlow's generator, Philox (random_op_cpu.h, random_op_gpu.h, FillPhiloxRandom), makes four words of 32 bits from a
counter. Kernels give each group of elements counters of its own, so that the group does not depend on the elements
before it: the output from an element on is what the op draws from a counter that is further on.

Not handled: ops that draw integers, and those that take a seed instead of a key (TensorFlow 1).
"""

from __future__ import annotations

from typing import Final

KEY_INPUT: Final = 1
COUNTER_INPUT: Final = 2
ALGORITHM_INPUT: Final = 3
ALGORITHMS: Final = frozenset({1, 3})
"""Philox, and what a device has by default: on CPUs and GPUs Philox too (rng_alg.h)."""

WORDS: Final = 4
"""Of 32 bits, for each counter."""
RESERVED_SAMPLES: Final = 256
"""Words that a truncated distribution has for each element, as it draws again what is too far off."""

_ONE_DRAW = frozenset({"StatelessRandomUniformV2", "StatelessRandomNormalV2"})
_MANY_DRAWS = frozenset({"StatelessTruncatedNormalV2"})


def draws_from_counter(op: str) -> bool:
    """Whether the op's inputs are a shape, a key, a counter and an algorithm, and `counters_before` knows it."""
    return op in _ONE_DRAW or op in _MANY_DRAWS


def counters_before(op: str, element_bytes: int, elements: int) -> int:
    """How many counters the elements before a part of the op's output use.

    Args:
        element_bytes: 2, 4 or 8. An element of eight bytes takes two words, and others one.
        elements: a multiple of `WORDS`.
    """
    if op in _MANY_DRAWS:
        return elements * RESERVED_SAMPLES // WORDS
    return elements // (WORDS // max(1, element_bytes // 4))


def advanced(counter: tuple[int, int], by: int) -> tuple[int, int]:
    """A counter of 128 bits, its lower 64 first, that many counters further on (philox_random.h, Skip)."""
    low = counter[0] + by
    return low % 2**64, (counter[1] + (low >> 64)) % 2**64
