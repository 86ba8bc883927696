"""Groups of a body's kernels: which kernels, their chunks, and the node that runs them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import TWO_THREADS, on_arena
from test_body_pairs import LOOP, TWO_CORES, attention, body_of, lstm, measured_in_steps

from tfswap.analysis.cost import Costs
from tfswap.analysis.function_runs import group_chunks
from tfswap.analysis.groups import with_views
from tfswap.compiler.body_orders import choose_body_orders
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node
from tfswap.ir.text import parse_graph
from tfswap.kernels.target import Target
from tfswap.passes.tactics.pair_kernels import join_groups
from tfswap.passes.verify import verify

KIB64 = "float32[128,128]"


def grouped(text: str) -> Graph:
    graph = parse_graph(text)
    choose_body_orders(graph, Target(TWO_CORES), grouped=True)
    return graph


def named_groups(body: Graph) -> list[list[str]]:
    return [[node.name for node in group] for group in body.groups()]


def test_all_that_need_not_wait_for_what_is_no_kernel_is_one_group() -> None:
    body = body_of(grouped(LOOP))
    assert [sorted(group) for group in named_groups(body)] == [["a", "b", "next", "sum"]]
    alone = choose_body_orders(parse_graph(LOOP), Target(TWO_CORES._replace(inter_op_threads=1)), grouped=True)
    assert alone
    assert not body_of(grouped(LOOP.replace("BatchMatMulV2(%w, %h)", "Exp(%a)").replace("%h, %w)", "%h, %h)"))).paired


LISTS = """\
%i = Placeholder() {dtype=int32} -> int32[]
%h = Placeholder() {dtype=float32} -> float32[4,256,256]
%l = EmptyTensorList(%i, %i) -> variant[]
%loop = While(%i, %h, %l) -> int32[], float32[4,256,256], variant[]
feeds %i, %h
fetches %loop:1
body %loop
  %i = Placeholder() -> int32[]
  %h = Placeholder() -> float32[4,256,256]
  %l = Placeholder() -> variant[]
  %five = Const() -> int32[] = (5,)
  %less = Less(%i, %five) -> bool[]
  feeds %i, %h, %l
  fetches %less
body %loop
  %i = Placeholder() -> int32[]
  %h = Placeholder() -> float32[4,256,256]
  %l = Placeholder() -> variant[]
  %one = Const() -> int32[] = (1,)
  %next = AddV2(%i, %one) -> int32[]
  %a = Exp(%h) -> float32[4,256,256]
  %pushed = TensorListPushBack(%l, %a) -> variant[]
  %b = Sin(%h) -> float32[4,256,256]
  %again = TensorListPushBack(%pushed, %b) -> variant[]
  %sum = AddV2(%a, %b) -> float32[4,256,256]
  feeds %i, %h, %l
  fetches %next, %sum, %again
"""


def test_pushes_wait_for_the_group() -> None:
    body = body_of(grouped(LISTS))
    (group,) = named_groups(body)
    assert {"a", "b", "sum"} <= set(group)
    order = [node.name for node in body.topological()]
    assert order.index("pushed") > max(map(order.index, group))


def test_a_group_takes_as_long_as_what_waits_for_one_another() -> None:
    graph, costs = grouped(LOOP), Costs.of(TWO_CORES)
    body = body_of(graph)
    (group,) = body.groups()
    waits_s = costs.seconds(body["a"]) + costs.seconds(body["sum"])
    assert waits_s <= costs.group_seconds(group) < sum(map(costs.seconds, group))


def body_with(lines: str, fetches: str) -> Graph:
    """A body of kernels of 64 KiB each."""
    return parse_graph(f"%x = Placeholder() {{dtype=float32}} -> {KIB64}\n{lines}feeds %x\nfetches {fetches}\n")


def chunks(lines: str, fetches: str) -> tuple[int, dict[str, list[tuple[int, int | None]]]]:
    """How many chunks there are, and which serve whom, and which inputs are written over."""
    body = body_with(lines, fetches)
    group = [node for node in body.topological() if node not in body.feeds]
    found = group_chunks(body, group, TWO_CORES)
    return len(found.sizes), {node.name: [(s.chunk, s.over) for s in served] for node, served in found.served.items()}


def test_a_kernel_writes_over_what_nothing_else_reads() -> None:
    lines = f"%a = Exp(%x) -> {KIB64}\n%b = Neg(%a) -> {KIB64}\n%c = Neg(%b) -> {KIB64}\n"
    assert chunks(lines, "%c") == (1, {"a": [(0, None)], "b": [(0, 0)], "c": [(0, 0)]})
    assert chunks(lines, "%b, %c") == (2, {"a": [(0, None)], "b": [(0, 0)], "c": [(1, None)]})
    assert chunks(f"%a = Neg(%x) -> {KIB64}\n", "%a") == (1, {"a": [(0, None)]})


def test_a_chunk_serves_again_what_starts_when_all_that_use_it_have_ended() -> None:
    products = "MatMul(%{0}, %{0}) {{transpose_a=false, transpose_b=false}} -> " + KIB64
    lines = "".join(f"%{b} = {products.format(a)}\n" for a, b in itertools.pairwise("xabcd"))
    assert chunks(lines, "%d")[0] == 2
    # `e` may still read `a` while `c` runs.
    assert chunks(f"{lines}%e = {products.format('a')}\n", "%d, %e")[0] == 4


@st.composite
def random_bodies(draw: st.DrawFn) -> Graph:
    ops = ("Neg({0})", "AddV2({0}, {1})", "MatMul({0}, {1}) {{transpose_a=false, transpose_b=false}}", "Identity({0})")
    count = draw(st.integers(2, 14))
    made = ["%x"]
    lines = ""
    for n in range(count):
        reads = [draw(st.sampled_from(made[-5:])) for _ in range(2)]
        lines += f"%k{n} = {draw(st.sampled_from(ops)).format(*reads)} -> {KIB64}\n"
        made.append(f"%k{n}")
    kept = draw(st.lists(st.sampled_from(made[1:]), min_size=1, max_size=3, unique=True))
    return body_with(lines, ", ".join(kept))


@given(random_bodies(), st.randoms(use_true_random=False))
def test_in_any_order_no_kernel_writes_into_what_is_still_needed(body: Graph, chance: Any) -> None:
    group = [node for node in body.topological() if node not in body.feeds]
    served = group_chunks(body, group, TWO_CORES).served
    left: dict[Node, int] = {node: len({t.node for t in node.inputs if t.node in served}) for node in group}
    content: dict[int, Node] = {}  # by chunk, whose result lies there
    place: dict[Node, int] = {}
    ready = [node for node in group if not left[node]]
    running: list[Node] = []
    ended: set[Node] = set()

    def source(node: Node) -> Node:
        return source(node.inputs[0].node) if node.op == "Identity" and node.inputs[0].node in served else node

    def is_whole(node: Node) -> bool:
        made = source(node)
        return made not in place or content[place[made]] is made

    while ready or running:
        if ready and (not running or chance.random() < 0.5):
            node = ready.pop(chance.randrange(len(ready)))
            assert all(is_whole(t.node) for t in node.inputs if t.node in served)
            for chunk, over, _ in served[node]:
                before = content.get(chunk)
                users = [n for n in group if before is not None and any(source(t.node) is before for t in n.inputs)]
                assert all(user in ended or (user is node and over is not None) for user in users)
                content[chunk] = node
                place[node] = chunk
            running.append(node)
        else:
            node = running.pop(chance.randrange(len(running)))
            ended.add(node)
            for reader in group:
                if any(t.node is node for t in reader.inputs):
                    left[reader] -= 1
                    if not left[reader]:
                        ready.append(reader)
    assert all(is_whole(t.node) for t in body.fetches if t.node in served)


def test_views_between_kernels_are_of_the_node() -> None:
    viewed = LOOP.replace("AddV2(%a, %b)", "AddV2(%v, %b)").replace(
        "  %sum", "  %v = Identity(%a) -> float32[4,256,256]\n  %sum"
    )
    graph = grouped(viewed)
    body = body_of(graph)
    (group,) = body.groups()
    assert {node.name for node in with_views(group, body.topological())} == {"a", "b", "next", "sum", "v"}
    join_groups(graph, Target(TWO_CORES))
    verify(graph)
    (node,) = (node for node in body if node.op == custom_ops.GROUP)
    kept = {k.name: kept for k, kept in zip(node.attrs["kernels"], node.attrs["kept"], strict=True)}
    assert kept == {"a": 0, "b": 0, "next": 1, "sum": 1, "v": 0}


@pytest.mark.parametrize(("net", "rows"), [(lstm, 64), (attention, 16)])
def test_a_step_with_groups_peaks_as_planned_and_has_its_values(net: Callable[[], Any], rows: int) -> None:
    found = on_arena(lambda: measured_in_steps(net, "105%", rows), 600, **TWO_THREADS)
    assert found["grouped"]
    assert found["same"]
    assert set(found["measured"]) == {found["planned"]}


def kernel(name, op, *inputs, **types):
    from tensorflow.core.framework import node_def_pb2

    node = node_def_pb2.NodeDef(name=name, op=op, input=inputs)
    for key, kind in types.items():
        node.attr[key].type = kind.as_datatype_enum
    return node.SerializeToString()


def run_group(kernels, sources, overwrites, chunks, requests, kept, *given, waits=()):
    """The values of a group's node with these attributes, or the message with which it fails."""
    import tensorflow as tf
    from tensorflow.core.framework import graph_pb2

    graph = graph_pb2.GraphDef()
    for i, value in enumerate(given):
        node = graph.node.add(name=f"x{i}", op="Placeholder")
        node.attr["dtype"].type = tf.as_dtype(value.dtype).as_datatype_enum
    node = graph.node.add(name="group", op="Tfswap>Group", input=[f"x{i}" for i in range(len(given))])
    node.attr["Tin"].list.type.extend(tf.as_dtype(v.dtype).as_datatype_enum for v in given)
    node.attr["Tout"].list.type.extend([tf.float32.as_datatype_enum] * len(kept))
    node.attr["kernels"].list.s.extend(kernels)
    lists = {
        "sources": sources,
        "overwrites": overwrites,
        "chunks": chunks,
        "requests": requests,
        "kept": kept,
        "ranks": range(len(kernels)),
        "waits": waits,
    }
    for key, values in lists.items():
        node.attr[key].list.i.extend(values)
    with tf.Graph().as_default():
        tf.import_graph_def(graph, name="")
        with tf.compat.v1.Session() as session:
            feeds = {f"x{i}:0": value for i, value in enumerate(given)}
            try:
                return [v.tolist() for v in session.run([f"group:{i}" for i in range(len(kept))], feeds)]
            except (tf.errors.OpError, ValueError) as error:
                return error.message


def direct():
    import numpy as np
    import tensorflow as tf

    run = run_group
    x = np.arange(4, dtype=np.float32)
    neg, square = (kernel(name, op, "x", T=tf.float32) for name, op in (("n", "Neg"), ("s", "Square")))
    shape = kernel("r", "Reshape", "x", "y", T=tf.float32, Tshape=tf.int32)
    fit = [neg, square], [0, -1], [0, 1], [256], [1, 0, 0, 0], [0, 1]
    return {
        "values": run(*fit, x),
        "failed": run([neg, shape], [0, -1, 1], [0, 0, 0], [256], [1, 0, 0, 0], [1, 1], x, np.int32([3])),
        "damaged": [
            run([neg, square], [0, -3], [0, 1], [256], [1, 0, 0, 0], [0, 1], x),
            run([neg, square], [0, -1], [0, 1], [256], [1, 7, 0, 0], [0, 1], x),
            run([neg, square], [0, -1], [0, 1], [256], [1, 0, 256, 0], [0, 1], x),
            run([neg, square], [0, -1], [0, 1], [256], [1, 0, 32, 0], [0, 1], x),
            run([neg, square], [0, -1], [0, 1], [256], [9, 0, 0, 0], [0, 1], x),
            run([neg, square], [0, -1], [1, 0], [256], [1, 0, 0, 0], [0, 1], x),
            run([neg, square], [0, -1], [0, 1], [256], [1, 0, 0, 0], [1], x),
            run(*fit, x, waits=[1]),
            run(*fit, x, waits=[1, 0]),
            run(*fit, x, waits=[0, 2]),
            run([b"unknown", square], [0, -1], [0, 1], [256], [1, 0, 0, 0], [0, 1], x),
        ],
        "more": run([neg, square], [0, 0], [0, 0], [4], [1, 0, 0, 0], [1, 1], x),
        "places": run([neg, square], [0, 0], [0, 0], [512], [1, 0, 0, 1, 0, 256], [1, 1], x, waits=[0, 1]),
        "two in a chunk": [len(v) for v in run([neg, square], [0, 0], [0, 0], [256], [1, 0, 0, 1, 0, 0], [1, 1], x)],
    }


def test_the_node_runs_its_kernels_says_which_failed_and_refuses_damaged_attributes() -> None:
    found = on_arena(direct, 64, **TWO_THREADS)
    assert found["values"] == [[], [0.0, 1.0, 4.0, 9.0]]
    assert "Input to reshape is a tensor with 4 values, but the requested shape has 3" in found["failed"]
    assert "{{node r}}" in found["failed"]
    assert all(isinstance(message, str) for message in found["damaged"])
    assert all("do not fit its kernels" in message for message in found["damaged"][:-1])
    assert found["more"] == [[0.0, -1.0, -2.0, -3.0], [0.0, 1.0, 4.0, 9.0]], "requests that no chunk serves"
    assert found["places"] == [[0.0, -1.0, -2.0, -3.0], [0.0, 1.0, 4.0, 9.0]]
    assert found["two in a chunk"] == [4, 4], "which is freed once"
