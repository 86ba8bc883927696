"""A process of `tfswap run`, for programs of tests."""

from __future__ import annotations

import os
from typing import Any


def begin(**options: Any) -> None:
    """As at the start of a process of `tfswap run`."""
    import json
    import runpy

    from tfswap.frontends.unmodified.settings import RUN, STARTUP

    os.environ[RUN] = json.dumps(options)
    runpy.run_path(str(STARTUP))
