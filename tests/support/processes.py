"""Processes for programs of tests that need an allocator, an environment or a cache of their own."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from emulated_gpu.settings import Gpus
from folders import PYTHONPATH
from folders import ROOT as ROOT

# A process imports TensorFlow and whatever else most programs import, which takes most of the time of a small program,
# and forks for each program. It must have one thread only, so numpy's library gets no others; TensorFlow has none
# before its first op, when it also reads the arena's settings. The import decides whether oneDNN's kernels are used, so
# there is a process for each case, and one without tfswap's ops, for programs that build or load them.
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
IMPORTED = {ONEDNN: "0", "TF_CPP_MIN_LOG_LEVEL": "2", "OPENBLAS_NUM_THREADS": "1"}
_FORKS = multiprocessing.get_context("forkserver")
_SERVERS = {
    (onednn, loaded): multiprocessing.forkserver.ForkServer() for onednn in ("0", "1") for loaded in (False, True)
}
for (_, _loaded), _server in _SERVERS.items():
    _server.set_forkserver_preload(["tensorflow", "processes", *(["preloaded"] if _loaded else [])])

TWO_THREADS = {"TF_NUM_INTRAOP_THREADS": "2", "TF_NUM_INTEROP_THREADS": "2"}
"""The environment of a process with two threads in each of TensorFlow's pools."""

HANGS_S = 300
"""Workers of which none has ended for so long wait for each other."""


def on_arena(code: str, mib: int = 512, **env: str) -> Any:
    """What `code` prints on its last line, as JSON; it has an arena of `mib` MiB, of the kind that GPUs have.

    It runs without oneDNN, unless `env` asks for it: its graph pass merges ops unless a control edge stands between,
    which changes bits.
    """
    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(mib)}
    return last_json(run_forked(code, **{**arena, **env}))


def on_gpus(code: str, gpus: Gpus, **env: str) -> Any:
    """What `code` prints on its last line, as JSON; it has these emulated GPUs, and GPUS, the plug-in."""
    program = f"import emulated_gpu\nGPUS = emulated_gpu.attach()\n{textwrap.dedent(code)}"
    return last_json(run_forked(program, **{**gpus.environment(), **env}))


# A worker that ends while another still takes a sum from it fails that one; the first keeps what they meet in, and may
# have ended before the others hear that it has heard of them.
TOGETHER = """
import contextlib as _contextlib
from tensorflow.python.eager import context as _context
from tensorflow.python.framework.errors import UnavailableError as _Ended
_here = _context.context()
_here.set_config_key_value(f"ended/{RANK}", "yes")
for _rank in range(WORKERS):
    _here.get_config_key_value(f"ended/{_rank}")
with _contextlib.suppress(_Ended):
    _here.set_config_key_value(f"seen/{RANK}", "yes")
for _rank in range(WORKERS if RANK == 0 else 0):
    _here.get_config_key_value(f"seen/{_rank}")
"""


def on_workers(code: str, workers: int = 2, mib: int = 256, **env: str) -> list[Any]:
    """What `code` prints on its last line as JSON, for each worker of a cluster on this machine, each with an arena of
    its own. In `code` RANK says which worker it is.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(workers)]
        for each in sockets:
            each.bind(("localhost", 0))
        cluster = {"worker": [f"localhost:{each.getsockname()[1]}" for each in sockets]}
    with tempfile.TemporaryDirectory() as folder:
        started: list[Forked] = []
        for rank in range(workers):
            own = Path(folder, str(rank))
            own.mkdir()
            task = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
            arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(mib)}
            program = f"RANK, WORKERS = {rank}, {workers}\n{textwrap.dedent(code)}{TOGETHER}"
            started.append(Forked(program, {**arena, **env, "TF_CONFIG": task}, own))
        try:
            # One that fails leaves the others waiting.
            while running := [each for each in started if each.process.exitcode is None]:
                if failed := [each for each in started if each.process.exitcode]:
                    failed[0].done()
                if not multiprocessing.connection.wait([each.process.sentinel for each in running], HANGS_S):
                    faults = "\n".join(each.err.read_text() for each in started)
                    raise AssertionError(f"the workers wait for each other\n{faults}")
        finally:
            for each in started:
                each.process.kill()
        return [last_json(each.done()) for each in started]


class Forked:
    """A process that has imported TensorFlow, and runs a program.

    Args:
        loaded: whether it has loaded tfswap's ops too.
    """

    def __init__(self, code: str, env: dict[str, str], folder: Path, *, loaded: bool = True):
        self.code = code
        self.out, self.err = folder / "out", folder / "err"
        self.out.touch()
        self.err.touch()
        arguments = textwrap.dedent(code), env, str(self.out), str(self.err), loaded
        self.process = _FORKS.Process(target=_execute, args=arguments)
        imported = {**IMPORTED, ONEDNN: env.get(ONEDNN, "0")}
        server = _SERVERS[imported[ONEDNN], loaded]
        with (
            mock.patch.object(multiprocessing.forkserver, "connect_to_new_process", server.connect_to_new_process),
            mock.patch.dict(os.environ, _environment(**imported), clear=True),  # what the first start passes on
        ):
            self.process.start()

    def done(self, status: int = 0) -> subprocess.CompletedProcess[str]:
        """What it wrote. Fails where it ended with another status."""
        assert self.process.exitcode == status, f"exit status {self.process.exitcode}\n{self.err.read_text()}"
        return subprocess.CompletedProcess(self.code, status, self.out.read_text(), self.err.read_text())


def run_forked(code: str, *, status: int = 0, loaded: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a process that has imported TensorFlow and run nothing yet. It must end with `status`, which is
    -N where signal N ends it. `loaded` is as of Forked.
    """
    return run_together([code], status=status, loaded=loaded, **env)[0]


def run_together(
    codes: Sequence[str], *, status: int = 0, loaded: bool = True, **env: str
) -> list[subprocess.CompletedProcess[str]]:
    """As `run_forked`, of several concurrent processes."""
    with tempfile.TemporaryDirectory() as folder:
        started: list[Forked] = []
        for number, code in enumerate(codes):
            own = Path(folder, str(number))
            own.mkdir()
            started.append(Forked(code, env, own, loaded=loaded))
        try:
            for each in started:
                each.process.join()
        finally:
            for each in started:
                each.process.kill()
        return [each.done(status) for each in started]


def _execute(code: str, env: dict[str, str], out: str, err: str, loaded: bool) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    os.environ.update(env)
    if loaded:  # so that what loading reads of the environment is read now
        from tfswap.native.load import load, throttle_from_environment

        throttle_from_environment(load().c)
    gc.freeze()  # or each collection goes through all that was imported
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
    """This process's, without throttled copies, and where `tfswap` and the modules of tests are found."""
    base = {key: value for key, value in os.environ.items() if not key.startswith("TFSWAP_COPY")}
    folders = [PYTHONPATH, *filter(None, [base.get("PYTHONPATH")])]
    return {**base, "PYTHONPATH": os.pathsep.join(folders), **env}


def last_json(run: subprocess.CompletedProcess[str]) -> Any:
    """What the process printed on its last line."""
    return json.loads(run.stdout.splitlines()[-1])
