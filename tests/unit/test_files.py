"""Files that tfswap saves: whole or not at all; an error names the file that can't be written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tfswap.errors import TfswapError
from tfswap.support.files import require_new_folder, write_whole


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    for content in ("one \N{SUPERSCRIPT TWO}", "three"):
        write_whole(tmp_path / "file", content)
        assert (tmp_path / "file").read_text(encoding="utf-8") == content
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere/file", "there is no folder '.*nowhere'"),
        ("folder", "it is a folder"),
        ("x" * 250, "File name too long"),  # with what a temporary one has besides
        ("null\0byte", "null (byte|character)"),  # as Python says it up to 3.12, and from 3.13 on
    ],
)
def test_what_can_t_be_written_is_named(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "folder").mkdir()
    path = str(tmp_path / name)
    with pytest.raises(TfswapError, match=f"^{re.escape(repr(path))} can't be written: .*{why}.*Give the path"):
        write_whole(path, "content")
    assert [f.name for f in tmp_path.iterdir()] == ["folder"]


def test_no_path_is_no_file() -> None:
    with pytest.raises(TfswapError, match="'' can't be written"):
        write_whole("", "content")


def test_a_folder_is_refused_inside_of_what_it_is_made_of_also_by_a_link(tmp_path: Path) -> None:
    model, link = tmp_path / "model", tmp_path / "link"
    (model / "assets").mkdir(parents=True)
    link.symlink_to(model)
    for source in (model, link):
        for place in (model / "out", link / "out", link / "assets" / "out"):
            with pytest.raises(TfswapError, match="lies inside the model's own"):
                require_new_folder(place, source)
        require_new_folder(tmp_path / "out", source)
    assert [f.name for f in model.iterdir()] == ["assets"]
