"""A trace of a function: how its graph is imported, and how a rewritten graph is called.

Everything else of a step (planning, turns, watching) is the same whatever kind of trace it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tfswap.compiler.grappler import as_planned
from tfswap.device.live import device_of
from tfswap.device.placement import place
from tfswap.ir.graph import Graph
from tfswap.plan.plan import Plan
from tfswap.runtime.captures import with_placeholders
from tfswap.runtime.xla_calls import measure_compiled

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer


class Imported(NamedTuple):
    """A trace's graph.

    Attributes:
        held: names of tensors that the unoptimised step holds until its end.
        margin_bytes: room for tensors that the graph does not have.
    """

    graph: Graph
    held: Sequence[str] = ()
    margin_bytes: int = 0


class Exported(NamedTuple):
    """A function that runs a rewritten graph.

    Attributes:
        gates: the number of each gate, the graph behind it, and an object that lives as long as the graph's function.
    """

    function: Any
    gates: Sequence[tuple[int, Graph, Any]]


class Trace:
    """A trace whose gradients are not taken outside.

    Args:
        name: of the function, for messages.
        concrete: the trace.

    Attributes:
        device: the device that runs the step.
        kind: distinguishes its random states from those of other kinds of traces of the same function.
        always_ordered: whether its step has an order under every limit.
        has_unseen_part: whether a part of the step runs later, without being watched where it runs as it was traced.
    """

    kind: ClassVar[str] = "Step"
    always_ordered = False
    has_unseen_part = False

    def __init__(self, name: str, concrete: Any):
        self.name = name
        self.concrete = concrete
        self.device = device_of(concrete, with_placeholders(concrete))

    def planning(self) -> contextlib.AbstractContextManager[Any]:
        """Entered while the step is planned."""
        return contextlib.nullcontext()

    def import_graph(self, arguments: Sequence[Any], sizes: Any, *, keeps: Any) -> Imported:
        """The graph to plan.

        Args:
            arguments: tensors or specs of the sizes that are planned for.
            sizes: the types of tensors whose sizes depend on values, where known.
            keeps: as of `as_planned`.
        """
        from tfswap.importers.function import import_function

        device, model = self.device.name, self.device.model
        graph = import_function(self.concrete, arguments, sizes)
        given = [*arguments, *with_placeholders(self.concrete)]
        measure_compiled(graph, self.concrete, given, device, model)
        place(self.name, graph, given, model)
        return Imported(as_planned(graph, self.concrete, model, keeps=keeps))

    def plan_made_before(self, optimizer: Optimizer, limit_bytes: int | None, margin_bytes: int) -> Plan | None:
        """A plan that came with the trace, where it keeps the limit in this arena, with the margin."""
        return None

    def export(self, graph: Graph, plan: Plan, gate: int, for_file: Callable[[], Any]) -> Exported:
        """A function that runs the rewritten `graph`.

        Args:
            for_file: gives the function that carries out the plan in a file.
        """
        from tfswap.exporters.function import export_function

        function = export_function(graph, self.concrete, for_file)
        return Exported(function, [(gate, graph, function.graph)])

    def make_kernels(self, function: Any, inputs: Sequence[Any]) -> None:
        """Call the function of `export` with its gate closed: it makes its kernels and runs none."""
        function.call([*inputs, *with_placeholders(function)])

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
        """Call the function that runs the step.

        Args:
            captures: the call's captures, where they are computed for each call.
            rewritten: whether `function` is rewritten, not the trace itself.
            plain: as of `Step.__call__`.
            inside: gives the function to call in place of `function` where another function is traced.
        """
        if plain and captures is None and rewritten:
            return function.run(inputs)
        called = function if inside is None else inside()
        return called._call_flat(inputs, captured_inputs=called.captured_inputs if captures is None else captures)

    def finish(self, result: Any, run_part: Callable[[Callable[[], Any]], Any]) -> Any:
        """The result that the caller gets.

        Args:
            result: of `call`.
            run_part: runs a part of the step that comes later, under the limit.
        """
        return result
