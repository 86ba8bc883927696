"""A function whose limit changes between two calls: by assignment, or by a file that is read before each."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from tfswap.compiler.request import Request
from tfswap.frontends.derived_functions import DerivedFunctions
from tfswap.native.forks import refuse_in_late_child
from tfswap.report.report import Report
from tfswap.runtime import elastic_limit
from tfswap.runtime.step_cache import StepCache
from tfswap.support.limit_file import LimitFile
from tfswap.support.sizes import Limit

P = ParamSpec("P")
R = TypeVar("R")


class ChangeableLimit(Generic[P, R]):
    """The limit of an OptimizedFunction."""

    __name__: str
    _request: Request
    _lock: threading.RLock
    _plain: dict[Any, Any]
    _steps: StepCache
    _derived: DerivedFunctions

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        refuse_in_late_child(self.__name__)
        if self._request.limit_file is None:
            return self._run(*args, **kwargs)
        return self._under_file(self._run, *args, **kwargs)

    def _under_file(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call, under the limit that its file has now, where it has one."""
        call = functools.partial(run, *args, **kwargs)
        file = self._request.limit_file
        return call() if file is None else elastic_limit.call(file, self, call)

    def _run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The call, under the present limit."""
        raise NotImplementedError

    @property
    def memory_limit(self) -> Limit:
        """The limit as it was given, or as its file had it at the latest call; under a shared budget, the share.

        A new one counts from the next call on, which plans for it without a new trace. It replaces a file. Setting it
        raises TfswapError where it is no limit, and where a plan was given.
        """
        return self._request.memory_limit

    @memory_limit.setter
    def memory_limit(self, limit: Limit) -> None:
        self.change_request(self._request.with_limit(limit))

    def change_request(self, request: Request) -> None:
        """Take a request that differs by its limit."""
        with self._lock:
            self._request = request
            self._plain.clear()
            self._steps.change_limit(request.memory_limit)
            self._derived.change_request(request)

    @property
    def limit_file(self) -> LimitFile | None:
        """The file that has the limit."""
        return self._request.limit_file

    def follow(self, limit: Limit) -> None:
        """Take the limit that the file has, unless it is the present one."""
        if limit == self._request.memory_limit:
            return
        with self._lock:
            if self._request.limit_file is not None:  # nothing has been assigned meanwhile
                self.change_request(dataclasses.replace(self._request, memory_limit=limit))

    @property
    def latest_report(self) -> Report | None:
        """The report of the latest call; None where it had no plan."""
        raise NotImplementedError

    @property
    def reported_floor_bytes(self) -> int:
        """The floor of the latest call's step, the highest of its devices; 0 where it had no plan."""
        report = self.latest_report
        return 0 if report is None else max(each.floor_bytes for each in report.devices.values())
