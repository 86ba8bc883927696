"""Upper bounds of sizes that depend on values.

The number of rows that `tf.unique`, `tf.where` or `tf.boolean_mask` return is known after they have run. A plan needs
it before, and uses the largest number that their inputs' sizes allow: `TensorType.bound` is then true. An input that is
a size, such as the number of bins of `tf.math.bincount(maxlength=)`, allows the largest value of its range
(analysis/integer_ranges.py). TensorFlow's inference gives the shapes of tensors computed from these.

A table look-up returns a tensor of the shape of the table's default value for each key. TensorFlow does not infer this
for a table from outside the step. Where the trace knows the rank of the result, the size is exact; otherwise it is a
bound.

TensorFlow does not infer the result of a Python function (`tf.py_function`). Most such functions compute element by
element, check or log. Without another declaration (`tf.ensure_shape`, `set_shape`), the result is assumed to be no
larger than the largest argument of its type. Gradients have the exact sizes of the function's arguments.

A gathering collective returns as many rows as all members of its group have, whose tensors have one shape. Replicas
that gather tensors of different sizes, or sparse gradients, exchange their shapes first, which are known here where all
of them are in the graph.

`tf.dynamic_stitch` is assumed to have an index for each row, as TensorFlow requires: the contents of other rows are
undefined.

Not handled: shapes that the replicas of other workers send; sizes computed from values (`tf.range(n)`, `tf.repeat` with
counts). Those that depend on the step's arguments only can be computed before the step (runtime/dynamic_sizes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tfswap.analysis.collectives import group_size, matching
from tfswap.analysis.integer_ranges import Ranges, range_of_type
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.python_calls import differentiated
from tfswap.ir.types import Shape
from tfswap.ir.views import passed_on


class Largest(NamedTuple):
    """The largest shape of an output, by its number. With `exact`, it is the shape."""

    output: int
    shape: Shape
    exact: bool = False


Values = tuple[int, ...]
ValueOf = Callable[[str], "Values | None"]
Most = Callable[[Output], "int | None"]
"""Gives the largest value that an integer tensor may have; None where that is not known."""
Rule = Callable[[Node, Most], Iterator[Largest]]


def _elements(node: Node, *outputs: int) -> Iterator[Largest]:
    """The outputs have at most as many elements as the first input."""
    count = node.inputs[0].type.num_elements
    if count is not None:
        yield from (Largest(i, (count,)) for i in outputs)


def _unique(node: Node, most: Most) -> Iterator[Largest]:
    """The distinct elements of a vector, or slices along an axis, and how often there are each."""
    shape = node.inputs[0].type.shape
    if not shape or None in shape:
        return
    axis = most(node.inputs[1]) if len(shape) > 1 and len(node.inputs) > 1 else 0
    yield Largest(0, shape)
    if axis is not None:
        yield from (Largest(i, (shape[axis],)) for i in range(2, len(node.outputs)))


def _where(node: Node, most: Most) -> Iterator[Largest]:
    _, shape, _ = node.inputs[0].type
    count = node.inputs[0].type.num_elements
    if shape is not None and count is not None:
        yield Largest(0, (count, len(shape)))


def _partitions(node: Node, most: Most) -> Iterator[Largest]:
    data, rows = (t.type for t in node.inputs)
    if data.num_elements is not None and rows.num_elements is not None:
        assert data.shape is not None
        assert rows.shape is not None
        shape = (rows.num_elements, *data.shape[len(rows.shape) :])
        yield from (Largest(i, shape) for i in range(len(node.outputs)))


def _stitched(node: Node, most: Most) -> Iterator[Largest]:
    """A row for each index. All parts of one partitioned vector have together as many indices as the vector."""
    indices, data = node.inputs[: len(node.inputs) // 2], node.inputs[len(node.inputs) // 2 :]
    if indices[0].type.shape is None or data[0].type.shape is None:
        return
    row = data[0].type.shape[len(indices[0].type.shape) :]
    sources = {tensor.node for tensor in map(passed_on, indices)}
    parted = next(iter(sources))
    if len(sources) == 1 and _RULES.get(parted.op) is _partitions and len(set(map(passed_on, indices))) == len(indices):
        counts = [parted.inputs[1].type.num_elements]
    else:
        counts = [tensor.type.num_elements for tensor in indices]
    if None not in counts:
        yield Largest(0, (sum(count or 0 for count in counts), *row))


MOST_EMPTY = 1024
"""The assumed number of elements without rows in a concatenated list. Their lengths take a few bytes each."""


def _joined(node: Node, most: Most) -> Iterator[Largest]:
    """The lengths of a concatenated list's elements: one for each row, and some for elements without rows."""
    shape = node.outputs[0].shape
    if shape and shape[0] is not None:
        yield Largest(1, (shape[0] + MOST_EMPTY,))


def _boxes(node: Node, most: Most) -> Iterator[Largest]:
    """Some of the boxes, or as many as may be, with zeros in the place of those that there are not."""
    shape, may_be = node.inputs[0].type.shape, most(node.inputs[2])
    count = shape[0] if shape else None
    if not node.attrs.get("pad_to_max_output_size") and count is not None:
        may_be = count if may_be is None else min(may_be, count)
    if may_be is not None:
        yield from (Largest(i, (max(0, may_be),)) for i, kind in enumerate(node.outputs) if kind.shape != ())


def _bins(node: Node, most: Most) -> Iterator[Largest]:
    """A number for each bin; of a matrix, for each row and bin."""
    shape, bins = node.inputs[0].type.shape, most(node.inputs[1])
    if bins is not None and shape is not None:
        rows = shape[:1] if node.op != "Bincount" and len(shape) == 2 else ()
        yield Largest(0, (*rows, max(0, bins)))


def _ragged_bins(node: Node, most: Most) -> Iterator[Largest]:
    splits, bins = node.inputs[0].type.num_elements, most(node.inputs[2])
    if bins is not None and splits is not None:
        yield Largest(0, (splits - 1, max(0, bins)))


def _largest_values(node: Node, most: Most) -> Iterator[Largest]:
    """Some of each row."""
    shape, taken = node.inputs[0].type.shape, most(node.inputs[1])
    if shape and (last := shape[-1]) is not None:
        found = (*shape[:-1], last if taken is None else max(0, min(taken, last)))
        yield from (Largest(i, found) for i in (0, 1))


def _sparse(node: Node, rank: int | None, values: int | None, sparse: int = 1) -> Iterator[Largest]:
    """Results that are sparse tensors, all indices first, then the values, with at most as many values."""
    if rank is not None and values is not None:
        yield from (Largest(i, (values, rank)) for i in range(sparse))
        yield from (Largest(sparse + i, (values,)) for i in range(sparse))


def _sparse_sum(node: Node, most: Most) -> Iterator[Largest]:
    """Values of one sparse tensor, of the other, or of both."""
    counts = [node.inputs[i].type.num_elements for i in (1, 4)]
    if None not in counts:
        yield from _sparse(node, node.inputs[2].type.num_elements, sum(count or 0 for count in counts))


def _sparse_slice(node: Node, most: Most) -> Iterator[Largest]:
    yield from _sparse(node, node.inputs[2].type.num_elements, node.inputs[1].type.num_elements)


def _sparse_split(node: Node, most: Most) -> Iterator[Largest]:
    yield from _sparse(
        node, node.inputs[3].type.num_elements, node.inputs[2].type.num_elements, sparse=len(node.outputs) // 3
    )


_MOST_IN_SET: dict[object, Callable[[int, int], int]] = {
    b"a-b": lambda a, b: a,
    b"b-a": lambda a, b: b,
    b"intersection": min,
    b"union": lambda a, b: a + b,
}
"""By operation, the most elements of the result."""


def _set(node: Node, most: Most) -> Iterator[Largest]:
    """A dense set is one input, a sparse one three, of which the second has the values."""
    count = 1 if node.op.startswith("Dense") else 3
    first, second = (given[len(given) > 1].type for given in (node.inputs[:count], node.inputs[count:]))
    operation = _MOST_IN_SET.get(node.attrs.get("set_operation"))
    if operation is None or first.num_elements is None or second.num_elements is None:
        return
    rank = node.outputs[2].num_elements
    if rank is None and count == 1 and first.shape is not None:
        rank = len(first.shape)
    yield from _sparse(node, rank, operation(first.num_elements, second.num_elements))


def _decoded(node: Node, most: Most) -> Iterator[Largest]:
    """A class for each time and each sequence."""
    shape = node.inputs[0].type.shape
    if shape is not None and None not in shape[:2]:
        yield from _sparse(node, 2, math.prod(d or 0 for d in shape[:2]))


def _filled(node: Node, most: Most) -> Iterator[Largest]:
    """One more value for each row: all may be empty."""
    indices, values = (tensor.type for tensor in node.inputs[:2])
    rows = node.outputs[2].num_elements
    if values.num_elements is not None and rows is not None and indices.shape is not None and len(indices.shape) == 2:
        count = values.num_elements + rows
        yield Largest(0, (count, indices.shape[1]))
        yield Largest(1, (count,))


def _hits(node: Node, most: Most) -> Iterator[Largest]:
    """One hit for each true class, where classes are sampled without repetition."""
    if passed_on(node.inputs[1]).node.attrs.get("unique"):
        yield from _elements(node, 0, 1, 2)


def _found(node: Node, most: Most) -> Iterator[Largest]:
    """A value for each key. Keys of a dense table can be vectors: then there are fewer."""
    _, keys, default = (t.type for t in node.inputs)
    if keys.num_elements is None or default.num_elements is None:
        return
    assert keys.shape is not None
    assert default.shape is not None
    shape, traced = (*keys.shape, *default.shape), node.outputs[0].shape
    yield Largest(0, shape, exact=traced is not None and len(traced) == len(shape))


def _rows(node: Node, most: Most) -> Iterator[Largest]:
    """As many rows as the ragged tensor has. Their length must be given in the call (`shape=`)."""
    shape, partitions, kinds = node.outputs[0].shape, node.inputs[3:], node.attrs.get("row_partition_types")
    if not shape or None in shape[1:] or not isinstance(kinds, tuple) or kinds[:1] != (b"ROW_SPLITS",):
        return
    splits = partitions[0].type.num_elements
    if splits is not None:
        yield Largest(0, (splits - 1, *shape[1:]), exact=not partitions[0].type.bound)


def _gathered(node: Node, most: Most) -> Iterator[Largest]:
    """The rows of all members of a group, whose tensors have one shape (collective_ops.cc)."""
    kind, members = node.inputs[0].type, most(node.inputs[1])
    if kind.shape and kind.shape[0] is not None and members is not None:
        yield Largest(0, (members * kind.shape[0], *kind.shape[1:]), exact=not kind.bound)


def _scattered(node: Node, most: Most) -> Iterator[Largest]:
    """A member's part of the rows."""
    kind, members = node.inputs[0].type, most(node.inputs[1])
    if kind.shape and kind.shape[0] is not None and members:
        yield Largest(0, (kind.shape[0] // members, *kind.shape[1:]), exact=not kind.bound)


def _called(node: Node, most: Most) -> Iterator[Largest]:
    """Results of a Python function; for its gradient, the types of the function's arguments."""
    call = differentiated(node)
    given = [tensor.type for tensor in (node if call is None else call).inputs]
    if call is not None:
        sized = ((i, kind) for i, kind in enumerate(given) if kind.nbytes is not None)
        yield from (Largest(i, kind.shape, exact=not kind.bound) for i, kind in sized)
        return
    sizes = [kind for kind in given if kind.nbytes is not None]
    for i, kind in enumerate(node.outputs):
        if alike := [one for one in sizes if one.dtype == kind.dtype]:
            yield Largest(i, max(alike, key=lambda one: one.num_elements or 0).shape)


_RULES: dict[str, Rule] = {
    "Bincount": _bins,
    "CTCGreedyDecoder": _decoded,
    "CollectiveGatherV2": _gathered,
    "CollectiveReduceScatterV2": _scattered,
    "ComputeAccidentalHits": _hits,
    "DenseBincount": _bins,
    "DenseToDenseSetOperation": _set,
    "DenseToSparseSetOperation": _set,
    "DynamicPartition": _partitions,
    "DynamicStitch": _stitched,
    "EagerPyFunc": _called,
    "ListDiff": lambda node, _: _elements(node, 0, 1),
    "LookupTableFind": _found,
    "LookupTableFindV2": _found,
    "NonMaxSuppression": _boxes,
    "NonMaxSuppressionV2": _boxes,
    "NonMaxSuppressionV3": _boxes,
    "NonMaxSuppressionV4": _boxes,
    "NonMaxSuppressionV5": _boxes,
    "NonMaxSuppressionWithOverlaps": _boxes,
    "ParallelDynamicStitch": _stitched,
    "PyFunc": _called,
    "PyFuncStateless": _called,
    "RaggedBincount": _ragged_bins,
    "RaggedTensorToTensor": _rows,
    "SparseAdd": _sparse_sum,
    "SparseFillEmptyRows": _filled,
    "SparseSlice": _sparse_slice,
    "SparseSparseMaximum": _sparse_sum,
    "SparseSparseMinimum": _sparse_sum,
    "SparseSplit": _sparse_split,
    "SparseToSparseSetOperation": _set,
    "TensorListConcatV2": _joined,
    "TopKV2": _largest_values,
    "Unique": _unique,
    "UniqueV2": _unique,
    "UniqueWithCounts": _unique,
    "UniqueWithCountsV2": _unique,
    "Where": _where,
}


class Known(NamedTuple):
    """The integers of an output, by its number: flat, and their shape."""

    output: int
    values: Values
    shape: tuple[int, ...]

    @classmethod
    def vector(cls, output: int, values: Values) -> Known:
        return cls(output, values, (len(values),))


def _shapes(graph: Graph, node: Node, _: ValueOf) -> Iterator[Known]:
    for i, tensor in enumerate(node.inputs):
        shape = tensor.type.shape
        if shape is not None and None not in shape and not tensor.type.bound:
            yield Known.vector(i, tuple(d for d in shape if d is not None))


def _reshaped(graph: Graph, node: Node, value_of: ValueOf) -> Iterator[Known]:
    """The dense shape of a reshaped sparse tensor; one dimension may be open (-1)."""
    before, after = (value_of(tensor.name) for tensor in node.inputs[1:3])
    if before is None or after is None:
        return
    elements, known = math.prod(before), math.prod(d for d in after if d >= 0)
    if -1 not in after:
        yield Known.vector(1, after)
    elif known > 0 and elements % known == 0:
        yield Known.vector(1, tuple(elements // known if d < 0 else d for d in after))


def _gathered_shapes(graph: Graph, node: Node, value_of: ValueOf) -> Iterator[Known]:
    """The shapes that a process's replicas exchange to gather tensors of different sizes, in the order of devices."""
    shape = node.inputs[0].type.shape
    members = next((found for found in matching(graph) if node in found), [])
    values = [value_of(member.inputs[0].name) for member in members]
    if shape and shape[0] is not None and None not in values and len(members) == group_size(graph, node):
        every = tuple(value for each in values for value in each or ())
        yield Known(0, every, (len(members) * shape[0], *(d or 0 for d in shape[1:])))


_SHAPE_VALUES: dict[str, Callable[[Graph, Node, ValueOf], Iterator[Known]]] = {
    "CollectiveGatherV2": _gathered_shapes,
    "ShapeN": _shapes,
    "SparseReshape": _reshaped,
}
"""Ops whose results are shapes, or may be, which TensorFlow does not infer."""


def gives_shape_values(op: str) -> bool:
    """Whether the op's results are shapes, or may be, which TensorFlow does not infer."""
    return op in _SHAPE_VALUES


def shape_values(graph: Graph, node: Node, value_of: ValueOf) -> Iterator[Known]:
    """The known shapes that a node returns.

    Args:
        value_of: gives the value of a small integer tensor by name, or None.
    """
    yield from _SHAPE_VALUES[node.op](graph, node, value_of)


def decides_sizes(op: str) -> bool:
    """Whether there is a bound here for results of the op that TensorFlow may not infer."""
    return op in _RULES


def largest_shapes(node: Node, ranges: Ranges) -> Iterator[Largest]:
    """The largest shapes of a node's outputs of unknown size, by its inputs' shapes and ranges."""

    def most(tensor: Output) -> int | None:
        of_type, found = range_of_type(tensor.type.dtype), ranges[tensor]
        return None if found is None or of_type is None or found.high == of_type.high else found.high

    for found in _RULES[node.op](node, most):
        if node.outputs[found.output].nbytes is None and found.shape is not None and None not in found.shape:
            yield found
