"""Sizes that depend on the values of a step's arguments, computed before the step runs.

Examples are the padded length of a ragged batch (`ragged.to_tensor()`), the length of `tf.range(n)` and that of a mask
of lengths. Where such a size depends on arguments alone, a few nodes of the step compute it before each call, and it is
planned for as the arguments' own sizes are.

The computation keeps the step's limit too. It is small, as a rule: a tensor is not computed for its size where a rule
gives the size (output_sizes.py). A tensor without a rule is computed for its size. How much that takes is not known
before, so on a CPU it takes host memory outside of the arena (csrc/core/host_memory_executor.cc).

Not handled: sizes that depend on variables, on random numbers or on what a loop computes; steps whose gradients are
taken outside, or that run inside of another `tf.function`, where arguments have no values yet. A tensor without a rule
that is computed on a GPU takes the GPU's memory, outside of the limit.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfswap.analysis.phases import backward_nodes
from tfswap.compiler.preconditions import made_at, require_sizes, sizeless
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.exporters.graph_def import export_graph_def
from tfswap.importers.function import import_function
from tfswap.importers.size_bounds import decides_sizes
from tfswap.importers.source_lines import SourceLines
from tfswap.ir.custom_ops import HOST_MEMORY_EXECUTOR
from tfswap.ir.graph import Graph, Output
from tfswap.ir.op_traits import is_const, is_pure
from tfswap.ir.types import TensorType
from tfswap.native.load import load
from tfswap.runtime.captures import deferred, with_placeholders
from tfswap.runtime.output_sizes import SizeRule, size_rule
from tfswap.support.reach import reach
from tfswap.support.sizes import format_bytes

MOST_ROUNDS = 4
"""The most rounds. A round computes sizes that depend on those of earlier rounds."""
MOST_ELEMENTS = 1 << 63
"""Fewer than this are the elements of any tensor."""

Sizes = tuple[tuple[int, ...], ...]

UnderLimit = Callable[[Any], Callable[..., Any]]
"""Puts a `tf.function` under the step's limit."""


class Round(NamedTuple):
    """Sizes that are computed together.

    Attributes:
        computed: the tensors.
        compute: from the trace's arguments, captures included, to their shapes.
    """

    computed: Sequence[Output]
    compute: Callable[[Sequence[Any]], Sizes]


class DataDependentSizes:
    """Computes the sizes of some tensors of a trace from its arguments.

    Args:
        rounds: the rounds, in order.
    """

    def __init__(self, rounds: Sequence[Round]):
        self.rounds = tuple(rounds)

    def sizes(self, concrete: Any, inputs: Sequence[Any]) -> Sizes:
        """The shapes of these tensors in a call with these arguments, which have values."""
        given = [*inputs, *with_placeholders(concrete)]
        return tuple(shape for each in self.rounds for shape in each.compute(given))

    def types(self, sizes: Sizes) -> dict[str, TensorType]:
        """The tensors' types in a plan for these sizes, by name."""
        tensors = [tensor for each in self.rounds for tensor in each.computed]
        return {t.name: TensorType(t.type.dtype, shape) for t, shape in zip(tensors, sizes, strict=True)}


def find_data_dependent_sizes(
    concrete: Any, inputs: Sequence[Any], under_limit: UnderLimit, known: DataDependentSizes | None = None
) -> DataDependentSizes | None:
    """Computes all sizes of a trace that its arguments' shapes leave open, and as many as possible of those that are
    known by a bound only (`tf.unique`). None where there is nothing new, or where sizes of the backward pass stay open.

    Args:
        inputs: the arguments of a call, with values.
        under_limit: puts the function that computes them under the limit.
        known: an earlier result, which computes some of them.

    Raises:
        UnknownSizes: sizes of the forward pass stay open.
    """
    computed = known = known or DataDependentSizes(())
    for _ in range(MOST_ROUNDS):
        types = computed.types(computed.sizes(concrete, inputs))
        graph = import_function(concrete, inputs, types)
        open_ones = (t for t in (*_first_unknown(graph), *_bounded(graph)) if t.name not in types)
        rules = {t: rule for t in open_ones if (rule := _rule(graph, t, concrete)) is not None}
        if not rules:
            unknown = {tensor.node for tensor in sizeless(graph)}
            # A user can declare no size in the backward pass: the refusal of a forward tensor stands.
            if computed is known or (unknown and unknown <= backward_nodes(graph)):
                return None
            # A refusal names a tensor that stays open, and not one whose size is computed by now.
            require_sizes(graph, SourceLines(concrete))
            return computed
        computed = DataDependentSizes(
            (*computed.rounds, Round([*rules], _computing(graph, rules, concrete, under_limit)))
        )
    return None


def follow_from_arguments(concrete: Any, inputs: Sequence[Any]) -> bool:
    """Whether open sizes of a trace depend on its arguments' values alone, so that they can be computed where these
    have values.
    """
    graph = import_function(concrete, inputs)
    return any(_rule(graph, tensor, concrete) is not None for tensor in _first_unknown(graph))


def _first_unknown(graph: Graph) -> list[Output]:
    """The tensors of unknown size that are computed from tensors of known size, and are in no body."""
    unknown = dict.fromkeys(sizeless(graph))
    return [t for t in unknown if _is_own(graph, t) and unknown.keys().isdisjoint(t.node.inputs)]


def _bounded(graph: Graph) -> list[Output]:
    """Tensors of the step itself whose sizes depend on values, and have a known bound."""
    every = (node.out(i) for node in graph if decides_sizes(node.op) for i in range(len(node.outputs)))
    return [tensor for tensor in every if tensor.type.bound]


def _is_own(graph: Graph, tensor: Output) -> bool:
    """Whether a tensor is of the step itself, and of no body."""
    return tensor.node.name in graph and graph[tensor.node.name] is tensor.node


def _rule(graph: Graph, tensor: Output, concrete: Any) -> SizeRule | None:
    """The rule for a tensor's size from the arguments alone; without another one, the tensor itself is computed."""
    rule = size_rule(tensor)
    if rule is None:
        return SizeRule((), lambda shape: shape, tensor) if _follows(graph, (tensor,), concrete) else None
    if rule.of is not None and (shape := _traced_shape(concrete, rule.of)) is not None:
        rule = SizeRule(rule.needed, functools.partial(_with_shape, rule.shape, shape))
    return rule if _follows(graph, _computed(rule), concrete) else None


def _with_shape(of: Callable[..., Any], shape: Sequence[int], *values: Any) -> Any:
    import tensorflow as tf

    return of(tf.constant(shape, tf.int64), *values)


def _computed(rule: SizeRule) -> list[Output]:
    return [*rule.needed] if rule.of is None else [rule.of, *rule.needed]


def _traced_shape(concrete: Any, tensor: Output) -> tuple[int, ...] | None:
    """A tensor's shape where it is the same for all arguments that the trace accepts."""
    try:
        shape = concrete.graph.get_tensor_by_name(tensor.name).shape
    except KeyError:  # in a called function
        return None
    return tuple(shape) if shape.is_fully_defined() else None


def _follows(graph: Graph, tensors: Sequence[Output], concrete: Any) -> bool:
    """Whether tensors depend on the step's arguments alone."""
    unknown = deferred(concrete)
    feeds = {
        feed
        for feed, late in zip(graph.feeds, unknown, strict=True)
        if not late and all(kind.dtype != "resource" for kind in feed.outputs)
    }
    needed = reach(
        (tensor.node for tensor in tensors), lambda node: () if node in feeds else [source for source, _ in node.inputs]
    )
    return all(
        node in feeds or ((is_pure(node.op) or is_const(node.op)) and node not in graph.bodies) for node in needed
    )


def _computing(
    graph: Graph, rules: Mapping[Output, SizeRule], concrete: Any, under_limit: UnderLimit
) -> Callable[[Sequence[Any]], Sizes]:
    """A function from a trace's arguments to the shapes of tensors that depend on them."""
    import tensorflow as tf
    from tensorflow.python.framework import errors

    locate = SourceLines(concrete)
    part = graph.copy()
    for node in part:
        node.controls = ()  # checks, which the step makes itself
    part.targets = []
    names = [t.name for rule in rules.values() for t in _computed(rule)]
    part.fetches = list(map(part.tensor, names))
    feeds = [feed.name for feed in graph.feeds]
    part.feeds = []
    part.prune()
    used = [position for position, name in enumerate(feeds) if name in part]
    graph_def = export_graph_def(part)

    def sizes(*given: Any) -> Any:
        fed = {f"{feeds[position]}:0": value for position, value in zip(used, given, strict=True)}
        made = iter(tf.graph_util.import_graph_def(graph_def, input_map=fed, return_elements=names, name=""))
        shapes = []
        for rule in rules.values():
            of = [] if rule.of is None else [tf.shape(next(made), tf.int64)]
            shapes.append(tf.cast(rule.shape(*of, *(next(made) for _ in rule.needed)), tf.int64))
        return shapes

    specs = [tf.TensorSpec(concrete.inputs[p].shape, concrete.inputs[p].dtype) for p in used]
    compute = tf.function(sizes, input_signature=specs, autograph=False)
    is_open = any(rule.of == tensor for tensor, rule in rules.items())
    # A concrete function, since TensorFlow counts traces of others, and would warn users of retracing.
    compute = _in_host_memory(compute.get_concrete_function()) if is_open else under_limit(compute)

    def run(given: Sequence[Any]) -> Sizes:
        try:
            shapes = compute(*(given[p] for p in used))
        except errors.OpError as error:
            raise _located(error, locate) from None
        except InfeasibleMemoryLimit as error:
            raise _refusal(error, [*rules], locate) from None
        found = tuple(tuple(shape.numpy().tolist()) for shape in shapes)
        for tensor, shape in zip(rules, found, strict=True):
            if math.prod(shape) >= MOST_ELEMENTS:
                shaped = f"{tensor.name!r}{made_at(tensor.node.name, locate)} would have the shape {list(shape)}"
                raise errors.InvalidArgumentError(None, None, f"{shaped}, of more than 2**63 - 1 elements.")
        return found

    return run


def _in_host_memory(concrete: Any) -> Callable[..., Any]:
    """A function of the same results whose kernels take none of a CPU's arena."""
    import tensorflow as tf

    load()

    def run(*given: Any) -> Any:
        with tf.experimental.function_executor_type(HOST_MEMORY_EXECUTOR):
            return concrete(*given)

    return run


def _located(error: Any, locate: SourceLines) -> Exception:
    """TensorFlow's error at a node that sizes are computed by, with the user's source line of that node."""
    line = next(filter(None, map(locate, re.findall(r"\{\{node ([^}]+)\}\}", error.message))), None)
    message = error.message.rpartition("<stack traces unavailable>\n")[2].strip()
    where = f" It is made at {line}." if line else ""
    return type(error)(None, None, f"{message}\nA size in the step depends on it.{where}")


def _refusal(error: InfeasibleMemoryLimit, computed: Sequence[Output], locate: SourceLines) -> InfeasibleMemoryLimit:
    """The refusal where the computation of sizes does not fit."""
    others = f", and of {len(computed) - 1} others" if len(computed) > 1 else ""
    return InfeasibleMemoryLimit(
        f"memory_limit is {error.limit_bytes} bytes ({format_bytes(error.limit_bytes)}), and to compute the size of "
        f"{computed[0].name!r}{made_at(computed[0].node.name, locate)}{others}, before the step runs takes at least "
        f"{error.floor_bytes} ({format_bytes(error.floor_bytes)}), since it depends on the arguments' values. "
        f"Declare the shape at that line (tf.ensure_shape), give memory_limit={error.floor_bytes} or more, "
        "or make the batch smaller.",
        floor_bytes=error.floor_bytes,
        limit_bytes=error.limit_bytes,
    )


def have_values(inputs: Sequence[Any]) -> bool:
    """Whether these arguments have values."""
    from tensorflow.python.framework import ops

    return all(isinstance(each, ops.EagerTensor) for each in inputs)
