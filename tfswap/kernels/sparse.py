"""Sparse tensors, and sums over segments of sparse indices."""

from __future__ import annotations

from math import prod

from tfswap.ir.custom_ops import KERNEL
from tfswap.kernels.events import out, temp
from tfswap.kernels.memory_rules import Entry, KernelMemory, events_rule, in_order, outs
from tfswap.kernels.temporaries import (
    OUT0,
    UNKNOWN,
    Events,
    Facts,
    after_output,
    element_bytes,
    known_shape,
    summed_in_float32,
)


def sparse_copied(facts: Facts) -> Events:
    """sparse_reduce_op.cc, sparse_softmax_op.cc: copies of indices and values, for sorting, and one number."""
    indices, values = facts.inputs[0].nbytes, facts.inputs[1].nbytes
    if indices is None or values is None:
        return UNKNOWN
    size = element_bytes(facts.outputs[0])
    return (("temp", indices), ("temp", values), OUT0, ("temp", size)), True


def sparse_to_dense(facts: Facts) -> Events:
    """sparse_to_dense_op.cc: the indices as a matrix of int64: a copy unless they are one."""
    indices = facts.inputs[0]
    if indices.dtype == "int64" and len(indices.shape or ()) == 2:
        return (OUT0,), True
    return after_output([8 * (indices.num_elements or 0)])


def sparse_fill(facts: Facts) -> KernelMemory:
    """fill_empty_rows_functor.h: without an empty row, and with indices in order, inputs are passed on."""
    events = tuple(map(out, (2, 3, 0, 1)))
    return KernelMemory(events=events, exact=KERNEL in facts.attrs)  # tfswap's own kernel always allocates


def sparse_filled_grad(facts: Facts) -> Events:
    """fill_empty_rows_functor.h: a flag per value that has been visited."""
    return (OUT0, ("out", 1), ("temp", facts.inputs[1].num_elements or 0)), facts.inputs[1].num_elements is not None


def sparse_add(facts: Facts) -> KernelMemory:
    """sparse_add_op.cc: the shape of the first is passed on."""
    return KernelMemory(alias=((2, 2),), events=outs(2))


def sparse_dense(facts: Facts) -> Events:
    """sparse_dense_binary_op_shared.cc: the dense side's values at the indices."""
    values = facts.inputs[1].nbytes
    return UNKNOWN if values is None else after_output([values])


def sparse_concat(facts: Facts) -> Events:
    """sparse_concat_op.cc: copies of each input's indices and values, before they are concatenated."""
    count = len(facts.inputs) // 3
    pairs = [(facts.inputs[i].nbytes, facts.inputs[count + i].nbytes) for i in range(count)]
    copies = [temp(size or 0) for pair in pairs for size in pair]
    return (("out", 2), *copies, OUT0, ("out", 1)), all(None not in pair for pair in pairs)


def sparse_segment(facts: Facts) -> Events:
    """segment_reduction_ops_impl.h, SparseSegmentReductionOpBase: of 16-bit floats, a row in float32."""
    shape = known_shape(facts.inputs[0])
    return summed_in_float32(facts, (OUT0,), None if shape is None else prod(shape[1:]))


def sparse_segment_grad(facts: Facts) -> Events:
    """SparseSegmentGradOpBase: of 16-bit floats, the output in float32. Version 2 has the row numbers first."""
    order = (OUT0,) if len(facts.outputs) == 1 else (out(1), OUT0)
    return summed_in_float32(facts, order, facts.outputs[0].num_elements)


RULES: dict[str, Entry] = {
    "SparseReshape": Entry(in_order(1)),
    "SparseAdd": Entry(sparse_add),
    "SparseConcat": Entry(events_rule(sparse_concat)),
    "SparseDenseCwiseAdd": Entry(events_rule(sparse_dense)),
    "SparseDenseCwiseDiv": Entry(events_rule(sparse_dense)),
    "SparseDenseCwiseMul": Entry(events_rule(sparse_dense)),
    "SparseFillEmptyRows": Entry(sparse_fill, attrs=(KERNEL,)),
    "SparseFillEmptyRowsGrad": Entry(events_rule(sparse_filled_grad)),
    "SparseReduceMax": Entry(events_rule(sparse_copied)),
    "SparseSegmentMean": Entry(events_rule(sparse_segment)),
    "SparseSegmentMeanGrad": Entry(events_rule(sparse_segment_grad)),
    "SparseSegmentMeanGradV2": Entry(events_rule(sparse_segment_grad)),
    "SparseSegmentMeanWithNumSegments": Entry(events_rule(sparse_segment)),
    "SparseSegmentSqrtN": Entry(events_rule(sparse_segment)),
    "SparseSegmentSqrtNGrad": Entry(events_rule(sparse_segment_grad)),
    "SparseSegmentSqrtNGradV2": Entry(events_rule(sparse_segment_grad)),
    "SparseSegmentSqrtNWithNumSegments": Entry(events_rule(sparse_segment)),
    "SparseSegmentSum": Entry(events_rule(sparse_segment)),
    "SparseSegmentSumGrad": Entry(events_rule(sparse_segment_grad)),
    "SparseSegmentSumGradV2": Entry(events_rule(sparse_segment_grad)),
    "SparseSegmentSumWithNumSegments": Entry(events_rule(sparse_segment)),
    "SparseSlice": Entry(in_order(1)),
    "SparseReduceSum": Entry(events_rule(sparse_copied)),
    "SparseSoftmax": Entry(events_rule(sparse_copied)),
    "SparseToDense": Entry(events_rule(sparse_to_dense)),
}
