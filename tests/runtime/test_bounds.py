"""Sizes that depend on values in the step: planned for the largest possible one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from processes import on_arena

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.ir.text import format_graph, parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.plan.schedule import EXACT, RUN, Step
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, ArenaSnapshot, Ledger
from tfswap.simulator.bfc_allocator import Arena
from tfswap.simulator.memory import judge_memory, simulate_memory, widest_bytes

tf: Any = pytest.importorskip("tensorflow")

from tfswap.importers.function import import_function  # noqa: E402 needs TensorFlow
from tfswap.importers.opaque_calls import functions_of  # noqa: E402


def types(function: Any, *shapes: tuple[int, ...]) -> dict[str, str]:
    """The types of a function's tensors, by op."""
    concrete = tf.function(function).get_concrete_function(*(tf.TensorSpec(s) for s in shapes))
    return {node.op: str(node.outputs[0]) for node in import_function(concrete) if node.outputs}


def test_rows_that_a_mask_takes_are_all_at_most():
    found = types(lambda x: tf.boolean_mask(tf.exp(x), x[:, 0] > 0) * 2.0, (100, 8))
    assert found["Where"] == "int64<=[100,1]"
    assert found["GatherV2"] == "float32<=[100,8]"
    assert found["Mul"] == "float32<=[100,8]"
    assert found["Exp"] == "float32[100,8]"


def test_what_depends_on_constants_alone_is_known():
    found = types(lambda x: tf.boolean_mask(x, tf.constant([0, 1, 0, 1]) > 0), (4, 8))
    assert found["GatherV2"] == "float32[2,8]"


def test_distinct_values_and_parts_are_all_at_most():
    def function(x: Any) -> Any:
        distinct, _ = tf.unique(x[:, 0])
        one, two = tf.dynamic_partition(x, tf.cast(x[:, 0] > 0, tf.int32), 2)
        return tf.exp(distinct), tf.sin(one), two

    found = types(function, (100, 8))
    assert found["Exp"] == "float32<=[100]"
    assert found["Sin"] == "float32<=[100,8]"


def test_what_is_stitched_has_a_row_for_each_index_at_most():
    def function(x: Any) -> Any:
        shards = [tf.ones([50, 4]), tf.ones([50, 4])]
        looked_up = tf.nn.embedding_lookup(shards, tf.cast(x[:, 0], tf.int32))
        return tf.exp(looked_up), tf.raw_ops.DynamicStitch(
            indices=[tf.cast(x[:, 0], tf.int32), [3, 9]], data=[x, x[:2]]
        )

    found = types(function, (100, 8))
    assert found["ParallelDynamicStitch"] == "float32<=[100,4]"
    assert found["Exp"] == "float32[100,4]"
    assert found["DynamicStitch"] == "float32<=[102,8]"


def test_hits_of_a_sampler_that_takes_nothing_twice_are_one_for_each_class_at_most():
    def function(x: Any) -> Any:
        labels = tf.cast(x[:, :1], tf.int64)
        drawn = tf.random.log_uniform_candidate_sampler(labels, 1, 64, True, 1000, seed=5)
        return tf.nn.sampled_softmax_loss(
            tf.zeros([1000, 8]), tf.zeros([1000]), labels, x, 64, 1000, sampled_values=drawn
        )

    found = types(function, (100, 8))
    assert found["ComputeAccidentalHits"] == "int32<=[100]"
    assert found["SparseToDense"] == "float32[100,64]"


def test_a_shape_of_several_tensors_gives_sizes():
    def function(x: Any) -> Any:
        first, _ = tf.shape_n([x, x])
        return tf.sin(tf.tile(tf.ones([1, 3]), [first[0], 1]))

    assert types(function, (100, 8))["Sin"] == "float32[100,3]"


def test_sizes_go_through_conditionals():
    def function(x: Any, mask: Any) -> Any:
        rows = tf.cond(x[0, 0] > 0, lambda: tf.boolean_mask(x, mask[:, 0] > 0), lambda: x[:10])
        return tf.exp(rows)

    assert types(function, (100, 8), (100, 1))["Exp"] == "float32<=[100,8]"


def test_a_size_that_a_body_is_given_as_a_constant_is_known():
    def function(x: Any) -> Any:
        rows = tf.constant(50)
        return tf.exp(tf.cond(x[0, 0] > 0, lambda: tf.zeros([rows, 8]), lambda: tf.ones([rows, 8])))

    assert types(function, (100, 8))["Exp"] == "float32[50,8]"


def test_sizes_that_turn_out_equal_are_left_open_where_their_bounds_differ():
    def function(x: Any, y: Any) -> Any:
        return tf.boolean_mask(x, x > 0) + tf.boolean_mask(y, y > 0)

    assert types(function, (100,), (200,))["AddV2"] == "float32[?]"


def test_a_branch_that_leaves_rows_out_says_how_many_are_left():
    """Keras divides so by the root of a sparse gradient's squares: all rows, or those that are in a table."""

    def function(x: Any, table: Any) -> Any:
        rows = tf.where(table[:, 0] > 0)[:, 0]
        ids, _ = tf.unique(x[:, 0])
        as_many = tf.equal(tf.size(ids), tf.size(rows))
        taken = tf.cond(as_many, lambda: tf.sin(ids), lambda: tf.cos(tf.gather(ids, tf.cast(rows, tf.int32))))
        return tf.exp(taken / tf.gather(table[:, 0], rows))

    assert types(function, (300, 8), (100, 8))["Exp"] == "float32<=[100]"


def test_a_shape_that_branches_hand_on_is_known():
    def function(x: Any, y: Any) -> Any:
        shape = tf.shape(y)
        rows, kept = tf.cond(x[0, 0] > 0, lambda: (tf.sin(x), shape), lambda: (tf.cos(x), shape))
        return tf.exp(tf.math.unsorted_segment_sum(rows, tf.range(100), kept[0]))

    concrete = tf.function(function, input_signature=[tf.TensorSpec([None, 8])] * 2).get_concrete_function()
    graph = import_function(concrete, [tf.zeros([100, 8]), tf.zeros([30, 8])])
    assert [str(n.outputs[0]) for n in graph if n.op == "Exp"] == ["float32[30,8]"]


def test_what_is_made_of_a_sparse_argument_has_its_shape():
    def function(edges: Any, rows: dict[str, Any], wide: Any, any_rank: Any) -> Any:
        found = tf.sparse.sparse_dense_matmul(edges, rows["x"]), tf.sin(tf.sparse.to_dense(edges))
        return found, tf.cos(tf.sparse.to_dense(wide)), tf.sparse.reduce_sum(any_rank)

    edges = tf.SparseTensorSpec([50, 50])
    rows = {"lengths": tf.RaggedTensorSpec([3, None]), "x": tf.TensorSpec([50, 8])}
    others = tf.SparseTensorSpec([None, 50]), tf.SparseTensorSpec(None)
    concrete = tf.function(function).get_concrete_function(edges, rows, *others)
    found = {node.op: str(*node.outputs[:1]) for node in import_function(concrete)}
    assert found["SparseTensorDenseMatMul"] == "float32[50,8]"
    assert found["Sin"] == "float32[50,50]"
    assert found["Cos"] == "float32[?,?]"  # its shape can be another in each call


def test_a_variable_that_is_given_twice_does_not_stand_for_a_shape():
    def function(one: Any, other: Any, edges: Any) -> Any:
        return one.assign_add(other) + tf.reduce_sum(tf.sparse.to_dense(edges))

    variable = tf.Variable(1.0)
    concrete = tf.function(function).get_concrete_function(variable, variable, tf.SparseTensorSpec([50, 50]))
    assert import_function(concrete)


def test_a_look_up_gives_as_much_for_each_key_as_the_table_holds():
    numbers = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [1.0, 2.0]), -1.0)
    vectors = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, [0.0] * 8)

    def function(keys: Any) -> Any:
        distinct, _ = tf.unique(keys[:, 0])
        looped = tf.map_fn(lambda row: tf.cos(numbers.lookup(row)), keys, fn_output_signature=tf.float32)
        found = tf.exp(numbers.lookup(keys)), tf.sin(numbers.lookup(distinct)), tf.tan(vectors.lookup(keys))
        return found, looped

    concrete = tf.function(function, input_signature=[tf.TensorSpec([None, 3], tf.int32)]).get_concrete_function()
    graph = import_function(concrete, [tf.zeros([100, 3], tf.int32)])
    found = {node.op: str(*node.outputs[:1]) for part in (graph, *graph.all_bodies()) for node in part}
    assert found["Exp"] == "float32[100,3]"
    assert found["Sin"] == "float32<=[100]"  # the most keys
    assert found["Tan"] == "float32<=[100,3,8]"  # the trace does not say of this table that keys are no vectors
    assert found["Cos"] == "float32[3]"


BOUNDED = """\
%x = Placeholder() {dtype=float32} -> float32[100,8]
%i = Placeholder() {dtype=int64} -> int64<=[100]
%a = Const() -> int32[] = (0,)
%g = GatherV2(%x, %i, %a) -> float32<=[100,8]
%e = Exp(%g) -> float32<=[100,8]
%n = Sum(%x, %a) -> float32[8]
feeds %x, %i
fetches %e, %n
"""


def test_a_bound_is_printed_and_read():
    assert format_graph(parse_graph(BOUNDED)) == format_graph(parse_graph(format_graph(parse_graph(BOUNDED))))
    assert str(parse_graph(BOUNDED)["e"].outputs[0]) == "float32<=[100,8]"


def test_kernels_of_bounded_size_are_not_exact_and_judged_without_that_size_too():
    flow = analyse_dataflow(parse_graph(BOUNDED), DeviceModel())
    assert {flow.nodes[i].name for i in flow.inexact} == {"g", "e"}
    largest, smallest = flow.extremes
    made = [flow.value_of[flow.nodes[flow.place[name]], 0] for name in "en"]
    assert [largest.values[v].nbytes for v in made] == [3200, 32]
    assert [smallest.values[v].nbytes for v in made] == [0, 32]


TWO_SIZES = """\
%x = Placeholder() {dtype=float32} -> float32[100,8]
%i = Placeholder() {dtype=bool} -> bool[100]
%j = Placeholder() {dtype=bool} -> bool[100]
%w = Where(%i) -> int64<=[100,1]
%v = Where(%j) -> int64<=[100,1]
%a = Neg(%w) -> int64<=[100,1]
%b = Neg(%v) -> int64<=[100,1]
feeds %x, %i, %j
fetches %a, %b
"""


def test_in_exact_chunks_no_size_takes_more_than_the_largest():
    flow = analyse_dataflow(parse_graph(TWO_SIZES), DeviceModel())
    steps = [Step(EXACT, 0), *(Step(RUN, i) for i, kernel in enumerate(flow.is_kernel) if kernel)]
    chunks = tuple((4096 * n, 256 * n, n % 2 == 1) for n in range(1, 16))
    holes = ArenaSnapshot(sum(nbytes for _, nbytes, in_use in chunks if in_use), chunks)
    for snapshot in (NOTHING_KNOWN, holes):
        most = judge_memory(flow, steps, snapshot).peak_bytes
        assert widest_bytes(flow, steps, snapshot) == most
        for share in (0.0, 0.3, 0.5, 0.7, 0.99):
            values = [v._replace(nbytes=int(share * v.nbytes)) if v.tensor.type.bound else v for v in flow.values]
            less = dataclasses.replace(flow, values=values)
            assert simulate_memory(less, steps, snapshot=snapshot).peak_bytes <= most


def test_what_any_size_takes_at_most_is_that_of_the_extreme_that_holds_most():
    flow = analyse_dataflow(parse_graph(TWO_SIZES), DeviceModel())
    steps = [Step(RUN, i) for i, kernel in enumerate(flow.is_kernel) if kernel]
    less = dataclasses.replace(flow, values=[v._replace(nbytes=v.nbytes // 2) for v in flow.values])
    most = widest_bytes(flow, steps)
    assert most > judge_memory(flow, steps).peak_bytes
    assert widest_bytes(less, steps) < most
    assert widest_bytes(dataclasses.replace(less, courses=(flow,)), steps) == most


@pytest.mark.parametrize("widest", [False, True])
def test_no_chunk_is_wider_than_what_is_counted_at_most(widest: bool):
    ledger = Ledger()
    ledger.widest = widest
    ledger.allocate(1000)
    assert ledger.in_use_bytes == (2048 - 256 if widest else 1024)
    arena = Arena([(0, 2048 - 256, False), (2048, 256, True)])
    arena.allocate(1000)
    assert arena.in_use_bytes - 256 == 2048 - 256


SHAPES_READ = """\
%x = Placeholder() {dtype=float32} -> float32[6,4]
%y = Placeholder() {dtype=float32} -> float32[6,1]
%at = Placeholder() {dtype=int32} -> int32[2]
%e = Exp(%x) -> float32[6,4]
%s = Shape(%e) -> int32[2]
%t = Shape(%y) -> int32[2]
%b = BroadcastGradientArgs(%s, %t) -> int32[?], int32[?]
%f = Reshape(%e, %at) -> float32[24]
%g = Reshape(%e, %s) -> float32[6,4]
%n = Sum(%e, %b:1) -> float32[6]
%o = Sum(%e, %b:0) -> float32[6,4]
feeds %x, %y, %at
fetches %f, %g, %n, %o
"""


def test_a_view_that_reads_what_a_kernel_makes_has_a_place_in_the_order():
    """Else it holds that for as long as the executor likes."""
    flow = analyse_dataflow(parse_graph(SHAPES_READ), DeviceModel())
    assert [flow.is_kernel[flow.place[name]] for name in "fg"] == [False, True]
    made = flow.value_of[flow.nodes[flow.place["s"]], 0]
    assert made in flow.reads[flow.place["g"]]


def test_axes_of_a_broadcast_gradient_take_a_chunk_unless_there_are_none():
    flow = analyse_dataflow(parse_graph(SHAPES_READ), DeviceModel())
    broadcast = flow.nodes[flow.place["b"]]
    assert [flow.values[flow.value_of[broadcast, o]].nbytes > 0 for o in (0, 1)] == [False, True]


@pytest.mark.parametrize("program", ["masked_loss", "hard_examples"])
def test_the_limit_is_kept_and_the_bits_are_the_same(program):
    def run(limit: str) -> dict[str, Any]:
        return on_arena(f"import json, control_flow; print(json.dumps(control_flow.main({program!r}, {limit!r})))")

    expected = run("unoptimised")
    found = run(str(int(run("floor")["floor"] * 1.02)))
    assert found["digest"] == expected["digest"]
    assert found["peak"] <= found["planned"] <= found["limit"] < expected["peak"] * 0.8
    assert found["bounds"] > 0


def test_a_mask_that_takes_most_rows_keeps_the_limit():
    """Neither all rows nor none take as much: what most of them leave does not fit what comes next."""

    def program():
        import tensorflow as tf
        from models import settle
        from step_parts import descend, make_data, make_weights

        import tfswap

        settle()
        (w,) = weights = make_weights((16, 16))

        @tf.function
        def step(x, mask):
            with tf.GradientTape() as tape:
                h = tf.nn.relu(x @ w)
                a = tf.tanh(tf.boolean_mask(h, mask) @ w)
                b = tf.reduce_mean(tf.reshape(tf.tanh(tf.tile(h, [1, 2])), [-1, 2, 16]), 1)
                c, a = tf.nn.relu(b @ w), tf.sigmoid(a @ w)
                loss = tf.reduce_sum(a * a) + tf.reduce_sum(c * c)
            return descend(tape, loss, weights)

        x = make_data(1000, 16)
        masks = [tf.range(1000) < rows for rows in (0, 1000, 500, 750, 875, 937, 313, 996, 998)]
        try:
            tfswap.optimize(step, memory_limit=1)(x, masks[0])
        except tfswap.InfeasibleMemoryLimit as error:
            optimized = tfswap.optimize(step, memory_limit=error.floor_bytes)
        for mask in (masks[0], *masks):
            tf.config.experimental.reset_memory_stats("CPU:0")
            optimized(x, mask)
            peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
            assert peak <= optimized.plan().limit_bytes, (int(tf.reduce_sum(tf.cast(mask, tf.int32))), peak)
        return True

    assert on_arena(program)


def test_bodies_are_distinguished_whatever_order_attributes_come_in():
    concrete = tf.function(lambda x: tf.cond(x[0] > 0, lambda: x * 2.0, lambda: x + 1.0)).get_concrete_function(
        tf.TensorSpec([8])
    )
    (node,) = import_function(concrete).bodies
    for attrs in (node.attrs, dict(sorted(node.attrs.items())), dict(sorted(node.attrs.items(), reverse=True))):
        node.attrs = attrs
        assert ["_true_" in name for name in functions_of(node)] == [True, False]


def test_loops_of_a_library_whose_sizes_values_decide_are_all_known():
    def function(boxes: Any, scores: Any) -> Any:
        return tf.image.non_max_suppression_padded(boxes, scores, 100, pad_to_max_output_size=True)

    concrete = tf.function(function).get_concrete_function(tf.TensorSpec([600, 4]), tf.TensorSpec([600]))
    graph = import_function(concrete)
    assert [n.name for n in graph for t in n.outputs if t.nbytes is None and t.dtype == "float32"] == []
