"""Pauses Python's garbage collector."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")


def without_collector(work: Callable[Params, Result]) -> Callable[Params, Result]:
    """`work` with the collector off. Otherwise it traverses all objects of a graph repeatedly, which takes as long as
    the work itself and finds nothing.
    """

    @functools.wraps(work)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return work(*args, **kwargs)
        finally:
            if was_on:
                gc.enable()

    return call
