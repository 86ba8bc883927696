"""Did TensorFlow run what was planned? Checked in the graphs that it says it executed.

TensorFlow's optimizers may prune, merge and reorder; a plan that fits on paper is worth nothing if its nodes
or edges are gone. The first call of a rewritten function is run with graph collection on, and every planned
node, and every edge between two of them, is looked up in what came out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfswap.ir.ops import calls_functions
from tfswap.oplib import names
from tfswap.passes.verify import VerificationError

OURS = names.ALL | names.BESIDE


def audited_call(function: Any, inputs: Sequence[Any]) -> Any:
    """Call the rewritten ConcreteFunction and raise VerificationError if TensorFlow ran another graph.

    There is no audit while a graph is being built, when nothing runs. TensorFlow does not tell whether the user's
    program collects graphs too: what it has collected is thrown away, and its collection ends with this call.
    """
    from tensorflow.python.eager import context

    state = context.context()
    if not state.executing_eagerly():
        return function._call_flat(inputs, captured_inputs=function.captured_inputs)
    state.enable_graph_collection()
    state.export_run_metadata()  # what was collected earlier, and never asked for, is not this function's
    try:
        return function._call_flat(inputs, captured_inputs=function.captured_inputs)
    finally:
        # Also when the step failed: a closed gate lets nothing run, and the graphs are there all the same.
        collected = state.export_run_metadata()
        state.disable_graph_collection()
        if collected is not None and collected.function_graphs:
            audit(function.graph.as_graph_def(), [g.post_optimization_graph for g in collected.function_graphs])


def audit(planned: Any, executed: Sequence[Any]) -> int:
    """Compare a planned GraphDef with the executed ones; returns the number of edges found.

    Raises:
        VerificationError: a swap node, a kernel that runs again, or a control edge of the order, did not survive.
    """
    ran: dict[str, Any] = {}
    for graph in executed:
        for node in graph.node:
            ran[node.name] = node
    return _compare(planned, ran)


def _compare(planned: Any, ran: dict[str, Any]) -> int:
    found = 0
    # Lowered or inlined calls: what stands in for their bodies has their control edges.
    lowered = {n.name for n in planned.node if calls_functions(n.op) and n.name in ran and ran[n.name].op != n.op}
    for node in planned.node:
        ours = node.op in OURS or node.name.startswith(names.AGAIN)
        if not ours and not any(i.startswith("^") for i in node.input):
            continue
        executed = ran.get(node.name)
        if executed is None:
            if ours:
                raise VerificationError(
                    f"TensorFlow's optimizers removed the planned node {node.name!r}: the limit would not hold. "
                    "Please report this, with your TensorFlow's version."
                )
            continue
        if node.name in lowered:
            continue
        kept = set(executed.input)
        for source in node.input:
            if not source.startswith("^") or source[1:] not in ran or source[1:] in lowered:
                continue
            if source not in kept and not any(i.partition(":")[0] == source[1:] for i in kept):
                raise VerificationError(
                    f"TensorFlow's optimizers removed the planned edge {source[1:]!r} -> {node.name!r}: the limit "
                    "would not hold. Please report this, with your TensorFlow's version."
                )
            found += 1
    return found
