"""The library functions that nodes refer to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tfswap.support.reach import reach


def functions_in(value: Any) -> list[Any]:
    """The functions that an AttrValue refers to, as NameAttrLists."""
    return list(value.list.func) if value.HasField("list") else [value.func] if value.HasField("func") else []


def called_functions(node: Any) -> list[str]:
    """Names of the functions that a NodeDef refers to."""
    return [function.name for value in node.attr.values() for function in functions_in(value)]


def reachable(nodes: Iterable[Any], library: Mapping[str, Any]) -> list[str]:
    """Names of the functions of `library` that `nodes` run, directly or not, sorted."""

    def called(by: Iterable[Any]) -> list[str]:  # TensorFlow 1's calls have the function's name for an op
        return [name for node in by for name in (node.op, *called_functions(node)) if name in library]

    return sorted(reach(called(nodes), lambda name: called(library[name].node_def)))
