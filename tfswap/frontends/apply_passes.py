"""Applies passes by name to a graph in text form: what `tfswap opt` does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tfswap.compiler.lower import FINISH, ORDERED
from tfswap.compiler.prepare import PREPARE
from tfswap.errors import InvalidModel, TfswapError
from tfswap.ir.text import format_graph, parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.passes.contract import Pass, Target
from tfswap.support.files import require_regular

PASSES: dict[str, Pass[...]] = {row.apply.name: row.apply for row in (*PREPARE, *ORDERED, *FINISH)}
"""Those that need nothing but a graph and a target, by name, in the order in which a step gets them."""


def target_of(device: Literal["cpu", "gpu"], *, onednn: bool = False, portable: bool = False) -> Target:
    """The target "cpu" or "gpu".

    Args:
        onednn: whether oneDNN's graph pass rewrites the step.
        portable: with TensorFlow's own ops alone.
    """
    return Target(DeviceModel(device, onednn), portable, keeps_results=True)


def apply_passes(path: str, names: Sequence[str], target: Target) -> tuple[str, list[tuple[str, int]]]:
    """The graph in the file, or on standard input for "-", after these passes, and each one's number of changes.

    Raises TfswapError for a pass that is not known or a file that can't be read, and InvalidModel for a text that is no
    graph, or one with a cycle.
    """
    unknown = next((name for name in names if name not in PASSES), None)
    if unknown is not None:
        raise TfswapError(f"no pass is called {unknown!r}. There are {', '.join(PASSES)}.")
    graph = parse_graph(_read(path))
    try:
        for part in (graph, *graph.all_bodies()):
            part.topological()
    except ValueError as error:
        raise InvalidModel(f"{path!r} has no graph that can run: {error}") from error
    changes = [(name, PASSES[name](graph, target)) for name in names]
    return format_graph(graph), changes


def _read(path: str) -> str:
    try:
        if path == "-":
            return sys.stdin.read()
        require_regular(Path(path))
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TfswapError(f"the graph can't be read from {path!r}: {error}") from error
