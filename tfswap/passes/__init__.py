"""Changes of a graph: `prepare` for every step, `tactics` to carry out a plan. Passes decide nothing."""
