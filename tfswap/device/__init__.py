"""The live TensorFlow device: what is in its arena, who owns that, where nodes are placed."""
