"""The contract of passes: a named change of a graph in place, with what it requires and ensures, for one target.

Every pass is called with a graph and a target, those in `tactics` also with a plan's choices for them, and returns how
many changes it made: 0 means that the graph is unchanged. Passes are in tables: `PREPARE` (compiler/prepare.py) for
every step, `BODIES` and `FORM` (compiler/tactics.py) for a plan's choices before the order, `LOWER` (compiler/lower.py)
for the order and what follows it.

`watching` takes a function that is called after each pass, with the pass, the graph after it, the number of changes and
the seconds. `TFSWAP_PRINT_PASSES` prints graphs after passes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from tfswap.ir.graph import Graph
from tfswap.ir.text import format_graph
from tfswap.kernels.target import Target

PRINT = "TFSWAP_PRINT_PASSES"
"""Names of passes, separated by commas, or "all": the graph after each one that changes it is written to standard
error. With "before:NAME", the graph before that pass is written.
"""

P = ParamSpec("P")
Watcher = Callable[["Pass[...]", Graph, int, float], None]


_watchers: list[Watcher] = []


@dataclass(frozen=True)
class Pass(Generic[P]):
    """A change of a graph.

    Attributes:
        name: as in `TFSWAP_PRINT_PASSES` and `tfswap opt --passes`.
        requires: what must be true of the graph before; "" for nothing.
        ensures: what is true of it afterwards.
        apply: makes the changes, and returns their number.
    """

    name: str
    requires: str
    ensures: str
    apply: Callable[Concatenate[Graph, Target, P], int]

    def __call__(self, graph: Graph, target: Target, *args: P.args, **kwargs: P.kwargs) -> int:
        """Apply it, and notify the watchers."""
        if f"before:{self.name}" in _printed():
            _write(f"before {self.name}", graph)
        begun = time.perf_counter()
        changes = self.apply(graph, target, *args, **kwargs)
        seconds = time.perf_counter() - begun
        for watcher in (*_watchers, *([_print] if PRINT in os.environ else ())):
            watcher(self, graph, changes, seconds)
        return changes


def graph_pass(
    *, ensures: str, requires: str = ""
) -> Callable[[Callable[Concatenate[Graph, Target, P], int]], Pass[P]]:
    """Makes a pass of a function. Its name is the function's, with hyphens."""

    def made(function: Callable[Concatenate[Graph, Target, P], int]) -> Pass[P]:
        return Pass(function.__name__.replace("_", "-"), requires, ensures, function)

    return made


class Row(NamedTuple):
    """A pass, the condition for it, and the reason for its place."""

    apply: Pass[...]
    when: Callable[[Target], bool]
    reason: str


C = TypeVar("C")


@dataclass(frozen=True)
class PlanRow(Generic[C]):
    """A pass that a plan may need, its arguments, and the reason for its place.

    Attributes:
        arguments: computes the pass's arguments after graph and target from the plan, in the form of its table, and
            the graph. Returns None where the plan does not need the pass.
    """

    apply: Pass[...]
    arguments: Callable[[C, Graph], tuple[Any, ...] | None]
    reason: str


def always(_: Target) -> bool:
    return True


def own_ops(target: Target) -> bool:
    """Whether tfswap's own ops may be in the graph."""
    return target.own_ops


def apply_table(table: Iterable[Row], graph: Graph, target: Target) -> None:
    """Apply the passes of `table` whose conditions hold for `target`, in place."""
    for row in table:
        if row.when(target):
            row.apply(graph, target)


def apply_plan_table(table: Iterable[PlanRow[C]], graph: Graph, target: Target, plan: C) -> None:
    """Apply the passes of `table` that `plan` needs, in place."""
    for row in table:
        arguments = row.arguments(plan, graph)
        if arguments is not None:
            row.apply(graph, target, *arguments)


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Calls `watcher` after each pass."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _print(done: Pass[...], graph: Graph, changes: int, seconds: float) -> None:
    """Print the graph where `TFSWAP_PRINT_PASSES` names the pass."""
    if changes and not _printed().isdisjoint(("all", done.name)):
        _write(f"after {done.name}: {changes} changes, {1e3 * seconds:.1f} ms", graph)


def _printed() -> set[str]:
    return {name.strip() for name in os.environ.get(PRINT, "").split(",")}


def _write(title: str, graph: Graph) -> None:
    print(f"# {title}", file=sys.stderr)
    print(format_graph(graph), file=sys.stderr)
