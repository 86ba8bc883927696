"""Files that tfswap saves: a reader never sees half of one, and what can't be read is named."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tfswap.errors import InvalidModel

Read = TypeVar("Read")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, whole or not at all. Raises OSError."""
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")  # with the permissions that new files get
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_saved(path: str | os.PathLike[str], what: str, parse: Callable[[str], Read]) -> Read:
    """What `parse` makes of the text of a file that holds a `what`. Raises InvalidModel, with the path in it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidModel(f"no {what} can be read from {os.fspath(path)!r}: {error}") from error
    try:
        return parse(text)
    except InvalidModel as error:
        raise InvalidModel(f"{os.fspath(path)!r}: {error}") from error
