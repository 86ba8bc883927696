"""Refuses steps whose memory can't be predicted before they run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from tfswap.analysis.collectives import spans_workers
from tfswap.analysis.pipelines import element_types
from tfswap.errors import InvalidModel, UnsupportedGraph
from tfswap.importers.library_function import import_library_function
from tfswap.importers.opaque_calls import library_functions, opaque_calls
from tfswap.importers.size_bounds import gives_shape_values
from tfswap.ir.custom_ops import RECEIVE
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import (
    calls_functions,
    control_flow,
    has_small_extras,
    is_collective,
    is_frame,
    loops_over_dataset,
    reads_metadata_only,
    sized_by_value,
    takes_from_pipeline,
)
from tfswap.simulator.bfc_allocator import UNBOUNDED_BYTES
from tfswap.support.sizes import format_bytes

SMALL = 1024
"""The bytes of a small tensor. Tensors of unknown size computed from small ones, mostly shapes, count as small. An
opaque call is allowed where all tensors of its function are small."""

Locate = Callable[[str], str | None]


class UnknownSizes(UnsupportedGraph):
    """The step has tensors whose sizes its arguments' shapes do not give.

    Args:
        what: a sentence.
        remedy: what to do about it.
    """

    def __init__(self, what: str, remedy: str):
        super().__init__(f"{what} {remedy}")
        self.what = what


def made_at(name: str, locate: Locate) -> str:
    """The source line of a node, as a part of a sentence; "" where it is unknown."""
    line = locate(name)
    return f", made at {line}" if line else ""


def require_functional(graph: Graph, locate: Locate) -> None:
    """Refuse conditionals whose branches are nodes of the graph itself. Raises UnsupportedGraph.

    The executor passes along each edge that nodes of the other branch are dead. With control edges of one order, all
    later kernels would be dead.
    """
    for part in (graph, *graph.all_bodies()):
        for node in part:
            if is_frame(node.op):
                where = made_at(node.name, locate)
                raise UnsupportedGraph(
                    f"node {node.name!r} ({node.op}{where}) is of a TensorFlow 1 conditional. Rebuild the graph with "
                    "tf.compat.v1.enable_control_flow_v2(), which keeps conditionals as If nodes."
                )


def require_sizes(graph: Graph, locate: Locate) -> None:
    """Refuse a graph with a tensor whose bytes are unknown. Raises UnknownSizes."""
    unknown = sizeless(graph)
    if unknown:
        first = unknown[0]
        where = made_at(first.node.name, locate)
        others = f", nor are those of {len(unknown) - 1} others" if len(unknown) > 1 else ""
        raise UnknownSizes(
            f"the size of {first.name!r} ({first.node.op}, {first.type}{where}) is not known before the step runs"
            f"{others}.",
            _remedy_of_size(graph, first, has_line=bool(where)),
        )


def require_countable(graph: Graph, resident_bytes: int) -> None:
    """Refuse a step whose bytes exceed what the allocator's replay can count. Raises UnsupportedGraph.

    Args:
        resident_bytes: bytes in the arena before the step.
    """
    kinds = (kind for part in (graph, *graph.all_bodies()) for node in part for kind in node.outputs)
    total_bytes = resident_bytes + sum(kind.nbytes or 0 for kind in kinds)
    if total_bytes >= UNBOUNDED_BYTES // 2:
        raise UnsupportedGraph(
            f"the step's tensors and variables take {format_bytes(total_bytes)}, more than any device has: check "
            "batch_size=, input_shapes= and the shapes of variables"
        )


IN_LIBRARY = (
    "call it outside of the step and pass its result as an argument, or write it as a tf.while_loop with "
    "maximum_iterations=; in place of tf.vectorized_map, call the mapped function on the whole batch, or by tf.map_fn"
)
"""The remedy for a library's function that has a loop without bound."""


def bound_of_loop(loop: str, locate: Locate) -> str:
    """The remedy for a loop without a bound of its iterations, with its source line."""
    line = locate(loop)
    return (
        "Give the loop a bound that does not depend on computed values: maximum_iterations= of tf.while_loop, or, for "
        "a Python loop, of tf.autograph.experimental.set_loop_options. If the loop is inside of a library function, as "
        f"in tf.linalg.expm, {IN_LIBRARY}; or take no gradients through it (tf.stop_gradient), so that it saves no "
        "tensors." + (f" The loop is made at {line}." if line else "")
    )


def _remedy_of_size(graph: Graph, first: Output, *, has_line: bool) -> str:
    """The remedy for a tensor of unknown size.

    Args:
        has_line: whether the user's source line is known. In a file it is not, and the op may be a library's.
    """
    node = first.node
    if node in graph.feeds or any(feed.outputs[0].nbytes is None for feed in graph.feeds):
        return (
            "If the inputs' sizes are open, give them (batch_size= or input_shapes=, tensors of full shape, or in a "
            "data pipeline batch(..., drop_remainder=True)). If TensorFlow can't infer the shape of an op's result, as "
            "of py_function, declare it at that line: y = tf.ensure_shape(y, [...]), or y.set_shape([...])."
        )
    taken = (n for part in (graph, *graph.all_bodies()) for n in part if takes_from_pipeline(n.op))
    if any(kind.nbytes is None for n in taken for kind in element_types(n)):
        return (
            "The step takes its batches from an iterator whose spec leaves their size open. Make all batches of one "
            "size, batch(..., drop_remainder=True), or pass each batch to the step: step(next(iterator))."
        )
    if spans_workers([graph]) and any(is_collective(n.op) and gives_shape_values(n.op) for n in graph):
        return (
            "The step gathers tensors of all workers, whose sizes are not known here. Make sparse gradients, as of an "
            "embedding, dense before replicas add them up: tf.convert_to_tensor(gradient). Or reduce tensors of known "
            "sizes in place of gathering them."
        )
    if node.op == RECEIVE:
        return (
            "A kernel on another device makes this tensor, and its size must be known to send it. Run the kernels that "
            "read it on that device: take the gradient within its tf.device, too. Recurrent layers of Keras do without "
            "cuDNN's saved tensors with use_cudnn=False."
        )
    kind = control_flow(node.op)
    if kind is not None and kind.is_loop:
        return (
            "The inputs' sizes are known, but the loop gives this one another shape in each iteration. Keep its shape: "
            "write the result of each iteration into a tf.TensorArray, or into a part of a tensor that has its full "
            f"size before the loop. If the loop is inside of a library function, {IN_LIBRARY}."
        )
    if any(t.type.dtype == "variant" for t in node.inputs):
        return (
            "The inputs' sizes are known, but how many elements this list gets, or how large they are, depends on "
            "computed values. Give the tf.TensorArray its size (size=, without dynamic_size=True), and its loop a "
            "number of iterations that follows from shapes; or declare the shape of the tensor that is made of the "
            "list: y = tf.ensure_shape(array.concat(), [...]). If the list is inside of a library function, "
            f"{IN_LIBRARY}."
        )
    if not has_line:
        return (
            "The inputs' sizes are known, but this one depends on values, of the arguments or computed, and a file has "
            "shapes only. If a line of your code makes this tensor, with one size in every step, declare its shape and "
            "save the model anew: y = tf.ensure_shape(y, [...]). If a library function makes it, as "
            "tf.nn.safe_embedding_lookup_sparse does, give its sparse arguments a full shape "
            "(tf.SparseTensorSpec([64, 5]) in the input_signature), or decorate the step with tfswap.optimize in the "
            "process that trains: sizes that follow from the arguments are computed before each call there."
        )
    return (
        "The inputs' sizes are known, but this one depends on computed values, or TensorFlow can't infer the shape of "
        "the op's result. If it has one size in every step, declare its shape at that line: "
        "y = tf.ensure_shape(y, [...]), or y.set_shape([...]). Otherwise pad or cut it to one size: "
        "ragged.to_tensor(shape=[...]), tf.sequence_mask(n, maxlen) in place of tf.range(n); or compute it outside of "
        "the step and pass it as an argument."
    )


def require_sight(graph: Graph, locate: Locate) -> None:
    """Refuse a graph with opaque calls, unless all their tensors are small. Raises UnsupportedGraph."""
    hidden = list(opaque_calls(graph))
    library = library_functions(graph) if hidden else {}
    for node, names in hidden:
        for name in names:
            held = _held(node, name, library)
            if held is None:
                continue
            where = made_at(node.name, locate)
            raise UnsupportedGraph(
                f"{node.name!r} ({node.op}{where}) runs the function {name!r} outside of the graph: it holds {held}, "
                f"which no graph rewrite can bound. {_remedy(node)}"
            )


def _remedy(node: Node) -> str:
    if loops_over_dataset(node.op):
        return (
            "It is a loop over a dataset inside of the step (`for x in dataset:`, or `dataset.reduce`). Optimize the "
            "function that trains on one batch, and loop outside of it; or loop over an iterator, `it = iter(dataset)` "
            "made outside: `for _ in range(n): step(next(it))`."
        )
    return (
        "Write its body into the step, call it as a plain tf.function (one that TensorFlow inlines: without _noinline "
        "or the like among its attributes), or call it outside of the step."
    )


def _held(node: Node, name: str, library: Mapping[str, Any]) -> str | None:
    """The large or unknown tensors of a function that `node` runs, as text; None if all are small."""
    if name not in library:
        return "what is not known here"
    arguments = library[name].signature.input_arg
    passed = zip(arguments, node.inputs, strict=False) if calls_functions(node.op) else ()
    try:
        body = import_library_function(library, name, {a.name: t.type.shape for a, t in passed})
    except (UnsupportedGraph, InvalidModel) as error:
        return f"what can't be inspected ({error})"
    parts = (body, *body.all_bodies())
    if unknown := _sizeless(body, body.feeds):
        return f"tensors whose size is not known before the step runs ({unknown[0].name!r}, {unknown[0].type})"
    largest = max((t for part in parts for n in part for t in map(n.out, range(len(n.outputs)))), key=_nbytes)
    if _nbytes(largest) > SMALL:
        return f"tensors of up to {format_bytes(_nbytes(largest))} ({largest.name!r}, {largest.type})"
    inside = library_functions(body)
    return next((held for n, names in opaque_calls(body) for m in names if (held := _held(n, m, inside))), None)


def _is_small(tensor: Output) -> bool:
    """Whether a tensor is known to be small. A list is not: its elements can be of any size."""
    return tensor.type.dtype != "variant" and tensor.type.nbytes is not None and tensor.type.nbytes < SMALL


def _nbytes(tensor: Output) -> int:
    return tensor.type.nbytes or 0


def sizeless(graph: Graph) -> list[Output]:
    """Tensors of a step and its bodies whose size is unknown and may be large."""
    return _sizeless(graph, graph.feeds)


def _sizeless(graph: Graph, small_feeds: Iterable[Node]) -> list[Output]:
    """Tensors of a graph and its bodies whose size is unknown and may be large. The first one is the cause.

    Args:
        small_feeds: feeds that are small, although their size may be unknown.
    """
    small = {feed.out() for feed in small_feeds if feed.outputs[0].nbytes is None}
    unknown: list[Output] = []
    for node in graph.topological():
        unknown += _sizeless_inside(graph, node, small)
        sizeless = [node.out(i) for i, kind in enumerate(node.outputs) if kind.nbytes is None]
        if not sizeless or node.out() in small:
            continue
        if _stays_small(node, sizeless, small):
            small.update(sizeless)
        else:
            unknown += sizeless
    return unknown


def _stays_small(node: Node, sizeless: Sequence[Output], small: Collection[Output]) -> bool:
    """Whether outputs of unknown size are small because all inputs are: arithmetic on shapes, a few integers.

    Not so for elements of a resource (a variable, a queue, an iterator), and for outputs that may have as many elements
    as the product of two inputs: rows for each index, or padded rows.
    """
    takes_resource = any(t.type.dtype == "resource" for t in node.inputs)
    if sized_by_value(node.op) or (takes_resource and not reads_metadata_only(node.op)):
        return False
    if has_small_extras(node.op):
        return True
    if not node.inputs or not all(t in small or _is_small(t) for t in node.inputs):
        return False
    vectors = all(t.type.shape is not None and len(t.type.shape) <= 1 for t in sizeless)
    return vectors or sum(t.type.shape != () for t in node.inputs) <= 1


def _sizeless_inside(graph: Graph, node: Node, small: Collection[Output]) -> list[Output]:
    """`_sizeless` for the bodies of `node`; first, the loop variables whose shape changes between iterations."""
    kind = control_flow(node.op)
    if kind is None or node not in graph.bodies:
        return []
    passed = node.inputs[kind.first_argument :]
    unknown = [
        node.out(i)
        for i, (feed, given) in enumerate(zip(graph.bodies[node][-1].feeds, passed, strict=True))
        if kind.is_loop and feed.outputs[0].nbytes is None and given.type.nbytes is not None and given not in small
    ]
    for body in graph.bodies[node]:
        pairs = zip(body.feeds, passed, strict=True)
        unknown += _sizeless(body, [feed for feed, given in pairs if given in small or _is_small(given)])
    return unknown
