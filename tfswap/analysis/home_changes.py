"""The host memory and disk space of variables' new values. Each is stored in a buffer that replaces the old one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from tfswap.ir.custom_ops import COMMIT_HOME, READ_HOME, STORE_HOME
from tfswap.ir.graph import Node
from tfswap.ir.homes import is_on_disk
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import DISK, HOST


def home_changes(nodes: Iterable[Node]) -> dict[int, int]:
    """By position of a node, the bytes that it takes for a new value's home, or frees when that replaces an old one.

    Args:
        nodes: in topological order.
    """
    found: dict[int, int] = {}
    homes: dict[Node, int] = {}  # by StoreHome, the bytes of the home that it copies to
    for i, node in enumerate(nodes):
        if node.op == STORE_HOME:
            before = node.inputs[1].node if len(node.inputs) > 1 else None  # it stores another slice of the same value
            homes[node] = new_home_bytes(node) if before is None else homes[before]
            if before is None:
                found[i] = homes[node]
        elif node.op == COMMIT_HOME:
            found[i] = -homes[node.inputs[2].node]
    return found


def home_tier(node: Node) -> int:
    """The tier of the home that a node copies to, copies from, or gives to a variable."""
    if node.op == STORE_HOME:
        return DISK if node.attrs.get("disk") else HOST
    return DISK if node.op in (READ_HOME, COMMIT_HOME) and is_on_disk(node.inputs[0].node) else HOST


def new_home_bytes(store: Node) -> int:
    """The bytes of the home that a StoreHome makes, of which it may store some rows."""
    kind, rows = store.inputs[0].type, cast("int", store.attrs.get("rows", -1))
    nbytes = kind.nbytes or 0
    stored = kind.shape[0] if rows >= 0 and kind.shape else None
    return round_up(nbytes // stored * rows if stored else nbytes)
