"""The rows of a report for variables: where each is at home, and why."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node
from tfswap.ir.homes import is_at_home, is_on_disk
from tfswap.ir.op_traits import VARIABLE
from tfswap.ir.permits import STATE
from tfswap.kernels.hardware import DISK, HOST, Rates
from tfswap.passes.tactics.home_values import Use, uses_of
from tfswap.passes.tactics.sliced_updates import slices_of
from tfswap.passes.tactics.state_homes import Accessed, accessed_variables
from tfswap.plan.plan import Plan
from tfswap.report.explain import Explanation
from tfswap.report.rows import TensorRow
from tfswap.support.sizes import format_bytes, format_count

OFF = "'state' is not among the tactics"
FIXED = "it can't be moved before the step: the step has several handles of it, or its arena can't be read"


@dataclass(frozen=True)
class Homes:
    """What decides where variables are at home.

    Attributes:
        settled: the step before tactics are applied.
        movable: handles of the variables that can be moved before the step.
        allowed: whether the user allows it.
        smallest_bytes: smaller ones are not worth it.
    """

    settled: Graph
    movable: Collection[str]
    allowed: bool
    smallest_bytes: int

    def stays(self, name: str, variable: Accessed) -> str:
        """Why a variable must be on the device; "" where it need not."""
        if variable.stays or not self.allowed:
            return variable.stays or OFF
        if name not in self.movable:
            return FIXED
        if (variable.type.nbytes or 0) < self.smallest_bytes:
            return f"below {format_bytes(self.smallest_bytes)} a variable costs more to move than it frees"
        return ""

    def largest_that_stays(self) -> tuple[str, int, str] | None:
        """The name, the bytes and the reason of the largest variable that must be on the device."""
        found = accessed_variables(self.settled).items()
        staying = [(name, each.type.nbytes or 0, why) for name, each in found if (why := self.stays(name, each))]
        return max(staying, key=lambda each: each[1], default=None)

    def name_of(self, handle: str) -> str:
        """The program's name for a variable."""
        known = self.settled.variables.get(handle)
        return handle if known is None else known.name


@dataclass(frozen=True)
class VariableTable:
    """The variables of a planned step.

    Attributes:
        homes: what decides where they are at home.
        graph: the graph that `plan` is for.
        unused: the reason where a tactic could be used, as of `why_unused`.
    """

    homes: Homes
    graph: Graph
    plan: Plan
    unused: str

    def rows(self, *, rest: bool = False) -> list[TensorRow]:
        """One row per variable that is at home on the host, or that is large and would be allowed there.

        Args:
            rest: the rows of all others instead.
        """
        rows: list[TensorRow] = []
        for name in self._accessed:
            row = self._row(name)
            matters = self.homes.allowed and row.nbytes >= self.homes.smallest_bytes
            if rest != (row.tactic == STATE or matters):
                rows.append(row)
        return rows

    def explain(self, name: str, rates: Rates) -> Explanation | None:
        """The explanation of a variable; None where there is none of this name."""
        handle = next((handle for handle in self._accessed if self.homes.name_of(handle) == name), None)
        if handle is None:
            return None
        row, kind = self._row(handle), self._accessed[handle].type
        tier = DISK if row.home == "disk" else HOST
        return Explanation(
            tensor=name,
            type=str(kind),
            nbytes=row.nbytes,
            tactic=row.tactic,
            reason=row.reason,
            made_by=None,
            made_at=(),
            read_by=tuple(self._accesses.get(handle, ())),
            wait=None,
            wait_s=0.0,
            wait_share=0.0,
            copy_s=(row.nbytes / rates.out_rate(tier), row.nbytes / rates.in_rate(tier)),
            rerun_s=None,
            source=None,
        )

    @functools.cached_property
    def _accessed(self) -> Mapping[str, Accessed]:
        return accessed_variables(self.homes.settled)

    @functools.cached_property
    def _accesses(self) -> Mapping[str, Sequence[tuple[str, int]]]:
        """The kernels of the plan that have a handle as an input, with their positions, by the handle's name."""
        found: dict[str, list[tuple[str, int]]] = {}
        for position, name in enumerate(self.plan.order):
            for source in {tensor.node.name for tensor in self.graph[name].inputs}:
                found.setdefault(source, []).append((name, position))
        return found

    @functools.cached_property
    def _uses(self) -> Mapping[Node, Sequence[Use]]:
        return uses_of(self.graph)

    def _runs(self, handle: Node) -> list[Node]:
        """The nodes that access a variable: those of the step as often as they run, others once for each body."""
        runs = Counter(self.plan.order)
        uses = self._uses[handle]
        return [use.node for use in uses for _ in range(runs[use.node.name] if use.graph is self.graph else 1)]

    def _row(self, handle: str) -> TensorRow:
        variable = self._accessed[handle]
        nbytes = variable.type.nbytes or 0
        tactic, moved_bytes, home, reason = "keep", 0, None, self.homes.stays(handle, variable) or self.unused
        if handle in self.graph and is_at_home(self.graph[handle]):
            nodes = self._runs(self.graph[handle])
            read_bytes = sum(node.outputs[0].nbytes or 0 for node in nodes if node.op == custom_ops.READ_HOME)
            writes = [node for node in nodes if node.op == custom_ops.COMMIT_HOME]
            tactic, moved_bytes = STATE, read_bytes + nbytes * len(writes)
            slices = max(map(slices_of, writes), default=1)
            home = "disk" if is_on_disk(self.graph[handle]) else "host memory"
            reason = _described(home, math.ceil(read_bytes / nbytes), len(writes), slices)
        name = self.homes.name_of(handle)
        return TensorRow(name, VARIABLE, nbytes, None, tactic, reason, moved_bytes, 0.0, None, home=home)


def _described(home: str, reads: int, writes: int, slices: int) -> str:
    """What a step does with a variable at home on the host.

    Args:
        home: where it is there.
        slices: how many its update runs in.
    """
    place = "on disk" if home == "disk" else "in host memory"
    if not reads and not writes:
        return f"at home {place}, where kernels read or update it"
    counts = [("to the device", reads), ("back", writes)]
    times = " and ".join(f"{where} {format_count(count, 'time')}" for where, count in counts if count)
    in_slices = f", updated in {slices} slices" if slices > 1 else ""
    return f"at home {place}, copied {times} per step{in_slices}"
