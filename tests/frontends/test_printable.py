"""Names with control characters reach no terminal, through any output."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import tfswap
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, OpLibraryError, TfswapError
from tfswap.report.curve import Curve, Point
from tfswap.report.max_batch import Fit
from tfswap.report.tables import as_text, figures, listing, show, stacked
from tfswap.support import progress
from tfswap.support.printable import as_lines, one_line, printable

EVIL = "layer\x1b[2J\x07\r\x9b31m\u061c\u202e\u2028\x00\ntfswap: fine"
SHOWN = r"layer\x1b[2J\x07\r\x9b31m\u061c\u202e\u2028\x00\ntfswap: fine"


def test_text_of_people_stays() -> None:
    text = "josé\t日本語\n─ µs 2"
    assert printable(text) == text
    assert one_line(text) == text.replace("\n", r"\n")
    assert one_line(EVIL) == printable(EVIL).replace("\n", r"\n") == SHOWN
    assert as_lines([EVIL, "two"]) == f"{SHOWN}\ntwo"


def test_errors() -> None:
    assert str(TfswapError(EVIL)) == SHOWN
    assert str(InfeasibleMemoryLimit(EVIL, floor_bytes=1, limit_bytes=0)) == SHOWN
    with pytest.raises(InvalidModel) as refused:
        tfswap.Plan.load(f"/no/such/{EVIL}")
    assert one_line(str(refused.value)) == str(refused.value)
    assert str(OpLibraryError("a compiler's\n\x1b[31moutput")) == "a compiler's\n\\x1b[31moutput"


def test_tables_lines_and_pages(capsys: pytest.CaptureFixture[str]) -> None:
    progress.announce(EVIL)
    assert capsys.readouterr().err == f"tfswap: {SHOWN}\n"
    table = stacked(EVIL, figures([(EVIL, EVIL)]), listing([EVIL, "name"], [(EVIL, EVIL)]))
    show(table)
    fit = Fit(EVIL, EVIL, 1, ((EVIL, (0,)),), 1, 1, 1, 1, 1.0, 0, False, None)
    curve = Curve(EVIL, EVIL, EVIL, 2, 1.0, 1, None, None, (Point(1, 1, 1.0, 1.0, 0, 0), Point(2, 2, 1.0, 1.0, 0, 0)))
    written = [as_text(table), capsys.readouterr().out, str(fit), str(curve)]
    assert not any(line.startswith("tfswap: fine") for text in written for line in text.splitlines())
    page = curve._repr_html_()
    assert printable(EVIL) in page
    assert all(SHOWN in text for text in written)
    assert all(printable(text) == text for text in (*written, page))


def test_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tfswap"):
        logging.getLogger("tfswap").info("of %s", EVIL)
        logging.getLogger("tfswap").info("%d of %s\n", 1, "two")
    assert [record.getMessage() for record in caplog.records] == [f"of {SHOWN}", "1 of two"]


@pytest.mark.parametrize("option", ["spill_dir", "plan", "profile"])
def test_a_path_that_no_file_can_have_is_refused(option: str) -> None:
    with pytest.raises(TfswapError, match=r"(spill_dir is|can be read from) .*a\\x00b"):
        tfswap.optimize(memory_limit="1GiB", **{option: "a\0b"})  # type: ignore[arg-type]


def test_a_file_is_no_folder_for_what_is_swapped(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TfswapError, match=r"spill_dir is '.*/file', which is no folder"):
        tfswap.optimize(memory_limit="1GiB", spill_dir=tmp_path / "file")
    tfswap.optimize(memory_limit="1GiB", spill_dir=tmp_path / "none")  # it may be made before the first call


def test_folders_that_no_file_system_can_have_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    with pytest.raises(TfswapError, match=r"'a\\x00b'"):
        tfswap.optimize_graph("a\0b", str(tmp_path / "out"))
    (tmp_path / "model").mkdir()
    with pytest.raises(TfswapError, match=r"\\x00b"):
        tfswap.optimize_graph(str(tmp_path / "model"), str(tmp_path / "a\0b"))
