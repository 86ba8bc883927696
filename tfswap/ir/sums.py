"""The attributes of sums whose order differs between iterations or branches (FIRST in ir/custom_ops.py)."""

from __future__ import annotations

from typing import cast

from tfswap.ir.custom_ops import FIRST, FIRST_SHAPE
from tfswap.ir.graph import Node


def decisions_of(node: Node) -> int:
    """How many of a sum's inputs are decisions, which come after its terms."""
    terms = node.attrs["N"]
    assert isinstance(terms, int)
    return len(node.inputs) - terms


def differs_by_iteration(node: Node) -> bool:
    """Whether a node is a sum that adds in another order in some iterations of the loops around it."""
    if FIRST not in node.attrs:
        return False
    shape = cast("tuple[int, ...]", node.attrs[FIRST_SHAPE])
    return any(rows != 1 for rows in shape[: len(shape) - decisions_of(node)])
