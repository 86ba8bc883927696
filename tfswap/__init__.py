"""tfswap: train TensorFlow models that do not fit in device memory, under one byte limit.

Importing this changes nothing in TensorFlow, and does not import it until something needs it.
"""

import logging

from tfswap import keras
from tfswap.compiler.marks import keep
from tfswap.compiler.policy import TensorFacts
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, OpLibraryError, TfswapError, UnsupportedGraph
from tfswap.frontends.function import OptimizedFunction
from tfswap.frontends.graph_def import OptimizedGraph
from tfswap.frontends.loading import load
from tfswap.frontends.max_batch import max_batch
from tfswap.frontends.optimize import optimize
from tfswap.frontends.profile import profile
from tfswap.frontends.saved_model import optimize_graph
from tfswap.frontends.scope import scope
from tfswap.frontends.simulate import simulate
from tfswap.kernels.profile import Profile
from tfswap.plan.plan import Eviction, Plan
from tfswap.report.curve import Curve
from tfswap.report.explain import Explanation
from tfswap.report.max_batch import Fit
from tfswap.report.report import Report
from tfswap.support.printable import log_printable
from tfswap.version import __version__ as __version__

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
    "keep",
    "keras",
    "load",
    "max_batch",
    "optimize",
    "optimize_graph",
    "profile",
    "scope",
    "simulate",
]
