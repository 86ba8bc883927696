"""TensorFlow's own optimizers, run on a graph outside of a session."""

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
"""Nodes from which on it counts what the optimizers leave behind: some 8 KiB for each node."""
NO_GPU_KERNEL = re.compile(
    rb"^[^\n]*No registered '[^\n]*' OpKernel for GPU .*?(?=^[IWEF]\d{4} |^\d{4}-\d\d-\d\d |\Z)", re.M | re.S
)
"""What a TensorFlow built without GPUs prints of a node that is on one: the node, and each kernel that there is."""


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
    with unsaid(NO_GPU_KERNEL) if _has_absent_gpu(cluster) else contextlib.nullcontext():
        made = tf_optimizer.OptimizeGraph(config, meta, cluster=cluster)
    if len(graph_def.node) > LARGE:
        _give_back()
    return made


def _has_absent_gpu(cluster: Any) -> bool:
    import tensorflow as tf

    kinds = {device.properties.type for device in cluster.ListDevices()} if cluster else ()
    return "GPU" in kinds and not tf.config.list_physical_devices("GPU")


@contextlib.contextmanager
def unsaid(pattern: re.Pattern[bytes]) -> Iterator[None]:
    """Leave out of what is printed to the standard error file what fits `pattern`; all else follows when this ends.

    TensorFlow reads how much it is to print once, when it is loaded.
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
            with open(2, "wb", closefd=False) as errors:  # os.write may leave a part
                errors.write(pattern.sub(b"", printed.read()))


def _give_back() -> None:
    """Let the system have what malloc keeps of the copies that the optimizers have made, where there is such a call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
