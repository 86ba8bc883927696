"""Reductions over dimensions, and the bias gradient, which is one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod

from tfswap.ir.types import TensorType
from tfswap.kernels.events import temp
from tfswap.kernels.memory_rules import Entry, KernelMemory, events_rule, with_events
from tfswap.kernels.temporaries import OUT0, UNKNOWN, Events, Facts, after_output, ceil_div, known_shape


def transposed(facts: Facts) -> Events:
    """reduction_ops_common.h: more than three runs of dimensions are transposed to two, in a temporary."""
    options = _possible_reductions(facts)
    shape = known_shape(facts.inputs[0])
    if not options or shape is None:
        return UNKNOWN
    answers = {_runs(shape, option) > 3 for option in options}
    if facts.device.is_gpu:
        return (OUT0,), False
    if True in answers:
        return after_output([facts.inputs[0].nbytes or 0], exact=len(answers) == 1)
    return (OUT0,), True


def reduction(facts: Facts) -> KernelMemory:
    """reduction_ops_common.h: with nothing to reduce, the output is the input; otherwise as `transposed`."""
    if facts.inputs[0].num_elements == facts.outputs[0].num_elements != None:  # noqa: E711 (a chain)
        return KernelMemory(alias=((0, 0),))
    events, exact = transposed(facts)
    return with_events(events, exact=exact)


def _possible_reductions(facts: Facts) -> list[tuple[bool, ...]]:
    """Which dimensions may have been reduced, given what is known."""
    shape = known_shape(facts.inputs[0])
    result = known_shape(facts.outputs[0])
    if shape is None or result is None:
        return []
    rank = len(shape)
    axes = facts.values.get(1)
    if axes is not None:
        chosen: set[int] = {axis % rank for axis in axes} if rank else set()
        return [tuple(i in chosen for i in range(rank))]
    if len(result) == rank:
        return [tuple(a != b for a, b in zip(shape, result, strict=True))]
    options: list[tuple[bool, ...]] = []
    for kept in combinations(range(rank), len(result)):
        if tuple(shape[i] for i in kept) == result:
            options.append(tuple(i not in kept for i in range(rank)))
    return options


def _runs(shape: tuple[int, ...], reduced: Sequence[bool]) -> int:
    """Number of alternating runs of reduced and kept dimensions; a dimension of 1 belongs to the run before it."""
    runs = 0
    last: bool | None = None
    for dim, flag in zip(shape, reduced, strict=True):
        if dim == 1 or flag == last:
            continue
        runs, last = runs + 1, flag
    return runs


def bias_add_grad(facts: Facts) -> KernelMemory:
    """bias_op.cc: narrow rows are summed in one partial row for each thread."""
    gradient = facts.inputs[0]
    if known_shape(gradient) is None or facts.attrs.get("data_format") == b"NCHW":
        return with_events((OUT0,), exact=False)
    rows = partial_rows(facts, gradient)
    if gradient.dtype == "bfloat16":  # summed as it is
        rows //= 2
    return with_events((OUT0, *([temp(rows)] if rows else [])))._replace(process_bytes=rows)


def partial_rows(facts: Facts, kind: TensorType) -> int:
    """redux_functor.h, ReduceOuterDimensions: bytes of partial sums. Wide rows have none.

    They are a `Tensor buffer(dtype, shape)`, which the process's CPU allocator serves.
    """
    shape = known_shape(kind) or ()
    threads = facts.device.intra_op_threads
    inner = shape[-1] if shape else 0
    outer = prod(shape[:-1])
    if inner > threads * 32 or inner * outer == 0 or outer == 1:
        return 0
    blocks = min(outer, ceil_div(outer * inner, ceil_div(2000, inner)), threads)
    return blocks * inner * (8 if kind.dtype == "float64" else 4)  # 16-bit floats are summed in float32


RULES: dict[str, Entry] = {
    "All": Entry(reduction, values=(1,)),
    "Any": Entry(reduction, values=(1,)),
    "Max": Entry(reduction, values=(1,)),
    "Mean": Entry(reduction, values=(1,)),
    "Min": Entry(reduction, values=(1,)),
    "Prod": Entry(reduction, values=(1,)),
    "Sum": Entry(reduction, values=(1,)),
    "EuclideanNorm": Entry(events_rule(transposed), values=(1,)),
    "BiasAddGrad": Entry(bias_add_grad, attrs=("data_format",)),
}
