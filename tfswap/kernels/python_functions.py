"""Calls of Python functions that run TensorFlow's ops eagerly (`tf.py_function`), and their gradients.

What such a function makes is not known before it runs. Its call has room for once more what it is given and what it
returns, as the gradient of a mean needs, whose last operation is not in place. A function that makes more passes the
plan in its first step, and is planned again with the room that was measured (runtime/arena_watch.py).
"""

from __future__ import annotations

from tfswap.kernels.events import temp
from tfswap.kernels.memory_rules import Entry, KernelMemory, outs, with_events
from tfswap.kernels.temporaries import Facts


def called(facts: Facts) -> KernelMemory:
    """Room for the function's own tensors, then its results."""
    own = [temp(kind.nbytes) for kind in (*facts.inputs, *facts.outputs) if kind.nbytes]
    return with_events((*own, *outs(len(facts.outputs))), exact=False)


RULES: dict[str, Entry] = {"EagerPyFunc": Entry(called)}
