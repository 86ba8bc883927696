"""What one TensorFlow kernel requests from the allocator, and the hardware. Imports neither graphs nor TensorFlow."""
