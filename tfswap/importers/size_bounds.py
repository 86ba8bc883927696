"""Sizes that a step decides by its values, and how large they can get.

How many rows `tf.unique`, `tf.where` or `tf.boolean_mask` give is known when they have run; a plan is made before.
It counts on the most that their inputs' sizes allow, and says that this is a bound (`TensorType.bound`). What is
computed from such a tensor gets its shape from TensorFlow's own inference.

A look-up in a table gives as much for each key as the table's default value is. TensorFlow's inference does not say so
of a table that is made outside of the step; the trace knows whether keys are single numbers or texts, and
so whether this is the size itself or the most that it can be.

What a Python function returns (`tf.py_function`) TensorFlow does not know either. As a rule such a function works
element by element, or checks, or logs: where the user says nothing else (`tf.ensure_shape`, `set_shape`), it is taken
to return as much as it is given of that type. Its gradients are exactly as large as what it was given.

Rows that are stitched together (`tf.dynamic_stitch`, a lookup in a list of tables) are taken to have an index each, as
TensorFlow asks for: of a row that has none, nobody knows what is in it.

Not handled: sizes that are themselves computed from values (`tf.range(n)`, `tf.repeat` with counts). Those that hang
on the step's arguments alone can be computed before it (runtime/dynamic_sizes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tfswap.ir.graph import Node
from tfswap.ir.python_calls import differentiated
from tfswap.ir.types import Shape
from tfswap.ir.views import passed_on


class Largest(NamedTuple):
    """The largest shape that an output can have; with `exact` it always has it."""

    output: int
    shape: Shape
    exact: bool = False


Values = tuple[int, ...]
ValueOf = Callable[[str], "Values | None"]
Rule = Callable[[Node], Iterator[Largest]]


def _elements(node: Node, *outputs: int) -> Iterator[Largest]:
    """As many elements as the first input has."""
    count = node.inputs[0].type.num_elements
    if count is not None:
        yield from (Largest(i, (count,)) for i in outputs)


def _unique(node: Node) -> Iterator[Largest]:
    if len(node.inputs[0].type.shape or ()) == 1:
        yield from _elements(node, *(i for i in range(len(node.outputs)) if i != 1))


def _where(node: Node) -> Iterator[Largest]:
    _, shape, _ = node.inputs[0].type
    count = node.inputs[0].type.num_elements
    if shape is not None and count is not None:
        yield Largest(0, (count, len(shape)))


def _partitions(node: Node) -> Iterator[Largest]:
    data, rows = (t.type for t in node.inputs)
    if data.num_elements is not None and rows.num_elements is not None:
        assert data.shape is not None, "it has a size"
        assert rows.shape is not None, "so has this"
        shape = (rows.num_elements, *data.shape[len(rows.shape) :])
        yield from (Largest(i, shape) for i in range(len(node.outputs)))


def _stitched(node: Node) -> Iterator[Largest]:
    """A row for each index. The parts of one vector, all of them, have as many indices together as that has."""
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
"""Parts without rows of a list that is joined: their number is not known, and their lengths take next to nothing."""


def _joined(node: Node) -> Iterator[Largest]:
    """How many parts a list of unknown length has that are joined: as many as rows, and some that have none."""
    shape = node.outputs[0].shape
    if shape and shape[0] is not None:
        yield Largest(1, (shape[0] + MOST_EMPTY,))


def _boxes(node: Node) -> Iterator[Largest]:
    shape = node.inputs[0].type.shape
    if shape and shape[0] is not None:
        yield Largest(0, (shape[0],))


def _filled(node: Node) -> Iterator[Largest]:
    """One more for each row, all of which may be empty."""
    indices, values = (tensor.type for tensor in node.inputs[:2])
    rows = node.outputs[2].num_elements
    if values.num_elements is not None and rows is not None and indices.shape is not None and len(indices.shape) == 2:
        count = values.num_elements + rows
        yield Largest(0, (count, indices.shape[1]))
        yield Largest(1, (count,))


def _hits(node: Node) -> Iterator[Largest]:
    """Of each true class one, where none is sampled twice."""
    if passed_on(node.inputs[1]).node.attrs.get("unique"):
        yield from _elements(node, 0, 1, 2)


def _found(node: Node) -> Iterator[Largest]:
    """What a table holds for each key. Keys of a dense table can be vectors, and then there are fewer."""
    _, keys, default = (t.type for t in node.inputs)
    if keys.num_elements is None or default.num_elements is None:
        return
    assert keys.shape is not None, "it has a size"
    assert default.shape is not None, "so has this"
    shape, traced = (*keys.shape, *default.shape), node.outputs[0].shape
    yield Largest(0, shape, exact=traced is not None and len(traced) == len(shape))


def _rows(node: Node) -> Iterator[Largest]:
    """As many rows as the ragged tensor has; how long they are made, the call must say (`shape=`)."""
    shape, partitions, kinds = node.outputs[0].shape, node.inputs[3:], node.attrs.get("row_partition_types")
    if not shape or None in shape[1:] or not isinstance(kinds, tuple) or kinds[:1] != (b"ROW_SPLITS",):
        return
    splits = partitions[0].type.num_elements
    if splits is not None:
        yield Largest(0, (splits - 1, *shape[1:]), exact=not partitions[0].type.bound)


def _called(node: Node) -> Iterator[Largest]:
    """Of a Python function; for its gradient, which runs once the function itself has, what that was given."""
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
    "ComputeAccidentalHits": _hits,
    "DynamicPartition": _partitions,
    "DynamicStitch": _stitched,
    "EagerPyFunc": _called,
    "ListDiff": lambda node: _elements(node, 0, 1),
    "LookupTableFind": _found,
    "LookupTableFindV2": _found,
    "NonMaxSuppression": _boxes,
    "NonMaxSuppressionV2": _boxes,
    "NonMaxSuppressionV3": _boxes,
    "ParallelDynamicStitch": _stitched,
    "PyFunc": _called,
    "PyFuncStateless": _called,
    "RaggedTensorToTensor": _rows,
    "SparseFillEmptyRows": _filled,
    "TensorListConcatV2": _joined,
    "Unique": _unique,
    "UniqueV2": _unique,
    "UniqueWithCounts": _unique,
    "UniqueWithCountsV2": _unique,
    "Where": _where,
}


def _shapes(node: Node, _: ValueOf) -> Iterator[tuple[int, Values]]:
    for i, tensor in enumerate(node.inputs):
        shape = tensor.type.shape
        if shape is not None and None not in shape and not tensor.type.bound:
            yield i, tuple(d for d in shape if d is not None)


def _reshaped(node: Node, value_of: ValueOf) -> Iterator[tuple[int, Values]]:
    """The dense shape of a sparse tensor that is reshaped: one dimension may be left open (-1)."""
    before, after = (value_of(tensor.name) for tensor in node.inputs[1:3])
    if before is None or after is None:
        return
    elements, known = math.prod(before), math.prod(d for d in after if d >= 0)
    if -1 not in after:
        yield 1, after
    elif known > 0 and elements % known == 0:
        yield 1, tuple(elements // known if d < 0 else d for d in after)


_SHAPE_VALUES: dict[str, Callable[[Node, ValueOf], Iterator[tuple[int, Values]]]] = {
    "ShapeN": _shapes,
    "SparseReshape": _reshaped,
}
"""Ops that give shapes as tensors, whose values TensorFlow's inference does not know."""


def gives_shape_values(op: str) -> bool:
    """Whether the op gives shapes as tensors, whose values TensorFlow does not infer."""
    return op in _SHAPE_VALUES


def shape_values(node: Node, value_of: ValueOf) -> Iterator[tuple[int, Values]]:
    """Of a node that gives shapes, those that are known, by output.

    Args:
        value_of: what a small tensor of integers holds, by its name, where that is known.
    """
    yield from _SHAPE_VALUES[node.op](node, value_of)


def decides_sizes(op: str) -> bool:
    """Whether the op gives tensors whose size TensorFlow may not infer, and for which there is a bound."""
    return op in _RULES


def largest_shapes(node: Node) -> Iterator[Largest]:
    """Of the outputs of unknown size of a node that decides sizes: the largest shape that its inputs' allow."""
    for found in _RULES[node.op](node):
        if node.outputs[found.output].nbytes is None:
            yield found
