"""Rules for the sizes of ops' results from their inputs, for ops whose result sizes depend on values, as TensorFlow
defines them.

With a rule, the size is computed without the result, which may be large.

Not handled: ops that must run before their results' sizes are known. dynamic_sizes.py runs these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tfswap.ir.graph import Output


class SizeRule(NamedTuple):
    """The rule for a tensor's size.

    Attributes:
        needed: tensors of the graph whose values it needs.
        shape: from these values, as symbolic tensors, to the vector of the axes' lengths; its first argument is the
            shape of `of`, if there is one.
        of: a tensor whose shape alone matters.
    """

    needed: Sequence[Output]
    shape: Callable[..., Any]
    of: Output | None = None


def size_rule(tensor: Output) -> SizeRule | None:
    """The rule for this tensor's size; None where there is none."""
    rule = _RULES.get(tensor.node.op)
    return None if rule is None else rule(tensor)


def _range(tensor: Output) -> SizeRule:
    return SizeRule(tensor.node.inputs, lambda start, limit, delta: _steps(start, limit, delta)[None])


def _ragged_range(tensor: Output) -> SizeRule | None:
    """The second output has the elements of all ranges. The size of the first, one number per range, is known."""

    def shape(starts: Any, limits: Any, deltas: Any) -> Any:
        import tensorflow as tf

        return tf.reduce_sum(_steps(starts, limits, deltas))[None]

    return SizeRule(tensor.node.inputs, shape) if tensor.index == 1 else None


def _steps(start: Any, limit: Any, delta: Any) -> Any:
    """How many numbers there are from `start` to `limit`, in the arithmetic of their own type (sequence_ops.cc).

    Steps of zero, and others that TensorFlow refuses, raise errors in the step itself.
    """
    import tensorflow as tf

    if not start.dtype.is_floating:
        start, limit, delta = (tf.cast(each, tf.int64) for each in (start, limit, delta))
    delta = tf.where(tf.equal(delta, 0), tf.ones_like(delta), delta)
    if not start.dtype.is_floating:
        return tf.maximum(-((start - limit) // delta), 0)
    ahead = tf.equal(limit > start, delta > 0)
    count = tf.math.ceil(tf.abs((limit - start) / delta))
    return tf.cast(tf.where(ahead, count, tf.zeros_like(count)), tf.int64)


def _segments(position: int) -> Callable[[Output], SizeRule]:
    """A row for each segment: those up to the last of the ids at this position, which are sorted
    (segment_reduction_ops_impl.h).

    It does not depend on the data's number of rows, which may be known by a bound only.
    """

    def rule(tensor: Output) -> SizeRule:
        data, ids = tensor.node.inputs[0], tensor.node.inputs[position]
        row = (tensor.type.shape or (None, None))[1:]
        if None in row:
            return SizeRule((ids,), lambda shape, ids: _with_rows(ids, shape[1:]), data)
        return SizeRule((ids,), lambda ids: _with_rows(ids, row))

    return rule


def _stitched(tensor: Output) -> SizeRule | None:
    """A row for each number up to the last of the indices (dynamic_stitch_op.cc)."""
    node = tensor.node
    indices, data = node.inputs[: len(node.inputs) // 2], node.inputs[len(node.inputs) // 2 :]
    if indices[0].type.shape is None or data[0].type.shape is None:
        return None
    rank = len(indices[0].type.shape)
    row = data[0].type.shape[rank:]

    def shape(row: Any, *indices: Any) -> Any:
        import tensorflow as tf

        every = tf.concat([tf.reshape(each, [-1]) for each in indices], 0)
        return _with_rows(tf.reduce_max(tf.concat([every, [-1]], 0))[None], row)

    if None in row:
        return SizeRule(indices, lambda dims, *indices: shape(dims[rank:], *indices), data[0])
    return SizeRule(indices, functools.partial(shape, row))


def _as_many_rows(position: int) -> Callable[[Output], SizeRule | None]:
    """As many rows of the traced shape as the number at this position."""

    def rule(tensor: Output) -> SizeRule | None:
        row = (tensor.type.shape or (None, None))[1:]
        if None in row or tensor.index:
            return None
        return SizeRule((tensor.node.inputs[position],), lambda rows: _rows(rows, row))

    return rule


def _rows(count: Any, row: Any) -> Any:
    import tensorflow as tf

    return tf.concat([tf.reshape(tf.cast(count, tf.int64), [1]), tf.cast(row, tf.int64)], 0)


def _with_rows(ids: Any, row: Any) -> Any:
    import tensorflow as tf

    return _rows(tf.reduce_max(tf.concat([tf.cast(ids[-1:], tf.int64) + 1, [0]], 0)), row)


def _padded(tensor: Output) -> SizeRule | None:
    """As many rows as the ragged tensor has; each level has its longest (ragged_tensor_to_tensor_op.cc)."""
    node = tensor.node
    kinds = _tuple(node.attrs["row_partition_types"])
    wanted, values, _, *partitions = node.inputs
    kept = [d for d in (values.type.shape or ())[1:] if d is not None]
    if values.type.shape is None or len(kept) < len(values.type.shape) - 1 or (kept and values.type.bound):
        return None
    if not {*kinds} <= {b"FIRST_DIM_SIZE", *_LONGEST}:
        return None

    def shape(wanted: Any, *partitions: Any) -> Any:
        import tensorflow as tf

        counted = kinds[0] == b"FIRST_DIM_SIZE"
        rows = partitions[0] if counted else tf.size(partitions[0]) - 1
        levels = [*zip(kinds, partitions, strict=True)][counted:]
        longest = [_LONGEST[kind](each) for kind, each in levels]
        found = tf.stack([tf.cast(rows, tf.int64), *longest, *(tf.constant(d, tf.int64) for d in kept)])
        requested = tf.broadcast_to(tf.cast(wanted, tf.int64), tf.shape(found))
        return tf.where(requested < 0, found, requested)

    return SizeRule((wanted, *partitions), shape)


def _longest_by_splits(splits: Any) -> Any:
    """The length of the longest row; a tensor without rows has none."""
    import tensorflow as tf

    return tf.reduce_max(tf.concat([tf.cast(splits[1:] - splits[:-1], tf.int64), [0]], 0))


def _longest_by_ids(ids: Any) -> Any:
    """The same where each value has the number of its row."""
    import tensorflow as tf

    return tf.reduce_max(tf.concat([tf.math.bincount(tf.cast(ids, tf.int32), dtype=tf.int64), [0]], 0))


_LONGEST: dict[object, Callable[[Any], Any]] = {b"ROW_SPLITS": _longest_by_splits, b"VALUE_ROWIDS": _longest_by_ids}


def _found(tensor: Output) -> SizeRule | None:
    """A value of the default's shape for each key; a table whose keys are vectors has none."""
    _, keys, default = tensor.node.inputs
    if default.type.shape is None or None in default.type.shape or keys.type.shape is None:
        return None
    row = [d for d in default.type.shape if d is not None]
    if len(tensor.type.shape or ()) != len(keys.type.shape) + len(row):
        return None

    def shape(dims: Any) -> Any:
        import tensorflow as tf

        return tf.concat([dims, tf.constant(row, tf.int64)], 0)

    return SizeRule((), shape, keys)


def _by_input(position: int) -> Callable[[Output], SizeRule]:
    """The input at this position is the shape."""
    return lambda tensor: SizeRule((tensor.node.inputs[position],), lambda shape: shape)


def _reshaped(tensor: Output) -> SizeRule:
    def shape(dims: Any, wanted: Any) -> Any:
        import tensorflow as tf

        wanted = tf.cast(wanted, tf.int64)
        others = tf.maximum(tf.reduce_prod(tf.where(wanted < 0, tf.ones_like(wanted), wanted)), 1)
        return tf.where(wanted < 0, tf.reduce_prod(dims) // others, wanted)

    given, wanted = tensor.node.inputs
    return SizeRule((wanted,), shape, given)


def _tiled(tensor: Output) -> SizeRule:
    def shape(dims: Any, times: Any) -> Any:
        import tensorflow as tf

        return dims * tf.cast(times, tf.int64)

    given, times = tensor.node.inputs
    return SizeRule((times,), shape, given)


def _sliced(tensor: Output) -> SizeRule:
    def shape(dims: Any, begin: Any, size: Any) -> Any:
        import tensorflow as tf

        begin, size = tf.cast(begin, tf.int64), tf.cast(size, tf.int64)
        return tf.where(size < 0, dims - begin, size)

    given, *ends = tensor.node.inputs
    return SizeRule(ends, shape, given)


def _strided(tensor: Output) -> SizeRule | None:
    """As `ValidateStridedSliceOp` (strided_slice_op.cc): for each axis whether it is sliced, new or removed."""
    node = tensor.node
    masks = {
        name: int(str(node.attrs[f"{name}_mask"])) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    given, *ends = node.inputs
    axes, specs = given.type.shape, node.inputs[1].type.num_elements
    if axes is None or specs is None:
        return None
    rank = len(axes)

    def has(mask: str, spec: int) -> bool:
        return bool(masks[mask] >> spec & 1)

    def shape(dims: Any, begin: Any, end: Any, strides: Any) -> Any:
        import tensorflow as tf

        begin, end, strides = (tf.cast(each, tf.int64) for each in (begin, end, strides))
        made: list[Any] = []
        axis = 0
        for spec in range(specs):
            if has("ellipsis", spec):
                after = sum(not has("new_axis", later) for later in range(spec + 1, specs))
                made += [dims[each] for each in range(axis, rank - after)]
                axis = rank - after
            elif has("new_axis", spec):
                made.append(tf.constant(1, tf.int64))
            else:
                if not has("shrink_axis", spec):
                    ends = _within(
                        dims[axis], begin[spec], end[spec], strides[spec], has("begin", spec), has("end", spec)
                    )
                    made.append(_steps(*ends, strides[spec]))
                axis += 1
        return tf.convert_to_tensor([*made, *(dims[each] for each in range(axis, rank))], tf.int64)

    return SizeRule(ends, shape, given)


def _within(dim: Any, begin: Any, end: Any, stride: Any, from_first: bool, to_last: bool) -> tuple[Any, Any]:
    """Where a slice of an axis begins and ends: counted from the axis's end where negative, and within the axis."""
    import tensorflow as tf

    forward = stride > 0
    least, most = tf.where(forward, tf.zeros_like(dim), -1), tf.where(forward, dim, dim - 1)
    begin, end = (tf.clip_by_value(tf.where(each < 0, each + dim, each), least, most) for each in (begin, end))
    first, last = tf.where(forward, least, most), tf.where(forward, most, least)
    return first if from_first else begin, last if to_last else end


def _tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


_DRAWS = (
    "RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal",
    "StatelessRandomNormal", "StatelessRandomNormalV2", "StatelessRandomUniform", "StatelessRandomUniformInt",
    "StatelessRandomUniformIntV2", "StatelessRandomUniformV2", "StatelessTruncatedNormal",
    "StatelessTruncatedNormalV2",
)  # fmt: skip

_RULES: dict[str, Callable[[Output], SizeRule | None]] = {
    "BroadcastTo": _by_input(1),
    "DynamicStitch": _stitched,
    "Fill": _by_input(0),
    "LookupTableFind": _found,
    "LookupTableFindV2": _found,
    "ParallelDynamicStitch": _stitched,
    "RaggedRange": _ragged_range,
    "RaggedTensorToTensor": _padded,
    "Range": _range,
    "Reshape": _reshaped,
    "ScatterNd": _by_input(2),
    "SegmentMax": _segments(1),
    "SegmentMean": _segments(1),
    "SegmentMin": _segments(1),
    "SegmentProd": _segments(1),
    "SegmentSum": _segments(1),
    "Slice": _sliced,
    "SparseSegmentMean": _segments(2),
    "SparseSegmentMeanGrad": _as_many_rows(3),
    "SparseSegmentMeanWithNumSegments": _as_many_rows(3),
    "SparseSegmentSqrtN": _segments(2),
    "SparseSegmentSqrtNGrad": _as_many_rows(3),
    "SparseSegmentSqrtNWithNumSegments": _as_many_rows(3),
    "SparseSegmentSum": _segments(2),
    "SparseSegmentSumGrad": _as_many_rows(3),
    "SparseSegmentSumWithNumSegments": _as_many_rows(3),
    "SparseToDense": _by_input(1),
    "StridedSlice": _strided,
    "Tile": _tiled,
    "UnsortedSegmentMax": _as_many_rows(2),
    "UnsortedSegmentMin": _as_many_rows(2),
    "UnsortedSegmentProd": _as_many_rows(2),
    "UnsortedSegmentSum": _as_many_rows(2),
    **dict.fromkeys(_DRAWS, _by_input(0)),
}
