"""Watches a whole process, from the start of TensorFlow's devices to its end: `tfswap watch`.

Not handled: processes that end by os._exit(), and forked ones, which print nothing.
"""

from __future__ import annotations

import atexit
import logging

from tfswap.errors import TfswapError
from tfswap.frontends.watching.watch import Watch

log = logging.getLogger("tfswap")


def begin(*, live: bool = False, html: str | None = None) -> None:
    """Begin to watch, with options as of `tfswap.watch`. Where that is not possible, the program runs
    without, with one line that gives the reason."""
    watch = Watch(live=live, page=html)
    try:
        watch.start()
    except TfswapError as error:
        log.warning("tfswap: nothing is watched: %s", error)
        return
    atexit.register(watch.print)
    atexit.register(watch.stop)  # before it prints
