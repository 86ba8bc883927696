"""From facts and a limit to a plan: order, swaps, recomputation, concurrency, chunk splits. Imports no TensorFlow."""
