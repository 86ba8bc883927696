"""Reports as files: a page that works in a browser, a picture, a trace; all with the simulator's figures."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import networkx
import pytest
from layered_steps import training_step
from reports import CPU, NET, saved, small_report, timeline, unchanged_report
from terminals import on_terminal

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.errors import TfswapError
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.plan.schedule import KERNELS
from tfswap.report.explain import SUFFICES, UNMET
from tfswap.report.report import ROWS_SHOWN, Report
from tfswap.report.reporting import _named
from tfswap.report.summary import unit_of
from tfswap.report.tables import show


@pytest.fixture(scope="module")
def report() -> Report:
    return small_report()


@pytest.fixture(scope="module")
def unchanged() -> Report:
    return unchanged_report()


def test_a_graph_is_saved_for_viewers(report: Report, tmp_path: Path) -> None:
    made = networkx.read_graphml(saved(report, tmp_path, ".graphml"), force_multigraph=True)
    labels = [facts["label"] for _, facts in made.nodes(data=True)]
    assert len(set(labels)) == len(labels)
    tactics = {facts["tensor"]: facts["tactic"] for *_, facts in made.edges(data=True) if "tactic" in facts}
    assert tactics == {row.name: row.tactic for row in (*report.rows, *report.others) if row.name in tactics}
    assert {row.name for row in report.swapped} <= tactics.keys()
    drawn = saved(report, tmp_path, ".dot").read_text()
    assert drawn.count(" -> ") == made.number_of_edges()
    by_hand = dataclasses.replace(report, _graph=None)
    with pytest.raises(TfswapError, match="constructed by hand"):
        by_hand.save(tmp_path / "none.graphml")
    assert not (tmp_path / "none.graphml").exists()


def test_without_pydot_a_dot_file_is_refused(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydot", None)
    with pytest.raises(TfswapError, match="pip install pydot"):
        report.save(tmp_path / "graph.dot")
    assert not (tmp_path / "graph.dot").exists()


def test_where_no_plan_keeps_the_limit_no_tensor_is_reported_to_need_nothing() -> None:
    optimizer = Optimizer(training_step(NET, 512, 128), CPU, Options(("swap",)))
    made = optimizer.report(optimizer.analysis("1KiB"))
    assert not made.keeps_limit
    reasons = {row.reason for row in (*made.rows, *made.others)}
    assert UNMET in reasons
    assert not any(SUFFICES in reason for reason in reasons)
    waits = next(row for row in made.rows if row.reason == UNMET)
    assert made.explain(waits.name).reason == UNMET


@pytest.mark.parametrize("which", ["report", "unchanged"])
def test_a_chart_is_as_high_as_the_peak_that_is_named(which: str, request: pytest.FixtureRequest) -> None:
    made: Report = request.getfixturevalue(which)
    drawn = timeline(made)
    named = [(drawn.before, made.baseline_peak_bytes)]
    if drawn.after is not None:
        named.append((drawn.after, made.planned_peak_bytes))
    text = made._repr_html_()
    for run, peak_bytes in named:
        assert run.peak_bytes == max(map(sum, run.at(range(len(run.record.in_use_bytes))))) == peak_bytes
        assert f"<span class=soft>peak {unit_of(made).text(peak_bytes)}, " in text


def test_a_chart_follows_the_peak_of_the_arena_that_the_latest_step_met(report: Report) -> None:
    met = dataclasses.replace(report, planned_peak_bytes=report.planned_peak_bytes + (3 << 20))
    assert f"<span class=soft>peak {unit_of(met).text(met.planned_peak_bytes)}, " in met._repr_html_()


def test_a_notebook_shows_the_charts(report: Report) -> None:
    text = report._repr_html_()
    assert text.count("<div class=box") == 2
    assert "<script" not in text
    assert "<step>" not in text
    assert dataclasses.replace(report, _timeline=None)._repr_html_().count("<div class=box") == 0


def test_the_trace_is_the_schedule_on_its_lanes(report: Report, tmp_path: Path) -> None:
    content = json.loads(saved(report, tmp_path, ".trace.json").read_text())
    events = content["traceEvents"]
    record = timeline(report).planned
    assert record is not None
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["compute", "copies in", "copies out"]
    slices = [e for e in events if e["ph"] == "X"]
    kernels = [record.flow.nodes[s].name for kind, s in record.steps if kind in KERNELS]
    assert [e["name"] for e in slices if e["cat"] in ("run", "again")] == kernels
    for thread in names:
        ends = [(e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == thread]
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(ends)), "lanes go one by one"
    assert sum(e["dur"] for e in slices if e["cat"] == "copy") > 0
    for process, peak in ((1, report.planned_peak_bytes), (2, report.baseline_peak_bytes)):
        counters = [e for e in events if e["ph"] == "C" and e["pid"] == process]
        assert max(sum(e["args"].values()) for e in counters) == peak
    assert max(e["ts"] + e["dur"] for e in slices) <= 1e6 * record.timing.total_s * (1 + 1e-9)


def test_the_figures_and_a_picture_are_saved_and_other_endings_refused(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(saved(report, tmp_path, ".json").read_text()) == json.loads(report.to_json())
    for name in ("report", "report.svg", "report.html.gz", "trace"):
        with pytest.raises(TfswapError, match=r"end the name with \.html"):
            report.save(tmp_path / name)
    with pytest.raises(TfswapError, match="can't be written"):
        report.save(tmp_path / "nowhere" / "report.html")
    by_hand = dataclasses.replace(report, _timeline=None)
    with pytest.raises(TfswapError, match="constructed by hand"):
        by_hand.save(tmp_path / "none.trace.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.json"]
    pytest.importorskip("matplotlib")
    assert saved(report, tmp_path, ".png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TfswapError, match="pip install 'tfswap\\[plot\\]'"):
        report.save(tmp_path / "other.png")


def test_a_table_is_whole_in_a_pipe_and_as_wide_as_a_terminal(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = str(report).splitlines()
    for row in report.rows[:ROWS_SHOWN]:
        assert any(row.name in line and line.endswith(row.reason) for line in seen)
    monkeypatch.setenv("COLUMNS", "60")
    with on_terminal("stdout") as screen:
        show(report)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.text)
    assert shown != screen.text, "no colours"
    assert max(map(len, shown.splitlines())) <= 60
    assert "smallest limit" in shown


def test_what_another_course_or_size_can_take_is_named_of_what_decides_it():
    flow = analyse_dataflow(
        parse_graph(
            "%x = Placeholder() -> float32[4]\n%l = While(%x) -> float32[4]\n%e = Exp(%l) -> float32[4]\n"
            "%w = Where(%e) -> int64<=[4,1]\n%n = Neg(%w) -> int64<=[4,1]\nfeeds %x\nfetches %n\n"
        ),
        DeviceModel(),
    )
    size = "w (Where, judged by some of its sizes: another takes at most 512 bytes more)"
    assert [_named(flow, node, 512) for node in flow.nodes[1:]] == ["l (While)", "e (Exp)", size, "n (Neg)"]
    sampled = dataclasses.replace(flow, all_courses=False)
    covered = dataclasses.replace(sampled, covering=flow)
    course = "l (While, judged by some of its courses: another takes at most 512 bytes more)"
    assert _named(covered, flow.nodes[1], 512) == course
    assert _named(covered, flow.nodes[1], None) == "l (While)"
    unknown = "l (While, judged by some of its courses: what another takes has no known bound)"
    assert _named(sampled, flow.nodes[1], 512) == unknown
