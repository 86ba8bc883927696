"""A trace of a function: how its graph is imported, and how a rewritten graph is called.

Everything else of a step (planning, turns, watching) is the same whatever kind of trace it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from tfswap.analysis.output_bytes import hosted_bytes
from tfswap.compiler.grappler import as_planned
from tfswap.device.live import LiveDevice, devices_of, free_functions, host_device, with_copies_on
from tfswap.device.placement import keep_where_given, place, refuse_other_hosts, tensorflow_devices
from tfswap.ir.graph import Graph
from tfswap.passes.alike_parts import shared_results
from tfswap.passes.device_carriers import FIRST
from tfswap.passes.device_parts import Parts, cut
from tfswap.passes.join_parts import Joined, join
from tfswap.passes.memory_reservation import passed_bytes
from tfswap.plan.plan import Plan
from tfswap.runtime.captures import with_placeholders
from tfswap.runtime.xla_calls import measure_compiled
from tfswap.simulator.device_timing import PartLanes, TimedPart, simulate_devices
from tfswap.support.once import Shared

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer

_T = TypeVar("_T")


class Imported(NamedTuple):
    """A trace's graph.

    Attributes:
        held: names of tensors that the unoptimised step holds until its end.
        margin_bytes: room for tensors that the graph does not have.
        parts: how many parts share the step's host memory.
        passed_bytes: of host memory, for tensors that go from one device to another.
        shared: as of `Target`.
    """

    graph: Graph
    held: Sequence[str] = ()
    margin_bytes: int = 0
    parts: int = 1
    passed_bytes: int = 0
    shared: Shared | None = None


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
        device: the device that runs the step; of several, the first.
        devices: those with an arena of their own.
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
        self.devices = devices_of(concrete, with_placeholders(concrete))
        self.device = self.devices[0]
        self._parts: Parts | None = None  # of the latest import; None where the step is not cut
        self._shared: Mapping[str, Shared] = {}  # by device, of its parts
        self._not_taken: dict[str, Graph] = {}  # its parts that have not been planned, by device

    def parts(self, *, with_host: bool = False) -> Sequence[Trace]:
        """The part of each device: the trace itself where there is one.

        Args:
            with_host: whether what a GPU's step runs on the CPU is planned too.
        """
        if with_host and self.device.model.host_is_separate:
            self.devices = (*self.devices, host_device())
        return (self,) if len(self.devices) == 1 else [PartTrace(self, device) for device in self.devices]

    def on_device(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The arguments where the step takes them: a step on several devices where they were when it was planned."""
        if len(self.devices) == 1:
            return self.device.with_copies(inputs)
        return with_copies_on([feed.device for feed in self._parts.whole.feeds], inputs) if self._parts else inputs

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
        return self._imported(self.device.name, arguments, sizes, keeps=keeps)

    def _imported(self, device: str, arguments: Sequence[Any], sizes: Any, *, keeps: Any) -> Imported:
        found = self.as_imported(self.part(device, arguments, sizes, keeps=keeps))
        if self._parts is None:
            return found
        passed, shared = passed_bytes(self._parts.graphs.values()), self._shared.get(device)
        if device == FIRST:  # in whose arena kernels of other devices have tensors too, at moments that are not known
            model, others = self.device.model, (part for name, part in self._parts.graphs.items() if name != device)
            found = found._replace(margin_bytes=found.margin_bytes + sum(hosted_bytes(part, model) for part in others))
        return found._replace(parts=len(self.devices), passed_bytes=passed, shared=shared)

    def as_imported(self, graph: Graph) -> Imported:
        """The graph to plan, or a part of it, with what is known of it."""
        return Imported(graph)

    def part(self, device: str, arguments: Sequence[Any], sizes: Any, *, keeps: Any) -> Graph:
        """The graph to plan for one device. Arguments as of `import_graph`."""
        if device not in self._not_taken:
            self._import(arguments, sizes, keeps=keeps)
        return self._not_taken.pop(device, None) or Graph()

    def _import(self, arguments: Sequence[Any], sizes: Any, *, keeps: Any) -> None:
        graph, several = self._placed(arguments, sizes, keeps=keeps)
        planned = [device.name for device in self.devices]
        if FIRST in planned[1:]:
            refuse_other_hosts(self.name, graph)
        self._parts = cut(graph, planned, self.device.model) if several else None
        self._shared = shared_results(self._parts.graphs) if self._parts else {}
        self._not_taken = {self.device.name: graph} if self._parts is None else dict(self._parts.graphs)
        free_functions()  # of the import: they would change the unoptimised peak

    def _placed(self, arguments: Sequence[Any], sizes: Any, *, keeps: Any) -> tuple[Graph, bool]:
        """The graph to plan, whose nodes have devices, and whether it has to be cut. Arguments as of `import_graph`."""
        from tfswap.importers.function import import_function

        model = self.device.model
        graph = import_function(self.concrete, arguments, sizes)
        given = [*arguments, *with_placeholders(self.concrete)]
        measure_compiled(graph, self.concrete, given, self.device.name, model)
        devices = tensorflow_devices(graph, given, model)
        several = place(self.name, graph, given, model)
        graph = as_planned(graph, self.concrete, model, keeps=keeps, devices=devices if several else {})
        if several:
            place(self.name, graph, given, model)  # nodes that TensorFlow's optimizers have made
        keep_where_given(graph, given, model, several=several)
        return graph, several

    @property
    def may_have_blocks(self) -> bool:
        """Whether XLA may compile blocks of the imported graph (runtime/block_choice.py)."""
        return self._parts is None and self.device.has_arena

    def timed(self, lanes: Mapping[str, PartLanes]) -> dict[str, TimedPart]:
        """The time of each device's part, by the schedules of the planned parts; empty where there is one device."""
        parts = self._parts
        if parts is None:
            return {}
        others = {name: part for name, part in parts.graphs.items() if name not in lanes}
        return simulate_devices(lanes, parts.sources, others)

    def join(self, made: Mapping[str, Graph], orders: Mapping[str, Sequence[str]], gate: int) -> Joined:
        """The graph of the whole step from the rewritten graphs of its planned parts, by device.

        Args:
            orders: the order of each plan.
            gate: of the first of the other parts; a gate on each device sees the functions of that device's kernels.
        """
        if self._parts is None:  # all of it is on the first device
            return Joined(made[self.device.name], frozenset(orders[self.device.name]))
        return join(self._parts, made, orders, gate)

    def given_to(self, graph: Graph, given: Sequence[_T]) -> dict[str, _T]:
        """The values for the arguments of the planned graph, by the names of these arguments.

        Args:
            given: for each argument of the step, with or without captures.
        """
        return self.given_on(self.device.name, graph, given)

    def given_on(self, device: str, graph: Graph, given: Sequence[_T]) -> dict[str, _T]:
        """As `given_to`, for the part of the step on a device."""
        parts = self._parts
        if parts is None:
            return {feed.name: each for feed, each in zip(graph.feeds, given, strict=False)}
        by_name = {feed.name: each for feed, each in zip(parts.whole.feeds, given, strict=False)}
        names = ((feed.name, parts.own_name(device, feed)) for feed in graph.feeds)
        return {name: by_name[own] for name, own in names if own in by_name}

    def plan_made_before(self, optimizer: Optimizer, limit_bytes: int | None, margin_bytes: int) -> Plan | None:
        """A plan that came with the trace, where it keeps the limit in this arena, with the margin."""
        return self.plan_made_for(self.device.name, optimizer, limit_bytes, margin_bytes)

    def plan_made_for(
        self, device: str, optimizer: Optimizer, limit_bytes: int | None, margin_bytes: int
    ) -> Plan | None:
        """As `plan_made_before`, for the part of the step on a device."""
        return None

    def export(self, joined: Joined, gate: int, for_file: Callable[[], Any]) -> Exported:
        """A function that runs a rewritten graph.

        Args:
            for_file: gives the function that carries out the plan in a file.
        """
        from tfswap.exporters.function import export_function

        function = export_function(joined.graph, self.concrete, for_file)
        return Exported(function, [(gate, joined.graph, function.graph)])

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
            run_part: runs, under the limit, what the call has left for later.
        """
        return result


class PartTrace(Trace):
    """The part of a trace on one of its devices, as far as planning goes.

    Args:
        whole: the trace.
    """

    def __init__(self, whole: Trace, device: LiveDevice):
        self.name = f"{whole.name} on {device.name}"
        self.concrete = whole.concrete
        self.device = device
        self.devices = (device,)
        self.has_unseen_part = whole.has_unseen_part
        self._whole = whole

    def import_graph(self, arguments: Sequence[Any], sizes: Any, *, keeps: Any) -> Imported:
        return self._whole._imported(self.device.name, arguments, sizes, keeps=keeps)

    @property
    def may_have_blocks(self) -> bool:
        return False

    def given_to(self, graph: Graph, given: Sequence[_T]) -> dict[str, _T]:
        return self._whole.given_on(self.device.name, graph, given)

    def plan_made_for(
        self, device: str, optimizer: Optimizer, limit_bytes: int | None, margin_bytes: int
    ) -> Plan | None:
        return self._whole.plan_made_for(device, optimizer, limit_bytes, margin_bytes)
