"""Runs test_codecs.py and test_lossy_codecs.py in a process of its own, without oneDNN."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import start_python

pytest.importorskip("tensorflow")

CODE = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *FILES]))"


@pytest.mark.skipif(os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0", reason="both run in this process")
@pytest.mark.timeout(900)
def test_codecs_without_onednn():
    files = [str(Path(__file__).with_name(name)) for name in ("test_codecs.py", "test_lossy_codecs.py")]
    process = start_python(CODE.replace("FILES", repr(files)), TF_ENABLE_ONEDNN_OPTS="0")
    out, err = process.communicate()
    assert process.returncode == 0, out[-5000:] + err[-2000:]
    assert " passed" in out
