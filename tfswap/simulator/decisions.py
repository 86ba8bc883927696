"""Decisions by a step's values, in each iteration of loops: which branches its conditionals take, and when loops end.

A decision is made at one place of the step, and read at another. In loops around both places, what is read is the
decision of the same iteration, or, in the innermost of them, of the iteration before. In loops around the first place
only, it is that of the last iteration.

Not handled: conditionals in conditions of loops, and those whose predicate is neither a bool (If) nor an int32 (Case);
ends of loops whose condition can't run twice (analysis/loop_conditions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from tfswap.analysis.loop_conditions import next_arguments, repeatable_condition
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import control_flow
from tfswap.simulator.lowered_graph import Scope

Path = tuple[tuple[str, int], ...]
"""The path to a graph of a step: (node, number of its body), each in the graph before. Empty for the step itself."""


class Predicate(NamedTuple):
    """A tensor that decides which branch of conditionals is taken, or whether a loop ends.

    Attributes:
        path, tensor: where it is, and its name; the body of a loop, and None for whether an iteration is the last.
        branches: the number of branches; for the end of a loop 2, the first where the iteration is the last.
        default: the branch that is taken where it is zero.
        loops: the number of loops among the first n entries of `path`, by n.
    """

    path: Path
    tensor: str | None
    branches: int
    default: int
    loops: tuple[int, ...]


class Decision(NamedTuple):
    """A predicate's value, read in another graph.

    Attributes:
        common: the number of entries of the path that are around both.
        previous: whether it is of the iteration before, of the innermost loop around both.
        path: the graph in which it is read.
    """

    predicate: Predicate
    common: int
    previous: bool
    path: Path


class Outcome:
    """The decisions of one run: branches by predicate and by iterations of all loops around."""

    def __init__(self) -> None:
        self._taken: dict[Predicate, dict[tuple[int, ...], int]] = {}
        self._last: dict[Predicate, dict[tuple[int, ...], int]] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def expect(self, predicate: Predicate) -> None:
        """Note that a predicate is decided from here on."""
        self._taken.setdefault(predicate, {})

    def add(self, predicate: Predicate, iterations: tuple[int, ...], branch: int) -> None:
        self._taken.setdefault(predicate, {})[iterations] = branch

    def of(self, decision: Decision, iterations: tuple[int, ...]) -> int:
        """The branch of a decision, read in these iterations of the loops around."""
        predicate = decision.predicate
        if predicate not in self._last:
            taken = self._taken.get(predicate, {})
            self._last[predicate] = {
                numbers[:k]: branch for numbers, branch in sorted(taken.items()) for k in range(len(numbers) + 1)
            }
        at = iterations[: predicate.loops[decision.common]]
        if decision.previous:
            at = (*at[:-1], at[-1] - 1)
        return self._last[predicate].get(at, predicate.default)


def path_of(scope: Scope) -> Path:
    """The path to a scope's graph."""
    if scope.node is None or scope.outer is None:
        return ()
    return (*path_of(scope.outer), (scope.node.name, scope.number))


def predicate_of(scope: Scope, conditional: Node) -> Predicate | None:
    """The predicate of a conditional of `scope`; None if other graphs can't read it."""
    flow = control_flow(conditional.op)
    tensor = conditional.inputs[0]
    is_case = flow is not None and len(flow.functions) == 1
    if tensor.type.shape != () or tensor.type.dtype != ("int32" if is_case else "bool"):
        return None
    loops = _loops_around(scope)
    branches = len(scope.graph.bodies[conditional])
    return None if loops is None else Predicate(path_of(scope), tensor.name, branches, 0 if is_case else 1, loops)


def end_of(body: Scope) -> Predicate | None:
    """Whether an iteration of a loop with this `body` is the last; None if the body can't compute it."""
    loops = _loops_around(body)
    if loops is None or repeatable_condition(_condition_of(body)) is None:
        return None
    return Predicate(path_of(body), None, 2, 1, loops)


def _condition_of(body: Scope) -> Graph:
    assert body.node is not None and body.outer is not None
    return body.outer.graph.bodies[body.node][0]


def _loops_around(scope: Scope) -> tuple[int, ...] | None:
    """How many loops are around a scope, by how many of its path; None in the condition of one."""
    loops = [0]
    for around in scopes_around(scope)[1:]:
        is_loop = _is_loop(around)
        if is_loop and not around.number:
            return None
        loops.append(loops[-1] + is_loop)
    return tuple(loops)


def decisions_seen(
    scope: Scope, node: Node, predicates: Mapping[Predicate, Scope], needed: Callable[[Graph, Node], Collection[Node]]
) -> list[Decision]:
    """The decisions of `predicates` that are computed before `node` of `scope` runs, in any order of the step.

    Args:
        needed: the nodes of a graph that one of its nodes needs.
    """
    path, chain = path_of(scope), scopes_around(scope)
    found: list[Decision] = []
    for predicate, decided_in in predicates.items():
        both = zip(path, predicate.path, strict=False)
        common = next((i for i, (own, other) in enumerate(both) if own != other), min(len(path), len(predicate.path)))
        graph = chain[common].graph
        there = scopes_around(decided_in)
        outer = _node_at(there, common)
        decides = _deciding(decided_in, predicate) if outer is None else [outer]
        reads = _node_at(chain, common) or node
        if not any(reads in needed(graph, each) for each in decides):
            found.append(Decision(predicate, common, False, path))
        if predicate.loops[common]:
            found.append(Decision(predicate, common, True, path))
    return found


def _deciding(scope: Scope, predicate: Predicate) -> Collection[Node]:
    """The nodes of the predicate's graph that compute it."""
    if predicate.tensor is None:
        return next_arguments(_condition_of(scope), scope.graph).values()
    return [scope.graph.tensor(predicate.tensor).node]


def scopes_around(scope: Scope) -> list[Scope]:
    """The scopes from the step to `scope`."""
    return [*([] if scope.outer is None else scopes_around(scope.outer)), scope]


def _node_at(chain: Sequence[Scope], common: int) -> Node | None:
    """The node of the graph at depth `common` of the chain that contains the rest of the chain."""
    return chain[common + 1].node if common + 1 < len(chain) else None


def _is_loop(scope: Scope) -> bool:
    flow = None if scope.node is None else control_flow(scope.node.op)
    return flow is not None and flow.is_loop
