"""The codecs' vector code against the elements' own: tests/unit/codec_vectors_test.cc, which needs no TensorFlow."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tfswap.native import build

NO_SUCH_VECTORS = 77


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    program = tmp_path_factory.mktemp("codecs") / "codec_vectors_test"
    source = Path(__file__).with_name("codec_vectors_test.cc")
    command = [*build.find_compiler().command, "-std=c++17", *build.COMPILE_FLAGS, "-Werror"]
    subprocess.run([*command, "-I", str(build.CODECS.folder), str(source), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("vectors", ["avx2", "avx512"])
def test_vectors_have_the_bits_of_elements(program, vectors):
    run = subprocess.run([str(program), vectors], capture_output=True, text=True)
    if run.returncode == NO_SUCH_VECTORS:
        pytest.skip(f"needs {vectors}")
    assert run.returncode == 0, run.stderr
