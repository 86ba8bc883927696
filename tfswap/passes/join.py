"""A convolution and its bias are one kernel where oneDNN would have it so, and their gradients are.

oneDNN's graph pass joins nodes that wait for the same control inputs (mkl_layout_pass.cc, CheckForNodeMerge): a BiasAdd
with the Conv2D that alone it reads, and a BiasAddGrad with the Conv2DBackpropFilter that reads the same gradient. The
joint kernels save a pass over a feature map, and round or add in another order. An order's control edges would keep the
two apart, so they are joined before there are any: the bits stay those of the step as TensorFlow runs it.

What was the BiasAddGrad passes the joint kernel's second output on, under its own name and with its shape: TensorFlow's
shape inference takes that output for as long as the image has channels.

Where an order happens to give two nodes the same control inputs, that were planned as two, `keep_apart` puts a node
between them. A Pad is such a one too, which oneDNN makes a part of the convolution behind it.

Not handled: a gradient that several filters' kernels read, of which oneDNN joins the one that it comes upon first.
"""

from __future__ import annotations

from collections import defaultdict

from tfswap.analysis.device import DeviceModel
from tfswap.ir.graph import Dims, Graph, Node, Output
from tfswap.oplib import names
from tfswap.passes.defer import add_defer
from tfswap.passes.devices import unit

CONVOLUTION, ADDED, BIASED = "Conv2D", "BiasAdd", "_MklNativeConv2DWithBias"
FILTER, BIAS, JOINT = "Conv2DBackpropFilter", "BiasAddGrad", "_MklNativeConv2DBackpropFilterWithBias"
PAD, PADDED = "Pad", ("Conv2D", "_FusedConv2D")
JOINED_DTYPES = frozenset({"float32", "bfloat16"})
KERNEL_LABEL = b"MklNameChangeOp"
"""Which of an op's kernels is meant: oneDNN's for plain layouts (mkl_graph_util.h, kMklNameChangeOpLabel)."""


def apply_join(graph: Graph, device: DeviceModel) -> int:
    """Join such pairs of `graph`, in place; returns how many."""
    return _join_convolutions(graph) + _join_gradients(graph) if device.onednn else 0


def keep_apart(graph: Graph, device: DeviceModel) -> int:
    """Keep oneDNN's pass from joining what `graph`, which has its order, has as two; in place. Returns how many nodes
    that took.
    """
    if not device.onednn:
        return 0
    found = 0
    for node in list(graph):
        before = CONVOLUTION if node.op == ADDED else PAD if node.op in PADDED else None
        for position, read in enumerate(node.inputs if before else ()):
            if read.node.op == before and set(read.node.controls) == set(node.controls):
                graph.replace_input(node, position, add_defer(graph, read, node.device))
                found += 1
    return found


def _join_convolutions(graph: Graph) -> int:
    readers: dict[Node, list[Node]] = defaultdict(list)  # what reads it or waits for it
    for node in graph:
        for source in (*(read.node for read in node.inputs), *node.controls):
            readers[source].append(node)
    kept = {*(fetch.node for fetch in graph.fetches), *graph.targets}

    def goes_into(first: Node, second: Node) -> bool:
        """Whether nothing else needs the first of two, which the second reads."""
        alone = readers[first] == [second] and first not in kept
        return alone and _wait_for_the_same(first, second) and _dtype(first) == _dtype(second) in JOINED_DTYPES

    found = 0
    for added in list(graph):
        if added.op != ADDED or added.inputs[0].node.op != CONVOLUTION:
            continue
        kernel = added.inputs[0].node
        pad = kernel.inputs[0].node
        padded = pad.op == PAD and kernel.attrs.get("padding") == b"VALID" and goes_into(pad, kernel)
        if padded or not goes_into(kernel, added) or _layout(kernel) != _layout(added):
            continue
        added.op, added.inputs = BIASED, (*kernel.inputs, added.inputs[1])
        added.attrs = {**kernel.attrs, "_kernel": KERNEL_LABEL}
        graph.permits.pop(kernel.out(), None)
        found += 1
    return found


def _join_gradients(graph: Graph) -> int:
    filters: dict[Output, list[Node]] = defaultdict(list)
    biases: dict[Output, list[Node]] = defaultdict(list)
    for node in graph:
        if node.op == FILTER:
            filters[node.inputs[2]].append(node)
        elif node.op == BIAS:
            biases[node.inputs[0]].append(node)
    pairs = [
        (filters[gradient][0], found[0])
        for gradient, found in biases.items()
        if len(found) == 1 and len(filters[gradient]) == 1 and _are_joined(filters[gradient][0], found[0])
    ]
    for joint, bias in pairs:
        joint.op, joint.outputs = JOINT, (*joint.outputs, *bias.outputs)
        joint.attrs = {key: value for key, value in joint.attrs.items() if key != "explicit_paddings"}
        joint.attrs |= {"_kernel": KERNEL_LABEL}
        bias.op, bias.inputs, bias.controls = names.DEFER, (joint.out(1),), ()
        bias.attrs = {"T": bias.attrs["T"], "shape": Dims(bias.outputs[0].shape or (None,))}
    return len(pairs)


def _are_joined(kernel: Node, bias: Node) -> bool:
    return (
        _dtype(bias) in JOINED_DTYPES
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
