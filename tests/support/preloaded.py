"""What a process does before it forks for programs of tests: imports, and AutoGraph's first conversion.

Nothing here may start TensorFlow, by an op or a trace.
"""

import control_flow  # noqa: F401
import keras_programs  # noqa: F401
import nets
import swap_copies  # noqa: F401
import tensorflow as tf

import tfswap.keras
import tfswap.ops  # noqa: F401

tf.autograph.to_graph(nets.Net.step)  # the first one reads all modules for their files
