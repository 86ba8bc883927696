"""Runs test_codecs.py in a process of its own, without oneDNN."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import start_python

pytest.importorskip("tensorflow")

CODE = "import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[0]]))"


@pytest.mark.skipif(os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0", reason="test_codecs.py runs in this process")
@pytest.mark.timeout(900)
def test_codecs_without_onednn():
    file = Path(__file__).with_name("test_codecs.py")
    process = start_python(CODE.replace("sys.argv[0]", repr(str(file))), TF_ENABLE_ONEDNN_OPTS="0")
    out, err = process.communicate()
    assert process.returncode == 0, out[-5000:] + err[-2000:]
    assert " passed" in out
