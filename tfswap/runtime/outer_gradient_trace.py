"""A trace whose gradients its caller takes outside, under its limit: planned as one graph, run as two functions.

The first runs when the trace is called, and its results are recorded on the caller's tape with a backward function that
runs the second. In between the caller computes a loss, and anything else. Tensors of the first function that the second
one reads are held in carriers and in host memory until then, and are freed with the tape where the second never runs.

Not handled: asking for the gradients in ways that TensorFlow answers by tracing the backward function
(`tape.jacobian`), or by differentiating it. Both raise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tfswap.device.placement import keep_where_given, place
from tfswap.errors import TfswapError
from tfswap.ir.graph import Graph
from tfswap.kernels.alignment import round_up
from tfswap.kernels.target import Target
from tfswap.passes.join_parts import Joined
from tfswap.passes.prepare.result_slots import MOST_BYTES
from tfswap.passes.tactics.outer_gradients import cut, outside_of
from tfswap.runtime.captures import with_placeholders
from tfswap.runtime.joint_trace import Joint, saved
from tfswap.runtime.trace import Exported, Imported, Trace

if TYPE_CHECKING:
    from tfswap.exporters.flat_function import FlatFunction

REMEDY = "Create the tape with persistent=True: the call then runs as it was traced, without its memory limit."


class StepFunctions(NamedTuple):
    """The functions that carry out a plan.

    Attributes:
        forward: returns the results, followed by the carriers.
        backward: takes the carriers, the gradients, and some of the step's arguments.
        used: positions of these arguments among all of the step's.
    """

    forward: FlatFunction
    backward: FlatFunction
    used: tuple[int, ...]

    @property
    def graph(self) -> Any:
        """Lives as long as the two functions do."""
        return self.forward.graph


class _Begun(NamedTuple):
    """A call whose backward pass may come.

    Attributes:
        results: what the trace returns, flat.
        carriers: hold the tensors that the backward function reads.
        arguments: the trace's arguments and captures.
    """

    functions: StepFunctions
    results: list[Any]
    carriers: list[Any]
    arguments: list[Any]


class OuterGradientTrace(Trace):
    """A trace and its gradients.

    Args:
        joint: the trace and its gradients.
        turns: held while a step of the same function runs.
    """

    kind = "OutsideStep"
    has_unseen_part = True

    def __init__(self, name: str, joint: Joint, turns: threading.RLock):
        super().__init__(name, joint.trace)
        self._joint = joint
        self._turns = turns

    def planning(self) -> contextlib.AbstractContextManager[Any]:
        from tensorflow.python.eager import record

        return record.stop_recording()

    def _placed(self, arguments: Sequence[Any], sizes: Any, *, keeps: Any) -> tuple[Graph, bool]:
        model = self.device.model
        graph = self._joint.import_graph(arguments)
        given = [*arguments, *with_placeholders(self.concrete)]
        several = place(self.name, graph, given, model)
        keep_where_given(graph, given, model, several=several)
        return self._joint.fix(graph, Target(model)), several

    @property
    def may_have_blocks(self) -> bool:
        return False

    def as_imported(self, graph: Graph) -> Imported:
        # The addresses of large results' gradients depend on the caller. Each may get a whole chunk of up to twice its
        # size, or one that was planned for another tensor of the backward function.
        large = [kind.nbytes for kind in outside_of(graph).outputs if (kind.nbytes or 0) > MOST_BYTES]
        return Imported(graph, saved(graph), sum(2 * round_up(nbytes or 0) for nbytes in large))

    def call(
        self,
        function: Any,
        inputs: Sequence[Any],
        captures: list[Any] | None,
        *,
        rewritten: bool,
        plain: bool,
        inside: Callable[[], Any] | None,
    ) -> Any:
        arguments = [*inputs, *(self.concrete.captured_inputs if captures is None else captures)]
        if not rewritten:
            return self.concrete._call_flat(list(inputs), arguments[len(inputs) :])
        made = function.forward(arguments)
        count = self._joint.results
        return _Begun(function, made[:count], made[count:], arguments)

    def finish(self, result: Any, run_part: Callable[[Callable[[], Any]], Any]) -> Any:
        if not isinstance(result, _Begun):
            return result  # it ran as it was traced, and TensorFlow has recorded it
        self._record(result, run_part)
        return self.concrete.function_type.pack_output(result.results)

    def _record(self, begun: _Begun, run_part: Callable[[Callable[[], Any]], Any]) -> None:
        """Record on the tape the function that differentiates the results."""
        from tensorflow.python.eager import record

        functions, carriers = begun.functions, begun.carriers
        results = begun.results[: self._joint.differentiable[-1] + 1]
        shapes = [result.shape for result in results]
        used = [begun.arguments[i] for i in functions.used]

        def backward(*gradients: Any) -> Any:
            given = self._given(gradients, shapes)
            with self._turns:
                made = run_part(lambda: functions.backward([*carriers, *given, *used]))
            return self._joint.backward.function_type.pack_output(made)

        record.record_operation(self._joint.backward.name, results, begun.arguments, backward)

    def _given(self, gradients: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
        """The tape's gradients of the differentiable results, as tensors.

        Raises TfswapError where the backward pass is to be traced or differentiated.
        """
        import tensorflow as tf
        from tensorflow.python.ops import gradients_util

        if not tf.executing_eagerly():
            raise TfswapError(
                f"{self.name}: its backward pass is requested inside of a function that TensorFlow traces, as "
                f"tape.jacobian does, and what has run can't become a part of that. {REMEDY}"
            )
        results = self.concrete.outputs
        given = [
            tf.zeros(shapes[i], results[i].dtype) if gradients[i] is None else tf.convert_to_tensor(gradients[i])
            for i in self._joint.differentiable
        ]
        if gradients_util.PossibleTapeGradientTypes(given) != gradients_util.POSSIBLE_GRADIENT_TYPES_NONE:
            raise TfswapError(
                f"{self.name}: its backward pass is requested under another tape, or in forward mode, and can't be "
                f"differentiated again. {REMEDY}"
            )
        return given

    def export(self, joined: Joined, gate: int, for_file: Callable[[], Any]) -> Exported:
        import tensorflow as tf

        import tfswap.ops
        from tfswap.exporters.flat_function import FlatFunction

        trace, graph = self.concrete, joined.graph
        second = tfswap.ops.new_gate()
        forward, backward = cut(graph, self._joint.results, joined.kernels, second)
        place = {feed.name: position for position, feed in enumerate(graph.feeds)}
        used = tuple(place[feed.name] for feed in backward.feeds if feed.name in place)
        carriers = len(forward.fetches) - self._joint.results
        given = [
            *[tf.TensorSpec([], tf.variant)] * carriers,
            *(trace.outputs[i] for i in self._joint.differentiable),
            *(trace.graph.inputs[i] for i in used),
        ]
        functions = StepFunctions(
            FlatFunction(forward, f"{trace.graph.name}_tfswap_forward", trace.graph.inputs, trace),
            FlatFunction(backward, f"{trace.graph.name}_tfswap_backward", given, trace),
            used,
        )
        gates = [(gate, forward, functions.forward.graph), (second, backward, functions.backward.graph)]
        return Exported(functions, gates)

    def make_kernels(self, function: StepFunctions, inputs: Sequence[Any]) -> None:
        import tensorflow as tf

        arguments = [*inputs, *with_placeholders(self.concrete)]
        function.forward(arguments)
        nothing = tf.raw_ops.OptionalNone()
        given = [
            nothing if kind.dtype == tf.variant else tf.zeros([0], kind.dtype)
            for kind in function.backward.graph.inputs[: -len(function.used) or None]
        ]
        function.backward([*given, *(arguments[i] for i in function.used)])
