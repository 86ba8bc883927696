"""Whole tensors that can wait in a smaller form that gives back every bit, and what they are then.

Integers whose range is known before the step runs (`analysis/ranges.py`) as the smallest unsigned integers that hold
it, booleans as bits (Jain et al., *Gist*, ISCA 2018, where a value needs no more bits than its range has).

Invariant: pure functions of the graph and the device; what is listed decodes to the same bits, whatever a step is fed.
Not handled: the bodies of loops and conditionals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tfswap.analysis.device import DeviceModel
from tfswap.analysis.ranges import Ranges, narrowest
from tfswap.ir.graph import Dtype, Output
from tfswap.ir.types import ELEMENT_BYTES, TensorType
from tfswap.oplib import names

BITS = "bits"
INTEGERS = frozenset({"int16", "int32", "int64", "uint16", "uint32", "uint64"})
"""What the codec takes (csrc/codecs/integer_ops.cc)."""


@dataclass(frozen=True)
class Packing:
    """One tensor that waits in a smaller form.

    Attributes:
        tensor: its name ("node:0").
        form: BITS, or the type of the integers.
        readers: names of the kernels that read what is decoded, those together that share one decoding.
        minimum: what integers are counted from.
    """

    tensor: str
    form: str
    readers: tuple[tuple[str, ...], ...]
    minimum: int = 0


class Form(NamedTuple):
    """A smaller form of one tensor.

    Attributes:
        name, minimum: as `form` and `minimum` of a Packing.
        encode, decode: the ops.
        encode_attrs, decode_attrs: theirs.
        kept: the types of what is kept.
        wants_shape: whether what decodes reads the tensor's shape.
    """

    name: str
    minimum: int
    encode: str
    decode: str
    encode_attrs: Mapping[str, object]
    decode_attrs: Mapping[str, object]
    kept: tuple[TensorType, ...]
    wants_shape: bool = True

    @property
    def nbytes(self) -> int:
        return sum(kind.nbytes or 0 for kind in self.kept)


def smaller_form(tensor: Output, ranges: Ranges, device: DeviceModel) -> Form | None:
    """The smallest form that gives `tensor` back, or None where there is none that is smaller."""
    kind = tensor.type
    if kind.num_elements is None or kind.bound:
        return None
    if kind.dtype == "bool":
        return _bits(kind)
    if kind.dtype not in INTEGERS or device.kind != "cpu":  # a GPU would have to wait for what is out of range
        return None
    found = ranges[tensor]
    narrow = None if found is None else narrowest(found)
    if found is None or narrow is None or ELEMENT_BYTES[narrow] >= ELEMENT_BYTES[kind.dtype]:
        return None
    return _integers(kind, narrow, found.low)


def _bits(kind: TensorType) -> Form:
    attrs = {"T": Dtype("bool"), "predicate": b"true"}
    kept = (TensorType("uint8", (-(-(kind.num_elements or 0) // 8),)),)
    return Form(BITS, 0, names.ENCODE_MASK, names.DECODE_MASK, attrs, {"Tshape": Dtype("int32")}, kept)


def _integers(kind: TensorType, narrow: str, minimum: int) -> Form:
    attrs = {"T": Dtype(kind.dtype), "U": Dtype(narrow), "minimum": minimum}
    kept = (TensorType(narrow, kind.shape),)
    return Form(narrow, minimum, names.ENCODE_INTEGERS, names.DECODE_INTEGERS, attrs, attrs, kept, wants_shape=False)


def packed_bytes(packing: Packing, kind: TensorType) -> int:
    """The bytes that a tensor of that type waits in."""
    elements = kind.num_elements or 0
    return -(-elements // 8) if packing.form == BITS else elements * ELEMENT_BYTES[packing.form]
