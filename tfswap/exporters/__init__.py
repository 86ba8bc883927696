"""The way out: from the graph to TensorFlow's functions and GraphDefs."""
