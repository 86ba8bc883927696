"""Hooks of mkdocs. The home page is the README, and a notebook's links lead to pages of the site, or fail its build.

The README's links are those of the repository: "docs/tutorial.md" is the page "tutorial.md" here, and other files are
left out of the site. In a notebook links are as Jupyter follows them, to the pages' files; what makes HTML of it leaves
them so.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.plugins.site_hooks")
README = Path(__file__).parent.parent / "README.md"
TO_PAGE = re.compile(r"\]\(docs/([^)]+)\)")
TO_FILE = re.compile(r"\[([^]]+)\]\((?!https?:|docs/)[^)]+\)")
LINK = re.compile(r'href="(?![a-z]+:|/)([^"#]+\.(?:md|ipynb))(?=["#])')


def home_page(readme: str) -> str:
    """The README as a page of the site: links to files that are no pages of it become their text."""
    return TO_PAGE.sub(r"](\1)", TO_FILE.sub(r"\1", readme))


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page; the README for the home page."""
    return home_page(README.read_text(encoding="utf-8")) if page.file.src_uri == "index.md" else markdown


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """The page, with its links to files as links to pages."""
    folder, name = posixpath.split(page.file.src_uri)
    if not name.endswith(".ipynb"):
        return html

    def to_page(link: re.Match[str]) -> str:
        there = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, link[1])))
        if there is None:
            log.warning("%s has a link to %s, which is no page", page.file.src_uri, link[1])
            return link[0]
        return f'href="{there.url_relative_to(page.file)}'

    return LINK.sub(to_page, html)
