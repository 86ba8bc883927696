"""Keeps variables at home on the host: each read of such a variable is a copy to the device, each write a copy back.

Reads of the same version share one copy, which is a tensor like any other: a plan may drop it, and copy again. An
in-place addition becomes a read, an addition and a write, with the same bits.

Requires: names of variables whose accesses are of `ACCESSES`. Ensures: only `ReadHome` and `WriteHome` read and write
the buffers of these variables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dims, Dtype, Graph, Node
from tfswap.ir.op_traits import READ_VARIABLE
from tfswap.ir.types import TensorType
from tfswap.kernels.alignment import round_up
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.support.reach import reach

ARITHMETIC: Final = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
"""The updates in place that are an operation on the variable and another tensor."""
ASSIGNS: Final = frozenset((custom_ops.ASSIGN_IN_PLACE, *ARITHMETIC))
ACCESSES: Final = ASSIGNS | {READ_VARIABLE}


def movable_variables(graph: Graph) -> dict[str, TensorType]:
    """The variables that may be at home on the host, by the names of their handles, with their types.

    Their accesses are of `ACCESSES`, and at least one of them is a read or an update that reads.
    """
    found: dict[str, TensorType] = {}
    passed_on = {tensor.node for tensor in graph.fetches}
    accesses = _accesses(graph, [feed for feed in graph.feeds if feed.outputs and feed.outputs[0].dtype == "resource"])
    for feed, nodes in accesses.items():
        kinds = {kind for node in nodes if (kind := _accessed(node)) is not None}
        if len(kinds) == 1 and feed not in passed_on and all(node.op in ACCESSES for node in nodes):
            (kind,) = kinds
            if kind.nbytes and not kind.bound:
                found[feed.name] = kind
    return found


def bytes_at_home(graph: Graph) -> int:
    """The bytes of the variables that are at home on the host in `graph`, after `keep_at_home`."""
    nbytes: dict[Node, int] = {}
    for node in graph:
        if node.op in (custom_ops.READ_HOME, custom_ops.WRITE_HOME):
            kind = node.outputs[0] if node.outputs else node.inputs[1].type
            nbytes[node.inputs[0].node] = round_up(kind.nbytes or 0)
    return sum(nbytes.values())


@graph_pass(
    requires="variables that are only read as a whole, assigned and added to",
    ensures="kernels read copies of these variables on the device, and new values are copied back",
)
def keep_at_home(graph: Graph, _: Target, names: Collection[str]) -> int:
    """Keep the variables behind the handles `names` at home on the host; returns how many accesses were changed.

    Raises InvalidModel where one of them can't be.
    """
    movable = movable_variables(graph)
    if (wrong := next((name for name in names if name not in movable), None)) is not None:
        raise InvalidModel(
            f"this plan keeps the variable behind {wrong!r} in host memory, and this graph has no such variable, or "
            "accesses it in other ways than reading, assigning and adding to all of it. Plan again for this graph."
        )
    handles = [graph[name] for name in names]
    updates = [node for nodes in _accesses(graph, handles).values() for node in nodes if node.op in ARITHMETIC]
    for node in updates:
        _split(graph, node, movable[node.inputs[0].node.name])
    nodes = graph.topological()
    later = _followers(nodes)
    accesses = _accesses(nodes, handles)
    for each in accesses.values():
        _share_reads(graph, each, later)
    for node in graph:
        if node.inputs and node.inputs[0].node.name in names:
            kind = movable[node.inputs[0].node.name]
            if node.op == READ_VARIABLE:
                node.op, node.attrs = (
                    custom_ops.READ_HOME,
                    {"dtype": Dtype(kind.dtype), "shape": Dims(kind.shape or ())},
                )
            elif node.op == custom_ops.ASSIGN_IN_PLACE:
                node.op = custom_ops.WRITE_HOME
    return sum(map(len, accesses.values()))


def _accesses(nodes: Iterable[Node], handles: Iterable[Node]) -> dict[Node, list[Node]]:
    """The nodes that have each of these handles as an input, in the order of `nodes`."""
    found: dict[Node, list[Node]] = {handle: [] for handle in handles}
    for node in nodes:
        for source in {tensor.node for tensor in node.inputs} & found.keys():
            found[source].append(node)
    return found


def _accessed(node: Node) -> TensorType | None:
    """The type of the variable that an access reads or updates; None for a plain assignment."""
    if node.op == READ_VARIABLE:
        return node.outputs[0]
    return node.inputs[1].type if node.op in ARITHMETIC else None


def _followers(nodes: Sequence[Node]) -> Mapping[Node, Sequence[Node]]:
    """By node, the nodes that wait for it."""
    found: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        for source in {*(tensor.node for tensor in node.inputs), *node.controls}:
            found[source].append(node)
    return found


def _split(graph: Graph, update: Node, kind: TensorType) -> None:
    """Replace an update in place by a read, an operation and an assignment, which takes the update's name."""
    handle, term = update.inputs
    stem = f"tfswap/{update.name}"
    read = graph.add(
        READ_VARIABLE,
        graph.unique_name(f"{stem}/read"),
        (handle,),
        controls=update.controls,
        attrs={"dtype": Dtype(kind.dtype)},
        outputs=(kind,),
        device=update.device,
    )
    result = graph.add(
        ARITHMETIC[update.op],
        graph.unique_name(f"{stem}/result"),
        (read.out(), term),
        attrs={"T": Dtype(kind.dtype)},
        outputs=(kind,),
        device=update.device,
    )
    update.op, update.attrs = custom_ops.ASSIGN_IN_PLACE, {"T": Dtype(kind.dtype)}
    update.inputs = handle, result.out()


def _share_reads(graph: Graph, accesses: Sequence[Node], later: Mapping[Node, Sequence[Node]]) -> None:
    """Let the readers of the variable's first version read one tensor.

    Args:
        accesses: of the variable, in topological order. So the first read waits for no reader of another.
    """
    after = set(reach([node for node in accesses if node.op != READ_VARIABLE], lambda node: later[node]))
    reads = [node for node in accesses if node.op == READ_VARIABLE and node not in after]
    for read in reads[1:]:
        first = reads[0]
        for reader in later[read]:
            reader.inputs = tuple([first.out() if t.node is read else t for t in reader.inputs])
            controls = (c for c in reader.controls if c is not read)
            reader.controls = tuple(dict.fromkeys((*controls, first, *read.controls)))
        graph.fetches = [first.out() if f.node is read else f for f in graph.fetches]
