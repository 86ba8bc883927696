"""Passes that every step gets before it is planned."""
