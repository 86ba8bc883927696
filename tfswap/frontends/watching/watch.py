"""Records the allocator's events around some calls of traced functions, and keeps each device's highest moment.

A recording begins when eager code calls a trace and ends when it calls the next one, so that it has the eager code and
the pipelines between two steps too. Recorded are the first two calls of each trace, since steps are alike; and where
the allocator's peak is above all that was recorded, calls of the traces that have run since. A thread ends the
recording of a last call, and records a while of programs that call no traces.

The time that this takes is measured, and kept under BUDGET of the time that the program has run; the first two calls of
a trace are recorded all the same. A training step's graph is taken once besides, which takes about as long as
TensorFlow's own optimizers do.

Not handled: sessions of TensorFlow 1 in programs without eager code; the line of an eager op.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfswap.analysis.allocator_events import AllocatorEvent, ArenaHeight, heights
from tfswap.device import arena
from tfswap.device.allocator_events import begin_recording, chunks_in_use, device_of, end_recording, yielding
from tfswap.device.memory_owners import owners_in_call
from tfswap.device.placement import step_devices
from tfswap.frontends.watching.costs import KnownSteps
from tfswap.frontends.watching.live import LiveView
from tfswap.frontends.watching.naming import owners_afterwards, owners_of
from tfswap.report.peak_owners import Watched, WatchedDevice
from tfswap.report.report import HTML, require_kind

BUDGET, FREE_S = 0.01, 0.3
"""The share of the time that recordings may take, besides this time at the beginning."""
ALWAYS = 2
"""The first calls of each trace are recorded."""
TRIES = 3
"""How often a trace is recorded for one peak of the allocator that was not recorded."""
READ_S = 0.02
"""How often the allocator's peak is read, at most."""
TICK_S, LONGEST_TICKS = 0.25, 20
"""How often the thread checks, and how long it records: of these, one at first."""
LONGEST_S = 60.0
"""A recording ends after this time: its events take host memory."""
SEEN = "_tfswap_watched"
"""The attribute of a trace with its `_Calls`."""
NO_ARENA = (
    "nothing was seen: this CPU's allocator keeps no statistics. TF_CPU_ALLOCATOR_USE_BFC=1 in the environment gives "
    "it an arena as GPUs have"
)


@dataclass
class _Calls:
    """The calls of a trace.

    Attributes:
        trace: the trace, weakly.
        count: of its calls.
        tries: for the peaks at `tried`, how many of its calls were recorded.
    """

    trace: weakref.ref[Any]
    count: int = 0
    tries: int = 0
    tried: tuple[int, ...] = ()


@dataclass
class _Recording:
    """What is being recorded.

    Attributes:
        in_use: by device, the chunks that were in use before.
        calls: of the trace that was called; None where the thread records.
        inputs: the trace's arguments.
        owners: by address, the trace's variables and arguments.
        ended_s: when the call ended; None while it runs.
    """

    in_use: dict[str, Any]
    calls: _Calls | None
    inputs: Sequence[Any] = ()
    owners: Mapping[int, str] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None


class Watch:
    """Watches this process between `start` and `stop`, or inside of a `with`, which prints what it has seen.

    Args:
        live: whether to show it on the terminal meanwhile.
        page: the path of a page that shows it, meanwhile and in the end; None for none.
    """

    def __init__(self, *, live: bool = False, page: str | None = None) -> None:
        self._view = LiveView(lambda: Watched(self.devices(), note=self._note()), live, page)
        self._lock = threading.RLock()
        self._recording: _Recording | None = None
        self._best: dict[str, WatchedDevice] = {}
        self._unnamed: dict[str, ArenaHeight] = {}  # by device, of the thread's recordings
        self._steps = KnownSteps()
        self._calls = 0
        self._busy_s = 0.0
        self._began_s = 0.0
        self._read_s = 0.0
        self._is_own = threading.local()
        self._stops = contextlib.ExitStack()
        self._process = 0

    def start(self) -> Watch:
        """Begin to watch. Raises TfswapError where tfswap's ops can't be built."""
        from tensorflow.python.eager.polymorphic_function import concrete_function

        kind: Any = concrete_function.ConcreteFunction
        plain = kind._call_flat
        self._process = os.getpid()
        self._began_s = time.monotonic()
        if not self._peaks():
            return self
        chunks_in_use(step_devices()[0])  # the ops are built and loaded before anything is recorded
        self._busy_s, self._began_s = 0.0, time.monotonic()
        self._stops.enter_context(yielding(self._end))
        kind._call_flat = self._watched(plain)
        self._stops.callback(setattr, kind, "_call_flat", plain)
        ended = threading.Event()
        thread = threading.Thread(target=self._tick, args=(ended,), name="tfswap watch", daemon=True)
        thread.start()
        self._stops.callback(thread.join)
        self._stops.callback(ended.set)
        alive = weakref.ref(self)
        os.register_at_fork(before=lambda: (watch := alive()) is not None and watch._end())
        self._view.start()
        self._stops.callback(self._view.stop)
        return self

    def stop(self) -> None:
        """End watching: what is recorded until now counts."""
        self._end()
        self._stops.close()

    def __enter__(self) -> Watch:
        return self.start()

    def __exit__(self, *_: Any) -> None:
        self.stop()
        self.print()

    def print(self) -> None:
        """Print what was seen to stderr, in the process that was watched."""
        if os.getpid() != self._process or sys.stderr is None:  # None: closed
            return
        print(Watched(self.devices(), note=self._note()), file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # the user does not want to wait
            costs = self._steps.costs()
            if costs:
                print(Watched(steps=costs), file=sys.stderr)
            self._view.save(Watched(self.devices(), costs, self._note()))
            return
        self._view.save(Watched(self.devices(), note=self._note()))

    def report(self) -> Watched:
        """What was seen until now, with what limits would cost: training steps are planned, which takes seconds."""
        return Watched(self.devices(), self._steps.costs(), self._note())

    def _note(self) -> str:
        """Why nothing was seen; "" where something was."""
        if not self._peaks():
            return NO_ARENA
        return "" if self._best else "nothing was seen: no op requested memory of a device while it was watched"

    def devices(self) -> dict[str, WatchedDevice]:
        """By name, the devices' highest moments until now. Nothing is planned."""
        peaks = self._peaks()
        with self._at_work():
            for name, height in self._unnamed.items():
                self._best[name] = dataclasses.replace(self._best[name], owners=owners_afterwards(height))
            self._unnamed.clear()
        return {
            name: dataclasses.replace(seen, peak_bytes=max(seen.nbytes, peaks.get(name, 0)))
            for name, seen in self._best.items()
        }

    def _watched(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """`ConcreteFunction._call_flat`, watched."""
        from tensorflow.python.eager.context import executing_eagerly

        def _call_flat(concrete: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
            if not executing_eagerly() or getattr(self._is_own, "work", False):
                return plain(concrete, tensor_inputs, captured_inputs)
            calls = concrete.__dict__.get(SEEN)
            if calls is None or calls.trace() is not concrete:  # a copy of a trace has its attributes
                calls = _Calls(weakref.ref(concrete))
                setattr(concrete, SEEN, calls)
            calls.count += 1
            self._calls += 1
            if self._recording is not None or calls.count <= ALWAYS or time.monotonic() >= self._read_s:
                self._before(calls, tensor_inputs)
            try:
                return plain(concrete, tensor_inputs, captured_inputs)
            finally:
                recording = self._recording
                if recording is not None and recording.calls is calls:
                    recording.ended_s = time.monotonic()

        return _call_flat

    def _before(self, calls: _Calls, inputs: Sequence[Any]) -> None:
        """Before a call: end the recording of the last one, and perhaps begin one of this."""
        recording = self._recording
        if recording is not None and recording.calls is not None and recording.ended_s is None:
            return  # another thread's call
        with self._at_work():
            self._end()
            self._read_s = time.monotonic() + READ_S
            if calls.count <= ALWAYS or self._is_worth_a_try(calls):
                self._begin(calls, inputs)

    def _is_worth_a_try(self, calls: _Calls) -> bool:
        """Whether a call of this trace may show a peak that was not recorded, and there is time to record it."""
        peaks = self._peaks()
        if not self._is_higher(peaks) or not self._has_time():
            return False
        if calls.tried != (tried := tuple(peaks.values())):
            calls.tried, calls.tries = tried, 0
        calls.tries += 1
        return calls.tries <= TRIES

    def _has_time(self) -> bool:
        return self._busy_s <= FREE_S + BUDGET * (time.monotonic() - self._began_s)

    def _is_higher(self, peaks: dict[str, int]) -> bool:
        return any(peak > (self._best[name].nbytes if name in self._best else 0) for name, peak in peaks.items())

    @staticmethod
    def _peaks() -> dict[str, int]:
        """By device, the allocator's peak."""
        found = {device: arena.memory_info(device) for device in step_devices()}
        return {device: info.peak_bytes for device, info in found.items() if info is not None}

    @contextlib.contextmanager
    def _at_work(self) -> Any:
        """Measures the time of what runs inside; it is not watched itself."""
        with self._lock:
            began_s, outer = time.monotonic(), getattr(self._is_own, "work", False)
            self._is_own.work = True
            try:
                yield
            finally:
                self._is_own.work = outer
                if not outer:
                    self._busy_s += time.monotonic() - began_s

    def _begin(self, calls: _Calls | None, inputs: Sequence[Any] = ()) -> None:
        trace = None if calls is None else calls.trace()
        owners = {} if trace is None else owners_in_call(trace, inputs)
        in_use = {device: chunks_in_use(device) for device in self._peaks()}
        if begin_recording():
            self._recording = _Recording(in_use, calls, inputs, owners)

    def _end(self) -> None:
        """End the recording, if there is one, and keep what it has shown."""
        with self._at_work():
            recording, self._recording = self._recording, None
            if recording is None:
                return
            events = end_recording()
            in_use = {each.allocator: recording.in_use.get(device_of(each.allocator), {}) for each in events}
            for allocator, height in heights(events, in_use).items():
                if (device := device_of(allocator)) in recording.in_use:
                    self._keep(device, height, events, recording)

    def _keep(self, device: str, height: ArenaHeight, events: Sequence[AllocatorEvent], recording: _Recording) -> None:
        trace = None if recording.calls is None else recording.calls.trace()
        if trace is not None:
            began_s = time.monotonic()
            self._steps.note(trace, recording.inputs, events, height.nbytes)
            self._busy_s -= time.monotonic() - began_s
        if device in self._best and self._best[device].nbytes >= height.nbytes:
            return
        self._unnamed.pop(device, None)
        if recording.calls is None:  # the program goes on meanwhile
            self._unnamed[device], owners = height, ()
        else:
            owners = owners_of(height, [trace] if trace is not None else [], recording.owners)
        name = "" if trace is None else trace.graph.name
        self._best[device] = WatchedDevice(device, height.nbytes, 0, name, owners, height.unknown_bytes)

    def _tick(self, ended: threading.Event) -> None:
        """The thread: it ends recordings that no call ends, and records where no trace is called.

        While the allocator's peak stays above what was recorded, it records for longer each time, and waits as long.
        """
        calls, tries, waited, tried = 0, 0, 0, {}
        while not ended.wait(TICK_S):
            now, recording = time.monotonic(), self._recording
            if recording is not None:
                idle = recording.ended_s is not None and now - recording.ended_s > TICK_S
                long_s = LONGEST_S if recording.calls is not None else TICK_S * tries
                if idle or now - recording.began_s >= long_s:
                    self._end()
            elif calls == self._calls and self._is_higher(peaks := self._peaks()):
                tries, waited, tried = (tries, waited + 1, tried) if tried == peaks else (0, 1, peaks)
                if waited > tries and self._has_time():
                    tries, waited = min(tries + 1, LONGEST_TICKS), 0
                    with self._at_work():
                        if self._recording is None:
                            self._begin(None)
            calls = self._calls


def watch(*, live: bool = False, html: str | os.PathLike[str] | None = None) -> Watch:
    """Watch what this process runs, without changing it: which tensors hold the device's memory at its peak.

        with tfswap.watch():
            model.fit(x, y)

    At the end of the block, it prints to stderr which tensors, by the user's source lines, were in the arena at its
    highest moment, and what a limit would cost the training steps that ran. Or call `start()` and `stop()`, and read
    `report()`. `tfswap watch train.py` does the same to a whole program.

    Args:
        live: show it on the terminal that stderr is while the program runs.
        html: write it to this page, while the program runs and at the end of the block.

    Raises:
        TfswapError: `html` does not end with .html; when it starts, where tfswap's ops can't be built.
    """
    if html is not None:
        require_kind(html, (HTML,))
    return Watch(live=live, page=None if html is None else os.fspath(html))
