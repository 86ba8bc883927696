"""Processes for programs of tests that need an allocator, an environment or a cache of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent

# One process imports TensorFlow, which takes most of the time of a small program, and forks for each program. It
# must have one thread only, so numpy's library gets no others; TensorFlow has none before its first op, when it also
# reads what the arena is to be. Whether oneDNN's kernels are used is settled by the import.
IMPORTED = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2", "OPENBLAS_NUM_THREADS": "1"}
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tensorflow", "tfswap"])


def on_arena(code: str, mib: int = 512, **env: str) -> Any:
    """What `code` prints on its last line, as JSON; it has an arena of `mib` MiB, of the kind that GPUs have.

    It runs without oneDNN, whose graph pass merges ops unless a control edge stands between: other bits.
    """
    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(mib)}
    return last_json(run_forked(code, **{**arena, **env}))


def run_forked(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code`, which must succeed, in a process that has imported TensorFlow and run nothing yet."""
    return run_together([code], **env)[0]


def run_together(codes: Sequence[str], **env: str) -> list[subprocess.CompletedProcess[str]]:
    """As `run_forked`, of several at once."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number, code in enumerate(codes):
            out, err = Path(folder, f"out{number}"), Path(folder, f"err{number}")
            out.touch()
            err.touch()
            process = _FORKS.Process(target=_execute, args=(textwrap.dedent(code), env, str(out), str(err)))
            with mock.patch.dict(os.environ, _environment(**IMPORTED), clear=True):  # what the first start passes on
                process.start()
            started.append((code, process, out, err))
        try:
            for _, process, _, _ in started:
                process.join()
        finally:
            for _, process, _, _ in started:
                process.kill()
        for _, process, _, err in started:
            assert process.exitcode == 0, f"exit status {process.exitcode}\n{err.read_text()}"
        return [subprocess.CompletedProcess(code, 0, out.read_text(), err.read_text()) for code, _, out, err in started]


def _execute(code: str, env: dict[str, str], out: str, err: str) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    os.environ.update(env)
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh Python, which must succeed; `env` is added to the environment."""
    process = start_python(code, **env)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_python(code: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=_environment(**{"TF_CPP_MIN_LOG_LEVEL": "2", **env}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _environment(**env: str) -> dict[str, str]:
    """This process's, without throttled copies, and where `tfswap` and what is in this folder are found."""
    base = {key: value for key, value in os.environ.items() if not key.startswith("TFSWAP_COPY")}
    return {**base, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), **env}


def last_json(run: subprocess.CompletedProcess[str]) -> Any:
    """What the process printed on its last line."""
    return json.loads(run.stdout.splitlines()[-1])
