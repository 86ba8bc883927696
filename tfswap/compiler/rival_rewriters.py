"""Refuses other rewriters of TensorFlow that would undo a plan, before anything is planned.

These are set in the process, or by the function that calls the step. importers/function.py refuses graphs that XLA
compiles by their own attributes.
"""

from __future__ import annotations

import os

from tfswap.errors import UnsupportedGraph

FLAGS = "TF_XLA_FLAGS"
HIDES = "XLA fuses the step and hides its tensors, so no graph rewrite can bound them"


def clusters_by_environment() -> bool:
    """Whether the environment turns on XLA's auto-clustering."""
    flags = [f.strip().lstrip("-") for f in os.environ.get(FLAGS, "").split()]
    return any(f.startswith("tf_xla_auto_jit=") and not f.endswith("=0") for f in flags)


def refuse_rewriters() -> None:
    """Raise UnsupportedGraph when this process lets XLA cluster graphs, or Grappler change their precision."""
    import tensorflow as tf

    by_environment = clusters_by_environment()
    if by_environment or tf.config.optimizer.get_jit():
        raise UnsupportedGraph(
            f"auto-clustering is on ({FLAGS if by_environment else 'tf.config.optimizer.set_jit'}): {HIDES}. Turn it "
            "off, for the process that runs the step as well."
        )
    options = tf.config.optimizer.get_experimental_options()
    precision = sorted(k for k, on in options.items() if k.startswith("auto_mixed_precision") and on)
    if precision:
        raise UnsupportedGraph(
            f"{precision[0]} is on (tf.config.optimizer.set_experimental_options): TensorFlow would change the step's "
            "element types after it was planned, and a planned step runs as it was planned. Turn it off, and ask for "
            'mixed precision in the model, as by keras.mixed_precision.set_global_policy("mixed_float16").'
        )


def refuse_compiled_caller(name: str) -> None:
    """Raise UnsupportedGraph when the function that is being traced, and calls `name`, is compiled by XLA."""
    from tensorflow.python.framework import ops
    from tensorflow.python.ops import control_flow_util

    if control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()):
        raise UnsupportedGraph(
            f"{name} is called by a function with jit_compile=True: {HIDES}. Remove jit_compile=True from the caller; "
            "in Keras: model.compile(..., jit_compile=False), since its default compiles."
        )
