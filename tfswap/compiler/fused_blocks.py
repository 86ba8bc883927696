"""Replaces chains of kernels by calls of functions that XLA compiles: the tactic "fuse".

analysis/fusion.py finds the chains. Blocks of the same content call the same function, which XLA compiles once. Calls
are as those of the user's functions with `jit_compile=True`: their memory is measured before the step is planned
(runtime/xla_calls.py). Their time is the model's (analysis/block_time.py), so that the same step has the same plan in
every process. runtime/block_choice.py chooses which blocks a step has under its limit.

Values differ in the last bits: XLA has its own functions (exp, erf), and adds in another order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any, cast

from tfswap.analysis.cost import Costs
from tfswap.analysis.fusion import Block, find_blocks
from tfswap.exporters.function_def import BodyFunctions, function_def
from tfswap.importers.function import XLA_ATTRIBUTES
from tfswap.ir.fused_block import FusedBlock
from tfswap.ir.graph import Dtype, Graph, Measured, Node, Opaque, Output
from tfswap.ir.op_traits import is_const, is_view
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.fused import BLOCK, BLOCK_SUFFIX, COMPOSED, composed_of
from tfswap.passes.body_values import add_feed

CALL = "PartitionedCall"


def fuse(
    graph: Graph,
    device: DeviceModel,
    keeps: Callable[[str], bool] = lambda _: False,
    price_s: float = 0.0,
    room_bytes: float = math.inf,
) -> Graph:
    """`graph` with blocks; `graph` itself where none gains something. Arguments as of `find_blocks`."""
    blocks = find_blocks(graph, Costs.of(device), keeps, price_s, room_bytes)
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
        call = _add_call(made, block, functions, lambda t: now.get(made.tensor(t.name), made.tensor(t.name)))
        now.update((made.tensor(tensor.name), call.out(k)) for k, tensor in enumerate(block.outputs))
        call_of.update((made[member.name], call) for member in block.members)
        followers[made[block.members[-1].name]] = [call]
        made.blocks += (_record(block, call),)
    made.move_behind(followers)
    _use(made, now, call_of, members)
    _extend_library(made, functions)
    return made


def _record(block: Block, call: Node) -> FusedBlock:
    members = {*block.members}
    again = (node.name for node in block.nodes if node not in members and not is_const(node.op))
    return FusedBlock(
        call.name,
        content_of(block),
        tuple(node.name for node in block.members),
        tuple(again),
        block.gain_s,
        block.freed_bytes,
    )


def content_of(block: Block) -> str:
    """The name of the block's function, which blocks of the same content share."""
    return _function(block).signature.name


def block_alone(block: Block) -> Graph:
    """A graph of the block's call alone, for measurements."""
    made, functions = Graph(), dict[str, Any]()
    now: dict[Output, Output] = {}
    for k, tensor in enumerate(block.inputs):
        made.feeds.append(add_feed(made, f"input_{k}", tensor.type))
        now[tensor] = made.feeds[-1].out()
    call = _add_call(made, block, functions, now.__getitem__)
    made.fetches = [call.out(k) for k in range(len(block.outputs))]
    _extend_library(made, functions)
    return made


def members_alone(block: Block, graph: Graph) -> Graph:
    """A graph of the kernels that the block replaces, for measurements. Its results are what others read of them."""
    inside = set(block.members)
    constants = {t.node for n in block.members for t in n.inputs if is_const(t.node.op) and "value" in t.node.attrs}
    read = {t for n in block.members for t in n.inputs if t.node not in inside and t.node not in constants}
    used = set(graph.fetches).union(*(n.inputs for n in graph if n not in inside))
    outputs = [node.out() for node in block.members if node.out() in used]
    return _body([*constants, *block.members], sorted(read, key=lambda t: t.name), outputs)


def _add_call(graph: Graph, block: Block, functions: dict[str, Any], now: Callable[[Output], Output]) -> Node:
    """A call of the block, whose function is added to `functions`.

    Args:
        now: gives what the call reads for an input of the block.
    """
    from tensorflow.core.framework import attr_value_pb2

    function = _function(block)
    functions[function.signature.name] = function
    called = attr_value_pb2.AttrValue()
    called.func.name = function.signature.name
    call = graph.add(
        CALL,
        graph.unique_name(f"{block.members[-1].name}{BLOCK_SUFFIX}"),
        map(now, block.inputs),
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
    kernels = sum(not is_view(node.op) for node in block.members)
    call.measured = Measured(seconds=block.seconds, kernels=kernels)
    return call


def _function(block: Block) -> Any:
    """The function of a block, named after its content."""
    names = [f"output_{k}" for k in range(len(block.outputs))]
    found = function_def(_body(block.nodes, block.inputs, block.outputs), BLOCK, names, BodyFunctions())
    found.attr[XLA_ATTRIBUTES[0]].b = True
    content = found.SerializeToString(deterministic=True)
    found.signature.name = f"{BLOCK}{hashlib.sha256(content).hexdigest()[:16]}"
    return found


def _body(nodes: Iterable[Node], inputs: Iterable[Output], outputs: Iterable[Output]) -> Graph:
    """A graph of these nodes alone."""
    body = Graph()
    twins: dict[Output, Output] = {}
    for k, tensor in enumerate(inputs):
        body.feeds.append(add_feed(body, f"input_{k}", tensor.type))
        twins[tensor] = body.feeds[-1].out()
    for k, node in enumerate(nodes):
        made = _add_twin(body, node, f"node_{k}", [twins[tensor] for tensor in node.inputs])
        twins[node.out()] = made.out()
    body.fetches = [twins[tensor] for tensor in outputs]
    return body


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
