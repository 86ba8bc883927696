"""A memory limit in a file, which a scheduler or a user changes while steps run.

The file has one of these forms, each in a line of its own; empty lines and lines that begin with # do not count:

    4GiB            a limit, as `memory_limit` takes it
    GPU:0 4GiB      a limit for each device, a line each
    budget 8GiB     what all processes that read this file may have together (`shared_budget.py`)

It is read before each call, whole: its times and size do not distinguish two changes within one tick of the clock.

Invariant: content that is damaged or written in part changes nothing. A number without a unit counts only with the end
of its line, since it may be the beginning of a longer one, and limits of devices only if they name all devices that
they have named before. A file that is replaced by renaming is never seen in part.

Not handled: a folder of the file that is itself replaced.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfswap.errors import TfswapError
from tfswap.support.shared_budget import Leases
from tfswap.support.sizes import Limit, check_limits, parse_limit
from tfswap.support.trusted_files import TrustedFolder, trusted_folder

log = logging.getLogger("tfswap")

PREFIX = "file:"
"""A `memory_limit` that begins with it is the path of a file."""
ENVIRONMENT = "TFSWAP_LIMIT_FILE"
"""The path of the limit file of all steps of the process that name none themselves."""
MOST_BYTES = 4096
"""The most that such a file has."""

FORMS = 'a size ("4GiB"), a share ("60%"), a line for each device ("GPU:0 4GiB"), or "budget 8GiB"'

_BUDGET = re.compile(r"budget\s+(.+)", re.IGNORECASE)
_DEVICE = re.compile(r"(\S*[gc]pu:\d+)[\s=]+(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """What all processes that read a limit file may have together."""

    total_bytes: int


class LimitFile:
    """A file with a limit. One object for each file of a process: see `limit_file`.

    Attributes:
        path: its path.
        leases: this process's share, where the file has a budget.
    """

    def __init__(self, path: Path):
        self.path = path
        self._folder, self._name = _folder_of(path), path.name
        self._content = b""
        self._trusted: tuple[int, ...] = ()  # the file that was checked last
        self._reported = False
        try:
            self._content = self._read()
            self._limit: Limit | Budget = parse(self._content)
        except (OSError, TfswapError) as error:
            raise TfswapError(f"no memory limit can be read from {str(path)!r}: {error}") from None
        self.leases = Leases(self._open_leases)

    def __reduce__(self) -> Any:
        return limit_file, (str(self.path),)

    def __deepcopy__(self, _: Any) -> LimitFile:
        return self

    @property
    def limit(self) -> Limit | Budget:
        """The limit as it was read last."""
        return self._limit

    def read(self) -> Limit | Budget:
        """The limit in the file now. The last one, with a log line, while the file is missing or has none."""
        content = self._content
        try:
            content = self._read()
            if content != self._content:
                self._limit = _following(self._limit, parse(content))
                self._content = content
            self._reported = False
        except (OSError, TfswapError) as error:
            if content and not self._reported:  # one that is empty is just being written
                self._reported = True
                log.warning("tfswap: %s: the last memory limit stays: %s", self.path, error)
        return self._limit

    def _read(self) -> bytes:
        """The content. The owner and the mode are checked again where they, or the file, have changed."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self._name, flags, dir_fd=self._folder.descriptor)
        try:
            found = os.fstat(descriptor)
            trusted = found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_gid
            if trusted != self._trusted:
                os.close(self._folder.open(self._name))
                self._trusted = trusted
            return os.read(descriptor, MOST_BYTES)
        finally:
            os.close(descriptor)

    def _open_leases(self) -> int:
        try:
            return self._folder.open(f"{self._name}.leases", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise TfswapError(
                f"{self.path} has a budget, and {self.path}.leases can't be written, in which processes share it: "
                f"{error.strerror}. Put the file into a folder that this user may write to."
            ) from error


def _folder_of(path: Path) -> TrustedFolder:
    """The file's folder, open for the rest of the process."""
    try:
        with trusted_folder(path.parent) as folder:
            return TrustedFolder(folder.path, os.dup(folder.descriptor))
    except OSError as error:
        raise TfswapError(f"no memory limit can be read from {str(path)!r}: {error.strerror}") from None


_files: dict[Path, LimitFile] = {}
_lock = threading.Lock()


def limit_file(path: str) -> LimitFile:
    """The limit file at `path`. Raises TfswapError where it is missing, has no limit, or others may write to it."""
    if not path or "\0" in path:
        raise TfswapError(f"memory_limit names the file {path!r}: give a path, as {PREFIX}/run/job/limit")
    given = Path(os.path.abspath(path))
    real = Path(os.path.realpath(given.parent), given.name)
    with _lock:
        if real not in _files:
            _files[real] = LimitFile(real)
        return _files[real]


def watched(limit: Any) -> tuple[Limit, LimitFile | None]:
    """A limit as it was given, or as the file has it that was given; and the file."""
    if not isinstance(limit, str) or not limit.startswith(PREFIX):
        return limit, None
    file = limit_file(limit[len(PREFIX) :])
    found = file.read()
    return found.total_bytes if isinstance(found, Budget) else found, file


def from_environment(limit: Any) -> Any:
    """The limit that the environment gives to a step with this one."""
    path = os.environ.get(ENVIRONMENT, "")
    named = isinstance(limit, str) and limit.startswith(PREFIX)
    return f"{PREFIX}{path}" if path and not named else limit


def parse(content: bytes) -> Limit | Budget:
    """The limit that a file's content gives. Raises TfswapError for content that gives none."""
    if len(content) >= MOST_BYTES:
        raise TfswapError(f"it has over {MOST_BYTES} bytes: write {FORMS}")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise TfswapError(f"it is no text: write {FORMS}") from None
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise TfswapError(f"it is empty: write {FORMS}")
    if lines[-1][-1].isdigit() and not text.endswith("\n"):
        raise TfswapError(f"it ends with {lines[-1]!r}, without a unit and without the end of the line")
    if devices := [_DEVICE.fullmatch(line) for line in lines if _DEVICE.fullmatch(line)]:
        if len(devices) < len(lines):
            raise TfswapError(f"only some of its lines have a device: write {FORMS}")
        return check_limits({match[1]: match[2] for match in devices if match})
    if len(lines) > 1:
        raise TfswapError(f"it has {len(lines)} lines: write {FORMS}")
    if found := _BUDGET.fullmatch(lines[0]):
        return Budget(parse_limit(found[1], name="the budget"))
    return check_limits(lines[0])


def _following(last: Limit | Budget, limit: Limit | Budget) -> Limit | Budget:
    """`limit`, after `last`. Raises TfswapError where lines may be missing."""
    if isinstance(last, dict) and isinstance(limit, dict) and last.keys() - limit.keys():
        raise TfswapError(f"it lacks {', '.join(sorted(last.keys() - limit.keys()))}, which it has had before")
    return limit
