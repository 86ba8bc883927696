"""A planned step in this process: planned for the arena found, called, watched, audited."""
