"""Measurements in processes of their own, which a deadline ends, and the end of the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu.process import UNTIL

LONGEST_S = 400
"""What takes longer than this hangs."""
LEAST_S = 20
"""A process is not started for less time than this."""
NO_TIME = "no time was left"


class Runner:
    """Runs processes in groups of their own until the deadline; `stop` ends all of them.

    Args:
        command: what a measurement's name is appended to.
        seconds: how long the runner may take in all.
        env: added to the processes' environment.
    """

    def __init__(self, command: Sequence[str], seconds: float, env: dict[str, str]):
        self._command, self._env = command, env
        self._deadline = time.monotonic() + seconds
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def measure(self, case: tuple[str, ...]) -> dict[str, Any]:
        """What a case's process prints; with "failed" and the end of its output where it does not end well.

        Raises InterruptedError where `stop` was called.
        """
        left_s = self._deadline - time.monotonic()
        if left_s < LEAST_S:
            return {"not_run": NO_TIME}
        began, limit_s = time.monotonic(), min(left_s, LONGEST_S)
        process = self._start(case, limit_s)
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            out, err = process.communicate()
            if left_s < LONGEST_S:
                return {"not_run": f"{NO_TIME}: it was stopped after {limit_s:.0f} s"}
            return {"failed": f"took more than {limit_s:.0f} s", "output": (out + err)[-3000:]}
        finally:
            _end(process)  # where this thread is stopped
            with self._lock:
                self._running.discard(process)
        if self._stopped:
            raise InterruptedError
        found = _last_object(out)
        if found is None or process.returncode:
            reason = {"failed": f"ended with {_status(process.returncode)}", "output": (out + err)[-4000:]}
            return (found or {}) | reason
        return found | {"took_s": time.monotonic() - began}

    def _start(self, case: tuple[str, ...], limit_s: float) -> subprocess.Popen[str]:
        until = {UNTIL: str(time.time() + limit_s)}
        with self._lock:
            if self._stopped:
                raise InterruptedError
            process = subprocess.Popen(
                [*self._command, *case],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, **self._env, **until},
                start_new_session=True,  # what it starts ends with it
            )
            self._running.add(process)
        return process

    def run(self, cases: Iterable[tuple[str, ...]], work: Callable[[tuple[str, ...]], None], workers: int) -> None:
        """Calls `work` for the cases, in their order, by this number of threads. An error of one ends all."""
        pool = ThreadPoolExecutor(workers)
        try:
            list(pool.map(work, cases))
        except BaseException:
            self.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def stop(self) -> None:
        """Ends what runs; nothing starts any more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _status(returncode: int) -> str:
    return signal.Signals(-returncode).name if returncode < 0 else str(returncode)


def _last_object(text: str) -> dict[str, Any] | None:
    """The JSON object on the last line; None where there is none."""
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
