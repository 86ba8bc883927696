"""A trace's forward and backward pass as steps of their own, for tapes that may take gradients more than once.

    results, saved = forward(arguments)                 saved: copies in host memory, outside of the arena
    ... = backward(gradients, saved, arguments)         each time that a tape asks

A persistent tape keeps what the backward pass reads for as long as it lives, and how often it asks is unknown. So
nothing of that stays on the device: each backward pass copies it there again, and is planned for the arena that it
finds, with the gradients of earlier passes in it. The copies are recorded on the tape as further results. So gradients
of gradients are those of the backward pass, as a step with a tape of its own, and of the forward pass's further
results. The functions are those that TensorFlow itself makes for such tapes (concrete_function.py).

Not handled: forward mode, tapes inside of another tf.function, traces whose backward pass reads lists (loops) or text.
Inside of a function that TensorFlow traces, as for `tape.jacobian`, the backward pass has no limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

from tfswap.errors import UnsupportedGraph
from tfswap.importers.function import own_outputs
from tfswap.importers.shapes import HANDLES
from tfswap.ir.custom_ops import TO_DEVICE, TO_HOST
from tfswap.runtime.joint_trace import CAPTURES, DERIVED, HANDLES_RETURNED, is_trainable
from tfswap.support.aligned import aligned_zeros

NO_COPIES = frozenset({*HANDLES, "string"})
"""Types of tensors that can't be copied to host memory."""

CallTrace = Callable[[Any, Sequence[Any]], Any]
"""Runs a trace with these arguments under the limit."""


class _Backward(NamedTuple):
    """A backward function as a step.

    Attributes:
        plain: TensorFlow's, whose captures are tensors of the trace.
        step: a ConcreteFunction of gradients, copies and arguments.
        all_outputs: positions of the forward function's outputs whose gradients `plain` takes.
        outputs: those whose gradients `step` takes. The others are arguments of the trace, and have none.
        copies: positions of the forward function's outputs whose copies it takes.
        arguments: positions of the arguments that it takes.
    """

    plain: Any
    step: Any
    all_outputs: list[int]
    outputs: list[int]
    copies: list[int]
    arguments: list[int]

    def results(self, made: Sequence[Any]) -> Any:
        """What a tape's backward function returns: a gradient for each of the arguments."""
        return self.plain.function_type.pack_output(list(made))


class SeparatePasses:
    """One trace.

    Args:
        trace: the ConcreteFunction.
        first: TensorFlow's functions for gradients of the results.
        all_: those for gradients of all that the forward function returns.

    Attributes:
        forward: the forward pass as a ConcreteFunction. It returns the results and then the copies.
        copied: positions of the forward function's outputs that are copied.
    """

    def __init__(self, trace: Any, first: Any, all_: Any):
        self.trace = trace
        self.results = len(own_outputs(trace))
        self._pairs = first, all_
        self._outputs = list(all_._forward_graph.outputs)
        self._place = {id(t): i for i, t in reversed(list(enumerate(self._outputs)))}
        self._argument = {id(t): i for i, t in enumerate(trace.graph.inputs)}
        own = len(trace.graph.inputs) - len(trace.captured_inputs)
        self._argument |= {id(t): own + i for i, t in enumerate(trace.captured_inputs)}
        taken = [t for pair in self._pairs for t in pair._backward.captured_inputs]
        self.copied = sorted({self._place[id(t)] for t in taken if self._is_copied(t)})
        self.forward = self._forward()

    def _is_copied(self, tensor: Any) -> bool:
        return id(tensor) not in self._argument and _constant(tensor) is None

    @property
    def reason(self) -> str:
        """Why it can't be planned; "" where it can."""
        kinds = [self._outputs[i].dtype.name for i in self.copied]
        return HANDLES_RETURNED if any(kind in NO_COPIES for kind in kinds) else ""

    @cached_property
    def once(self) -> _Backward:
        """The backward pass for gradients of the results."""
        return self._backward(self._pairs[0]._backward, range(self.results))

    @cached_property
    def again(self) -> _Backward:
        """The backward pass for gradients of the results and of the copies."""
        return self._backward(self._pairs[1]._backward, range(len(self._outputs)))

    def _forward(self) -> Any:
        made = _graph(f"{self.trace.graph.name}_forward")
        with made.as_default():
            arguments = [_like(t) for t in self.trace.graph.inputs]
            found = self._pairs[1]._forward.call_flat(*arguments)
            copies = [_to_host(found[i]) for i in self.copied]
        return _function(made, arguments, [*found[: self.results], *copies])

    def _backward(self, plain: Any, outputs: Sequence[int]) -> _Backward:
        import tensorflow as tf

        taken, count = plain.captured_inputs, len(plain.inputs) - len(plain.captured_inputs)
        differentiable = [i for i in outputs if is_trainable(self._outputs[i])][:count]
        unreachable = {i: self._argument[id(t)] for i in differentiable if id(t := self._outputs[i]) in self._argument}
        with_gradients = [i for i in differentiable if i not in unreachable]
        copies = sorted({self._place[id(t)] for t in taken if self._is_copied(t)})
        used = sorted({self._argument[id(t)] for t in taken if id(t) in self._argument} | set(unreachable.values()))
        made = _graph(f"{self.trace.graph.name}_backward")
        with made.as_default():
            given = {i: _like(self._outputs[i]) for i in with_gradients}
            kept = {i: _like(self._outputs[i]) for i in copies}
            arguments = {i: _like(self.trace.graph.inputs[i]) for i in used}
            gradients = {i: each if i < self.results else _to_device(each) for i, each in given.items()}
            gradients |= {i: tf.zeros_like(arguments[position]) for i, position in unreachable.items()}
            here = {i: _to_device(each) for i, each in kept.items()}
            captured = self._taken(plain, here, arguments)
            # In a way that TensorFlow can differentiate again.
            structured = plain._call_flat([gradients[i] for i in differentiable], captured_inputs=captured)
            derived = [t for t in tf.nest.flatten(structured, expand_composites=True) if t is not None]
        step = _function(made, [*given.values(), *kept.values(), *arguments.values()], derived)
        return _Backward(plain, step, differentiable, with_gradients, copies, used)

    def _taken(self, plain: Any, copies: Mapping[int, Any], arguments: Mapping[int, Any] | Sequence[Any]) -> list[Any]:
        """What a backward function captures, from these copies and arguments by position."""
        import tensorflow as tf

        found = []
        for tensor in plain.captured_inputs:
            if id(tensor) in self._argument:
                found.append(arguments[self._argument[id(tensor)]])
            elif (value := _constant(tensor)) is not None:
                found.append(tf.constant(value, tensor.dtype))
            else:
                found.append(copies[self._place[id(tensor)]])
        return found

    # --- calls --------------------------------------------------------------------------------------------

    def call(self, inputs: Sequence[Any], run: CallTrace, call_trace: CallTrace, note: Callable[[str], None]) -> Any:
        """Run the forward pass, and record on the tapes that watch it how to run the backward pass.

        Args:
            inputs: the trace's arguments, without its captures.
            run: runs a trace under the limit, where no tape watches.
            call_trace: runs a trace under the limit, also where tapes watch.
            note: takes the reason why a backward pass runs without a limit.
        """
        from tensorflow.python.eager import record

        arguments = [*inputs, *self.trace.captured_inputs]
        with record.stop_recording():
            made = run(self.forward, arguments)
            results, copies = list(made[: self.results]), dict(zip(self.copied, made[self.results :], strict=True))
            for i, copy in copies.items():
                stand_in(copy, results[i] if i < self.results else None)
        begun = _Begun(self, arguments, [each.shape for each in results], copies, call_trace, note)
        taken = [i for i, t in enumerate(self._outputs) if is_trainable(t) and (i < self.results or i in copies)]
        recorded = [results[i] if i < self.results else tape_tensor(copies[i]) for i in taken]

        def backward(*gradients: Any) -> Any:
            return begun.run({i: each for i, each in zip(taken, gradients, strict=True) if each is not None})

        sources = [tape_tensor(each) for each in arguments]
        record.record_operation(self._pairs[0]._backward.name, recorded, sources, backward)
        return self.trace.function_type.pack_output(results)


class _Begun(NamedTuple):
    """A call whose backward pass may come, any number of times.

    Attributes:
        arguments: the trace's, with its captures.
        shapes: of the results.
        copies: by position among the forward function's outputs.
        call_trace, note: as of `SeparatePasses.call`.
    """

    passes: SeparatePasses
    arguments: Sequence[Any]
    shapes: Sequence[Any]
    copies: Mapping[int, Any]
    call_trace: CallTrace
    note: Callable[[str], None]

    def run(self, given: Mapping[int, Any]) -> Any:
        """The gradients of the arguments, from those of the forward function's outputs, by position."""
        import tensorflow as tf

        passes, copies = self.passes, self.copies
        given = {i: each for i, each in given.items() if i < passes.results or each.shape == copies[i].shape}
        part = passes.again if self._is_watched(given) or any(i >= passes.results for i in given) else passes.once
        gradients = {i: self._gradient(i, given.get(i)) for i in part.outputs}
        why = TRACED
        if tf.executing_eagerly():
            taken = [*(copies[i] for i in part.copies), *(self.arguments[i] for i in part.arguments)]
            try:
                return part.results(self.call_trace(part.step, [*gradients.values(), *taken]))
            except UnsupportedGraph as error:
                why = f"its backward pass has no memory limit: {error}"
        self.note(why)
        every = [gradients[i] if i in gradients else self._unreachable(i) for i in part.all_outputs]
        return part.plain._call_flat(every, captured_inputs=passes._taken(part.plain, copies, self.arguments))

    def _is_watched(self, given: Mapping[int, Any]) -> bool:
        """Whether a tape watches the backward pass. Then it is that for all gradients, as TensorFlow's is: a sum has as
        many terms, in the same order.
        """
        from tensorflow.python.ops import gradients_util

        taken = [tape_tensor(each) for each in (*given.values(), *self.copies.values(), *self.arguments)]
        return bool(gradients_util.PossibleTapeGradientTypes(taken))

    def _gradient(self, i: int, given: Any) -> Any:
        import tensorflow as tf

        if given is not None:
            return tf.convert_to_tensor(given)
        if i < self.passes.results:
            return tf.zeros(self.shapes[i], self.passes._outputs[i].dtype)
        return _zeros_on_host(self.copies[i])

    def _unreachable(self, i: int) -> Any:
        import tensorflow as tf

        return tf.zeros_like(self.arguments[self.passes._argument[id(self.passes._outputs[i])]])


STAND_IN = "_tfswap_stand_in"
"""The attribute of a copy: what stands for it on tapes."""


def stand_in(copy: Any, result: Any) -> None:
    """Have an empty tensor stand for a copy on tapes, or the result that it is a copy of. Where a copy has no gradient,
    the tape then gives an empty one.
    """
    import tensorflow as tf

    if result is not None:
        setattr(copy, STAND_IN, result)
    elif is_trainable(copy):
        setattr(copy, STAND_IN, tf.zeros([0], copy.dtype))


def tape_tensor(tensor: Any) -> Any:
    """What stands for an argument of a trace on tapes."""
    return getattr(tensor, STAND_IN, tensor)


TRACED = (
    "its backward pass is requested inside of a function that TensorFlow traces, as tape.jacobian does, where it has "
    "no memory limit. Take the gradients inside the function that is optimized"
)


def separate_passes(trace: Any, arguments: Sequence[Any]) -> SeparatePasses | str:
    """The passes of a trace as steps of their own; or the reason why it has none."""
    from tensorflow.python.ops import gradients_util

    results = own_outputs(trace)
    if any(t.dtype.name in HANDLES for t in results):
        return HANDLES_RETURNED
    pairs = []
    # In this order: the second function gives the trace more results.
    for kind in (
        gradients_util.POSSIBLE_GRADIENT_TYPES_FIRST_ORDER,
        gradients_util.POSSIBLE_GRADIENT_TYPES_HIGHER_ORDER,
    ):
        call = trace._select_forward_and_backward_functions(list(arguments), kind, True)
        call.forward()
        pairs.append(call._functions)
    if pairs[0]._num_inference_outputs != len(results):
        return DERIVED
    known = {id(t) for t in (*pairs[1]._forward_graph.outputs, *trace.captured_inputs, *trace.graph.inputs)}
    if any(id(t) not in known for pair in pairs for t in pair._backward.captured_inputs):
        return CAPTURES
    made = SeparatePasses(trace, *pairs)
    return made.reason or made


def _constant(tensor: Any) -> Any:
    """The value of a tensor of the trace, as an array, where its graph alone gives it, as a shape; else None."""
    from tensorflow.python.framework import tensor_util

    return tensor_util.constant_value(tensor) if tensor.dtype.is_integer else None


def _graph(name: str) -> Any:
    from tensorflow.python.framework import func_graph

    from tfswap.native.load import load

    load()
    _register_gradients()
    return func_graph.FuncGraph(name)


def _like(tensor: Any) -> Any:
    """A placeholder for a tensor of the trace."""
    from tensorflow.python.eager import graph_only_ops
    from tensorflow.python.ops import handle_data_util

    made = graph_only_ops.graph_placeholder(tensor.dtype, tensor.shape, name=tensor.op.name)
    handle_data_util.copy_handle_data(tensor, made)
    return made


def _to_host(tensor: Any) -> Any:
    from tfswap.native.load import load

    return load().ops.tfswap_to_host(tensor=tensor)


def _zeros_on_host(like: Any) -> Any:
    """As tf.zeros_like, outside of a CPU's arena: a tensor that wraps an array."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework import ops

    if not context.executing_eagerly():
        return _to_host(like * 0)
    zeros = aligned_zeros(like.shape.as_list(), like.dtype.as_numpy_dtype)
    return ops.EagerTensor(zeros, like.device, like.dtype.as_datatype_enum)


def _to_device(tensor: Any) -> Any:
    from tfswap.native.load import load

    return load().ops.tfswap_to_device(tensor=tensor)


def _function(graph: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    from tensorflow.python.eager.polymorphic_function import concrete_function, function_type_utils

    graph.inputs = list(inputs)
    graph.structured_outputs = graph.outputs = list(outputs)
    graph.control_outputs = [op for op in graph.get_operations() if op.type == "StatefulPartitionedCall"]
    return concrete_function.ConcreteFunction.from_func_graph(graph, function_type_utils.derive_from_graph(graph), {})


@cache
def _register_gradients() -> None:
    """The gradient of what is in host memory is there as well."""
    import tensorflow as tf

    tf.RegisterGradient(TO_DEVICE)(lambda _, gradient: _to_host(gradient))
    tf.RegisterGradient(TO_HOST)(lambda _, gradient: _to_device(gradient))
