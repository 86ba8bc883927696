"""`KernelMemory`, and the rules that kernels of several families follow. A rule makes a `KernelMemory` from `Facts`.

A rule is named after what the kernel does. The rules of one family, the sizes of its temporaries and its table of ops
are in a module of the family (convolutions.py, pooling.py, ...). `kernel_memory.kernel_memory` joins the tables.

Invariant: rules are pure functions of `Facts`. Sizes are requests, unrounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfswap.ir.types import TensorType
from tfswap.kernels.temporaries import Event, Events, Facts, Measured


class KernelMemory(NamedTuple):
    """What one kernel requests from the allocator, shares and frees.

    Attributes:
        alias: (output, input) pairs. The output always keeps the input's buffer alive. Nothing is allocated for it
            unless `events` has that output as well. An output may hold several inputs (a tensor list).
        forward: (output, candidates) pairs. The output's buffer is that of the first candidate with no other holder
            when the kernel runs (buffer forwarding). Its "out" event is a request only where there is none. Candidates
            have the output's dtype and number of elements.
        events: the requests in order. ("out", index) allocates an output, ("temp", bytes) a temporary, ("free", k)
            frees the k-th temporary. Temporaries that are left are freed when the kernel returns, in reverse order.
            Outputs of zero bytes never reach the allocator.
        retains: inputs whose buffers outlive the step's references: a variable adopts them and frees its own buffer.
        updates: resource inputs whose variable is updated in place. If a read of it is still held, or its copy-on-read
            mode is on (`op_traits.turns_on_copy_on_read`), the kernel first allocates a copy of the variable's size,
            and releases the old buffer, which a held read keeps.
        exact: False where the above is an upper bound.
        usual: the events that were measured, where `events` is an upper bound. None where nothing was measured.
        temp_forward: (k, candidates) pairs: as `forward`, for the k-th temporary of `events`.
        held_bytes: bytes that the kernel holds from its construction. They contain its output, which is no request.
        writes: whether the kernel writes over the aliased input. The output is then no view, but is no request either.
        process_bytes: the most bytes that the kernel holds from the process's CPU allocator at one time, whichever
            allocator its device has. They are a part of its temporaries.
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
    process_bytes: int = 0


Rule = Callable[[Facts], KernelMemory]


class Entry(NamedTuple):
    """An op's line in a table: its rule, and all that the rule reads of a node besides types and the device.

    Attributes:
        attrs: the attributes that the rule reads.
        values: the positions of inputs whose values the rule reads, where they are known.
    """

    rule: Rule
    attrs: tuple[str, ...] = ()
    values: tuple[int, ...] = ()


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


def alias_first(facts: Facts) -> KernelMemory:
    return KernelMemory(alias=((0, 0),))


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


def binary(facts: Facts) -> KernelMemory:
    """cwise_ops_common.h, BinaryOp: a scalar is not forwarded to a result of other dimensions, even of one element."""
    result = facts.outputs[0].shape
    forwarded = [i for i, kind in enumerate(facts.inputs) if kind.shape or not result]
    return KernelMemory(forward=candidates(facts, 0, forwarded), events=(("out", 0),))


def events_rule(compute: Callable[[Facts], Events | Measured], forward: tuple[int, ...] = ()) -> Rule:
    """A rule from a function that gives (events, exact), or these and the events that were measured."""

    def rule(facts: Facts) -> KernelMemory:
        events, exact, *measured = compute(facts)
        forwarded = candidates(facts, 0, forward) if forward else ()
        return with_events(events, forward=forwarded, exact=exact, usual=measured[0] if measured else None)

    return rule


def fused(compute: Callable[[Facts], Events | Measured]) -> Rule:
    """A rule of `events_rule` for a fused kernel. oneDNN's kernels add into the buffer of the added input where it can
    be forwarded (mkl_conv_ops.cc, mkl_matmul_op_fused.cc; kInputIndex_Add).
    """
    plain, adding = events_rule(compute), events_rule(compute, forward=(3,))

    def rule(facts: Facts) -> KernelMemory:
        inside = facts.attrs.get("fused_ops")
        adds = facts.device.onednn and isinstance(inside, tuple) and b"Add" in inside
        return (adding if adds else plain)(facts)

    return rule


def in_order(*first: int) -> Rule:
    """Every output is allocated, the ones in `first` before the others; nothing else."""

    def rule(facts: Facts) -> KernelMemory:
        rest = [o for o in range(len(facts.outputs)) if o not in first]
        return KernelMemory(events=tuple(("out", o) for o in (*first, *rest)))

    return rule


VARIANT_BYTES = 64
"""A scalar with a list or another object, whose contents are on the heap."""

UNARY = Entry(forwarding(0))
"""Element by element, one input (cwise_ops_common.h, UnaryOp; relu_op.h, UnaryElementWiseOp)."""
BINARY = Entry(binary)
"""Element by element, two inputs (cwise_ops_common.h, BinaryOp; relu_op.h, BinaryElementWiseOp)."""
CHOICE = Entry(forwarding(1, 2))
"""Chooses between the second and the third input, element by element."""
FRESH = Entry(fresh)
VIEW = Entry(alias_first)
FREE = Entry(nothing)
