"""The codecs' vector code against the elements' own: tests/codec_vectors_test.cc, which needs no TensorFlow."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tfswap.oplib import build

NO_AVX512 = 77


def test_vectors_have_the_bits_of_elements(tmp_path):
    program = tmp_path / "codec_vectors_test"
    source = Path(__file__).with_name("codec_vectors_test.cc")
    command = [*build.find_compiler().command, "-std=c++17", *build.COMPILE_FLAGS, "-Werror"]
    subprocess.run([*command, "-I", str(build.CODECS.folder), str(source), "-o", str(program)], check=True)
    run = subprocess.run([str(program)], capture_output=True, text=True)
    if run.returncode == NO_AVX512:
        pytest.skip("needs AVX-512")
    assert run.returncode == 0, run.stderr
