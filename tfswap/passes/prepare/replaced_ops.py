"""Replaces ops that TensorFlow would replace, when it makes a step, by several ops without an order.

Its passes before placement replace AccumulateNV2 by a temporary variable to which each term is added when it is ready
(accumulate_n_optimizer.cc), and ParallelConcat, of `tf.parallel_stack`, by a buffer into which each part is written
(parallel_concat_optimizer.cc). Then the planned graph would not be the one that runs.

Such a sum begins with zero and adds each term when it is ready. Sums whose bits depend on that have been replaced
before (passes/prepare/ordered_sums.py); the others add zero and their inputs. A concatenation holds all parts until the
last is computed.

Not handled: a sum of one tensor several times, which TensorFlow's optimizers replace by a product, as for AddN.
"""

from __future__ import annotations

from tfswap.ir.graph import Dtype, Graph, Node
from tfswap.ir.op_traits import adds_when_ready
from tfswap.ir.types import is_rounded
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_scalar
from tfswap.passes.prepare.accumulated_sums import add_pairwise

_CONCATENATE = "ParallelConcat"


@graph_pass(ensures="no node is one that TensorFlow replaces when it makes the step")
def keep_replaced_ops(graph: Graph, _: Target) -> int:
    """Replace such nodes of `graph` and of its bodies, in place; returns how many."""
    count = 0
    for part in (graph, *graph.all_bodies()):
        sums = [node for node in part if adds_when_ready(node.op)]
        for node in sums:
            if is_rounded(node.outputs[0].dtype):
                add_pairwise(part, node, node.inputs)
            else:
                node.op, node.attrs = "AddN", {"N": len(node.inputs), "T": node.attrs["T"]}
        parts = [node for node in part if node.op == _CONCATENATE]
        for node in parts:
            _as_concatenation(part, node)
        count += len(sums) + len(parts)
    return count


def _as_concatenation(graph: Graph, node: Node) -> None:
    dtype, count = node.attrs["T"], len(node.inputs)
    if count == 1:  # for which a concatenation is not defined
        node.op, node.attrs = "Identity", {"T": dtype}
        return
    axis = add_scalar(graph, f"tfswap/{node.name}/axis", "int32", node.device)
    node.op, node.inputs = "ConcatV2", (*node.inputs, axis.out())
    node.attrs = {"N": count, "T": dtype, "Tidx": Dtype("int32")}
