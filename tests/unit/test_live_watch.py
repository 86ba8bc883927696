"""What a watch shows while the program runs: on a terminal, and as a page."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import needs_browser, shown_by
from terminals import on_terminal

from tfswap.errors import TfswapError
from tfswap.frontends.watching.live import BARS, LiveView, drawn_history
from tfswap.report.peak_owners import LimitCost, Owner, StepCosts, Watched, WatchedDevice, merged
from tfswap.report.watch_page import watch_page

OWNERS = [
    Owner(40 << 20, "matmul float32 [4096,256]", "train.py:9", 10),
    Owner(8 << 20, "gradient_tape/matmul float32 [4096,256]", "train.py:9, its gradient", 2),
    Owner(4 << 20, "conv, its own workspace", "net.py:31"),
    *(Owner(1 << 10, f"variable 'w{i}:0' float32 (16, 16)") for i in range(30)),
]
COSTS = StepCosts("train_step", 60 << 20, (LimitCost(45 << 20, 1.02), LimitCost(20 << 20, 1.25)))


def watched(nbytes: int = 60 << 20) -> Watched:
    device = WatchedDevice("CPU:0", nbytes, nbytes, "train_step", merged(OWNERS), 0)
    return Watched({"CPU:0": device}, (COSTS,))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_a_terminal_shows_what_holds_the_memory_and_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "30")
    with on_terminal() as screen:
        view = LiveView(watched, True, None)
        view.start()
        until(lambda: screen.text.count("now ") >= 2)
        view.stop()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.text)
    assert "CPU:0 held 60.00 MiB at its highest recorded moment in train_step" in text
    assert re.search(r"40\.00 MiB +67% +10 +train\.py:9 +matmul", text)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert screen.text.count("\x1b[?25h") >= 1, "the cursor is there"


def test_without_a_terminal_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    view = LiveView(watched, True, None)
    view.start()
    view.stop()
    assert capsys.readouterr() == ("", "")


def test_a_page_is_written_while_the_program_runs_and_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    view = LiveView(watched, False, "watch.html")
    monkeypatch.chdir("/")  # as the program may
    view.start()
    page = tmp_path / "watch.html"
    until(page.exists)
    view.stop()
    assert "http-equiv=refresh" in page.read_text()
    view.save(watched())
    assert "http-equiv=refresh" not in page.read_text()
    assert "train.py:9" in page.read_text()


def test_a_page_that_can_t_be_written_is_reported_and_the_program_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    view = LiveView(watched, False, str(tmp_path / "nowhere" / "watch.html"))
    view.save(watched())
    view.save(watched())
    assert len([each for each in caplog.records if "the page of the watch is not written" in each.message]) == 1


def test_a_watch_is_saved_as_a_page_only(tmp_path: Path) -> None:
    with pytest.raises(TfswapError, match=r"end with \.html"):
        watched().save(tmp_path / "watch.png")
    watched().save(tmp_path / "watch.html")
    assert (tmp_path / "watch.html").exists()


def test_bars_are_as_high_as_the_bytes() -> None:
    assert drawn_history(deque([0, 50, 100]), 100) == f"{BARS[0]}{BARS[4]}{BARS[7]}"
    assert drawn_history(deque([0]), 0) == BARS[0]


def test_a_page_has_the_rest_of_many_owners_in_one_row() -> None:
    many = tuple(Owner(10_000 - n, f"node{n}", "train.py:1") for n in range(4000))
    total = sum(each.nbytes for each in many) + 77
    text = watch_page(Watched({"GPU:0": WatchedDevice("GPU:0", total, total, "", many, 77)}))
    assert sum(map(int, re.findall(r"data-bytes=(\d+)", text))) == total
    assert "all others" in text and "allocated before, and freed since" in text


@needs_browser
@pytest.mark.parametrize("width", [400, 1100])
def test_the_page_answers_first_and_finds_a_line(tmp_path: Path, width: int) -> None:
    watched().save(tmp_path / "watch.html")
    script = """
        const find = document.querySelector("input[type=search]");
        const wide = document.documentElement.scrollWidth <= innerWidth;
        const first = document.querySelector("h1 + p").innerText, bars = [...document.querySelectorAll(".bar")];
        const edges = bars.map(bar => bar.getBoundingClientRect().width);
        find.value = "TRAIN.py:9"; find.dispatchEvent(new find.ownerDocument.defaultView.Event("input"));
        const shown = [...document.querySelectorAll(".owners tbody tr")].filter(row => !row.hidden).length;
        return {first, wide, shown, edges, found: document.querySelector(".found").innerText,
                limits: [...document.querySelectorAll(".limits tbody tr")].map(row => row.innerText)};
        """
    seen = shown_by(tmp_path / "watch.html", script, width)
    assert seen["first"] == "CPU:0 held 60.00 MiB at its highest recorded moment in train_step, the allocator's peak."
    assert seen["wide"]
    assert seen["shown"] == 2 and seen["found"] == "2 rows, 48.0 MiB, 92%"
    assert seen["edges"][0] == pytest.approx(5 * seen["edges"][1], rel=0.02)
    assert len(seen["limits"]) == 2 and "the smallest limit" in seen["limits"][1]
