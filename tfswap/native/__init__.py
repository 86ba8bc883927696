"""The library of custom ops, seen from outside: op names, building, loading, status.

Importing anything here neither imports TensorFlow nor builds anything. `import tfswap.ops`, by
contrast, registers the ops with TensorFlow, which is why this is not a part of that package: Python
runs a package's `__init__` before any module inside it.
"""
