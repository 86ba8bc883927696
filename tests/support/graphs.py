"""Graphs for tests, made without TensorFlow: strategies for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st
from layered_steps import Layer, training_step

from tfswap.ir.graph import Dims, Dtype, Graph, Measured, Opaque
from tfswap.ir.types import ELEMENT_BYTES, TensorType

# --- any graph: for what must hold of every one -----------------------------------------------------------

dtypes = st.sampled_from(sorted(ELEMENT_BYTES))
shapes = st.none() | st.lists(st.none() | st.integers(0, 2**40), max_size=4).map(tuple)
tensor_types = st.builds(TensorType, dtypes, shapes)
opaques = st.builds(Opaque, st.sampled_from(("tensor", "attr", "GraphDef")), st.binary(max_size=20))
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.binary(max_size=20)
    | dtypes.map(Dtype)
    | st.lists(st.none() | st.integers(0, 2**40), max_size=4).map(Dims)
)
attributes = scalars | opaques | st.lists(scalars, max_size=3).map(tuple)
facts = st.builds(Measured, st.none() | st.integers(0, 2**40), st.none() | st.floats(0, 100))
plain_names = st.from_regex(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]{0,12}", fullmatch=True)
names = plain_names | st.text(max_size=8)


@st.composite
def any_graphs(draw: st.DrawFn) -> Graph:
    """Acyclic graphs with any attributes, types and names, in any insertion order."""
    graph = Graph()
    made = []
    for name in draw(st.lists(names, unique=True, max_size=8)):
        outputs = draw(st.lists(tensor_types, max_size=3))
        node = graph.add(
            draw(st.sampled_from(("Relu", "Const", "MatMul", "Tfswap>Await", "NoOp", "_Arg"))),
            name,
            attrs=draw(st.dictionaries(names, attributes, max_size=3)),
            outputs=outputs,
            device=draw(st.sampled_from(("", "CPU:0", "/job:localhost/task:0/device:GPU:*"))),
        )
        node.measured = draw(facts)
        node.tape = draw(st.none() | st.binary(max_size=20))
        made.append(node)
    order = draw(st.permutations(made))
    for i, node in enumerate(order):
        before = order[:i]
        readable = [out for other in before for out in map(other.out, range(len(other.outputs)))]
        if readable:
            node.inputs = tuple(draw(st.lists(st.sampled_from(readable), max_size=3)))
        if before:
            node.controls = tuple(draw(st.lists(st.sampled_from(before), max_size=2, unique=True)))
        if draw(st.booleans()):
            graph.small_constants[node] = tuple(draw(st.lists(st.integers(), max_size=2)))
    if made:
        graph.feeds = draw(st.lists(st.sampled_from(made), max_size=2, unique=True))
        graph.targets = draw(st.lists(st.sampled_from(made), max_size=2, unique=True))
        outputs = [node.out(i) for node in made for i in range(len(node.outputs))]
        if outputs:
            graph.fetches = draw(st.lists(st.sampled_from(outputs), max_size=2))
    graph.library = draw(st.none() | opaques)
    return graph


@st.composite
def graphs_with_bodies(draw: st.DrawFn, depth: int = 2) -> Graph:
    """Any graph, of which a node may run other graphs, which may do so in turn, to this depth."""
    graph = draw(any_graphs())
    nodes = list(graph)
    if depth and nodes and draw(st.booleans()):
        bodies = st.lists(graphs_with_bodies(depth - 1), min_size=1, max_size=2)
        graph.bodies[draw(st.sampled_from(nodes))] = tuple(draw(bodies))
    return graph


def contents(graph: Graph) -> list[object]:
    """Everything that a graph says, as plain values with their types, so that == compares it all."""
    return [
        [
            (
                node.name,
                node.op,
                [(t.node.name, t.index) for t in node.inputs],
                [c.name for c in node.controls],
                {key: typed(value) for key, value in node.attrs.items()},
                node.outputs,
                node.device,
                node.measured,
                node.tape,
            )
            for node in graph
        ],
        [node.name for node in graph.feeds],
        [fetch.name for fetch in graph.fetches],
        [node.name for node in graph.targets],
        graph.library,
        {node.name: values for node, values in graph.small_constants.items()},
        {node.name: [contents(body) for body in bodies] for node, bodies in graph.bodies.items()},
    ]


def typed(value: object) -> object:
    if isinstance(value, tuple) and not isinstance(value, (Dims, Opaque)):
        return tuple, [typed(item) for item in value]
    return type(value), value if not isinstance(value, float) else value.hex()


# --- training steps ---------------------------------------------------------------------------------------

layer_kinds = st.sampled_from(("dense", "relu", "scale", "add"))


@st.composite
def training_steps(draw: st.DrawFn, min_layers: int = 2, max_layers: int = 12) -> Graph:
    """Steps of 64 KiB and larger tensors, the smallest that a swap may take."""
    count = draw(st.integers(min_layers, max_layers))
    layers = [Layer(draw(layer_kinds), draw(st.integers(0, max(0, i)))) for i in range(count)]
    return training_step(
        layers,
        rows=draw(st.sampled_from((128, 200, 512))),
        width=draw(st.sampled_from((64, 128, 130))),
        assign=draw(st.booleans()),
    )


def draw_kernels(data: st.DataObject) -> str:
    """A graph of products and element-wise kernels, each of which reads any before it, as text."""
    lines, readable = ["%x = Placeholder() {dtype=float32} -> float32[4,256,256]"], ["x"]
    for i in range(data.draw(st.integers(2, 14))):
        read = data.draw(st.lists(st.sampled_from(readable), min_size=2, max_size=2))
        if data.draw(st.booleans()):
            kernel = f"BatchMatMulV2(%{read[0]}, %{read[1]}) {{adj_x=false, adj_y=false}}"
        else:
            kernel = data.draw(st.sampled_from(["Exp", "Relu", "Neg"])) + f"(%{read[0]})"
        lines.append(f"%n{i} = {kernel} -> float32[4,256,256]")
        readable.append(f"n{i}")
    return "\n".join([*lines, "feeds %x", f"fetches %{readable[-1]}", ""])
