"""Lossless smaller forms of tensors that wait between two uses.

Integers with a known range (integer_ranges.py) become the smallest unsigned integers for that range. Booleans, and
casts of booleans, become bits. Floats with many measured zeros become sparse rows (Jain et al., *Gist*, ISCA 2018).

Invariant: pure functions of the graph, the device and the profile. A form decodes to the same bits for all inputs of
the step, and has a fixed size. Not handled: the bodies of loops and conditionals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tfswap.analysis.encodings import FLOATS
from tfswap.analysis.integer_ranges import Ranges, narrowest
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Node, Output
from tfswap.ir.types import ELEMENT_BYTES, TensorType
from tfswap.kernels.device import DeviceModel

BITS = "bits"
SPARSE = "sparse"
SPARSE_TYPES = frozenset({"bfloat16", "float16", "float32", "float64"})
"""The types of the codec for sparse rows (csrc/codecs/sparse_ops.cc)."""
SPARSE_ROW = 256
MOST_SPARSE = 2**32 - 1
"""The most elements of a tensor in sparse rows, which are counted in 32 bits."""
SLACK = 1.1
"""The capacity of sparse rows, as a multiple of the measured number of nonzero values, which differs between
batches."""
INTEGERS = frozenset({"int16", "int32", "int64", "uint16", "uint32", "uint64"})
"""The types of the codec for integers (csrc/codecs/integer_ops.cc)."""


@dataclass(frozen=True)
class Packing:
    """One tensor that waits in a smaller form.

    Attributes:
        tensor: its name ("node:0").
        form: BITS, SPARSE, or the type of the integers.
        readers: names of the kernels that read the decoded tensor, in groups that share one decoding.
        minimum: the value that is subtracted from integers.
        capacity: the number of nonzero values that sparse rows have room for.
    """

    tensor: str
    form: str
    readers: tuple[tuple[str, ...], ...]
    minimum: int = 0
    capacity: int = 0


class Form(NamedTuple):
    """A smaller form of one tensor.

    Attributes:
        name, minimum, capacity: as `form`, `minimum` and `capacity` of a Packing.
        encode, decode: the ops that encode and decode.
        encode_attrs, decode_attrs: the attributes of these ops.
        kept: the types of the encoding op's outputs.
        takes_shape: whether the decoding op reads the tensor's shape.
    """

    name: str
    minimum: int
    capacity: int
    encode: str
    decode: str
    encode_attrs: Mapping[str, object]
    decode_attrs: Mapping[str, object]
    kept: tuple[TensorType, ...]
    takes_shape: bool = True

    @property
    def nbytes(self) -> int:
        return sum(kind.nbytes or 0 for kind in self.kept)


def no_codec(kind: TensorType) -> str | None:
    """Why no codec takes tensors of that type, whatever is in them; None where one does, or they are as small."""
    if kind.dtype in SPARSE_TYPES | INTEGERS or ELEMENT_BYTES.get(kind.dtype, 0) == 1:
        return None
    return f"no codec takes a {kind.dtype}"


def smaller_form(tensor: Output, ranges: Ranges, device: DeviceModel) -> Form | None:
    """The smallest lossless form of `tensor`; None where none is smaller than the tensor."""
    kind = tensor.type
    if kind.num_elements is None or kind.bound:
        return None
    if kind.dtype == "bool" or (kind.dtype in FLOATS and _is_cast_from_bool(tensor.node)):
        return _bits(kind)
    if kind.dtype not in INTEGERS or device.is_asynchronous:  # it would have to wait for what is out of range
        return None
    found = ranges[tensor]
    narrow = None if found is None else narrowest(found)
    if found is None or narrow is None or ELEMENT_BYTES[narrow] >= ELEMENT_BYTES[kind.dtype]:
        return None
    return _integers(kind, narrow, found.low)


def _is_cast_from_bool(node: Node) -> bool:
    return node.op == "Cast" and node.inputs[0].type.dtype == "bool"


def _bits(kind: TensorType) -> Form:
    of = {"T": Dtype(kind.dtype)}
    attrs = {**of, "predicate": b"true" if kind.dtype == "bool" else b"positive"}
    kept = (TensorType("uint8", (-(-(kind.num_elements or 0) // 8),)),)
    return Form(
        BITS, 0, 0, custom_ops.ENCODE_MASK, custom_ops.DECODE_MASK, attrs, {**of, "Tshape": Dtype("int32")}, kept
    )


def _integers(kind: TensorType, narrow: str, minimum: int) -> Form:
    attrs = {"T": Dtype(kind.dtype), "U": Dtype(narrow), "minimum": minimum}
    kept = (TensorType(narrow, kind.shape),)
    return Form(
        narrow,
        minimum,
        0,
        custom_ops.ENCODE_INTEGERS,
        custom_ops.DECODE_INTEGERS,
        attrs,
        attrs,
        kept,
        takes_shape=False,
    )


def sparse_form(tensor: Output, capacity: int, device: DeviceModel) -> Form | None:
    """Sparse rows with room for `capacity` values; None where `tensor` has none, or they are not smaller.

    Further nonzero values go to host memory when the step runs, as the second output of the encoding op.
    """
    kind = tensor.type
    elements, nbytes = kind.num_elements, kind.nbytes
    if kind.dtype not in SPARSE_TYPES or kind.bound or not elements or not nbytes or device.is_asynchronous:
        return None
    if elements > MOST_SPARSE or not 0 <= capacity <= elements:
        return None
    encoded = sparse_bytes(kind, capacity)
    if encoded >= nbytes:
        return None
    attrs = {"T": Dtype(kind.dtype), "capacity": capacity}
    kept = (TensorType("uint8", (encoded,)), TensorType("variant", ()))
    decode = {**attrs, "Tshape": Dtype("int32")}
    return Form(SPARSE, 0, capacity, custom_ops.ENCODE_SPARSE, custom_ops.DECODE_SPARSE, attrs, decode, kept)


def sparse_bytes(kind: TensorType, capacity: int) -> int:
    """Bytes of sparse rows: the start of each row, then values with their columns (csrc/codecs/sparse_ops.cc,
    `Layout`).
    """
    rows = -(-(kind.num_elements or 0) // SPARSE_ROW)
    return -(-4 * (rows + 1) // 16) * 16 + capacity * _entry_bytes(kind)


def most_spilled_bytes(packing: Packing, kind: TensorType) -> int:
    """The host memory of values beyond the capacity of sparse rows, if no value is zero."""
    if packing.form != SPARSE:
        return 0
    return ((kind.num_elements or 0) - packing.capacity) * _entry_bytes(kind)


def _entry_bytes(kind: TensorType) -> int:
    """Bytes of a value with its column."""
    return ELEMENT_BYTES[kind.dtype] + 1


def form_of(packing: Packing, tensor: Output, ranges: Ranges, device: DeviceModel) -> Form | None:
    """The form that `packing` names; None where `tensor` does not have it."""
    if packing.form == SPARSE:
        form = sparse_form(tensor, packing.capacity, device)
    else:
        form = smaller_form(tensor, ranges, device)
    if form is None:
        return None
    named = packing.form, packing.minimum, packing.capacity
    return form if named == (form.name, form.minimum, form.capacity) else None


def packed_bytes(packing: Packing, kind: TensorType) -> int:
    """The bytes of the packed form of a tensor of this type."""
    elements = kind.num_elements or 0
    if packing.form == SPARSE:
        return sparse_bytes(kind, packing.capacity)
    return -(-elements // 8) if packing.form == BITS else elements * ELEMENT_BYTES[packing.form]
