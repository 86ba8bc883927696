"""Keeps variables at home on the host: each read of such a variable is a copy to the device, each write a copy back.

Reads of the same version share one copy, which is a tensor like any other: a plan may drop it, and copy again. A write
is two kernels, one that starts the copy and one that waits for its end, so that other kernels can run between them. An
in-place addition becomes a read, an addition and a write, with the same bits. Updates of other variables that read a
new value get it where it was computed. Loops that only read a variable get the copy in place of its handle
(home_values.py).

Other kernels that read or update a variable in its buffer work there, in host memory: those that gather rows, sparse
updates, fused optimizers, and accesses in other bodies. They take none of the arena.

Requires: names of variables that `movable_variables` has. Ensures: nothing else than these accesses reads and writes
the buffers of these variables, whose handles are marked (ir/homes.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dims, Dtype, Graph, Node
from tfswap.ir.homes import home_bytes, is_at_home, is_on_disk, mark_at_home
from tfswap.ir.op_traits import (
    READ_VARIABLE,
    UPDATE_ARITHMETIC,
    control_flow,
    is_elementwise,
    reads_rows,
    writes_variable,
)
from tfswap.ir.types import TensorType
from tfswap.kernels.alignment import round_up
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import VARIANT, await_copy, followers
from tfswap.passes.prepare.split_identity_n import split_identity_n
from tfswap.passes.tactics.home_values import Use, pass_values, read_invariants_before, uses_of, works_at_home
from tfswap.passes.tactics.update_rounds import last_rounds, rounds_of
from tfswap.support.reach import reach


def movable_variables(graph: Graph) -> dict[str, TensorType]:
    """The variables that may be at home on the host, by the names of their handles, with their types.

    All accesses are of kernels that may work there, and their type is known.
    """
    return {name: access.type for name, access in accessed_variables(graph).items() if not access.stays}


class Accessed(NamedTuple):
    """A variable that a step accesses.

    Attributes:
        stays: why it can't be at home on the host; "" where it can.
    """

    type: TensorType
    stays: str


def accessed_variables(graph: Graph) -> dict[str, Accessed]:
    """The variables that the graph and its bodies access, by the names of their handles; none without elements."""
    found: dict[str, Accessed] = {}
    passed_on = {tensor.node for tensor in graph.fetches}
    for feed, uses in uses_of(graph).items():
        kind = _kind(graph, feed, uses)
        if kind is None or not uses or (kind.nbytes == 0 and kind.dtype != "variant"):
            continue
        others = [use.node for use in uses if not works_at_home(use)]
        stays = ""
        if (permit := graph.permits.get(feed.out())) is not None:
            stays = permit.why
        elif kind.dtype == "string":
            stays = "its elements are strings, whose bytes lie elsewhere"
        elif kind.dtype == "variant":
            stays = "its elements are variants, whose contents lie elsewhere"
        elif kind.nbytes is None or kind.bound:
            stays = "its size is not known, or by a bound only"
        elif feed in passed_on:
            stays = "the step returns its handle"
        elif others:
            stays = f"{others[0].op} {others[0].name!r} takes its handle, and may access it on the device only"
        found[feed.name] = Accessed(kind, stays)
    return found


def bytes_at_home(graph: Graph, *, disk: bool = False) -> int:
    """The bytes of the variables at home in host memory in `graph`, after `keep_at_home`, or of those on disk."""
    return sum(round_up(home_bytes(feed)) for feed in graph.feeds if is_on_disk(feed) == disk)


@graph_pass(
    requires="variables that are read, assigned and updated by kernels that may work on host memory",
    ensures="kernels read copies of these variables on the device, and new values are copied back, or work in host "
    "memory",
)
def keep_at_home(graph: Graph, target: Target, names: Collection[str], on_disk: Collection[str] = ()) -> int:
    """Keep the variables behind the handles `names` at home on the host; returns how many accesses were changed.

    Args:
        on_disk: those of them that are on disk, and not in host memory.

    Raises InvalidModel where one of them can't be there.
    """
    if on_disk and target.device.host_is_separate:
        raise InvalidModel("this plan keeps variables on disk, where this device does not reach them. Plan again.")
    movable = movable_variables(graph)
    if (wrong := next((name for name in names if name not in movable), None)) is not None:
        raise InvalidModel(
            f"this plan keeps the variable behind {wrong!r} in host memory, and this graph has no such variable, or "
            "accesses it in other ways than kernels may that work there. Plan again for this graph."
        )
    for body in graph.all_bodies():
        split_identity_n(body, target)
        body.prune()
    handles = [graph[name] for name in names]
    read_invariants_before(graph)
    pass_values(graph, {handle: movable[handle.name] for handle in handles})
    for handle, uses in uses_of(graph).items():
        if handle.name in names:
            for marked in {handle: 0} | {use.handle: 0 for use in uses}:
                mark_at_home(marked, movable[handle.name].nbytes or 0, disk=handle.name in on_disk)
    return copy_accesses(graph, {handle: movable[handle.name] for handle in handles})


def copy_accesses(graph: Graph, kinds: Mapping[Node, TensorType]) -> int:
    """Have the kernels of a graph, or of a body, read copies of variables on the device, and new values copied back, in
    place; returns how many accesses were changed.

    Args:
        kinds: the types of these variables, by their handles.
    """
    for handle, nodes in _accesses(graph.topological(), kinds).items():
        written: list[Node] = []  # the latest write
        for node in nodes:
            if node.op in UPDATE_ARITHMETIC:
                _split(graph, node, kinds[handle], written)
            written = written if node.op == READ_VARIABLE else [node]
    in_rows = _reads_of_rows(graph, kinds)
    nodes = graph.topological()
    later = followers(nodes)
    accesses = _accesses(nodes, kinds)
    for each in accesses.values():
        _share_reads(graph, [node for node in each if node not in in_rows], later)
    if not graph.bodies:  # while a loop runs, a new value is better at home
        _pass_new_values(graph, accesses.values())
    changed = 0
    read = {tensor.node for tensor in graph.fetches} | {tensor.node for node in graph for tensor in node.inputs}
    for node in list(graph):
        if node.inputs and node.inputs[0].node in kinds and node not in in_rows:
            kind = kinds[node.inputs[0].node]
            if node.op == READ_VARIABLE and node in read:
                node.op, node.attrs = (
                    custom_ops.READ_HOME,
                    {"dtype": Dtype(kind.dtype), "shape": Dims(kind.shape or ())},
                )
            elif node.op == custom_ops.ASSIGN_IN_PLACE:
                _store_and_commit(graph, node)
            changed += node.op in (custom_ops.READ_HOME, custom_ops.COMMIT_HOME)
    return changed


def _pass_new_values(graph: Graph, accesses: Iterable[Sequence[Node]]) -> None:
    """Let updates read a value that the step has written in their round where it was computed, and not from its home.

    An optimizer's update of a weight so reads the slots that it has just updated. Kernels that read a new value for
    something else, and the updates of later rounds, may run much later, when it is no longer on the device.

    Args:
        accesses: of each variable, in topological order.
    """
    nodes = graph.topological()
    later = followers(nodes)
    kept = {tensor.node for tensor in graph.fetches}
    updates: set[Node] = set()  # the kernels that compute new values element by element, and nothing else
    for node in reversed(nodes):
        after = later[node]
        if after and node not in kept and is_elementwise(node.op):
            updates.update([node] if all(n in updates or writes_variable(n.op) for n in after) else ())
    accesses = list(accesses)
    rounds = rounds_of(nodes, {node for each in accesses for node in each if node.op != READ_VARIABLE})
    last = last_rounds(nodes, later, rounds)
    for each in accesses:
        write = written = None
        passed = False  # whether some kernels no longer wait for the write
        for node in each:
            if node.op != READ_VARIABLE:
                if passed and write is not None:  # or it would wait for the write only by way of these
                    node.controls = tuple(dict.fromkeys((*node.controls, write)))
                write, passed = node, False
                written = node.inputs[1] if node.op == custom_ops.ASSIGN_IN_PLACE else None
            elif write is not None and written is not None and written.type == node.outputs[0]:
                for reader in [r for r in later[node] if r in updates and last.get(r, rounds[write]) == rounds[write]]:
                    reader.inputs = tuple(written if t.node is node else t for t in reader.inputs)
                    passed = True


def _store_and_commit(graph: Graph, write: Node) -> None:
    """Turn a write, in place, into the wait for a copy to the variable's home, with a new node that starts the copy."""
    store = graph.add(
        custom_ops.STORE_HOME,
        graph.unique_name(f"tfswap/{write.name}/store"),
        write.inputs[1:],
        attrs={**write.attrs, "disk": True} if is_on_disk(write.inputs[0].node) else write.attrs,
        outputs=(VARIANT,),
        device=write.device,
    )
    write.op = custom_ops.COMMIT_HOME
    write.inputs = (*write.inputs, store.out())


@graph_pass(
    requires="a gate, and marked handles",
    ensures="marked variables are at home on the host before the gate runs",
)
def move_before(graph: Graph, _: Target, limit_bytes: int) -> int:
    """Move variables home before the step, where Python does not: in a file, and in a step that another function calls.

    Returns how many are moved.

    Args:
        limit_bytes: the most bytes on the device when the step is first called, or it fails; 0 for any.
    """
    gate = next(node for node in graph if node.op == custom_ops.GATE)
    moved = [
        graph.add(
            custom_ops.MOVE_HOME,
            graph.unique_name(f"tfswap/{feed.name}/move"),
            (feed.out(),),
            attrs={"host": True, "limit": limit_bytes, **({"disk": True} if is_on_disk(feed) else {})},
            device=gate.device,
        )
        for feed in graph.feeds
        if is_at_home(feed)
    ]
    gate.controls = (*gate.controls, *moved)
    return len(moved)


def _kind(graph: Graph, feed: Node, uses: Sequence[Use]) -> TensorType | None:
    """The type of a variable; None where it is not known."""
    kinds = {kind for use in uses if (kind := use.whole) is not None}
    known = graph.variables.get(feed.name)
    if not kinds:
        return None if known is None else known.type
    return kinds.pop() if len(kinds) == 1 else None


def _reads_of_rows(graph: Graph, handles: Collection[Node]) -> set[Node]:
    """The reads of these variables from which rows are gathered, and nothing else. They copy nothing: the kernels that
    gather read the rows in host memory. Other readers of such a read get one of their own.
    """
    found: set[Node] = set()
    readers: dict[Node, list[Node]] = {}
    for node in graph:
        for source in {tensor.node for tensor in node.inputs}:
            readers.setdefault(source, []).append(node)
    for read in [node for node in graph if node.op == READ_VARIABLE and node.inputs[0].node in handles]:
        gathers = [node for node in readers.get(read, ()) if _gathers_few(node, read)]
        if not gathers:
            continue
        name = graph.unique_name(f"tfswap/{read.name}/rows")
        rows = graph.add(
            READ_VARIABLE,
            name,
            read.inputs,
            controls=read.controls,
            attrs=read.attrs,
            outputs=read.outputs,
            device=read.device,
        )
        for node in gathers:
            graph.replace_input(node, 0, rows.out())
        found.add(rows)
    return found


def _gathers_few(node: Node, read: Node) -> bool:
    """Whether a kernel gathers fewer bytes than the variable has from a read of it."""
    nbytes = node.outputs[0].nbytes if reads_rows(node.op) else None
    in_other_places = any(tensor.node is read for tensor in node.inputs[1:])
    return nbytes is not None and nbytes < (read.outputs[0].nbytes or 0) and not in_other_places


def start_reads(graph: Graph, chain: Sequence[Node]) -> list[Node]:
    """Have the copies of `ReadHome` nodes overlap with the kernels after them, in place; returns the chain with the
    nodes that start these copies.

    What reads such a tensor waits for the copy. What may write to the variable's buffer waits for all copies before it;
    `CommitHome` gives the variable another buffer.
    """
    made: list[Node] = []
    reads: dict[Node, list[Node]] = {}  # by handle
    for node in chain:
        if node.op == custom_ops.READ_HOME:
            reads.setdefault(node.inputs[0].node, []).append(node)
            made.append(await_copy(graph, node, custom_ops.LOAD_HOME))
            continue
        made.append(node)
        writes_buffer = writes_variable(node.op) and node.op != custom_ops.COMMIT_HOME
        if writes_buffer or control_flow(node.op) is not None:
            copies = [copy for tensor in node.inputs for copy in reads.get(tensor.node, ())]
            node.controls = tuple(dict.fromkeys((*node.controls, *copies)))
    return made


def _accesses(nodes: Iterable[Node], handles: Iterable[Node]) -> dict[Node, list[Node]]:
    """The nodes that have each of these handles as an input, in the order of `nodes`."""
    found: dict[Node, list[Node]] = {handle: [] for handle in handles}
    for node in nodes:
        for source in {tensor.node for tensor in node.inputs} & found.keys():
            found[source].append(node)
    return found


def _split(graph: Graph, update: Node, kind: TensorType, written: Sequence[Node]) -> None:
    """Replace an update in place by a read, an operation and an assignment, which takes the update's name.

    Args:
        written: the write before it. The update may wait for that by way of its other input, for which the read does
            not wait.
    """
    handle, term = update.inputs
    stem = f"tfswap/{update.name}"
    read = graph.add(
        READ_VARIABLE,
        graph.unique_name(f"{stem}/read"),
        (handle,),
        controls=dict.fromkeys((*update.controls, *written)),
        attrs={"dtype": Dtype(kind.dtype)},
        outputs=(kind,),
        device=update.device,
    )
    result = graph.add(
        UPDATE_ARITHMETIC[update.op],
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
