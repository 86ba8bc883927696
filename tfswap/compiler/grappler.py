"""What Grappler, TensorFlow's own optimizers, makes of a step before it runs.

Grappler shares, folds, reassociates, fuses and sorts anew, which moves a step's peak by up to a fifth either way, its
time by more, and its last bits. So it is asked, as TensorFlow asks it before a function's first call: for the same
device, with the function's arguments and results as they are there. Once as it is by default, to know how the step
runs that tfswap leaves alone; and once for the graph that is planned, without its memory optimizer, which does what
tfswap does, for no limit, and makes sums in any order, whose last bits differ from run to run.

What Grappler is given is named and kept as it is there, since it goes by names. Of the step as it is by default nodes
come in the order that Grappler has put them in, by which the executor goes.

Not handled: loops and conditionals, which TensorFlow lowers first, are optimized here as the nodes that were traced,
each body on its own. Such a step is planned as it was traced, unless they only check something, as assertions do; and
so is one on several devices.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tfswap.analysis.constants import largest_kernel_bytes, too_large_to_fold
from tfswap.compiler.marks import marked_to_keep
from tfswap.compiler.plan_cache import PlanCache
from tfswap.compiler.process_names import ProcessNames
from tfswap.compiler.tf1_variables import REFERENCE_VARIABLES, reference_variables
from tfswap.device import machine
from tfswap.errors import TfswapError
from tfswap.exporters.function_def import BodyFunctions
from tfswap.exporters.graph_def import enum_of, export_graph_def, fill_shape
from tfswap.importers.bodies import import_with_bodies, inside
from tfswap.importers.function import sparse_shapes
from tfswap.importers.run_grappler import run_grappler
from tfswap.importers.shapes import HANDLES, Argument, HandleType
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import control_flow, has_small_extras, is_collective
from tfswap.ir.python_calls import differentiated
from tfswap.ir.types import HALVES, Shape, TensorType
from tfswap.ir.views import origin
from tfswap.kernels.device import DeviceModel
from tfswap.passes.device_carriers import units
from tfswap.passes.nodes import PRESERVE
from tfswap.passes.prepare.accumulated_sums import add_by_kernels
from tfswap.passes.prepare.onednn_fusion import FILTER, FUSED_3D, KERNEL_LABEL, any_size
from tfswap.support.gc_pause import without_collector

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, node_def_pb2, tensor_shape_pb2
    from tensorflow.core.protobuf import device_properties_pb2, rewriter_config_pb2

READS = frozenset({"ReadVariableOp"})
WRITES = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
GATHER = "ResourceGather"
"""Ops that show what is in a variable: by what they give, by what they are given, and by rows of it."""

FUSED = "_FusedConv2D"
ONEDNN_FUSED = "_MklNativeFusedConv2D"

log = logging.getLogger("tfswap")

HOST = "CPU:0"
CPU_DEVICE_BYTES = 256 << 20
"""What TensorFlow says that any CPU's memory is (threadpool_device_factory.cc)."""
KEPT_BYTES = 100 << 10
"""Grappler keeps what it has folded up to this size, whatever it comes from (constant_folding.cc, kMaxConstantSize)."""
MOST_NODES = 100_000
"""Of a graph with more, Grappler's copies take more than all of tfswap does, and its five minutes come into sight,
after which it leaves out what it has not got to (meta_optimizer.cc): such a step is planned as it was traced."""
ROUNDED_UP = 2
"""A chunk can be as many times as large as what is asked for."""


def as_executed(graph: Graph, device: DeviceModel) -> Graph:
    """`graph` as TensorFlow's executor gets it on `device`, by default; as it was traced where the optimizers fail."""
    from tensorflow.python.framework import errors_impl

    options = _options()
    if _is_off(options, graph):
        return graph
    try:
        return _optimized(graph, device, options)
    except (errors_impl.OpError, TfswapError) as error:
        log.warning("TensorFlow's own optimizers fail on this step, whose unoptimised peak is a guess then: %s", error)
        return graph


@without_collector
def as_planned(
    graph: Graph,
    concrete: Any,
    device: DeviceModel,
    *,
    keeps: Callable[[str], bool] = lambda _: False,
) -> Graph:
    """What is planned of `graph`: what Grappler makes of it without its memory optimizer, or the graph itself.

    Args:
        graph: as it was traced, with sizes bound to those of a call. Grappler does not get to know these.
        concrete: the trace.
        keeps: whether the node of a name has to be there afterwards.
    """
    from tensorflow.python.framework import errors_impl

    options = _options()
    if _is_off(options, graph) or not _can_be_asked(graph) or sparse_shapes(concrete):
        return graph
    options.memory_optimization = options.NO_MEM_OPT
    shapes = {t.op.name: None if t.shape.rank is None else tuple(t.shape.as_list()) for t in concrete.inputs}
    kept = [node.name for node in graph if keeps(node.name)]
    kept += [tensor.rpartition(":")[0] for tensor in marked_to_keep(graph)]
    try:
        made = _optimized(graph, device, options, shapes, kept)
    except (errors_impl.OpError, TfswapError) as error:
        log.warning("TensorFlow's own optimizers fail on this step, which is planned as it was traced: %s", error)
        return graph
    if _unsized(made) and not _unsized(graph):
        return graph
    given = {node.name for node in graph if node.device}
    for node in made:
        if node.name not in given and node.device == _device_name(device):
            node.device = ""  # where it runs was never asked for
    for node in graph:
        call = differentiated(node)
        if call is not None and node.name in made and call.name in made:
            # Grappler drops the edge, since the one comes after the other all the same.
            made[node.name].controls = (*made[node.name].controls, made[call.name])
    made.executed = tuple(node.name for node in made)
    _arrange_as_traced(made, graph)
    made.traced = graph
    return made


def _arrange_as_traced(made: Graph, traced: Graph) -> None:
    """Put nodes in the trace's order, which holds less memory than Grappler's; new ones behind what they read.

    Of what reads one gradient, the order is Grappler's: oneDNN's pass goes by that (passes/prepare/onednn_fusion.py).
    """
    place = {node.name: rank for rank, node in enumerate(traced)}
    rank: dict[Node, int] = {}
    for node in made.topological():
        rank[node] = place.get(node.name, max((rank[source] for source, _ in node.inputs), default=0))
    siblings: dict[Output, list[Node]] = defaultdict(list)
    for node in made:
        if node.op == FILTER:
            siblings[node.inputs[2]].append(node)
    for nodes in siblings.values():
        rank |= zip(nodes, sorted(rank[node] for node in nodes), strict=True)
    made.arrange(rank)


def _options() -> rewriter_config_pb2.RewriterConfig:
    """How the user has set Grappler, to be changed."""
    from tensorflow.python.eager import context

    options = context.context().config.graph_options.rewrite_options
    return type(options).FromString(options.SerializeToString())


def _is_off(options: rewriter_config_pb2.RewriterConfig, graph: Graph) -> bool:
    """Whether nobody is asked: the user wants it so (tf.config.optimizer.set_experimental_options), or for its size."""
    return options.disable_meta_optimizer or len(graph) > MOST_NODES


def _can_be_asked(graph: Graph) -> bool:
    """Whether what Grappler makes of a graph is what runs: one device, and nothing that is lowered first."""
    if not _only_checks(graph) or len(units(graph)) > 1 or any(is_collective(node.op) for node in graph):
        return False
    kinds = {feed.outputs[0].dtype for feed in graph.feeds if feed.outputs}
    return "variant" not in kinds and not any(feed.op in REFERENCE_VARIABLES for feed in graph.feeds)


def _only_checks(graph: Graph) -> bool:
    """Whether what its conditionals give is waited for and not read, as assertions are; and there is no loop."""
    if any((flow := control_flow(node.op)) is None or flow.is_loop for node in graph.bodies):
        return False
    passed_on = {node for node in graph if any(t.node in graph.bodies for t in node.inputs)}
    if any(fetch.node in passed_on or fetch.node in graph.bodies for fetch in graph.fetches):
        return False
    read = any(t.node in passed_on for node in graph for t in node.inputs)
    return not read and all(node.op == "Identity" for node in passed_on)


def _unsized(graph: Graph) -> bool:
    return any(kind.nbytes is None for node in graph if not has_small_extras(node.op) for kind in node.outputs)


def _optimized(
    graph: Graph,
    device: DeviceModel,
    options: rewriter_config_pb2.RewriterConfig,
    shapes: Mapping[str, Shape] | None = None,
    kept: Sequence[str] = (),
) -> Graph:
    """What Grappler makes of a graph.

    Args:
        shapes: what Grappler gets to know of the arguments' shapes, by name; by default all that `graph` says.
        kept: names of nodes that are there afterwards, besides what the graph's ends are.
    """
    room_bytes = machine.free_bytes(HOST) / ROUNDED_UP  # what finds none ends the process
    if any(too_large_to_fold(body, room_bytes) for body in graph.all_bodies()):
        options.constant_folding = options.OFF
    if not device.is_gpu:
        room_bytes = min(room_bytes, _folding_room(graph))
    unfolded = {node.name for node in too_large_to_fold(graph, room_bytes)}
    graph = graph.copy()
    add_by_kernels(graph)
    bodies = BodyFunctions()
    graph_def = export_graph_def(graph, bodies)
    # TensorFlow 1's reference variables stay nodes: ops that write them take nothing else.
    given = [feed for feed in graph.feeds if feed.op not in REFERENCE_VARIABLES]
    feeds = {feed.name: number for number, feed in enumerate(given)}
    arguments = _arguments(graph, given)
    fed = _as_in_function(graph_def, feeds, arguments, shapes, unfolded, _device_name(device))
    results, renamed = _names_in_function(graph, given)
    _add_results(graph_def, results, graph.fetches, _device_name(device))
    targets = [target.name for target in graph.targets]
    process = ProcessNames(graph_def, renamed, bodies.made)
    process.replace(graph_def)
    kept = [process.replaced(name) for name in (*results, *targets, *kept)]
    made = _made_of(graph_def, kept, options, device)
    process.restore(made)
    fetched = {node.attr["index"].i: node.input[0] for node in made.node if node.op == "_Retval"}
    for node in made.node:
        if node.name in unfolded:
            del node.attr[PRESERVE]
        if shapes is not None:
            _drop_controls(node, feeds)
        _as_onednn(node)
    padded = _declare_padded(made, graph)
    left = [fed.pop(node.name, node) for node in made.node if node.op != "_Retval"]
    del made.node[:]
    made.node.extend([*fed.values(), *left])  # arguments that nothing reads were pruned
    fetches = [fetched[number] for number in range(len(graph.fetches))]
    result = import_with_bodies(made, arguments, list(feeds), fetches, targets)
    if traced := _only_traced(result, graph):
        result = import_with_bodies(made, arguments, list(feeds), fetches, targets, traced)
    for kernel, shaped in padded.items():
        if kernel in result:
            result[kernel].outputs = result[shaped].outputs
            result[shaped].attrs = {**result[shaped].attrs, "shape": any_size(result[kernel])}
    result.feeds += reference_variables(result)
    return result


def _as_in_function(
    graph_def: graph_pb2.GraphDef,
    feeds: Mapping[str, int],
    arguments: Mapping[str, Argument],
    shapes: Mapping[str, Shape] | None,
    unfolded: Container[str],
    place: str,
) -> dict[str, node_def_pb2.NodeDef]:
    """Place nodes on a device, make the feeds a function's arguments, and keep nodes from folding.

    Returns placeholders for the arguments, by name.

    Args:
        feeds: the arguments' numbers, by name.
        shapes: as of `_optimized`.
        unfolded: names of nodes that Grappler must not fold.
    """
    fed: dict[str, node_def_pb2.NodeDef] = {}
    for node in graph_def.node:
        node.device = node.device or place
        if node.name in unfolded:
            node.attr[PRESERVE].b = True
        if node.name in feeds:
            fed[node.name] = type(node)(name=node.name, op="Placeholder")
            fed[node.name].attr["dtype"].type = arguments[node.name].dtype
            shape = arguments[node.name].shape if shapes is None else shapes[node.name]
            _make_argument(node, feeds[node.name], replace(arguments[node.name], shape=shape))
    return fed


def _add_results(graph_def: graph_pb2.GraphDef, names: Sequence[str], fetches: Sequence[Output], place: str) -> None:
    """Add a function's results of these names, in order."""
    for number, (name, fetch) in enumerate(zip(names, fetches, strict=True)):
        result = graph_def.node.add(name=name, op="_Retval", input=[fetch.name], device=place)
        result.attr["T"].type = enum_of(fetch.type.dtype)
        result.attr["index"].i = number


def _as_onednn(node: node_def_pb2.NodeDef) -> None:
    """Grappler fuses convolutions of 16-bit floats where oneDNN's kernels take these, into an op that has no kernel for
    them: it counts on oneDNN's graph pass, which has not run yet.
    """
    if node.op == FUSED and node.attr["T"].type in map(enum_of, HALVES):
        node.op = ONEDNN_FUSED
        node.attr["_kernel"].s = KERNEL_LABEL


def _declare_padded(made: graph_pb2.GraphDef, traced: Graph) -> dict[str, str]:
    """Pass on what convolutions make that Grappler has fused with a Pad, by a node that says what its shape is.

    TensorFlow infers that shape as if there were no Pad. Returns by kernel, which is called otherwise then, that node.
    """
    found: dict[str, str] = {}
    padded = [n for n in made.node if n.op == FUSED_3D and any(n.attr["padding_list"].list.i) and n.name in traced]
    if padded:
        import tfswap.ops  # noqa: F401 TensorFlow knows the op from then on; few steps need it to be planned
    for node in padded:
        declared = made.node.add(name=node.name, op=custom_ops.DEFER, device=node.device)
        node.name = f"{node.name}/padded"
        declared.input.append(node.name)
        declared.attr["T"].CopyFrom(node.attr["T"])
        fill_shape(declared.attr["shape"].shape, traced[declared.name].outputs[0].shape)
        found[node.name] = declared.name
    return found


def _only_traced(made: Graph, traced: Graph) -> dict[str, TensorType]:
    """What of `made` has a size that its ops do not give, as `set_shape` has said it, or as it was found out. Named as
    `import_with_bodies` names it.
    """
    found: dict[str, TensorType] = {}
    for node in made:
        if any(kind.nbytes is None for kind in node.outputs) and node.name in traced:
            twin = traced[node.name]
            pairs = enumerate(zip(node.outputs, twin.outputs, strict=True)) if twin.op == node.op else ()
            found |= {
                node.out(i).name: kind for i, (own, kind) in pairs if own.nbytes is None and kind.nbytes is not None
            }
    for node, bodies in made.bodies.items():
        twins = traced.bodies.get(traced[node.name], ()) if node.name in traced else ()
        for k, (body, twin) in enumerate(zip(bodies, twins, strict=False)):
            found |= {f"{inside(node.name, k)}{name}": kind for name, kind in _only_traced(body, twin).items()}
    return found


def _made_of(
    graph_def: graph_pb2.GraphDef,
    kept: Sequence[str],
    options: rewriter_config_pb2.RewriterConfig,
    device: DeviceModel,
) -> graph_pb2.GraphDef:
    """What Grappler makes of it, this time or in an earlier process."""
    from google.protobuf.message import DecodeError
    from tensorflow.python.grappler import cluster

    named = _named_device(device)

    def make() -> graph_pb2.GraphDef:
        return run_grappler(graph_def, kept, options, cluster.Cluster(devices=[named]))

    def is_whole(text: bytes) -> bool:
        try:
            return len(type(graph_def).FromString(text).node) > 0
        except DecodeError:
            return False

    cache = PlanCache.of_environment()
    if cache is None:
        return make()
    given = [message.SerializeToString(deterministic=True) for message in (graph_def, options, named)]
    given.append(repr((kept, device, _processor())).encode())
    return type(graph_def).FromString(cache.made_of(given, lambda: make().SerializeToString(), is_whole))


@functools.cache
def _processor() -> str:
    """What the processor can do, by which some kernels are fused or not."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""


def _folding_room(graph: Graph) -> float:
    """What may be held of an arena to compute a node beforehand, while a limit is on it.

    For the step's largest kernel every limit has room. The limit itself has no part in this: with another one the step
    would have other last bits, and its floor would be that of another graph.
    """
    return max(largest_kernel_bytes(graph), KEPT_BYTES)


def _names_in_function(graph: Graph, given: Sequence[Node]) -> tuple[list[str], dict[str, str]]:
    """What TensorFlow calls the parts of the function that it makes of a trace, where it is another name than there.

    Grappler goes by names: it puts nodes in order from the ends of the graph (model_pruner.cc), and no later optimizer
    undoes that; it sorts the inputs of a sum (arithmetic_optimizer.cc), which are added in that order. Follows
    NodeNameMapping in graph_to_functiondef.cc.

    Args:
        given: the arguments.

    Returns:
        The names of the nodes that the results leave by, of which there may be none in `graph`; and by name in the
        trace what arguments and other nodes are called.
    """
    used: dict[str, int] = {}

    def unique(name: str) -> str:
        candidate = name
        while candidate in used:
            candidate = f"{name}_{used[name]}"
            used[name] += 1
        used[candidate] = 0
        return candidate

    results = [f"{unique(_in_signature(fetch.node.name))}_RetVal" for fetch in graph.fetches]
    names = {feed.name: unique(_in_signature(feed.name)) for feed in given}
    names |= {node.name: unique(node.name) for node in graph if node.name not in names}
    return results, {traced: name for traced, name in names.items() if name != traced}


def _in_signature(name: str) -> str:
    return re.sub("[^a-z0-9]", "_", name.lower()).lstrip("_0123456789") or "unknown"


def _arguments(graph: Graph, given: Sequence[Node]) -> dict[str, Argument]:
    """What the step is given, by name; for variables with what is in them, as far as the step's own ops show."""
    held: dict[str, list[HandleType]] = {
        node.name: [(enum_of(kind.dtype), _shape(kind.shape))] for node, kind in _held(graph).items()
    }
    types = ((feed.name, feed.outputs[0]) for feed in given)
    return {n: Argument(enum_of(kind.dtype), kind.shape, held.get(n, []), bound=kind.bound) for n, kind in types}


def _held(graph: Graph) -> dict[Node, TensorType]:
    """By node that gives a variable's handle, what is in the variable."""
    held: dict[Node, TensorType] = {}
    for node in graph:
        if node.op in (*READS, *WRITES, GATHER):
            kind = node.inputs[1].type if node.op in WRITES else node.outputs[0]
            if node.op == GATHER and kind.shape is not None:
                kind = TensorType(kind.dtype, (None, *kind.shape[len(node.inputs[1].type.shape or ()) :]))
            held.setdefault(origin(node.inputs[0]).node, kind)
        elif (flow := control_flow(node.op)) is not None:
            for body in graph.bodies.get(node, ()):
                inner = _held(body)
                for feed, given in zip(body.feeds, node.inputs[flow.first_argument :], strict=True):
                    if feed in inner:
                        held.setdefault(origin(given).node, inner[feed])
    return held


def _shape(shape: Shape) -> tensor_shape_pb2.TensorShapeProto:
    from tensorflow.core.framework import tensor_shape_pb2

    made = tensor_shape_pb2.TensorShapeProto()
    fill_shape(made, shape)
    return made


def _make_argument(node: node_def_pb2.NodeDef, number: int, argument: Argument) -> None:
    """Make `node`, in place, an argument of a function, as Grappler gets it.

    An argument's node does not say its shape, which Grappler then does not know. Another op, which Grappler does not
    know either and so leaves alone, says it.
    """
    del node.input[:]
    node.ClearField("attr")
    if argument.dtype in map(enum_of, HANDLES):
        node.op = "_Arg"
        node.attr["T"].type = argument.dtype
        node.attr["index"].i = number
        for dtype, shape, *_ in argument.handles:
            node.attr["_handle_dtypes"].list.type.append(dtype)
            node.attr["_handle_shapes"].list.shape.add().CopyFrom(shape)
        return
    node.op = "_ParallelConcatStart"
    node.attr["dtype"].type = argument.dtype
    node.attr["shape"].shape.CopyFrom(_shape(argument.shape))


def _drop_controls(node: node_def_pb2.NodeDef, feeds: Container[str]) -> None:
    """Let `node` wait for no argument, as what was folded of an argument's shape does: they are there."""
    inputs = [name for name in node.input if not (name.startswith("^") and name[1:] in feeds)]
    if len(inputs) < len(node.input):
        del node.input[:]
        node.input.extend(inputs)


def _device_name(device: DeviceModel) -> str:
    return f"/job:localhost/replica:0/task:0/device:{device.kind.upper()}:0"


def _named_device(device: DeviceModel) -> device_properties_pb2.NamedDevice:
    """`device` as Grappler knows devices; what only its estimates of time use is made up.

    Where it believes that a step takes four fifths of the device's memory, it makes sums that need less, and more of
    them (memory_optimizer.cc, SchedulingPass).
    """
    from tensorflow.core.protobuf import device_properties_pb2

    memory_bytes = (machine.device_limit_bytes("GPU:0") or 0) if device.is_gpu else CPU_DEVICE_BYTES
    made = device_properties_pb2.DeviceProperties(
        type=device.kind.upper(), frequency=2000, num_cores=device.intra_op_threads, memory_size=memory_bytes
    )
    if device.is_gpu:
        made.environment["architecture"] = "8.0"
    return device_properties_pb2.NamedDevice(properties=made, name=_device_name(device))
