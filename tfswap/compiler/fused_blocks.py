"""Replaces chains of kernels by calls of functions that XLA compiles: the tactic "fuse".

analysis/fusion.py finds the chains. Blocks of the same content call the same function, which XLA compiles once. Calls
are as those of the user's functions with `jit_compile=True`: their memory is measured before the step is planned
(runtime/xla_calls.py). Their time is the model's, so that the same step has the same plan in every process.

Values differ in the last bits: XLA has its own functions (exp, erf), and adds in another order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, cast

from tfswap.analysis.cost import Costs
from tfswap.analysis.fusion import Block, find_blocks
from tfswap.exporters.function_def import BodyFunctions, function_def
from tfswap.importers.function import XLA_ATTRIBUTES
from tfswap.ir.graph import Dtype, Graph, Measured, Node, Opaque, Output
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.fused import BLOCK, BLOCK_SUFFIX, COMPOSED, composed_of
from tfswap.passes.body_values import add_feed

CALL = "PartitionedCall"


def fuse(graph: Graph, device: DeviceModel, keeps: Callable[[str], bool] = lambda _: False) -> Graph:
    """`graph` with blocks; `graph` itself where none is worth it.

    Args:
        keeps: whether the node of this name must stay in the graph.
    """
    blocks = find_blocks(graph, Costs.of(device), keeps)
    if not blocks:
        return graph
    made = graph.copy()
    made.unfused, made.traced = graph, graph.traced or graph
    functions: dict[str, Any] = {}
    now: dict[Output, Output] = {}
    call_of: dict[Node, Node] = {}
    members = {made[member.name] for block in blocks for member in block.members}
    followers: dict[Node, list[Node]] = {}
    for block in blocks:
        if not block.outputs:
            continue  # later blocks recompute it
        call = _add_call(made, block, functions, now)
        now.update((made.tensor(tensor.name), call.out(k)) for k, tensor in enumerate(block.outputs))
        call_of.update((made[member.name], call) for member in block.members)
        followers[made[block.members[-1].name]] = [call]
    made.move_behind(followers)
    _use(made, now, call_of, members)
    _extend_library(made, functions)
    return made


def _add_call(graph: Graph, block: Block, functions: dict[str, Any], now: dict[Output, Output]) -> Node:
    """A call of the block, whose function is added to `functions`.

    Args:
        now: what replaces tensors of earlier blocks.
    """
    from tensorflow.core.framework import attr_value_pb2

    function = _function(block)
    functions[function.signature.name] = function
    called = attr_value_pb2.AttrValue()
    called.func.name = function.signature.name
    inputs = [graph.tensor(tensor.name) for tensor in block.inputs]
    call = graph.add(
        CALL,
        graph.unique_name(f"{block.members[-1].name}{BLOCK_SUFFIX}"),
        [now.get(tensor, tensor) for tensor in inputs],
        attrs={
            "Tin": tuple(Dtype(t.type.dtype) for t in block.inputs),
            "Tout": tuple(Dtype(t.type.dtype) for t in block.outputs),
            "f": Opaque("attr", called.SerializeToString(deterministic=True)),
            "config": b"",
            "config_proto": b"",
            "executor_type": b"",
            XLA_ATTRIBUTES[0]: True,
        },
        outputs=[t.type for t in block.outputs],
        device=block.members[-1].device,
    )
    call.measured = Measured(None, block.seconds)
    return call


def _function(block: Block) -> Any:
    """The function of a block, named after its content."""
    body = Graph()
    twins: dict[Output, Output] = {}
    for k, tensor in enumerate(block.inputs):
        body.feeds.append(add_feed(body, f"input_{k}", tensor.type))
        twins[tensor] = body.feeds[-1].out()
    for k, node in enumerate(block.nodes):
        made = _add_twin(body, node, f"node_{k}", [twins[tensor] for tensor in node.inputs])
        twins[node.out()] = made.out()
    body.fetches = [twins[tensor] for tensor in block.outputs]
    found = function_def(body, BLOCK, [f"output_{k}" for k in range(len(block.outputs))], BodyFunctions())
    found.attr[XLA_ATTRIBUTES[0]].b = True
    content = found.SerializeToString(deterministic=True)
    found.signature.name = f"{BLOCK}{hashlib.sha256(content).hexdigest()[:16]}"
    return found


def _add_twin(body: Graph, node: Node, name: str, inputs: list[Output]) -> Node:
    """The node in a block's function, without attributes that refer to other nodes."""
    attrs = {key: value for key, value in node.attrs.items() if not key.startswith("_")}
    if node.op != COMPOSED:
        return body.add(node.op, name, inputs, attrs=attrs, outputs=node.outputs)
    kind = {"T": cast("Dtype", attrs["T"])}
    for k, op in enumerate(composed_of(node)):
        inputs = [body.add(op, f"{name}_{k}", inputs, attrs=kind, outputs=node.outputs).out()]
    return inputs[0].node


def _use(graph: Graph, now: dict[Output, Output], call_of: dict[Node, Node], members: set[Node]) -> None:
    """Let readers of blocks' members read the calls, in place, and drop the members."""
    calls = set(call_of.values())
    for node in graph:
        if node in members:
            continue
        if node not in calls:
            node.inputs = tuple(now.get(tensor, tensor) for tensor in node.inputs)
        controls = (call_of.get(s, s) for s in node.controls if s in call_of or s not in members)
        node.controls = tuple(dict.fromkeys(controls))
    graph.executed = ()
    graph.prune()


def _extend_library(graph: Graph, functions: dict[str, Any]) -> None:
    from tensorflow.core.framework import graph_pb2

    rest = graph_pb2.GraphDef()
    if graph.library is not None:
        rest.ParseFromString(graph.library.data)
    rest.library.function.extend(functions[name] for name in sorted(functions))
    graph.library = Opaque("GraphDef", rest.SerializeToString(deterministic=True))
