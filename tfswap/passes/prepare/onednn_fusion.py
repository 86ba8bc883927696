"""Fuses convolutions with their biases, and their gradients, where oneDNN's graph pass would.

oneDNN's graph pass joins nodes that wait for the same control inputs (mkl_layout_pass.cc, CheckForNodeMerge): a
convolution with the Pad that it alone reads, or else with the BiasAdd that alone reads it; and a BiasAddGrad with the
Conv2DBackpropFilter that reads the same gradient. The fused kernels save a pass over a feature map, and round or add in
another order. An order's control edges would prevent the fusion, so they are fused before: the bits stay those of the
step as TensorFlow runs it.

The BiasAddGrad becomes an identity of the fused kernel's second output, with its name and shape: TensorFlow's shape
inference would give that output the image's number of channels. The result of a convolution with a Pad gets an identity
as well (`hide_padded_shapes`), since its shape is inferred as if there were no Pad.

If an order by chance gives two nodes that were planned separately the same control inputs, `keep_unfused` puts a node
between them.

If several filters' kernels read one gradient, as those of convolutions whose results are added, oneDNN fuses the one
that Grappler has put first (compiler/grappler.py keeps these in its order).

Not handled: several BiasAddGrads of one gradient, which are not fused. Grappler merges them where it is on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

from tfswap.ir import custom_ops
from tfswap.ir.graph import Dims, Graph, Node, Output
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.device_carriers import unit
from tfswap.passes.prepare.defer_constants import add_defer

CONVOLUTION = "Conv2D"
ADDED = "BiasAdd"
BIASED = "_MklNativeConv2DWithBias"
PAD = "Pad"
PADDED = {CONVOLUTION: "_MklNativePadWithConv2D", "_FusedConv2D": "_MklNativePadWithFusedConv2D"}
"""By convolution, the op of it and a Pad."""
FUSED_3D = "_FusedConv3D"
FILTER = "Conv2DBackpropFilter"
BIAS = "BiasAddGrad"
JOINT = "_MklNativeConv2DBackpropFilterWithBias"
KERNEL_LABEL = b"MklNameChangeOp"
"""The label of oneDNN's kernels for plain layouts (mkl_graph_util.h, kMklNameChangeOpLabel)."""


@graph_pass(
    requires="no order yet: its control edges keep oneDNN's graph pass from fusing",
    ensures="nodes that oneDNN's graph pass would fuse are one kernel",
)
def fuse_onednn(graph: Graph, target: Target) -> int:
    """Fuse such pairs of `graph`, in place; returns how many."""
    if not target.onednn:
        return 0
    pairs = _Pairs(graph, target.device, graph.read_in_vain)
    joined = [pairs.join(node, _with_pad) for node in list(graph) if pairs.is_padded(node)]
    joined += [pairs.join(node, _with_bias) for node in list(graph) if pairs.is_biased(node)]
    return len(joined) + _join_gradients(graph, target.device)


@graph_pass(
    requires="an order",
    ensures="oneDNN's graph pass fuses no nodes that the graph has as two",
)
def keep_unfused(graph: Graph, target: Target) -> int:
    """Keep oneDNN's pass from fusing nodes that `graph`, which has its order, has as two. In place; returns how many
    pairs.
    """
    if not target.onednn:
        return 0
    pairs = _Pairs(graph, target.device)
    found = [node for node in graph if pairs.is_padded(node) or pairs.is_biased(node)]
    for node in found:
        graph.replace_input(node, 0, add_defer(graph, node.inputs[0], node.device))
    return len(found)


@graph_pass(
    ensures="readers of a convolution with a Pad in it see its rank, not the shape that TensorFlow infers wrongly",
)
def hide_padded_shapes(graph: Graph, _: Target) -> int:
    """Have readers of a convolution with a Pad read an identity of which only the rank is known. In place; returns how
    many such convolutions there are.
    """
    kernels = [node for node in graph if node.op in PADDED.values() or _is_padded_inside(node)]
    if not kernels:
        return 0
    readers = [node for node in graph if node.op != custom_ops.DEFER]
    apart: dict[Output, Output] = {}
    for kernel in kernels:
        made = apart[kernel.out()] = add_defer(graph, kernel.out(), kernel.device)
        made.node.attrs = {**made.node.attrs, "shape": any_size(kernel)}
    for node in readers:
        node.inputs = tuple(apart.get(tensor, tensor) for tensor in node.inputs)
    graph.fetches = [apart.get(tensor, tensor) for tensor in graph.fetches]
    return len(kernels)


def any_size(kernel: Node) -> Dims:
    """The shape of its result without sizes: planned sizes may be of one batch among many."""
    return Dims([None] * (5 if kernel.op == FUSED_3D else 4))


def _is_padded_inside(node: Node) -> bool:
    """Whether Grappler has fused a Pad into a convolution."""
    padding = node.attrs.get("padding_list")
    return node.op == FUSED_3D and isinstance(padding, tuple) and any(padding)


class _Pairs:
    """The pairs of a graph's nodes that oneDNN's pass would join.

    Args:
        in_vain: names of tensors with further readers that are no longer in the graph.
    """

    def __init__(self, graph: Graph, device: DeviceModel, in_vain: Collection[str] = ()):
        self._graph = graph
        self._device = device
        self._in_vain = in_vain
        self._readers: dict[Output, list[Node]] = defaultdict(list)
        self._waiting: dict[Node, list[Node]] = defaultdict(list)
        for node in graph:
            for tensor in node.inputs:
                self._readers[tensor].append(node)
            for source in node.controls:
                self._waiting[source].append(node)
        self._kept = {*(fetch.node for fetch in graph.fetches), *graph.targets}

    def is_padded(self, kernel: Node) -> bool:
        """Whether it is a convolution that a Pad goes into."""
        return (
            kernel.op in PADDED
            and kernel.inputs[0].node.op == PAD
            and kernel.attrs.get("padding") == b"VALID"
            and not kernel.attrs.get("num_host_args")
            and self._goes_into(kernel.inputs[0].node, kernel)
        )

    def is_biased(self, added: Node) -> bool:
        """Whether it is a BiasAdd that goes into a convolution."""
        if added.op != ADDED or added.inputs[0].node.op != CONVOLUTION:
            return False
        kernel = added.inputs[0].node
        return _layout(kernel) == _layout(added) and self._goes_into(kernel, added)

    def _goes_into(self, first: Node, second: Node) -> bool:
        """Whether they have the same control inputs and device, and nothing but the second reads the first."""
        return (
            _dtype(first) == _dtype(second) in self._device.onednn_dtypes
            and _wait_for_the_same(first, second)
            and self._readers[first.out()] == [second]
            and first not in self._kept
            and first.out().name not in self._in_vain
            and not (self._waiting[first] and self._graph.needed([second]).intersection(self._waiting[first]))
        )

    def join(self, second: Node, joined: Callable[[Node, Node], None]) -> Node:
        """Fuse the second node with its first input."""
        first = second.inputs[0].node
        joined(first, second)
        for node in self._waiting.pop(first, ()):
            node.controls = tuple(dict.fromkeys(second if source is first else source for source in node.controls))
            self._waiting[second].append(node)
        self._graph.permits.pop(first.out(), None)
        return second


def _with_pad(pad: Node, kernel: Node) -> None:
    left_out = ("explicit_paddings", "TArgs", "num_host_args", "filter_format")
    if kernel.op != CONVOLUTION:
        left_out += ("use_cudnn_on_gpu",)
    kernel.attrs = {key: value for key, value in kernel.attrs.items() if key not in left_out}
    kernel.attrs |= {"Tpaddings": pad.attrs["Tpaddings"], "_kernel": KERNEL_LABEL}
    kernel.op, kernel.inputs = PADDED[kernel.op], (pad.inputs[0], *kernel.inputs[1:], pad.inputs[1])


def _with_bias(kernel: Node, added: Node) -> None:
    added.op, added.inputs = BIASED, (*kernel.inputs, added.inputs[1])
    added.attrs = {**kernel.attrs, "_kernel": KERNEL_LABEL}


def _join_gradients(graph: Graph, device: DeviceModel) -> int:
    filters: dict[Output, list[Node]] = defaultdict(list)
    biases: dict[Output, list[Node]] = defaultdict(list)
    for node in graph:
        if node.op == FILTER:
            filters[node.inputs[2]].append(node)
        elif node.op == BIAS:
            biases[node.inputs[0]].append(node)
    pairs: list[tuple[Node, Node]] = []
    for gradient, found in biases.items():
        # If several convolutions are added, the first one's.
        joinable = (kernel for kernel in filters[gradient] if _are_joined(kernel, found[0], device))
        if len(found) == 1 and (kernel := next(joinable, None)) is not None:
            pairs.append((kernel, found[0]))
    for joint, bias in pairs:
        joint.op, joint.outputs = JOINT, (*joint.outputs, *bias.outputs)
        joint.attrs = {key: value for key, value in joint.attrs.items() if key != "explicit_paddings"}
        joint.attrs |= {"_kernel": KERNEL_LABEL}
        bias.op, bias.inputs, bias.controls = custom_ops.DEFER, (joint.out(1),), ()
        bias.attrs = {"T": bias.attrs["T"], "shape": Dims(bias.outputs[0].shape or (None,))}
    return len(pairs)


def _are_joined(kernel: Node, bias: Node, device: DeviceModel) -> bool:
    return (
        _dtype(bias) in device.onednn_dtypes
        and kernel.attrs.get("padding") != b"EXPLICIT"
        and _layout(kernel) == _layout(bias)
        and _wait_for_the_same(kernel, bias)
    )


def _wait_for_the_same(one: Node, other: Node) -> bool:
    """Whether two nodes are on one device and have the same control inputs."""
    return unit(one.device) == unit(other.device) and set(one.controls) == set(other.controls)


def _layout(node: Node) -> object:
    return node.attrs.get("data_format", b"NHWC")


def _dtype(node: Node) -> str:
    return node.outputs[0].dtype
