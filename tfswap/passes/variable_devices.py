"""Has a saved step on several devices check that its variables are on the devices that it was planned for.

TensorFlow puts all variables of a file on the first GPU unless it is given the right options, and runs what uses them
there, whatever device the file has for it. The arenas then look as planned before the step, and gates do not see it.
"""

from __future__ import annotations

from tfswap.ir.custom_ops import GATE, REQUIRE_PLACE
from tfswap.ir.graph import Graph, Output
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.device_carriers import unit
from tfswap.passes.nodes import add_wait


@graph_pass(
    requires="a gate that all other gates wait for",
    ensures="where a variable is not on the device that its argument names, the step fails before it begins",
)
def require_places(graph: Graph, _: Target) -> int:
    """Add a check of the variables on each device, in place; returns the number of checks."""
    first = next(node for node in graph if node.op == GATE)
    handles: dict[str, list[Output]] = {}
    for feed in graph.feeds:
        if feed.device and feed.outputs[0].dtype == "resource":
            handles.setdefault(feed.device, []).append(feed.out())
    for device, variables in handles.items():
        attrs = {"N": len(variables), "place": unit(device).encode()}
        name = graph.unique_name("tfswap/place")
        add_wait(graph, first, graph.add(REQUIRE_PLACE, name, variables, attrs=attrs, device=device))
    return len(handles)
