"""What lists and optionals hold, where the trace left sizes open and they are bound since.

A list knows of its elements what the trace said of them, and TensorFlow's inference leaves it at that, also where an
element with all its sizes known is put in: what a loop over open sizes reads and saves, and what a conditional hands
to its gradient, would stay of unknown size. Here a list's elements have the sizes of those that are put in, and it has
as many of them as it was made with. Elements can be lists and optionals themselves: what a loop inside of a loop saves,
or a conditional. And where a forward loop saves a shape in each iteration, which is the same each time, its backward
loop is given it: by that shape gradients are summed.

The branches of a conditional put what they save into the same optionals, each its own, and the gradient's branches take
it out again: what is in such an optional is known branch by branch.

Not handled: lists whose elements have several sizes, where the trace left these open (`tf.TensorArray` with
`infer_shape=False`). What is put in last is taken for all, and TensorFlow's inference refuses what does not fit that.
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
"""What is in a graph's lists and optionals, as far as that is known."""


class _Made:
    """A node that makes a list or an optional, and what is known of what it reads."""

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
        """The integers that an input holds; none where they are not known."""
        return self._inferred.value(self.node.inputs[position].name) or ()

    def element(self, position: int) -> Argument:
        """An input that is put in."""
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
    """The first input with one more element in it."""
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
    """Parts of the first input, one after the other, as long as the third says."""
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
    """Lists added element by element, or zeros: of the same sizes, and other integers."""
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
"""By op: what is in the list or optional that is its first output."""


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
"""By op: the shapes of its outputs, by how many elements its list has, of which shape, and, where the op is given it,
of how many rows each (in the gradient of TensorListSplit)."""

_COUNTS = frozenset(("TensorListLength",))
"""What gives the number of a list's elements."""

_RANKS = frozenset(("TensorListElementShape",))
"""What gives the shape of a list's elements."""

_GETS = frozenset(("TensorListGetItem",))
"""What gives an element of a list, whichever, or zeros where none is set."""


def has_contents(op: str) -> bool:
    """Whether more may be known of what the op gives than TensorFlow infers, by what is put in, or by what is in it."""
    return op in _MADE or op in _JOINED or op in _COUNTS or op in _RANKS or op in _GETS or pops_list(op) or unwraps(op)


def find_contents(
    graph: Graph, inferred: Inferred, given: Callable[[Output], Content | None], bounded: bool
) -> Contents:
    """What is in the lists and optionals of `graph`.

    Args:
        given: what is in those that the graph is given, and that loops and conditionals give.
        bounded: whether integers may be the most that they can be.
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
    """What is in a list or an optional that comes out of another one, or from elsewhere."""
    if (taken := _taken_out(node)) and node.inputs:
        part = _part(found.get(node.inputs[0]), output - taken[0], node.outputs[output].shape)
        return None if part is None else part.content
    return given(node.out(output))


def _taken_out(node: Node) -> range:
    """Outputs that are elements of the first input."""
    if node.op in _GETS or unwraps(node.op):
        return range(len(node.outputs))
    return range(1, len(node.outputs)) if pops_list(node.op) else range(0)


def _part(content: Content | None, position: int, traced: Shape) -> Argument | None:
    """What is in a list or an optional, where the trace says this of its shape."""
    if content is None:
        return None
    choices = content.by_branch or (content,)
    parts = [c.parts[position] for c in choices if c is not None and c.parts and position < len(c.parts)]
    fitting = [p for p in parts if not _contradict(p.shape, traced)]
    return functools.reduce(either, fitting) if fitting and None not in choices else None


def news(node: Node, inferred: Inferred, found: Contents) -> Iterator[tuple[str, Argument]]:
    """Tensors of `node`, of which more is known by what is in lists and optionals than TensorFlow has inferred."""
    if node.op in _MADE:
        yield from _news_of_list(node.out(), inferred, found.get(node.out()))
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


def _news_of_list(tensor: Output, inferred: Inferred, content: Content | None) -> Iterator[tuple[str, Argument]]:
    """Of a list: the shape of its elements."""
    known = inferred.argument(tensor.name)
    if len(known.handles) != 1 or content is None or content.parts is None or len(content.parts) != 1:
        return
    (kind,) = known.handles
    shape = merged(shape_of(kind[1]), content.parts[0].shape)
    if shape != shape_of(kind[1]):
        yield tensor.name, replace(known, handles=[with_shape(kind, shape)])


def joined(one: Content | None, other: Content | None) -> Content | None:
    """What is true of the one and of the other; of one in which there is nothing everything is."""
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
    """What is in a list or an optional that a conditional gives, where its branches give these."""
    both = functools.reduce(joined, contents)
    if all(c is None or not c.optional for c in contents) or all(c == both for c in contents):
        return both
    return Content(None if both is None else both.parts, optional=True, by_branch=tuple(contents))


def in_branch(argument: Argument, branch: int, branches: int) -> Argument:
    """What a branch of so many is given.

    What the conditional of a forward pass has wrapped in a branch is unwrapped in that of its gradient.
    """
    content = argument.content
    if content is None or len(content.by_branch) != branches:
        return argument
    return replace(argument, content=content.by_branch[branch])


def either(one: Argument, other: Argument) -> Argument:
    """What is known of a tensor that is the one or the other."""
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
    """What both say of one tensor; `one`, where they contradict each other."""
    if one is None or other is None:
        return other if one is None else one
    if _contradict(one, other):
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
