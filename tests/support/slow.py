"""Cases of parametrised tests that `make test` leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Those that take long and test much the same as the others. A tuple is a case of several arguments."""
    marks = pytest.mark.slow
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case in cases]
