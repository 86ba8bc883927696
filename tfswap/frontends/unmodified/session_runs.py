"""A run of a session: what it needs of the session's graph, and that part as a step to plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfswap.compiler.tf1_variables import REFERENCE_VARIABLES
from tfswap.frontends.graph_def import GraphStep
from tfswap.frontends.unmodified.hidden_nodes import PREFIX
from tfswap.frontends.unmodified.traces import has_other_effects as type_has_other_effects
from tfswap.ir.op_traits import calls_functions
from tfswap.ir.types import Shape
from tfswap.runtime.shapes import Shapes
from tfswap.support.aligned import aligned_zeros, is_aligned
from tfswap.support.reach import reach


class Run(NamedTuple):
    """The arguments of a `Session._do_run`.

    Attributes:
        targets: operations.
        fetches: tensors.
        feeds: arrays, by reference of their tensors.
    """

    targets: Sequence[Any]
    fetches: Sequence[Any]
    feeds: Mapping[Any, Any]

    @property
    def key(self) -> Any:
        """What is the same in all runs of one step."""
        return tuple(op.name for op in self.targets), tuple(t.name for t in self.fetches), frozenset(self.feeds)

    @property
    def shapes(self) -> Shapes:
        """Of the feeds."""
        return tuple([np.shape(value) for value in self.feeds.values()])

    def by_name(self) -> Run:
        """The run with its feeds in the order of their tensors' names."""
        if len(self.feeds) < 2:
            return self
        return self._replace(feeds=dict(sorted(self.feeds.items(), key=lambda each: each[0].deref().name)))


def out_of_arena(run: Run) -> Run:
    """The run with feeds that the session wraps: those that it copies would be in a CPU's arena."""
    return run._replace(feeds={reference: _aligned(value) for reference, value in run.feeds.items()})


def _aligned(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if value.dtype.hasobject or not value.nbytes:
        return value
    if is_aligned(value):
        return value
    made = aligned_zeros(value.shape, value.dtype)
    made[...] = value
    return made


def needed(run: Run) -> list[Any]:
    """The operations that a run needs."""
    fed = {ref.deref().name for ref in run.feeds}

    def sources(op: Any) -> list[Any]:
        return [*(t.op for t in op.inputs if t.name not in fed), *op.control_inputs]

    return list(reach([*run.targets, *(t.op for t in run.fetches if t.name not in fed)], sources))


def _with_placeholders(graph_def: Any, fed: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """The graph with a placeholder for each fed tensor, and these tensors by its name.

    As TensorFlow feeds them: what waits for a fed node that is no placeholder still waits for the node.
    """
    named, replaced = {}, {}
    for number, tensor in enumerate(fed):
        if tensor.op.type == "Placeholder":
            named[tensor.op.name] = tensor
            continue
        name = f"{PREFIX}_fed_{number}"
        node = graph_def.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
        named[name], replaced[tensor.name] = tensor, name
    for node in graph_def.node if replaced else ():
        for i, source in enumerate(node.input):
            node.input[i] = replaced.get(source if ":" in source else f"{source}:0", source)
    return graph_def, named


def has_other_effects(ops: Sequence[Any]) -> bool:
    """Whether operations, with functions that they call, change more than variables and the state of random ops."""
    functions = ops[0].graph._functions if ops else {}
    called = [op for op in ops if functions and (calls_functions(op.type) or op.type in functions)]
    bodies = {name: functions[name].cached_definition for name in functions} if called else {}
    names = [*(op.type for op in called), *(name for op in called for name in _functions_of(op.node_def))]

    def sources(name: str) -> list[str]:
        nodes = bodies[name].node_def
        return [each for node in nodes for each in (node.op, *_functions_of(node)) if each in bodies]

    inner = reach([name for name in names if name in bodies], sources)
    types = {op.type for op in ops} | {node.op for name in inner for node in bodies[name].node_def}
    return any(map(type_has_other_effects, types - REFERENCE_VARIABLES))


def _functions_of(node: Any) -> list[str]:
    """The functions that a NodeDef names."""
    lists = [[attribute.func, *attribute.list.func] for attribute in node.attr.values()]
    return [function.name for each in lists for function in each if function.name]


def graph_step(run: Run) -> tuple[GraphStep, dict[str, Any]]:
    """The step of a run, which needs an operation, and the fed tensors by the names of its placeholders."""
    graph = (*run.targets, *(t.op for t in run.fetches))[0].graph
    graph_def, feeds = _with_placeholders(graph.as_graph_def(), [ref.deref() for ref in run.feeds])
    names = [*(t.name for t in run.fetches), *(op.name for op in run.targets)]
    return GraphStep(graph_def, list(feeds), names), feeds


def bound(feeds: Mapping[str, Any], shapes: Shapes) -> Callable[[str, Mapping[str, Any]], dict[str, Shape]]:
    """Gives the placeholders of `graph_step` these shapes."""
    known = dict(zip(feeds, shapes, strict=True))
    return lambda _, given: {name: known[name] for name in given}
