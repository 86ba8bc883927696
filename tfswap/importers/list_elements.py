"""The types of elements in lists and optionals whose sizes the trace left open.

TensorFlow's inference gives a list's elements the shape of the trace, even where an element with a known shape is put
in. Tensors that a loop over open sizes saves, and those that a conditional passes to its gradient, would have unknown
sizes. Here a list's elements have the shapes of the tensors that are put in, and a list has the length that it was
created with. Elements can be lists and optionals themselves: those that inner loops and conditionals save. Where a
forward loop saves the same shape in each iteration, its value is known to the backward loop, which sums gradients to
that shape.

Each branch of a conditional puts its own tensors into the same optionals, which the gradient's branches read. The
contents of such an optional are recorded by branch.

Not handled: lists whose elements have different shapes that the trace left open (`tf.TensorArray` with
`infer_shape=False`). All elements get the last one's shape, and TensorFlow's inference refuses inconsistent ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from tfswap.importers.shapes import Argument, Content, HandleType, Inferred, shape_of
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import passes_on, pops_list, unwraps
from tfswap.ir.types import Shape

Contents = Mapping[Output, Content]
"""The known contents of a graph's lists and optionals."""


class _Made:
    """A node that makes a list or an optional, and the facts about its inputs."""

    def __init__(self, node: Node, inferred: Inferred, found: Contents, bounded: bool):
        self.node = node
        self._inferred = inferred
        self._found = found
        self._bounded = bounded

    def content(self, position: int) -> Content | None:
        return self._found.get(self.node.inputs[position])

    def number(self, position: int) -> int | None:
        value = self._inferred.value(self.node.inputs[position].name)
        return None if value is None or len(value) != 1 else value[0]

    def values(self, position: int) -> tuple[int, ...]:
        """The integers of an input; empty where unknown."""
        return self._inferred.value(self.node.inputs[position].name) or ()

    def element(self, position: int) -> Argument:
        """An input that becomes an element."""
        tensor = self.node.inputs[position]
        argument, value = self._inferred.argument(tensor.name), self._inferred.value(tensor.name)
        bound = tensor.type.bound or (value is not None and self._bounded)
        return replace(argument, value=value, content=self._found.get(tensor), bound=bound)

    def row(self) -> Argument:
        """A row of the first input."""
        argument, bound = self._inferred.argument(self.node.inputs[0].name), self.node.inputs[0].type.bound
        return replace(argument, shape=None if argument.shape is None else argument.shape[1:], bound=bound)


_Rule = Callable[[_Made], Content | None]


def _filled(made: _Made, position: int, length: Callable[[int], int | None]) -> Content | None:
    """The first input with one more element."""
    content = made.content(0)
    if content is None:
        return None
    both = joined(content, Content((made.element(position),), content.length))
    return None if both is None else replace(both, length=None if content.length is None else length(content.length))


def _set(made: _Made) -> Content | None:
    index = made.number(1)
    grows = made.node.attrs.get("resize_if_index_out_of_bounds")
    return _filled(made, 2, lambda n: (None if index is None else max(n, index + 1)) if grows else n)


def _shorter(made: _Made) -> Content | None:
    content = made.content(0)
    return replace(content, length=content.length - 1) if content is not None and content.length else content


def _resized(made: _Made) -> Content | None:
    content = made.content(0)
    return None if content is None else replace(content, length=made.number(1))


def _split_rows(made: _Made) -> Content:
    _, shape, bound = made.node.inputs[0].type
    return Content((made.row(),), None if bound or not shape else shape[0])


def _split_at(made: _Made) -> Content:
    """Consecutive parts of the first input, with the lengths in the third."""
    lengths = made.node.inputs[2]
    values = set(made.values(2))
    row = made.row()
    rows = values.pop() if len(values) == 1 else None
    part = replace(row, shape=None if row.shape is None else (rows, *row.shape))
    return Content((part,), None if lengths.type.bound else lengths.type.num_elements)


def _scattered(made: _Made) -> Content:
    number = made.number(3)
    return Content((made.row(),), None if number == -1 else number)


def _put_together(made: _Made) -> Content | None:
    found = [made.content(i) for i in range(len(made.node.inputs))]
    known = [c for c in found if c is not None]
    if not known or len(known) < len(found):
        return None
    lengths = [c.length for c in known]
    both = functools.reduce(joined, [replace(c, length=None) for c in known])
    return None if both is None else replace(both, length=None if None in lengths else sum(n or 0 for n in lengths))


def _wrapped(made: _Made) -> Content:
    return Content(tuple(made.element(i) for i in range(len(made.node.inputs))), optional=True)


def _sum(made: _Made) -> Content | None:
    """Lists added element by element, or zeros: the elements keep their sizes and lose their values."""
    both = functools.reduce(joined, [made.content(i) for i in range(len(made.node.inputs))])
    if both is None or both.parts is None:
        return both
    return replace(both, parts=tuple(replace(p, value=None) for p in both.parts))


_MADE: Mapping[str, _Rule] = {
    "AddN": _sum,
    "AddV2": _sum,
    "EmptyTensorList": lambda made: Content((), 0),
    "OptionalFromValue": _wrapped,
    "OptionalNone": lambda made: Content((), optional=True),
    "TensorListConcatLists": _put_together,
    "TensorListFromTensor": _split_rows,
    "TensorListPopBack": _shorter,
    "TensorListPushBack": lambda made: _filled(made, 1, lambda n: n + 1),
    "TensorListReserve": lambda made: Content((), made.number(1)),
    "TensorListResize": _resized,
    "TensorListScatterV2": _scattered,
    "TensorListSetItem": _set,
    "TensorListSplit": _split_at,
    "ZerosLike": _sum,
}
"""The contents of the list or optional that is an op's first output."""


def _stacked(length: int, element: Shape, rows: Sequence[int]) -> Iterator[tuple[int, Shape]]:
    if element is not None:
        yield 0, (length, *element)


def _concatenated(length: int, element: Shape, rows: Sequence[int]) -> Iterator[tuple[int, Shape]]:
    if element:
        alike = None if element[0] is None else length * element[0]
        yield 0, (sum(rows) if len(rows) == length > 0 else alike, *element[1:])
    yield 1, (length,)


_JOINED: Mapping[str, Callable[[int, Shape, Sequence[int]], Iterator[tuple[int, Shape]]]] = {
    "TensorListConcatV2": _concatenated,
    "TensorListStack": _stacked,
}
"""The shapes of an op's outputs, from the length of its list, the shape of the elements, and their numbers of rows
(in the gradient of TensorListSplit)."""

_COUNTS = frozenset(("TensorListLength",))
"""Ops that give the number of a list's elements."""

_RANKS = frozenset(("TensorListElementShape",))
"""Ops that give the shape of a list's elements."""

_GETS = frozenset(("TensorListGetItem",))
"""Ops that give any element of a list, or zeros where it is not set."""


def has_contents(op: str) -> bool:
    """Whether the contents of lists and optionals may say more about the op's results than TensorFlow infers."""
    return op in _MADE or op in _JOINED or op in _COUNTS or op in _RANKS or op in _GETS or pops_list(op) or unwraps(op)


def find_contents(
    graph: Graph, inferred: Inferred, given: Callable[[Output], Content | None], bounded: bool
) -> Contents:
    """The contents of the lists and optionals of `graph`.

    Args:
        given: gives the contents of arguments, and of results of loops and conditionals.
        bounded: whether integer values may be upper bounds.
    """
    found: dict[Output, Content] = {}
    if not any(kind.dtype == "variant" for node in graph for kind in node.outputs):
        return found
    for node in graph.topological():
        for i in (i for i, kind in enumerate(node.outputs) if kind.dtype == "variant"):
            if passes_on(node.op):
                content = found.get(node.inputs[i])
            elif node.op in _MADE and i == 0:
                content = _MADE[node.op](_Made(node, inferred, found, bounded))
            else:
                content = _taken(node, i, found, given)
            if content is not None:
                found[node.out(i)] = content
    return found


def _taken(node: Node, output: int, found: Contents, given: Callable[[Output], Content | None]) -> Content | None:
    """The contents of a list or an optional that is an element of another one, or that `given` knows."""
    if (taken := _taken_out(node)) and node.inputs:
        part = _part(found.get(node.inputs[0]), output - taken[0], node.outputs[output].shape)
        return None if part is None else part.content
    return given(node.out(output))


def _taken_out(node: Node) -> range:
    """The numbers of outputs that are elements of the first input."""
    if node.op in _GETS or unwraps(node.op):
        return range(len(node.outputs))
    return range(1, len(node.outputs)) if pops_list(node.op) else range(0)


def _part(content: Content | None, position: int, traced: Shape) -> Argument | None:
    """The element at a position, as far as it is consistent with the shape in the trace."""
    if content is None:
        return None
    choices = content.by_branch or (content,)
    parts = [c.parts[position] for c in choices if c is not None and c.parts and position < len(c.parts)]
    fitting = [p for p in parts if not _contradict(p.shape, traced)]
    return functools.reduce(either, fitting) if fitting and None not in choices else None


def new_facts(node: Node, inferred: Inferred, found: Contents) -> Iterator[tuple[str, Argument]]:
    """Facts about outputs of `node` that the contents of lists and optionals give, and TensorFlow does not infer."""
    if node.op in _MADE:
        yield from _facts_of_list(node.out(), inferred, found.get(node.out()))
    if not node.inputs:
        return
    content = found.get(node.inputs[0])
    if node.op in _RANKS and (element := _part(content, 0, None)) is not None and element.shape is not None:
        known = inferred.argument(node.out().name)
        if known.shape != (len(element.shape),):
            yield node.out().name, replace(known, shape=(len(element.shape),))
    if content is not None and content.length is not None:
        if node.op in _COUNTS and inferred.value(node.out().name) is None:
            yield node.out().name, replace(inferred.argument(node.out().name), value=(content.length,))
        if node.op in _JOINED:
            element = _part(content, 0, None)
            lengths = [inferred.value(tensor.name) for tensor in node.inputs[2:3]]
            rows = lengths[0] if lengths and lengths[0] is not None else ()
            shapes = _JOINED[node.op](content.length, None if element is None else element.shape, rows)
            for i, shape in shapes:
                known = inferred.argument(node.out(i).name)
                if (better := merged(known.shape, shape)) != known.shape:
                    yield node.out(i).name, replace(known, shape=better)
    taken = _taken_out(node)
    held = inferred.argument(node.inputs[0].name).handles
    for i in taken:
        known = inferred.argument(node.out(i).name)
        part = _part(content, i - taken[0], known.shape)
        shape, value, handles, bound = known.shape, None, known.handles, False
        if part is not None:
            bound = part.bound
            shape, handles = merged(shape, part.shape), _merged_handles(handles, part.handles)
            value = None if node.op in _GETS or inferred.value(node.out(i).name) is not None else part.value
        elif len(held) == len(taken):
            shape = merged(shape, shape_of(held[i - taken[0]][1]))
        if shape != known.shape or value is not None or handles != known.handles:
            yield node.out(i).name, replace(known, shape=shape, value=value, handles=handles, bound=bound)


def _facts_of_list(tensor: Output, inferred: Inferred, content: Content | None) -> Iterator[tuple[str, Argument]]:
    """The shape of a list's elements, where it is new."""
    known = inferred.argument(tensor.name)
    if len(known.handles) != 1 or content is None or content.parts is None or len(content.parts) != 1:
        return
    (kind,) = known.handles
    shape = merged(shape_of(kind[1]), content.parts[0].shape)
    if shape != shape_of(kind[1]):
        yield tensor.name, replace(known, handles=[with_shape(kind, shape)])


def joined(one: Content | None, other: Content | None) -> Content | None:
    """The facts that hold for both; an empty one agrees with any other."""
    if one is None or other is None or one.optional != other.optional:
        return None
    length = one.length if one.length == other.length else None
    for empty, full in ((one, other), (other, one)):
        if empty.parts == ():
            return replace(full, length=length)
    if len(one.by_branch) == len(other.by_branch):
        by_branch = tuple(joined(a, b) for a, b in zip(one.by_branch, other.by_branch, strict=True))
    else:
        by_branch = ()
    parts = None
    if one.parts is not None and other.parts is not None and len(one.parts) == len(other.parts):
        parts = tuple(either(a, b) for a, b in zip(one.parts, other.parts, strict=True))
    return Content(parts, length, one.optional, by_branch)


def of_branches(contents: Sequence[Content | None]) -> Content | None:
    """The contents of a list or an optional that a conditional returns, from those of its branches."""
    both = functools.reduce(joined, contents)
    if all(c is None or not c.optional for c in contents) or all(c == both for c in contents):
        return both
    return Content(None if both is None else both.parts, optional=True, by_branch=tuple(contents))


def in_branch(argument: Argument, branch: int, branches: int) -> Argument:
    """The argument of one branch of a conditional. An optional that the forward pass's branches have wrapped has the
    contents of the branch of the same number.
    """
    content = argument.content
    if content is None or len(content.by_branch) != branches:
        return argument
    return replace(argument, content=content.by_branch[branch])


def either(one: Argument, other: Argument) -> Argument:
    """The facts about a tensor that is one of two."""
    return Argument(
        one.dtype,
        common(one.shape, other.shape),
        _either_handle(one, other),
        one.bound or other.bound,
        one.value if one.value == other.value and one.shape == other.shape else None,
        joined(one.content, other.content),
    )


def _either_handle(one: Argument, other: Argument) -> list[HandleType]:
    pairs = list(zip(one.handles, other.handles, strict=False))
    if len(one.handles) != len(other.handles) or any(a[0] != b[0] or a[2:] != b[2:] for a, b in pairs):
        return []
    return [a if a == b else with_shape(a, common(shape_of(a[1]), shape_of(b[1]))) for a, b in pairs]


def _merged_handles(one: Sequence[HandleType], other: Sequence[HandleType]) -> Sequence[HandleType]:
    if len(one) != len(other):
        return one or other
    pairs = [(a, merged(shape_of(a[1]), shape_of(b[1]))) for a, b in zip(one, other, strict=True)]
    return [kind if shape == shape_of(kind[1]) else with_shape(kind, shape) for kind, shape in pairs]


def _contradict(one: Shape, other: Shape) -> bool:
    if one is None or other is None:
        return False
    return len(one) != len(other) or any(a != b and None not in (a, b) for a, b in zip(one, other, strict=True))


def merged(one: Shape, other: Shape) -> Shape:
    """One tensor's shape from both; `one` where they contradict each other."""
    if one is None or other is None:
        return other if one is None else one
    if _contradict(one, other):
        return one
    return tuple(b if a is None else a for a, b in zip(one, other, strict=True))


def common(one: Shape, other: Shape) -> Shape:
    """The dimensions that two shapes have in common; None where their ranks differ."""
    if one is None or other is None or len(one) != len(other):
        return None
    return tuple(a if a == b else None for a, b in zip(one, other, strict=True))


def with_shape(kind: HandleType, shape: Shape) -> HandleType:
    """The handle type with another shape."""
    from tensorflow.python.framework import tensor_shape

    return (kind[0], tensor_shape.TensorShape(shape).as_proto(), *kind[2:])
