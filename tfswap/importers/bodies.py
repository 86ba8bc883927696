"""Imports the functions of loops and conditionals as bodies: graphs of their own, with the sizes of their arguments.

Several nodes can run one library function with arguments of different sizes, so each node has its own copy.

Not handled: dimensions of a loop variable that change between iterations stay unknown, and so do the sizes of tensors
computed from it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tfswap.analysis.integer_ranges import Ranges
from tfswap.analysis.integer_values import Integers, Loop, Values
from tfswap.errors import InvalidModel
from tfswap.importers.facts import is_certain, larger, opened, says_more
from tfswap.importers.graph_def import import_graph_def
from tfswap.importers.library import Ends, as_graph_def, drop_lost_colocations
from tfswap.importers.list_elements import (
    Contents,
    either,
    find_contents,
    has_contents,
    in_branch,
    new_facts,
    of_branches,
)
from tfswap.importers.opaque_calls import functions_of
from tfswap.importers.shapes import Argument, Content, infer_shapes
from tfswap.importers.size_bounds import decides_sizes, gives_shape_values, largest_shapes, shape_values
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import control_flow, empties_list
from tfswap.ir.types import TensorType
from tfswap.ir.unneeded import prune_traced
from tfswap.ir.views import passed_on
from tfswap.kernels.kernel_memory import chosen_inputs, no_larger_inputs
from tfswap.support.reach import reach

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2


def import_with_bodies(
    graph_def: graph_pb2.GraphDef,
    arguments: Mapping[str, Argument],
    feeds: Sequence[str],
    fetches: Sequence[str],
    targets: Sequence[str],
    known_types: Mapping[str, TensorType] | None = None,
) -> Graph:
    """The IR of `graph_def`, pruned to what runs, with shapes as TensorFlow infers them, and with bodies.

    Args:
        arguments: the types and values of the feeds, by name.
        feeds, fetches, targets: as of `import_graph_def`.
        known_types: types of tensors whose sizes TensorFlow can't infer ("node:0"; "loop[1]/node:0" in a body, as of
            `inside`).

    Raises:
        UnsupportedGraph: the graph or a body has TensorFlow 1 loop frames.
        InvalidModel: the graph does not fit the arguments.
    """
    ends = feeds, fetches, targets
    functions = _Functions(graph_def)
    with contextlib.closing(_Import(graph_def, arguments, ends, known_types or {}, functions)) as made:
        made.take_back_from_choices()
        return made.graph


def inside(node: str, position: int) -> str:
    """The prefix of tensor names in a body of a loop or conditional, by the position of the function."""
    return f"{node}[{position}]/"


class _Called(NamedTuple):
    """A function that a loop or a conditional runs.

    Attributes:
        known_types: as of `import_with_bodies`, in its body.
    """

    name: str
    known_types: Mapping[str, TensorType]


class _Functions:
    """The library's functions as bodies.

    A loop is imported once more when more is known about its variables, with all loops in it. So a function is imported
    once for the same arguments, and each further node that runs it gets a copy.

    Calls in a function are inlined, which makes further functions in a library of its own: by name they are not those
    of another function.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef):
        self._library: Mapping[str, Any] = {f.signature.name: f for f in graph_def.library.function}
        self._inside: dict[str, _Functions] = {}  # by function, those that its nodes run
        self._imported: dict[str, list[tuple[Sequence[Argument], Mapping[str, TensorType], Graph, list[Argument]]]] = {}

    def body(self, called: _Called, arguments: Sequence[Argument]) -> tuple[Graph, list[Argument]]:
        """The graph of a function for these arguments, and the facts about its results."""
        imported = self._imported.setdefault(called.name, [])
        for given, known_types, graph, results in imported:
            if given == arguments and known_types == called.known_types:
                return graph.copy(), results
        graph, results = self._import(called, arguments)
        imported.append((arguments, called.known_types, graph, results))
        return graph, results

    def _import(self, called: _Called, arguments: Sequence[Argument]) -> tuple[Graph, list[Argument]]:
        graph_def, ends, calls = as_graph_def(self._library[called.name], self._library)
        if called.name not in self._inside:
            same = all(self._library.get(f.signature.name) == f for f in graph_def.library.function)
            self._inside[called.name] = self if same else _Functions(graph_def)
        given = dict(zip(ends[0], arguments, strict=True))
        inside = self._inside[called.name]
        with contextlib.closing(_Import(graph_def, given, ends, called.known_types, inside)) as made:
            made.graph.library = None  # the functions of its loops and conditionals are bodies
            made.graph.calls = calls
            return made.graph, made.results()


class _Import:
    """A graph and its bodies during the import. The graph is imported again whenever more sizes are known."""

    def __init__(
        self,
        graph_def: graph_pb2.GraphDef,
        arguments: Mapping[str, Argument],
        ends: Ends,
        known_types: Mapping[str, TensorType],
        functions: _Functions,
    ):
        # A body's node can be colocated with a node outside of the body, which is not in this graph.
        drop_lost_colocations(graph_def.node)
        self._graph_def = graph_def
        self._arguments = arguments
        self._ends = ends
        self.functions = functions
        self._scratch = contextlib.ExitStack()
        self._known: dict[str, Argument] = {}
        self._pending: dict[str, Argument] = {}  # pending facts
        self._open: frozenset[str] = frozenset()
        self._decides = [n.name for n in graph_def.node if decides_sizes(n.op)]
        self._holds = [n.name for n in graph_def.node if has_contents(n.op)]
        self._known_inside = {name: kind for name, kind in known_types.items() if "[" in name}
        known_types = {name: kind for name, kind in known_types.items() if name not in self._known_inside}
        if known_types or any(a.bound for a in arguments.values()):
            self._arguments = {name: opened(a) if a.bound else a for name, a in arguments.items()}
            self._infer()
            if certain := {name: kind for name, kind in known_types.items() if not kind.bound}:
                self._declare(certain)
            self._bind(exact=True)
            self._open = self._unknown()
            self._arguments = arguments
            self._declare(known_types)
        else:
            self._infer()
        self._take_shapes()
        self._bind(exact=True)
        self._open |= self._unknown()
        self._take_back()
        self._bind()
        self._import_bodies()

    def argument(self, name: str) -> Argument:
        """The tensor as an argument of another graph."""
        argument = self._inferred.argument(name)
        content = self._contents.get(self.graph.tensor(name))
        bound = name in self._open if content is None else content.bound
        return replace(argument, bound=self._bounded() and bound, content=content)

    @property
    def _contents(self) -> Contents:
        """The contents of lists and optionals, as far as known now."""
        if self._found is None:
            self._found = find_contents(self.graph, self._inferred, self._given, self._bounded())
        return self._found

    def _given(self, tensor: Output) -> Content | None:
        """The contents of a list or an optional that is an argument, or a result of a loop or a conditional."""
        found = self._arguments.get(tensor.node.name) or self._known.get(tensor.name)
        return None if found is None else found.content

    def argument_and_value(self, name: str) -> Argument:
        """The tensor as an argument with its value, for a body that runs once."""
        argument = self.argument(name)
        value = self._inferred.value(name)
        return replace(argument, value=value, bound=argument.bound or (value is not None and self._bounded()))

    def value(self, name: str) -> tuple[int, ...] | None:
        """A tensor's integers, where they are certain."""
        return None if self._bounded() else self._inferred.value(name)

    def results(self) -> list[Argument]:
        """The graph's results."""
        return [self._result(f) for f in self.graph.fetches]

    def _result(self, tensor: Output) -> Argument:
        argument = self.argument(tensor.name)
        given = self._arguments.get(passed_on(tensor).node.name)
        # A branch can pass on a shape that is known outside, which decides later sizes.
        return argument if given is None or given.value is None else replace(argument, value=given.value)

    def known_inside(self, node: str, position: int) -> dict[str, TensorType]:
        """The declared types of tensors in a function that a node runs, by their names there."""
        prefix = inside(node, position)
        found = self._known_inside.items()
        return {name.removeprefix(prefix): kind for name, kind in found if name.startswith(prefix)}

    def _import_bodies(self) -> None:
        bodies: dict[str, tuple[Graph, ...]] = {}
        for node in [n for n in self.graph.topological() if control_flow(n.op)]:
            if self._pending_matters(node):
                self._apply_pending()
            bodies[node.name], results = _bodies(node, self)
            # The body of a loop shows more about its results than the node does: the contents of lists.
            self._learn([{f"{node.name}:{i}": result for i, result in enumerate(way)} for way in results])
        self._apply_pending()
        self.graph.bodies = {self.graph[name]: graphs for name, graphs in bodies.items()}

    def _learn(self, ways: Sequence[Mapping[str, Argument]]) -> None:
        """Add facts about tensors: the first of several alternatives that the graph allows.

        Certain facts stay pending until they matter: inferring all shapes anew takes as long as importing the graph,
        and an unrolled decoder has a loop for every token.
        """
        certain = len(ways) == 1 and not any(r.bound for r in ways[0].values())
        if certain:
            self._pending |= ways[0]
            return
        self._apply_pending()
        for results in ways:
            if self._take(results):
                return

    def _apply_pending(self) -> None:
        """Add the pending facts: all of them, or, where they contradict each other, as many as are consistent."""
        pending, self._pending = self._pending, {}
        if pending and not self._take(pending):
            for name, result in pending.items():
                self._take({name: result})

    def _take(self, results: Mapping[str, Argument]) -> bool:
        """Add facts about tensors that are new; whether the graph allows them."""
        more = {name: r for name, r in results.items() if says_more(r, self._inferred.argument(name))}
        if more and not self._takes(more):
            return False
        self._known |= {name: r for name, r in results.items() if r.content is not None}
        self._found = None
        self._bind()
        return True

    def _pending_matters(self, node: Node) -> bool:
        """Whether pending facts may say more about a node's inputs."""
        if not self._pending:
            return False
        given = reach(node.inputs, lambda tensor: () if is_certain(tensor) else tensor.node.inputs)
        return any(tensor.name in self._pending for tensor in given if not is_certain(tensor))

    def _takes(self, more: Mapping[str, Argument]) -> bool:
        """Add new facts, unless two sizes that turn out to be equal would have different bounds; whether it did."""
        before = self._known
        self._known = {**before, **more}
        try:
            self._infer()
        except InvalidModel:
            self._known = before
            return False
        return True

    @property
    def graph(self) -> Graph:
        """The graph, with all facts known now."""
        if self._graph is None:
            # Tensors without a size before the bounds have one because of the bounds.
            bounds = self._open if self._bounded() else ()
            self._graph = import_graph_def(self._graph_def, *self._ends, bounds=bounds)
            prune_traced(self._graph)
        return self._graph

    def close(self) -> None:
        """Free TensorFlow's graph; afterwards nothing more can be inferred."""
        self._scratch.close()

    def _take_shapes(self) -> None:
        """Add values of shapes that TensorFlow's inference does not compute. It computes those of Shape ops."""
        sizes = [n.name for n in self._graph_def.node if gives_shape_values(n.op)]
        while sizes and self._unknown():
            found: dict[str, Argument] = {}
            for node in (self.graph[name] for name in sizes if name in self.graph):
                for i, value, shape in shape_values(self.graph, node, self.value):
                    if (name := f"{node.name}:{i}") not in self._known:
                        found[name] = replace(self._inferred.argument(name), shape=shape, value=value)
            if not found:
                return
            self._known |= found
            self._infer()

    def take_back_from_choices(self) -> None:
        """Bound the inputs of element-wise choices by the size of the result. Bounds make the iteration counts of loops
        uncertain, so this comes last, and only where sizes are still unknown.
        """
        if self._unknown() and any(chosen_inputs(node.op) for node in self.graph):
            self._take_back(chosen_inputs)
            self._bind()
            self._import_bodies()

    def _take_back(self, inputs_of: Callable[[str], tuple[int, ...]] = no_larger_inputs) -> None:
        """Bound the inputs of element-wise ops by the declared size of the result (`tf.ensure_shape`).

        Args:
            inputs_of: positions of an op's inputs that are no larger than its result.
        """
        while self._unknown():
            bounds: dict[str, Argument] = {}
            for node in self.graph:
                for tensor in (node.inputs[p] for p in inputs_of(node.op)):
                    shape, result = tensor.type.shape, node.outputs[0].shape
                    if tensor.type.nbytes is not None or shape is None or result is None or len(shape) != len(result):
                        continue
                    bound = tuple(most if d is None else d for d, most in zip(shape, result, strict=True))
                    if None not in bound:
                        bounds[tensor.name] = replace(self._inferred.argument(tensor.name), shape=bound, bound=True)
            if not bounds or not self._takes(bounds):
                return

    def _declare(self, known_types: Mapping[str, TensorType]) -> None:
        """Add declared types of tensors."""
        for name, kind in known_types.items():
            self._known[name] = replace(self._inferred.argument(name), shape=kind.shape, bound=kind.bound)
        self._infer()

    def _infer(self) -> None:
        inferred = infer_shapes(self._graph_def, self._arguments, self._known)
        self.close()
        self._scratch.callback(inferred.forget)
        self._inferred = inferred
        self._graph: Graph | None = None
        self._found: Contents | None = None

    def _bounded(self) -> bool:
        return any(a.bound for a in (*self._known.values(), *self._arguments.values()))

    def _unknown(self) -> frozenset[str]:
        tensors = (node.out(i) for node in self.graph for i in range(len(node.outputs)))
        return frozenset(t.name for t in tensors if t.type.nbytes is None)

    def _bind(self, *, exact: bool = False) -> None:
        """Give tensors whose sizes depend on values their largest sizes, with `exact` only the exact ones. Give
        elements of lists and optionals the sizes of the tensors that were put in.
        """
        while self._decides or self._holds:
            held = [self.graph[name] for name in self._holds if name in self.graph]
            bounds = dict(found for node in held for found in new_facts(node, self._inferred, self._contents))
            ranges = Ranges(self.graph)
            for node in (self.graph[name] for name in self._decides if name in self.graph):
                for i, shape, is_exact in largest_shapes(node, ranges):
                    if exact and not is_exact:
                        continue
                    name = f"{node.name}:{i}"
                    certain = self._inferred.evaluated_shape(name)
                    argument = replace(self._inferred.argument(name), shape=shape, bound=not is_exact)
                    bounds[name] = argument if certain is None else replace(argument, shape=certain, bound=False)
            # Elements of one list can have different sizes, which contradict each other.
            sizes = {name: argument for name, argument in bounds.items() if not argument.handles}
            if not (bounds and self._takes(bounds)) and not (sizes and len(sizes) < len(bounds) and self._takes(sizes)):
                return


def _bodies(node: Node, made: _Import) -> tuple[tuple[Graph, ...], list[list[Argument]]]:
    """The bodies of a loop or a conditional, and alternative facts about its results: the largest sizes first."""
    kind = control_flow(node.op)
    assert kind is not None
    called = [_Called(name, made.known_inside(node.name, k)) for k, name in enumerate(functions_of(node))]
    passed = [t.name for t in node.inputs[kind.first_argument :]]
    if kind.is_loop:
        bodies, given = _loop(
            called, [made.argument(name) for name in passed], [made.value(name) for name in passed], made.functions
        )
        return bodies, [given]
    arguments = [made.argument_and_value(name) for name in passed]
    given = ([in_branch(a, k, len(called)) for a in arguments] for k in range(len(called)))
    branches = [made.functions.body(each, inputs) for each, inputs in zip(called, given, strict=True)]
    results = [_of_branches(branches, i) for i in range(len(branches[0][1]))]
    ways = max(map(len, results), default=1)
    return tuple(graph for graph, _ in branches), [[r[min(way, len(r) - 1)] for r in results] for way in range(ways)]


def _of_branches(branches: Sequence[tuple[Graph, list[Argument]]], position: int) -> list[Argument]:
    """Alternative facts about a conditional's result: its largest size, then the bounds of branches with smaller ones.

    A branch that drops rows can have the lower bound, and the branch that runs where there is nothing to drop the
    higher one; then the lower bound holds for both. Keras' optimizers bound a table's gradient by the table's rows, and
    by the number of ids. The ops that read the result decide which alternative is consistent.
    """
    given = _held(branches, position)
    largest = functools.reduce(larger, given)
    less = [replace(largest, shape=r.shape) for r in given if r.shape is not None and r.bound and 0 not in r.shape]
    less.sort(key=lambda r: math.prod(d or 0 for d in r.shape or ()), reverse=True)
    content = of_branches([results[position].content for _, results in branches])
    return [replace(result, content=content) for result in (largest, *(less if largest.bound else ()))]


def _held(branches: Sequence[tuple[Graph, list[Argument]]], position: int) -> list[Argument]:
    """The facts about a result, by branch. Branches that return an empty list or optional count only where all do."""
    every = [results[position] for _, results in branches]
    return [r for r, (graph, _) in zip(every, branches, strict=True) if not _is_empty(graph.fetches[position])] or every


def _is_empty(tensor: Output) -> bool:
    """Whether it is a list without elements, or an optional without value."""
    return empties_list(passed_on(tensor).node.op)


def _loop(
    called: Sequence[_Called], arguments: Sequence[Argument], values: Sequence[Values | None], functions: _Functions
) -> tuple[tuple[Graph, ...], list[Argument]]:
    """The condition and the body of a loop, with the sizes that its variables have in every iteration."""
    condition, body = called
    steady, made, results = _steady(body, list(arguments), functions)
    if known_types := _with_invariants(made, arguments, values):
        # Values in a loop without iterations can contradict each other.
        with contextlib.suppress(InvalidModel):
            steady, made, results = _steady(body, known_types, functions)
    test = functions.body(condition, steady)[0]
    return (test, made), _after_loop(test, made, arguments, values, results)


def _steady(
    body: _Called, given: list[Argument], functions: _Functions
) -> tuple[list[Argument], Graph, list[Argument]]:
    """Facts about a loop's variables that hold in all iterations, the body for these, and its results."""
    while True:
        made, results = functions.body(body, given)
        common = [either(before, after) for before, after in zip(given, results, strict=True)]
        if common == given:
            return given, made, results
        given = common


def _with_invariants(
    body: Graph, arguments: Sequence[Argument], values: Sequence[Values | None]
) -> list[Argument] | None:
    """`arguments` with the values of loop invariants, where the body has tensors of unknown size; None where no value
    is known. The gradient of a filter in a loop of `tf.vectorized_map` has a shape that is a loop invariant.
    """
    if all(kind.nbytes is not None for node in body for kind in node.outputs):
        return None
    handed_on = [passed_on(fetch).node is feed for feed, fetch in zip(body.feeds, body.fetches, strict=True)]
    known_types = [
        replace(one, value=value) if same and value is not None else one
        for one, value, same in zip(arguments, values, handed_on, strict=True)
    ]
    return None if known_types == list(arguments) else known_types


def _after_loop(
    condition: Graph,
    body: Graph,
    arguments: Sequence[Argument],
    values: Sequence[Values | None],
    results: list[Argument],
) -> list[Argument]:
    """`results` with the lengths of lists that grow in the iterations, where these can be counted."""
    grown = [i for i, r in enumerate(results) if r.content is not None and r.content.length is None]
    lengths = {i: a.content.length for i, a in enumerate(arguments) if a.content is not None}
    if not any(lengths.get(i) is not None for i in grown):
        return results
    given = [v if (n := lengths.get(i)) is None else (n,) for i, v in enumerate(values)]
    test, change = (Integers(g, g.topological(), lengths=True) for g in (condition, body))
    trips, _ = Loop(condition, body, test, change).run(given, bound=False)
    if trips is None:
        return results
    return [
        replace(r, content=replace(r.content, length=after[0])) if i in grown and r.content and after else r
        for i, (r, after) in enumerate(zip(results, trips[-1], strict=True))
    ]
