"""Owners of memory: Python's tensors and variables, by their addresses.

Not handled: memory without an owner in Python, such as a data pipeline's tensors and other functions' constants.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from tfswap.simulator.arena_snapshot import ArenaSnapshot

MAPS = 16
"""How many layouts of the arena are remembered, the latest new ones."""

_TITLE = re.compile("^(the|a) ")

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.POINTER(ctypes.c_uint64)
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class MemoryOwners:
    """Remembers layouts of the arena before steps, and finds who owns the bytes allocated since."""

    def __init__(self) -> None:
        self._in_use: OrderedDict[int, frozenset[int]] = OrderedDict()

    def remember(self, layout: int, snapshot: ArenaSnapshot) -> None:
        """Remember `snapshot`, the arena in this layout."""
        self._in_use[layout] = frozenset(address for address, _, in_use in snapshot.chunks if in_use)
        self._in_use.move_to_end(layout)
        if len(self._in_use) > MAPS:
            self._in_use.popitem(last=False)

    def largest_of_others(self, layout: int, snapshot: ArenaSnapshot, result: Any) -> str:
        """Ends a sentence about bytes allocated by others: the largest tensor; "" where the layout is not known.

        Args:
            layout: the arena's before the step.
            snapshot: the arena's contents now.
            result: of the step: its tensors are new too, and expected.
        """
        import tensorflow as tf

        before = self._in_use.get(layout)
        if before is None:
            return ""
        came = {address: size for address, size, in_use in snapshot.chunks if in_use and address not in before}
        expected = {_address(tensor) for tensor in tf.nest.flatten(result, expand_composites=True)}
        found: list[tuple[int, str]] = []
        for tensor, called in _known():
            address = _address(tensor)
            if address in came and address not in expected:
                found.append((came[address], f"{called} {tensor.dtype.name} {tuple(tensor.shape)}"))
        if not found:
            return ", and Python holds none of it: a data pipeline does, or another function"
        return f"; the largest of it that Python holds is {max(found)[1]}"


def owners_by_address() -> dict[int, str]:
    """The name of what Python holds at an address: "variable 'w:0' float32 (2, 3)", "tensor float32 (2, 3)".

    While it searches, it holds all objects of the process: what other threads free meanwhile stays in memory.
    """
    return _titles(_known())


def variables_by_address() -> dict[int, str]:
    """As `owners_by_address`, of variables alone."""
    import tensorflow as tf

    return _titles(_values(_objects(tf.Variable)[0]))


def owners_in_call(trace: Any, arguments: Iterable[Any]) -> dict[int, str]:
    """As `owners_by_address`, of a trace's variables and arguments alone: the call may replace a variable's buffer."""
    import tensorflow as tf

    named = [(each, f"argument of {trace.graph.name}") for each in arguments if not isinstance(each, tf.Variable)]
    return _titles(itertools.chain(_values(trace.variables), named))


def _titles(known: Iterable[tuple[Any, str]]) -> dict[int, str]:
    """By address, the name and type of the first that is there."""
    found: dict[int, str] = {}
    for tensor, called in known:
        if address := _address(tensor):
            found.setdefault(address, f"{_TITLE.sub('', called).rstrip(',')} {tensor.dtype.name} {tuple(tensor.shape)}")
    return found


def _known() -> Iterator[tuple[Any, str]]:
    """All tensors of the process, with names for messages: those of variables first."""
    import tensorflow as tf

    variables, tensors = _objects(tf.Variable, tf.Tensor)
    yield from _values(variables)
    yield from ((each, "a tensor,") for each in tensors if not tf.is_symbolic_tensor(each))


def _objects(*kinds: type) -> list[list[Any]]:
    """The objects of the process that are of these types."""
    found: list[list[Any]] = [[] for _ in kinds]
    # There are hundreds of thousands of objects, of some thousands of types. Methods of an object may run user code.
    of_type: dict[int, list[Any] | None] = {}
    for each in gc.get_objects():
        own = type(each)
        if id(own) not in of_type:
            of_type[id(own)] = next(
                (some for kind, some in zip(kinds, found, strict=True) if issubclass(own, kind)), None
            )
        if (some := of_type[id(own)]) is not None:
            some.append(each)
    return found


def _values(variables: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """As `_known`, of these variables."""
    import tensorflow as tf

    for each in variables:
        if not tf.is_symbolic_tensor(each.handle):
            with contextlib.suppress(tf.errors.OpError):  # it has no value yet
                yield each.read_value(), f"the variable {each.name!r},"


def _address(tensor: Any) -> int:
    """The address of its bytes; 0 where it is not known."""
    import tensorflow as tf

    if getattr(tensor, "dtype", tf.variant) in (tf.string, tf.resource, tf.variant):
        return 0  # TensorFlow would end the process
    try:
        return _pointer(tf.experimental.dlpack.to_dlpack(tensor), b"dltensor")[0]
    except (tf.errors.OpError, AttributeError, TypeError, ValueError):  # of a type that is not known there
        return 0
