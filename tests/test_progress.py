"""What takes long is shown on a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from graphs import Layer, training_step
from processes import run_forked
from terminals import on_terminal

from tfswap import progress
from tfswap.analysis.device import DeviceModel
from tfswap.frontends.pipeline import Optimizer

ERASED = "\x1b[2K"


def plan() -> None:
    graph = training_step([Layer("dense"), Layer("relu"), Layer("scale", 1)] * 4, 512, 128)
    Optimizer(graph, DeviceModel()).plan("70%")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)


@pytest.mark.usefixtures("at_once")
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


@pytest.mark.usefixtures("at_once")
def test_what_fails_is_taken_away_too() -> None:
    for _ in range(2):  # and leaves the display to the next
        with on_terminal() as screen, contextlib.suppress(RuntimeError), progress.task("failing"):
            for _ in progress.over("parts", [1, 2]):
                raise RuntimeError
        assert "failing" in screen.text
        assert ERASED in screen.text[screen.text.rindex("failing") :]


@pytest.mark.usefixtures("at_once")
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


@pytest.mark.usefixtures("at_once")
def test_a_dumb_terminal_stays_free_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal() as screen:
        monkeypatch.setenv("TERM", "dumb")
        with progress.task("planning"):
            pass
    assert screen.text == ""


def test_a_pipe_stays_free_of_it() -> None:
    done = run_forked(
        """
        import sys
        from tfswap import progress
        progress.QUIET_S = 0.0
        from test_progress import plan
        with progress.task("planning a step"):
            plan()
        assert "rich.progress" not in sys.modules
        """
    )
    assert "planning" not in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.usefixtures("at_once")
def test_building_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("tfswap.oplib.build")
    compiler = tmp_path / "quick++"
    compiler.write_text('#!/bin/sh\nfor word; do [ "$previous" = -o ] && : > "$word"; previous=$word; done\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TFSWAP_CACHE_DIR", str(tmp_path))
    facts = build.TensorFlowFacts("1", "1", (), ())
    with on_terminal() as screen:
        build.ensure_built(build.CORE, facts)
    assert "building the ops" in screen.text
