"""What every step gets before it is planned, in the order in which the passes need one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfswap.analysis.control_flow import overlapping_bytes
from tfswap.ir.graph import Graph
from tfswap.kernels.device import DeviceModel
from tfswap.passes.prepare.assign_in_place import apply_settle
from tfswap.passes.prepare.collective_order import apply_collective_order, apply_together
from tfswap.passes.prepare.common_subexpressions import apply_share
from tfswap.passes.prepare.copied_views import apply_copied_views
from tfswap.passes.prepare.copy_on_read import apply_shared_reads
from tfswap.passes.prepare.defer_constants import apply_defer
from tfswap.passes.prepare.free_constants import apply_free_constants
from tfswap.passes.prepare.onednn_fusion import apply_join
from tfswap.passes.prepare.ordered_splits import apply_pieces
from tfswap.passes.prepare.ordered_sums import apply_ordered_sums
from tfswap.passes.prepare.outer_products import apply_outer_products
from tfswap.passes.prepare.pool_argmax import apply_pool_places
from tfswap.passes.prepare.result_slots import apply_hand_over
from tfswap.passes.prepare.split_add_n import apply_split_sums
from tfswap.passes.prepare.split_identity_n import apply_split_views
from tfswap.passes.prepare.unroll_loops import apply_unroll
from tfswap.passes.prepare.zeros_like import apply_likes, apply_list_zeros


class Prepared(NamedTuple):
    """What the passes leave.

    Attributes:
        locate: from a node's name to the user's line that made it, for nodes of unrolled loops as well.
        unrolled: whether loops were unrolled.
        overlapping_bytes: the most that concurrent iterations hold, of loops that stay loops, without tfswap.
    """

    locate: Callable[[str], str | None]
    unrolled: bool
    overlapping_bytes: int


def prepare(
    graph: Graph,
    device: DeviceModel,
    *,
    portable: bool,
    keeps_results: bool,
    held: Sequence[str],
    locate: Callable[[str], str | None],
) -> Prepared:
    """Prepare `graph`, in place.

    Args:
        device: where it runs.
        portable: with TensorFlow's own ops alone.
        keeps_results: whether the caller gets tensors that it may keep, as from a function; a session copies them out.
        held: names of tensors that the unoptimised step holds until its end.
        locate: from the name of a node of `graph` to the user's line that made it.
    """
    apply_ordered_sums(graph, device, held=held, portable=portable)
    in_body = apply_unroll(graph, device)
    overlapping = overlapping_bytes(graph)
    apply_collective_order(graph)
    apply_together(graph)
    apply_free_constants(graph)
    apply_outer_products(graph, device)
    if not portable:
        apply_join(graph, device)
        apply_pool_places(graph, device)
        apply_settle(graph)
        apply_list_zeros(graph, device)
        apply_pieces(graph, device)
        apply_copied_views(graph, device)
    apply_shared_reads(graph)
    apply_split_views(graph)
    apply_likes(graph)
    apply_split_sums(graph, device)
    if not portable:
        apply_defer(graph, device)
    if keeps_results and not portable:
        apply_hand_over(graph)
    apply_share(graph)
    graph.prune()

    def locate_unrolled(name: str) -> str | None:
        return locate(in_body.get(name, name))

    return Prepared(locate_unrolled, bool(in_body), overlapping)
