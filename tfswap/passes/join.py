"""The gradients of a convolution's filter and of its bias are made by one kernel where oneDNN would make them so.

oneDNN's graph pass joins BiasAddGrad with the Conv2DBackpropFilter that reads the same gradient, if both wait for the
same control inputs (mkl_layout_pass.cc, GetConv2DBackpropFilterOrBiasAddGrad and CheckForNodeMerge). The joint kernel
adds in another order than BiasAddGrad does, and reads the gradient once. An order's control edges would keep the two
apart, so they are joined before there are any: the bits stay those of the step as TensorFlow runs it.

What was the BiasAddGrad passes the joint kernel's second output on, under its own name and with its shape: TensorFlow's
shape inference takes that output for as long as the image has channels.

Not handled: a gradient that several filters' kernels read, of which oneDNN joins the one that it comes upon first.
"""

from __future__ import annotations

from collections import defaultdict

from tfswap.analysis.device import DeviceModel
from tfswap.ir.graph import Dims, Graph, Node, Output
from tfswap.oplib import names

FILTER, BIAS = "Conv2DBackpropFilter", "BiasAddGrad"
JOINT = "_MklNativeConv2DBackpropFilterWithBias"
JOINED_DTYPES = frozenset({"float32", "bfloat16"})
KERNEL_LABEL = b"MklNameChangeOp"
"""Which of an op's kernels is meant: oneDNN's for plain layouts (mkl_graph_util.h, kMklNameChangeOpLabel)."""


def apply_join(graph: Graph, device: DeviceModel) -> int:
    """Join such pairs of `graph`, in place; returns how many."""
    if not device.onednn:
        return 0
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
        bias.outputs[0].dtype in JOINED_DTYPES
        and kernel.attrs.get("padding") != b"EXPLICIT"
        and kernel.attrs.get("data_format", b"NHWC") == bias.attrs.get("data_format", b"NHWC")
        and kernel.device == bias.device
        and set(kernel.controls) == set(bias.controls)
    )
