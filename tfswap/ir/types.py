"""Tensor types: element type and shape, without TensorFlow.

Element types have TensorFlow's names ("float32", "resource"). An unknown dimension is None, and so is a shape of
unknown rank. Where values decide the size of a tensor (`tf.where`, `tf.unique`), its shape may be its largest one:
`bound` is then true.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

# Bytes of one element. A string's element is a `tstring` (tensorflow/core/platform/ctstring.h): contents of over 22
# bytes are on the heap. The contents of variants are there too, outside the arena, and a resource is a handle: these
# count as 0.
ELEMENT_BYTES: dict[str, int] = {
    "bfloat16": 2,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int16": 2,
    "int2": 1,
    "int32": 4,
    "int4": 1,
    "int64": 8,
    "int8": 1,
    "qint16": 2,
    "qint32": 4,
    "qint8": 1,
    "quint16": 2,
    "quint8": 1,
    "resource": 0,
    "string": 24,
    "uint16": 2,
    "uint2": 1,
    "uint32": 4,
    "uint4": 1,
    "uint64": 8,
    "uint8": 1,
    "variant": 0,
}

_ROUNDED = ("bfloat", "complex", "float")
"""Prefixes of the names of types whose sums are rounded."""


def is_rounded(dtype: str) -> bool:
    """Whether the last bits of a sum depend on the order in which it is added."""
    return dtype.startswith(_ROUNDED)


REFERENCES = frozenset({"resource", "string", "variant"})
"""Types whose elements refer to memory of their own: a copy of their bytes is no copy."""

HALVES = frozenset({"bfloat16", "float16"})
"""Floats of 16 bits."""

Shape = tuple[int | None, ...] | None


class _TensorType(NamedTuple):
    dtype: str
    shape: Shape
    bound: bool = False


class TensorType(_TensorType):
    """The type of one tensor. A graph has few distinct ones, which its nodes share, so that sizes are computed once.

    Attributes:
        dtype: the element type.
        shape: the dimensions; None where even the rank is unknown.
        bound: whether `shape` is the largest that the tensor can have.
    """

    @cached_property
    def num_elements(self) -> int | None:
        """Number of elements, or None where a dimension is unknown."""
        if self.shape is None:
            return None
        total = 1
        for dim in self.shape:
            if dim is None:
                return None
            total *= dim
        return total

    @cached_property
    def nbytes(self) -> int | None:
        """Bytes of the elements, unrounded, or None where a dimension is unknown."""
        size = ELEMENT_BYTES.get(self.dtype, 0)
        if size == 0:
            return 0
        if self.shape is None or None in self.shape:
            return None
        return size * math.prod(self.shape)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        most = "<=" if self.bound else ""
        if self.shape is None:
            return f"{self.dtype}{most}[*]"
        return f"{self.dtype}{most}[{','.join('?' if d is None else str(d) for d in self.shape)}]"
