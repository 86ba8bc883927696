"""Nodes of tfswap in a graph of the program, which does not see them: not among its operations, not in its GraphDefs.

A session runs nodes of its own graph only, and its variables are found on its own devices. So what runs in place of the
program's nodes must be in that graph; files that the program writes must not have it.

Not handled: a node that is looked up by its name, and the graph's version, which grows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

PREFIX = "tfswap_unmodified"
"""How the names of such nodes begin."""
HIDDEN = "_tfswap_hidden"


class HiddenNodes:
    """Adds such nodes to a graph.

    Args:
        graph: the program's graph, which may be finalized.
    """

    def __init__(self, graph: Any):
        self._graph = graph
        self._lock = threading.RLock()
        self._functions: set[str] = set()
        self._plain = graph._as_graph_def, graph.get_operations
        graph._as_graph_def, graph.get_operations = self._as_graph_def, self._get_operations

    @contextlib.contextmanager
    def added(self) -> Iterator[None]:
        """Within this, nodes are added to the graph, whatever is the default graph outside."""
        import tensorflow as tf

        graph = self._graph
        with self._lock:
            finalized = graph.finalized
            if finalized:
                graph._unsafe_unfinalize()
            try:
                with graph.as_default(), tf.control_dependencies(None), tf.device(None), tf.name_scope(f"{PREFIX}/"):
                    yield
            finally:
                if finalized:
                    graph.finalize()

    def add_call(self, node: Any, functions: Sequence[Any], inputs: Mapping[str, Any]) -> Any:
        """Add a node that calls the first of these functions; the node as an operation.

        Args:
            node: its NodeDef.
            inputs: the graph's tensors, by the node's inputs.
        """
        import tensorflow as tf

        made = tf.compat.v1.GraphDef(versions=self._graph.graph_def_versions)
        made.node.add().CopyFrom(node)
        made.library.function.extend(functions)
        self._functions.update(each.signature.name for each in functions)
        with self.added():
            (operation,) = tf.graph_util.import_graph_def(
                made, input_map=dict(inputs), return_elements=[node.name], name=""
            )
        return operation

    def _get_operations(self) -> list[Any]:
        return [op for op in self._plain[1]() if not op.name.startswith(PREFIX)]

    def _as_graph_def(self, *args: Any, **kwargs: Any) -> Any:
        graph_def, version = self._plain[0](*args, **kwargs)
        _delete(graph_def.node, lambda node: node.name.startswith(PREFIX))
        _delete(graph_def.library.function, lambda function: function.signature.name in self._functions)
        return graph_def, version


def hidden_nodes(graph: Any) -> HiddenNodes:
    """The hidden nodes of a graph, which has one such object."""
    found = getattr(graph, HIDDEN, None)
    if found is None:
        found = HiddenNodes(graph)
        setattr(graph, HIDDEN, found)
    return found


def _delete(messages: Any, is_hidden: Callable[[Any], bool]) -> None:
    for i in reversed([i for i, each in enumerate(messages) if is_hidden(each)]):
        del messages[i]
