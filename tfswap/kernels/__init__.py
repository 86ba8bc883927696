"""What one TensorFlow kernel requests from the allocator, and the hardware. Knows no graph, imports no TensorFlow."""
