"""The page of a report in a browser."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path

import pytest
from browser import needs_browser, shown_by
from layered_steps import Layer, training_step
from reports import CPU, NET, bytes_in, content, saved, small_report, timeline, unchanged_report

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import kernel_seconds
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.frontends.simulate import sweep
from tfswap.kernels.hardware import Machine, default_rates
from tfswap.plan.schedule import build_schedule
from tfswap.report.page import BLOCKS, COLUMNS, MOST_BYTES, ROWS
from tfswap.report.report import Report, report_of_devices
from tfswap.report.rows import TensorRow
from tfswap.report.summary import unit_of
from tfswap.report.timeline import Timeline
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN
from tfswap.simulator.record import record_planned
from tfswap.simulator.unordered import record_baseline
from tfswap.support.sizes import Unit


@pytest.fixture(scope="module")
def report() -> Report:
    return small_report()


@pytest.fixture(scope="module")
def unchanged() -> Report:
    return unchanged_report()


def natural(name: str) -> list[str | int]:
    """As people sort: dense2 before dense10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


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
                swapped: cells(2), charts: document.querySelectorAll(".box canvas").length};
        """,
    )
    after = timeline(report).after
    assert after is not None
    assert seen["title"] == report.title
    assert seen["wide"]
    assert seen["charts"] == 2
    assert unit_of(report).text(after.peak_bytes) in seen["at_peak"]
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
    rows = (*report.rows, *report.others)
    size = Unit.of(max(row.nbytes for row in rows)).text
    assert seen["first"][0] == size(report.rows[0].nbytes)
    assert seen["rising"] == [size(n) for n in sorted(row.nbytes for row in rows)]
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
        const view = () => { const [from, to] = plot.dataset.view.split(" ").map(Number); return to - from; };
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
    whole, dragged, out, again, half = found["seen"]
    assert whole == again == COLUMNS == 2 * half
    assert dragged == pytest.approx(COLUMNS / 4, abs=COLUMNS / 100)
    assert out == 2 * dragged
    assert not found["start"].startswith("at 0")
    assert found["ticks"]
    assert not found["cursor"]


def test_the_page_has_every_tensor_with_what_explain_says_of_it(report: Report, tmp_path: Path) -> None:
    text = saved(report, tmp_path, ".html").read_text(encoding="utf-8")
    data = content(text)
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


@needs_browser
def test_long_names_stay_in_their_place(report: Report, tmp_path: Path) -> None:
    long = dataclasses.replace(report, _largest=lambda: ("gradient_tape_of_a_model/" * 8, 1 << 20))
    script = """
        const within = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1;
        const places = [...document.querySelectorAll(".figures tr")];
        const page = document.body.getBoundingClientRect();
        return places.map(p => within(p.lastElementChild.getBoundingClientRect(), page));
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
    data = content(text)
    assert len(data["rows"]) == len(report.rows) + len(report.others)
    for run, drawn in zip(data["runs"], (timeline(report).before, timeline(report).after), strict=True):
        assert drawn is not None
        assert max(bytes_in(run)) == drawn.peak_bytes


def test_the_page_says_what_its_figures_are(report: Report, tmp_path: Path) -> None:
    text = saved(dataclasses.replace(report, measured_peak_bytes=None), tmp_path, ".html").read_text(encoding="utf-8")
    assert "none yet" not in text
    assert "not reported by the allocator" in text
    assert "peak before, predicted" in text
    assert "peak before, predicted" in str(report)


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


@pytest.fixture(scope="module")
def large(report: Report) -> Report:
    """Of a step of 10^5 kernels, with a row for each."""
    layers = [Layer("relu"), Layer("scale", 1)] * 20_000
    flow = analyse_dataflow(training_step(layers, 128, 128), CPU)
    rates = default_rates(CPU)
    cost_s = [kernel_seconds(node, rates) for node in flow.nodes]
    order = [i for i, kernel in enumerate(flow.is_kernel) if kernel]
    assert len(order) > 100_000
    planned = record_planned(flow, build_schedule(order, ()), cost_s, rates, snapshot=NOTHING_KNOWN)
    before = record_baseline(flow, cost_s, CPU, snapshot=NOTHING_KNOWN)
    row = TensorRow("", "MatMul", 1 << 20, (1, 2), "keep", "r" * 1000, 0, 0.0, None)
    made = [v.tensor.name for v in flow.values if v.nbytes][: 2 * ROWS]
    rows = tuple(dataclasses.replace(row, name=name, source=f"train.py:{n % 500}") for n, name in enumerate(made))
    return dataclasses.replace(report, rows=rows, _timeline=lambda: Timeline(before, planned, sum(cost_s), 0, 0))


@pytest.mark.slow
@needs_browser
def test_the_page_of_100000_tensors_has_all_of_them_and_finds_those_of_a_line(large: Report, tmp_path: Path) -> None:
    page = saved(large, tmp_path, ".html")
    assert page.stat().st_size <= MOST_BYTES
    data, drawn = content(page.read_text()), timeline(large)
    assert len(data["rows"]) == ROWS
    assert drawn.planned is not None
    assert len(data["runs"][1]["name"]) >= 0.99 * len(drawn.planned.holds)  # not those of a moment without length
    assert max(bytes_in(data["runs"][1])) == drawn.planned.peak_bytes
    seen = shown_by(
        page,
        """
        const find = document.querySelector("input[type=search]");
        find.value = "train.py:123"; find.dispatchEvent(new Event("input"));
        const found = document.querySelector(".found").innerText, chart = charts.at(-1);
        chart.zoom(60000, 60030);
        const lines = document.querySelectorAll(".lines tbody tr").length;
        const sources = [...document.querySelectorAll("table.tensors tbody .soft")].map(e => e.innerText);
        return {found, sources, lines, matches: Math.max(...chart.matches)};
        """,
    )
    rows = [row for row in large.rows[:ROWS] if row.source == "train.py:123"]
    assert seen["found"].startswith(f"{len(rows)} tensors, ")
    assert seen["matches"] >= max(h.nbytes for h in drawn.planned.holds)
    assert {text.split(" \N{MIDDLE DOT} ")[1] for text in seen["sources"]} == {"train.py:123"}
    assert seen["lines"] > 1


@pytest.mark.slow
def test_a_page_stays_small_whatever_the_names_are(large: Report, tmp_path: Path) -> None:
    digests = (hashlib.sha512(str(n).encode()).hexdigest() for n in range(2 * ROWS))
    rows = tuple(dataclasses.replace(large.rows[0], name=name, reason=name[::-1]) for name in digests)
    made = dataclasses.replace(large, rows=rows)
    page = saved(made, tmp_path, ".html")
    assert page.stat().st_size <= MOST_BYTES
    left_out = len(rows) + len(made.others) - len(content(page.read_text())["rows"])
    assert left_out > ROWS
    assert f"{left_out} more are left out, of 1.0 MiB at most" in page.read_text()
    many = report_of_devices("step", {f"GPU:{i}": dataclasses.replace(made, device=f"GPU:{i}") for i in range(8)})
    assert saved(many, tmp_path, ".html").stat().st_size <= MOST_BYTES


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_of_the_page_is_wider_than_the_window(report: Report, tmp_path: Path, width: int) -> None:
    script = """
        const page = document.documentElement, inside = e => e.getBoundingClientRect().right <= innerWidth + 1;
        const parts = [...document.querySelectorAll("td, .levers th, .card, p")];
        return [page.scrollWidth <= innerWidth, parts.every(inside)];
        """
    assert shown_by(saved(report, tmp_path, ".html"), script, width) == [True, True]


@needs_browser
def test_the_page_begins_with_the_answer_and_has_one_unit(report: Report, tmp_path: Path) -> None:
    seen = shown_by(
        saved(report, tmp_path, ".html"),
        """
        const words = selector => [...document.querySelectorAll(selector)].map(e => e.innerText.trim());
        const edges = [...document.querySelectorAll(".figures td.n")].map(e => e.getBoundingClientRect().right);
        return {answer: document.querySelector("h1 + p").innerText, amounts: words(".figures td.n"), edges,
                levers: words(".levers tbody tr"), cards: words(".card b"), ticks: words(".box .tick.y")};
        """,
    )
    assert seen["answer"] == report.answer()
    unit = unit_of(report)
    amounts = [amount for amount in (*seen["amounts"], *seen["ticks"]) if amount]
    assert all(amount.endswith(f" {unit.name}") for amount in amounts)
    assert len({amount.split(" ")[0][::-1].find(".") for amount in amounts}) == 1, "the same digits"
    assert len(set(seen["edges"])) == 1
    assert len(seen["levers"]) == len(report.levers)


@needs_browser
def test_the_keyboard_moves_in_charts_and_searches(report: Report, tmp_path: Path) -> None:
    found = shown_by(
        saved(report, tmp_path, ".html"),
        """
        const box = document.querySelectorAll(".box")[1], read = document.querySelectorAll(".read")[1];
        const press = key => box.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
        const at = () => read.querySelector("p").innerText, seen = {peak: at()};
        press("Home"); seen.home = at();
        press("End"); seen.end = at();
        press("p"); seen.again = at();
        press("ArrowDown"); const lives = () => [...box.querySelectorAll(".life")].filter(e => !e.hidden).length;
        seen.first = document.querySelector("tr.chosen .pick")?.innerText; seen.lives = lives();
        press("ArrowDown"); seen.second = document.querySelector("tr.chosen .pick")?.innerText;
        press("/"); seen.focus = document.activeElement.type;
        const find = document.activeElement;
        find.value = seen.first; find.dispatchEvent(new Event("input"));
        seen.matches = charts[1].matches !== null;
        find.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
        seen.cleared = charts[1].matches === null && find.value === "";
        return seen;
        """,
    )
    assert found["peak"] == found["again"]
    assert len({found["peak"], found["home"], found["end"]}) == 3
    assert found["lives"] == 1
    assert found["first"] and found["second"] and found["first"] != found["second"]
    assert found["focus"] == "search"
    assert found["matches"] and found["cleared"]


@needs_browser
def test_the_browser_writes_sizes_as_python_does(report: Report, tmp_path: Path) -> None:
    sizes = [0, 1, 700, 1023, 1024, 99 << 10, 100 << 10, 5 << 20, (5 << 20) + 12345, 200 << 20, 3 << 30, 1 << 42]
    script = f"const sizes = {sizes}; return sizes.map(largest => sizes.map(unitOf(largest)));"
    seen = shown_by(saved(report, tmp_path, ".html"), script)
    assert seen == [[Unit.of(largest).text(size) for size in sizes] for largest in sizes]
