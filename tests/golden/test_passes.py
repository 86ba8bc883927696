"""The passes, on graphs in text: tests/golden/*.txt.

A golden file has three parts, between lines of dashes: what to do (and why, in comments), the graph before, and the
expected text after. `pass: order|swap` names the kernels in their order; `absent:` lines are a plan's evictions.
TFSWAP_UPDATE_GOLDEN=1 writes the third part anew: then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Opaque
from tfswap.ir.text import format_graph, parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.order import chain_nodes
from tfswap.passes.prepare.assign_in_place import assign_in_place
from tfswap.passes.prepare.common_subexpressions import merge_equal_nodes
from tfswap.passes.prepare.copy_on_read import leave_copy_on_read
from tfswap.passes.prepare.copy_to_device import copy_to_device
from tfswap.passes.prepare.copy_to_host import copy_to_host
from tfswap.passes.prepare.defer_constants import defer_constants
from tfswap.passes.prepare.defer_integers import defer_integers
from tfswap.passes.prepare.onednn_fusion import fuse_onednn
from tfswap.passes.prepare.replaced_ops import keep_replaced_ops
from tfswap.passes.prepare.result_slots import use_result_slots
from tfswap.passes.prepare.split_add_n import split_add_n
from tfswap.passes.prepare.split_identity_n import split_identity_n
from tfswap.passes.prepare.uniform_constants import fill_uniform_constants
from tfswap.passes.prepare.views_on_device import keep_views_on_device
from tfswap.passes.prepare.zeros_like import fill_zeros_like
from tfswap.passes.tactics.swap import insert_schedule
from tfswap.passes.verify import VerificationError, verify
from tfswap.plan.plan import Eviction, Plan

GOLDEN = Path(__file__).parent
SEPARATOR = "---\n"


class Golden:
    def __init__(self, name: str):
        self.path = GOLDEN / f"{name}.txt"
        self.parts = self.path.read_text().split(SEPARATOR)
        lines = [line for line in self.parts[0].splitlines() if not line.startswith("#")]
        self.arguments = lines[0].split()[2:]
        self.evictions = [self._eviction(line.split()[1:]) for line in lines[1:]]
        self.graph = parse_graph(self.parts[1])

    def _eviction(self, words: list[str]) -> Eviction:
        where: dict[str, int | None] = {}
        for key, _, value in (word.partition("=") for word in words[1:]):
            where[key] = None if value == "None" else int(value)
        out, release, back, use = (where[key] for key in ("out", "release", "back", "use"))
        assert release is not None
        assert back is not None
        assert use is not None
        return Eviction(words[0], 64, out, release, back, use)

    def plan(self) -> Plan:
        order = tuple(self.arguments)
        return Plan("", None, order, tuple(self.evictions), 0, 0, 0, 1.0, "test")

    def check(self, comment: str = "") -> None:
        result = comment + format_graph(self.graph)
        if os.environ.get("TFSWAP_UPDATE_GOLDEN"):
            self.path.write_text(SEPARATOR.join([*self.parts[:2], result]))
        assert len(self.parts) == 3, f"no expected text in {self.path.name}"
        assert result == self.parts[2]


def edges(graph: Graph) -> int:
    return sum(len(node.controls) for node in graph)


# --- goldens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "added", "gate"), [("order", 2, None), ("order_gate", 3, 7)])
def test_order(name, added, gate):
    golden = Golden(name)
    before, nodes = edges(golden.graph), len(golden.graph)
    chain = [golden.graph[n] for n in golden.arguments if "=" not in n]
    assert chain_nodes(golden.graph, chain, gate) == added
    assert edges(golden.graph) == before + added
    assert len(golden.graph) == nodes + (gate is not None)
    golden.check()
    order = [n.name for n in golden.graph.topological()]
    places = [order.index(n.name) for n in chain]
    assert places == sorted(places)


def test_what_onednn_would_join_across_the_order_is_kept_apart():
    graph = parse_graph("""\
%x = Placeholder() -> float32[2,4,4,3]
%size = Const() -> int32[4]
%g = Neg(%x) -> float32[2,4,4,3]
%bias = BiasAddGrad(%g) -> float32[3]
%between = Neg(%bias) -> float32[3]
%again = Abs(%x) -> float32[2,4,4,3]
%filter = Conv2DBackpropFilter(%again, %size, %g) -> float32[1,1,3,3]
feeds %x
fetches %filter, %between
""")
    chain_nodes(graph, [graph[name] for name in ("g", "bias", "between", "again", "filter")])
    controls = {name: {node.name for node in graph[name].controls} for name in ("bias", "filter")}
    assert controls == {"bias": {"g"}, "filter": set()}


def test_onednn_fusion():
    golden = Golden("onednn_fusion")
    assert fuse_onednn(golden.graph, Target(DeviceModel(onednn=False))) == 0
    assert fuse_onednn(golden.graph, Target(DeviceModel(onednn=True))) == 2
    golden.check()
    assert fuse_onednn(golden.graph, Target(DeviceModel(onednn=True))) == 0


def test_assign_in_place():
    golden = Golden("assign_in_place")
    before = edges(golden.graph), len(golden.graph)
    assert assign_in_place(golden.graph, Target(DeviceModel())) == 4
    assert (edges(golden.graph), len(golden.graph)) == before
    golden.check()
    assert assign_in_place(golden.graph, Target(DeviceModel())) == 0


def test_defer_constants():
    golden = Golden("defer_constants")
    assert defer_constants(golden.graph, Target(DeviceModel("gpu"))) == 0
    assert defer_constants(golden.graph, Target(DeviceModel())) == 9
    golden.check()
    assert defer_constants(golden.graph, Target(DeviceModel())) == 0


def test_result_slots():
    golden = Golden("result_slots")
    assert use_result_slots(golden.graph, Target(DeviceModel())) == 1
    golden.check()


def test_split_identity_n():
    golden = Golden("split_identity_n")
    before = edges(golden.graph), len(golden.graph)
    # Both inputs of swapped, the input of one, both inputs of sum, what control waits for.
    assert split_identity_n(golden.graph, Target(DeviceModel())) == 6
    assert (edges(golden.graph), len(golden.graph)) == (before[0] + 2, before[1] + 1)  # what waits for both inputs
    golden.check()
    assert split_identity_n(golden.graph, Target(DeviceModel())) == 0


def test_integers_of_a_gpu():
    golden = Golden("views_on_device")
    gpu = Target(DeviceModel("gpu"))
    assert (
        keep_views_on_device(golden.graph, Target(DeviceModel()))
        == copy_to_device(golden.graph, Target(DeviceModel()))
        == 0
    )
    assert keep_views_on_device(golden.graph, gpu) == 2
    # The tokens, a view of them that the host has, and a constant: TensorFlow does not fold what it copies first.
    assert copy_to_device(golden.graph, gpu) == 3
    golden.check()
    assert keep_views_on_device(golden.graph, gpu) == copy_to_device(golden.graph, gpu) == 0


@pytest.mark.parametrize(
    ("name", "copy", "copies"),
    [
        ("copy_to_device", copy_to_device, 3),  # what functions of a GPU return and take, and read of a CPU
        ("copy_to_host", copy_to_host, 5),  # what the host reads of a GPU's results
        ("defer_integers", defer_integers, 2),  # kernels of constants that TensorFlow does not fold
    ],
)
def test_passes_for_a_gpu_alone(name, copy, copies):
    golden = Golden(name)
    assert copy(golden.graph, Target(DeviceModel())) == 0
    gpu = Target(DeviceModel("gpu"))
    assert copy(golden.graph, gpu) == copies
    golden.check()
    assert copy(golden.graph, gpu) == 0


def test_split_add_n():
    golden = Golden("split_add_n")
    before = len(golden.graph)
    # Of eleven and of eighteen; not of nine, of small ones, and of what is read elsewhere or is a view of that.
    assert split_add_n(golden.graph, Target(DeviceModel())) == 2
    assert len(golden.graph) == before + 2 + 4
    golden.check()
    assert split_add_n(golden.graph, Target(DeviceModel())) == 0


def test_replaced_ops():
    golden = Golden("replaced_ops")
    assert keep_replaced_ops(golden.graph, Target(DeviceModel())) == 4
    golden.check()
    assert keep_replaced_ops(golden.graph, Target(DeviceModel())) == 0


def test_zeros_like():
    golden = Golden("zeros_like")
    before = len(golden.graph)
    assert fill_zeros_like(golden.graph, Target(DeviceModel())) == 2
    assert len(golden.graph) == before + 4
    golden.check()
    assert fill_zeros_like(golden.graph, Target(DeviceModel())) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_large_constants_of_one_value_are_filled(dtype):
    """With the value's bits. One that lists two values, a small one, and integers stay constants."""
    tf = pytest.importorskip("tensorflow")
    from tensorflow.core.framework.tensor_pb2 import TensorProto

    from tfswap.exporters.graph_def import export_graph_def
    from tfswap.importers.graph_def import import_graph_def

    def proto(values, shape):
        made = TensorProto(dtype=tf.as_dtype(dtype).as_datatype_enum)
        made.tensor_shape.CopyFrom(tf.TensorShape(shape).as_proto())
        one = tf.make_tensor_proto(values, dtype, [len(values)]) if values else TensorProto()
        field = {"float32": "float_val", "float64": "double_val"}.get(dtype, "half_val")
        numbers = tf.make_ndarray(one) if values else []
        getattr(made, field).extend(numbers.view("uint16").tolist() if values and field == "half_val" else numbers)
        return made

    graph_def = tf.compat.v1.GraphDef()
    contents = {
        "zeros": ([], [128, 128]),
        "ones": ([1], [128, 128]),
        "thirds": ([1 / 3], [4, 4096]),
        "zero": ([0], [9000]),
    }
    kept = {"two": ([1, 2], [128, 128]), "small": ([1], [16])}
    for name, (values, shape) in (contents | kept).items():
        node = graph_def.node.add(name=name, op="Const")
        node.attr["dtype"].type = tf.as_dtype(dtype).as_datatype_enum
        node.attr["value"].tensor.CopyFrom(proto(values, shape))
        node.attr["_output_shapes"].list.shape.add().CopyFrom(tf.TensorShape(shape).as_proto())
    graph = import_graph_def(graph_def, feeds=[], fetches=[f"{name}:0" for name in contents | kept])
    assert fill_uniform_constants(graph, Target(DeviceModel())) == 4
    assert {name: graph[name].op for name in contents | kept} == dict.fromkeys(contents, "Fill") | dict.fromkeys(
        kept, "Const"
    )
    assert fill_uniform_constants(graph, Target(DeviceModel())) == 0
    for name, (_, shape) in contents.items():
        dims, value = graph[name].inputs
        assert tf.make_ndarray(TensorProto.FromString(dims.node.attrs["value"].data)).tolist() == shape
        (scalar,) = value.node.inputs
        found = tf.make_ndarray(TensorProto.FromString(scalar.node.attrs["value"].data))
        expected = tf.make_ndarray(next(n for n in graph_def.node if n.name == name).attr["value"].tensor)
        assert found.shape == ()
        assert found.tobytes() * expected.size == expected.tobytes()
    assert export_graph_def(graph)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_what_is_filled_with_ones_has_the_bits_of_ones(dtype):
    tf = pytest.importorskip("tensorflow")
    from tensorflow.core.framework.tensor_pb2 import TensorProto

    graph = parse_graph(f"""
%x = Placeholder() {{dtype={dtype}}} -> {dtype}[3]
%y = Neg(%x) {{T={dtype}}} -> {dtype}[3]
%ones = OnesLike(%y) {{T={dtype}}} -> {dtype}[3]
%zeros = ZerosLike(%y) {{T={dtype}}} -> {dtype}[3]
feeds %x
fetches %ones, %zeros
""")
    fill_zeros_like(graph, Target(DeviceModel()))
    for name, expected in (("ones", 1), ("zeros", 0)):
        value = graph[f"tfswap/{name}/value"].attrs["value"]
        assert isinstance(value, Opaque)
        number = tf.make_ndarray(TensorProto.FromString(value.data))
        assert number.shape == ()
        assert number.dtype == dtype
        assert number == expected


def test_split_custom_gradient():
    golden = Golden("split_custom_gradient")
    # Both inputs of sum, the first of twice, and what outer passes on of inner.
    assert split_identity_n(golden.graph, Target(DeviceModel())) == 4
    golden.graph.prune()
    golden.check()
    assert split_identity_n(golden.graph, Target(DeviceModel())) == 0


def test_common_subexpressions():
    golden = Golden("common_subexpressions")
    assert merge_equal_nodes(golden.graph, Target(DeviceModel())) == 3
    golden.graph.prune()
    golden.check()
    assert merge_equal_nodes(golden.graph, Target(DeviceModel())) == 0


def test_copy_on_read():
    golden = Golden("copy_on_read")
    before = len(golden.graph)
    # The gather and both updates of table, the update of its slots, the gather of tied.
    assert leave_copy_on_read(golden.graph, Target(DeviceModel())) == 5
    assert len(golden.graph) == before + 2 + 3 + 3, "reads, what comes first, what comes after updates"
    golden.check()
    assert leave_copy_on_read(golden.graph, Target(DeviceModel())) == 0


@pytest.mark.parametrize(
    ("name", "views"),
    [
        ("swap", 0),
        ("swap_early", 0),
        ("swap_view", 1),
        ("swap_twice", 0),
        ("swap_identity_n", 0),
        ("swap_late_view", 0),
    ],
)
def test_swap(name, views):
    golden = Golden(name)
    graph = golden.graph
    flow = analyse_dataflow(graph.copy(), DeviceModel())
    before = edges(graph), len(graph)
    chain = insert_schedule(graph, Target(DeviceModel()), flow, golden.plan())
    inserted = [node for node in graph if node.op in custom_ops.ALL]
    outs = sum(a.out is not None for a in golden.evictions)
    assert [sum(n.op == op for n in inserted) for op in (custom_ops.SWAP_OUT, custom_ops.RELEASE)] == [outs, outs]
    assert [sum(n.op == op for n in inserted) for op in (custom_ops.SWAP_IN, custom_ops.AWAIT)] == [
        len(golden.evictions)
    ] * 2
    assert (edges(graph), len(graph)) == (before[0], before[1] + len(inserted) + views)
    assert len(chain) == len(golden.arguments) + len(inserted)
    golden.check(f"# chain: {' '.join(node.name for node in chain)}\n")
    # In that order the graph can run, and it is sound.
    chain_nodes(graph, chain)
    assert verify(graph) == len(inserted)
    order = graph.topological()
    places = [order.index(node) for node in chain]
    assert places == sorted(places)


# --- verify: each of its errors -------------------------------------------------------------------------

SOUND = """\
%x = Placeholder() -> float32[4]
%out = Tfswap>SwapOut(%x) -> variant[]
%release = Tfswap>Release(%out)
%in = Tfswap>SwapIn(%out) ^release -> float32[4], variant[]
%await = Tfswap>Await(%in, %in:1) -> float32[4]
%y = Neg(%await) -> float32[4]
feeds %x
fetches %y
"""

CYCLE = "out -> release -> in -> await -> y -> out"
UNSOUND = [
    (
        "float32[4]\n%out = Tfswap>SwapOut(%x)",
        "float32[4]\n%out = Tfswap>SwapOut(%x) ^y",
        "has a cycle: out -> release -> in -> await -> y -> out",
    ),
    ("^release ", "", "nothing keeps 'release' in the graph"),
    ("%release = Tfswap>Release(%out)", "%release = NoOp()", "'out' has 0 releases and 1 reloads"),
    (
        "%in = Tfswap>SwapIn(%out) ^release",
        "%second = Tfswap>Release(%out)\n%in = Tfswap>SwapIn(%out) ^release ^second",
        "'out' has 2 releases and 1 reloads",
    ),
    ("SwapIn(%out) ^release", "SwapIn(%x) ^release", "'out' has 1 releases and 0 reloads"),
    (
        "%in = Tfswap>SwapIn(%out) ^release",
        "%in = Tfswap>SwapIn(%out)",
        "'in' can run before 'release' frees the buffer",
    ),
    ("Neg(%await)", "Neg(%in) ^await", "'in' is read before its copy has ended"),
    ("Neg(%await)", "Neg(%x) ^await", "'await' brings back a tensor that nothing reads"),
]


def test_a_sound_graph_passes():
    assert verify(parse_graph(SOUND)) == 4


@pytest.mark.parametrize(("old", "new", "message"), UNSOUND, ids=lambda value: value if " " in value else "")
def test_an_unsound_graph_is_refused(old, new, message):
    assert SOUND.count(old) == 1
    text = SOUND.replace(old, new)
    if "before 'release'" in message:  # the release is kept, and nothing orders the two
        text += "targets %release\n"
    with pytest.raises(VerificationError) as error:
        verify(parse_graph(text))
    assert message in str(error.value)


def test_a_reload_before_its_release_is_refused_wherever_the_nodes_stand():
    lines = SOUND.replace(" ^release", "").splitlines(keepends=True)
    release = lines.pop(2)
    with pytest.raises(VerificationError, match="'in' can run before 'release'"):
        verify(parse_graph("".join([*lines[:3], release, *lines[3:]]) + "targets %release\n"))


def test_a_fetched_reload_is_read():
    text = SOUND.replace("fetches %y", "fetches %await").replace("%y = Neg(%await) -> float32[4]\n", "")
    assert verify(parse_graph(text)) == 4
