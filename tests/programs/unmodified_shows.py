"""A program that prints how it was started, and what has been imported."""

import sys

print(__name__, sys.argv[1:], sys.path[0], sys.stdin.read(), [path for path in sys.path if "startup" in path])
print([name in sys.modules for name in ("tfswap", "tensorflow", "numpy")])
