"""Exporters: from the graph to TensorFlow's functions and GraphDefs."""
