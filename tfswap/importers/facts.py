"""Facts about tensors, as far as an import knows them: comparisons and unions of Arguments."""

from __future__ import annotations

from dataclasses import replace

from tfswap.importers.list_elements import either, with_shape
from tfswap.importers.shapes import HANDLES, Argument, shape_of
from tfswap.ir.graph import SMALL_INTEGERS, Output
from tfswap.ir.types import Shape


def opened(argument: Argument) -> Argument:
    """`argument` without its bound."""
    if argument.content is not None:
        return replace(argument, content=None, handles=[with_shape(kind, None) for kind in argument.handles])
    return replace(argument, value=None) if argument.value is not None else replace(argument, shape=None)


def is_certain(tensor: Output) -> bool:
    """Whether the size of a tensor is certain, and its value or contents do not matter."""
    dtype, count = tensor.type.dtype, tensor.type.num_elements
    has_facts = dtype in HANDLES or (dtype in ("int32", "int64") and count is not None and count <= SMALL_INTEGERS)
    return not has_facts and count is not None and not tensor.type.bound


def says_more(made: Argument, known: Argument) -> bool:
    """Whether the facts `made` include some that `known` does not."""
    if len(made.handles) != len(known.handles):
        return bool(made.handles and not known.handles)
    if made.value is not None:
        return True
    pairs = [(shape_of(a[1]), shape_of(b[1])) for a, b in zip(made.handles, known.handles, strict=True)]
    return any(_knows_more(a, b) for a, b in [(made.shape, known.shape), *pairs])


def _knows_more(made: Shape, known: Shape) -> bool:
    if made is None or known is None:
        return made is not None and known is None
    return any(a is not None and b is None for a, b in zip(made, known, strict=False))


def larger(one: Argument, other: Argument) -> Argument:
    """Facts about a tensor that is one of two: its size is bounded by the larger one."""
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return either(one, other)
    pairs = zip(one.shape, other.shape, strict=True)
    shape = tuple(None if a is None or b is None else max(a, b) for a, b in pairs)
    return replace(either(one, other), shape=shape, bound=one.bound or other.bound or one.shape != other.shape)
