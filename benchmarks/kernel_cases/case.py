"""One case of `kernel_memory.py`, and its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One op to run.

    `inputs` maps the op's argument names to tensors: `["float32", [2, 3]]` is an argument of that type, random, and
    with a number behind the shape it is that number throughout; `{"const": value, "dtype": name}` a constant of the
    graph, `{"variable": ["float32", [2, 3]]}` the handle of a variable, and a list of these a list argument.
    """

    op: str
    inputs: Mapping[str, Any]
    attrs: Mapping[str, Any] = {}


def floats(*shape: int) -> list[Any]:
    """A random float32 tensor."""
    return ["float32", list(shape)]


def integers(value: Any) -> dict[str, Any]:
    """A constant of int32."""
    return {"const": value, "dtype": "int32"}


def number(value: float) -> dict[str, Any]:
    """A constant of float32."""
    return {"const": value, "dtype": "float32"}
