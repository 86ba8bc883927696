"""Runs TensorFlow's own graph optimizers on a graph outside of a session."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2
    from tensorflow.core.protobuf import rewriter_config_pb2

LARGE = 10_000
"""Graphs with more nodes: the optimizers leave some 8 KiB per node in malloc, which are returned to the system."""
NO_GPU_KERNEL = re.compile(
    rb"^[^\n]*No registered '[^\n]*' OpKernel for GPU .*?(?=^[IWEF]\d{4} |^\d{4}-\d\d-\d\d |\Z)", re.M | re.S
)
"""The message of a TensorFlow without GPUs for a node on a GPU: the node, and all registered kernels."""


def run_grappler(
    graph_def: graph_pb2.GraphDef, kept: Iterable[str], options: rewriter_config_pb2.RewriterConfig, cluster: Any = None
) -> graph_pb2.GraphDef:
    """`graph_def` after Grappler, which runs on graphs of any size here.

    Args:
        graph_def: the graph.
        kept: names of nodes that must stay, under these names.
        options: Grappler's options.
        cluster: the devices (`tensorflow.python.grappler.cluster.Cluster`). None: this machine's.

    Raises:
        tf.errors.OpError: an optimizer fails.
    """
    from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
    from tensorflow.python.grappler import tf_optimizer

    meta = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
    meta.collection_def["train_op"].node_list.value.extend(kept)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.CopyFrom(options)
    config.graph_options.rewrite_options.min_graph_nodes = -1
    with without_message(NO_GPU_KERNEL) if _has_absent_gpu(cluster) else contextlib.nullcontext():
        made = tf_optimizer.OptimizeGraph(config, meta, cluster=cluster)
    if len(graph_def.node) > LARGE:
        _trim_heap()
    return made


def _has_absent_gpu(cluster: Any) -> bool:
    import tensorflow as tf

    kinds = {device.properties.type for device in cluster.ListDevices()} if cluster else ()
    return "GPU" in kinds and not tf.config.list_physical_devices("GPU")


@contextlib.contextmanager
def without_message(pattern: re.Pattern[bytes]) -> Iterator[None]:
    """Remove matches of `pattern` from the standard error file. Everything else is printed when this ends.

    TensorFlow reads its log level once, when it is loaded, so it cannot be changed here.
    """
    with tempfile.TemporaryFile() as printed:
        before = os.dup(2)
        os.dup2(printed.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            printed.seek(0)
            with open(2, "wb", closefd=False) as errors:  # os.write may write a part only
                errors.write(pattern.sub(b"", printed.read()))


def _trim_heap() -> None:
    """Return the memory of the optimizers' copies, which malloc keeps, to the system, where glibc has this call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
