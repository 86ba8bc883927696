"""The way in: from TensorFlow's functions, SavedModels and GraphDefs to the graph."""
