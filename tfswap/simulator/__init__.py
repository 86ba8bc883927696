"""The judge: TensorFlow's BFC allocator, replays of schedules and of the unordered step. Imports no planner."""
