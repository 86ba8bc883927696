"""Finds the user's source line that created a node, also for nodes of inlined functions and of bodies.

TensorFlow records a stack trace for each node of a traced function. An inlined node is called "call/node", with the
name of the call and its own name in the called function.

Not handled: two bodies with nodes of the same name. All their lines are reported.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from tfswap.importers.inline import CALLS
from tfswap.importers.references import called_functions
from tfswap.ir.op_traits import control_flow

# Frames of these packages are not the user's own lines.
LIBRARIES = ("tensorflow", "keras", "tf_keras", "tfswap")

# TensorFlow copies the loops and conditionals of a called function when it differentiates it, without their traces. It
# adds this suffix to the names of their functions.
REWRITTEN = "_rewritten"

Frame = tuple[str, int]
"""A file and a line of it."""


class SourceLines:
    """Gives the user's source line that created a node ("model.py:12") by the node's name, or None.

    Args:
        concrete: the trace that the nodes come from.
    """

    def __init__(self, concrete: Any):
        self._concrete = concrete
        self._functions = {name: _Function(function, self) for name, function in concrete.graph._functions.items()}

    def __call__(self, name: str) -> str | None:
        if (own := self._own(name)) is not None:
            return _line(_frames(own.traceback))
        lines = {_line(function.frames(inner)) for function, inner in self._origins(name)}
        return " or ".join(sorted(filter(None, lines))) or None

    def debug_info(self, names: Iterable[str]) -> Any:
        """The trace's GraphDebugInfo with `names` added. TensorFlow reads source lines from it for its errors."""
        made = _Merged(self._concrete._inference_function.graph_debug_info)
        for name in names:
            if name not in made.info.name_to_trace_id:
                origins = [(function, inner) for function, inner in self._origins(name) if inner in function.traces]
                if len({_line(function.frames(inner)) for function, inner in origins}) == 1:
                    made.add(name, *origins[0])
        return made.info

    def called(self, node_op: str, attr: Mapping[str, Any]) -> str | None:
        """The function that a node calls; None where it is no call that TensorFlow inlines."""
        if node_op in self._functions:  # TensorFlow 1's calls have their functions' names for ops
            return node_op
        return attr["f"].func.name if node_op in CALLS else None

    def frames_of_loop(self, bodies: Collection[str]) -> list[Frame]:
        """The stack trace of the loop or conditional that runs `bodies`; empty where unknown."""
        for function in self._functions.values():
            for name, run in function.loops.items():
                if name in function.traces and set(run) == bodies:
                    return _frames(function.traces[name])
        return []

    def _own(self, name: str) -> Any:
        try:
            return self._concrete.graph.get_operation_by_name(name)
        except (KeyError, ValueError):
            return None

    def _origins(self, name: str) -> list[tuple[_Function, str]]:
        """The functions that a node can come from, and its name there."""
        for prefix, rest in _splits(name):
            own = self._own(prefix)
            if own is not None and (called := self.called(own.type, own.node_def.attr)) is not None:
                return self._within(called, rest)
        return [origin for function in self._functions for origin in self._within(function, name)]

    def _within(self, function: str, name: str) -> list[tuple[_Function, str]]:
        made = self._functions.get(function)
        if made is None:
            return []
        if name in made.traces or name in made.loops:
            return [(made, name)]
        for prefix, rest in _splits(name):
            if prefix in made.calls:
                return self._within(made.calls[prefix], rest)
        return []


class _Function:
    """A function that the trace runs."""

    def __init__(self, function: Any, lines: SourceLines):
        self._function = function
        self._lines = lines

    @functools.cached_property
    def info(self) -> Any:
        return getattr(self._function, "graph_debug_info", None)  # TensorFlow 1's functions have none

    @functools.cached_property
    def traces(self) -> Mapping[str, Any]:
        """Stack traces of its nodes, by their names."""
        from tensorflow.python.util import tf_stack

        return {} if self.info is None else tf_stack.LoadTracesFromDebugInfo(self.info)

    @functools.cached_property
    def calls(self) -> dict[str, str]:
        """The functions that its nodes call, by the nodes' names."""
        found = {n.name: self._lines.called(n.op, n.attr) for n in self._nodes}
        return {name: called for name, called in found.items() if called is not None}

    @functools.cached_property
    def loops(self) -> dict[str, list[str]]:
        """The functions of its loops and conditionals, by these nodes' names."""
        return {n.name: called_functions(n) for n in self._nodes if control_flow(n.op)}

    def frames(self, name: str) -> list[Frame]:
        """The stack trace of a node, outermost first."""
        if name in self.traces:
            return _frames(self.traces[name])
        return self._lines.frames_of_loop({body.partition(REWRITTEN)[0] for body in self.loops[name]})

    @property
    def _nodes(self) -> Any:
        return self._function.cached_definition.node_def


class _Merged:
    """A GraphDebugInfo into which others are merged: files, frames and traces, which refer to each other by number."""

    def __init__(self, info: Any):
        self.info = type(info)()
        self.info.CopyFrom(info)
        self._first_trace: dict[_Function, int] = {}

    def add(self, name: str, function: _Function, inner: str) -> None:
        """Give the node `name` the stack trace of `inner` in `function`."""
        if function not in self._first_trace:
            self._first_trace[function] = self._take_in(function.info)
        self.info.name_to_trace_id[name] = self._first_trace[function] + function.info.name_to_trace_id[inner]

    def _take_in(self, other: Any) -> int:
        files = len(self.info.files)
        frames, traces = (max(there, default=-1) + 1 for there in (self.info.frames_by_id, self.info.traces_by_id))
        self.info.files.extend(other.files)
        for number, frame in other.frames_by_id.items():
            self.info.frames_by_id[frames + number].CopyFrom(frame)
            self.info.frames_by_id[frames + number].file_index += files
        for number, trace in other.traces_by_id.items():
            self.info.traces_by_id[traces + number].frame_id.extend(frames + f for f in trace.frame_id)
        return traces


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """("a", "b/c") and ("a/b", "c") for "a/b/c"."""
    parts = name.split("/")
    return (("/".join(parts[:i]), "/".join(parts[i:])) for i in range(1, len(parts)))


def _frames(trace: Any) -> list[Frame]:
    return [(frame.filename, frame.lineno) for frame in trace or ()]


def _line(frames: Iterable[Frame]) -> str | None:
    """The innermost line outside of LIBRARIES."""
    own = [f"{file}:{line}" for file, line in frames if not file.startswith(_library_folders())]
    return own[-1] if own else None


@functools.cache
def _library_folders() -> tuple[str, ...]:
    found = [importlib.util.find_spec(name) for name in LIBRARIES]
    return tuple(os.path.join(os.path.dirname(spec.origin), "") for spec in found if spec and spec.origin)
