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
from browser import needs_browser, shown_by
from layered_steps import Layer, training_step
from terminals import on_terminal

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import kernel_seconds
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.errors import TfswapError
from tfswap.frontends.simulate import sweep
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import Machine, default_rates
from tfswap.plan.schedule import KERNELS, build_schedule
from tfswap.report.explain import SUFFICES, UNMET
from tfswap.report.page import BLOCKS, COLUMNS, HOLDS, MOST_BYTES, ROWS
from tfswap.report.report import ROWS_SHOWN, Report, report_of_devices
from tfswap.report.reporting import _named
from tfswap.report.rows import TensorRow
from tfswap.report.tables import show
from tfswap.report.timeline import KINDS, Timeline
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN
from tfswap.simulator.record import record_planned
from tfswap.simulator.unordered import record_baseline
from tfswap.support.sizes import format_bytes

CPU = DeviceModel()
NET = [Layer("dense"), Layer("relu"), Layer("scale", 1)] * 4


@pytest.fixture(scope="module")
def report() -> Report:
    """Of a small step that swaps."""
    optimizer = Optimizer(training_step(NET, 512, 128), CPU, Options(("swap",)))
    floor = optimizer.floor_bytes()
    made = optimizer.report(optimizer.plan(floor + (optimizer.baseline.peak_bytes - floor) // 4))
    assert made.swapped
    return dataclasses.replace(made, step="a <step> & more", measured_peak_bytes=made.planned_peak_bytes - 512)


@pytest.fixture(scope="module")
def unchanged() -> Report:
    """Of the same step with as much memory as it can use."""
    optimizer = Optimizer(training_step(NET, 512, 128), CPU)
    return optimizer.report(optimizer.plan(None))


def saved(report: Report, folder: Path, ending: str) -> Path:
    path = folder / f"report{ending}"
    report.save(path)
    return path


def natural(name: str) -> list[str | int]:
    """As people sort: dense2 before dense10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def timeline(report: Report) -> Timeline:
    assert report._timeline is not None
    return report._timeline()


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


@needs_browser
def test_the_page_shows_what_is_alive_and_sorts_its_table(report: Report, tmp_path: Path) -> None:
    page = saved(report, tmp_path, ".html")
    seen = shown_by(
        page,
        """
        const read = document.querySelectorAll(".read")[1], box = document.querySelectorAll(".box")[1];
        const table = document.querySelector("table.tensors tbody");
        const cells = n => [...table.querySelectorAll(`td:nth-child(${n})`)].map(c => c.innerText);
        const at_peak = read.innerText, first = cells(1);
        const names_alive = () => [...read.lastChild.querySelectorAll("bdi")].map(name => name.innerText);
        const alive = names_alive();
        box.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft", shiftKey: true}));
        const before = read.innerText;
        const edge = box.getBoundingClientRect();
        box.dispatchEvent(new PointerEvent("pointermove", {clientX: edge.left + 1, clientY: edge.top + 1}));
        const start = read.innerText, alive_first = names_alive();
        const heads = document.querySelectorAll("table.tensors th button");
        heads[0].click(); heads[0].click();
        const rising = cells(1);
        heads[2].click();
        const names = cells(3);
        const find = document.querySelector("input[type=search]");
        find.value = "SWAP"; find.dispatchEvent(new Event("input"));
        const wide = document.documentElement.scrollWidth <= innerWidth;
        const title = document.querySelector("h1").innerText;
        return {alive, alive_first, at_peak, before, start, first, rising, names, wide, title,
                swapped: cells(2), charts: document.querySelectorAll(".box path").length};
        """,
    )
    after = timeline(report).after
    assert after is not None
    assert seen["title"] == report.title
    assert seen["wide"]
    assert seen["charts"] == 2 * len(KINDS)
    assert format_bytes(after.record.peak_bytes) in seen["at_peak"]
    state = after.record.peak_state
    alive = [h for h in after.record.holds if h.first <= state < h.last]
    assert sum(h.nbytes for h in alive) <= after.record.peak_bytes
    assert len(seen["alive"]) > 3
    assert {*seen["alive"]} <= {*map(after.name, alive), "all others"}
    first = after.columns(COLUMNS, max(after.total_s, timeline(report).before.total_s))[0].state
    there = {after.name(h) for h in after.record.holds if h.first <= first < h.last}
    assert {*seen["alive_first"]} - {"all others"} <= there
    assert len({seen["at_peak"], seen["before"], seen["start"]}) == 3
    assert "at " in seen["start"]
    assert seen["first"][0] == format_bytes(report.rows[0].nbytes)
    rows = (*report.rows, *report.others)
    assert seen["rising"] == [format_bytes(n) for n in sorted(row.nbytes for row in rows)]
    assert [name.split("\n")[0] for name in seen["names"]] == sorted((row.name for row in rows), key=natural)
    assert seen["swapped"] == ["swap"] * len(report.swapped)


@needs_browser
def test_the_page_filters_by_tactic_and_goes_from_a_chart_to_a_tensor_and_back(report: Report, tmp_path: Path) -> None:
    found = shown_by(
        saved(report, tmp_path, ".html"),
        """
        const rows = () => [...document.querySelectorAll("table.tensors tbody tr")];
        const tactics = () => [...new Set(rows().map(row => row.cells[1].innerText))];
        const swap = document.querySelector(".switch[data-tactic=swap]");
        swap.click();
        const only = tactics();
        swap.click();
        const every = tactics();
        const pick = document.querySelectorAll(".read")[1].querySelector(".pick"), name = pick.innerText;
        pick.click();
        const listed = rows().map(row => row.querySelector(".pick").innerText), chosen = rows()[0].className;
        const lives = [...document.querySelectorAll(".plot")[1].querySelectorAll(".box .life")];
        const wide = lives.filter(life => !life.hidden).map(life => life.getBoundingClientRect().width);
        const first = rows()[0].querySelector(".pick");
        first.click();
        const at = document.querySelectorAll(".read")[1].innerText;
        return {only, every, name, listed, chosen, wide, at};
        """,
    )
    assert found["only"] == ["swap"]
    assert set(found["every"]) == {"swap", "keep"}
    assert found["listed"][0] == found["name"]
    assert all(found["name"] in name for name in found["listed"])
    assert found["chosen"] == "chosen"
    assert found["wide"]
    assert all(width > 1 for width in found["wide"])
    assert found["name"] in found["at"]


@needs_browser
def test_a_chart_zooms(report: Report, tmp_path: Path) -> None:
    found = shown_by(
        saved(report, tmp_path, ".html"),
        """
        const plot = document.querySelectorAll(".plot")[1], box = plot.querySelector(".box");
        const edge = box.getBoundingClientRect();
        const width = svg => svg.getAttribute("viewBox").split(" ")[2];
        const view = () => [...new Set([...plot.querySelectorAll("svg")].map(width))];
        const press = key => box.dispatchEvent(new KeyboardEvent("keydown", {key}));
        const point = (kind, share) => box.dispatchEvent(
            new PointerEvent(kind, {clientX: edge.left + share * edge.width, clientY: edge.top + 5, bubbles: true}));
        const seen = [view()];
        point("pointerdown", .25); point("pointermove", .5); point("pointerup", .5);
        seen.push(view());
        point("pointermove", 0);
        const start = plot.nextElementSibling.innerText, ticks = plot.querySelector(".times").innerText;
        press("-"); seen.push(view());
        press("0"); seen.push(view());
        plot.querySelector("[data-zoom=in]").click(); seen.push(view());
        const cursor = plot.querySelector(".box .cursor");
        press("ArrowRight");
        return {seen, start, ticks, cursor: cursor.hidden};
        """,
    )
    assert all(len(widths) == 1 for widths in found["seen"])
    whole, dragged, out, again, half = (float(widths[0]) for widths in found["seen"])
    assert whole == again == COLUMNS == 2 * half
    assert dragged == pytest.approx(COLUMNS / 4, abs=COLUMNS / 100)
    assert out == 2 * dragged
    assert not found["start"].startswith("at 0")
    assert found["ticks"]
    assert not found["cursor"]


def test_the_page_has_every_tensor_with_what_explain_says_of_it(report: Report, tmp_path: Path) -> None:
    text = saved(report, tmp_path, ".html").read_text(encoding="utf-8")
    data = json.loads(re.findall(r"<script type=application/json id=data>(.*?)</script>", text)[0])
    names = data["names"]
    seen = {names[row["name"]]: (row["tactic"], names[row["reason"]], row["nbytes"]) for row in data["rows"]}
    planned = timeline(report).planned
    assert planned is not None
    tensors = {value.tensor.name for value in planned.flow.values if value.nbytes}
    variables = {row.name for row in report.variables}
    assert tensors | variables == {*seen}
    assert len(variables) == 4 and not tensors & variables
    for name, row in seen.items():
        explained = report.explain(name)
        assert (explained.tactic, explained.reason, explained.nbytes) == row
    kept = {reason for tactic, reason, _ in seen.values() if tactic == "keep"}
    assert {"there before the step: a variable, an argument or a constant", "never waits between two uses"} <= kept
    assert not {row.name for row in report.rows} & {row.name for row in report.others}


def test_where_no_plan_keeps_the_limit_no_tensor_is_reported_to_need_nothing() -> None:
    optimizer = Optimizer(training_step(NET, 512, 128), CPU, Options(("swap",)))
    made = optimizer.report(optimizer.analysis("1KiB"))
    assert not made.keeps_limit
    reasons = {row.reason for row in (*made.rows, *made.others)}
    assert UNMET in reasons
    assert not any(SUFFICES in reason for reason in reasons)
    waits = next(row for row in made.rows if row.reason == UNMET)
    assert made.explain(waits.name).reason == UNMET


@needs_browser
def test_long_names_stay_in_their_place(report: Report, tmp_path: Path) -> None:
    long = dataclasses.replace(report, _largest=lambda: ("gradient_tape_of_a_model/" * 8, 1 << 20))
    script = """
        const within = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1;
        const places = [...document.querySelectorAll(".facts div")];
        return places.map(p => within(p.querySelector("dd").getBoundingClientRect(), p.getBoundingClientRect()));
        """
    assert set(shown_by(saved(long, tmp_path, ".html"), script)) == {True}


@needs_browser
def test_labels_hide_nothing_of_a_chart_and_its_lanes(report: Report, tmp_path: Path) -> None:
    script = """
        const place = element => element.getBoundingClientRect();
        const labels = [...document.querySelectorAll(".tick.y")];
        const outside = labels.map(label => place(label).right <= place(label.parentElement).left);
        const inside = labels.map(label => place(label).left >= 0);
        return {outside, inside, key: document.querySelector(".plot .legend").innerText};
        """
    seen = shown_by(saved(report, tmp_path, ".html"), script)
    assert set(seen["outside"]) == set(seen["inside"]) == {True}
    assert seen["key"].split("\n") == [BLOCKS[kind] for kind in ("run", "copy")]


@needs_browser
def test_the_page_of_a_step_that_is_left_alone_has_one_chart(unchanged: Report, tmp_path: Path) -> None:
    assert shown_by(saved(unchanged, tmp_path, ".html"), 'return document.querySelectorAll(".box").length') == 1


def test_the_page_needs_no_network_and_quotes_what_it_is_given(report: Report, tmp_path: Path) -> None:
    text = saved(report, tmp_path, ".html").read_text(encoding="utf-8")
    assert "a &lt;step&gt; &amp; more" in text
    assert "<step>" not in text
    assert not re.findall(r"(?:src|href|url)\s*[=(]", text)
    assert "default-src 'none'" in text
    data = json.loads(re.findall(r"<script type=application/json id=data>(.*?)</script>", text)[0])
    assert len(data["rows"]) == len(report.rows) + len(report.others)
    for run, drawn in zip(data["runs"], (timeline(report).before, timeline(report).after), strict=True):
        assert drawn is not None
        assert max(sum(column[2:]) for column in run["columns"]) == drawn.peak_bytes


def test_the_page_says_what_its_figures_are(report: Report, tmp_path: Path) -> None:
    text = saved(dataclasses.replace(report, measured_peak_bytes=None), tmp_path, ".html").read_text(encoding="utf-8")
    assert "none yet" not in text
    assert "not reported by the allocator" in text
    assert "peak before, predicted" in text
    assert "peak before, predicted" in str(report)


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
        assert f"<span class=soft>peak {format_bytes(peak_bytes)}, " in text


def test_a_chart_follows_the_peak_of_the_arena_that_the_latest_step_met(report: Report) -> None:
    met = dataclasses.replace(report, planned_peak_bytes=report.planned_peak_bytes + (3 << 20))
    assert f"<span class=soft>peak {format_bytes(met.planned_peak_bytes)}, " in met._repr_html_()


def test_a_notebook_shows_the_charts(report: Report) -> None:
    text = report._repr_html_()
    assert text.count("<div class=box") == 2
    assert "<script" not in text
    assert "<step>" not in text
    assert dataclasses.replace(report, _timeline=None)._repr_html_().count("<div class=box") == 0


@needs_browser
def test_a_report_and_a_curve_in_one_notebook_leave_each_other_alone(report: Report, tmp_path: Path) -> None:
    optimizer = Optimizer(training_step(NET, 512, 128), CPU, Options(("swap",)))
    curve = sweep(optimizer, "step", Machine("cpu", "CPU", CPU, optimizer.costs.rates, None, None), 2)
    page = tmp_path / "notebook.html"
    shown = f"{report._repr_html_()}{curve._repr_html_()}"
    page.write_text(f"<!doctype html><html><head></head><body>{shown}</body></html>", encoding="utf-8")
    script = """
        const drawn = document.querySelector("svg[role=img]"), around = drawn.parentElement.getBoundingClientRect();
        const box = drawn.getBoundingClientRect();
        return [around.top <= box.top && box.bottom <= around.bottom, getComputedStyle(drawn).position];
        """
    assert shown_by(page, script) == [True, "static"]


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


@pytest.mark.slow
def test_a_large_graph_has_a_page_of_bounded_size(report: Report, tmp_path: Path) -> None:
    layers = [Layer("relu"), Layer("scale", 1)] * 2000
    flow = analyse_dataflow(training_step(layers, 128, 128), CPU)
    rates = default_rates(CPU)
    cost_s = [kernel_seconds(node, rates) for node in flow.nodes]
    order = [i for i, kernel in enumerate(flow.is_kernel) if kernel]
    assert len(order) > 10_000
    planned = record_planned(flow, build_schedule(order, ()), cost_s, rates, snapshot=NOTHING_KNOWN)
    before = record_baseline(flow, cost_s, CPU, snapshot=NOTHING_KNOWN)
    row = TensorRow("n" * 400, "MatMul", 1 << 20, (1, 2), "keep", "r" * 1000, 0, 0.0, "s" * 400)
    named = [(f"{n}{row.name}{n}", f"{n if n % 4 == 0 else ''}{row.reason}") for n in range(2 * ROWS)]
    rows = tuple(dataclasses.replace(row, name=name, reason=reason) for name, reason in named)
    made = dataclasses.replace(report, rows=rows, _timeline=lambda: Timeline(before, planned, sum(cost_s), 0, 0))
    assert min(len(planned.holds), len(before.holds)) > HOLDS
    page = saved(made, tmp_path, ".html")
    assert page.stat().st_size <= MOST_BYTES
    text = page.read_text()
    assert f"{ROWS + len(made.others)} more are left out, of 1.0 MiB at most" in text
    data = json.loads(re.findall(r"<script type=application/json id=data>(.*?)</script>", text)[0])
    assert max(sum(column[2:]) for column in data["runs"][1]["columns"]) == planned.peak_bytes
    for run in data["runs"]:
        assert len(run["blocks"]) <= 3 * COLUMNS  # three lanes
        wide = run["width_s"] / COLUMNS
        assert all(end - start < wide for *_, start, end, count in run["blocks"] if count > 1)
    assert len(data["runs"][1]["blocks"]) > 1000
    many = report_of_devices("step", {f"GPU:{i}": dataclasses.replace(made, device=f"GPU:{i}") for i in range(8)})
    assert saved(many, tmp_path, ".html").stat().st_size <= MOST_BYTES


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
