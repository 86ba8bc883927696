"""Collectives: their order, which of them match, also inside of conditionals, and what the ring takes of a device."""

from __future__ import annotations

import pytest

from tfswap.analysis.collectives import has_collectives, matching, spans_workers, traced_order
from tfswap.compiler.preconditions import UnknownSizes, require_sizes
from tfswap.errors import UnsupportedGraph
from tfswap.importers.size_bounds import Known, shape_values
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.kernel_memory import kernel_memory
from tfswap.kernels.target import Target
from tfswap.passes.device_parts import cut
from tfswap.passes.prepare.collective_order import join_collectives

DEVICES = ("GPU:0", "GPU:1")
BODY = """
  %x = Placeholder() -> float32[{rows},8]
  %key = Placeholder() -> int32[]
  %size = Const() -> int32[] = (2,)
  %group = Const() -> int32[] = (7,)
  %found = CollectiveGatherV2(%x, %size, %group, %key) @"/device:GPU:{device}" -> float32[{rows},8]
  feeds %x, %key
  fetches %found
"""
REPLICA = """
%x{device} = Placeholder() @"/device:GPU:{device}" -> float32[{rows},8]
%first{device} = Placeholder() -> int32[]
%second{device} = Placeholder() -> int32[]
%shape{device} = Shape(%x{device}) @"/device:GPU:{device}" -> int32[2]
%gather{device} = CollectiveGatherV2(%shape{device}, %size, %group, %first{device}) @"/device:GPU:{device}" -> int32[4]
%p{device} = Placeholder() -> bool[]
%rows{device} = If(%p{device}, %x{device}, %second{device}) @"/device:GPU:{device}" -> float32[{rows},8]
"""
FEEDS = [f"%{name}{device}" for name in ("x", "p", "first", "second") for device in (0, 1)]


def replicas() -> Graph:
    """Two replicas that gather their shapes, and rows in a conditional on each."""
    first, second = (REPLICA.format(device=device, rows=rows) for device, rows in enumerate((3, 5)))
    bodies = [f"body %rows{device}{BODY.format(device=device, rows=3 + 2 * device)}" * 2 for device in (0, 1)]
    shared = "\n%size = Const() -> int32[] = (2,)\n%group = Const() -> int32[] = (7,)\n"
    ends = f"feeds {', '.join(FEEDS)}\nfetches %gather0, %gather1, %rows0, %rows1\n"
    return parse_graph(f"{shared}{first}{second}{ends}{''.join(bodies)}")


def test_conditionals_with_collectives_have_their_place_in_the_order():
    graph = replicas()
    assert has_collectives(graph, graph["rows0"]) and not has_collectives(graph, graph["shape0"])
    assert [node.name for node in traced_order(graph)] == ["gather0", "gather1", "rows0", "rows1"]
    assert [[node.name for node in members] for members in matching(graph)] == [
        ["gather0", "gather1"],
        ["rows0", "rows1"],
    ]


def test_a_tensor_of_unknown_size_that_another_device_sends_is_refused_with_a_remedy():
    graph = parse_graph("""
        %saved = Tfswap>Receive() @"/device:GPU:0" -> float32[?]
        %read = Relu(%saved) @"/device:GPU:0" -> float32[?]
        fetches %read
    """)
    with pytest.raises(UnknownSizes, match="'saved:0' .*within its tf.device.*use_cudnn=False"):
        require_sizes(graph, lambda _: None)


def test_a_device_is_one_under_its_short_and_its_full_name():
    graph = parse_graph("""
        %x = Placeholder() @"/device:GPU:0" -> int32[2]
        %key = Placeholder() -> int32[]
        %size = Const() -> int32[] = (2,)
        %group = Const() -> int32[] = (7,)
        %first = CollectiveGatherV2(%x, %size, %group, %key) @"/device:GPU:0" -> int32[4]
        %second = CollectiveGatherV2(%x, %size, %group, %key) @"/job:localhost/task:0/device:GPU:0" -> int32[4]
        feeds %x, %key
        fetches %first, %second
    """)
    assert matching(graph) == []
    assert spans_workers([graph])


def test_each_device_runs_conditionals_with_collectives_in_one_order():
    parts = cut(replicas(), DEVICES, DeviceModel("gpu")).graphs
    for part in parts.values():
        gathered, chosen = (next(node for node in part if node.op == op) for op in ("CollectiveGatherV2", "If"))
        assert gathered in part.needed([chosen])


def test_conditionals_with_collectives_on_devices_of_one_arena_are_refused():
    with pytest.raises(UnsupportedGraph, match="'rows0' .*convert_to_tensor"):
        join_collectives(replicas(), Target(DeviceModel()))


def test_replicas_know_the_shapes_that_they_send_each_other():
    graph, shapes = replicas(), {"shape0:0": (3, 8), "shape1:0": (5, 8)}
    assert [*shape_values(graph, graph["gather1"], shapes.get)] == [Known(0, (3, 8, 5, 8), (4,))]
    del shapes["shape0:0"]
    assert [*shape_values(graph, graph["gather1"], shapes.get)] == []


def test_sizes_that_other_workers_send_are_refused_with_a_remedy():
    graph = parse_graph("""
        %x = Placeholder() -> float32[4,8]
        %key = Placeholder() -> int32[]
        %size = Const() -> int32[] = (2,)
        %group = Const() -> int32[] = (7,)
        %shape = Shape(%x) -> int32[2]
        %shapes = CollectiveGatherV2(%shape, %size, %group, %key) -> int32[4]
        %padded = Pad(%x, %shapes) -> float32[?,8]
        feeds %x, %key
        fetches %padded
    """)
    with pytest.raises(UnknownSizes, match="'padded:0' .*of all workers.*convert_to_tensor"):
        require_sizes(graph, lambda _: None)


@pytest.mark.parametrize(
    ("members", "hint", "temporaries"), [(2, b"ring", [512]), (4, b"auto", [256] * 3), (2, b"nccl", [])]
)
def test_a_ring_takes_a_chunk_for_each_neighbour_on_a_device_of_its_own(
    members: int, hint: bytes, temporaries: list[int]
):
    kind, number = TensorType("float32", (256,)), TensorType("int32", ())
    given, attrs = [kind, number, number, number], {"communication_hint": hint, "T": "float32"}
    memory = kernel_memory("CollectiveReduceV2", attrs, given, [kind], DeviceModel("gpu"), {1: (members,)})
    assert [size for event, size in memory.events if event == "temp"] == temporaries
