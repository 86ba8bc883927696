"""A cache of plans on disk: a step is planned once for each limit, by the first process.

It also has the graphs after TensorFlow's optimizers, which take longer than reading them.

An entry's name depends on all inputs of planning except the arena: the graph, the options, the device, the versions of
TensorFlow and of tfswap's sources, and the limit. The arena differs between processes. So a plan from the cache is a
proposal, which is simulated in the present arena. Where it does not fit, the step is planned anew.

Invariants: without the cache, with one that can't be read or written, and with damaged files in it, steps are planned
as without entries. One process at a time makes an entry, under a lock; the others wait and read it. Files are written
whole. A folder or an entry that another user could have written is not read, since its graphs are executed, and another
user's entry is not replaced (trusted_files.py). Only files that tfswap has written are removed, by name, owner and
first line: the folder may have files of the user.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tfswap.compiler.process_names import names_everywhere
from tfswap.errors import InvalidModel, OpLibraryError
from tfswap.ir.graph import Graph
from tfswap.kernels.device import DeviceModel
from tfswap.native.build import absolute, cache_dir
from tfswap.plan.plan import Plan
from tfswap.support.json_fields import decode, parse_json
from tfswap.support.trusted_files import TrustedFolder, UntrustedPath, is_own, trusted_folder
from tfswap.version import __version__

if TYPE_CHECKING:
    from tfswap.compiler.options import Options

log = logging.getLogger("tfswap")

FOLDER = "TFSWAP_PLAN_CACHE"
"""The environment variable with the folder; a word of OFF for no cache, a word of ON for the default folder."""
OFF = ("0", "off", "n", "no", "none", "f", "false", "disable", "disabled")
ON = ("1", "on", "y", "yes", "t", "true", "enable", "enabled")
MOST_BYTES = 256 << 20
"""The most bytes of all entries. Beyond it, the least recently used entries are removed."""
LEFT_SHARE = 0.75
"""The share of MOST_BYTES that is left after that."""
LARGEST_SHARE = 0.1
"""The most bytes of one graph, as a share of MOST_BYTES. Graphs with large constants are not cached."""
WAIT_S, POLL_S = 600.0, 0.05
"""A process that has waited this long for another process's plan makes its own."""
PREFIX, ENDING, LOCK_ENDING = "tfswap_", ".json", ".lock"
HEAD = b'{"written_by": "tfswap"}\n'
"""The first line of each entry."""
WRITTEN = re.compile(rf"{PREFIX}[0-9a-z-]+{re.escape(ENDING)}(\.[0-9a-f]{{32}}\.tmp)?")
"""The names of entries, and of their temporary files, which a killed process may leave."""

Read = TypeVar("Read")


@dataclass(frozen=True)
class Unoptimised:
    """The predictions for the unoptimised step.

    Attributes:
        there_bytes: the bytes in the arena before the step's function was made.
        peak_bytes, lowest_bytes, highest_bytes, seconds: as of Baseline.
        bound_bytes: the highest of all simulated peaks; None where no limit depended on it.
    """

    there_bytes: int
    peak_bytes: int
    lowest_bytes: int
    highest_bytes: int
    seconds: float
    bound_bytes: int | None = None


@dataclass(frozen=True)
class PlanCache:
    """A folder of plans that processes share. It is created with the first entry.

    Attributes:
        folder: its path.
        what: what is in it, for messages.
        variable: the environment variable with its place, for messages.
    """

    folder: Path
    what: str = "plans"
    variable: str = FOLDER

    @staticmethod
    def of_environment() -> PlanCache | None:
        """The cache in TFSWAP_PLAN_CACHE, else `plans` next to the built op libraries; None where it is off."""
        given = os.environ.get(FOLDER, "").strip()
        if given.lower() in OFF:
            return None
        try:
            usual = not given or given.lower() in ON
            return PlanCache(cache_dir() / "plans" if usual else absolute(given))
        except OpLibraryError as error:
            log.info("tfswap: plans are not kept: %s", error)
            return None

    def read(self, name: str, parse: Callable[[str], Read]) -> Read | None:
        """An entry, parsed; None where there is none, or a damaged one."""
        file = f"{PREFIX}{name}{ENDING}"
        try:
            with trusted_folder(self.folder) as folder, open(folder.open(file), "rb") as opened:
                if opened.readline(len(HEAD)) != HEAD:
                    raise InvalidModel("it was not written by tfswap")
                found = parse(opened.read().decode())
                with contextlib.suppress(OSError):  # it is root's
                    os.utime(opened.fileno())  # it is in use
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UntrustedPath as error:
            self._distrust(error)
            return None
        except (OSError, UnicodeDecodeError, InvalidModel) as error:
            path = self.folder / file
            log.warning("tfswap: the cache's %s can't be used, and is replaced: %s", path, error)
            return None
        return found

    def write(self, name: str, text: str) -> None:
        """Write an entry, and remove others where the cache is too large."""
        try:
            with trusted_folder(self.folder, create=True) as folder:
                folder.write(f"{PREFIX}{name}{ENDING}", HEAD + text.encode())
                _make_room(folder)
        except UntrustedPath as error:
            self._distrust(error)
        except OSError as error:
            log.info("tfswap: %s are not kept in %s: %s", self.what, self.folder, error)

    def is_writable(self) -> bool:
        """Whether entries can be written, in a folder that is created where it is missing."""
        try:
            with trusted_folder(self.folder, create=True) as folder:
                return os.access(".", os.W_OK | os.X_OK, dir_fd=folder.descriptor)
        except UntrustedPath as error:
            self._distrust(error)
        except OSError:
            pass
        return False

    def _distrust(self, error: UntrustedPath) -> None:
        if str(error) not in _distrusted:
            _distrusted.add(str(error))
            log.warning(
                "tfswap: the cache of %s in %s is ignored: %s. Set %s to a folder of your own that only you can write"
                " to%s.",
                self.what,
                self.folder,
                error,
                self.variable,
                ", or to off" if self.variable == FOLDER else "",
            )

    def made_of(self, given: Iterable[bytes], make: Callable[[], bytes], is_whole: Callable[[bytes], bool]) -> bytes:
        """The result of `make`, from now or from an earlier run.

        Args:
            given: all inputs of `make`, besides the versions.
            is_whole: checks a stored result.
        """

        def parse(text: str) -> bytes:
            try:
                found = zlib.decompress(base64.b85decode(text))
            except (ValueError, zlib.error) as error:
                raise InvalidModel(f"it can't be decoded: {error}") from error
            if not is_whole(found):
                raise InvalidModel("it holds something else")
            return found

        digest = hashlib.sha256(_versions().encode())
        for part in given:
            digest.update(f"\n{len(part)}\n".encode())
            digest.update(part)
        name = digest.hexdigest()[:32]
        with self.alone(name):
            found = self.read(name, parse)
            if found is None:
                found = make()
                text = base64.b85encode(zlib.compress(found)).decode()
                if len(text) <= MOST_BYTES * LARGEST_SHARE:
                    self.write(name, text)
        return found

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """A lock, so that one process at a time reads the entry of that name, or creates it."""
        with contextlib.ExitStack() as opened:
            # No such folder, another user's, or one without locks: then processes do not wait for each other.
            with contextlib.suppress(OSError, UntrustedPath):
                folder = opened.enter_context(trusted_folder(self.folder, create=True))
                _hold(folder, f"{PREFIX}{name}{LOCK_ENDING}", opened)
            yield


_distrusted: set[str] = set()
"""The warnings about untrusted folders and entries so far: each is given once."""


def _hold(folder: TrustedFolder, name: str, held: contextlib.ExitStack) -> None:
    """Hold the lock of that name until `held` is closed, which removes its file. After WAIT_S, return without it."""
    until = time.monotonic() + WAIT_S
    waits = False
    while time.monotonic() < until:
        with contextlib.ExitStack() as opened:
            handle = opened.enter_context(open(folder.open(name, os.O_RDWR | os.O_CREAT), "a"))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again when its process dies
            except BlockingIOError:
                if not waits:
                    log.info("tfswap: another process is computing %s: waiting for it", name)
                waits = True
                time.sleep(POLL_S)
                continue
            # The process that held the lock has removed this file: another process can hold a new one of that name.
            if not _is_named(handle.fileno(), folder, name):
                continue
            opened.callback(_unlink, folder, name)
            held.enter_context(opened.pop_all())
            return


def _is_named(handle: int, folder: TrustedFolder, name: str) -> bool:
    """Whether the name still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _unlink(folder: TrustedFolder, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder.descriptor)


def _make_room(folder: TrustedFolder) -> None:
    """Remove entries that have not been used for longest, where all take too much. No other file counts."""
    there: list[tuple[float, int, str]] = []
    with os.scandir(folder.descriptor) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process has removed it
                found = entry.stat(follow_symlinks=False)
                if WRITTEN.fullmatch(entry.name) and is_own(found):
                    there.append((found.st_mtime, found.st_size, entry.name))
    if sum(size for _, size, _ in there) <= MOST_BYTES:
        return
    written = sorted(entry for entry in there if _is_written(folder, entry[-1]))
    total = sum(size for _, size, _ in written)
    for _, size, name in written if total > MOST_BYTES else ():
        if total <= MOST_BYTES * LEFT_SHARE:
            break
        _unlink(folder, name)
        total -= size


def _is_written(folder: TrustedFolder, name: str) -> bool:
    """Whether an entry begins as entries do, or as one that had hardly been begun."""
    try:
        with open(folder.open(name), "rb") as opened:
            return HEAD.startswith(opened.readline(len(HEAD)))
    except (OSError, UntrustedPath):
        return False


class StepPlans:
    """A cache's entries of one step."""

    def __init__(
        self,
        cache: PlanCache,
        graph: Graph,
        fingerprint: str,
        device: DeviceModel,
        options: Options,
        others: Sequence[object],
    ):
        """
        Args:
            graph: the traced step, with the permits of its tensors.
            fingerprint: its fingerprint.
            others: other inputs of its plans.
        """
        self._cache = cache
        digest = hashlib.sha256(f"{_versions()}\n{fingerprint}\n{device!r}\n{others!r}\n".encode())
        profile = "" if options.profile is None else options.profile.to_json()
        key = options.tactics, options.host_limit_bytes, options.spill, options.solver
        key = *key, options.portable, options.values
        digest.update(f"{key!r}\n{options.precision!r}\n{profile}\n".encode())
        # A plan depends on the names of nodes and on permits, which are no part of the fingerprint.
        for part in (graph, *graph.all_bodies()):
            permits = sorted(f"{tensor.name} {sorted(permit.tactics)}" for tensor, permit in part.permits.items())
            digest.update("\n".join([*names_everywhere(part), *permits, ""]).encode())
        self._step = digest.hexdigest()[:32]

    def plan(self, limit_bytes: int, ordered: bool) -> Plan | None:
        """The latest plan for that limit, which may be of another arena."""
        return self._cache.read(self._name(limit_bytes, ordered), Plan.from_json)

    def keep(self, plan: Plan, limit_bytes: int, ordered: bool) -> None:
        self._cache.write(self._name(limit_bytes, ordered), plan.to_json())

    def planning(self, limit_bytes: int, ordered: bool) -> contextlib.AbstractContextManager[None]:
        """`PlanCache.alone` for the plan for that limit."""
        return self._cache.alone(self._name(limit_bytes, ordered))

    def unoptimised(self) -> Unoptimised | None:
        """The latest predictions for the unoptimised step."""
        return self._cache.read(self._unoptimised, _parse_unoptimised)

    def keep_unoptimised(self, found: Unoptimised) -> None:
        self._cache.write(self._unoptimised, json.dumps(asdict(found)) + "\n")

    def predicting(self) -> contextlib.AbstractContextManager[None]:
        """`PlanCache.alone` for these predictions."""
        return self._cache.alone(self._unoptimised)

    def _name(self, limit_bytes: int, ordered: bool) -> str:
        return f"{self._step}-{limit_bytes}{'-ordered' if ordered else ''}"

    @property
    def _unoptimised(self) -> str:
        return f"{self._step}-unoptimised"


def _parse_unoptimised(text: str) -> Unoptimised:
    return decode(Unoptimised, parse_json(text), "unoptimised")


@functools.cache
def _versions() -> str:
    """The versions that plans depend on: of TensorFlow, and a hash of tfswap's sources."""
    import tensorflow as tf

    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{__version__} {digest.hexdigest()} {tf.version.VERSION} {tf.version.GIT_VERSION}"
