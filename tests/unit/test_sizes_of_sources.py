"""Limits of the package's files, classes and functions, and of program text in tests. Exceptions only shrink."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent / "tfswap"

MOST_FILE_LINES, MOST_CLASS_LINES, MOST_FUNCTION_LINES = 500, 300, 60
"""A function's docstring does not count: that of a public one says all of its arguments."""

FILES = {
    "ir/op_table.py": 851,  # one table, one op a line
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


@pytest.mark.parametrize(("kind", "cell"), [("file", r"`([\w/]+\.py)`"), ("class", r"`(\w+)` \(`[\w/.]+`\)")])
def test_the_page_of_code_size_has_the_ten_largest(kind: str, cell: str) -> None:
    page = (ROOT.parent / "docs" / "code_size.md").read_text()
    reported = {name: int(lines) for name, lines in re.findall(rf"\| {cell} \| (\d+) \|$", page, re.MULTILINE)}
    sizes = _sizes(kind)
    assert len(reported) == 10
    assert {
        name: sizes.get(name) for name, lines in reported.items() if abs(sizes.get(name, 0) - lines) > 0.05 * lines
    } == {}
    least = 1.05 * min(reported.values())
    assert {name: lines for name, lines in sizes.items() if lines > least and name not in reported} == {}


PROGRAM_TEXT = {
    "tests/docs/test_docs.py": 23,  # goes before the blocks of a page, which are one program
    "tests/docs/test_notebook.py": 13,  # a notebook's last cell
    "tests/emulated_gpu/tables.py": 13,  # where no TensorFlow is imported, as two do not fit into one process
    "tests/runtime/test_forks.py": 19,  # a file that is its process's main module, which another one imports
    "tests/runtime/test_onednn.py": 15,  # changes the environment before TensorFlow is imported
}
"""Programs of tests are functions (support/processes.py), which tools check. Lines of those that must be text."""


def _program_text_lines(path: Path) -> int:
    """Lines of string constants of three lines or more that are Python programs; docstrings do not count."""
    tree = ast.parse(path.read_text())
    docstrings = {s.value for n in ast.walk(tree) for s in _body(n) if isinstance(s, ast.Expr)}
    return sum(
        text.end_lineno - text.lineno + 1
        for text in _texts(tree)
        if text not in docstrings and text.end_lineno - text.lineno >= 2 and _is_program(text)
    )


def _body(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", None)
    return body if isinstance(body, list) else []


def _texts(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            yield child
        else:
            yield from _texts(child)


def _is_program(text: ast.Constant | ast.JoinedStr) -> bool:
    """Also a template of a program, which is none before its fields are filled."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    code = textwrap.dedent("".join(part.value if isinstance(part, ast.Constant) else "0" for part in parts))
    if re.search(r"^ *(import \w+|from [\w.]+ import )", code, re.MULTILINE):
        return True
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return False
    return bool(body) and any(word in code for word in ("tf.", "def ", "print(", "= "))


def test_programs_of_tests_are_functions() -> None:
    lines = {str(path.relative_to(ROOT.parent)): _program_text_lines(path) for path in sorted(TESTS.rglob("*.py"))}
    assert {path: count for path, count in lines.items() if count > PROGRAM_TEXT.get(path, 0)} == {}


ELSEWHERE = {
    "tests/frontends/test_cli.py",  # each of these says why at its head
    "tests/frontends/test_saved_model.py",
    "tests/ops/test_ops_build.py",
}


def _elsewhere() -> list[Path]:
    return [path for part in ("tests", "benchmarks", "examples") for path in (ROOT.parent / part).rglob("*.py")]


@pytest.mark.parametrize(("kind", "most"), [("class", MOST_CLASS_LINES), ("function", MOST_FUNCTION_LINES)])
def test_classes_and_functions_elsewhere_are_as_small(kind: str, most: int) -> None:
    large = {
        f"{path.relative_to(ROOT.parent)}: {name}": lines
        for path in _elsewhere()
        for part, name, lines in _parts(path)
        if part == kind and lines > most
    }
    assert large == {}, "take it apart by ideas"


def test_files_elsewhere_are_as_small() -> None:
    large = {
        str(path.relative_to(ROOT.parent))
        for path in _elsewhere()
        if len(path.read_text().splitlines()) > MOST_FILE_LINES
    }
    assert large - ELSEWHERE == set()
    for name in ELSEWHERE:
        assert "More than 500 lines: " in (ROOT.parent / name).read_text(), name
