"""Keras models under a memory limit: `tfswap.keras.optimize(model, memory_limit=...)`, then `fit` as usual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfswap.frontends.keras import optimize_model as optimize
from tfswap.frontends.keras import report
from tfswap.frontends.keras_max_batch import largest, max_batch, tuned

if TYPE_CHECKING:
    from tfswap.frontends.keras_memory_report import MemoryReport

__all__ = ["MemoryReport", "largest", "max_batch", "optimize", "report", "tuned"]


def __getattr__(name: str) -> Any:
    if name == "MemoryReport":  # a subclass of Keras' Callback, so that it needs Keras
        from tfswap.frontends.keras_memory_report import MemoryReport

        return MemoryReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
