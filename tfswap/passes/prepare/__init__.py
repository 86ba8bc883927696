"""What every step gets before it is planned."""
