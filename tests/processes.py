"""Fresh Python processes for tests that need their own allocator, environment or cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh Python, which must succeed; `env` is added to the environment."""
    process = start_python(code, **env)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_python(code: str, **env: str) -> subprocess.Popen[str]:
    base = {key: value for key, value in os.environ.items() if not key.startswith("TFSWAP_COPY")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**base, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def last_json(run: subprocess.CompletedProcess[str]) -> Any:
    """What the process printed on its last line."""
    return json.loads(run.stdout.splitlines()[-1])
