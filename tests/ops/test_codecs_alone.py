"""Runs test_codecs.py and test_lossy_codecs.py in a process of its own, without oneDNN."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import run_forked

pytest.importorskip("tensorflow")

CODE = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *FILES]))"


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0", reason="both run in this process")
@pytest.mark.timeout(900)
def test_codecs_without_onednn():
    files = [str(Path(__file__).with_name(name)) for name in ("test_codecs.py", "test_lossy_codecs.py")]
    assert " passed" in run_forked(CODE.replace("FILES", repr(files)), TF_ENABLE_ONEDNN_OPTS="0").stdout
