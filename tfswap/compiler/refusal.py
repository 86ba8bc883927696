"""The refusal of a limit that no plan keeps: it names the smallest limit, and the kernel that needs most."""

from __future__ import annotations

from collections.abc import Callable

from tfswap.analysis.constants import kept_constants
from tfswap.analysis.dataflow import Dataflow
from tfswap.compiler.options import Options
from tfswap.compiler.planners import Planners
from tfswap.compiler.policy import allowed_everywhere
from tfswap.compiler.rewriting import Found
from tfswap.compiler.search import Search
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.ir.custom_ops import OUTSIDE
from tfswap.ir.permits import ANYTHING, CLOSE, SLICE, STATE, TENSOR_TACTICS
from tfswap.kernels.alignment import ALIGNMENT_BYTES
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.slice_lines import sliceable
from tfswap.planner.promise import MARGIN_BYTES
from tfswap.report.variables import Homes
from tfswap.simulator.working_set import largest_working_set
from tfswap.support.sizes import format_bytes

MUCH = 0.05
"""A variable of this share of the floor is named."""


def refuse(
    limit_bytes: int,
    floor_bytes: int,
    *,
    lowest: Found,
    homes: Homes,
    planners: Planners,
    options: Options,
    locate: Callable[[str], str | None],
) -> InfeasibleMemoryLimit:
    """The error for a limit below the floor.

    Args:
        limit_bytes: the limit.
        floor_bytes: the smallest possible one.
        lowest: the plan with this peak.
        homes: what decides where variables are at home, with the prepared step.
        planners: those of the step.
        options: the user's options.
        locate: from a node's name to the user's line that made it.
    """
    if lowest.candidate.peak_bytes == planners.least_bytes(lowest.variant.rewriting.at_home):
        return InfeasibleMemoryLimit(
            f"memory_limit is {limit_bytes} bytes ({format_bytes(limit_bytes)}), and this step begins with "
            f"{format_bytes(planners.begin_bytes)} in use on the device: its variables are there. Make the model in "
            "`with tfswap.scope():`, which puts variables in host memory as soon as they have their values, or ask for "
            f"memory_limit={floor_bytes} or more.",
            floor_bytes=floor_bytes,
            limit_bytes=limit_bytes,
        )
    persistent_bytes = planners.resident_bytes(lowest.variant)
    host = options.host_limit_bytes
    disk = None if options.spill is None else options.spill.limit_bytes
    everywhere = allowed_everywhere(homes.settled)
    anything_leaves = {"swap", "recompute"} <= everywhere.intersection(options.tactics)
    policy_forbids = everywhere < ANYTHING.tactics
    may_spill = options.spill is None and not options.portable
    alone = anything_leaves and host is None and disk is None
    largest = largest_working_set(lowest.variant.flow)[0] if alone else lowest.candidate.largest_kernel()
    return InfeasibleMemoryLimit(
        f"memory_limit is {limit_bytes} bytes ({format_bytes(limit_bytes)}), and this step needs at least "
        f"{floor_bytes} ({format_bytes(floor_bytes)}): {format_bytes(persistent_bytes)} are persistent "
        f"(variables{_largest_variable(homes, floor_bytes)}, arguments, constants, other tensors), the rest is what "
        + (
            "its largest kernels need at the same time"
            if anything_leaves
            else f"it holds at the same time with tactics={options.tactics}" + (" and policy" if policy_forbids else "")
        )
        + (f" with at most {format_bytes(host)} of host memory" if host is not None else "")
        + (f" and {format_bytes(disk)} on disk" if disk is not None else "")
        + f", most of all {_kernel(lowest.variant.flow, largest, locate)}. Ask for memory_limit={floor_bytes} or more, "
        + ("" if set(TENSOR_TACTICS).issubset(options.tactics) else "allow all tactics, ")
        + ("" if homes.allowed or not homes.movable else f"add {STATE!r} to tactics, ")
        + _slices(lowest, largest, options, planners.target.device)
        + ("let policy allow more, " if policy_forbids else "")
        + ("raise host_memory_limit or give spill_dir=, " if host is not None and may_spill else "")
        + "or make the batch smaller.",
        floor_bytes=floor_bytes,
        limit_bytes=limit_bytes,
    )


def _largest_variable(homes: Homes, floor_bytes: int) -> str:
    """The largest variable that must be on the device, where it takes much of the floor."""
    largest = homes.largest_that_stays() if homes.allowed else None
    if largest is None or largest[1] < MUCH * floor_bytes:
        return ""
    name, nbytes, why = largest
    return f", such as {homes.name_of(name)!r} of {format_bytes(nbytes)} ({why})"


def _slices(lowest: Found, largest: int, options: Options, device: DeviceModel) -> str:
    """A remedy: what lets a kernel run in slices."""
    if SLICE in options.tactics and options.values == CLOSE:
        return ""
    graph = lowest.variant.graph
    found = sliceable(lowest.variant.flow.nodes[largest], device, graph.small_constants)
    if found is None or (SLICE in options.tactics and not found.close):
        return ""
    values = f'values="{CLOSE}"' if found.close and options.values != CLOSE else ""
    added = "" if SLICE in options.tactics else f"add {SLICE!r} to tactics"
    how = " and pass ".join(filter(None, (added, values))) if added else f"pass {values}"
    return f"{how}, so that this kernel may run in slices, "


def _kernel(flow: Dataflow, i: int, locate: Callable[[str], str | None]) -> str:
    """The kernel at the peak under the smallest limit, and its bytes."""
    node, sizes = flow.nodes[i], flow.values
    reads = sum(sizes[v].nbytes for v in {*flow.reads[i], *flow.consumes.get(i, ())})
    makes = sum(sizes[v].nbytes for _, v in flow.makes[i])
    temporaries = flow.temporary_bytes(i)
    line = locate(node.name)
    if node.op == OUTSIDE:
        return f"what its caller makes of the {format_bytes(reads)} that it returns, until it takes gradients"
    return (
        f"{node.op} {node.name!r}"
        + (f" ({line})" if line else "")
        + f", which reads {format_bytes(reads)}, makes {format_bytes(makes)}"
        + (f" and takes {format_bytes(temporaries)} of temporaries while it runs" if temporaries else "")
    )


def unplaced_bytes(search: Search) -> int:
    """By how much the floor may be too low while its variant has not been made: the addresses of its constants are
    unknown then, and each may take the rest of its chunk too.
    """
    variant = search.lowest().variant
    if search.planners.has_made(variant.rewriting):
        return 0
    parts = (variant.graph, *variant.graph.all_bodies())
    return max(MARGIN_BYTES, ALIGNMENT_BYTES * sum(len(kept_constants(part)) for part in parts))
