"""Kernels that count, number and draw elements."""

from __future__ import annotations

from tfswap.kernels.memory_rules import Entry, KernelMemory, events_rule, fresh, in_order, with_events
from tfswap.kernels.temporaries import OUT0, UNKNOWN, Events, Facts, after_output, element_bytes, known_shape


def histogram(facts: Facts) -> Events:
    """histogram_op.cc: the bin of each value, in int32."""
    count = facts.inputs[0].num_elements
    return UNKNOWN if count is None else after_output([4 * count])


def dense_bincount(facts: Facts) -> Events:
    """bincount_op.cc: a flag for negative values; the bins of each thread and of the caller. A matrix has neither."""
    if len(facts.inputs[0].shape or ()) != 1:
        return (OUT0,), True
    return bincount(facts)


def bincount(facts: Facts) -> Events:
    """As `dense_bincount` of a vector."""
    bins = facts.outputs[0].num_elements
    if bins is None or facts.device.is_gpu:
        return UNKNOWN
    size = 1 if facts.attrs.get("binary_output") else element_bytes(facts.outputs[0])
    return after_output([1, (facts.device.intra_op_threads + 1) * bins * size])


def multinomial(facts: Facts) -> Events:
    """multinomial_op.cc: each thread allocates a row of cumulative probabilities, repeatedly."""
    logits = known_shape(facts.inputs[0])
    if logits is None:
        return UNKNOWN
    return after_output([8 * logits[1]] * facts.device.intra_op_threads, exact=False)


def unravel_index(facts: Facts) -> Events:
    """unravel_index_op.cc: the strides of the dimensions, twice."""
    dims = facts.inputs[1].nbytes
    return UNKNOWN if dims is None else ((("temp", dims), ("temp", dims), OUT0), True)


def gather_nd(facts: Facts) -> KernelMemory:
    """gather_nd_op_cpu_impl.h: the position of an invalid index, one number. A GPU's kernel has none."""
    if facts.device.is_gpu:
        return fresh(facts)
    return with_events((("out", 0), ("temp", 4)))


RULES: dict[str, Entry] = {
    "Bincount": Entry(events_rule(bincount)),
    "DenseBincount": Entry(events_rule(dense_bincount), attrs=("binary_output",)),
    "GatherNd": Entry(gather_nd),
    "ResourceGatherNd": Entry(gather_nd),
    "Multinomial": Entry(events_rule(multinomial)),
    "CTCGreedyDecoder": Entry(in_order(3)),
    "HistogramFixedWidth": Entry(events_rule(histogram)),
    "StatelessMultinomial": Entry(events_rule(multinomial)),
    "UnravelIndex": Entry(events_rule(unravel_index)),
    "Unique": Entry(in_order(1)),
    "UniqueV2": Entry(in_order(1)),
    "UniqueWithCounts": Entry(in_order(1)),
    "UniqueWithCountsV2": Entry(in_order(1)),
}
