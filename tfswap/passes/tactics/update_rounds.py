"""The rounds of a step's updates of variables.

A step that trains several times, as an unrolled loop does, updates each variable several times. An update's kernels
compute element by element. A kernel that waits for a new value and computes more than that, as those of the next
forward pass do, begins another round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from tfswap.ir import custom_ops
from tfswap.ir.graph import Node
from tfswap.ir.op_traits import READ_VARIABLE, SHARE_READS, is_elementwise, is_sum, is_view

COPIES: Final = frozenset((custom_ops.READ_HOME, custom_ops.STORE_HOME, READ_VARIABLE, SHARE_READS))
"""The ops that read variables, and that copy new values to their homes."""


def rounds_of(nodes: Sequence[Node], writes: Collection[Node]) -> dict[Node, int]:
    """By write, its round, from 0.

    Args:
        nodes: of a graph, in topological order.
        writes: those of them that write the variables.
    """
    found: dict[Node, tuple[int, bool]] = {}  # the round, and whether the node waits for a write of it
    for node in nodes:
        sources = {*(tensor.node for tensor in node.inputs), *node.controls}
        number, waits = max(map(found.__getitem__, sources), default=(0, False))
        if node in writes:
            waits = True
        elif waits and not _passes_on(node):
            number, waits = number + 1, False
        found[node] = number, waits
    return {node: found[node][0] for node in writes}


def last_rounds(
    nodes: Sequence[Node], later: Mapping[Node, Sequence[Node]], rounds: Mapping[Node, int]
) -> dict[Node, int]:
    """By node that a write waits for, the last round of these.

    Args:
        nodes: of a graph, in topological order.
        later: by node, those that wait for it.
        rounds: as `rounds_of` gives them.
    """
    found: dict[Node, int] = {}
    for node in reversed(nodes):
        numbers = [number for each in later[node] if (number := rounds.get(each, found.get(each))) is not None]
        if numbers:
            found[node] = max(numbers)
    return found


def _passes_on(node: Node) -> bool:
    """Whether a node may be part of an update that waits for another one of the same round."""
    op = node.op
    if op == "NoOp":  # between the iterations of a loop
        return False
    return is_elementwise(op) or is_sum(op) or is_view(op) or op in COPIES or not node.outputs
