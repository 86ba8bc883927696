"""IR to ConcreteFunction: the rewritten graph behind the original's signature and captures."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfswap.exporters.function_def import BodyFunctions, grappler_off_config
from tfswap.exporters.graph_def import export_graph_def
from tfswap.importers.function import own_outputs
from tfswap.importers.opaque_calls import library_functions
from tfswap.importers.source_lines import SourceLines
from tfswap.ir.custom_ops import EXECUTOR
from tfswap.ir.graph import Graph, Node
from tfswap.kernels.fused import BLOCK
from tfswap.native.forks import note_step
from tfswap.native.parts import parts
from tfswap.support.gc_pause import without_collector

log = logging.getLogger("tfswap")

WATCHED = (
    "a gradient tape watches this call from outside, and {why}. So it runs as it was traced, without its memory limit. "
    "{remedy}, or take the gradients inside the function that is optimized; or, if none are wanted, call it outside of "
    "the tape or under tape.stop_recording()."
)
CONCRETE = WATCHED.format(
    why="the gradients of what get_concrete_function() gives are not planned", remedy="Call the function itself"
)


@without_collector
def export_function(
    graph: Graph, original: Any, saved: Callable[[], Any] | None = None, *, refers_to: Sequence[Any] = ()
) -> Any:
    """A ConcreteFunction that runs `graph`, with the signature and captures of `original`.

    Args:
        saved: gives the ConcreteFunction that replaces it in a file whose signature calls it.
        refers_to: ConcreteFunctions that attributes of `graph` name, and no kernel runs: a file has them too.

    Feeds and fetches of `graph` stand in the order of `original.graph.inputs` and `own_outputs(original)`.
    """
    made, bodies = trace(graph, f"{original.graph.name}_tfswap", original.graph.inputs)
    for function in refers_to:
        function.add_to_graph(made)
    return called_as(original, made, bodies, saved)


def called_as(
    original: Any,
    made: Any,
    bodies: BodyFunctions | None = None,
    saved: Callable[[], Any] | None = None,
    *,
    is_step: bool = True,
) -> Any:
    """A ConcreteFunction that runs the FuncGraph `made`, with the signature and captures of `original`.

    Args:
        bodies: the functions of loops and conditionals of `made`.
        saved: as of `export_function`.
        is_step: whether it is executed as a planned step, not as other functions of TensorFlow.
    """
    _give_interface(made, original)
    atomic, body_names = runnable(made, bodies or BodyFunctions(), original, original.function_type)
    result = _planned_function()(atomic, original, saved, is_step)
    note_step(result, original.graph.name)
    weakref.finalize(result, unregister, body_names).atexit = False
    return result


def _give_interface(made: Any, original: Any) -> None:
    """Give a FuncGraph the structure, the captures and the handle data of a trace."""
    from tensorflow.python.ops import handle_data_util

    source = original.graph
    placeholders, outputs = made.inputs, made.outputs
    for output, tensor in zip(outputs, own_outputs(original), strict=True):
        handle_data_util.copy_handle_data(tensor, output)
    made.structured_outputs = source.structured_outputs
    made.structured_input_signature = source.structured_input_signature
    made._weak_variables = [*source._weak_variables]  # of a loaded model they may be gone, and captures keep the values
    inner = {id(tensor): placeholder for tensor, placeholder in zip(source.inputs, placeholders, strict=True)}
    for external, internal in source.captures:
        made.replace_capture(external, inner[id(internal)])
    for key, internal in source.function_captures.by_ref_internal.items():
        if key not in source.function_captures.by_val_internal and id(internal) in inner:
            made._function_captures.add_or_replace(
                key=key,
                external=source.function_captures.by_ref_external[key],
                internal=inner[id(internal)],
                is_by_ref=True,
            )


@functools.cache
def _planned_function() -> Any:
    """The class of a ConcreteFunction whose calls keep Grappler off: the planned graph runs as it is."""
    from tensorflow.python.eager import context, execute
    from tensorflow.python.eager.polymorphic_function import atomic_function
    from tensorflow.python.framework import errors
    from tensorflow.python.saved_model import save_context

    class OptimizedFunction(_differentiated()):
        def __init__(self, atomic: Any, original: Any, saved: Callable[[], Any] | None, is_step: bool):
            super().__init__(atomic, original)
            self._saved, self._is_step = saved, is_step
            # `run` follows AtomicFunction.call_flat and Context.call_function.
            self._op, self._result_count = atomic.name.decode(), len(atomic.function_type.flat_outputs)
            self._attributes = call_attributes()
            self._explained = atomic_function.InterpolateRuntimeError(atomic)
            self._pack = atomic.function_type.output.from_tensors
            # `run` leaves to TensorFlow the handle data of results, and captures that each call computes.
            gives_handles = any(kind.dtype._handle_data for kind in atomic.function_type.flat_outputs)
            self._needs_more = gives_handles or any(map(callable, self._captured_inputs))
            self._step_captures = () if self._needs_more else self.captured_inputs

        def _call_flat(self, tensor_inputs: Any, captured_inputs: Any) -> Any:
            if self._saved is not None and save_context.in_save_context():
                return self._saved()._call_flat(tensor_inputs, captured_inputs)
            with _called_with(_step_options()) if self._is_step else contextlib.nullcontext():
                return super()._call_flat(tensor_inputs, captured_inputs)

        def run(self, tensor_inputs: Any) -> Any:
            """As `_call_flat`, without TensorFlow's work for tapes, for graphs being built and for cancellation.

            Of a small step's call that is the larger part (benchmarks/call_overhead.py).
            """
            if self._needs_more:
                return self._call_flat(tensor_inputs, self.captured_inputs)
            return self._pack(iter(self.call([*tensor_inputs, *self._step_captures])))

        def call(self, tensors: Sequence[Any]) -> list[Any]:
            """Run it immediately, captures included in `tensors`; returns flat results."""
            try:
                return execute.execute(self._op, self._result_count, [*tensors], self._attributes, context.context())
            except errors.OpError:
                with self._explained:
                    raise

    return OptimizedFunction


@functools.cache
def _differentiated() -> Any:
    """The class of a substitute whose gradients are the trace's: a rewritten graph has no custom gradients."""
    from tensorflow.python.ops import gradients_util

    class Differentiated(substitute()):
        def _select_forward_and_backward_functions(
            self, args: Any, possible_gradient_type: Any, executing_eagerly: bool
        ) -> Any:
            watched = possible_gradient_type != gradients_util.POSSIBLE_GRADIENT_TYPES_NONE
            if watched:
                log.warning("tfswap: %s: %s", self._original.graph.name, CONCRETE)
            function = self._original if watched else super()
            return function._select_forward_and_backward_functions(args, possible_gradient_type, executing_eagerly)

        def _get_gradient_function(self) -> Any:
            return self._original._get_gradient_function()

    return Differentiated


def trace(graph: Graph, name: str, arguments: Sequence[Any]) -> tuple[Any, BodyFunctions]:
    """A FuncGraph of `graph`, and the functions of its loops and conditionals.

    Args:
        name: of the FuncGraph.
        arguments: what its arguments are like, feed by feed: tensors or specs.
    """
    from tensorflow.python.framework import func_graph as func_graph_module
    from tensorflow.python.framework import importer
    from tensorflow.python.ops import array_ops

    from tfswap.native.load import load_for

    load_for(node for part in (graph, *graph.all_bodies()) for node in part)
    made = func_graph_module.FuncGraph(name)
    names = _argument_names(graph)
    with made.as_default():
        placeholders = placeholders_like(arguments, [names[node] for node in graph.feeds])
        bodies = BodyFunctions()
        fed = {node.name: p for node, p in zip(graph.feeds, placeholders, strict=True)}
        waited_for = fed.keys() & {source.name for node in graph for source in node.controls}
        returned: Any = importer.import_graph_def(
            export_graph_def(graph, bodies),
            input_map={f"{name}:0": p for name, p in fed.items()} | {f"^{name}": fed[name] for name in waited_for},
            return_elements=[f.name for f in graph.fetches] + [t.name for t in graph.targets],
            name="",
        )
        results = list(returned[: len(graph.fetches)])
        named: set[int] = set()
        for number, result in enumerate(results):
            if id(result) in named:  # TensorFlow takes no names where two are the same
                results[number] = array_ops.identity(result)
            named.add(id(result))
    bodies.made |= {name: f for name, f in library_functions(graph).items() if name.startswith(BLOCK)}
    made.inputs = placeholders
    made.outputs = results
    made._output_names = _result_names(graph, made.outputs)
    made.control_outputs = list(returned[len(graph.fetches) :])
    return made, bodies


def placeholders_like(arguments: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Placeholders of these names in the graph that is being built, one like each argument: a tensor or a spec."""
    from tensorflow.python.eager import graph_only_ops
    from tensorflow.python.framework.ops import is_symbolic_tensor
    from tensorflow.python.ops import handle_data_util

    placeholders: list[Any] = []
    for like, name in zip(arguments, names, strict=True):
        placeholder = graph_only_ops.graph_placeholder(like.dtype, like.shape, name=name)
        if is_symbolic_tensor(like):
            handle_data_util.copy_handle_data(like, placeholder)
        placeholders.append(placeholder)
    return placeholders


def _kernel_names(node: Any) -> list[str]:
    """TensorFlow's names of nodes in errors: their own, or those of the nodes that they are part of."""
    return [part.name for part in parts(node)] or [node.name]


def runnable(made: Any, bodies: BodyFunctions, original: Any, function_type: Any = None) -> tuple[Any, list[str]]:
    """The AtomicFunction that runs a FuncGraph, and the names of its bodies' functions, for `unregister`.

    Args:
        original: the trace that the graph was made from.
        function_type: derived from the graph where it is None.
    """
    from tensorflow.python.eager.polymorphic_function import atomic_function, concrete_function

    body_names = list(bodies.made)
    _register(list(bodies.made.values()))
    name = concrete_function._inference_name(made.name)
    atomic = atomic_function.from_func_graph(name, made, {"_noinline": True}, function_type)
    runtime, children, call = atomic._bound_context, atomic.children, atomic._call_options
    found = _traced_elsewhere()(atomic.name, runtime, atomic.function_type, children, call, made)
    found.tfswap_nodes = made, body_names, original
    return found, body_names


@functools.cache
def _traced_elsewhere() -> Any:
    """The class of an AtomicFunction that runs a graph made from a trace. Errors get a failing node's source line.

    One class for all, as of `runtime/open_function.py`.
    """
    from tensorflow.python.eager.polymorphic_function import atomic_function

    class TracedElsewhere(atomic_function.AtomicFunction):
        tfswap_nodes: tuple[Any, list[str], Any]
        """The FuncGraph, the names of its bodies' functions, and the trace."""

        @property
        def graph_debug_info(self) -> Any:
            made, body_names, original = self.tfswap_nodes
            nodes = [op.node_def for op in made.get_operations()]
            nodes += [node for name in body_names for node in self._bound_context.get_function_def(name).node_def]
            return SourceLines(original).debug_info(name for node in nodes for name in _kernel_names(node))

    return TracedElsewhere


@functools.cache
def call_attributes() -> tuple[Any, ...]:
    """The attributes of calls of such a function, in the runtime's form."""
    options: Any = _step_options()
    return tuple(itertools.chain(*options.as_attrs().items()))


@functools.cache
def substitute() -> Any:
    """The class of a ConcreteFunction that is called in place of a trace."""
    from tensorflow.python.eager.polymorphic_function import concrete_function
    from tensorflow.python.saved_model import save_context

    class Substitute(concrete_function.ConcreteFunction):
        """An object that holds it is saved with the trace, as one that holds an optimized `tf.function` is.

        Where a file is loaded nothing keeps Grappler off a function's own nodes, and the plan would not be what runs.
        (A signature calls its function, and the call says so.)
        """

        def __init__(self, atomic: Any, original: Any):
            super().__init__(atomic)
            self._original = original
            # Its positional and keyword parameters, which its function type alone does not have.
            self._arg_keywords = original._arg_keywords
            self._num_positional_args = original._num_positional_args

        @property
        def name(self) -> Any:
            return self._original.name if save_context.in_save_context() else super().name

        def _export_to_saved_model_graph(self, object_map: Any, tensor_map: Any, **options: Any) -> Any:
            made = self._original._export_to_saved_model_graph(object_map, tensor_map, **options)
            object_map[self] = object_map[self._original]
            return made

    return Substitute


def _argument_names(graph: Graph) -> dict[Node, str]:
    """What to call the feeds, so that TensorFlow, which they are made in first, leaves all other names as they are.

    It takes a name for a scope ("a" of the node "a/b" that is there), and then renames a node that is called so.
    """
    taken = {node.name for node in graph}
    scopes = {scope for name in taken for scope in _scopes(name)}
    names: dict[Node, str] = {}
    for feed in graph.feeds:
        name = feed.name
        if any(scope in taken for scope in _scopes(name)):
            name = name.replace("/", "_")
            while name in taken or name in scopes:
                name += "_"
        taken.add(name)
        names[feed] = name
    return names


def _result_names(graph: Graph, results: Sequence[Any]) -> dict[Any, str]:
    """Names of the results. TensorFlow gives them the names of their nodes, and then renames these nodes."""
    from tensorflow.python.framework.ops import tensor_id

    taken = {node.name for node in graph}
    prefix = "result"
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    return {tensor_id(result): f"{prefix}{number}" for number, result in enumerate(results)}


def _scopes(name: str) -> list[str]:
    """The scopes that a node is in: "a" and "a/b" for "a/b/c"."""
    parts = name.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


_users: Counter[str] = Counter()
"""Functions that run `name`, for the bodies of loops and conditionals, whose names identify their content."""


def _register(functions: Sequence[Any]) -> None:
    """Register these functions by name, as functions of a traced graph."""
    from tensorflow.python.eager import context

    for function in functions:
        if not _users[function.signature.name]:
            context.context().add_function_def(function)
        _users[function.signature.name] += 1


def unregister(names: Sequence[str]) -> None:
    from tensorflow.python.eager import context

    for name in names:
        _users[name] -= 1
        if not _users[name] and context.context().has_function(name):
            context.context().remove_function(name)


@functools.cache
def _step_options() -> Any:
    """The options of calls of such functions: Grappler off, and the executor."""
    from tensorflow.python.eager import context

    return context.FunctionCallOptions(executor_type=EXECUTOR, config_proto=grappler_off_config())


def grappler_off() -> contextlib.AbstractContextManager[None]:
    """While active, functions that this thread calls run with Grappler's optimizers off."""
    from tensorflow.python.eager import context

    config = grappler_off_config()
    config.allow_soft_placement = True  # as functions have it by default
    return _called_with(context.FunctionCallOptions(config_proto=config))


def memory_optimizer_off() -> contextlib.AbstractContextManager[None]:
    """While active, functions that this thread calls run without Grappler's memory optimizer. That optimizer leaves the
    order of sums open, so that last bits differ from run to run: an optimized step's values are compared with runs
    without it.
    """
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
    from tensorflow.python.eager import context

    config = config_pb2.ConfigProto(allow_soft_placement=True)
    config.graph_options.rewrite_options.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    return _called_with(context.FunctionCallOptions(config_proto=config))


@contextlib.contextmanager
def _called_with(options: Any) -> Iterator[None]:
    from tensorflow.python.eager import context

    here = context.context()
    before = here.function_call_options
    here.function_call_options = options
    try:
        yield
    finally:
        here.function_call_options = before
