"""The passes that every step gets before it is planned: tables, in the order in which passes depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tfswap.analysis.concurrent_iterations import overlapping_bytes
from tfswap.ir.graph import Graph
from tfswap.kernels.target import Target
from tfswap.passes.contract import Row, always, apply_table, graph_pass, own_ops
from tfswap.passes.prepare.assign_in_place import assign_in_place
from tfswap.passes.prepare.collective_order import join_collectives, order_collectives
from tfswap.passes.prepare.common_subexpressions import merge_equal_nodes
from tfswap.passes.prepare.copied_views import copy_undecided_views
from tfswap.passes.prepare.copy_on_read import leave_copy_on_read
from tfswap.passes.prepare.copy_to_device import copy_to_device
from tfswap.passes.prepare.copy_to_host import copy_to_host
from tfswap.passes.prepare.defer_constants import defer_constants
from tfswap.passes.prepare.defer_integers import defer_integers
from tfswap.passes.prepare.free_constants import free_constants
from tfswap.passes.prepare.onednn_fusion import fuse_onednn
from tfswap.passes.prepare.ordered_splits import order_split_outputs
from tfswap.passes.prepare.ordered_sums import order_sums
from tfswap.passes.prepare.outer_products import swap_outer_products
from tfswap.passes.prepare.pool_argmax import keep_pool_argmax
from tfswap.passes.prepare.relocate import relocate_results
from tfswap.passes.prepare.replaced_ops import keep_replaced_ops
from tfswap.passes.prepare.result_slots import use_result_slots
from tfswap.passes.prepare.split_add_n import split_add_n
from tfswap.passes.prepare.split_identity_n import split_identity_n
from tfswap.passes.prepare.text_on_host import keep_text_on_host
from tfswap.passes.prepare.uniform_constants import fill_uniform_constants
from tfswap.passes.prepare.unroll_loops import unroll_loops
from tfswap.passes.prepare.views_on_device import keep_views_on_device
from tfswap.passes.prepare.zeros_like import fill_zeros_like, share_list_zeros


@graph_pass(ensures="every node is needed for what is fetched, or acts")
def prune(graph: Graph, _: Target) -> int:
    """Drop nodes that TensorFlow never runs; returns how many."""
    return len(graph.prune())


def slots(target: Target) -> bool:
    """Whether the caller keeps results, and tfswap's own ops may be in the graph."""
    return target.keeps_results and target.own_ops


FIRST = (
    Row(order_sums, always, "the order of a sum depends on who reads its terms, which later passes change"),
    Row(unroll_loops, always, "all that follows applies to the kernels of unrolled loops as well"),
)
"""After these, the remaining loops stay loops."""

REST = (
    Row(keep_replaced_ops, always, "sums that add terms as they are ready have their order"),
    Row(order_collectives, always, "the traced order is still that of the graph"),
    Row(join_collectives, always, "groups are counted in that order"),
    Row(free_constants, always, "for later passes, nodes wait for a constant's control inputs, not for it"),
    Row(swap_outer_products, always, "einsums are as they were traced"),
    Row(fuse_onednn, own_ops, "TensorFlow's graph pass would fuse the same nodes, if no order stood between them"),
    Row(keep_pool_argmax, own_ops, "poolings have their final inputs"),
    Row(assign_in_place, own_ops, "assignments are as TensorFlow knows them until here"),
    Row(share_list_zeros, own_ops, "before zeros of tensors, which need no kernel of their own"),
    Row(order_split_outputs, own_ops, "kernels that request in any order have no plan"),
    Row(copy_undecided_views, own_ops, "as well in bodies"),
    Row(leave_copy_on_read, always, "assignments in place do not count as accesses that copy"),
    Row(split_identity_n, always, "readers are those of the tensors themselves, for the two passes that follow"),
    Row(fill_zeros_like, always, "a tensor that only its zeros hold is free earlier"),
    Row(split_add_n, always, "sums have their order, and terms that nothing else holds"),
    Row(fill_uniform_constants, own_ops, "before other constants are deferred, which may be computed from these"),
    Row(defer_constants, own_ops, "no later pass adds constants"),
    Row(keep_views_on_device, own_ops, "before the copies that these views would need"),
    Row(keep_text_on_host, own_ops, "no later pass adds constants of text"),
    Row(copy_to_host, own_ops, "what views still read on the host is known"),
    Row(copy_to_device, own_ops, "no later pass adds readers of integers"),
    Row(defer_integers, own_ops, "all readers of constants on the other side read copies"),
    Row(use_result_slots, slots, "fetches are final"),
    Row(merge_equal_nodes, always, "the others add nodes that are equal"),
    Row(prune, always, "nodes that lost their readers are not planned"),
    Row(relocate_results, own_ops, "no later pass adds or drops loops and conditionals"),
)

PREPARE = (*FIRST, *REST)


class Prepared(NamedTuple):
    """Facts of a prepared graph.

    Attributes:
        locate: from a node's name to the user's source line, for nodes of unrolled loops as well.
        unrolled: how many nodes unrolled loops have.
        overlapping_bytes: the most bytes that concurrent iterations of the remaining loops hold without tfswap.
    """

    locate: Callable[[str], str | None]
    unrolled: int
    overlapping_bytes: int


def prepare(graph: Graph, target: Target, locate: Callable[[str], str | None]) -> Prepared:
    """Prepare `graph`, in place.

    Args:
        locate: from the name of a node of `graph` to the user's source line.
    """
    apply_table(FIRST, graph, target)
    overlapping = overlapping_bytes(graph)
    apply_table(REST, graph, target)

    def locate_unrolled(name: str) -> str | None:
        return locate(graph.names_in_bodies.get(name, name))

    return Prepared(locate_unrolled, len(graph.names_in_bodies), overlapping)
