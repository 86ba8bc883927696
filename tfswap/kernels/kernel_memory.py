"""The memory of one TensorFlow kernel: which buffers it forwards, shares, requests from the allocator and frees.

The rules describe TensorFlow 2.21's CPU kernels. They come from the kernels' sources and are checked against the
allocator's log, request by request (benchmarks/kernel_memory.py). Sizes are requests, unrounded. Each family of kernels
has a module with its rules and the table of its ops (convolutions.py, pooling.py, reductions.py, ...).

Invariant: `kernel_memory` is a pure function of its arguments. Where its answer is `exact`, the allocator's log shows
the same requests in the same order. Where a kernel's requests depend on timing or on unknown input values, the answer
is an upper bound, and `exact` is False.

Eigen's scratch (packed blocks of contractions, thread-local buffers) is not in the arena. The CPU device's Eigen
allocator is null unless NUMA affinity is on (common_runtime/local_device.cc), so Eigen uses malloc. Only
`allocate_output`, `allocate_temp` and `forward_input*` reach the arena.

A GPU's kernels follow the same rules, without the temporaries of CPU kernels and never exact. `gpu_temporaries` has
those with other temporaries. Scratch of cuBLAS and CUB is not modelled.

Not handled: bodies of functions that control-flow ops call, which are simulated as graphs of their own; contents of
strings and variants, which are on the heap; cuDNN's workspaces, which autotuning picks at run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from tfswap.ir.custom_ops import TOGETHER
from tfswap.ir.graph import Node
from tfswap.ir.types import TensorType
from tfswap.kernels import (
    compiled_functions,
    contractions,
    convolutions,
    counting,
    elementwise,
    gpu_temporaries,
    images,
    normalisation,
    plain_outputs,
    pooling,
    python_functions,
    recurrent_cells,
    reductions,
    ring_collectives,
    sparse,
    tensor_lists,
    tfswap_ops,
    variables,
    views,
)
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.memory_rules import BINARY, CHOICE, FRESH, UNARY, Entry, KernelMemory
from tfswap.kernels.temporaries import Event, Facts

__all__ = ["Event", "KernelMemory", "kernel_memory", "node_memory"]

_RULES: dict[str, Entry] = {
    **views.RULES,
    **elementwise.RULES,
    **contractions.RULES,
    **convolutions.RULES,
    **pooling.RULES,
    **reductions.RULES,
    **normalisation.RULES,
    **recurrent_cells.RULES,
    **ring_collectives.RULES,
    **images.RULES,
    **sparse.RULES,
    **counting.RULES,
    **variables.RULES,
    **tensor_lists.RULES,
    **compiled_functions.RULES,
    **python_functions.RULES,
    **tfswap_ops.RULES,
    **plain_outputs.RULES,
}
"""Each family of ops has a table in its module. An op that is in none allocates its outputs, in order, and nothing
else, as most kernels do.
"""

_Member = tuple[str, str, Mapping[str, object], str, int, int]
"""One of the kernels of a `TOGETHER` node: name, op, attributes, device, number of inputs, number of outputs."""

_cache: dict[object, KernelMemory] = {}
_NO_VALUES: Mapping[int, tuple[int, ...]] = {}


def no_larger_inputs(op: str) -> tuple[int, ...]:
    """Positions of the inputs that are no larger than the op's result on any axis.

    These are the inputs of element-by-element ops, whose buffers the kernel may reuse for its result.
    """
    entry = _RULES.get(op)
    return (0,) if entry is UNARY else (0, 1) if entry is BINARY else ()


def chosen_inputs(op: str) -> tuple[int, ...]:
    """Positions of the inputs among which the op chooses, element by element. They are no larger than its result."""
    return (1, 2) if _RULES.get(op) is CHOICE else ()


def kernel_memory(
    op: str,
    attrs: Mapping[str, object],
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    device: DeviceModel,
    values: Mapping[int, tuple[int, ...]] = _NO_VALUES,
    temporary_bytes: int | None = None,
) -> KernelMemory:
    """The memory of one kernel. Memoised on all that its rule reads.

    Args:
        op: the op's type.
        attrs: its attributes as plain Python values.
        inputs: the types of its data inputs, in order.
        outputs: the types of its outputs, in order.
        device: where it runs.
        values: the flat integer values of constant inputs, by position. Optional: they decide where shapes do not
            (a transposition's permutation, a reduction's axes, a slice's start).
        temporary_bytes: as in `Measured`, for kernels whose temporaries no rule gives.
    """
    if op == TOGETHER:
        return _together(attrs, inputs, outputs, device, values)
    entry = _RULES.get(op, FRESH)
    if device.is_gpu:
        entry = gpu_temporaries.RULES.get(op, entry)
    key = (
        entry.rule,
        tuple(inputs),
        tuple(outputs),
        device,
        tuple([attrs.get(name) for name in entry.attrs]),
        tuple([values.get(position) for position in entry.values]),
        temporary_bytes,
    )
    found = _cache.get(key)
    if found is None:
        running = device.running((*inputs, *outputs))
        found = entry.rule(Facts(attrs, inputs, outputs, running, values, temporary_bytes))
        if device.is_gpu and found.events and op not in gpu_temporaries.COMMON:  # few GPU kernels have been measured
            found = found._replace(exact=False)
        _cache[key] = found
    return found


def node_memory(node: Node, device: DeviceModel, values: Mapping[int, tuple[int, ...]] = _NO_VALUES) -> KernelMemory:
    """The memory of a node's kernel. Arguments as of `kernel_memory`."""
    types = [source.outputs[index] for source, index in node.inputs]
    measured_bytes = node.measured.temporary_bytes
    return kernel_memory(node.op, node.attrs, types, node.outputs, device, values, measured_bytes)


def _together(
    attrs: Mapping[str, object],
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    device: DeviceModel,
    values: Mapping[int, tuple[int, ...]],
) -> KernelMemory:
    """The memory of kernels that run concurrently: the total is known, their order is not."""
    events: list[Event] = []
    usual: list[Event] = []
    forward: list[tuple[int, tuple[int, ...]]] = []
    exact, measured = True, False
    first_in = first_out = 0
    for _, op, own, _, reads, gives in cast("Sequence[_Member]", attrs["members"]):
        last_in, last_out = first_in + reads, first_out + gives
        known = {p - first_in: v for p, v in values.items() if first_in <= p < last_in}
        memory = kernel_memory(op, own, inputs[first_in:last_in], outputs[first_out:last_out], device, known)
        own_usual = memory.events if memory.exact else memory.usual or [e for e in memory.events if e[0] == "out"]
        for found, its in ((events, memory.events), (usual, own_usual)):
            found += [(kind, n + first_out if kind == "out" else n) for kind, n in its]
        forward += [(o + first_out, tuple(i + first_in for i in candidates)) for o, candidates in memory.forward]
        exact, measured = exact and memory.exact, measured or memory.usual is not None
        first_in, first_out = last_in, last_out
    requested = tuple(usual) if measured else None
    return KernelMemory(forward=tuple(forward), events=tuple(events), exact=exact, usual=requested)
