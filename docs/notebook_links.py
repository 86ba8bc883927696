"""A hook of mkdocs: a notebook's links to pages lead to them in the site too, or fail its build.

mkdocs does this for pages in Markdown. In a notebook links are as Jupyter follows them, to the pages' files; what makes
HTML of it leaves them so.
"""

from __future__ import annotations

import logging
import posixpath
import re
from typing import Any

log = logging.getLogger("mkdocs.plugins.notebook_links")
LINK = re.compile(r'href="(?![a-z]+:|/)([^"#]+\.(?:md|ipynb))(?=["#])')


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
