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


def require_new_folder(path: str | os.PathLike[str], source: str | os.PathLike[str]) -> None:
    """Raise TfswapError where no folder can be made of the model at `source`: worth asking before long work."""
    shown, final = os.fspath(path), Path(os.path.abspath(path))
    if not shown:
        raise TfswapError("output_dir is '': say where the rewritten SavedModel goes")
    try:
        str(final).encode()
    except UnicodeEncodeError as error:
        raise unwritable_folder(path, "its path is not UTF-8, and TensorFlow takes no other") from error
    if os.path.lexists(final):
        raise TfswapError(f"the output folder {shown!r} exists: give another, or remove it first")
    if not os.path.isdir(final.parent):
        raise TfswapError(f"the output folder {shown!r} can't be made: there is no folder {str(final.parent)!r}")
    # By what links lead to: a folder can't be copied into itself.
    if os.path.isdir(source) and final.parent.resolve().is_relative_to(Path(source).resolve()):
        raise TfswapError(f"the output folder {shown!r} lies inside the model's own: give another")


def unwritable_folder(path: str | os.PathLike[str], why: str) -> TfswapError:
    return TfswapError(f"the output folder {os.fspath(path)!r} can't be written: {why}. Nothing was left there.")


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
