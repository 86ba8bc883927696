"""`optimize_graph` on protos: TensorFlow 1 graphs in a Session with its default configuration."""

from __future__ import annotations

from typing import Any

import pytest
from processes import last_json, run_together

import tfswap
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, TfswapError, UnsupportedGraph
from tfswap.report.reporting import UNCHANGED_NOTE
from tfswap.support.reach import reach

BATCH, WIDTH, LAYERS = 2048, 256, 6
ARENA_MIB = 1000


def build(reference_variables: bool, optimizer: str) -> tuple[Any, str]:
    """A TensorFlow 1 training graph, and the name of its initializer."""
    import numpy as np
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, WIDTH], name="x")
        y = v1.placeholder(tf.float32, [None, WIDTH], name="y")
        random, h = np.random.default_rng(0), x
        for i in range(LAYERS):
            start = (random.normal(size=(WIDTH, WIDTH)) * 0.1).astype("f")
            weight = v1.get_variable(f"w{i}", initializer=start, use_resource=not reference_variables)
            h = tf.nn.relu(tf.matmul(h, weight))
        loss = tf.reduce_mean((h - y) ** 2, name="loss")
        tf.reduce_sum(h, name="sum")
        if optimizer == "decayed":
            # The step is counted by a constant that waits for the updates; what comes after reads what they have set.
            step = v1.train.get_or_create_global_step()
            trainer = v1.train.MomentumOptimizer(v1.train.exponential_decay(0.1, step, 2, 0.5), 0.9)
            update = trainer.minimize(loss, step)
            with tf.control_dependencies([update]):
                tf.group(v1.train.ExponentialMovingAverage(0.9).apply(v1.trainable_variables()), name="train")
            return graph, v1.global_variables_initializer().name
        if optimizer == "momentum":
            trainer = v1.train.MomentumOptimizer(0.1, 0.9)
        else:
            trainer = v1.train.GradientDescentOptimizer(0.1)
        if optimizer == "by hand":
            pairs = trainer.compute_gradients(loss)
            updates = [v1.assign_sub(v, 0.1 * g) for g, v in pairs]
            tf.group(*updates, name="train")
        else:
            trainer.minimize(loss, name="train")
        return graph, v1.global_variables_initializer().name


def train(name: str, reference_variables: bool, optimizer: str, limit: str) -> dict[str, Any]:
    """Losses, values and peak of one variant, in a Session on a capped arena."""
    import numpy as np
    import tensorflow as tf

    v1 = tf.compat.v1
    graph, init = build(reference_variables, optimizer)
    graph_def, planned = graph.as_graph_def(), 0
    config = v1.ConfigProto()
    if name == "reference":
        config.graph_options.rewrite_options.disable_meta_optimizer = True
    else:
        made = tfswap.optimize_graph(
            graph_def, feeds=["x", "y"], fetches=["loss:0", "train"], memory_limit=limit, batch_size=BATCH
        )
        assert isinstance(made, tfswap.OptimizedGraph)
        graph_def, planned = made.graph_def, made.report.planned_peak_bytes
    slab = tf.raw_ops.Empty(shape=[ARENA_MIB - 2, 2**20], dtype=tf.uint8)
    del slab
    # Aligned, so that a Session takes them as they are: then they are in no arena. Copies are what counts.
    random = np.random.default_rng(1)
    x = random.normal(size=(BATCH, WIDTH)).astype("f")
    y = random.normal(size=(BATCH, WIDTH)).astype("f")
    with tf.Graph().as_default() as graph, v1.Session(graph=graph, config=config) as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        session.run(init)
        tf.config.experimental.reset_memory_stats("CPU:0")
        losses = [session.run(["loss:0", "train"], {"x:0": x, "y:0": y})[0] for _ in range(3)]
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        losses.append(session.run(["loss:0", "train"], {"x:0": x[:99], "y:0": y[:99]})[0])
        losses.append(session.run("sum:0", {"x:0": x}))  # not planned: runs as it did
        trace = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        metadata = v1.RunMetadata()
        session.run("train", {"x:0": x, "y:0": y}, options=trace, run_metadata=metadata)
        ran = {n.node_name for d in metadata.step_stats.dev_stats for n in d.node_stats}
        reads = "%s:0" if reference_variables else "%s/Read/ReadVariableOp:0"
        weights = [session.run(reads % f"w{i}") for i in range(LAYERS)]
    missing = []
    if name != "reference":
        body = graph_def.library.function[-1].node_def
        missing = sorted(n.name for n in body if n.op.startswith("Tfswap>") and n.name not in ran)
    bits = "".join(np.asarray(v).tobytes().hex() for v in losses) + weights[-1].tobytes().hex()
    total = [float(np.abs(w).sum(dtype="float64")) for w in weights]
    return {"bits": bits, "total": total, "peak": peak, "planned": planned, "missing": missing}


def program(*arguments: object) -> str:
    """What prints what `train` returns for them."""
    return f"import json, test_graph_def; print(json.dumps(test_graph_def.train(*{arguments!r})))"


@pytest.mark.parametrize(
    ("variables", "optimizer"),
    [("reference", "momentum"), ("reference", "by hand"), ("resource", "decayed")],
)
def test_a_session_runs_the_plan_with_the_same_bits(variables: str, optimizer: str) -> None:
    programs = [program(name, variables == "reference", optimizer, "60%") for name in ("reference", "rewritten")]
    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ARENA_MIB)}
    expected, got = map(last_json, run_together(programs, **arena))
    assert got["total"] == expected["total"]
    assert got["bits"] == expected["bits"]
    assert got["missing"] == []
    assert got["peak"] <= 1.02 * got["planned"]
    assert got["peak"] < 0.7 * expected["peak"]


@pytest.fixture(scope="module")
def graph_def() -> Any:
    return build(True, "momentum")[0].as_graph_def()


def optimize(graph_def: Any, **options: Any) -> Any:
    given = {"feeds": ["x", "y"], "fetches": ["loss", "train"], "memory_limit": "60%", "batch_size": BATCH}
    return tfswap.optimize_graph(graph_def, **{**given, **options})


def test_nothing_but_the_step_moves(graph_def: Any) -> None:
    before = graph_def.SerializeToString(deterministic=True)
    made = optimize(graph_def)
    assert graph_def.SerializeToString(deterministic=True) == before
    old = {n.name: n for n in graph_def.node}
    new = {n.name: n for n in made.graph_def.node}
    assert [n for n in new if n not in old] == ["tfswap/step"]
    changed = sorted(n for n in new if n in old and old[n] != new[n])
    assert changed == ["loss", "train"]
    assert {f"w{i}" for i in range(LAYERS)} | {"init", "sum", "x", "y"} <= set(new)
    assert not any(n.op == "ApplyMomentum" for n in made.graph_def.node)


def test_the_same_graph_gives_the_same_result(graph_def: Any) -> None:
    made = optimize(graph_def)
    again = optimize(graph_def, plan=made.plan)
    assert made.graph_def.SerializeToString(deterministic=True) == again.graph_def.SerializeToString(deterministic=True)


def test_a_generous_limit_changes_nothing(graph_def: Any) -> None:
    made = optimize(graph_def, memory_limit="10GiB")
    assert made.plan.changes_nothing
    assert made.graph_def == graph_def
    assert UNCHANGED_NOTE in made.report.notes


def test_analysis_changes_nothing(graph_def: Any) -> None:
    made = optimize(graph_def, mode="analyze")
    assert made.graph_def == graph_def
    assert made.report.swapped
    assert UNCHANGED_NOTE not in made.report.notes


def test_updates_through_references_wait_for_the_reads_of_their_variable() -> None:
    from tfswap.compiler.tf1_variables import order_writes
    from tfswap.importers.graph_def import import_graph_def

    built, _ = build(True, "by hand")
    graph = import_graph_def(built.as_graph_def(add_shapes=True), ["x", "y"], ["loss:0"], ["train"])
    graph.prune()
    assert order_writes(graph) > 0
    graph.topological()
    reads_weight = [n for n in graph if n.op == "MatMul" and any(t.node.name == "w1/read" for t in n.inputs)]
    (update,) = [n for n in graph if n.op == "AssignSub" and n.inputs[0].node.name == "w1"]
    assert len(reads_weight) == 2
    assert before(update).issuperset(reads_weight)


def test_a_read_of_what_an_update_hands_on_comes_before_the_next_update() -> None:
    import tensorflow as tf

    from tfswap.compiler.tf1_variables import order_writes
    from tfswap.importers.graph_def import import_graph_def

    v1 = tf.compat.v1
    with tf.Graph().as_default() as built:
        variable = v1.get_variable("w", [4], initializer=v1.zeros_initializer(), use_resource=False)
        raised = v1.assign_add(variable, tf.ones([4]), name="first")
        tf.square(raised, name="read")
        with tf.control_dependencies([raised.op]):
            v1.assign_sub(variable, tf.ones([4]), name="second")
    graph = import_graph_def(built.as_graph_def(add_shapes=True), [], ["read:0"], ["second"])
    graph.prune()
    order_writes(graph)
    assert graph["read"] in before(graph["second"])


def before(node: Any) -> set[Any]:
    """The nodes that must have run when `node` does."""

    def awaited(one: Any) -> list[Any]:
        return [*(t.node for t in one.inputs), *one.controls]

    return set(reach(awaited(node), awaited))


@pytest.mark.parametrize("reference_variables", [True, False])
def test_an_initializer_next_to_the_step_is_ordered_and_planned(reference_variables: bool) -> None:
    """TensorFlow leaves to chance whether what it sets is read, and whether it or the update is last."""
    from tfswap.compiler.tf1_variables import order_writes
    from tfswap.importers.graph_def import import_graph_def
    from tfswap.importers.library import fill_defaults

    built, init = build(reference_variables, "plain")
    graph_def = built.as_graph_def(add_shapes=True)
    fill_defaults(graph_def.node)
    graph = import_graph_def(graph_def, ["x", "y"], ["loss:0"], ["train", init])
    graph.prune()
    assert order_writes(graph) > 0
    assert order_writes(graph) == 0
    for i in range(LAYERS):
        variable = next(n for n in graph if n.name == f"w{i}")
        users = [n for n in graph if any(t.node is variable for t in n.inputs)]
        first, second = sorted((n for n in users if "Assign" in n.op or "Apply" in n.op), key=lambda n: len(before(n)))
        (read,) = {*users} - {first, second}
        assert first in before(second)
        assert read in before(first)
    made = optimize(built.as_graph_def(), fetches=["loss", "train", init])
    assert made.report.planned_peak_bytes <= made.report.memory_limit_bytes


def meta_graph(graph_def: Any) -> Any:
    import tensorflow as tf

    made = tf.compat.v1.MetaGraphDef()
    made.graph_def.CopyFrom(graph_def)
    signature = made.signature_def["train"]
    for name in ("x", "y"):
        signature.inputs[name].name = f"{name}:0"
    signature.outputs["loss"].name = "loss:0"
    made.collection_def["train_op"].node_list.value.append("train")
    return made


def test_a_meta_graph_names_its_signature(graph_def: Any) -> None:
    given = meta_graph(graph_def)
    made = tfswap.optimize_graph(given, signature="train", memory_limit="60%", batch_size=BATCH)
    assert isinstance(made, tfswap.OptimizedGraph)
    assert made.graph_def == optimize(graph_def).graph_def
    assert made.meta_graph_def.graph_def == made.graph_def
    assert made.meta_graph_def.signature_def["train"] == given.signature_def["train"]
    with pytest.raises(InvalidModel, match=r"'serve'.*'train'"):
        tfswap.optimize_graph(given, signature="serve", memory_limit="60%", batch_size=BATCH)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"feeds": None}, TfswapError, "feeds="),
        ({"feeds": ["z"]}, InvalidModel, "'z'"),
        ({"feeds": ["x"]}, InvalidModel, "the fetches need 'y', which feeds does not name.*\\['x', 'y'\\]"),
        ({"fetches": ["lost"]}, InvalidModel, "'lost'"),
        ({"fetches": ["loss"]}, UnsupportedGraph, "no backward pass"),
        ({"batch_size": None}, UnsupportedGraph, r"x \[\?, 256\]"),
        ({"memory_limit": "1KiB"}, InfeasibleMemoryLimit, "needs at least"),
        ({"output_dir": "somewhere"}, TfswapError, "output_dir"),
        ({"function": "q"}, TfswapError, "function is 'q', and it is for a SavedModel's folder"),
        ({"signature": "q"}, TfswapError, "signature is 'q', and it is for a MetaGraphDef"),
        ({"feeds": ["x", "y", "x:0"]}, TfswapError, "feeds names 'x' and 'x:0', which are one node"),
        ({"fetches": "loss"}, TfswapError, "fetches is 'loss', of type str: give a list of names"),
        ({"feeds": "x"}, TfswapError, "feeds is 'x', of type str: give a list of names"),
        ({"fetches": [3]}, TfswapError, "fetches has 3, of type int"),
        ({"fetches": []}, TfswapError, "fetches="),
        ({"fetches": ["loss:7"]}, InvalidModel, "'loss:7'"),
        ({"feeds": ["x:1", "y"]}, TfswapError, "only a node's first output can be fed"),
        ({"plan": "nowhere"}, InvalidModel, "no plan can be read"),
    ],
)
def test_bad_input_is_refused(graph_def: Any, options: dict[str, Any], error: type[TfswapError], says: str) -> None:
    with pytest.raises(error, match=says):
        optimize(graph_def, **options)


def test_a_loop_over_a_dataset_is_refused() -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [BATCH, WIDTH], name="x")
        weight = v1.get_variable("w", [WIDTH, WIDTH], use_resource=True)
        steps = tf.data.Dataset.from_tensors(x)
        tf.identity(steps.reduce(0.0, lambda total, one: total + tf.reduce_sum(one @ weight)), name="loss")
    with pytest.raises(UnsupportedGraph, match="ReduceDataset.*loop over a dataset"):
        optimize(graph.as_graph_def(), feeds=["x"], fetches=["loss"])


def test_a_conditional_of_tensorflow_1_is_refused() -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    before = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [BATCH, WIDTH], name="x")
            weight = v1.get_variable("w", [WIDTH, WIDTH], use_resource=True)
            h = tf.cond(tf.reduce_sum(x) > 0, lambda: x @ weight, lambda: x)
            loss = tf.reduce_sum(h, name="loss")
            v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
    finally:
        if before:
            v1.enable_control_flow_v2()
    with pytest.raises(UnsupportedGraph, match=r"\(Switch\) is of a TensorFlow 1 conditional.*enable_control_flow_v2"):
        optimize(graph.as_graph_def(), feeds=["x"], fetches=["loss", "train"])


def test_a_meta_graph_takes_no_feeds(graph_def: Any) -> None:
    with pytest.raises(TfswapError, match="feeds is .*, and it is for a GraphDef"):
        tfswap.optimize_graph(meta_graph(graph_def), signature="train", feeds=["x"], memory_limit="60%")


@pytest.mark.parametrize("signature", [None, "serve", 3])
def test_a_signature_that_is_not_there_is_refused(graph_def: Any, signature: Any) -> None:
    with pytest.raises(InvalidModel, match="signature is .*'train'"):
        tfswap.optimize_graph(meta_graph(graph_def), signature=signature, memory_limit="60%", batch_size=BATCH)


def test_a_damaged_graph_is_refused(graph_def: Any) -> None:
    broken = type(graph_def)()
    broken.CopyFrom(graph_def)
    next(n for n in broken.node if n.op == "MatMul").input[0] = "nowhere"
    with pytest.raises(InvalidModel, match="nowhere"):
        optimize(broken)


def test_a_graph_that_is_damaged_next_to_the_step_is_refused(graph_def: Any) -> None:
    broken = type(graph_def)()
    broken.CopyFrom(graph_def)
    broken.node.add(name="extra", op="NoOp").input.append("^nowhere")
    with pytest.raises(InvalidModel, match="'extra' reads 'nowhere'"):
        optimize(broken)


def test_a_graph_with_a_node_twice_is_damaged(graph_def: Any) -> None:
    broken = type(graph_def)()
    broken.CopyFrom(graph_def)
    broken.node.add().CopyFrom(next(n for n in graph_def.node if n.op == "Relu"))
    with pytest.raises(InvalidModel, match="the graph is damaged: it has more than one node called 'Relu'"):
        optimize(broken)


def test_nothing_is_colocated_with_what_has_moved_into_the_step() -> None:
    """Gradients are colocated with what they are of; those that no update needs stay outside, alone."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = h = v1.placeholder(tf.float32, [BATCH, WIDTH], name="x")
        weights = [v1.get_variable(f"w{i}", [WIDTH, WIDTH], use_resource=False) for i in range(LAYERS)]
        for weight in weights:
            h = tf.reshape(tf.tanh(h @ weight), [-1, WIDTH])
        gradients = tf.gradients(tf.reduce_mean(h, name="loss"), [x, *weights])
        clipped, _ = tf.clip_by_global_norm(gradients[1:], 1.0)
        updates = zip(clipped, weights, strict=True)
        v1.train.GradientDescentOptimizer(0.1).apply_gradients(updates, name="train")
    made = optimize(graph.as_graph_def(), feeds=["x"]).graph_def
    inside = next(f for f in made.library.function if f.signature.name == "tfswap_step")
    for nodes in (made.node, inside.node_def):
        colocated = {s.decode() for n in nodes if "_class" in n.attr for s in n.attr["_class"].list.s}
        assert "loc:@w0" in colocated, "what is left lies where it lay"
        assert colocated <= {f"loc:@{n.name}" for n in nodes}
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(made, name="")


def test_tensorflow_s_optimizers_are_asked_of_a_step_that_writes_references(caplog: pytest.LogCaptureFixture) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    peaks = []
    for is_resource in (False, True):
        with tf.Graph().as_default() as graph:
            h = v1.placeholder(tf.float32, [BATCH, WIDTH], name="x")
            for i in range(LAYERS):
                h = tf.tanh(h @ v1.get_variable(f"w{i}", [WIDTH, WIDTH], use_resource=is_resource))
            v1.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(h, name="loss"), name="train")
        made = optimize(graph.as_graph_def(), feeds=["x"], mode="analyze", memory_limit=None)
        peaks.append(made.report.baseline_peak_bytes)
    assert caplog.messages == []
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_a_rewritten_graph_is_not_rewritten_again(graph_def: Any) -> None:
    with pytest.raises(InvalidModel, match="already"):
        optimize(optimize(graph_def).graph_def)
