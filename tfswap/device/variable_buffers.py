"""The buffers of a step's variables before it runs.

An update writes in place where nothing else holds the variable's buffer, and otherwise requests another one. Callers
change its holders between steps: a tensor that was read from the variable or assigned to it shares the buffer, and
TensorFlow adopts the memory of an aligned NumPy array. The plan counts shared buffers (`ArenaSnapshot.shared`): copies
before the step would need the bytes during all of it. A variable outside of the arena gets a buffer there before the
step, as the plan has it.

Sparse access, an eager lookup say, turns a variable's copy-on-read mode on for good: every read and update then copies
it. The mode is turned off before a step that accesses the variable only as a whole.

A variable at home on the host is in host memory or on disk. One that host memory had no room for may be on disk
although the plan has it in host memory: its copies take longer then. The other way round it is moved before the next
step.

Not handled: variables of a step inside of another `tf.function`, which are not checked before it runs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from tfswap.native.load import load
from tfswap.simulator.arena_snapshot import Variable

OWN: Final = 0
SHARED: Final = 1
COPIED: Final = 3
AT_HOME: Final = 4
SHARED_HOME: Final = 5
COPIED_HOME: Final = 6
ON_DISK: Final = 8
HOMES: Final = frozenset(state + disk for state in (AT_HOME, SHARED_HOME, COPIED_HOME) for disk in (0, ON_DISK))
"""States of BufferState in core/variable_ops.cc, with ON_DISK for those of a variable that is at home there; other
buffers belong to no allocator.
"""


class HomePlaces(NamedTuple):
    """Where a step's variables are to be.

    Attributes:
        at_home: feeds of those at home on the host; the others are in the arena.
        on_disk: those of them on disk, and not in host memory.
        spill_dir: the folder for these, and for what has no room in host memory; "" for none.
    """

    at_home: frozenset[str] = frozenset()
    on_disk: frozenset[str] = frozenset()
    spill_dir: str = ""

    @property
    def in_memory(self) -> frozenset[str]:
        """Feeds of those in host memory."""
        return self.at_home - self.on_disk


class StepVariables:
    """The variables that a step writes, or reads as a whole.

    Args:
        handles: by the name of the step's feed.
        read: feeds of those that it only reads: their buffers may be anybody's.
        inner: feeds of those that the bodies of loops and conditionals write, at a time that no plan knows.
        sparse: feeds of those that the step accesses in part, whose mode the plan counts with.

    Attributes:
        packed_for: the places for which those in host memory are in as few blocks as possible (runtime/home_tiers.py).
    """

    def __init__(
        self,
        handles: Mapping[str, Any],
        inner: Collection[str],
        sparse: Collection[str] = (),
        read: Collection[str] = (),
    ):
        self._read = frozenset(read)
        self._inner = frozenset(inner)
        self._sparse = frozenset(sparse)
        on: dict[str, list[str]] = {}
        for name, handle in handles.items():
            on.setdefault(handle.device, []).append(name)
        self._names = [name for names in on.values() for name in names]
        self._handles = [handles[name] for name in self._names]
        self._states = (ctypes.c_uint8 * len(self._names))()
        self._places = HomePlaces()
        self.packed_for: HomePlaces | None = None
        self._usual = bytes(len(self._names))  # the states in which nothing has to be done
        self._number = secrets.randbits(62)
        begin = 0
        for names in on.values():
            of_device = [handles[name] for name in names]
            load().ops.tfswap_watch_variables(resources=of_device, step=self._number, begin=begin)
            begin += len(names)
        weakref.finalize(self, load().c.tfswap_forget_variables, self._number)

    def own(self) -> None:
        """Give each variable that is written a buffer of its own."""
        if self._read_states():
            for name, handle, state in zip(self._names, self._handles, self._states, strict=True):
                if self._is_other(name, state):
                    own_buffer(handle)

    def keep_at_home(self, places: HomePlaces) -> None:
        """From now on, `shared` moves the variables to these places."""
        self._places = places
        usual = (
            (AT_HOME + ON_DISK if name in places.on_disk else AT_HOME) if name in places.at_home else OWN
            for name in self._names
        )
        self._usual = bytes(usual)

    def at_home(self) -> HomePlaces:
        """Where the variables are now."""
        self._read_states()
        there = {name: state for name, state in zip(self._names, self._states, strict=True) if state in HOMES}
        on_disk = frozenset(name for name, state in there.items() if state & ON_DISK)
        return HomePlaces(frozenset(there), on_disk, self._places.spill_dir)

    def move_to_disk(self, names: Collection[str]) -> None:
        """Move variables that are at home on the host to disk."""
        for name, handle in zip(self._names, self._handles, strict=True):
            if name in names:
                move_home(handle, host=True, disk=True, spill_dir=self._places.spill_dir)

    def move_to_memory(self, names: Collection[str]) -> None:
        """Move variables that are at home on the host to host memory, as far as that has room."""
        for name, handle in zip(self._names, self._handles, strict=True):
            if name in names:
                move_home(handle, host=True, spill_dir=self._places.spill_dir)

    def places(self) -> tuple[Variable, ...]:
        """Where the variables are now."""
        numbers = ctypes.c_uint64 * len(self._names)
        addresses, nbytes = numbers(), numbers()
        load().c.tfswap_variable_places(self._number, addresses, nbytes, len(self._names))
        return tuple(map(Variable, self._names, addresses, nbytes))

    def shared(self) -> frozenset[str]:
        """Feeds of the variables whose buffers other tensors share. All others have a buffer of their own from then on,
        at home or in the arena, as `keep_at_home` has it.
        """
        self._read_states()
        if bytes(self._states) == self._usual:
            return frozenset()
        found: list[str] = []
        others: list[Any] = []  # handles of variables that get a buffer of their own in the arena
        home: list[tuple[str, Any]] = []
        back: list[tuple[str, Any]] = []
        for name, handle, state in zip(self._names, self._handles, self._states, strict=True):
            if name in self._places.at_home or state in HOMES:
                if self._is_elsewhere(name, state):
                    (home if name in self._places.at_home else back).append((name, handle))
            elif state == SHARED and name not in self._inner and name not in self._read:
                found.append(name)
            elif self._is_other(name, state):
                others.append(handle)
        for name, handle in (*home, *back):  # first those that leave the arena, where the others need room
            on_disk = name in self._places.on_disk
            move_home(handle, host=name in self._places.at_home, disk=on_disk, spill_dir=self._places.spill_dir)
        for handle in others:
            own_buffer(handle)
        return frozenset(found)

    def _is_other(self, name: str, state: int) -> bool:
        """Whether the variable has another buffer, or mode, than the plan counts with."""
        if state == COPIED:
            return name not in self._sparse
        return state != OWN and state not in HOMES and name not in self._read

    def _is_elsewhere(self, name: str, state: int) -> bool:
        """Whether the variable is at home or in the arena, and should be in the other place; or is at home, and has a
        buffer or a mode with which kernels copy it to the arena; or should be on disk.
        """
        if state not in HOMES or name not in self._places.at_home:
            return True
        if name in self._places.on_disk and not state & ON_DISK:
            return True
        state &= ~ON_DISK
        return name not in self._read if state == SHARED_HOME else state == COPIED_HOME and name not in self._sparse

    def _read_states(self) -> int:
        return _states_reader()(self._number, self._states, len(self._states))


def own_buffer(handle: Any) -> None:
    """Gives the variable of a handle a buffer of its own."""
    load().ops.tfswap_own_buffer(resource=handle)


def move_home(handle: Any, *, host: bool, disk: bool = False, spill_dir: str = "") -> None:
    """Moves the value of a variable to its home on the host, or to the arena. Does nothing where it is there.

    Args:
        disk: whether the home is on disk as long as that has room, and not in host memory.
        spill_dir: the folder for that, and for what has no room in host memory; "" for none.
    """
    load().ops.tfswap_move_home(resource=handle, host=host, disk=disk, spill_dir=os.fsencode(spill_dir))


@functools.cache
def _states_reader() -> Callable[[int, Any, int], int]:
    """Keeps the interpreter's lock, as `arena_reader` of ops/runtime.py: it runs before each call of each step."""
    kinds = (ctypes.c_int64, ctypes.POINTER(ctypes.c_uint8), ctypes.c_uint64)
    return ctypes.PYFUNCTYPE(ctypes.c_uint64, *kinds)(("tfswap_variable_buffers", load().c))
