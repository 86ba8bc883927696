"""Places variables at home on the host in host memory and on disk, within the limit of host memory.

Host memory is taken in blocks of several variables. Where some of these go to disk, the others may keep more blocks
than the limit has room for, and leave holes that are too small for new values. So they all go to disk, and those of
host memory come back, into one block that has room for all that the step takes.

Not handled: variables of other steps in the same blocks, which stay. What has no room then is on disk.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator

from tfswap.device.variable_buffers import HomePlaces, StepVariables
from tfswap.errors import TfswapError
from tfswap.passes.memory_reservation import Reservation


@contextlib.contextmanager
def within_host_limit(
    limits: Reservation, variables: Iterable[tuple[StepVariables | None, HomePlaces]], place: Callable[[], None]
) -> Iterator[None]:
    """While active, the variables are placed, and the limits hold for what is done.

    Args:
        limits: with the host memory that the step takes, and its variables there.
        variables: those of each part of a step, with their places.
        place: moves them there.

    Raises TfswapError where the spill file can't be made.
    """
    import tfswap.ops

    known = [(each, places) for each, places in variables if each is not None and places.on_disk]
    if not known:
        place()
        yield
        return
    others = [(each, places) for each, places in known if each.packed_for != places]
    moving = secrets.randbits(62)
    with contextlib.ExitStack() as registered:
        try:
            # Without a limit at first: moves to disk take the buffers of their copies before they free host memory.
            tfswap.ops.register(moving, None, limits.spill_dir)
            try:
                place()
                for each, places in others:
                    each.move_to_disk(places.in_memory)
                tfswap.ops.register(limits.owner, limits.host_limit_bytes, limits.spill_dir, limits.disk_limit_bytes)
                registered.callback(tfswap.ops.unregister, limits.owner)
            finally:
                tfswap.ops.unregister(moving)
        except OSError as error:
            raise TfswapError(str(error)) from error
        if others:
            with contextlib.suppress(MemoryError):
                tfswap.ops.reserve(limits.host_bytes, more=True)
            for each, places in others:
                each.move_to_memory(places.in_memory)
                each.packed_for = places
        yield
