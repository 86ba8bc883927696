"""Makes kernels copy a part of a tensor where only values decide whether the part would be a view, in bodies too.

TensorFlow's slices and repetitions share a part of their input's buffer if it begins at an aligned address and is
contiguous, and copy it otherwise. A view holds the whole buffer, so the bytes that a step holds depend on the begin of
a slice. Where shapes and constants do not decide it, tfswap's own kernel always copies
(csrc/core/copied_view_ops.cc). The bits are the same.

Not handled: a transposition by a permutation that the step computes, of dimensions of one size (oneDNN's graph pass
aborts at labelled ones); splits of a tensor whose size is a bound. On a GPU, and in portable models, all stay as they
are.
"""

from __future__ import annotations

from collections.abc import Iterator

from tfswap.analysis.integer_values import Values, rule_of
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import may_share_by_value
from tfswap.ir.types import REFERENCES
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.kernel_memory import node_memory
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import use_own_kernel


@graph_pass(
    ensures="no kernel shares its input's buffer where only values decide whether it would",
)
def copy_undecided_views(graph: Graph, target: Target) -> int:
    """Have such nodes run tfswap's own kernel, in place; returns how many."""
    found = set(_undecided(graph, target.device, follows=True))
    for body in graph.all_bodies():
        found.update(_undecided(body, target.device, follows=False))
    return use_own_kernel(graph, target.device, found.__contains__)


def _undecided(graph: Graph, device: DeviceModel, *, follows: bool) -> Iterator[Node]:
    """Nodes that may or may not share their input's buffer.

    Args:
        follows: whether integers computed from others are known, as in a step and not in its bodies.
    """
    known: dict[tuple[Node, int], Values] = {(n, 0): v for n, v in graph.small_constants.items()}
    for node in graph.topological():
        rule = rule_of(node) if follows else None
        if rule is not None and (values := rule(node, [known.get(t) for t in node.inputs])) is not None:
            known[node, 0] = values
        if not may_share_by_value(node.op) or node.outputs[0].dtype in REFERENCES:
            continue
        given = {p: known[t.node, t.index] for p, t in enumerate(node.inputs) if (t.node, t.index) in known}
        if not node_memory(node, device, given).exact:
            yield node
