"""Folders of the project and its tests, and the Python path with all of them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
BENCHMARKS = ROOT / "benchmarks"
GOLDEN = TESTS / "golden"
MODULES = sorted(
    folder for folder in TESTS.iterdir() if any(folder.glob("*.py")) and not (folder / "__init__.py").exists()
)
"""Folders whose modules import one another, and those of benchmarks, by name. Names are unique; pyproject.toml has the
same folders for pytest.
"""
PYTHONPATH = os.pathsep.join(map(str, (ROOT, BENCHMARKS, TESTS, *MODULES)))
