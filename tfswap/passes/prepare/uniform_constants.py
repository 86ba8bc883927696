"""Makes large constants that hold one value part of the step.

Grappler folds zeros and ones of known sizes into constants (constant_folding.cc, MaterializeConstantValuedNode), such
as gradients that are zero. A constant is in the arena for as long as the step exists. Each of these becomes a Fill that
TensorFlow does not fold, which takes less time than reading the constant. The bits are the same.

Not handled: constants in bodies of loops, which may run several times in a step.
"""

from __future__ import annotations

from tfswap.analysis.constants import LARGE_BYTES
from tfswap.ir.graph import Dtype, Graph, Node, Opaque, Output
from tfswap.ir.op_traits import control_flow
from tfswap.ir.types import ELEMENT_BYTES, HALVES
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_integers, add_scalar
from tfswap.passes.prepare.defer_constants import add_defer

_SHAPE = 0x12
"""The key of a TensorProto's shape: its number and wire type."""
_VALUES = {"bfloat16": 0x6A, "float16": 0x6A, "float32": 0x2A, "float64": 0x32}
"""The key of the values of a type."""
_MORE = 0x80
"""The bit of a byte of a number that more bytes follow."""


@graph_pass(
    ensures="a large constant of floats holds more than one value",
)
def fill_uniform_constants(graph: Graph, target: Target) -> int:
    """Replace large constants of one value by Fills, in the step and in branches, in place; returns how many."""
    kinds = {node: control_flow(node.op) for node in graph.bodies}
    branches = [branch for node, kind in kinds.items() if kind and not kind.is_loop for branch in graph.bodies[node]]
    return _fill(graph) + sum(fill_uniform_constants.apply(branch, target) for branch in branches)


def _fill(graph: Graph) -> int:
    """Replace such constants of a graph, without those of its bodies, in place; returns how many."""
    deferred: dict[tuple[str, bytes, str], Output] = {}  # by type, value and device
    count = 0
    for node in list(graph):
        value = _value(node)
        if value is None:
            continue
        kind = node.outputs[0]
        key = kind.dtype, value, node.device
        if key not in deferred:
            scalar = add_scalar(graph, f"tfswap/{node.name}/value", kind.dtype, node.device, value)
            deferred[key] = add_defer(graph, scalar.out(), node.device)
        dims = add_integers(graph, f"tfswap/{node.name}/shape", [d or 0 for d in kind.shape or ()], node.device)
        node.op, node.inputs = "Fill", (dims.out(), deferred[key])
        node.attrs = {"T": Dtype(kind.dtype), "index_type": Dtype("int32")}
        count += 1
    return count


def _value(node: Node) -> bytes | None:
    """The bytes of the one value of a large constant of floats; None for other nodes.

    A TensorProto that lists one value has it in all elements; where it lists none, these are zeros (tensor.cc). Its
    fields are in the order of their numbers: the type, the shape, and the values in one packed field.
    """
    content = node.attrs.get("value")
    if node.op != "Const" or not isinstance(content, Opaque):
        return None
    kind, data = node.outputs[0], content.data
    key = _VALUES.get(kind.dtype)
    if key is None or (kind.nbytes or 0) < LARGE_BYTES or data[2] != _SHAPE or data[3] >= _MORE:
        return None
    nbytes, values = ELEMENT_BYTES[kind.dtype], data[4 + data[3] :]
    if not values:
        return bytes(nbytes)
    if values[0] != key or len(values) != 2 + values[1]:
        return None
    listed = _numbers(values[2:], nbytes) if kind.dtype in HALVES else values[2:]
    return listed if len(listed) == nbytes else None


def _numbers(packed: bytes, nbytes: int) -> bytes:
    """Packed numbers of variable length, each in this many bytes."""
    made, number, shift = b"", 0, 0
    for byte in packed:
        number |= (byte & ~_MORE) << shift
        shift += 7
        if not byte & _MORE:
            made += number.to_bytes(nbytes, "little")
            number = shift = 0
    return made
