"""Sizes that hang on what a step's arguments hold, told before it runs.

How long the rows of a ragged batch are when they are padded (`ragged.to_tensor()`), how far `tf.range(n)` goes or a
mask of lengths: shapes do not say it. Where such a size follows from arguments alone it is computed before each call,
by those few nodes of the step, and planned for as the arguments' own sizes are.

Not handled: sizes that hang on variables, on random numbers or on what a loop computes; steps whose gradients are taken
outside, or that run inside of another `tf.function`, where arguments have no values yet. Nor does a plan know of what
is computed to tell sizes: padded batches, and what is made from ranges, are in the arena for that moment, before the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfswap.exporters.graph_def import export_graph_def
from tfswap.frontends.captures import without_asking
from tfswap.frontends.known import sizeless
from tfswap.importers.function import import_function
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.ops import is_const, is_pure
from tfswap.ir.types import TensorType

MOST_ROUNDS = 4
"""What has been told tells what else is open: from one to the next at most so often."""

Sizes = tuple[tuple[int, ...], ...]


class ToldSizes:
    """Tells the sizes of some tensors of a trace from its arguments.

    Args:
        rounds: of what is told, in order: the tensors, and a function from the trace's arguments, captures included, to
            their shapes.
    """

    def __init__(self, rounds: Sequence[tuple[Sequence[Output], Callable[[Sequence[Any]], Sizes]]]):
        self._rounds = rounds

    def sizes(self, concrete: Any, inputs: Sequence[Any]) -> Sizes:
        """The shapes of these tensors in a call with these arguments, which have values."""
        given = [*inputs, *without_asking(concrete)]
        return tuple(shape for _, compute in self._rounds for shape in compute(given))

    def types(self, sizes: Sizes) -> dict[str, TensorType]:
        """What a plan for these sizes supposes of the tensors, by their names."""
        tensors = [tensor for told, _ in self._rounds for tensor in told]
        return {t.name: TensorType(t.type.dtype, shape, True) for t, shape in zip(tensors, sizes, strict=True)}


def find_told_sizes(concrete: Any, inputs: Sequence[Any]) -> ToldSizes | None:
    """What tells all sizes of a trace that its arguments' shapes leave open; None where these don't tell all.

    Args:
        inputs: the arguments of a call, with values.
    """
    rounds: list[tuple[Sequence[Output], Callable[[Sequence[Any]], Sizes]]] = []
    for _ in range(MOST_ROUNDS):
        told = ToldSizes(rounds)
        known = told.types(told.sizes(concrete, inputs))
        graph = import_function(concrete, inputs, known)
        unknown = dict.fromkeys(sizeless(graph))
        if not unknown:
            return told if rounds else None
        first = [t for t in unknown if t.name not in known and unknown.keys().isdisjoint(t.node.inputs)]
        first = [t for t in first if _follows(graph, t)]
        if not first:
            return None
        rounds.append((first, _computing(graph, first, concrete)))
    return None


def _follows(graph: Graph, tensor: Output) -> bool:
    """Whether a tensor of the step itself follows from its arguments alone."""
    if tensor.node.name not in graph or graph[tensor.node.name] is not tensor.node:
        return False  # of a body
    feeds = {feed for feed in graph.feeds if all(kind.dtype != "resource" for kind in feed.outputs)}
    pending, seen = [tensor.node], set[Node]()
    while pending:
        node = pending.pop()
        if node in seen or node in feeds:
            continue
        seen.add(node)
        if not (is_pure(node.op) or is_const(node.op)) or node in graph.bodies:
            return False
        pending += (source for source, _ in node.inputs)
    return True


def _computing(graph: Graph, tensors: Sequence[Output], concrete: Any) -> Callable[[Sequence[Any]], Sizes]:
    """A function from a trace's arguments to the shapes of tensors that follow from them."""
    import tensorflow as tf

    part = graph.copy()
    for node in part:
        node.controls = ()  # checks, which the step makes itself
    part.targets = []
    # A range can be of any size: it is told from what it is made from, and not made.
    asked = [tensor.node.inputs if _is_range(tensor) else (tensor,) for tensor in tensors]
    names = [each.name for several in asked for each in several]
    part.fetches = list(map(part.tensor, names))
    feeds = [feed.name for feed in graph.feeds]
    part.feeds = []
    part.prune()
    used = [position for position, name in enumerate(feeds) if name in part]
    graph_def = export_graph_def(part)

    def shapes(*given: Any) -> Any:
        fed = {f"{feeds[position]}:0": value for position, value in zip(used, given, strict=True)}
        made = iter(tf.graph_util.import_graph_def(graph_def, input_map=fed, return_elements=names, name=""))
        found = zip(tensors, [[next(made) for _ in several] for several in asked], strict=True)
        return [_length(*each) if _is_range(tensor) else tf.shape(each[0], tf.int64) for tensor, each in found]

    specs = [tf.TensorSpec(concrete.inputs[p].shape, concrete.inputs[p].dtype) for p in used]
    compute = tf.function(shapes, input_signature=specs, autograph=False)

    def run(given: Sequence[Any]) -> Sizes:
        return tuple(tuple(shape.numpy().tolist()) for shape in compute(*(given[p] for p in used)))

    return run


def _is_range(tensor: Output) -> bool:
    return tensor.node.op == "Range"


def _length(start: Any, limit: Any, delta: Any) -> Any:
    """The shape of a range."""
    import tensorflow as tf

    start, limit, delta = (tf.cast(each, tf.float64) for each in (start, limit, delta))
    return tf.cast(tf.maximum(tf.math.ceil((limit - start) / delta), 0), tf.int64)[None]


def have_values(inputs: Sequence[Any]) -> bool:
    """Whether these arguments have values, by which sizes can be told."""
    from tensorflow.python.framework import ops

    return all(isinstance(each, ops.EagerTensor) for each in inputs)
