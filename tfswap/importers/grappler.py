"""TensorFlow's own optimizers, run on a graph outside of a session."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2
    from tensorflow.core.protobuf import rewriter_config_pb2

LARGE = 10_000
"""Nodes from which on it counts what the optimizers leave behind: some 8 KiB for each node."""


def run_grappler(
    graph_def: graph_pb2.GraphDef, kept: Iterable[str], options: rewriter_config_pb2.RewriterConfig, cluster: Any = None
) -> graph_pb2.GraphDef:
    """What Grappler makes of `graph_def`, however small that is.

    Args:
        graph_def: the graph.
        kept: names of nodes that are there afterwards, under these names.
        options: which optimizers run, and how.
        cluster: the devices (`tensorflow.python.grappler.cluster.Cluster`); else this machine's.

    Raises:
        tf.errors.OpError: where an optimizer fails.
    """
    from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
    from tensorflow.python.grappler import tf_optimizer

    meta = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
    meta.collection_def["train_op"].node_list.value.extend(kept)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.CopyFrom(options)
    config.graph_options.rewrite_options.min_graph_nodes = -1
    made = tf_optimizer.OptimizeGraph(config, meta, cluster=cluster)
    if len(graph_def.node) > LARGE:
        _give_back()
    return made


def _give_back() -> None:
    """Let the system have what malloc keeps of the copies that the optimizers have made, where there is such a call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
