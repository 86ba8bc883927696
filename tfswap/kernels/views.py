"""Kernels that share their input's buffer where shapes and alignment allow it, and otherwise copy it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tfswap.ir.custom_ops import KERNEL
from tfswap.ir.types import TensorType
from tfswap.kernels.memory_rules import (
    VIEW,
    Entry,
    KernelMemory,
    Rule,
    alias_each,
    events_rule,
    fresh,
    outs,
    with_events,
)
from tfswap.kernels.temporaries import OUT0, TENSOR_ALIGN_BYTES, UNKNOWN, Events, Facts, element_bytes, known_shape


def bitcast(facts: Facts) -> KernelMemory:
    """bitcast_op.cc allocates an empty tensor first, a request of one element."""
    return with_events((("temp", 4),), alias=((0, 0),))


def pack(facts: Facts) -> KernelMemory:
    """pack_op.cc: one value is only reshaped."""
    return KernelMemory(alias=((0, 0),)) if len(facts.inputs) == 1 else fresh(facts)


def view_or_fresh(decide: Callable[[Facts], tuple[bool, bool]], source: int = 0) -> Rule:
    """A kernel that shares its input's buffer where it can, and otherwise copies.

    tfswap's own kernel always copies (ops/csrc/core/copied_view_ops.cc).

    Args:
        decide: gives (is a view, exact).
        source: the input's position.
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


def is_first_dim_view(facts: Facts) -> tuple[bool, bool]:
    """slice_op.cc, strided_slice_op.cc: whole rows of the first dimension, aligned, are shared.

    Gives (is a view, exact). Only the values of the begin, end and strides inputs distinguish a stride over the first
    dimension from a range, unless more than half of the rows are taken. Any stride other than 1 copies.
    """
    source, result = certain_shape(facts.inputs[0]), certain_shape(facts.outputs[0])
    if source is None or result is None:
        return False, False
    strides = facts.values.get(3)
    if strides is not None and not set(strides) <= {1}:
        return False, True
    if prod(source) == prod(result):  # all of it: shared, aligned or not
        return True, strides is not None or len(facts.inputs) == 3
    if not source or prod(source) == 0:
        return False, True
    inner = _inner_bytes(facts.inputs[0]) or 0
    rows = prod(result) * element_bytes(facts.outputs[0]) // inner if inner else 0
    kept = _without_ones(result)
    if kept not in (_without_ones((rows, *source[1:])), _without_ones(source[1:])):
        return False, True
    if len(source) == 1:
        begin = facts.values.get(1)
        if begin is None:
            return False, False
        size = element_bytes(facts.inputs[0])
        start = begin[0] % source[0]
        return start * size % TENSOR_ALIGN_BYTES == 0 == rows * size % TENSOR_ALIGN_BYTES, True
    if inner % TENSOR_ALIGN_BYTES:
        return False, True
    return True, rows == 1 or 2 * rows > source[0] or strides is not None


def is_split_view(facts: Facts) -> tuple[bool, bool]:
    """split_op.cc, split_v_op.cc: aligned pieces along the first dimension are shared."""
    source = facts.inputs[0] if facts.inputs[0].shape else facts.inputs[1]  # Split takes its axis first
    shape, piece = certain_shape(source), certain_shape(facts.outputs[0])
    if not shape or piece is None:
        return False, False
    if len(facts.outputs) == 1:
        return True, True
    along_first = piece[0] != shape[0] and shape[1:] == piece[1:]
    if len(shape) == 1 and source is facts.inputs[0]:  # SplitV of a vector
        pieces = [certain_shape(out) for out in facts.outputs]
        if None in pieces:
            return False, False
        return all(p and p[0] * element_bytes(source) % TENSOR_ALIGN_BYTES == 0 for p in pieces), True
    return along_first and (_inner_bytes(source) or 0) % TENSOR_ALIGN_BYTES == 0, True


def is_unpack_view(facts: Facts) -> tuple[bool, bool]:
    """unpack_op.cc: aligned rows of the first dimension are shared, and a single row along any."""
    shape = certain_shape(facts.inputs[0])
    if not shape:
        return False, False
    if len(facts.outputs) == 1:
        return True, True
    axis = facts.attrs.get("axis", 0)
    along_first = isinstance(axis, int) and axis % len(shape) == 0
    return along_first and (_inner_bytes(facts.inputs[0]) or 0) % TENSOR_ALIGN_BYTES == 0, True


def is_transpose_view(facts: Facts) -> tuple[bool, bool]:
    """transpose_op.cc: a permutation that leaves the dimensions over 1 in their order shares the buffer."""
    source, result = certain_shape(facts.inputs[0]), certain_shape(facts.outputs[0])
    if source is None or result is None:
        return False, False
    permutation = facts.values.get(1)
    if permutation is not None:
        moved = [axis for axis in permutation if source[axis] != 1]
        return moved == sorted(moved), True
    if len(_without_ones(source)) <= 1:
        return True, True
    if _without_ones(source) != _without_ones(result):
        return False, True
    certain = len(set(_without_ones(source))) == len(_without_ones(source))  # no dimension moves
    return certain, certain


def is_same_shape_view(facts: Facts) -> tuple[bool, bool]:
    """tile_ops.cc, broadcast_to_op.cc: with nothing to repeat, the input is shared."""
    source, result = certain_shape(facts.inputs[0]), certain_shape(facts.outputs[0])
    return (source == result is not None), source is not None and result is not None


def is_same_dtype_view(facts: Facts) -> tuple[bool, bool]:
    """cast_op.cc: a cast to the same type shares the input."""
    return facts.inputs[0].dtype == facts.outputs[0].dtype, True


def certain_shape(kind: TensorType) -> tuple[int, ...] | None:
    """The shape, or None where it is only a bound: equal bounds do not make a view."""
    return None if kind.bound else known_shape(kind)


def _inner_bytes(kind: TensorType) -> int | None:
    shape = certain_shape(kind)
    return None if shape is None else prod(shape[1:]) * element_bytes(kind)


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim for dim in shape if dim != 1)


def pad(facts: Facts) -> KernelMemory:
    """pad_op.cc: without padding the input is shared; otherwise the paddings are copied, on the host."""
    if facts.inputs[0].shape == facts.outputs[0].shape is not None:
        return KernelMemory(alias=((0, 0),))
    if facts.device.is_gpu:
        return fresh(facts)
    rank = len(facts.outputs[0].shape or ())
    paddings = facts.inputs[1]
    return with_events((("temp", 2 * rank * (8 if paddings.dtype == "int64" else 4)), ("out", 0)))


def mirror_pad_grad(facts: Facts) -> Events:
    """mirror_pad_op.cc: folds a copy of the gradient, a temporary."""
    size = facts.inputs[0].nbytes
    return UNKNOWN if size is None else ((("temp", size), OUT0), True)


RULES: dict[str, Entry] = {
    "Bitcast": Entry(bitcast),
    "CheckNumerics": VIEW,
    "DestroyTemporaryVariable": VIEW,
    "EnsureShape": VIEW,
    "ExpandDims": VIEW,
    "Identity": VIEW,
    "IdentityN": Entry(alias_each),
    "PlaceholderWithDefault": VIEW,
    "PreventGradient": VIEW,
    "Reshape": VIEW,
    "Squeeze": VIEW,
    "StopGradient": VIEW,
    "_EagerConst": VIEW,
    "BroadcastTo": Entry(view_or_fresh(is_same_shape_view), attrs=(KERNEL,)),
    "Cast": Entry(view_or_fresh(is_same_dtype_view)),
    "ConjugateTranspose": Entry(view_or_fresh(is_transpose_view), values=(1,)),
    "Pack": Entry(pack),
    "Slice": Entry(view_or_fresh(is_first_dim_view), attrs=(KERNEL,), values=(1,)),
    "Split": Entry(view_or_fresh(is_split_view, source=1)),
    "SplitV": Entry(view_or_fresh(is_split_view)),
    "StridedSlice": Entry(view_or_fresh(is_first_dim_view), attrs=(KERNEL,), values=(1, 3)),
    "Tile": Entry(view_or_fresh(is_same_shape_view), attrs=(KERNEL,)),
    "Transpose": Entry(view_or_fresh(is_transpose_view), values=(1,)),
    "Unpack": Entry(view_or_fresh(is_unpack_view), attrs=("axis", KERNEL)),
    "MirrorPadGrad": Entry(events_rule(mirror_pad_grad)),
    "Pad": Entry(pad),
    "PadV2": Entry(pad),
}
