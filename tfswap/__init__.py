"""tfswap: train TensorFlow models that do not fit in device memory, under one byte limit.

Importing this changes nothing in TensorFlow, and does not import it until something needs it. Names are imported when
they are used first, so that a command or a program of `tfswap run` imports what it needs alone.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, OpLibraryError, TfswapError, UnsupportedGraph
from tfswap.support.printable import log_printable
from tfswap.version import __version__ as __version__

if TYPE_CHECKING:
    from tfswap import keras
    from tfswap.compiler.marks import keep
    from tfswap.compiler.policy import TensorFacts
    from tfswap.device.budgets import budget
    from tfswap.frontends.function import OptimizedFunction
    from tfswap.frontends.graph_def import OptimizedGraph
    from tfswap.frontends.loading import load
    from tfswap.frontends.max_batch import max_batch
    from tfswap.frontends.optimize import optimize
    from tfswap.frontends.profile import profile
    from tfswap.frontends.saved_model import optimize_graph
    from tfswap.frontends.scope import scope
    from tfswap.frontends.simulate import simulate
    from tfswap.frontends.watching.watch import watch
    from tfswap.kernels.profile import Profile
    from tfswap.plan.plan import Eviction, Plan
    from tfswap.report.curve import Curve
    from tfswap.report.explain import Explanation
    from tfswap.report.max_batch import Fit
    from tfswap.report.report import Report

log_printable(logging.getLogger("tfswap"))

__all__ = [
    "Curve",
    "Eviction",
    "Explanation",
    "Fit",
    "InfeasibleMemoryLimit",
    "InvalidModel",
    "OpLibraryError",
    "OptimizedFunction",
    "OptimizedGraph",
    "Plan",
    "Profile",
    "Report",
    "TensorFacts",
    "TfswapError",
    "UnsupportedGraph",
    "budget",
    "keep",
    "keras",
    "load",
    "max_batch",
    "optimize",
    "optimize_graph",
    "profile",
    "scope",
    "simulate",
    "watch",
]

_HOMES = {
    "Curve": "report.curve",
    "Eviction": "plan.plan",
    "Explanation": "report.explain",
    "Fit": "report.max_batch",
    "OptimizedFunction": "frontends.function",
    "OptimizedGraph": "frontends.graph_def",
    "Plan": "plan.plan",
    "Profile": "kernels.profile",
    "Report": "report.report",
    "TensorFacts": "compiler.policy",
    "budget": "device.budgets",
    "keep": "compiler.marks",
    "load": "frontends.loading",
    "max_batch": "frontends.max_batch",
    "optimize": "frontends.optimize",
    "optimize_graph": "frontends.saved_model",
    "profile": "frontends.profile",
    "scope": "frontends.scope",
    "simulate": "frontends.simulate",
    "watch": "frontends.watching.watch",
}
"""The modules of the names that are imported when they are used."""


def __getattr__(name: str) -> Any:
    if name == "keras":
        return importlib.import_module("tfswap.keras")
    if name not in _HOMES:
        raise AttributeError(f"module 'tfswap' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"tfswap.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
