"""Marks variables that are at home on the host: in host memory, or on disk. The node of such a variable's handle has an
attribute, in the step and in bodies that access the variable.
"""

from __future__ import annotations

from typing import Final, cast

from tfswap.ir.graph import Node

_BYTES: Final = "_tfswap_at_home_bytes"
_DISK: Final = "_tfswap_on_disk"


def mark_at_home(handle: Node, nbytes: int, *, disk: bool = False) -> None:
    """Mark the variable behind a handle, with its bytes, as one that is at home on the host."""
    handle.attrs = {**handle.attrs, _BYTES: nbytes, **({_DISK: True} if disk else {})}


def is_at_home(handle: Node) -> bool:
    """Whether the variable behind this handle is marked."""
    return _BYTES in handle.attrs


def is_on_disk(handle: Node) -> bool:
    """Whether the variable behind this handle is at home on disk."""
    return _DISK in handle.attrs


def home_bytes(handle: Node) -> int:
    """The bytes of the marked variable behind this handle; 0 where it is not marked."""
    return cast("int", handle.attrs.get(_BYTES, 0))
