"""What lists and optionals hold, where the trace left sizes open and they are bound since.

A list knows of its elements what the trace said of them, and TensorFlow's inference leaves it at that, also where an
element with all its sizes known is put in: what a loop over open sizes reads and saves, and what a conditional hands
to its gradient, would stay of unknown size. Here a list's elements have the sizes of those that are put in. And where
a forward loop saves a shape in each iteration, which is the same each time, its backward loop is told it: by that shape
gradients are summed.

Not handled: lists whose elements have several sizes, where the trace left these open (`tf.TensorArray` with
`infer_shape=False`). What is put in last is taken for all, and TensorFlow's inference refuses what does not fit that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from tfswap.importers.shapes import Argument, Content, HandleType, Inferred, shape_of
from tfswap.ir.graph import Node, Output
from tfswap.ir.ops import empties_list, passes_on, pops_list, pushes_list, unwraps, wraps
from tfswap.ir.types import Shape

NOTHING = "nothing"


def _element(position: int) -> Callable[[Node], Shape]:
    return lambda node: node.inputs[position].type.shape


def _rows(node: Node) -> Shape:
    shape = node.inputs[0].type.shape
    return None if shape is None else shape[1:]


_ELEMENTS: Mapping[str, Callable[[Node], Shape]] = {
    "TensorListFromTensor": _rows,
    "TensorListPushBack": _element(1),
    "TensorListScatterV2": _rows,
    "TensorListSetItem": _element(2),
}
"""Of ops that give a list: the shape of an element that they put in."""


def has_contents(op: str) -> bool:
    """Whether more may be known of what the op gives than TensorFlow infers, by what is put in, or by what is in it."""
    return op in _ELEMENTS or pops_list(op) or unwraps(op)


def contents(node: Node, inferred: Inferred, given: Callable[[Output], Content]) -> Iterator[tuple[str, Argument]]:
    """Tensors of `node`, of which more is known than TensorFlow has inferred.

    Args:
        given: what is in the lists and optionals that the graph is given, and that loops and conditionals give.
    """
    if node.op in _ELEMENTS:
        known = inferred.argument(node.out().name)
        if len(known.handles) == 1:
            (kind,) = known.handles
            shape = merged(shape_of(kind[1]), _ELEMENTS[node.op](node))
            if shape != shape_of(kind[1]):
                yield node.out().name, replace(known, handles=[with_shape(kind, shape)])
        return
    taken = list(range(len(node.outputs)))[1 if pops_list(node.op) else 0 :]
    held = inferred.argument(node.inputs[0].name).handles
    content = content_of(node.inputs[0], inferred, given)
    for i, kind in zip(taken, held if len(held) == len(taken) else (), strict=False):
        known = inferred.argument(node.out(i).name)
        shape = merged(known.shape, shape_of(kind[1]))
        value = content if isinstance(content, tuple) and len(taken) == 1 else None
        if shape != known.shape or (value is not None and inferred.value(node.out(i).name) is None):
            yield node.out(i).name, replace(known, shape=shape, value=value)


def content_of(tensor: Output, inferred: Inferred, given: Callable[[Output], Content]) -> Content:
    """The integers that are in a list or an optional; None where they are not known, or not the same in all of it."""
    node = tensor.node
    if passes_on(node.op):
        return content_of(node.inputs[tensor.index], inferred, given)
    if empties_list(node.op):
        return NOTHING
    if pushes_list(node.op):
        return joined(content_of(node.inputs[0], inferred, given), inferred.value(node.inputs[1].name))
    if pops_list(node.op):
        return content_of(node.inputs[0], inferred, given)
    if wraps(node.op):
        return inferred.value(node.inputs[0].name) if len(node.inputs) == 1 else None
    return given(tensor)


def joined(one: Content, other: Content) -> Content:
    """What is in both."""
    if NOTHING in (one, other):
        return other if one == NOTHING else one
    return one if one == other else None


def merged(one: Shape, other: Shape) -> Shape:
    """What both say of one tensor; `one`, where they contradict each other."""
    if one is None or other is None:
        return other if one is None else one
    if len(one) != len(other) or any(
        a != b and a is not None and b is not None for a, b in zip(one, other, strict=True)
    ):
        return one
    return tuple(b if a is None else a for a, b in zip(one, other, strict=True))


def common(one: Shape, other: Shape) -> Shape:
    """What is true of the one and of the other."""
    if one is None or other is None or len(one) != len(other):
        return None
    return tuple(a if a == b else None for a, b in zip(one, other, strict=True))


def with_shape(kind: HandleType, shape: Shape) -> HandleType:
    """The same of another shape."""
    from tensorflow.python.framework import tensor_shape

    return (kind[0], tensor_shape.TensorShape(shape).as_proto(), *kind[2:])
