"""The time of kernels that XLA compiles into one block, and what TensorFlow's take that a block replaces.

XLA's CPU compiler makes a loop for each result of a block, and for each reduction that others read. A loop reads what
it needs of the block's inputs and of other loops' results, and computes what lies between anew. Loops move memory at
the rate of TensorFlow's element-wise kernels, and have the arithmetic of these (analysis/work.py) in addition; sums
along other axes than the last have none. `benchmarks/fused_blocks.py` compares it with measured times.

Not handled: arguments in the caches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from tfswap.analysis.work import elements, work_of
from tfswap.ir.graph import Node, Output
from tfswap.ir.op_traits import is_const, is_view
from tfswap.kernels.fused import REDUCTIONS
from tfswap.kernels.hardware import Rates
from tfswap.support.reach import reach

LAUNCH_S = 10e-6
"""The time of a call of a block besides its loops."""


def block_seconds(
    nodes: Sequence[Node], outputs: Collection[Output], rates: Rates, axes: Mapping[Node, tuple[int, ...]]
) -> float:
    """Seconds of one run of a block.

    Args:
        nodes: those that it computes, in topological order.
        outputs: its results.
        axes: by constant, its values.
    """
    inside = set(nodes)
    ends = _ends(nodes, outputs)
    return LAUNCH_S + sum(_loop_seconds(end, ends, inside, rates, axes) for end in sorted(ends, key=lambda n: n.name))


def _ends(nodes: Sequence[Node], outputs: Collection[Output]) -> set[Node]:
    """The nodes whose results are written by a loop of their own."""
    readers: dict[Node, list[Node]] = {}
    for node in nodes:
        for source in {tensor.node for tensor in node.inputs}:
            readers.setdefault(source, []).append(node)

    def is_read_alone(node: Node) -> bool:
        """Whether one kernel of as many elements reads a reduction: both are one loop."""
        after = readers.get(node, [])
        return len(after) == 1 and after[0].outputs[0].num_elements == node.outputs[0].num_elements

    reductions = {node for node in nodes if node.op in REDUCTIONS and not is_read_alone(node)}
    return reductions | {tensor.node for tensor in outputs}


def _loop_seconds(
    end: Node, ends: Collection[Node], inside: Collection[Node], rates: Rates, axes: Mapping[Node, tuple[int, ...]]
) -> float:
    def before(node: Node) -> Iterator[Node]:
        return (t.node for t in node.inputs if t.node in inside and t.node not in ends)

    computed = [node for node in reach([end], before) if not is_const(node.op)]
    read = {t for node in computed for t in node.inputs if t.node not in inside or t.node in ends}
    moved = sum(t.type.nbytes or 0 for t in (*read, end.out()) if not is_const(t.node.op))
    steps = sum(_steps(node, rates, axes) for node in computed)
    return moved / rates.memory_bytes_per_s + steps / rates.steps_per_s


def _steps(node: Node, rates: Rates, axes: Mapping[Node, tuple[int, ...]]) -> float:
    if node.op in REDUCTIONS and not _adds_rows(node, axes):
        return 0.0
    return work_of(node, rates).steps * max(elements(kind) for kind in (*node.outputs, node.inputs[0].type))


def _adds_rows(node: Node, axes: Mapping[Node, tuple[int, ...]]) -> bool:
    """Whether a reduction adds up neighbours: one of its axes is the last."""
    count = len(node.inputs[0].type.shape or ())
    over = axes.get(node.inputs[1].node)
    return over is None or any(axis % max(1, count) == count - 1 for axis in over)


def in_place_seconds(node: Node, uses: Mapping[Output, int], rates: Rates) -> float:
    """What a kernel takes in addition where it can't write its result over what it reads: the processor reads memory
    before it writes parts of it.

    Args:
        uses: by tensor, the number of nodes that read it.
    """
    nbytes = node.outputs[0].nbytes or 0
    if is_view(node.op) or any(t.type == node.outputs[0] and uses[t] == 1 for t in node.inputs):
        return 0.0
    return nbytes / rates.memory_bytes_per_s
