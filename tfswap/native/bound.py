"""The core library's C interface, for code that also works without it and without TensorFlow."""

from __future__ import annotations

import ctypes

core: ctypes.CDLL | None = None
"""None until load.py has loaded the library."""
