"""Converts sums that add each term when it is ready (AccumulateNV2) to TensorFlow's form, and to sums in an order.

Before placement and its optimizers TensorFlow replaces such a sum by a temporary variable of zeros, and by a kernel for
each term that adds it when it is ready (tensorflow/core/common_runtime/accumulate_n_optimizer.cc,
RewriteIntoTempVariable). The order of these kernels is the order of the additions.

Not handled: such sums in the bodies of loops and conditionals, for which TensorFlow has no kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from tfswap.ir.graph import Dims, Dtype, Graph, Node, Output
from tfswap.ir.op_traits import adds_when_ready
from tfswap.ir.types import TensorType, is_rounded
from tfswap.passes.nodes import PRESERVE, add_scalar

_EXACT = 2
"""A sum of zero and this many terms, or fewer, does not depend on their order."""
_VARIABLE, _ADD, _RESULT = "TemporaryVariable", "AssignAdd", "DestroyTemporaryVariable"


def add_by_kernels(graph: Graph) -> None:
    """Replace sums of `graph` whose bits depend on the order by a kernel for each term, in place.

    Nodes have the names and numbers that TensorFlow gives them.
    """
    sums = [n for n in graph if adds_when_ready(n.op) and len(n.inputs) > _EXACT and is_rounded(n.outputs[0].dtype)]
    numbers = itertools.count()
    for node in sums:
        _by_kernels(graph, node, numbers)


def _by_kernels(graph: Graph, node: Node, numbers: itertools.count[int]) -> None:
    kind, dtype = node.outputs[0], Dtype(node.outputs[0].dtype)

    def add(op: str, inputs: Sequence[Node | Output], attrs: Mapping[str, object], kind: TensorType = kind) -> Node:
        name = graph.unique_name(f"{node.name}/Internal/_{next(numbers)}")
        read = [each.out() if isinstance(each, Node) else each for each in inputs]
        return graph.add(op, name, read, attrs=attrs, outputs=(kind,), device=node.device)

    named = {"var_name": _variable_name(node)}
    variable = add(_VARIABLE, (), {"shape": Dims((0,)), "dtype": dtype, **named})
    shape = add(
        "Shape",
        node.inputs[:1],
        {"T": dtype, "out_type": Dtype("int32")},
        TensorType("int32", (None if kind.shape is None else len(kind.shape),)),
    )
    zero = add_scalar(graph, f"{node.name}/Internal/_{next(numbers)}", kind.dtype, node.device)
    zeros = add("Fill", (shape, zero), {"T": dtype, "index_type": Dtype("int32")})
    start = add("Assign", (variable, zeros), {"T": dtype, "use_locking": True, "validate_shape": False})
    start.controls = node.controls
    kernels = [add(_ADD, (start, term), {"T": dtype, "use_locking": True}) for term in node.inputs]
    node.op, node.inputs, node.controls, node.attrs = _RESULT, (start.out(),), tuple(kernels), {"T": dtype, **named}


def sums_by_kernels(graph: Graph) -> dict[Node, list[Node]]:
    """The result of `add_by_kernels`: by sum, the kernels that add its terms."""
    sums: dict[Output, Node] = {}
    for node in graph:
        if node.op == _RESULT and node.attrs["var_name"] == _variable_name(node):
            sums[node.inputs[0]] = node
    kernels: dict[Node, list[Node]] = {node: [] for node in sums.values()}
    for node in graph if sums else ():
        if node.op == _ADD and node.inputs[0] in sums:
            kernels[sums[node.inputs[0]]].append(node)
    return kernels


def add_in_order(graph: Graph, node: Node, kernels: Sequence[Node]) -> None:
    """Have the sum `node` add in the order of `kernels`, which add its terms."""
    start = node.inputs[0].node
    waits = (*start.controls, *(control for kernel in kernels for control in kernel.controls), *node.controls)
    node.controls = tuple(dict.fromkeys(control for control in waits if control not in kernels))
    add_pairwise(graph, node, [kernel.inputs[1] for kernel in kernels])


def add_pairwise(graph: Graph, node: Node, terms: Sequence[Output]) -> None:
    """Have `node` add `terms` to zero one after another, so that each is freed once it is added."""
    kind, attrs = node.outputs[0], {"T": Dtype(node.outputs[0].dtype), PRESERVE: True}
    place = {other: rank for rank, other in enumerate(graph)}
    followers: dict[Node, list[Node]] = {}
    last = terms[0].node
    total = add_scalar(graph, f"tfswap/{node.name}/zero", kind.dtype, node.device).out()
    for term in terms[:-1]:
        name = graph.unique_name(f"tfswap/{node.name}/part")
        read, waits = (term, total), node.controls
        part = graph.add("AddV2", name, read, controls=waits, attrs=attrs, outputs=(kind,), device=node.device)
        total, last = part.out(), max(last, term.node, key=place.__getitem__)
        followers.setdefault(last, []).append(part)
    node.op, node.inputs, node.attrs = "AddV2", (terms[-1], total), attrs
    graph.move_behind(followers)


def _variable_name(node: Node) -> bytes:
    return f"{node.name}/Internal/Accumulator".encode()
