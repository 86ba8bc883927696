"""Functions that run in another process: by their place in a module, with the values that they close over.

The process imports the module and compiles its source. A function has no code of pytest's there, and AutoGraph finds no
source of it, so `tf.function` runs it as it is. Functions of modules that programs import have their source.

Requires: its module starts no TensorFlow when it is imported, or tensors would be in the arena before the program
begins; no other function of that name begins on its line; what it closes over can be pickled, or is a function too.
Not handled: functions that call themselves by a name that they close over.
"""

from __future__ import annotations

import importlib
import inspect
import json
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Carried(NamedTuple):
    """A function on its way to another process.

    Attributes:
        module: the name of its module.
        name: its name.
        line: the line on which it begins.
        values: what it closes over.
        defaults: of its arguments.
    """

    module: str
    name: str
    line: int
    values: tuple[Any, ...]
    defaults: tuple[Any, ...] | None

    def function(self) -> Callable[..., Any]:
        """The function, in the process that it was carried to."""
        module = importlib.import_module(self.module)
        whole = compile(inspect.getsource(module), f"<{self.module}>", "exec")
        found = [each for each in _within(whole) if (each.co_name, each.co_firstlineno) == (self.name, self.line)]
        assert len(found) == 1, f"{len(found)} functions {self.name!r} begin on line {self.line} of {self.module}"
        cells = tuple(types.CellType(v.function() if isinstance(v, Carried) else v) for v in self.values)
        return types.FunctionType(found[0], vars(module), self.name, self.defaults, cells)

    def run(self) -> None:
        """Run it, and print its result as JSON."""
        if (result := self.function()()) is not None:
            print(json.dumps(result))


def carry(function: Callable[..., Any]) -> Carried:
    """A function, and the functions that it closes over, for another process."""
    assert isinstance(function, types.FunctionType), f"{function} is no function of Python"
    code = function.__code__
    closed_over = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    values: list[Any] = []
    for name, cell in closed_over.items():
        try:
            value = cell.cell_contents
        except ValueError:
            raise ValueError(f"{name} has no value when {function.__qualname__} is carried") from None
        values.append(carry(value) if _is_nested(value) else value)
    return Carried(function.__module__, code.co_name, code.co_firstlineno, tuple(values), function.__defaults__)


def _is_nested(value: object) -> bool:
    """Whether it is a function that its process does not find by its name."""
    return isinstance(value, types.FunctionType) and "<" in value.__qualname__


def _within(code: types.CodeType) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _within(each)
