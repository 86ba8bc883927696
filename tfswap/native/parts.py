"""The kernels inside of joined nodes (PAIR, GROUP), which TensorFlow's functions for graphs do not see.

A Node of the IR has its kernels as Nodes or as serialized NodeDefs, a NodeDef as serialized NodeDefs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tfswap.ir.custom_ops import GROUP, PAIR
from tfswap.ir.graph import Node


def parts(node: Any) -> Sequence[Any]:
    """The kernels of a joined node, in order; none for other nodes."""
    if node.op not in (PAIR, GROUP):
        return ()
    held: Any = node.attrs["kernels"] if isinstance(node, Node) else node.attr["kernels"].list.s
    return [_parsed(kernel) if isinstance(kernel, bytes) else kernel for kernel in held]


def with_parts(nodes: Iterable[Any]) -> Iterator[Any]:
    """The nodes, and the kernels inside of them."""
    for node in nodes:
        yield node
        yield from with_parts(parts(node))


def _parsed(kernel: bytes) -> Any:
    from tensorflow.core.framework import node_def_pb2

    made: Any = node_def_pb2
    return made.NodeDef.FromString(kernel)
