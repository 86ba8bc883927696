"""The page of headlines says what its figures say, and ratios of small nets stay what they were."""

from __future__ import annotations

import importlib.util
import json
import sys
import time

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("matplotlib")

from processes import ROOT, on_arena
from terminals import on_terminal

from tfswap import progress

BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs"


@pytest.fixture
def headlines(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("headlines", BENCHMARKS / "headlines.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "versus"]:
        del sys.modules[name]


def test_the_page_is_made_from_its_figures(headlines, tmp_path, monkeypatch):
    figures = tmp_path / "headlines.json"
    figures.write_text((DOCS / "headlines.json").read_text())
    monkeypatch.setattr(sys, "argv", ["headlines.py", "--page", str(figures)])
    assert headlines.main() == 0
    made = (tmp_path / "headlines.md").read_text()
    assert made == (DOCS / "headlines.md").read_text(), "make it again: python benchmarks/headlines.py --page"
    drawn = {path.name for path in (tmp_path / "images").iterdir()}
    assert drawn == {path.name for path in (DOCS / "images").glob("headlines_*.png")}
    assert all(f"(images/{name})" in made for name in drawn)


def test_every_row_has_a_module_and_is_told_of(headlines):
    modules = {path.stem for path in (BENCHMARKS / "versus").glob("*.py") if "\ndef present(" in path.read_text()}
    assert modules == set(headlines.ROWS)
    assert all(f"\n    {row} " in headlines.__doc__ for row in headlines.ROWS)


def test_each_part_is_shown_by_itself(headlines):
    """As `headlines.py ROW:PART` does; not each note applies to each part."""
    from versus import page

    figures = json.loads((DOCS / "headlines.json").read_text())
    for row, parts in figures.items():
        for part, one in parts.items():
            section = page.module_of(row).present({part: one["found"]})
            assert all(page.as_text(table) for table in section.tables), (row, part)


def test_what_is_measured_is_shown_on_a_terminal(headlines, monkeypatch, capsys):
    from versus import solvers

    figures = json.loads((DOCS / "headlines.json").read_text())["solvers"]
    part = next(iter(figures))

    def measure(part):
        time.sleep(0.3)  # for the display to be drawn
        return figures[part]["found"]

    monkeypatch.setattr(solvers, "measure", measure)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["headlines.py", f"solvers:{part}"])
    with on_terminal() as screen:
        assert headlines.main() == 0
    assert "measuring rows" in screen.text
    assert f"solvers: {part}" in screen.text
    assert "published:" in capsys.readouterr().out


def test_ratios_of_a_small_net_are_within_bounds():
    code = f"""
import json, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from versus import quick
print(json.dumps([quick.measure(), quick.BOUNDS]))
"""
    found, bounds = on_arena(code)
    assert found.keys() == bounds.keys()
    assert all(ratio <= bounds[name] for name, ratio in found.items()), (found, bounds)
