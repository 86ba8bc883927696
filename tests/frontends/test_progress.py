"""Progress of long work: bars on a terminal, lines now and then anywhere else."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from layered_steps import Layer, training_step
from processes import run_forked
from terminals import on_terminal

from tfswap.compiler.compiler import Optimizer
from tfswap.kernels.device import DeviceModel
from tfswap.support import progress

ERASED = "\x1b[2K"


def plan() -> None:
    graph = training_step([Layer("dense"), Layer("relu"), Layer("scale", 1)] * 4, 512, 128)
    Optimizer(graph, DeviceModel()).plan("70%")


@pytest.fixture
def without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)


@pytest.mark.usefixtures("without_delay")
def test_what_takes_long_is_shown_with_its_parts_and_goes() -> None:
    with on_terminal() as screen, progress.task("planning a step"):
        plan()
    for what in ("planning a step", "reading the step", "simulating runs", "solving"):
        assert what in screen.text
    last = screen.text[screen.text.rindex("planning a step") :]
    assert ERASED in last
    assert screen.text.rindex("\x1b[?25h") > screen.text.rindex("\x1b[?25l"), "the cursor is hidden"


def test_what_is_soon_done_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 100.0)
    with on_terminal() as screen, progress.task("quick"):
        pass
    assert screen.text == ""


@pytest.mark.usefixtures("without_delay")
def test_what_fails_is_taken_away_too() -> None:
    for _ in range(2):  # and leaves the display to the next
        with on_terminal() as screen, contextlib.suppress(RuntimeError), progress.task("failing"):
            for _ in progress.over("parts", [1, 2]):
                raise RuntimeError
        assert "failing" in screen.text
        assert ERASED in screen.text[screen.text.rindex("failing") :]


@pytest.mark.usefixtures("without_delay")
def test_of_two_threads_one_has_the_display() -> None:
    def other() -> None:
        with progress.task("the other"):
            pass

    with on_terminal() as screen, progress.task("the first"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "the first" in screen.text
    assert "the other" not in screen.text


@pytest.mark.usefixtures("without_delay")
def test_a_dumb_terminal_stays_free_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal() as screen:
        monkeypatch.setenv("TERM", "dumb")
        with progress.task("planning"):
            pass
    assert screen.text == ""


def in_a_pipe(interval_s: float, waits: bool) -> None:
    progress.LINE_S = interval_s
    with progress.task("planning a step"):
        for part in progress.over("solving", [1, 2, 3]):
            while waits and part == 2 and "(1 of 3)" not in Path("/proc/self/fd/2").read_text():
                time.sleep(0.01)
    assert "rich.progress" not in sys.modules


def test_a_pipe_gets_a_line_at_times() -> None:
    done = run_forked(lambda: in_a_pipe(0.05, waits=True))
    lines = done.stderr.splitlines()
    assert lines
    # On a busy machine a line can be due before the second part, or after it.
    assert all(re.fullmatch(r"tfswap: \d+ s: planning a step(: solving( \(\d of 3\))?)?", line) for line in lines)


def test_what_is_soon_done_writes_nothing_into_a_pipe() -> None:
    assert run_forked(lambda: in_a_pipe(100, waits=False)).stderr == ""


class Notebook(io.StringIO):
    """A notebook's stream: it may have the file of the server's terminal, and is none."""

    def fileno(self) -> int:
        return self.terminal.fileno()

    def isatty(self) -> bool:
        return False


def test_a_notebook_gets_lines_in_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.01)
    with on_terminal() as screen:
        cell = Notebook()
        cell.terminal = sys.stderr
        with mock.patch.object(sys, "stderr", cell), progress.task("planning"):
            progress.announce("compiling")
            while "planning" not in cell.getvalue():
                pass
    assert "tfswap: compiling\n" in cell.getvalue()
    assert screen.text == ""


def test_no_standard_error_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.01)
    monkeypatch.setattr(sys, "stderr", None)
    with progress.task("planning"):
        progress.announce("compiling")


@pytest.fixture
def quick_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that writes empty files."""
    compiler = tmp_path / "quick++"
    compiler.write_text('#!/bin/sh\nfor word; do [ "$previous" = -o ] && : > "$word"; previous=$word; done\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TFSWAP_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("without_delay")
def test_building_is_shown(quick_compiler: None) -> None:
    build = pytest.importorskip("tfswap.native.build")
    facts = build.TensorFlowFacts("1", "1", (), ())
    with on_terminal() as screen:
        build.ensure_built(build.CORE, facts)
    assert "compiling the ops" in screen.text


def test_building_says_its_beginning_and_its_end_in_a_pipe(
    quick_compiler: None, capfd: pytest.CaptureFixture[str]
) -> None:
    build = pytest.importorskip("tfswap.native.build")
    library = build.ensure_built(build.CORE, build.TensorFlowFacts("1", "1", (), ()))
    first, last = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"tfswap: compiling its ops for TensorFlow 1 with .*: once, .* s to .* min", first)
    assert re.fullmatch(r"tfswap: compiled its ops in \d+ s; kept in .*", last)
    assert str(library.folder) in last
