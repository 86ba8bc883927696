"""The page of headlines agrees with its figures, and ratios of small nets stay the same."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import time

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("matplotlib")

from processes import ROOT, on_arena
from terminals import on_terminal

from tfswap.support import progress

BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs" / "comparisons"
RESULTS = BENCHMARKS / "results"


@pytest.fixture
def headlines(monkeypatch):
    spec = importlib.util.spec_from_file_location("headlines", BENCHMARKS / "headlines.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "papers"]:
        del sys.modules[name]


def test_the_page_is_made_from_its_figures(headlines, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["headlines.py", "--pages", str(tmp_path)])
    assert headlines.main() == 0
    pages, plots = ({path.name for path in tmp_path.glob(f"*.{ext}")} for ext in ("md", "png"))
    for name in pages:
        there = (DOCS / name).read_text()
        assert (tmp_path / name).read_text() == there, "run python benchmarks/headlines.py --pages"
    assert pages | plots == {path.name for path in DOCS.iterdir()}
    assert pages == {f"{name}.md" for name in (*headlines.ROWS, "together_details", "index", "method", "published")}
    text = "".join((tmp_path / name).read_text() for name in pages)
    assert all(f"]({name})" in text for name in plots)


def test_every_row_has_a_module_and_is_listed(headlines):
    modules = {path.stem for path in (BENCHMARKS / "papers").glob("*.py") if "\ndef present(" in path.read_text()}
    assert modules == set(headlines.ROWS)
    assert all(f"\n    {row} " in headlines.__doc__ for row in headlines.ROWS)


def test_each_part_is_shown_by_itself(headlines):
    """As `headlines.py ROW:PART` does; not each note applies to each part."""
    from papers.harness import page

    figures = headlines.figures_of(RESULTS)
    for row, parts in figures.items():
        for part, one in parts.items():
            section = page.module_of(row).present({part: one["found"]})
            assert all(page.as_text(table) for table in (*section.tables, *section.details)), (row, part)


def test_what_is_measured_is_shown_on_a_terminal(headlines, tmp_path, monkeypatch, capsys):
    from papers import solvers

    figures = json.loads((RESULTS / "solvers.json").read_text())
    part = next(iter(figures))

    def measure(part):
        time.sleep(0.3)  # for the display to be drawn
        return figures[part]["found"]

    monkeypatch.setattr(solvers, "measure", measure)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["headlines.py", f"solvers:{part}", "--results", str(tmp_path)])
    with on_terminal() as screen:
        assert headlines.main() == 0
    assert "measuring rows" in screen.text
    assert f"solvers: {part}" in screen.text
    assert "published:" in capsys.readouterr().out
    assert list(headlines.figures_of(tmp_path)["solvers"]) == [part]


def figures_of(row):
    """By part, what was measured."""
    return {part: one["found"] for part, one in json.loads((RESULTS / f"{row}.json").read_text()).items()}


def test_forms_are_level_where_the_quartiles_of_their_rounds_lie_on_both_sides_of_1(headlines):
    from papers.harness import standing

    others = [1.0] * 9
    noisy = [0.90, 0.91, 0.92, 0.93, 0.94, 1.01, 1.02, 1.03, 1.04]  # a median that is 6% less
    clear = [0.98, 0.98, 0.98, 0.99, 0.99, 0.99, 0.99, 1.01, 1.20]  # and one that is 1% less, by nearly all rounds
    assert standing.of_rounds(noisy, others) == (0.94, (0.92, 1.02), True)
    assert standing.of_rounds(noisy, others).standing == standing.EVEN
    assert standing.of_rounds(clear, others).standing == standing.FASTER
    assert standing.of_rounds(others, clear).standing == standing.SLOWER
    assert standing.of_rounds(noisy, others).reported == "0.94 (0.92 to 1.02)"


def test_rounds_are_of_the_form_and_the_other_and_without_them_quartiles_must_not_overlap(headlines):
    from papers.harness import standing

    def line(ratio, low, high, **rounds):
        return {"clock_ratio": ratio, "clock_spread": [low, high], **rounds}

    assert standing.of_lines(line(0.9, 0.8, 1.0), line(1.1, 0.95, 1.2), "clock").standing == standing.EVEN
    over = standing.of_lines(line(0.9, 0.85, 0.94), line(1.1, 0.95, 1.2), "clock")
    assert over.standing == standing.FASTER
    assert over.reported == "0.82"
    ours, theirs = ({"took_s": [[clock, 1.0]] * 3} for clock in (2.0, 1.0))
    over = standing.of_lines(line(0.9, 0.8, 1.0, **ours), line(1.1, 0.95, 1.2, **theirs), "clock")
    assert over == (2.0, (2.0, 2.0), False)


def test_peers_report_the_quartiles_of_the_ratio_and_where_the_peer_wins(headlines):
    from papers import peers

    found = figures_of("peers")
    pairs = [pair for rows in found.values() for pair in peers.pairs_of(rows)]
    leaner = sum(pair.peer["resident_bytes"] < pair.ours["resident_bytes"] for pair in pairs)
    section = peers.present(found)
    assert f"less in all with the peer in {leaner} of {len(pairs)} pairs" in section.ours
    assert f"in {leaner} of" in section.brief
    rows = found["wide_resnet"]
    cells = {line[0]: line for line in peers.present({"wide_resnet": rows}).tables[0].lines}
    assert cells["tfswap as xla"][7].endswith(")")
    assert cells["xla"][7] == ""
    peers.present({"resnet": [{k: v for k, v in row.items() if k != "first_s"} for row in found["resnet"]]})


def test_a_row_is_better_level_or_worse_where_its_comparisons_agree(headlines):
    from papers.harness import page, standing

    def verdict(*comparisons):
        return page.Section("", "", "", "", comparisons=comparisons).verdict

    good, even, bad = (page.against_published("", gain) for gain in (1.2, 1.01, 0.9))
    assert [verdict(good, good), verdict(even), verdict(bad)] == [page.BETTER, page.LEVEL, page.WORSE]
    assert verdict(good, bad, good) == "better in 2, worse in 1"
    assert verdict() == page.NO_RIVAL
    over = standing.of_rounds([0.5] * 4, [1.0] * 4)
    assert standing.as_comparison("", over, reached=True) == page.Comparison("", 2.0, page.BETTER)
    assert standing.as_comparison("", over, reached=False).standing == page.WORSE
    assert standing.as_comparison("", None, reached=False) == page.Comparison("", 1.0, page.WORSE)


def test_vgg19_is_not_judged_by_swapping_alone(headlines):
    from papers import offloading

    part = "oneDNN's kernels"
    found = copy.deepcopy(figures_of("offloading")[part])
    swap = next(line for line in found["lines"] if tuple(line["tactics"]) == offloading.SWAP)
    for line in found["lines"]:
        if line["how"] == "tfswap":
            line["peak_bytes"] = found["lines"][0]["peak_bytes"] // 2
    for clock in ("cpu", "clock"):
        swap[f"{clock}_ratio"] = 0.5
    judged = " ".join(note for note in offloading.present({part: found}).notes if "to be cut by" in note)
    assert "0.50" not in judged
    for line in found["lines"]:
        if line["how"] == "tfswap" and line is not swap:
            line["cpu_ratio"] = line["clock_ratio"] = 1.5
    notes = offloading.present({part: found}).notes
    assert any("not met in CPU time (1.50), not met in time by the clock (1.50)" in note for note in notes)
    assert any("swapping alone" in note and "15 points more than 35%, at 0.50" in note for note in notes)


def test_a_limit_that_is_a_share_takes_the_prediction_of_the_peak_too(headlines):
    from papers import scale

    stages = {"import": 1.0, "Grappler": 9.0, "unoptimised": 3.0, "plan": 2.0}
    row = {"layers": 5, "nodes": 1000, "tracing_s": 4.0, "stages_s": stages, "total_s": 3.0}
    row |= {"traced_mib": 1.0, "more_mib": 1.0, "broken": []}
    assert scale.share_total_s(row) == 6.0
    section = scale.present({"planning": [row, row | {"nodes": 2000}]})
    assert section.tables[0].lines[0][-6:-2] == ["3.0", "0.75", "6.0", "1.50"]
    assert "0.75 of TensorFlow's tracing" in section.ours
    assert "6 s, 1.50 of it" in section.ours
    assert not any(note.startswith("Planning for a limit in bytes") for note in section.notes)
    assert "For a limit that is a share, it takes longer than tracing at all of these sizes." in section.notes


def test_layrub_reports_the_average_without_its_deepest_nets(headlines):
    from papers import layrub

    found = figures_of("layrub")
    deep = {name for name, case in layrub.CASES.items() if case.net == "deep_resnet"}
    shallow = layrub.present({name: net for name, net in found.items() if name not in deep})
    cut = shallow.brief.partition(" ")[0]
    assert f"{cut} without the two deepest" in layrub.present(found).brief
    assert "without" not in shallow.brief


def test_pytorchs_forms_below_tfswaps_floor_are_named(headlines):
    from papers import pytorch

    lines = [{"label": "tfswap, its floor", "peak_bytes": 40 << 20}]
    forms = [{"label": label, "peak_bytes": size << 20} for label, size in (("PyTorch", 9), ("low", 37), ("high", 50))]
    figures = {"pytorch": {"transformer": {"found": {"pytorch": forms}}}}
    (note,) = pytorch.across(figures | {"solvers": {"transformer": {"found": {"lines": lines}}}})
    assert note.endswith(": low 37.0.")
    assert pytorch.across(figures) == []


def test_a_tactic_that_raises_the_lowest_limit_is_named_and_what_a_plan_of_its_own_gains(headlines):
    from papers import ablation

    def raised(*limits):
        forms = zip(ablation.STEPWISE, limits, strict=True)
        return ablation._raised("net", [{"label": f.label, "fits": True, "limit_bytes": n << 20} for f, n in forms])

    assert raised(9, 8, 8, 7, 7) == []
    assert raised(9, 8, 8, 7, 8) == [
        'net: "and encodings" raises the lowest limit that is reached, from 7.0 to 8.0 MiB.'
    ]

    def cached(own_s):
        medians = {"larger": [0.2, 0.3, 9 << 20], "own": [own_s, 0.3, 6 << 20]}
        spreads = {"larger": [[0.19, 0.21]], "own": [[own_s - 0.01, own_s + 0.01]]}
        return ablation._cached_in_words({"medians": medians, "spreads": spreads})

    assert cached(0.2).startswith("the tensor cache gains nothing in time: 200 ms against 200")
    assert cached(0.1).startswith("the tensor cache differs in time: 100 ms")


def test_the_papers_multiple_is_reported_where_it_was_planned(headlines):
    from papers import batch

    found = {batch.PAPERS: copy.deepcopy(figures_of("batch")[batch.PAPERS])}
    for row in found[batch.PAPERS]:
        row.pop("at_papers_multiple", None)
    assert not any("predicted time" in note for note in batch.present(found).notes)
    for row, ratio in zip(found[batch.PAPERS], (1.25, None), strict=True):
        row["at_papers_multiple"] = {"size": 816, "time_ratio": ratio}
    reported = (
        "at 816, 4.6 times the unoptimised batch, in the same memory: predicted time 1.25 by swapping alone and no plan"
    )
    assert any(reported in note for note in batch.present(found).notes)


def test_predictions_are_held_against_peaks_and_a_machine_without_memory_is_named(headlines):
    from papers.harness import page, predictions

    lines = [{"peak_bytes": 100}, {"peak_bytes": 50, "baseline_bytes": 80}]
    runs = {"unoptimised": {"peak_bytes": 105, "measured_bytes": 100}}
    nets = {"net, batch 8": {"found": {"runs": runs}}, "unmeasured": {"found": {"runs": {"unoptimised": lines[0]}}}}
    reported = predictions.reported({"layrub": {"VGG": {"found": {"lines": lines}}}, "kinds": nets})
    assert "0.80 to 1.05 of what was measured, 2 times in all, and 1 times within 7%" in reported
    assert "VGG 0 for 0" in reported
    taken = {"when": "", "took_s": 1.0, "load": 1.0, "versions": "", "cores": 2, "command": "", "machine": "EPYC"}
    assert "headlines.py pytorch --python PYTHON<" in page._taken("pytorch", {"a": {"taken": taken}})
    assert page.UNRECORDED in page._taken("gist", {"a": {"taken": taken}})
    assert page.UNRECORDED not in page._taken("gist", {"a": {"taken": taken | {"machine": "EPYC, 24 GiB"}}})


def test_ratios_of_a_small_net_are_within_bounds():
    def measured():
        from papers.harness import quick

        return [quick.measure(), quick.BOUNDS]

    found, bounds = on_arena(measured)
    assert found.keys() == bounds.keys()
    assert all(ratio <= bounds[name] for name, ratio in found.items()), (found, bounds)
