"""Measures the shares of nonzero values in tensors saved for the backward pass, in one step.

The size of sparse rows depends on it (csrc/codecs/sparse_ops.cc), and a graph does not show it. As there, a value
counts as zero where all of its bits are zero.
"""

from __future__ import annotations

from typing import Any

from tfswap.analysis.lossless_forms import SPARSE_TYPES
from tfswap.analysis.reduced_precision import saved_tensors
from tfswap.exporters.flat_function import FlatFunction
from tfswap.ir.graph import Dtype, Graph, Output
from tfswap.ir.types import ELEMENT_BYTES, TensorType
from tfswap.kernels.profile import Density, types_of


def measure_densities(graph: Graph, concrete: Any, inputs: list[Any]) -> tuple[Density, ...]:
    """The density of each saved tensor, by a forward pass with these inputs; nothing where that does not fit.

    Args:
        graph: of the trace.
        inputs: of the trace, captures included.
    """
    import tensorflow as tf

    counting = graph.copy()
    saved = [s.tensor for s in saved_tensors(counting).values() if s.tensor.type.dtype in SPARSE_TYPES]
    saved = [tensor for tensor in saved if tensor.type.num_elements]
    if not saved:
        return ()
    counting.fetches = [_half_the_count(counting, tensor) for tensor in saved]
    counting.targets = []
    counting.prune()
    try:
        counts = FlatFunction(counting, f"{concrete.graph.name}_densities", concrete.graph.inputs, concrete)(inputs)
    except tf.errors.ResourceExhaustedError:
        return ()
    return tuple(
        Density(tensor.name, types_of(tensor.node), 2 * float(count) / int(tensor.type.num_elements or 1))
        for tensor, count in zip(saved, counts, strict=True)
    )


def _half_the_count(graph: Graph, tensor: Output) -> Output:
    """Half of the number of nonzero values, by L2Loss of ones and zeros, which needs no axes."""
    kind = tensor.type
    words = TensorType(f"int{8 * ELEMENT_BYTES[kind.dtype]}", kind.shape)

    def add(op: str, read: Output, made: TensorType, **attrs: str) -> Output:
        name = graph.unique_name(f"tfswap/density/{tensor.node.name}_{tensor.index}/{op}")
        typed = {key: Dtype(dtype) for key, dtype in attrs.items()}
        return graph.add(op, name, (read,), attrs=typed, outputs=(made,), device=tensor.node.device).out()

    bits = add("Bitcast", tensor, words, T=kind.dtype, type=words.dtype)
    there = add("Cast", bits, TensorType("bool", kind.shape), SrcT=words.dtype, DstT="bool")
    ones = add("Cast", there, TensorType("float32", kind.shape), SrcT="bool", DstT="float32")
    return add("L2Loss", ones, TensorType("float32", ()), T="float32")
