"""Files that tfswap saves: a reader never sees half of one, and what can't be read is named."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tfswap.errors import InvalidModel, TfswapError

Read = TypeVar("Read")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, whole or not at all. Raises TfswapError, with the path in it."""
    require_place(path)
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")  # with the permissions that new files get
    try:
        try:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            os.replace(temporary, target)
        except BaseException:  # an interrupt too leaves nothing behind
            temporary.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
        raise _unwritable(path, getattr(error, "strerror", None) or str(error)) from error


def require_place(path: str | os.PathLike[str]) -> None:
    """Raise TfswapError where no file can be written to `path`, for want of a folder: worth asking before long work."""
    target = Path(path)
    if not target.name or target.is_dir():
        raise _unwritable(path, "it is a folder")
    if not target.parent.is_dir():
        raise _unwritable(path, f"there is no folder {str(target.parent)!r}")


def _unwritable(path: str | os.PathLike[str], why: str) -> TfswapError:
    return TfswapError(f"{os.fspath(path)!r} can't be written: {why}. Give the path of a file in an existing folder.")


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
