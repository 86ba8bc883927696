"""Replays the ops of tensor lists and optionals (list_kernels.{h,cc} and optional_ops.cc of TensorFlow 2.21).

A list is a scalar that holds its elements' tensors. An op changes a list in place if it has no other owner, and
otherwise a copy with the same elements.

The ops of swaps and splits in bodies (passes/tactics/loop_swap.py, passes/tactics/body_plan.py) are replayed here too,
and those that store variables' new values in host memory. Their handles are variants, outside of the arena.

Not handled: zeros and sums of an unknown list count as 0 bytes, and the record is then not exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple, cast

from tfswap.analysis.buffers import Buffer, Part
from tfswap.analysis.heap import Heap
from tfswap.analysis.home_changes import new_home_bytes
from tfswap.analysis.integer_values import Values
from tfswap.analysis.pools import element_sizes
from tfswap.ir import custom_ops
from tfswap.ir.graph import Node
from tfswap.ir.types import TensorType
from tfswap.kernels.memory_rules import VARIANT_BYTES


class Call(NamedTuple):
    """One run of an op.

    Attributes:
        node: its node.
        inputs: the buffers of its inputs.
        integers: the known integers of its inputs.
        known: the known integers of its outputs, to which the rule adds.
    """

    node: Node
    inputs: Sequence[Buffer]
    integers: Sequence[Values | None]
    known: dict[int, Values | None]

    def part(self, heap: Heap, position: int) -> Part:
        """An input as a new element of a list, with a reference."""
        buffer, kind = self.inputs[position], self.node.inputs[position].type
        is_variant = kind.dtype == "variant"
        nbytes = buffer.nbytes if is_variant else kind.nbytes or 0  # handles are outside of the arena
        return Part(heap.hold(buffer), nbytes, self.integers[position], is_variant and nbytes > 0)

    def number(self, position: int) -> int | None:
        values = self.integers[position]
        return values[0] if values else None


Rule = Callable[[Heap, Call], list[Buffer]]
"""Replays an op; gives its outputs, with one reference each."""


def _bytes(kind: TensorType) -> int:
    return VARIANT_BYTES if kind.dtype == "variant" else kind.nbytes or 0


def _zeros(heap: Heap, kind: TensorType) -> Buffer:
    """The result of reading an element that is not set."""
    return heap.allocate_on_host(VARIANT_BYTES) if kind.dtype == "variant" else heap.allocate(_bytes(kind))


def _own(heap: Heap, source: Buffer) -> Buffer:
    """The list itself if it has no other owner, otherwise a copy."""
    if heap.is_dying(source):
        return heap.hold(source)
    made = heap.allocate_on_host(VARIANT_BYTES)
    made.parts = [_shared(heap, p) for p in source.parts]
    made.endless, made.source = source.endless, source.source
    return made


def _shared(heap: Heap, part: Part | None) -> Part | None:
    """An element with a reference for another list."""
    if part is not None:
        heap.hold(part.buffer)
    return part


def _made(heap: Heap, nbytes: int) -> Part:
    return Part(heap.allocate(nbytes), nbytes)


def _listed(buffer: Buffer) -> Part:
    """A list, as an element of another."""
    return Part(buffer, VARIANT_BYTES, is_list=True)


def _release_part(heap: Heap, part: Part | None) -> None:
    if part is not None:
        heap.drop(part.buffer)


def _element(heap: Heap, call: Call, output: int, index: int | None) -> Buffer:
    """An element of the first input as an output, with a reference; zeros where it is not set."""
    source, missing = call.inputs[0], call.node.outputs[output]
    if heap.is_pooled(source):
        return _any_element(heap, call, output)
    if index is None and source.parts:
        heap.exact = False  # any element; zeros, if there may be any, are the most that it can take
        index = next((i for i, p in enumerate(source.parts) if p is None), 0)
    if index is not None and index < len(source.parts):
        part = source.parts[index]
        if part is None:
            return _zeros(heap, missing)
        call.known[output] = part.values
        return heap.hold(part.buffer)
    # The list is unknown: its elements exist already.
    made = Buffer(None, _bytes(missing), source.source)
    made.endless = missing.dtype == "variant"
    return heap.hold(made)


def _any_element(heap: Heap, call: Call, output: int) -> Buffer:
    """An element of a pool; zeros where the list may have elements that are not set."""
    source, missing = call.inputs[0], call.node.outputs[output]
    made = Buffer(None, 0)
    made.parts = [_shared(heap, p) for p in source.parts]
    for part in source.parts:
        if part is not None and part.buffer.ahead is not None:
            made.ahead, part.buffer.ahead = part.buffer.ahead, None
    if None in source.parts:
        made.parts.append(Part(_zeros(heap, missing), _bytes(missing), pool=()))
    call.known[output] = next(p.values for p in source.parts if p is not None and p.pool is not None)
    return heap.hold(made)


def _pool(heap: Heap, sizes: Sequence[int]) -> list[Part | None]:
    """New elements of these sizes, of a list that may have fewer."""
    made: list[Part | None] = [_made(heap, size)._replace(pool=(size,)) for size in sizes]
    return made


def _empty(heap: Heap, call: Call) -> list[Buffer]:
    return [heap.allocate_on_host(VARIANT_BYTES)]


def _reserve(heap: Heap, call: Call) -> list[Buffer]:
    made = heap.allocate_on_host(VARIANT_BYTES)
    made.parts = [None] * (call.number(1) or 0)
    heap.exact &= call.number(1) is not None
    return [made]


def _push_back(heap: Heap, call: Call) -> list[Buffer]:
    made = _own(heap, call.inputs[0])
    made.parts.append(call.part(heap, 1))
    return [made]


def _pop_back(heap: Heap, call: Call) -> list[Buffer]:
    source = call.inputs[0]
    element = _element(heap, call, 1, len(source.parts) - 1 if source.parts else None)
    made = _own(heap, source)
    if made.parts and not heap.is_pooled(made):
        _release_part(heap, made.parts.pop())
    return [made, element]


def _get_item(heap: Heap, call: Call) -> list[Buffer]:
    return [_element(heap, call, 0, call.number(1))]


def _set_item(heap: Heap, call: Call) -> list[Buffer]:
    made = _own(heap, call.inputs[0])
    index = call.number(1)
    if heap.is_pooled(made):
        made.parts.append(call.part(heap, 2))
        if call.node.attrs.get("resize_if_index_out_of_bounds"):
            made.parts.append(None)
        return [made]
    if index is None:
        heap.exact = False
        index = next((i for i, p in enumerate(made.parts) if p is None), max(0, len(made.parts) - 1))
    if made.endless and index >= len(made.parts):
        heap.exact = False
    made.parts += [None] * (index + 1 - len(made.parts))
    before = made.parts[index]
    made.parts[index] = call.part(heap, 2)
    _release_part(heap, before)
    return [made]


def _resize(heap: Heap, call: Call) -> list[Buffer]:
    made = _own(heap, call.inputs[0])
    size = call.number(1)
    if size is None or heap.is_pooled(made):
        heap.exact = False
        made.parts.append(None)
        return [made]
    made.parts += [None] * (size - len(made.parts))
    for part in made.parts[size:]:
        _release_part(heap, part)
    del made.parts[size:]
    return [made]


def _rows(heap: Heap, made: Buffer, source: TensorType) -> None:
    """Add a copy of each row of a tensor."""
    shape = source.shape or ()
    if not shape or None in shape:
        heap.exact = False
        return
    known = [d for d in shape if d is not None]
    row = (source.nbytes or 0) // max(1, known[0])
    made.parts += [_made(heap, row) for _ in range(known[0])] if prod(known) else []


def _from_tensor(heap: Heap, call: Call) -> list[Buffer]:
    made = heap.allocate_on_host(VARIANT_BYTES)
    _rows(heap, made, call.node.inputs[0].type)
    return [made]


def _split(heap: Heap, call: Call) -> list[Buffer]:
    """Pieces whose lengths are an input: they count as one buffer."""
    made = heap.allocate_on_host(VARIANT_BYTES)
    made.parts.append(_made(heap, _bytes(call.node.inputs[0].type)))
    heap.exact = False
    return [made]


def _scatter(heap: Heap, call: Call) -> list[Buffer]:
    made = heap.allocate_on_host(VARIANT_BYTES)
    _rows(heap, made, call.node.inputs[0].type)
    heap.exact = False
    return [made]


def _scatter_into(heap: Heap, call: Call) -> list[Buffer]:
    made = _own(heap, call.inputs[0])
    _rows(heap, made, call.node.inputs[1].type)
    heap.exact = False
    return [made]


def _push_back_batch(heap: Heap, call: Call) -> list[Buffer]:
    """Each list of a vector of lists gets a row."""
    made = _own(heap, call.inputs[0])
    _rows(heap, made, call.node.inputs[1].type)
    heap.exact = False
    return [made]


def _length(heap: Heap, call: Call) -> list[Buffer]:
    if not call.inputs[0].endless and not heap.is_pooled(call.inputs[0]):
        call.known[0] = (len(call.inputs[0].parts),)
    return [heap.allocate_on_host(_bytes(call.node.outputs[0]))]


def _concat_lists(heap: Heap, call: Call) -> list[Buffer]:
    made = heap.allocate_on_host(VARIANT_BYTES)
    for source in call.inputs:
        made.parts += [_shared(heap, p) for p in source.parts]
        heap.exact &= not source.endless
    return [made]


def _stack(heap: Heap, call: Call) -> list[Buffer]:
    """One tensor of all elements. Elements that are not set are read from a tensor of zeros."""
    made = heap.allocate(_bytes(call.node.outputs[0]))
    parts = call.inputs[0].parts
    if None in parts:
        rows = (call.node.outputs[0].shape or (1,))[0] if heap.is_pooled(call.inputs[0]) else len(parts)
        heap.drop(heap.allocate(_bytes(call.node.outputs[0]) // (rows or 1)))
    return [made]


def _zeros_like(heap: Heap, call: Call) -> list[Buffer]:
    """Zeros for each element that is set; tfswap's own kernel makes one for all of a size (csrc/core/zeros_ops.cc).

    Of an optional zeros like its values.
    """
    one_for_all = custom_ops.KERNEL in call.node.attrs
    zeros: dict[int, Part] = {}

    def fill(made: Buffer, source: Buffer) -> Buffer:
        heap.exact &= not source.endless
        if heap.is_pooled(source):
            made.parts = _pool(heap, element_sizes(source))
            return made
        for part in source.parts:
            if part is None:
                made.parts.append(None)
            elif part.is_list:
                made.parts.append(_listed(fill(heap.allocate_on_host(VARIANT_BYTES), part.buffer)))
            elif one_for_all:
                if part.nbytes not in zeros:
                    zeros[part.nbytes] = _made(heap, part.nbytes)
                made.parts.append(_shared(heap, zeros[part.nbytes]))
            else:
                made.parts.append(_made(heap, part.nbytes))
        return made

    result = fill(heap.allocate_on_host(VARIANT_BYTES), call.inputs[0])
    for zero in zeros.values():
        _release_part(heap, zero)
    return [result]


def _add(heap: Heap, call: Call) -> list[Buffer]:
    """The sum of lists: two at a time, element by element, and at last a list for what is left.

    Follows AddNVariant (variant_ops_util.cc).
    """
    if len(call.inputs) == 1:
        return [heap.hold(call.inputs[0])]
    terms = list(call.inputs)
    for into, other in _pairs(len(terms)):
        total = heap.hold(Buffer(None, 0))  # outside of the arena, but for its elements
        total.parts = _sums(heap, terms[into], terms[other])
        for place in (into, other):
            if terms[place] is not call.inputs[place]:
                heap.drop(terms[place])
        terms[into] = total
    made = heap.allocate_on_host(VARIANT_BYTES)
    made.parts = terms[0].parts
    return [made]


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    """The order of additions of this many terms in a tree: pairs, of which the second is added to the first."""
    skip = 1
    while skip < count:
        for into in range(0, count - skip, 2 * skip):
            yield into, into + skip
        if count % (2 * skip) == skip:  # one is left over
            count -= skip
            yield 0, count
        skip *= 2


def _sums(heap: Heap, one: Buffer, other: Buffer) -> list[Part | None]:
    """The sums of two lists' elements; the other's where one is not set."""
    heap.exact &= not (one.endless or other.endless)
    if heap.is_pooled(one) or heap.is_pooled(other):
        sizes = max(element_sizes(one), element_sizes(other), key=sum)
        terms = [_shared(heap, part) for part in (*one.parts, *other.parts)]
        return [*_pool(heap, sizes), *(None if p is None else p._replace(pool=p.pool or ()) for p in terms)]
    sums: list[Part | None] = []
    for left, right in zip(one.parts, other.parts, strict=False):
        if left is None or right is None:
            sums.append(_shared(heap, left or right))
            continue
        if not left.is_list:
            sums.append(_made(heap, left.nbytes))
            continue
        total = heap.allocate_on_host(VARIANT_BYTES)
        total.parts = _sums(heap, left.buffer, right.buffer)
        sums.append(_listed(total))
    return sums


def _swap_out(heap: Heap, call: Call) -> list[Buffer]:
    """A handle, outside of the arena, which keeps the tensor until Release."""
    handle = Buffer(None, 0)
    nbytes = call.inputs[0].nbytes
    heap.copies_out(nbytes, handle, nbytes)
    handle.parts = [call.part(heap, 0)]
    return [heap.hold(handle)]


def _release(heap: Heap, call: Call) -> list[Buffer]:
    handle = call.inputs[0]
    if heap.is_pooled(handle):
        return []  # which element it is, is unknown
    for part in handle.parts:
        _release_part(heap, part)
    handle.parts = []
    return []


def _swap_in(heap: Heap, call: Call) -> list[Buffer]:
    """A new buffer for the tensor, unless its copy back has started, and a ticket outside of the arena."""
    handle, ticket = call.inputs[0], heap.hold(Buffer(None, 0))
    ahead, handle.ahead = handle.ahead, None
    return [ahead or _bring_back(heap, _bytes(call.node.outputs[0])), ticket]


def _bring_back(heap: Heap, nbytes: int) -> Buffer:
    heap.copies_in(nbytes)
    return heap.allocate(nbytes)


def _prefetch(heap: Heap, call: Call) -> list[Buffer]:
    """The tensor of the last handle, which keeps it. Of a list of which nothing is known there may be one."""
    source = call.inputs[0]
    if source.endless and not source.parts:
        source.parts.append(Part(heap.hold(Buffer(None, 0)), 0))
    last = source.parts[-1] if source.parts else None
    if last is not None and last.buffer.ahead is None:
        last.buffer.ahead = _bring_back(heap, cast("int", call.node.attrs["nbytes"]))
    return [heap.hold(source)]


def _store_home(heap: Heap, call: Call) -> list[Buffer]:
    """A handle of a variable's new home in host memory, which all its slices fill."""
    if len(call.inputs) > 1:
        handle = call.inputs[1]
        heap.copies_out(call.inputs[0].nbytes)
    else:
        handle = Buffer(None, 0)
        heap.copies_out(call.inputs[0].nbytes, handle, new_home_bytes(call.node))
    return [heap.hold(handle)]


def _await(heap: Heap, call: Call) -> list[Buffer]:
    return [heap.hold(call.inputs[0])]


def _split_chunk(heap: Heap, call: Call) -> list[Buffer]:
    heap.split(cast("tuple[int, ...]", call.node.attrs["nbytes"]))
    return [heap.hold(Buffer(None, 0))]


def _free_rest(heap: Heap, call: Call) -> list[Buffer]:
    heap.free_rest()
    return []


def _optional(heap: Heap, call: Call) -> list[Buffer]:
    made = heap.allocate_on_host(VARIANT_BYTES)
    made.parts = [call.part(heap, i) for i in range(len(call.inputs))]
    return [made]


def _optional_value(heap: Heap, call: Call) -> list[Buffer]:
    source = call.inputs[0]
    return [_element(heap, call, i, i if source.parts else None) for i in range(len(call.node.outputs))]


LIST_RULES: dict[str, Rule] = {
    "AddN": _add,
    "AddV2": _add,
    "EmptyTensorList": _empty,
    "OptionalFromValue": _optional,
    "OptionalGetValue": _optional_value,
    "OptionalNone": _empty,
    "TensorListConcatLists": _concat_lists,
    "TensorListFromTensor": _from_tensor,
    "TensorListGetItem": _get_item,
    "TensorListLength": _length,
    "TensorListPopBack": _pop_back,
    "TensorListPushBack": _push_back,
    "TensorListPushBackBatch": _push_back_batch,
    "TensorListReserve": _reserve,
    "TensorListResize": _resize,
    "TensorListScatterIntoExistingList": _scatter_into,
    "TensorListScatterV2": _scatter,
    "TensorListSetItem": _set_item,
    "TensorListSplit": _split,
    "TensorListStack": _stack,
    "ZerosLike": _zeros_like,
    custom_ops.AWAIT: _await,
    custom_ops.FREE_REST: _free_rest,
    custom_ops.PREFETCH: _prefetch,
    custom_ops.RELEASE: _release,
    custom_ops.SPLIT_CHUNK: _split_chunk,
    custom_ops.STORE_HOME: _store_home,
    custom_ops.SWAP_IN: _swap_in,
    custom_ops.SWAP_OUT: _swap_out,
}
"""Rules for nodes that read or make a variant, by op. All others follow kernels/kernel_memory.py."""


def uses_lists(node: Node) -> bool:
    """Whether the node makes or reads a list, and has a rule here."""
    if node.op not in LIST_RULES:
        return False
    return any(t.type.dtype == "variant" for t in node.inputs) or any(k.dtype == "variant" for k in node.outputs)
