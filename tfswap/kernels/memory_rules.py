"""The rules that kernels follow with the allocator: each makes a `KernelMemory` from what is known of a node.

A rule is named after what the kernel does, and names the source file of TensorFlow 2.21 behind it; sizes
of temporaries are in temporaries.py. Which op follows which rule is in kernel_memory.py, the module
that others use.

Invariant: rules are pure functions of `Facts`. Sizes are requests, unrounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfswap.ir.custom_ops import KERNEL, TEMPORARY_BYTES
from tfswap.ir.types import HALVES, TensorType
from tfswap.kernels import temporaries
from tfswap.kernels.alignment import round_up
from tfswap.kernels.temporaries import Event, Events, Facts, Measured


class KernelMemory(NamedTuple):
    """One kernel's dealings with the allocator.

    Attributes:
        alias: (output, input) pairs: the output keeps the input's buffer alive, always; nothing is
            allocated for it unless `events` also has that output. An output may hold several inputs
            (a tensor list).
        forward: (output, candidates): the output takes over the buffer of the first candidate that nobody
            else holds when the kernel runs, and asks for a new one (its "out" event) only if there is none.
            Candidates already have the output's dtype and number of elements.
        events: what the kernel asks for, in order: ("out", index) allocates an output, ("temp", bytes) a
            temporary, ("free", k) releases the k-th temporary. Temporaries left at the end are released when
            the kernel returns, in reverse order. Outputs of zero bytes never reach the allocator.
        retains: inputs whose buffers live on after the step's own references end: a variable adopts them
            and drops the buffer that it had.
        updates: resource inputs whose variable is written in place; if a read of it is still held, or if
            its copy-on-read mode is on (ops.turns_on_copy_on_read), the kernel first allocates a copy of
            the variable's size, and drops the old buffer, which a held read keeps.
        exact: False where the above is an upper bound.
        usual: of such a bound, what was asked for where it was measured; None where that is not known.
        temp_forward: (k, candidates), as `forward`, for the k-th temporary of `events`: it takes over the
            buffer of a dying input, if there is one, and its "temp" event then asks for nothing.
        held_bytes: what the kernel holds from when it is made; its output lies there, and asks for nothing.
        writes: whether it writes over what it aliases: it asks for nothing, and is no view all the same.
    """

    alias: tuple[tuple[int, int], ...] = ()
    forward: tuple[tuple[int, tuple[int, ...]], ...] = ()
    events: tuple[Event, ...] = ()
    retains: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    exact: bool = True
    temp_forward: tuple[tuple[int, tuple[int, ...]], ...] = ()
    held_bytes: int = 0
    writes: bool = False
    usual: tuple[Event, ...] | None = None


Rule = Callable[[Facts], KernelMemory]


# --- building blocks ---------------------------------------------------------------------------------


def outs(count: int) -> tuple[Event, ...]:
    return tuple(("out", index) for index in range(count))


def _same_size(output: TensorType, candidate: TensorType) -> bool:
    """What OpKernelContext::forward_input requires: dtype and element count; the shape may differ."""
    if output.dtype != candidate.dtype:
        return False
    if output.shape == candidate.shape:
        return output.shape is not None and None not in output.shape
    count = output.num_elements
    return count is not None and count == candidate.num_elements


def candidates(facts: Facts, output: int, inputs: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    kind = facts.outputs[output]
    fitting = tuple(i for i in inputs if i < len(facts.inputs) and _same_size(kind, facts.inputs[i]))
    return ((output, fitting),) if fitting else ()


def with_events(
    events: Sequence[Event],
    *,
    alias: tuple[tuple[int, int], ...] = (),
    forward: tuple[tuple[int, tuple[int, ...]], ...] = (),
    exact: bool = True,
    usual: Sequence[Event] | None = None,
) -> KernelMemory:
    measured = None if usual is None else tuple(usual)
    return KernelMemory(alias, forward, tuple(events), exact=exact, usual=measured)


def fresh(facts: Facts) -> KernelMemory:
    """Every output allocated, in order; nothing else. Also the default for unknown ops."""
    return KernelMemory(events=outs(len(facts.outputs)))


XLA_POINTER_BYTES = 8


def compiled(facts: Facts) -> KernelMemory:
    """What XLA makes of a function: its results and a table of them, the largest first, then all its temporaries in one
    buffer, of the size that was measured (buffer_assignment.cc, cpu_executable.cc; seen in the allocator's log).
    """
    temporary = facts.attrs.get(TEMPORARY_BYTES)
    if not isinstance(temporary, int):  # another function
        return fresh(facts)
    count = len(facts.outputs)
    buffers: list[tuple[int, Event]] = [(kind.nbytes or 0, ("out", i)) for i, kind in enumerate(facts.outputs)]
    if count > 1:
        table = XLA_POINTER_BYTES * count
        buffers.append((table, ("temp", table)))
    buffers.sort(key=lambda buffer: -buffer[0])
    return with_events((*(event for _, event in buffers), ("temp", temporary)), exact=False)


def alias_first(facts: Facts) -> KernelMemory:
    return KernelMemory(alias=((0, 0),))


def writes_first(facts: Facts) -> KernelMemory:
    return KernelMemory(alias=((0, 0),), writes=True)


def bitcast(facts: Facts) -> KernelMemory:
    """bitcast_op.cc makes an empty tensor first, which asks for one element."""
    return with_events((("temp", 4),), alias=((0, 0),))


def alias_each(facts: Facts) -> KernelMemory:
    return KernelMemory(alias=tuple((i, i) for i in range(len(facts.outputs))))


def nothing(facts: Facts) -> KernelMemory:
    """Outputs, if any, are kept by the kernel or by the runtime and cost nothing per step."""
    return KernelMemory()


def forwarding(*inputs: int) -> Rule:
    """`forward_input_or_allocate_output(inputs, 0)`."""

    def rule(facts: Facts) -> KernelMemory:
        return KernelMemory(forward=candidates(facts, 0, inputs), events=(("out", 0),))

    return rule


def events_rule(compute: Callable[[Facts], Events | Measured], forward: tuple[int, ...] = ()) -> Rule:
    """A rule from a function of `workspace` that gives (events, exact), or these and what is usual."""

    def rule(facts: Facts) -> KernelMemory:
        events, exact, *measured = compute(facts)
        forwarded = candidates(facts, 0, forward) if forward else ()
        return with_events(events, forward=forwarded, exact=exact, usual=measured[0] if measured else None)

    return rule


def fused(compute: Callable[[Facts], Events | Measured]) -> Rule:
    """A rule of `events_rule` for a kernel with more in it: oneDNN's add into the buffer of what they add, where they
    may (mkl_conv_ops.cc, mkl_matmul_op_fused.cc; kInputIndex_Add).
    """
    plain, adding = events_rule(compute), events_rule(compute, forward=(3,))

    def rule(facts: Facts) -> KernelMemory:
        inside = facts.attrs.get("fused_ops")
        adds = facts.device.onednn and isinstance(inside, tuple) and b"Add" in inside
        return (adding if adds else plain)(facts)

    return rule


def view_or_fresh(decide: Callable[[Facts], tuple[bool, bool]], source: int = 0) -> Rule:
    """A kernel that hands its input on where it can (decide gives (is a view, exact)), else copies; tfswap's own kernel
    always copies (ops/csrc/core/copied_view_ops.cc).
    """

    def rule(facts: Facts) -> KernelMemory:
        if KERNEL in facts.attrs:
            return fresh(facts)
        view, exact = decide(facts)
        count = len(facts.outputs)
        if view:
            return KernelMemory(alias=tuple((i, source) for i in range(count)), exact=exact)
        return KernelMemory(events=outs(count), exact=exact)

    return rule


def add_n(facts: Facts) -> KernelMemory:
    """aggregate_ops.h: one input is handed on; else the first input that can be reused is the sum. tfswap's own kernel
    does the same, but on a GPU, and for 16-bit floats, it reuses no input except the first two
    (ops/csrc/core/sum_ops.cc).
    """
    if len(facts.inputs) == 1:
        return KernelMemory(alias=((0, 0),))
    first_two = KERNEL in facts.attrs and (facts.device.kind == "gpu" or facts.outputs[0].dtype in HALVES)
    reusable = facts.inputs[:2] if first_two else facts.inputs
    return KernelMemory(forward=candidates(facts, 0, range(len(reusable))), events=(("out", 0),))


def reduction(facts: Facts) -> KernelMemory:
    """reduction_ops_common.h: nothing to reduce hands the input on; four or more runs transpose it first."""
    if facts.inputs[0].num_elements == facts.outputs[0].num_elements != None:  # noqa: E711 (a chain)
        return KernelMemory(alias=((0, 0),))
    events, exact = temporaries.reduction(facts)
    return with_events(events, exact=exact)


def pad(facts: Facts) -> KernelMemory:
    """pad_op.cc: no padding hands the input on; else the paddings are copied as they are checked."""
    if facts.inputs[0].shape == facts.outputs[0].shape is not None:
        return KernelMemory(alias=((0, 0),))
    rank = len(facts.outputs[0].shape or ())
    paddings = facts.inputs[1]
    return with_events((("temp", 2 * rank * (8 if paddings.dtype == "int64" else 4)), ("out", 0)))


def assign(facts: Facts) -> KernelMemory:
    """resource_variable_ops.cc: the variable adopts the value's buffer and drops its own."""
    return KernelMemory(retains=(1,))


def update(*resources: int) -> Rule:
    def rule(facts: Facts) -> KernelMemory:
        return KernelMemory(updates=resources)

    return rule


def hand_over(facts: Facts) -> KernelMemory:
    """Slots that the kernel has for its results, each a chunk of its own."""
    slots, nbytes = facts.attrs.get("slots"), facts.outputs[0].nbytes
    if not isinstance(slots, int) or nbytes is None:
        return fresh(facts)
    return KernelMemory(held_bytes=slots * round_up(nbytes))


def outside(facts: Facts) -> KernelMemory:
    """What the caller has of the arena between two calls: tensors of its own, and the gradients that it gives."""
    room = facts.attrs.get("room")
    count = room if isinstance(room, int) else 0
    own = tuple(("temp", kind.nbytes or 0) for kind in facts.inputs for _ in range(count))
    return KernelMemory(events=(*own, *outs(len(facts.outputs))))


def pack(facts: Facts) -> KernelMemory:
    """pack_op.cc: one value is only reshaped."""
    return KernelMemory(alias=((0, 0),)) if len(facts.inputs) == 1 else fresh(facts)


def cross_entropy(facts: Facts) -> KernelMemory:
    """The gradient (output 1) may be written over the logits (input 0)."""
    events, exact = temporaries.softmax_cross_entropy(facts)
    return with_events(events, forward=candidates(facts, 1, (0,)), exact=exact)


def fused_batch_norm(facts: Facts) -> KernelMemory:
    """fused_batch_norm_op.cc: the batch's mean and variance may be written over the running ones."""
    if facts.device.onednn:
        row = facts.outputs[1].nbytes or 0
        return with_events((*outs(len(facts.outputs)), ("temp", row), ("temp", row)), exact=False)
    forward = (*candidates(facts, 1, (3,)), *candidates(facts, 2, (4,)))
    return KernelMemory(forward=forward, events=outs(len(facts.outputs)))


def linear_algebra(facts: Facts) -> KernelMemory:
    """linalg_ops_common.cc: each output takes over the first input of its size that none before it has taken."""
    inputs = range(len(facts.inputs))
    forward = tuple(pair for output in range(len(facts.outputs)) for pair in candidates(facts, output, inputs))
    return KernelMemory(forward=forward, events=outs(len(facts.outputs)))


def in_order(*first: int) -> Rule:
    """Every output allocated, these before the others; nothing else."""

    def rule(facts: Facts) -> KernelMemory:
        rest = [o for o in range(len(facts.outputs)) if o not in first]
        return KernelMemory(events=tuple(("out", o) for o in (*first, *rest)))

    return rule


def sparse_fill(facts: Facts) -> KernelMemory:
    """fill_empty_rows_functor.h: what has no empty row, in order, is passed on; else it is made anew."""
    events = (("out", 2), ("out", 3), ("out", 0), ("out", 1))
    return KernelMemory(events=events, exact=KERNEL in facts.attrs)  # tfswap's own kernel passes nothing on


def sparse_add(facts: Facts) -> KernelMemory:
    """sparse_add_op.cc: the shape of the first is passed on."""
    return KernelMemory(alias=((2, 2),), events=outs(2))


def max_pool_grad(facts: Facts) -> KernelMemory:
    """maxpooling_op.cc: pools again into the buffer of the pooled input, and writes over the image.

    oneDNN's (mkl_maxpooling_op.cc), which takes its place where the pooled tensor comes straight from its MaxPool, does
    not write over the image.
    """
    events, exact = temporaries.max_pool_grad(facts)
    if facts.device.onednn:
        return with_events(events, exact=exact)
    memory = with_events(events, forward=candidates(facts, 0, (0,)), exact=exact)
    return memory._replace(temp_forward=((0, (1,)),) if events[0][0] == "temp" else ())


def gather_nd(facts: Facts) -> KernelMemory:
    """gather_nd_op_cpu_impl.h: a number to report a bad index by."""
    return with_events((("out", 0), ("temp", 4)))


def encode_sparse(facts: Facts) -> KernelMemory:
    """ops/csrc/codecs/sparse_ops.cc: the variant, and what it holds, lie outside of the arena."""
    return KernelMemory(events=(("out", 0),))


VARIANT_BYTES = 64
"""A scalar that holds a list or another object: what is in it lives on the heap."""
