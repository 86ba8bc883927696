"""Makes the functions that carry out a step's plans, and audits the graphs that TensorFlow runs for them.

Invariant: each function that was made and is in use has an audit: a user's trace may call one of an earlier plan.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.lower import ALWAYS_OPEN
from tfswap.compiler.options import Spill
from tfswap.compiler.origin import Origin, SavedStep, policy_answers, sized
from tfswap.compiler.request import Request
from tfswap.device.lent_block import LentBlock
from tfswap.device.placement import refuse_parts_on_cpu
from tfswap.errors import TfswapError, UnsupportedGraph
from tfswap.ir.graph import Graph
from tfswap.passes.join_parts import Joined
from tfswap.passes.memory_reservation import Reservation, borrow, of_all_parts, reserve_memory
from tfswap.passes.random_state import share_random_state
from tfswap.plan.plan import Plan
from tfswap.runtime.audit import Audit, gates_of
from tfswap.runtime.captures import with_placeholders
from tfswap.runtime.trace import Trace
from tfswap.support.sizes import format_bytes

if TYPE_CHECKING:
    from tfswap.native.load import CArenaReading


class Chosen(NamedTuple):
    """The plan of a part of a step.

    Attributes:
        trace: of the part.
        optimizer: of the part.
        plan: to be carried out.
        borrowed: the memory of another device that its swapped tensors take.
    """

    trace: Trace
    optimizer: Optimizer
    plan: Plan
    borrowed: LentBlock | None = None

    @property
    def in_host_memory(self) -> Plan:
        """The plan, with what it would have in another device's memory in host memory, where none is borrowed."""
        plan = self.plan
        return plan if self.borrowed else dataclasses.replace(plan, host_bytes=plan.host_bytes + plan.lent_bytes)


class FunctionMaker:
    """Makes the functions of one step.

    Args:
        owner: the number that owns the step's host memory.

    Attributes:
        making_bytes: by device, the peak while functions of the latest plan were made, if it was the highest of the
            process, else 0. Empty before they were made.
    """

    def __init__(self, trace: Trace, request: Request, owner: int):
        self._trace = trace
        self._request = request
        self._owner = owner
        self._audits: dict[int, Audit] = {}  # by number of the gate
        self._audited = 0  # the count of functions that gates had kept, at the latest audit
        self._for_file: Callable[[], Any] = lambda: trace.concrete
        self.making_bytes: list[int] = []

    @property
    def has_made(self) -> bool:
        """Whether a function that it has made is in use."""
        return bool(self._audits)

    def for_file(self) -> Any:
        """The function that carries out the latest plan in a file."""
        return self._for_file()

    def make(self, chosen: Sequence[Chosen], *, live: bool) -> tuple[Any, int]:
        """The function that carries out the plans of a step's parts, and its gate, which checks the arena where Python
        does not.

        Args:
            live: whether Python checks the arena before each step.
        """
        import tfswap.ops

        gate = tfswap.ops.new_gate()
        made = _rewritten(self._trace, chosen, gate, checked_by_gate=not live)
        self._share_random_state(made, chosen)
        joined = _joined(self._trace, chosen, made, gate)
        graph = joined.graph
        reservation = of_all_parts([self._reservation(each) for each in chosen])
        swaps = reserve_memory(graph, chosen[0].optimizer.target, reservation)
        function = self._export(chosen, joined, gate)
        if swaps:
            self._reserve(reservation)
            weakref.finalize(function.graph, tfswap.ops.unregister, self._owner)
        return function, gate

    @property
    def limits(self) -> Reservation:
        """The limits of the step's host memory and disk space."""
        options = self._request.options
        spill = options.spill or Spill("")
        return Reservation(self._owner, 0, options.host_limit_bytes, spill.folder, 0, spill.limit_bytes)

    def _reservation(self, part: Chosen) -> Reservation:
        found = self._request.options.reservation(self._owner, part.in_host_memory)
        on_cpu = part.trace.device.model.has_own_kernels
        return dataclasses.replace(found, cpu_bytes=found.host_bytes) if on_cpu else found

    def _share_random_state(self, made: Mapping[str, Graph], chosen: Sequence[Chosen]) -> None:
        """Have random ops on the CPU continue the sequences of an earlier plan."""
        import tfswap.ops

        trace = f"{self._trace.concrete.name.decode()}/{self._trace.kind}"
        for part, optimizer, _, _ in chosen:
            if part.device.model.has_own_kernels and share_random_state(
                made[part.device.name], optimizer.target, self._owner, trace
            ):
                tfswap.ops.keep_states(self._owner)

    def instantiate(self, function: Any, inputs: Sequence[Any]) -> None:
        """Have TensorFlow make a function's kernels and constants."""
        import tfswap.ops

        before = self._peaks()
        with tfswap.ops.instantiating():
            self._trace.make_kernels(function, inputs)
        self.making_bytes = [after if after > peak else 0 for after, peak in zip(self._peaks(), before, strict=True)]
        self.audit()

    def _peaks(self) -> list[int]:
        return [device.read_arena(before=False).peak_bytes for device in self._trace.devices]

    def audit(self) -> None:
        """Compare the graphs that TensorFlow executed, also inside of other functions, with the planned ones.

        Raises VerificationError where they differ.
        """
        for audit in tuple(self._audits.values()):
            audit.check()

    def audit_new(self, now: CArenaReading) -> None:
        """As `audit`, where TensorFlow has made an executor since the last one."""
        if now.executed != self._audited:
            self.audit()
            self._audited = now.executed

    def _export(self, chosen: Sequence[Chosen], joined: Joined, gate: int) -> Any:
        saved = functools.partial(_for_file, self._trace, chosen, self._request, self._owner)
        self._for_file = functools.cache(saved)
        exported = self._trace.export(joined, gate, self._for_file)
        for number, part, made in exported.gates:
            self._watch(part, number, made)
        return exported.function

    def _watch(self, graph: Graph, gate: int, made: Any) -> None:
        """Audit the executions of `graph`, behind its gate, for as long as `made` exists."""
        import tfswap.ops

        self._audits[gate] = Audit(graph, gate)
        for each in gates_of(graph):
            tfswap.ops.watch_gate(each)
            weakref.finalize(made, tfswap.ops.forget_gate, each)
        weakref.finalize(made, self._audits.pop, gate, None)

    def _reserve(self, reservation: Reservation) -> None:
        """Reserve and allocate the memory of swapped tensors, so that a lack is reported before anything runs."""
        import tfswap.ops

        name = self._trace.name
        if self._trace.device.model.host_is_separate:
            # The device's kernels reserve pinned memory, and space on disk.
            tfswap.ops.register(self._owner, reservation.host_limit_bytes)
            return
        try:
            tfswap.ops.register(
                self._owner, reservation.host_limit_bytes, reservation.spill_dir, reservation.disk_limit_bytes
            )
        except OSError as error:
            raise TfswapError(f"{name}: {error}") from error
        try:
            tfswap.ops.reserve(reservation.host_bytes)
            if reservation.disk_bytes:
                tfswap.ops.reserve_disk(self._owner, reservation.disk_bytes, name)
        except MemoryError as error:
            tfswap.ops.unregister(self._owner)
            raise TfswapError(
                f"{name}: no {format_bytes(reservation.host_bytes)} of host memory for swapped tensors: {error}"
            ) from error
        except OSError as error:
            tfswap.ops.unregister(self._owner)
            raise TfswapError(f"{name}: {error}") from error


def _rewritten(trace: Trace, chosen: Sequence[Chosen], gate: int, *, checked_by_gate: bool) -> dict[str, Graph]:
    """By device, the graph that carries out the plan of its part.

    Args:
        gate: of the first part; the others have the numbers after it.
        checked_by_gate: as of `Optimizer.rewrite`.
    """
    made: dict[str, Graph] = {}
    for number, (part, optimizer, plan, borrowed) in enumerate(chosen):
        captures = with_placeholders(trace.concrete)
        given = [None] * (len(trace.concrete.inputs) - len(captures)) + captures
        refuse_parts_on_cpu(trace.name, optimizer.graph, part.given_to(optimizer.graph, given), optimizer.target)
        own = gate if gate == ALWAYS_OPEN else gate + number
        graph = made[part.device.name] = optimizer.rewrite(plan, own, checked_by_gate=checked_by_gate)
        if borrowed is not None:
            borrow(graph, optimizer.target, borrowed.number)
    return made


def _joined(trace: Trace, chosen: Sequence[Chosen], made: Mapping[str, Graph], gate: int) -> Joined:
    """The graph that carries out all plans. Arguments as of `_rewritten`, which gives `made`."""
    orders = {each.trace.device.name: each.plan.order for each in chosen}
    return trace.join(made, orders, gate + len(chosen))


def _for_file(trace: Trace, chosen: Sequence[Chosen], request: Request, owner: int) -> Any:
    """The function that carries out the plans in a file whose signature calls it. Where TensorFlow loads the file, the
    function's gate alone checks the arena; `tfswap.load` finds in the gate all that it needs to plan again.
    """
    from tfswap.exporters.function import export_function

    if len(chosen) > 1:
        raise UnsupportedGraph(
            f"{trace.name} is planned for several devices, and such a plan can't be saved in a file. Save the function "
            "that it was made from."
        )
    concrete, (_, optimizer, plan, _) = trace.concrete, chosen[0]
    made = _rewritten(trace, chosen, ALWAYS_OPEN, checked_by_gate=True)
    graph = _joined(trace, chosen, made, ALWAYS_OPEN).graph
    reserve_memory(graph, optimizer.target, request.options.reservation(owner, plan))
    arguments = [argument.name for argument in concrete.function_def.signature.input_arg]
    sizes = sized(zip(arguments, graph.feeds, strict=True))
    step = SavedStep(concrete.name.decode(), "", rewritten=True, arguments=tuple(sizes))
    answers = policy_answers(optimizer.graph, request.options.policy, optimizer.locate)
    Origin.of(trace.name, {"": plan.limit_bytes}, [step], request.options, answers).carry(graph, plan)
    return export_function(graph, concrete, refers_to=[concrete])
