"""Processes for programs of tests that need an allocator, an environment or a cache of their own.

A program is a function, of a test or nested in one, whose result is the program's, as JSON. It runs with the values
that it closes over and the names of its module, which the process imports: a module of such tests starts no TensorFlow.
A program that needs a main module of its own is text, and prints its result on its last line.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from carried_functions import Carried, carry
from emulated_gpu.settings import Gpus
from folders import PYTHONPATH
from folders import ROOT as ROOT

Program = str | Callable[..., Any]

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
    _server.set_forkserver_preload(["tensorflow", "pytest", "processes", *(["preloaded"] if _loaded else [])])

TWO_THREADS = {"TF_NUM_INTRAOP_THREADS": "2", "TF_NUM_INTEROP_THREADS": "2"}
"""The environment of a process with two threads in each of TensorFlow's pools."""

CARRIED = "import pickle; pickle.loads({!r}).run()"

HANGS_S = 300
"""Workers of which none has ended for so long wait for each other."""


def on_arena(code: Program, mib: int = 512, **env: str) -> Any:
    """The result of `code`, which has an arena of `mib` MiB, of the kind that GPUs have.

    It runs without oneDNN, unless `env` requests it: its graph pass merges ops unless a control edge stands between,
    which changes bits.
    """
    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(mib)}
    return last_json(run_forked(code, **{**arena, **env}))


def on_gpus(code: Program, gpus: Gpus, **env: str) -> Any:
    """The result of `code`, which has these emulated GPUs. Text has GPUS, the plug-in; a function may take it."""

    def with_gpus() -> Any:
        import emulated_gpu

        attached = emulated_gpu.attach()
        return code(attached) if code.__code__.co_argcount else code()

    text = (
        f"import emulated_gpu\nGPUS = emulated_gpu.attach()\n{textwrap.dedent(code)}" if isinstance(code, str) else ""
    )
    return last_json(run_forked(text or with_gpus, **{**gpus.environment(), **env}))


def meet(rank: int, workers: int) -> None:
    """Waits until all workers have come here.

    A worker that ends while another still takes a sum from it fails that one. The first keeps what they meet in, and
    may have ended before the others hear that it has heard of them.
    """
    from tensorflow.python.eager import context
    from tensorflow.python.framework.errors import UnavailableError

    here = context.context()
    here.set_config_key_value(f"ended/{rank}", "yes")
    for each in range(workers):
        here.get_config_key_value(f"ended/{each}")
    with contextlib.suppress(UnavailableError):
        here.set_config_key_value(f"seen/{rank}", "yes")
    for each in range(workers if rank == 0 else 0):
        here.get_config_key_value(f"seen/{each}")


SHARES_PORT = {"TF_GRPC_REUSE_PORT": "1"}
"""The environment in which a server of TensorFlow's binds a port of `reserved_ports` (grpc_server_lib.cc)."""


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Ports that no other program gets before a server of ours binds them, nor afterwards.

    A port that is free again may become that of any program's next connection; its server then can't start, or gets
    messages that are not its own.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(("localhost", 0))  # it never listens: all connections go to the server
        yield [each.getsockname()[1] for each in sockets]


def on_workers(code: Program, workers: int = 2, mib: int = 256, **env: str) -> list[Any]:
    """The results of `code`, for each worker of a cluster on this machine, each with an arena of its own. In text RANK
    says which worker it is; a function may take it.
    """

    def of_worker(rank: int) -> Program:
        if isinstance(code, str):
            end = "import processes\nprocesses.meet(RANK, WORKERS)"
            return f"RANK, WORKERS = {rank}, {workers}\n{textwrap.dedent(code)}\n{end}\n"

        def worker() -> Any:
            result = code(rank) if code.__code__.co_argcount else code()
            meet(rank, workers)
            return result

        return worker

    with tempfile.TemporaryDirectory() as folder, reserved_ports(workers) as ports:
        cluster = {"worker": [f"localhost:{port}" for port in ports]}
        started: list[Forked] = []
        for rank in range(workers):
            own = Path(folder, str(rank))
            own.mkdir()
            task = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
            arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(mib)}
            started.append(Forked(of_worker(rank), {**arena, **SHARES_PORT, **env, "TF_CONFIG": task}, own))
        try:
            # One that fails leaves the others waiting, or has failed since another has: all of them say what they know.
            while running := [each for each in started if each.process.exitcode is None]:
                has_failed = any(each.process.exitcode for each in started)
                if has_failed or not multiprocessing.connection.wait(
                    [each.process.sentinel for each in running], HANGS_S
                ):
                    why = "a worker has failed" if has_failed else "the workers wait for each other"
                    raise AssertionError(f"{why}\n{_said_by(started)}")
        finally:
            for each in started:
                each.process.kill()
        if any(each.process.exitcode for each in started):
            raise AssertionError(f"a worker has failed\n{_said_by(started)}")
        return [last_json(each.done()) for each in started]


def _said_by(workers: Sequence[Forked]) -> str:
    return "\n".join(f"worker {i} ({each.process.exitcode}):\n{each.err.read_text()}" for i, each in enumerate(workers))


class Forked:
    """A process that has imported TensorFlow, and runs a program.

    Args:
        loaded: whether it has loaded tfswap's ops too.
    """

    def __init__(self, code: Program, env: dict[str, str], folder: Path, *, loaded: bool = True):
        self.code = code
        self.out, self.err = folder / "out", folder / "err"
        self.out.touch()
        self.err.touch()
        program = textwrap.dedent(code) if isinstance(code, str) else carry(code)
        arguments = program, env, str(self.out), str(self.err), loaded
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
        return subprocess.CompletedProcess(str(self.code), status, self.out.read_text(), self.err.read_text())


def run_forked(code: Program, *, status: int = 0, loaded: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a process that has imported TensorFlow and run nothing yet. It must end with `status`, which is
    -N where signal N ends it. `loaded` is as of Forked.
    """
    return run_together([code], status=status, loaded=loaded, **env)[0]


def run_together(
    codes: Sequence[Program], *, status: int = 0, loaded: bool = True, **env: str
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


def _execute(program: str | Carried, env: dict[str, str], out: str, err: str, loaded: bool) -> None:
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    os.environ.update(env)
    if loaded:  # so that what loading reads of the environment is read now
        from tfswap.native.load import load, throttle_from_environment

        throttle_from_environment(load().c)
    function = _function_of(program)
    gc.freeze()  # or each collection goes through all that was imported
    if (result := function()) is not None:
        print(json.dumps(result))


def _function_of(program: str | Carried) -> Callable[[], Any]:
    if isinstance(program, str):
        code = compile(program, "<program>", "exec")
        return lambda: exec(code, {"__name__": "__main__"})
    from tensorflow.python.eager import context

    function = program.function()
    assert not context.context()._initialized, f"{program.module} starts TensorFlow when it is imported"
    return function


def run_python(code: Program, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh Python, which must succeed; `env` is added to the environment."""
    process = start_python(code, **env)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_python(code: Program, **env: str) -> subprocess.Popen[str]:
    program = textwrap.dedent(code) if isinstance(code, str) else CARRIED.format(pickle.dumps(carry(code)))
    return subprocess.Popen(
        [sys.executable, "-c", program],
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
