"""Limits of the package's files, classes and functions. Each exception has a reason, and can only shrink."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "tfswap"

MOST_FILE_LINES, MOST_CLASS_LINES, MOST_FUNCTION_LINES = 500, 300, 60
"""A function's docstring does not count: that of a public one says all of its arguments."""

FILES = {
    "ir/op_table.py": 846,  # one table, one op a line
}
CLASSES: dict[str, int] = {}
FUNCTIONS: dict[str, int] = {}


def _parts(path: Path) -> Iterator[tuple[str, str, int]]:
    """(kind, name, lines) of each class and function of a file."""

    def within(node: ast.AST, owner: str) -> Iterator[tuple[str, str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield "class", child.name, child.end_lineno - child.lineno + 1
                yield from within(child, f"{child.name}.")
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = child.body[0]
                text = ast.get_docstring(child) is not None
                docstring_lines = first.end_lineno - first.lineno + 1 if text else 0
                yield "function", f"{owner}{child.name}", child.end_lineno - child.lineno + 1 - docstring_lines
                yield from within(child, "")
            else:
                yield from within(child, owner)

    yield from within(ast.parse(path.read_text()), "")


def _sizes(kind: str) -> dict[str, int]:
    """The largest of each name."""
    found: dict[str, int] = {}
    for path in sorted(ROOT.rglob("*.py")):
        if kind == "file":
            found[str(path.relative_to(ROOT))] = len(path.read_text().splitlines())
            continue
        for part, name, lines in _parts(path):
            if part == kind:
                found[name] = max(lines, found.get(name, 0))
    return found


@pytest.mark.parametrize(
    ("kind", "most", "exceptions"),
    [
        ("file", MOST_FILE_LINES, FILES),
        ("class", MOST_CLASS_LINES, CLASSES),
        ("function", MOST_FUNCTION_LINES, FUNCTIONS),
    ],
)
def test_sources_are_as_small_as_they_are_to_be(kind: str, most: int, exceptions: dict[str, int]) -> None:
    sizes = _sizes(kind)
    too_large = {name: lines for name, lines in sizes.items() if lines > exceptions.get(name, most)}
    assert too_large == {}, "take it apart by ideas; no exception grows"
