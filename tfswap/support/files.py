"""Saves files atomically, and reads them with errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tfswap.errors import InvalidModel, TfswapError

Read = TypeVar("Read")

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""The system's errors for a full disk, an exceeded quota and an exceeded file size."""


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, whole or not at all. Raises TfswapError, with the path in it."""
    require_place(path)
    try:
        replace_whole(str(Path(path)), content.encode() if isinstance(content, str) else content)
    except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
        raise _unwritable(path, error) from error


def replace_whole(path: str, content: bytes, *, mode: int = 0o666, folder: int | None = None) -> None:
    """Write `content` to `path`, whole or not at all.

    Args:
        mode: the mode of the file, before the umask.
        folder: a descriptor of the folder that `path` is relative to.

    Raises:
        OSError, ValueError: it can't be written; nothing is left behind.
    """
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=folder)
        with open(opened, "wb") as file:
            file.write(content)
        os.replace(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:  # also after an interrupt
        with contextlib.suppress(OSError, ValueError):
            os.unlink(temporary, dir_fd=folder)
        raise


def require_place(path: str | os.PathLike[str]) -> None:
    """Raise TfswapError where `path` is a folder or is in no folder. To be called before long work."""
    target = Path(path)
    if not target.name or target.is_dir():
        raise _unwritable(path, "it is a folder")
    if not target.parent.is_dir():
        raise _unwritable(path, f"there is no folder {str(target.parent)!r}")


def require_new_folder(path: str | os.PathLike[str], source: str | os.PathLike[str]) -> None:
    """Raise TfswapError where no folder for the model at `source` can be created. To be called before long work."""
    shown, final = os.fspath(path), Path(os.path.abspath(path))
    if not shown:
        raise TfswapError("output_dir is '': say where the rewritten SavedModel goes")
    if "\0" in shown:
        raise unwritable_folder(path, "a path can hold no NUL")
    try:
        str(final).encode()
    except UnicodeEncodeError as error:
        raise unwritable_folder(path, "its path is not UTF-8, and TensorFlow takes no other") from error
    if os.path.lexists(final):
        raise TfswapError(f"the output folder {shown!r} exists: give another, or remove it first")
    if not os.path.isdir(final.parent):
        raise TfswapError(f"the output folder {shown!r} can't be made: there is no folder {str(final.parent)!r}")
    # With links resolved: a folder can't be copied into itself.
    if os.path.isdir(source) and final.parent.resolve().is_relative_to(Path(source).resolve()):
        raise TfswapError(f"the output folder {shown!r} lies inside the model's own: give another")


def unwritable_folder(path: str | os.PathLike[str], why: str) -> TfswapError:
    return TfswapError(f"the output folder {os.fspath(path)!r} can't be written: {why}. Nothing was left behind.")


def _unwritable(path: str | os.PathLike[str], why: str | Exception) -> TfswapError:
    remedy = "Give the path of a file in an existing folder."
    if isinstance(why, OSError) and why.errno in FULL:
        remedy = "Free some of its disk, or give a path on another one."
    reason = getattr(why, "strerror", None) or why
    return TfswapError(f"{os.fspath(path)!r} can't be written: {reason}. {remedy}")


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError where `path` exists and is neither a file nor a folder. Opening a named pipe could wait forever."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(f"{os.fspath(path)!r} is no regular file")


def read_saved(path: str | os.PathLike[str], what: str, parse: Callable[[str], Read]) -> Read:
    """The parsed content of the file at `path`.

    Args:
        what: the kind of content, for messages.
        parse: parses the text. Raises InvalidModel.

    Raises:
        InvalidModel: the file can't be read or parsed. The message has the path.
    """
    try:
        require_regular(path)
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or a path that no file can have
        raise InvalidModel(f"no {what} can be read from {os.fspath(path)!r}: {error}") from error
    try:
        return parse(text)
    except InvalidModel as error:
        raise InvalidModel(f"{os.fspath(path)!r}: {error}") from error
