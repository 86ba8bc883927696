"""Sizes of cuDNN's recurrent kernels, which TensorFlow does not know before they run.

`CudnnRNNV3`, which Keras' LSTM and GRU use on a GPU, saves data for its gradient in a tensor of unknown shape, whose
size cuDNN decides. cuDNN reports this size, and that of the workspace (device/cudnn_rnn.py). Without cuDNN, the size is
the one that was measured with version 9.
"""

from __future__ import annotations

from typing import cast

from tfswap.device import cudnn_rnn
from tfswap.device.cudnn_rnn import DTYPES, MODES, RecurrentNet, Spaces
from tfswap.ir.graph import Graph, Measured, Node
from tfswap.ir.types import ELEMENT_BYTES, TensorType
from tfswap.kernels.device import DeviceModel

FORWARD = frozenset({"CudnnRNNV2", "CudnnRNNV3"})
BACKWARD = frozenset({"CudnnRNNBackpropV2", "CudnnRNNBackpropV3"})
RESERVE, HOST_RESERVE = 3, 4
"""Outputs of the forward kernels."""
KEPT = {"lstm": 5, "gru": 6, "rnn_relu": 2, "rnn_tanh": 2}
"""The elements that cuDNN 9 saves for each unit and time step of a layer. Between two layers there is one more."""
KEPT_BESIDES_BYTES = 256


def settle_recurrent(graph: Graph, device: DeviceModel) -> None:
    """Give the outputs of recurrent kernels their shapes, and record each one's workspace, in place.

    Kernels whose inputs have unknown sizes stay as they are.
    """
    if not device.uses_cudnn:
        return
    for part in (graph, *graph.all_bodies()):
        for node in part:
            if node.op in FORWARD or node.op in BACKWARD:
                _settle(node)


def _settle(node: Node) -> None:
    net = recurrent_net(node)
    if net is None:
        return
    known = cudnn_rnn.spaces(net) or Spaces(0, kept_bytes(net))
    node.measured = Measured(temporary_bytes=known.workspace_bytes)
    if node.op in FORWARD:
        kept = (known.reserve_bytes // ELEMENT_BYTES[net.dtype],) if net.training else ()
        outputs = list(node.outputs)
        outputs[RESERVE] = TensorType(net.dtype, kept)
        outputs[HOST_RESERVE] = TensorType(outputs[HOST_RESERVE].dtype, ())
        node.outputs = tuple(outputs)


def recurrent_net(node: Node) -> RecurrentNet | None:
    """The net that a recurrent kernel computes; None where sizes are unknown, and for LSTMs with projections."""
    sequence, state = (node.inputs[n].type for n in range(2))
    mode = cast("bytes", node.attrs.get("rnn_mode", b"lstm")).decode()
    if None in (sequence.num_elements, state.num_elements) or node.attrs.get("num_proj"):
        return None
    if mode not in MODES or sequence.dtype not in DTYPES:
        return None
    first, second, inputs = cast("tuple[int, int, int]", sequence.shape)
    layers, also_batch, units = cast("tuple[int, int, int]", state.shape)
    batch_first = node.attrs.get("time_major", True) is False
    if batch_first:
        layers = also_batch
    bidirectional = node.attrs.get("direction") == b"bidirectional"
    return RecurrentNet(
        mode,
        sequence.dtype,
        steps=second if batch_first else first,
        batch=first if batch_first else second,
        inputs=inputs,
        units=units,
        layers=layers // 2 if bidirectional else layers,
        bidirectional=bidirectional,
        skips_input=node.attrs.get("input_mode") == b"skip_input",
        training=node.op in BACKWARD or node.attrs.get("is_training", True) is True,
        dropout=float(cast("float", node.attrs.get("dropout", 0.0))),
    )


def kept_bytes(net: RecurrentNet) -> int:
    """The bytes that the forward kernel saves for the gradient, as measured with cuDNN 9.19 on an H200."""
    if not net.training:
        return 0
    directions = 2 if net.bidirectional else 1
    units = net.steps * net.batch * net.units * directions
    each = KEPT[net.mode] * net.layers + net.layers - 1
    return units * each * ELEMENT_BYTES[net.dtype] + KEPT_BESIDES_BYTES
