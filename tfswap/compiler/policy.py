"""The tactics that a user allows for each tensor of a step, by `policy=` and by `tfswap.keep`.

The policy is called once for each tensor when a step is planned. Its answers are recorded in the graph as permits,
which planner and passes follow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfswap.compiler.marks import marked_to_keep
from tfswap.errors import TfswapError
from tfswap.ir.graph import Graph, Node, Output, Variable
from tfswap.ir.op_traits import VARIABLE, is_const, is_feed, is_view, reads_variable, turns_on_copy_on_read
from tfswap.ir.permits import ANYTHING, STATE, TACTICS, TENSOR_TACTICS, Permit
from tfswap.ir.python_calls import held_until
from tfswap.ir.views import origin

KEPT = Permit(frozenset(), "marked with tfswap.keep")
HELD = Permit(frozenset(), "a Python function holds it until its gradient has been computed")


@dataclass(frozen=True)
class TensorFacts:
    """The facts of a tensor that a policy gets.

    They are of the step after TensorFlow's own optimizers, which may fold, fuse and rename nodes.

    Attributes:
        name: TensorFlow's name ("node:0"); in the body of a loop or a conditional prefixed by the body's
            ("while[1]/mul:0"). A variable has its own ("dense/kernel"), or that of the step's argument where others
            have the same.
        op: the type of the op that computes it; VARIABLE for a variable.
        shape: its shape, in elements; the largest possible one where values decide it.
        dtype: its element type, by TensorFlow's name ("float32").
        nbytes: its bytes.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    _locate: Callable[[], str | None] = field(repr=False, compare=False)
    _tensor: str = field(repr=False, compare=False, default="")

    @property
    def tensor(self) -> str:
        """The name of the tensor in graphs; of a variable, that of its handle."""
        return self._tensor or self.name

    @property
    def line(self) -> str | None:
        """The user's own line that made it ("model.py:12"), where TensorFlow knows it."""
        return self._locate()  # computed on demand: for thousands of nodes it takes long


Policy = Callable[[TensorFacts], Collection[str] | None]
"""From a tensor's or a variable's facts to the tactics that may be used on it, of TACTICS; None for all."""


def note_permits(
    graph: Graph, kept: Collection[str], policy: Policy | None, locate: Callable[[str], str | None]
) -> None:
    """Record the permits of the tensors of a step and its bodies, in place.

    Args:
        kept: names of tensors that must stay.
        locate: as of Optimizer.

    Raises:
        TfswapError: the policy gives an invalid answer. Errors of the policy itself are passed on.
    """
    bodies = {f"{name}/": body for name, body in graph.named_bodies().items()}
    for within, part in {"": graph, **bodies}.items():
        for tensor in _movable(part, arguments=bool(within)) if policy is not None else ():
            assert policy is not None
            part.restrict(tensor, _permit(policy, _facts(tensor, within, locate)))
        for tensor in (held for node in part for held in held_until(node)):
            part.restrict(origin(tensor), HELD)
        for name in marked_to_keep(part):
            part.restrict(origin(part.tensor(name)), KEPT)
    for feed, variable in ((feed, graph.variables.get(feed.name)) for feed in graph.feeds):
        if variable is not None and variable.type.nbytes:
            permit = ANYTHING if policy is None else _permit(policy, _variable_facts(feed, variable))
            graph.restrict(feed.out(), KEPT if variable.kept else permit)
    for name in kept:
        graph.restrict(origin(graph.tensor(name)), KEPT)


def allowed_everywhere(graph: Graph) -> frozenset[str]:
    """The tactics that the policy forbids for no tensor of a step and its bodies."""
    permits = (
        permit
        for part in (graph, *graph.all_bodies())
        for tensor, permit in part.permits.items()
        if tensor.type.dtype != "resource"
    )
    return ANYTHING.tactics.intersection(*(permit.tactics for permit in permits if permit not in (KEPT, HELD)))


def _movable(graph: Graph, *, arguments: bool) -> Iterator[Output]:
    """The tensors of the step with memory of their own.

    Args:
        arguments: include arguments. A loop saves those of an iteration as it saves computed tensors.
    """
    feeds = set(graph.feeds)
    for node in graph:
        op = node.op
        # Rows of a variable are a tensor of their own.
        there = is_const(op) or (reads_variable(op) and not turns_on_copy_on_read(op))
        given = is_feed(op) or node in feeds
        if there or is_view(op) or (given and not arguments):
            continue
        yield from (node.out(index) for index, kind in enumerate(node.outputs) if kind.nbytes)


def _facts(tensor: Output, within: str, locate: Callable[[str], str | None]) -> TensorFacts:
    node, kind = tensor.node, tensor.type
    assert kind.shape is not None and kind.nbytes is not None, "its size is known"
    shape = tuple(size for size in kind.shape if size is not None)
    return TensorFacts(within + tensor.name, node.op, shape, kind.dtype, kind.nbytes, lambda: locate(node.name))


def _variable_facts(handle: Node, variable: Variable) -> TensorFacts:
    name, kind = variable.name, variable.type
    assert kind.shape is not None and kind.nbytes is not None, "its size is known"
    shape = tuple(size for size in kind.shape if size is not None)
    return TensorFacts(name, VARIABLE, shape, kind.dtype, kind.nbytes, lambda: None, handle.out().name)


def _permit(policy: Policy, facts: TensorFacts) -> Permit:
    """The policy's permit of a tensor. Raises TfswapError for an invalid answer."""
    given: Any = policy(facts)
    if given is None:
        return ANYTHING
    is_several = isinstance(given, Collection) and not isinstance(given, (str, bytes, Mapping))
    tactics: list[Any] = [*given] if is_several else [given]
    if not is_several or any(tactic not in TACTICS for tactic in tactics):
        raise TfswapError(
            f"policy returned {given!r}, of type {type(given).__name__}, for {facts.name!r}: it may return None, which "
            f"allows everything, or a collection of tactics, of {', '.join(map(repr, TACTICS))}; () is for what must "
            "stay"
        )
    if facts.op == VARIABLE and STATE in tactics:
        return ANYTHING
    allowed = [tactic for tactic in TENSOR_TACTICS if tactic in tactics]
    only = " and ".join(map(repr, allowed))
    why = f"policy allows {f'only {only}' if allowed else 'nothing'}"
    return Permit(frozenset() if facts.op == VARIABLE else frozenset(allowed), why)
