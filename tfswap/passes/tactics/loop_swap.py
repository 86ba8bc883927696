"""Swaps tensors that loops save for their backward loops, element by element, inside of the bodies.

Where a body pushes a tensor on an accumulator (analysis/accumulators.py), the copy to the host starts as soon as the
tensor is computed, its handle is pushed, and the iteration ends with the copy's release. Where a body pops, the
iteration starts with the pops and the copies back, and each copy is awaited just before its element is first read. So
the list keeps handles, which are outside of the arena, and elements are in the arena for one iteration in either loop.
Prefetched elements are in it for one iteration longer: each iteration starts the copies for the next one's pops, after
its own.

Requires: bodies that have an order (passes/tactics/order_bodies.py). Ensures: they have an order, with every allocation
and release of the copies in it; the same elements are pushed and popped in the same order. Decides nothing.

Not handled: prefetching elements that are popped in a branch, or more than once in an iteration, and those of the first
iteration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tfswap.analysis.accumulators import Accumulator, Place, find_accumulators
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dims, Graph, Node, Output
from tfswap.ir.op_traits import control_flow
from tfswap.ir.types import TensorType
from tfswap.ir.views import passed_on
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import (
    VARIANT,
    add_await,
    add_prefetch,
    add_release,
    add_swap_in,
    add_swap_out,
    mark_effects,
)
from tfswap.passes.order import chain_nodes
from tfswap.passes.tactics.retarget_lists import make_keep, pop_instead, push_instead
from tfswap.support.reach import reach

HANDLE = Dims(())
"""The shape of the handle of a tensor on the host."""


@dataclass
class _Edits:
    """The changes of one graph."""

    makers: list[Node] = field(default_factory=list[Node])
    pushes: list[Place] = field(default_factory=list[Place])
    pops: list[Place] = field(default_factory=list[Place])
    ahead: set[Place] = field(default_factory=set[Place])  # pops whose copies the iteration before starts


@graph_pass(
    requires="bodies with an order",
    ensures="elements of these lists are in host memory from the iteration that saves them to the one that reads them",
)
def swap_in_loops(graph: Graph, _: Target, swapped: Collection[str], prefetched: Collection[str] = ()) -> int:
    """Swap the accumulators of these names, in place; returns how many kernels push to or pop from them.

    Args:
        prefetched: names of the accumulators whose copies back start in the iteration before.
    """
    if not swapped:
        return 0
    chosen = [a for a in find_accumulators(graph) if a.name in swapped]
    order = {body: [body[name] for name in body.order] for body in graph.all_bodies()}
    edits = _edits(chosen)
    for pops in looped_pops(graph, [a for a in chosen if a.name in prefetched]).values():
        for pop in pops:
            edits[pop.graph].ahead.add(pop)
    count = 0
    for where, edit in edits.items():
        for maker in edit.makers:
            make_keep(where, maker, "variant", HANDLE)
        if edit.pushes or edit.pops:
            _swap(where, order[where], edit)
            count += len(edit.pushes) + len(edit.pops)
        where.prune()
    mark_effects(graph, edits)
    return count


def looped_pops(graph: Graph, accumulators: Iterable[Accumulator]) -> dict[str, list[Place]]:
    """By name of an accumulator: the pops that each iteration does once, of the list after the iteration before.
    Accumulators without such pops are left out.
    """
    loops = [
        bodies[1]
        for part in (graph, *graph.all_bodies())
        for node, bodies in part.bodies.items()
        if (kind := control_flow(node.op)) and kind.is_loop
    ]
    left = {body: dict(zip((feed.out() for feed in body.feeds), body.fetches, strict=True)) for body in loops}
    found: dict[str, list[Place]] = {}
    for accumulator in accumulators:
        for pop in accumulator.pops:
            fetch = left.get(pop.graph, {}).get(passed_on(pop.node.inputs[0]))
            if fetch is not None and passed_on(fetch) == pop.node.out(0):
                found.setdefault(accumulator.name, []).append(pop)
    return found


def _edits(chosen: Iterable[Accumulator]) -> dict[Graph, _Edits]:
    edits: dict[Graph, _Edits] = {}
    for accumulator in chosen:
        for graph, node in accumulator.makers:
            edits.setdefault(graph, _Edits()).makers.append(node)
        for push in accumulator.pushes:
            edits.setdefault(push.graph, _Edits()).pushes.append(push)
        for pop in accumulator.pops:
            edits.setdefault(pop.graph, _Edits()).pops.append(pop)
    return edits


def _swap(body: Graph, chain: list[Node], edit: _Edits) -> None:
    """Put the copies of one body into it and into its order."""
    place = {node: i for i, node in enumerate(chain)}
    starts = {**place, **{node: place[group[0]] for group in body.groups() for node in group}}
    for node in chain:
        node.controls = tuple(c for c in node.controls if c not in place)
    releases = [_push_handle(push) for push in sorted(edit.pushes, key=lambda push: place[push.node])]
    readers = _readers(body)
    first_read = {pop: _first_reader(pop.popped, readers, starts, len(chain)) for pop in edit.pops}
    kinds = {pop: pop.popped.type for pop in edit.pops}
    begin: list[Node] = []
    begin_next: list[Node] = []
    after: dict[Node, list[Node]] = {}
    awaits: dict[int, list[Node]] = {}
    for pop in sorted(edit.pops, key=lambda pop: (first_read[pop], place[pop.node])):
        is_read = pop.popped in readers or pop.popped in body.fetches
        pop_instead(pop, VARIANT, HANDLE)  # the handle of a copy
        if not is_read:
            continue  # only the list is read
        loaded, awaited = _bring_back(pop, kinds[pop])
        ahead = [_fetch_next(pop, kinds[pop])] if pop in edit.ahead else []
        if _needs(pop.node, place):
            after[pop.node] = [loaded, *ahead]
        else:
            begin += (pop.node, loaded)
            begin_next += ahead
        awaits.setdefault(first_read[pop], []).append(awaited)
    made = chain[: 1 if chain[0].op == custom_ops.GATE else 0]
    moved = {*made, *begin}
    made += begin + begin_next
    for i, node in enumerate(chain):
        made += awaits.get(i, ())
        if node not in moved:
            made.append(node)
        made += after.get(node, ())
    chain_nodes(body, [*made, *awaits.get(len(chain), ()), *releases])


def _push_handle(place: Place) -> Node:
    """Push the handle of a copy in place of the tensor; returns the node that releases the tensor."""
    body, push = place.graph, place.node
    stem = f"tfswap/{push.name}"
    handle = add_swap_out(body, stem, place.pushed, push.device).out()
    push_instead(place, handle, HANDLE)
    return add_release(body, stem, handle)


def _bring_back(place: Place, kind: TensorType) -> tuple[Node, Node]:
    """Copy the tensor of a popped handle back; returns the node that allocates it and the one that waits for the
    copy.
    """
    body, handle = place.graph, place.popped
    stem = f"tfswap/{place.node.name}"
    loaded = add_swap_in(body, stem, handle, kind)
    awaited = add_await(body, stem, loaded)
    body.replace_uses(handle, awaited.out(), lambda node: node is not loaded)
    body.fetches = [awaited.out() if fetch == handle else fetch for fetch in body.fetches]
    return loaded, awaited


def _fetch_next(place: Place, kind: TensorType) -> Node:
    """Copy the tensor of the handle that is popped next back; returns the node that does."""
    body, left = place.graph, place.node.out(0)
    ahead = add_prefetch(body, f"tfswap/{place.node.name}", left, kind)
    body.replace_uses(left, ahead.out(), lambda node: node is not ahead)
    body.fetches = [ahead.out() if fetch == left else fetch for fetch in body.fetches]
    return ahead


def _readers(body: Graph) -> dict[Output, list[Node]]:
    readers: dict[Output, list[Node]] = {}
    for node in body:
        for tensor in node.inputs:
            readers.setdefault(tensor, []).append(node)
    return readers


def _first_reader(
    tensor: Output, readers: Mapping[Output, Sequence[Node]], place: Mapping[Node, int], none: int
) -> int:
    """The place of the first kernel that reads a tensor or a view of it; `none` where there is none."""

    def views(of: Output) -> list[Output]:
        return [r.out(i) for r in readers.get(of, ()) if r not in place for i in range(len(r.outputs))]

    read = reach([tensor], views)
    return min((place[reader] for t in read for reader in readers.get(t, ()) if reader in place), default=none)


def _needs(node: Node, place: Mapping[Node, int]) -> bool:
    """Whether a kernel of the body runs before `node` in any order."""

    def sources(of: Node) -> list[Node]:
        return [*(t.node for t in of.inputs), *of.controls]

    return any(source in place and source.op != custom_ops.GATE for source in reach(sources(node), sources))
