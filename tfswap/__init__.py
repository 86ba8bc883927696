"""tfswap: train TensorFlow models that do not fit in device memory, under one byte limit.

Importing this changes nothing in TensorFlow, and does not import it until something needs it.
"""

import logging

from tfswap import keras
from tfswap.analysis.profile import Profile
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, OpLibraryError, TfswapError, UnsupportedGraph
from tfswap.frontends.fit import max_batch
from tfswap.frontends.function import OptimizedFunction, optimize
from tfswap.frontends.graph_def import OptimizedGraph
from tfswap.frontends.loading import load
from tfswap.frontends.marks import keep
from tfswap.frontends.policy import TensorFacts
from tfswap.frontends.profile import profile
from tfswap.frontends.saved_model import optimize_graph
from tfswap.frontends.simulate import simulate
from tfswap.planner.plan import Absence, Plan
from tfswap.printable import log_printable
from tfswap.report.curve import Curve
from tfswap.report.explain import Explanation
from tfswap.report.fit import Fit
from tfswap.report.report import Report

__version__ = "0.1.0"

log_printable(logging.getLogger("tfswap"))

__all__ = [
    "Absence",
    "Curve",
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
    "simulate",
]
