"""Facts of one graph: dataflow, control flow, constants, integer values, encodings, costs. Imports no TensorFlow."""
