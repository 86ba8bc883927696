"""The live TensorFlow device: its arena, the owners of its memory, the placement of nodes."""
