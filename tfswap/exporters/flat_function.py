"""IR to functions of flat tensors: for steps in two calls (passes/tactics/outer_gradients.py), and for measurements."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from tfswap.exporters.function import call_attributes, runnable, trace, unregister
from tfswap.ir.graph import Graph
from tfswap.native.forks import refuse_in_late_child
from tfswap.support.gc_pause import without_collector


class FlatFunction:
    """A function of flat tensors, called with Grappler off and without tapes.

    Args:
        graph: its feeds and fetches are the function's, in their order.
        name: of the function.
        arguments: tensors or specs like its arguments, feed by feed.
        original: the trace that it was made from.

    Attributes:
        graph: the FuncGraph.
    """

    @without_collector
    def __init__(self, graph: Graph, name: str, arguments: Sequence[Any], original: Any):
        from tensorflow.python.eager.polymorphic_function import atomic_function

        self.graph, bodies = trace(graph, name, arguments)
        self._atomic, body_names = runnable(self.graph, bodies, original)
        self._name = self._atomic.name.decode()
        self._named = original.graph.name
        self._results = len(self.graph.outputs)
        self._explained = atomic_function.InterpolateRuntimeError(self._atomic)
        weakref.finalize(self, unregister, body_names).atexit = False

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        """Run it immediately. Raises what its kernels raise."""
        from tensorflow.python.eager import context, execute
        from tensorflow.python.framework import errors

        refuse_in_late_child(self._named)
        try:
            return list(execute.execute(self._name, self._results, list(tensors), call_attributes(), context.context()))
        except errors.OpError:
            with self._explained:
                raise
