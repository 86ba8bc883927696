"""Passes that carry out a plan: swaps, encodings, recomputation, concurrent kernels, orders of bodies."""
