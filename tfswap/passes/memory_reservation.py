"""Writes a step's owner, its host memory and the limits of that into the graph, for the process that runs it.

Ensures: all nodes that start copies name the owner, in bodies too, and so does the first gate, where the owner's step
begins. A SwapOut whose copies a loop saves has the bytes of these that go to disk. The first SwapOut has the step's
reservation: its kernel registers the owner and reserves the memory when it is constructed (csrc/core/step_memory.h). In
a step on several devices without one, the first copy to the pool has it. What makes homes of variables has the folder
for those on disk.

What goes from one device to another waits in the pool. When it is read depends on both devices, so there is room for
all such tensors of a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tfswap.ir.custom_ops import ALL, GATE, LOAD_HOME, MOVE_HOME, STORE_HOME, SWAP_OUT, TO_HOST
from tfswap.ir.graph import Graph, Node
from tfswap.kernels.alignment import round_up
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.device_carriers import unit


@dataclass(frozen=True)
class Reservation:
    """The memory outside of the arena that a step takes, and its limits.

    Attributes:
        owner: the number of the limits' owner. Steps with the same owner share its limits.
        host_bytes: host memory that the plan takes.
        host_limit_bytes: the most that it may take; None for no limit.
        spill_dir: the folder of the spill file; "" where nothing may go to disk.
        disk_bytes: disk space that the plan takes.
        disk_limit_bytes: the most that it may take; None for no limit.
        saved_disk_bytes: bytes of tensors saved by loops that go to disk.
        cpu_bytes: the part of `host_bytes` for what a GPU's step swaps on the CPU, whose pool is another one.
    """

    owner: int
    host_bytes: int
    host_limit_bytes: int | None
    spill_dir: str = ""
    disk_bytes: int = 0
    disk_limit_bytes: int | None = None
    saved_disk_bytes: int = 0
    cpu_bytes: int = 0


def of_all_parts(parts: Sequence[Reservation]) -> Reservation:
    """The memory that the parts of one step take together, whose owner and limits are the same."""
    return replace(
        parts[0],
        host_bytes=sum(one.host_bytes for one in parts),
        disk_bytes=sum(one.disk_bytes for one in parts),
        saved_disk_bytes=sum(one.saved_disk_bytes for one in parts),
        cpu_bytes=sum(one.cpu_bytes for one in parts),
    )


def passed_on(graph: Graph) -> list[Node]:
    """The copies of tensors that go to another device by way of the pool of host memory."""
    return [node for node in graph if node.op == TO_HOST and node.attrs.get("pooled")]


def passed_bytes(graphs: Iterable[Graph]) -> int:
    """The bytes of the pool that tensors of a step take which go to another device.

    Args:
        graphs: the step, or its parts.
    """
    return sum(_passed_bytes(node) for graph in graphs for node in passed_on(graph))


def _passed_bytes(node: Node) -> int:
    return round_up(node.outputs[0].nbytes or 0) if node.op == TO_HOST else 0


def _by_pool(takers: Sequence[Node], reservation: Reservation) -> Iterator[tuple[list[Node], int]]:
    """The nodes that take memory of each pool, and the bytes of swapped tensors there."""
    gpus = [node for node in takers if not unit(node.device).startswith("CPU")]
    cpu = [node for node in takers if node not in gpus]
    of_cpu = reservation.cpu_bytes if gpus else reservation.host_bytes
    yield from ((nodes, nbytes) for nodes, nbytes in ((gpus, reservation.host_bytes - of_cpu), (cpu, of_cpu)) if nodes)


@graph_pass(
    ensures="the step's swap nodes and gate have the owner, and the first of them reserves host memory and disk",
)
def reserve_memory(graph: Graph, _: Target, reservation: Reservation) -> int:
    """Write `reservation` into `graph`, in place; returns the number of nodes that take such memory. A graph without
    them gets none.
    """
    gates = {node for node in graph if node.op == GATE}
    for node in gates:
        if Graph.needed([node]).isdisjoint(gates - {node}):  # gates of other devices wait for the first
            node.attrs = {**node.attrs, "owner": reservation.owner}
    parts = (graph, *graph.all_bodies())
    swaps = [node for part in parts for node in part if node.op == SWAP_OUT]
    for node in (*swaps, *(node for part in parts for node in part if node.op in (LOAD_HOME, STORE_HOME))):
        node.attrs = {**node.attrs, "owner": reservation.owner}
    homes = [node for part in parts for node in part if node.op in (MOVE_HOME, STORE_HOME) and reservation.spill_dir]
    for node in homes:
        node.attrs = {**node.attrs, "spill_dir": os.fsencode(reservation.spill_dir)}
    takers = [*swaps, *passed_on(graph)]
    if not takers:
        return len(homes)
    for pool, nbytes in _by_pool(takers, reservation):
        pool[0].attrs = {
            **pool[0].attrs,
            "owner": reservation.owner,
            "step_bytes": nbytes + sum(map(_passed_bytes, pool)),
            "step_limit": -1 if reservation.host_limit_bytes is None else reservation.host_limit_bytes,
        }
    if swaps and reservation.spill_dir:
        for node in _saving(graph) if reservation.saved_disk_bytes else ():
            node.attrs = {**node.attrs, "saved_on_disk": reservation.saved_disk_bytes}
        swaps[0].attrs = {
            **swaps[0].attrs,
            "spill_dir": os.fsencode(reservation.spill_dir),
            "spill_bytes": reservation.disk_bytes,
            "spill_limit": -1 if reservation.disk_limit_bytes is None else reservation.disk_limit_bytes,
        }
    return len(takers) + len(homes)


@graph_pass(ensures="the copies of swapped tensors that have places in another device's memory are in this block")
def borrow(graph: Graph, _: Target, block: int) -> int:
    """Write the number of a block that another device lends into `graph`, in place; returns the number of swaps to
    it.
    """
    swaps = [node for node in graph if node.op == SWAP_OUT and "lent_place" in node.attrs]
    for node in swaps:
        node.attrs = {**node.attrs, "lent_block": block}
    return len(swaps)


def _saving(graph: Graph) -> Iterator[Node]:
    """The SwapOuts in bodies whose handles outlive their iteration."""
    for body in graph.all_bodies():
        kept = {tensor.node for node in body if node.op not in ALL for tensor in node.inputs}
        yield from (node for node in body if node.op == SWAP_OUT and node in kept)
