"""cuDNN's recurrent kernels: sizes that TensorFlow does not infer, against those of an H200 with cuDNN 9.19."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tfswap.compiler.preconditions import sizeless
from tfswap.compiler.recurrent_sizes import kept_bytes, recurrent_net, settle_recurrent
from tfswap.device import cudnn_rnn
from tfswap.device.cudnn_rnn import RecurrentNet, Spaces, query
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.kernel_memory import node_memory

GPU = DeviceModel("gpu", name="NVIDIA H200")
MEASURED = [
    (RecurrentNet("lstm", "float32", 100, 256, 1024, 1024, 1), 524288256),
    (RecurrentNet("lstm", "float32", 35, 16, 128, 128, 1), 1433856),
    (RecurrentNet("gru", "float32", 50, 32, 64, 96, 1), 3686656),
    (RecurrentNet("lstm", "float32", 20, 8, 33, 40, 2), 281856),
    (RecurrentNet("lstm", "float32", 200, 64, 512, 512, 1), 131072256),
]
WORKSPACE_BYTES = 682625280
"""Of the first, measured."""

# Keras' LSTM, whose batch comes first.
STEP = """
%x = Placeholder() -> float32[256,100,1024]
%h = Placeholder() -> float32[256,1,1024]
%p = Placeholder() -> float32[8396800]
%n = Placeholder() -> int32[256]
%f = CudnnRNNV3(%x, %h, %h, %p, %n) {rnn_mode=b'lstm', time_major=false, is_training=true}
  -> float32[256,100,1024], float32[256,1,1024], float32[256,1,1024], float32[*], int8[*]
""".replace("\n  ->", " ->")


class Called(NamedTuple):
    name: str
    arguments: tuple[Any, ...]


class Library:
    """Stands in for libcudnn."""

    def __init__(self, failing: str = ""):
        self.calls: list[Called] = []
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            self.calls.append(Called(name, arguments))
            if name == "cudnnGetRNNTempSpaceSizes":
                arguments[4]._obj.value, arguments[5]._obj.value = 1000, 24
            return 1 if name == self.failing else 0

        return function


@pytest.mark.parametrize(("net", "reserve_bytes"), MEASURED)
def test_what_is_kept_without_cudnn_is_what_was_measured(net, reserve_bytes):
    assert kept_bytes(net) == reserve_bytes


def test_inference_keeps_nothing():
    assert kept_bytes(MEASURED[0][0]._replace(training=False)) == 0


def test_cudnn_is_asked_and_everything_destroyed():
    library: Any = Library()
    assert query(library, MEASURED[0][0]) == Spaces(1000, 24)
    described = next(call.arguments for call in library.calls if call.name == "cudnnSetRNNDescriptor_v8")
    assert described[1:12] == (0, 2, 2, 0, 0, 0, 0, 0, 1024, 1024, 1024)
    names = [call.name for call in library.calls]
    assert sorted(n.replace("Create", "Destroy") for n in names if "Create" in n) == sorted(
        n for n in names if "Destroy" in n
    )


def test_a_cudnn_that_fails_is_no_answer():
    library: Any = Library("cudnnSetRNNDescriptor_v8")
    assert query(library, MEASURED[0][0]) is None
    assert library.calls[-1].name == "cudnnDestroy"


def test_a_step_with_kerass_lstm_has_sizes(monkeypatch):
    monkeypatch.setattr(cudnn_rnn, "spaces", lambda net: Spaces(WORKSPACE_BYTES, MEASURED[0][1]))
    graph = parse_graph(STEP)
    settle_recurrent(graph, GPU)
    node = graph["f"]
    assert recurrent_net(node) == MEASURED[0][0]
    assert [kind.nbytes for kind in node.outputs[3:]] == [524288256, 1]
    memory = node_memory(node, GPU)
    # As TensorFlow's allocator recorded it: three outputs, the lengths, the workspace, and what is kept.
    outs = [("out", n) for n in range(5)]
    assert list(memory.events) == [*outs[:3], ("temp", 1024), ("temp", WORKSPACE_BYTES), *outs[3:]]
    assert node.measured.temporary_bytes == WORKSPACE_BYTES


def test_such_a_step_can_be_planned_on_a_gpu_and_is_left_alone_on_a_cpu():
    graph = parse_graph(STEP)
    settle_recurrent(graph, DeviceModel())
    assert [tensor.index for tensor in sizeless(graph)] == [3, 4]
    settle_recurrent(graph, GPU)
    assert not sizeless(graph)
    assert graph["f"].outputs[3].nbytes == 524288256


def test_unknown_inputs_stay_unknown():
    graph = parse_graph(STEP.replace("float32[256,100,1024]", "float32[?,100,1024]"))
    settle_recurrent(graph, GPU)
    assert graph["f"].outputs[3].nbytes is None
