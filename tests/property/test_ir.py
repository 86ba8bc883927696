"""The graph's own invariants, and import then export as the identity on graphs that TensorFlow traced."""

from __future__ import annotations

import networkx
import pytest
from graphs import any_graphs, contents
from hypothesis import given

from tfswap.ir.graph import Graph
from tfswap.ir.text import format_graph, parse_graph
from tfswap.ir.types import TensorType
from tfswap.support.reach import reach

DIAMOND = """\
%x = Placeholder() -> float32[4]
%left = Relu(%x) -> float32[4]
%right = Neg(%x) -> float32[4]
%sum = AddV2(%left, %right) ^x -> float32[4]
%unused = Exp(%sum) -> float32[4]
%print = PrintV2(%right)
feeds %x
fetches %sum
targets %print
"""


@pytest.fixture
def diamond() -> Graph:
    return parse_graph(DIAMOND)


# --- Graph ----------------------------------------------------------------------------------------------


def test_a_name_is_taken_once(diamond):
    with pytest.raises(ValueError, match="already has a node called 'sum'"):
        diamond.add("NoOp", "sum")
    assert diamond.unique_name("sum") == "sum_1"
    diamond.add("NoOp", "sum_1")
    assert diamond.unique_name("sum") == "sum_2"
    assert diamond.unique_name("new") == "new"


def test_strangers_are_refused(diamond):
    stranger = Graph().add("Relu", "x", outputs=[TensorType("float32", (4,))])
    with pytest.raises(ValueError, match="'x', which is not in this graph"):
        diamond.add("Relu", "a", [stranger.out()])
    with pytest.raises(ValueError, match="'x', which is not in this graph"):
        diamond.add("Relu", "a", controls=[stranger])
    assert "a" not in diamond


def test_replace_uses_changes_the_nodes_asked_for(diamond):
    x, left = diamond["x"], diamond["left"]
    assert diamond.replace_uses(x.out(), left.out(), lambda node: node.name == "right") == 1
    assert diamond["right"].inputs == (left.out(),)
    assert left.inputs == (x.out(),)
    assert diamond.replace_uses(diamond["sum"].out(), x.out()) == 1
    assert diamond["unused"].inputs == (x.out(),)


def test_one_control_edge_between_two_nodes(diamond):
    assert not diamond.add_control(diamond["sum"], diamond["x"])
    assert diamond.add_control(diamond["sum"], diamond["print"])
    assert diamond["sum"].controls == (diamond["x"], diamond["print"])


def test_tensors_by_name(diamond):
    assert diamond.tensor("left:0") == diamond.tensor("left") == diamond["left"].out()
    assert diamond["left"].out().name == "left:0"
    with pytest.raises(KeyError):
        diamond.tensor("nothing:0")


def test_a_cycle_is_named():
    graph = parse_graph("%a = Relu(%c) -> float32[]\n%b = Relu(%a) -> float32[]\n%c = Relu(%b) -> float32[]\n")
    with pytest.raises(ValueError, match="has a cycle: (a -> b -> c -> a|b -> c -> a -> b|c -> a -> b -> c)$"):
        graph.topological()
    with pytest.raises(ValueError, match="cycle"):
        parse_graph("%a = NoOp() ^b\n%b = NoOp() ^a\n").topological()


@given(any_graphs())
def test_topological_puts_sources_first_and_keeps_ready_nodes_in_order(graph):
    order = graph.topological()
    assert sorted(node.name for node in order) == sorted(node.name for node in graph)
    place = {node: i for i, node in enumerate(order)}
    rank = {node: i for i, node in enumerate(graph)}
    for node in order:
        sources = [*(t.node for t in node.inputs), *node.controls]
        assert all(place[source] < place[node] for source in sources)
        last = max((place[source] for source in sources), default=-1)
        # Between its last source and itself only nodes of lower rank ran: it was ready.
        assert all(rank[other] < rank[node] for other in order[last + 1 : place[node]])


@given(any_graphs())
def test_a_copy_is_equal_and_shares_no_node(graph):
    twin = graph.copy()
    assert contents(twin) == contents(graph)
    assert not set(twin) & set(graph)
    reachable = {t.node for node in twin for t in node.inputs} | {c for node in twin for c in node.controls}
    assert reachable <= set(twin)
    before = contents(graph)
    for node in list(twin):
        node.attrs, node.op = {}, "Gone"
    twin.feeds.clear()
    assert contents(graph) == before


@given(any_graphs())
def test_prune_keeps_what_runs_and_nothing_else(graph):
    runs = {node.name for node in graph.live_nodes()}
    fed = {node.name for node in graph.feeds}
    graph.prune()
    left = {node.name for node in graph}
    assert runs | fed <= left
    graph.targets += graph.feeds
    assert left == {node.name for node in graph.live_nodes()}
    for node in graph:
        assert all(graph[t.node.name] is t.node for t in node.inputs)
        assert all(graph[control.name] is control for control in node.controls)
    assert set(graph.small_constants) <= set(graph)


# --- import and export ----------------------------------------------------------------------------------

tf = pytest.importorskip("tensorflow")


def node_facts(graph_def) -> dict[str, tuple]:
    return {
        node.name: (
            node.op,
            [name.removesuffix(":0") for name in node.input if not name.startswith("^")],
            sorted(name for name in node.input if name.startswith("^")),
            node.device,
            {k: v.SerializeToString(deterministic=True) for k, v in node.attr.items() if k != "_output_shapes"},
        )
        for node in graph_def.node
    }


def assert_identity(concrete):
    from tfswap.exporters.graph_def import export_graph_def
    from tfswap.importers.graph_def import import_graph_def

    source = concrete.graph
    before = source.as_graph_def(add_shapes=True)
    graph = import_graph_def(
        before,
        feeds=[t.op.name for t in source.inputs],
        fetches=[t.name for t in source.outputs],
        targets=[o.name for o in source.control_outputs],
    )
    after = export_graph_def(graph)
    assert node_facts(after) == node_facts(before)
    assert [node.name for node in after.node] == [node.name for node in before.node]
    assert after.library.SerializeToString(deterministic=True) == before.library.SerializeToString(deterministic=True)
    assert after.versions == before.versions
    for node in graph:
        operation = source.get_operation_by_name(node.name)
        for kind, tensor in zip(node.outputs, operation.outputs, strict=True):
            assert kind.dtype == tensor.dtype.base_dtype.name
            assert kind.shape == (None if tensor.shape.rank is None else tuple(tensor.shape.as_list()))
    # And as text.
    again = export_graph_def(parse_graph(format_graph(graph)))
    assert again == after
    return graph


def test_a_keras_step_is_imported_and_exported_unchanged():
    keras = tf.keras
    model = keras.Sequential(
        [
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5, seed=1),
            keras.layers.Dense(3),
        ]
    )
    model.build((None, 8, 8, 3))
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return {"loss": loss}

    concrete = step.get_concrete_function(tf.TensorSpec((None, 8, 8, 3)), tf.TensorSpec((None,), tf.int64))
    graph = assert_identity(concrete)
    assert len(graph) > 100


def test_control_flow_and_odd_attributes_are_imported_and_exported_unchanged():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [1.0, 2.0]), default_value=-0.0)

    @tf.function
    def function(x, words, ragged_rank):
        tf.debugging.assert_less(tf.reduce_sum(x), 1e9)
        total = tf.constant(0.0)
        for row in x:
            if tf.reduce_sum(row) > 0:
                total += tf.reduce_sum(row)
            else:
                total -= 1.0
        total = tf.while_loop(lambda t: t < 100.0, lambda t: t * 2.0 + 1.0, [total])[0]
        mapped = tf.map_fn(lambda r: r * 2.0, x)
        first, second = tf.split(x, [1, 1], axis=1)
        spread = tf.image.extract_patches(mapped[None, ..., None], [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "SAME")
        odd = tf.constant([float("nan"), float("-inf"), -0.0]) + tf.cast(ragged_rank, tf.float32)
        with tf.device("/device:CPU:0"):
            tf.print(total, first, second)
        return total, table.lookup(words), tf.strings.join([words, words]), spread, odd

    concrete = function.get_concrete_function(
        tf.TensorSpec((3, 2)), tf.TensorSpec((None,), tf.string), tf.TensorSpec(None, tf.int32)
    )
    graph = assert_identity(concrete)
    assert {"While", "StatelessWhile"} & {node.op for node in graph}
    assert graph.targets


def test_loop_frames_of_tensorflow_1_are_refused():
    from tfswap.errors import UnsupportedGraph
    from tfswap.importers.graph_def import import_graph_def

    graph_def = tf.compat.v1.GraphDef()
    graph_def.node.add(name="loop", op="Enter")
    with pytest.raises(UnsupportedGraph, match="'loop' is of type Enter"):
        import_graph_def(graph_def, [], [])


@pytest.mark.parametrize(("feeds", "fetches", "targets"), [(["no"], [], []), ([], ["no:0"], []), ([], [], ["no"])])
def test_names_that_are_not_there_are_refused(feeds, fetches, targets):
    from tfswap.errors import UnsupportedGraph
    from tfswap.importers.graph_def import import_graph_def

    with pytest.raises(UnsupportedGraph, match="'no'"):
        import_graph_def(tf.compat.v1.GraphDef(), feeds, fetches, targets)


def test_no_node_is_colocated_with_one_that_is_gone():
    from tfswap.exporters.graph_def import export_graph_def
    from tfswap.importers.graph_def import import_graph_def

    graph_def = tf.compat.v1.GraphDef()
    for name, colocated in [("there", []), ("gone", []), ("one", ["gone"]), ("both", ["gone", "there"])]:
        node = graph_def.node.add(name=name, op="NoOp")
        node.attr["_class"].list.s.extend(f"loc:@{other}".encode() for other in colocated or [name])
    graph = import_graph_def(graph_def, [], [], ["there", "one", "both"])
    assert list(export_graph_def(graph).node) == list(graph_def.node)
    graph.prune()
    made = export_graph_def(graph)
    colocated = {n.name: [s.decode() for s in n.attr["_class"].list.s] for n in made.node if "_class" in n.attr}
    assert colocated == {"there": ["loc:@there"], "both": ["loc:@there"]}


def test_attribute_lists_keep_their_types():
    """1, True and 1.0 are equal in Python, and so are 0.0 and -0.0."""
    from tfswap.exporters.graph_def import export_graph_def
    from tfswap.importers.graph_def import import_graph_def

    graph_def = tf.compat.v1.GraphDef()
    node = graph_def.node.add(name="a", op="NoOp")
    for name, value in [("f0", 0.0), ("f1", -0.0), ("f2", 1.0)]:
        node.attr[name].f = value
        node.attr["l" + name].list.f.append(value)
    node.attr["i"].i = 1
    node.attr["b"].b = True
    node.attr["li"].list.i.extend([1, 0])
    node.attr["lb"].list.b.extend([True, False])
    node.attr["ls"].list.s.extend([b"\xff", b""])
    node.attr["lt"].list.type.extend([1, 3])
    node.attr["lempty"].list.SetInParent()
    node.attr["unknown"].shape.unknown_rank = True
    node.attr["scalar"].shape.SetInParent()
    node.attr["lshape"].list.shape.add().dim.add(size=-1)
    node.attr["lshape"].list.shape.add().unknown_rank = True
    node.attr["func"].func.name = "f"
    node.attr["lfunc"].list.func.add(name="g")
    node.attr["placeholder"].placeholder = "T"
    exported = export_graph_def(import_graph_def(graph_def, [], []))
    assert exported.node[0] == node


@given(any_graphs())
def test_order_and_what_is_needed_are_as_networkx_has_them(graph):
    found = graph.to_networkx()
    rank = {node.name: n for n, node in enumerate(graph)}
    order = networkx.lexicographical_topological_sort(found, key=rank.__getitem__)
    assert [node.name for node in graph.topological()] == list(order)
    for node in graph:
        assert {n.name for n in graph.needed([node])} == {node.name, *networkx.ancestors(found, node.name)}
    below = {node.name: list(found.successors(node.name)) for node in graph}
    for name in below:
        assert set(reach(below[name], below.__getitem__)) == networkx.descendants(found, name)
    edges = found.edges(keys=True, data=True)
    inputs = {(s, t, key): facts["tensor"] for s, t, key, facts in edges if key != "control"}
    assert inputs == {(t.node.name, n.name, k): t.name for n in graph for k, t in enumerate(n.inputs)}
