"""Builds and loads the libraries of custom ops, and reports their status.

Importing a module of this package neither imports TensorFlow nor builds a library. `import tfswap.ops` registers the
ops with TensorFlow. This is a package of its own because Python runs a package's `__init__` before any module in it.
"""
