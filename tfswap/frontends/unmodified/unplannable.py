"""Whatever keeps a step of an unmodified program from being planned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfswap.errors import InfeasibleMemoryLimit, TfswapError, UnsupportedGraph
from tfswap.frontends.unmodified import summary


class Unplannable(UnsupportedGraph):
    """A step that can't be planned. The program goes on without a plan."""


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Raises Unplannable for whatever keeps a step from being planned inside, and InfeasibleMemoryLimit as it is."""
    try:
        yield
    except InfeasibleMemoryLimit:
        summary.note_refusal()
        raise
    except TfswapError as error:
        raise Unplannable(str(error)) from error
    except Exception as error:
        raise Unplannable(f"tfswap has a fault: {type(error).__name__}: {error}") from error
