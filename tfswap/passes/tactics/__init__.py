"""What a plan asks for: swaps, encodings, recomputation, concurrent kernels, orders of bodies."""
