"""The graph: nodes, types, traits of ops, tfswap's own op names, text form. Imports no TensorFlow."""
