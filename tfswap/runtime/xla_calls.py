"""Functions that XLA compiles inside of a step: they stay as they are, and each call is one kernel in the plan.

XLA does not report the memory that such a call holds while it runs. So it is measured before the step is planned: the
call runs alone, on zeros, in the step's arena, which has room for that wherever a plan has room for the call. The node
records the bytes, and kernels/kernel_memory.py reads them there. The call's time is estimated from the body as it was
traced, so that the same step has the same plan in every process.

Not handled: calls that write variables or have other effects; calls in the bodies of loops and conditionals; steps that
are not planned in the process that runs them, or whose variables that process does not know yet, since they are traced
into another function. These are refused, as all opaque calls are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfswap.analysis.cost import Costs
from tfswap.device import arena
from tfswap.device.live import peak_kept
from tfswap.errors import InvalidModel, UnsupportedGraph
from tfswap.exporters.flat_function import FlatFunction
from tfswap.importers.function import XLA_ATTRIBUTES, compiled_by
from tfswap.importers.inline import CALLS
from tfswap.importers.library_function import import_library_function
from tfswap.importers.opaque_calls import functions_of, library_functions
from tfswap.importers.references import reachable
from tfswap.importers.shapes import HANDLES
from tfswap.ir.graph import SMALL_INTEGERS, Graph, Measured, Node, Output
from tfswap.ir.op_traits import (
    calls_functions,
    is_const,
    is_feed,
    is_pure,
    is_random,
    is_view,
    only_waits,
    reads_variable,
)
from tfswap.ir.types import TensorType
from tfswap.ir.views import origin
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.kernel_memory import kernel_memory
from tfswap.passes.body_values import add_feed

PAGE_BYTES = 4096
"""Temporaries are rounded up to these: tensors of the run before that are freed late hide up to a few small chunks."""


Known = dict[object, tuple[Measured, list[Any]]]
"""What was measured, by the content of functions and what they were called with."""


def measure_compiled(
    graph: Graph,
    concrete: Any,
    given: Sequence[Any],
    device: str,
    model: DeviceModel,
    measured: Known | None = None,
) -> None:
    """Record, in place, at each call of a function that XLA compiles, its temporary bytes and its seconds.

    Args:
        concrete: the trace.
        given: the step's inputs, feed by feed; of tensors only the types matter.
        device: the device in whose arena the step runs ("CPU:0"). Without an arena nothing is measured.
        measured: what was measured for other graphs of the step; what is measured is added.
    """
    if arena.memory_info(device) is None or not any(node.op in CALLS for node in graph):
        return
    library = library_functions(graph)
    handles = zip(graph.feeds, given, strict=True)
    known: dict[Output, Any] = {feed.out(): value for feed, value in handles if _is_handle(feed.out())}
    known |= {node.out(): value for node, value in graph.small_constants.items()}
    measured = {} if measured is None else measured
    for node in graph.topological():
        if node.op not in CALLS or node.measured.temporary_bytes is not None:
            continue
        if not _may_run_alone(name := functions_of(node)[0], library):
            continue
        decides = [known.get(origin(t)) for t in node.inputs]
        if not all(map(_can_be_given, node.inputs, decides)):
            continue
        key = _content(library[name]), tuple(t.type for t in node.inputs), repr(decides)
        if key not in measured:
            temporary_bytes, results = _measured(node, graph, concrete, decides, device, model)
            seconds = node.measured.seconds
            seconds = _body_seconds(node, name, library, model) if seconds is None else seconds
            measured[key] = node.measured._replace(temporary_bytes=temporary_bytes, seconds=seconds), results
        found, results = measured[key]
        node.measured = found._replace(kernels=node.measured.kernels)
        known |= {node.out(i): value for i, value in enumerate(results) if value is not None}


def _may_run_alone(name: str, library: Mapping[str, Any]) -> bool:
    """Whether XLA compiles the function, and an additional run has no effects."""
    if name not in library or compiled_by(library[name].attr) is None:
        return False
    ops = {node.op for f in _run_by(name, library) for node in library[f].node_def}
    rules = is_pure, is_const, is_feed, is_random, is_view, reads_variable, calls_functions, only_waits
    return all(any(rule(op) for rule in rules) for op in ops)


def _run_by(name: str, library: Mapping[str, Any]) -> list[str]:
    """Names of the functions that run when this one is called, itself first."""
    return [name, *reachable(library[name].node_def, library)]


def _content(fdef: Any) -> bytes:
    """A function's content, without its name."""
    unnamed = copy.deepcopy(fdef)
    unnamed.signature.name = ""
    return unnamed.SerializeToString(deterministic=True)


def _measured(
    node: Node, graph: Graph, concrete: Any, decides: Sequence[Any], device: str, model: DeviceModel
) -> tuple[int, list[Any]]:
    """The bytes that the call requests besides its results, and the small integer results that other calls are compiled
    for.
    """
    import tensorflow as tf

    with tf.init_scope(), tf.device(device):
        zeros: dict[TensorType, Any] = {}  # one for all inputs of a type: the call alone takes no more than in the step
        given = [_argument(t, value, zeros) for t, value in zip(node.inputs, decides, strict=True)]
        call = FlatFunction(_alone(node, graph), f"{concrete.graph.name}_compiled", given, concrete)
        try:
            results = [_small_integers(result) for result in call(given)]  # XLA compiles it, once
            risen = _risen_bytes(lambda: call(given), device)
        except tf.errors.ResourceExhaustedError as error:
            raise UnsupportedGraph(
                f"{node.name!r} is compiled by XLA, and what it holds can't be measured: by itself, on zeros, it does "
                f"not fit into what is free of {device}'s arena. Free some of it, or call it outside of the step."
            ) from error
    types = [t.type for t in node.inputs]
    known = kernel_memory(node.op, node.attrs, types, node.outputs, model, temporary_bytes=0)
    sizes = (node.outputs[k].nbytes or 0 if event == "out" else k for event, k in known.events)
    pages = -(-(risen - sum(map(round_up, sizes))) // PAGE_BYTES)
    return max(0, pages * PAGE_BYTES), results


def _is_handle(tensor: Output) -> bool:
    return tensor.type.dtype in HANDLES


def _can_be_given(tensor: Output, value: Any) -> bool:
    """Whether a call outside of the step can have this input: a variable that exists, or a tensor of known size."""
    import tensorflow as tf

    if _is_handle(tensor):
        return isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value)
    return tensor.type.nbytes is not None


def _argument(tensor: Output, value: Any, zeros: dict[TensorType, Any]) -> Any:
    import tensorflow as tf

    if _is_handle(tensor):
        return value
    shape: Any = tensor.type.shape
    dtype = tensor.type.dtype
    if value is not None:
        return tf.reshape(tf.constant(value, dtype), shape)
    if tensor.type not in zeros:
        zeros[tensor.type] = tf.zeros(shape, dtype)
    return zeros[tensor.type]


def _small_integers(result: Any) -> Any:
    """The values of a small integer result, as a permutation or a shape, which XLA needs to compile its readers."""
    small = result.dtype.is_integer and result.shape.num_elements() <= SMALL_INTEGERS
    return result.numpy().tolist() if small else None


def _alone(node: Node, graph: Graph) -> Graph:
    """A graph of the call alone, with its inputs and results."""
    made = Graph()
    made.library = graph.library
    for i, tensor in enumerate(node.inputs):
        made.feeds.append(add_feed(made, f"input_{i}", tensor.type))
    inputs = [feed.out() for feed in made.feeds]
    call = made.add(node.op, "call", inputs, attrs=node.attrs, outputs=node.outputs)
    made.fetches = [call.out(i) for i in range(len(call.outputs))]
    return made


def _risen_bytes(call: Callable[[], Any], device: str) -> int:
    """The bytes by which `call` raises the arena's use at its peak. The user's peak statistic stays the same."""
    with peak_kept(device):
        before = arena.memory_info(device)
        call()
        risen = arena.memory_info(device)
    assert before is not None and risen is not None
    return risen.peak_bytes - before.current_bytes


def _body_seconds(node: Node, name: str, library: Mapping[str, Any], model: DeviceModel) -> float | None:
    """The seconds of the body as it was traced, kernel by kernel, an upper bound of the fused time; None where not
    known.
    """
    plain = {function: copy.deepcopy(library[function]) for function in _run_by(name, library)}
    for function in plain.values():
        for attribute in XLA_ATTRIBUTES:
            function.attr.pop(attribute, None)
    arguments = library[name].signature.input_arg
    shapes = {a.name: t.type.shape for a, t in zip(arguments, node.inputs, strict=True)}
    try:
        body = import_library_function(plain, name, shapes)
    except (UnsupportedGraph, InvalidModel):
        return None
    return Costs.of(model).body_seconds(body)
