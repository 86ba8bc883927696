"""Shapes of a GraphDef's tensors, inferred by TensorFlow from its arguments' shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfswap.errors import InvalidModel
from tfswap.ir.types import Shape

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2

HandleType = tuple[int, Any]
"""A resource's element type (as TensorFlow numbers them) and shape proto."""


def infer_shapes(graph_def: graph_pb2.GraphDef, arguments: Mapping[str, tuple[int, Shape, list[HandleType]]]) -> None:
    """Write the `_output_shapes` of `graph_def`, in place, as inferred by TensorFlow from its arguments' shapes.

    Those that it has already are taken for true: a trace knows what `set_shape` said, and ops do not tell.

    Args:
        arguments: per fed node, its element type, its shape, and what it stands for if it is a resource.
    """
    import tensorflow as tf
    from tensorflow.python.ops import handle_data_util

    with tf.Graph().as_default() as scratch:
        bound = {}
        try:
            for i, (name, (dtype, shape, handles)) in enumerate(arguments.items()):
                resource = tf.as_dtype(dtype) == tf.resource
                # Not by its own name: "a/b" would take the name "a" too, and a node "a" be imported as "a_1".
                stand_in = f"tfswap_argument_{i}"
                made = tf.compat.v1.placeholder(dtype, () if resource else shape, name=stand_in)
                if handles:
                    handle_data_util.set_handle_data(made, _handle_data(handles))
                bound[f"{name}:0"] = made
            tf.graph_util.import_graph_def(graph_def, input_map=bound, name="")
        except (ValueError, TypeError) as error:  # a dimension beyond 64 bits is a TypeError
            raise InvalidModel(
                f"TensorFlow can't build this graph with the given input shapes: {error}. "
                "Check batch_size= or input_shapes=."
            ) from error
        inferred = {n.name: n.attr["_output_shapes"] for n in scratch.as_graph_def(add_shapes=True).node}
    for tensor, made in bound.items():
        inferred[tensor.partition(":")[0]] = inferred[made.op.name]
    for node in graph_def.node:
        if node.name in inferred:
            node.attr["_output_shapes"].CopyFrom(inferred[node.name])


def _handle_data(handles: list[HandleType]) -> Any:
    from tensorflow.core.framework import cpp_shape_inference_pb2 as shape_inference

    made = shape_inference.CppShapeInferenceResult.HandleData(is_set=True)
    for dtype, shape in handles:
        made.shape_and_type.add(dtype=dtype).shape.CopyFrom(shape)
    return made
