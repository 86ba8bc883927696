"""Applies passes by name to a graph in text form: what `tfswap opt` does.

A pass that carries out a part of a plan gets the plan, which refers to the graph's nodes by name.
"""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import Dataflow
from tfswap.compiler.lower import LOWER, Lowering
from tfswap.compiler.prepare import PREPARE
from tfswap.compiler.rewriting import PLAIN, Rewriting
from tfswap.compiler.tactics import BODIES, FORM, ResolvedRewriting
from tfswap.errors import InvalidModel, TfswapError
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import control_flow
from tfswap.ir.text import format_graph, parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.bisect import Applied, first_failing
from tfswap.passes.contract import Pass
from tfswap.passes.tactics.order_bodies import order_bodies
from tfswap.passes.tactics.swap import carry_out
from tfswap.plan.plan import Plan
from tfswap.planner.problem import Problem, make_problem
from tfswap.support.files import require_regular


class _Given(NamedTuple):
    """Arguments of passes besides the graph and the target.

    Attributes:
        traced: the graph as it was read.
    """

    target: Target
    plan: Plan | None
    rewriting: ResolvedRewriting
    traced: Graph


_Arguments = Callable[[_Given, Graph], "tuple[Any, ...] | None"]


def _nothing_more(_: _Given, __: Graph) -> tuple[Any, ...]:
    return ()


def _lowering(of_plan: Callable[[Lowering, Graph], tuple[Any, ...] | None], *, flow: bool) -> _Arguments:
    def arguments(given: _Given, graph: Graph) -> tuple[Any, ...] | None:
        plan = given.plan or Plan.unchanged("", None, 0, 0, 0.0)
        facts = analyse_dataflow(graph if flow else Graph(), given.target.device)
        return of_plan(Lowering(plan, facts, given.target, given.traced), graph)

    return arguments


def _of_rewriting(of_plan: Callable[[ResolvedRewriting, Graph], tuple[Any, ...] | None]) -> _Arguments:
    return lambda given, graph: of_plan(given.rewriting, graph)


_TABLE: dict[str, tuple[Pass[...], _Arguments]] = {
    **{row.apply.name: (row.apply, _nothing_more) for row in PREPARE},
    **{row.apply.name: (row.apply, _of_rewriting(row.arguments)) for row in (*BODIES, *FORM)},
    **{row.apply.name: (row.apply, _lowering(row.arguments, flow=row.apply is carry_out)) for row in LOWER},
}
PASSES: dict[str, Pass[...]] = {name: done for name, (done, _) in _TABLE.items()}
"""All passes of the tables by name, in the order in which a step gets them."""
MOST_BYTES = 1 << 48
"""The address space of a process."""
OF_A_PLAN = frozenset(row.apply.name for row in (*BODIES, *FORM) if row.apply is not order_bodies) | {carry_out.name}
"""The passes that carry out a plan's choices."""


def target_of(device: Literal["cpu", "gpu"], *, onednn: bool = False, portable: bool = False) -> Target:
    """The target "cpu" or "gpu".

    Args:
        onednn: whether oneDNN's graph pass rewrites the step.
        portable: with TensorFlow's own ops alone.
    """
    return Target(DeviceModel(device, onednn), not portable, keeps_results=True)


def apply_passes(
    path: str, names: Sequence[str], target: Target, plan: Plan | None = None
) -> tuple[Graph, list[Applied]]:
    """The graph in the file, or on standard input for "-", and the graph after each of these passes.

    Args:
        plan: for the passes of `OF_A_PLAN`.

    Raises TfswapError for a pass that is not known or takes a plan, and a file that can't be read; InvalidModel for a
    text that is no graph, or one with a cycle, and a plan of another graph.
    """
    unknown = next((name for name in names if name not in PASSES), None)
    if unknown is not None:
        raise TfswapError(f"no pass is called {unknown!r}. There are {', '.join(PASSES)}.")
    unplanned = next((name for name in names if name in OF_A_PLAN), None) if plan is None else None
    if unplanned is not None:
        raise TfswapError(f"{unplanned} carries out a part of a plan: give it with --plan=FILE.")
    read = parse_graph(_read(path))
    try:
        for part in (read, *read.all_bodies()):
            part.topological()
            _check_sizes(part)
            _check_bodies(part)
    except ValueError as error:
        raise InvalidModel(f"{path!r} has no graph that can run: {error}") from error
    return read, list(_applied(read, names, target, plan))


def _check_sizes(graph: Graph) -> None:
    """Raise ValueError for a tensor of more bytes than a process can address."""
    for node in graph:
        for kind in node.outputs:
            if (kind.nbytes or 0) > MOST_BYTES:
                raise ValueError(f"{kind} of {node.name!r} has more bytes than a process can address")


def _check_bodies(graph: Graph) -> None:
    """Raise ValueError for a loop or a conditional with the wrong number of bodies, or bodies with other arguments or
    results.
    """
    for node, bodies in graph.bodies.items():
        flow = control_flow(node.op)
        if flow is None or (len(flow.functions) > 1 and len(bodies) != len(flow.functions)):
            wanted = 0 if flow is None else len(flow.functions)
            raise ValueError(f"{node.name!r}, a {node.op}, has {len(bodies)} bodies in place of {wanted}")
        for number, body in enumerate(bodies):
            gives = 1 if flow.is_loop and not number else len(node.outputs)
            shape = len(node.inputs) - flow.first_argument, gives
            if (len(body.feeds), len(body.fetches)) != shape:
                raise ValueError(f"body {number} of {node.name!r} must have {shape[0]} feeds and {shape[1]} fetches")


def _applied(read: Graph, names: Sequence[str], target: Target, plan: Plan | None) -> Iterator[Applied]:
    rewriting = PLAIN if plan is None else Rewriting.of(plan)
    target = dataclasses.replace(target, unrolls=rewriting.unrolled)
    given = _Given(target, plan, ResolvedRewriting(rewriting, target, _problem_of(target)), read)
    graph = read.copy()
    for name in names:
        done, arguments_of = _TABLE[name]
        arguments = arguments_of(given, graph)
        begun = time.perf_counter()
        changes = 0 if arguments is None else done(graph, target, *arguments)
        yield Applied(name, graph.copy(), changes, time.perf_counter() - begun)


def _problem_of(target: Target) -> Callable[[Dataflow], Problem]:
    costs = Costs.of(target.device)

    def problem_of(flow: Dataflow) -> Problem:
        order = [i for i, kernel in enumerate(flow.is_kernel) if kernel]
        return make_problem(flow, order, costs.rates, costs.of_step(flow))

    return problem_of


def bisect(before: Graph, applied: Sequence[Applied], command: str) -> Applied | None:
    """The first pass after whose graph `command`, which gets its text on standard input, fails; None if none does.

    Raises TfswapError where it fails for the graph before the passes, or can't be run.
    """
    words = shlex.split(command)

    def holds(graph: Graph) -> bool:
        return subprocess.run(words, input=format_graph(graph), text=True, stdout=subprocess.DEVNULL).returncode == 0

    try:
        return first_failing(before, applied, holds)
    except (OSError, ValueError) as error:
        raise TfswapError(f"--bisect={command!r}: {error}") from error


def _read(path: str) -> str:
    try:
        if path == "-":
            return sys.stdin.read()
        require_regular(Path(path))
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TfswapError(f"the graph can't be read from {path!r}: {error}") from error
