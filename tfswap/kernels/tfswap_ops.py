"""tfswap's own ops (ops/csrc). The codecs allocate their outputs only."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import cast

from tfswap.ir.custom_ops import KERNEL, OWN_KERNEL
from tfswap.kernels.alignment import round_up
from tfswap.kernels.bounded_sums import slots_of
from tfswap.kernels.elementwise import add_n
from tfswap.kernels.events import free, out, temp
from tfswap.kernels.memory_rules import (
    FREE,
    FRESH,
    UNARY,
    VIEW,
    Entry,
    KernelMemory,
    candidates,
    forwarding,
    fresh,
    outs,
)
from tfswap.kernels.temporaries import TENSOR_ALIGN_BYTES, Facts
from tfswap.kernels.variables import update


def hand_over(facts: Facts) -> KernelMemory:
    """The result slots that the kernel holds, each a chunk."""
    slots, nbytes = facts.attrs.get("slots"), facts.outputs[0].nbytes
    if not isinstance(slots, int) or nbytes is None:
        return fresh(facts)
    return KernelMemory(held_bytes=slots * round_up(nbytes))


def outside(facts: Facts) -> KernelMemory:
    """The caller's memory between the forward and the backward call: its tensors, and the gradients that it passes.

    Of results that are on other devices it has copies here, and their gradients, if it computes here.
    """
    room = facts.attrs.get("room")
    count = room if isinstance(room, int) else 0
    own = [temp(kind.nbytes or 0) for kind in facts.inputs for _ in range(count)]
    elsewhere = cast("Sequence[int]", facts.attrs.get("elsewhere", ()))
    copies = [temp(nbytes) for nbytes in elsewhere for _ in range(count + 2)]
    return KernelMemory(events=(*own, *copies, *outs(len(facts.outputs))))


def group(facts: Facts) -> KernelMemory:
    """Kernels that run concurrently: chunks for the tensors that only they read, and one chunk for each result that
    other kernels read.

    The chunk reserved for their requests from the process's allocator is freed before the first of them starts.
    """
    chunks, kept = (cast("Sequence[int]", facts.attrs.get(name, ())) for name in ("chunks", "kept"))
    read = [o for o, is_kept in enumerate(kept) if is_kept and facts.outputs[o].nbytes]
    reserved = cast("int", facts.attrs.get("reserved", 0))
    own = [*([reserved] if reserved else ()), *chunks[: len(chunks) - len(read)]]
    released = (free(0),) if reserved else ()
    return KernelMemory(events=(*map(temp, own), *map(out, read), *released))


def outside_arena(facts: Facts) -> KernelMemory:
    """The variant and its contents are outside of the arena."""
    return KernelMemory(events=(("out", 0),))


def add_by_decisions(facts: Facts) -> KernelMemory:
    """ops/csrc/core/sum_ops.cc: as AddN; the decisions come after the terms."""
    terms = facts.inputs[: cast("int", facts.attrs.get("N", len(facts.inputs)))]
    return add_n(facts._replace(inputs=terms, attrs={KERNEL: OWN_KERNEL.encode()}))


def add_products(facts: Facts) -> KernelMemory:
    """The sum and the state, in place if they can be forwarded, and buffers for a block of rows and its product."""
    attrs, made = facts.attrs, facts.outputs[0].shape
    begun = [candidates(facts, output, (position,)) for output, position in enumerate(range(2, len(facts.inputs)))]
    forward = tuple(pair for pairs in begun for pair in pairs)
    if made is None or None in made:
        return KernelMemory(forward=forward, events=outs(2), exact=False)
    (width, columns), chunk = cast("tuple[int, int]", made), cast("int", attrs["chunk"])
    shard, last = cast("Sequence[int]", attrs["shard"]), cast("Sequence[int]", attrs["last_shard"])
    depth, chunk = max(*shard[2:], *last[2:]), min(chunk, width)
    sizes = [depth * chunk, chunk * columns]
    if columns * 4 % TENSOR_ALIGN_BYTES:  # rows are copied
        sizes.append(depth * columns)
    slots = slots_of(cast("int", attrs["rows"]), shard, last)
    if attrs["closed"] and slots:
        sizes.append(slots * chunk * columns)
    return KernelMemory(forward=forward, events=(*outs(2), *(temp(4 * size) for size in sizes)))


def image_gradient(facts: Facts) -> KernelMemory:
    """Buffers for the products and the gradients of some positions."""
    kernel, gradient = facts.inputs[0].shape, facts.inputs[1].shape
    if kernel is None or gradient is None or None in kernel or None in gradient:
        return KernelMemory(events=outs(1), exact=False)
    made = kernel[-1] or 1
    positions = prod(size or 0 for size in gradient[1:-1])
    chunk = min(cast("int", facts.attrs["chunk"]), positions)
    width = (facts.inputs[0].num_elements or 0) // made
    return KernelMemory(events=(*outs(1), temp(4 * chunk * width), temp(4 * chunk * made)))


RULES: dict[str, Entry] = {
    "Tfswap>Defer": VIEW,  # ops/csrc/core/arena_ops.cc
    "Tfswap>AssignInPlace": Entry(update(0)),  # ops/csrc/core/variable_ops.cc
    "Tfswap>ReadHome": FRESH,  # ops/csrc/core/home_ops.cc
    "Tfswap>StoreHome": Entry(outside_arena),
    "Tfswap>AwaitStore": FREE,
    "Tfswap>CommitHome": Entry(update(0)),
    "Tfswap>Rows": VIEW,
    "Tfswap>StoreRows": Entry(forwarding(1)),  # ops/csrc/core/slice_ops.cc
    "Tfswap>AddRows": Entry(forwarding(1)),
    "Tfswap>AddBlocks": FRESH,
    "Tfswap>Columns": FRESH,  # ops/csrc/core/columns_ops.cc
    "Tfswap>AddProducts": Entry(add_products, attrs=("chunk", "closed", "last_shard", "rows", "shard")),
    "Tfswap>ImageGradient": Entry(image_gradient, attrs=("chunk",)),  # image_gradient_ops.cc
    "Tfswap>Group": Entry(group, attrs=("chunks", "kept", "reserved")),  # ops/csrc/core/group_ops.cc
    "Tfswap>HandOver": Entry(hand_over, attrs=("slots",)),  # ops/csrc/core/arena_ops.cc
    "Tfswap>Outside": Entry(outside, attrs=("room", "elsewhere")),
    "Tfswap>DecodeFloats": FRESH,
    "Tfswap>DecodeGroups": FRESH,
    "Tfswap>DecodeIntegers": FRESH,
    "Tfswap>DecodeMask": FRESH,
    "Tfswap>DecodeSparse": FRESH,
    "Tfswap>EncodeFloats": FRESH,
    "Tfswap>EncodeGroups": FRESH,
    "Tfswap>EncodeIntegers": FRESH,
    "Tfswap>EncodeMask": FRESH,
    "Tfswap>EncodeMaxPool": FRESH,
    "Tfswap>EncodeSparse": Entry(outside_arena),
    "Tfswap>LeakyReluGradFromMask": UNARY,
    "Tfswap>MaxPoolGradFromPositions": FRESH,
    "Tfswap>MultiplyByMask": UNARY,
    "Tfswap>SelectByMask": Entry(forwarding(1, 2)),
    "Tfswap>Sum": Entry(add_by_decisions, attrs=("N",)),
    "Tfswap>Receive": FREE,  # what a ToHost has made
    "Tfswap>Signal": FREE,  # ops/csrc/core/host_ops.cc
    "Tfswap>Text": FREE,
    "Tfswap>ToDevice": FRESH,
    "Tfswap>ToHost": FREE,
}
