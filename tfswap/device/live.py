"""The device that this process runs its steps on, and its allocator, which each call of a step reads twice."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.device import arena, machine

if TYPE_CHECKING:
    from tfswap.kernels.device import DeviceModel
    from tfswap.native.load import CArenaReading


class LiveDevice:
    """A device that steps of this process run on.

    Attributes:
        name: "GPU:0".
        model: the model of the device that is planned for.
    """

    def __init__(self, name: str, model: DeviceModel):
        self.name = name
        self.model = model

    @functools.cached_property
    def has_arena(self) -> bool:
        """Whether it has an arena that can be read."""
        return self.peak_bytes is not None

    @property
    def peak_bytes(self) -> int | None:
        """The allocator's peak; None where it keeps none."""
        info = arena.memory_info(self.name)
        return None if info is None else info.peak_bytes

    @functools.cached_property
    def _arena_reader(self) -> tuple[Callable[[int, bool], CArenaReading], int]:
        """The function that reads its allocator, and the allocator."""
        import tfswap.ops

        return tfswap.ops.arena_reader(), arena.allocator(self.name) if self.has_arena else 0

    def read_arena(self, *, before: bool) -> CArenaReading:
        """The allocator's present figures.

        Args:
            before: a step comes next, which finds the arena in the layout that is reported.
        """
        read, allocator = self._arena_reader
        return read(allocator, before)

    def split_exactly_between_steps(self) -> None:
        """From now on, have the arena, if there is one, give what is no planned step chunks of the requested sizes
        (csrc/core/exact_chunks.h).
        """
        from tfswap.native.load import load

        if self.has_arena:
            load().c.tfswap_split_exactly_between_steps(self._arena_reader[1])

    def with_copies(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The arguments, with copies on the GPU of those on the CPU: TensorFlow would copy these during the step, at a
        time that no plan decides.
        """
        if not self.model.is_gpu or all(map(_stays, inputs)):
            return inputs
        import tensorflow as tf

        with tf.device(self.name):
            return [tensor if _stays(tensor) else tf.identity(tensor) for tensor in inputs]

    def is_live(self, inputs: Sequence[Any]) -> bool:
        """Whether a call with these inputs runs immediately, in an arena that can be read."""
        import tensorflow as tf

        return self.has_arena and runs_eagerly() and not any(tf.is_symbolic_tensor(t) for t in inputs)


def _stays(tensor: Any) -> bool:
    """Whether an argument is no value on the CPU that functions on a GPU take on the device."""
    import tensorflow as tf

    return tf.is_symbolic_tensor(tensor) or not machine.is_value_on_cpu(tensor)


def with_copies_on(devices: Sequence[str], inputs: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a step on several devices, with copies of those that are elsewhere than planned: TensorFlow
    would copy these during the step, at a time that no plan decides.

    Args:
        devices: where the plan has each argument, "/device:GPU:1"; empty where that does not matter.
    """
    import tensorflow as tf

    found = list(inputs)
    for number, (where, tensor) in enumerate(zip(devices, inputs, strict=False)):
        if where and not tf.is_symbolic_tensor(tensor) and machine.device_of_value(tensor) not in ("", where):
            with tf.device(where):
                found[number] = tf.identity(tensor)
    return found


@functools.cache
def _live(on_cpu: bool) -> LiveDevice:
    return LiveDevice(*machine.current_device(live=True, on_cpu=on_cpu))


def live_device() -> LiveDevice:
    """The device of a step that is called here."""
    return _live(machine.scope_is_cpu())


def device_of(concrete: Any, captures: Sequence[Any]) -> LiveDevice:
    """The device of a trace that is called here: a CPU where no part of it is on a GPU.

    Nodes that name no device are where the call is; outside of a `tf.device`, where TensorFlow places them.

    Args:
        captures: the trace's captures.
    """
    import tensorflow as tf

    if not tf.config.list_logical_devices("GPU"):
        return _live(False)
    here = "CPU" if machine.scope_is_cpu() else "GPU"
    named = (op.device for op in concrete.graph.get_operations() if op.type not in ("Placeholder", "NoOp"))
    handles = (t.device for t in captures if t.dtype == tf.resource and not tf.is_symbolic_tensor(t))
    used = {machine.type_of(device) or here for device in (*named, *filter(None, handles))}
    return _live(used <= {"CPU"})


def devices_of(concrete: Any, captures: Sequence[Any]) -> tuple[LiveDevice, ...]:
    """The devices with an arena of their own that a trace may have nodes on, as of `device_of`, the first one first.

    Args:
        captures: the trace's captures.
    """
    import tensorflow as tf

    first = device_of(concrete, captures)
    if not first.model.is_gpu:
        return (first,)
    named = {op.device for op in concrete.graph.get_operations() if op.type != "Placeholder"}
    named |= {node.device for f in concrete.graph._functions.values() for node in f.definition.node_def}
    named |= {t.device for t in captures if t.dtype == tf.resource and not tf.is_symbolic_tensor(t)}
    numbers = {int(device.rpartition(":")[2]) for device in named if machine.type_of(device or "") == "GPU"}
    return (first, *(_gpu(f"GPU:{i}") for i in sorted(numbers - {0})))


def host_device() -> LiveDevice:
    """The device of what a GPU's step runs on the CPU."""
    return _live(True)


@functools.cache
def _gpu(name: str) -> LiveDevice:
    return LiveDevice(name, _live(False).model)


def runs_eagerly() -> bool:
    """Whether a call runs now, and is not traced into another function."""
    import tensorflow as tf

    return tf.executing_eagerly()


@contextlib.contextmanager
def peak_kept(device: str) -> Iterator[None]:
    """Within this, the arena's peak, which is the user's statistic, does not change."""
    import tensorflow as tf

    before = arena.memory_info(device)
    if before is not None:
        tf.config.experimental.reset_memory_stats(device)
    try:
        yield
    finally:
        if before is not None:
            tf.config.experimental.reset_memory_stats(device)
            _raise_peak(before.peak_bytes, device)


def _raise_peak(peak_bytes: int, device: str) -> None:
    """Raise the arena's peak to its former value. Each request is for half of the missing bytes, since its chunk can be
    almost twice as large.
    """
    import tensorflow as tf

    held: list[Any] = []
    while (info := arena.memory_info(device)) is not None and info.peak_bytes < peak_bytes:
        half = (peak_bytes - info.current_bytes) // 2
        try:
            with tf.device(device):
                held.append(tf.raw_ops.Empty(shape=[half], dtype=tf.uint8))
        except tf.errors.ResourceExhaustedError:
            return


def free_functions(*, recent: bool = False) -> None:
    """Release unreferenced functions: their captures and kernels hold constants in the arena.

    Args:
        recent: only those that were made since the last call. All other objects, of which TensorFlow alone has some
            100,000, are not visited.
    """
    gc.collect(YOUNG if recent else ALL)  # a function's graph is full of cycles


YOUNG, ALL = 1, 2
"""Generations of Python's collector, each with those before it. Objects that survive a collection are no longer young.
"""
