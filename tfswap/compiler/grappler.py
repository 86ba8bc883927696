"""Runs Grappler, TensorFlow's own graph optimizers, on a step, as TensorFlow does before a function's first call.

Grappler shares, folds, reassociates, fuses and reorders nodes. This changes a step's peak by up to a fifth, its time by
more, and its last bits. tfswap runs it for the same device and with the same arguments and results as TensorFlow.
`as_planned` gives the graph that is planned. It leaves out Grappler's memory optimizer, which swaps and recomputes
without a limit and computes sums in any order, so that their last bits differ from run to run. `as_executed` gives the
unoptimised step: that graph, or the result of a second run with the default options.

The nodes of the unoptimised step come in Grappler's order, which the executor follows.

Not handled: TensorFlow lowers loops and conditionals before Grappler. Here each body is optimized on its own. A step
with them is planned as traced, unless they are assertions. So is a step on several CPUs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.analysis.constants import folding_room, too_large_to_fold
from tfswap.compiler.grappler_function import (
    add_results,
    arguments_of,
    as_in_function,
    drop_controls,
    names_in_function,
)
from tfswap.compiler.marks import marked_to_keep
from tfswap.compiler.plan_cache import PlanCache
from tfswap.compiler.process_names import ProcessNames
from tfswap.compiler.tf1_variables import REFERENCE_VARIABLES, reference_variables
from tfswap.device import arena
from tfswap.errors import TfswapError
from tfswap.exporters.function_def import BodyFunctions
from tfswap.exporters.graph_def import enum_of, export_graph_def, fill_shape
from tfswap.importers.bodies import import_with_bodies, inside
from tfswap.importers.function import sparse_shapes
from tfswap.importers.run_grappler import run_grappler
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import control_flow, has_small_extras, is_collective
from tfswap.ir.types import HALVES, Shape, TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.passes.device_carriers import unit, units
from tfswap.passes.nodes import PRESERVE
from tfswap.passes.prepare.accumulated_sums import add_by_kernels
from tfswap.passes.prepare.onednn_fusion import FILTER, FUSED_3D, KERNEL_LABEL, any_size
from tfswap.support.gc_pause import without_collector

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, node_def_pb2
    from tensorflow.core.protobuf import device_properties_pb2, rewriter_config_pb2

SWAPPED_BY_HAND = "_swap_to_host"
"""An attribute of kernels whose inputs Grappler swaps."""
FUSED = "_FusedConv2D"
ONEDNN_FUSED = "_MklNativeFusedConv2D"

log = logging.getLogger("tfswap")

HOST = "CPU:0"
CPU_DEVICE_BYTES = 256 << 20
"""The memory size that TensorFlow reports for any CPU (threadpool_device_factory.cc)."""
MOST_NODES = 100_000
"""A larger graph is planned as it was traced: Grappler's copies take more memory than all of tfswap, and it may exceed
its limit of five minutes, after which optimizers are left out (meta_optimizer.cc)."""
ROUNDED_UP = 2
"""A chunk is at most this multiple of its request."""


def as_executed(graph: Graph, device: DeviceModel, held: Sequence[str] = ()) -> Graph:
    """The step as TensorFlow's executor runs it on `device`, by default; as it was traced where the optimizers fail.

    Args:
        graph: the step as traced, or as `as_planned` returns it. A device's part of a step stays as it is: the
            optimizers have run on the whole step.
        held: names of traced tensors that the step gives its caller in addition.
    """
    from tensorflow.python.framework import errors_impl

    options = _options()
    graph = graph.unfused or graph
    nodes = list(graph)
    is_part = not nodes or any(node.op in (custom_ops.SEND, custom_ops.RECEIVE) for node in nodes)
    if is_part or (graph.traced is not None and not held and _leaves_memory(options, graph, device)):
        planned = graph.copy()
        planned.arrange_as_executed()
        return planned
    graph = graph.traced or graph
    if held:
        graph = graph.copy()
        graph.fetches += map(graph.tensor, held)
    if _is_off(options, graph):
        return graph
    try:
        return _optimized(graph, device, options)
    except (errors_impl.OpError, TfswapError) as error:
        log.warning("TensorFlow's own optimizers fail on this step; its unoptimised peak is an estimate: %s", error)
        return graph


@without_collector
def as_planned(
    graph: Graph,
    concrete: Any,
    device: DeviceModel,
    *,
    keeps: Callable[[str], bool] = lambda _: False,
    devices: Mapping[str, str] | None = None,
) -> Graph:
    """The graph to plan: `graph` after Grappler without its memory optimizer, or `graph` itself.

    Args:
        graph: as it was traced, with sizes bound to those of a call. Grappler does not see these sizes.
        concrete: the trace.
        keeps: whether the node of this name must stay in the graph.
        devices: by name, the nodes' devices that Grappler sees, of a step on several; others than those in `graph`.
    """
    from tensorflow.python.framework import errors_impl

    options = _options()
    if _is_off(options, graph) or not _matches_execution(graph, device) or sparse_shapes(concrete):
        return graph
    options.memory_optimization = options.NO_MEM_OPT
    shapes = {t.op.name: None if t.shape.rank is None else tuple(t.shape.as_list()) for t in concrete.inputs}
    kept = [node.name for node in graph if keeps(node.name)]
    kept += [tensor.rpartition(":")[0] for tensor in marked_to_keep(graph)]
    try:
        made = _optimized(graph, device, options, shapes, kept, devices)
    except (errors_impl.OpError, TfswapError) as error:
        log.warning("TensorFlow's own optimizers fail on this step, which is planned as it was traced: %s", error)
        return graph
    if _unsized(made) and not _unsized(graph):
        return graph
    several = len(units(graph)) > 1
    for node in made:
        if node.name in graph and (several or not graph[node.name].device):
            node.device = graph[node.name].device
        elif several:
            node.device = f"/device:{unit(node.device)}"
        elif node.device == _device_name(device):
            node.device = ""  # the trace names no device
    made.executed = tuple(node.name for node in made)
    _arrange_as_traced(made, graph)
    made.traced = graph
    return made


def _arrange_as_traced(made: Graph, traced: Graph) -> None:
    """Put nodes in the trace's order, which needs less memory than Grappler's; new ones after their inputs.

    Readers of one gradient keep Grappler's order, on which oneDNN's pass depends (passes/prepare/onednn_fusion.py).
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
    """A copy of the user's options for Grappler."""
    from tensorflow.python.eager import context

    options = context.context().config.graph_options.rewrite_options
    return type(options).FromString(options.SerializeToString())


def _is_off(options: rewriter_config_pb2.RewriterConfig, graph: Graph) -> bool:
    """Whether Grappler does not run: the user's options say so, or the graph is too large."""
    return options.disable_meta_optimizer or len(graph) > MOST_NODES


def _leaves_memory(options: rewriter_config_pb2.RewriterConfig, graph: Graph, device: DeviceModel) -> bool:
    """Whether Grappler's memory optimizer changes next to nothing (memory_optimizer.cc).

    By default it swaps on GPUs and by hand, and adds the sums of three or more terms at the step's peak one term after
    another: this lowers the predicted peak of a ResNet-50 by 1%, and is ignored.
    """
    if options.memory_optimization == options.NO_MEM_OPT:
        return True
    is_default = options.memory_optimization == options.DEFAULT_MEM_OPT
    return is_default and not device.is_gpu and not any(SWAPPED_BY_HAND in node.attrs for node in graph)


def _matches_execution(graph: Graph, device: DeviceModel) -> bool:
    """Whether Grappler's result here is what TensorFlow would run: nothing that is lowered first, and one device, or
    several with arenas of their own.
    """
    several = len(units(graph)) > 1
    if not _only_checks(graph) or (several and not device.is_gpu):
        return False
    if not several and any(is_collective(node.op) for node in graph):
        return False
    kinds = {feed.outputs[0].dtype for feed in graph.feeds if feed.outputs}
    return "variant" not in kinds and not any(feed.op in REFERENCE_VARIABLES for feed in graph.feeds)


def _only_checks(graph: Graph) -> bool:
    """Whether there is no loop, and results of conditionals are awaited and not read, as those of assertions."""
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
    devices: Mapping[str, str] | None = None,
) -> Graph:
    """`graph` after Grappler.

    Args:
        shapes: the arguments' shapes that Grappler sees, by name; by default those in `graph`.
        kept: names of nodes that must stay, besides feeds, fetches and targets.
        devices: by name, the units of the devices that nodes are on; by default those in `graph`.
    """
    room_bytes = arena.free_bytes(HOST) / ROUNDED_UP  # folding that exceeds this ends the process
    if any(too_large_to_fold(body, room_bytes) for body in graph.all_bodies()):
        options.constant_folding = options.OFF
    if not device.host_is_separate:
        room_bytes = min(room_bytes, folding_room(graph))
    unfolded = {node.name for node in too_large_to_fold(graph, room_bytes)}
    graph = graph.copy()
    add_by_kernels(graph)
    bodies = BodyFunctions()
    graph_def = export_graph_def(graph, bodies)
    # TensorFlow 1's reference variables stay nodes: ops that write them accept no argument in their place.
    given = [feed for feed in graph.feeds if feed.op not in REFERENCE_VARIABLES]
    feeds = {feed.name: number for number, feed in enumerate(given)}
    arguments = arguments_of(graph, given)
    _name_devices(graph_def, devices or {})
    fed = as_in_function(graph_def, feeds, arguments, shapes, unfolded, _device_name(device))
    results, renamed = names_in_function(graph, given)
    add_results(graph_def, results, graph.fetches, _device_name(device))
    targets = [target.name for target in graph.targets]
    process = ProcessNames(graph_def, renamed, bodies.made)
    process.replace(graph_def)
    kept = [process.replaced(name) for name in (*results, *targets, *kept)]
    gpus = sorted(each for each in units(graph) if each.startswith("GPU:"))
    made = _made_of(graph_def, kept, options, device, gpus)
    process.restore(made)
    fetched = {node.attr["index"].i: node.input[0] for node in made.node if node.op == "_Retval"}
    for node in made.node:
        if node.name in unfolded:
            del node.attr[PRESERVE]
        if shapes is not None:
            drop_controls(node, feeds)
        if not device.is_gpu:
            _as_onednn(node)
    padded = _declare_padded(made, graph)
    left = [fed.pop(node.name, node) for node in made.node if node.op != "_Retval"]
    del made.node[:]
    made.node.extend([*fed.values(), *left])  # arguments that nothing reads were pruned
    fetches = [fetched[number] for number in range(len(graph.fetches))]
    result = import_with_bodies(made, arguments, list(feeds), fetches, targets)
    if traced := _only_traced(result, graph):
        result = import_with_bodies(made, arguments, list(feeds), fetches, targets, traced)
    for node in result:
        if node.name in graph:  # a GraphDef does not have it
            node.measured = graph[node.name].measured
    for kernel, shaped in padded.items():
        if kernel in result:
            result[kernel].outputs = result[shaped].outputs
            result[shaped].attrs = {**result[shaped].attrs, "shape": any_size(result[kernel])}
    result.feeds += reference_variables(result)
    result.variables = graph.variables
    return result


def _name_devices(graph_def: graph_pb2.GraphDef, devices: Mapping[str, str]) -> None:
    """Give nodes the full names of their devices, in place."""
    for node in graph_def.node:
        if node.name in devices:
            node.device = _full_name(devices[node.name])
        elif node.device.startswith("/device:"):
            node.device = _full_name(unit(node.device))


def _as_onednn(node: node_def_pb2.NodeDef) -> None:
    """Replace a fused convolution of 16-bit floats, in place, by oneDNN's op. Grappler fuses it into an op without a
    kernel for them and relies on oneDNN's graph pass, which has not run yet.
    """
    if node.op == FUSED and node.attr["T"].type in map(enum_of, HALVES):
        node.op = ONEDNN_FUSED
        node.attr["_kernel"].s = KERNEL_LABEL


def _declare_padded(made: graph_pb2.GraphDef, traced: Graph) -> dict[str, str]:
    """Add a node with the right shape after each convolution that Grappler has fused with a Pad, in place.

    TensorFlow infers that shape as if there were no Pad. The node takes the convolution's name. Returns its name by the
    convolution's new name.
    """
    found: dict[str, str] = {}
    padded = [n for n in made.node if n.op == FUSED_3D and any(n.attr["padding_list"].list.i) and n.name in traced]
    if padded:
        import tfswap.ops  # noqa: F401 registers the op; few steps need it
    for node in padded:
        declared = made.node.add(name=node.name, op=custom_ops.DEFER, device=node.device)
        node.name = f"{node.name}/padded"
        declared.input.append(node.name)
        declared.attr["T"].CopyFrom(node.attr["T"])
        fill_shape(declared.attr["shape"].shape, traced[declared.name].outputs[0].shape)
        found[node.name] = declared.name
    return found


def _only_traced(made: Graph, traced: Graph) -> dict[str, TensorType]:
    """Types of tensors in `made` whose sizes are known from the trace only, by names as of `import_with_bodies`."""
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
    gpus: Sequence[str] = (),
) -> graph_pb2.GraphDef:
    """`graph_def` after Grappler, run now or in an earlier process.

    Args:
        gpus: the GPUs of a step on several.
    """
    from google.protobuf.message import DecodeError
    from tensorflow.python.grappler import cluster

    named = _named_device(device)
    others = [type(named)(properties=named.properties, name=_full_name(each)) for each in gpus]
    devices = [named, *(each for each in others if each.name != named.name)]

    def make() -> graph_pb2.GraphDef:
        return run_grappler(graph_def, kept, options, cluster.Cluster(devices=devices))

    def is_whole(text: bytes) -> bool:
        try:
            return len(type(graph_def).FromString(text).node) > 0
        except DecodeError:
            return False

    cache = PlanCache.of_environment()
    if cache is None:
        return make()
    given = [message.SerializeToString(deterministic=True) for message in (graph_def, options, *devices)]
    given.append(repr((kept, device, _processor())).encode())
    return type(graph_def).FromString(cache.made_of(given, lambda: make().SerializeToString(), is_whole))


@functools.cache
def _processor() -> str:
    """The processor's features, which decide whether some kernels are fused."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""


def _device_name(device: DeviceModel) -> str:
    return _full_name(f"{device.kind.upper()}:0")


def _full_name(device: str) -> str:
    return f"/job:localhost/replica:0/task:0/device:{device}"


def _named_device(device: DeviceModel) -> device_properties_pb2.NamedDevice:
    """`device` for Grappler. The frequency, which only its time estimates use, is arbitrary.

    Where it estimates that a step takes four fifths of the device's memory, it splits sums (memory_optimizer.cc,
    SchedulingPass).
    """
    from tensorflow.core.protobuf import device_properties_pb2

    memory_bytes = (arena.device_limit_bytes("GPU:0") or 0) if device.is_gpu else CPU_DEVICE_BYTES
    made = device_properties_pb2.DeviceProperties(
        type=device.kind.upper(), frequency=2000, num_cores=device.intra_op_threads, memory_size=memory_bytes
    )
    if device.is_gpu and device.capability is not None:
        # From 7.0 on, convolutions of 16-bit floats have their channels last (generic_layout_optimizer.cc).
        made.environment["architecture"] = ".".join(map(str, device.capability))
    return device_properties_pb2.NamedDevice(properties=made, name=_device_name(device))
