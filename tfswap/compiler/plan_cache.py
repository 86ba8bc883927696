"""Plans on disk: the same step is planned once for a limit, by whichever process comes first.

What TensorFlow's optimizers make of a step is kept too, which takes them longer than reading it.

An entry is named by all that a plan is chosen by except the arena: the graph, the options, the device, the versions of
TensorFlow and of tfswap's own sources, and the limit. The arena is another one in each process. So what is found here
is a proposal, which whoever takes it simulates in the arena that he has, and plans anew where it does not fit.

Invariants: without the cache, with one that can't be read or written, and with damaged files in it, everything goes on
as if nothing were there. An entry has one owner: of the processes that want it, the one that holds its lock makes it,
and the others wait and read it; files are written whole. A folder or an entry that another user could have written is
not read, since a graph that is kept there runs, and another user's entry is not replaced (trusted_files.py). Only files
that were written here are ever removed, by name, owner and first line: the folder may hold the user's own.
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
"""The environment variable that names the folder; a word of OFF for no cache, of ON for the usual folder."""
OFF = ("0", "off", "n", "no", "none", "f", "false", "disable", "disabled")
ON = ("1", "on", "y", "yes", "t", "true", "enable", "enabled")
MOST_BYTES = 256 << 20
"""What entries may take: then those go that have not been used for longest."""
LEFT_SHARE = 0.75
"""Of that, what then stays."""
LARGEST_SHARE = 0.1
"""Of that, what one graph may take: one that holds large constants is made anew rather."""
WAIT_S, POLL_S = 600.0, 0.05
"""Who waits for another process's plan plans by himself after so long."""
PREFIX, ENDING, LOCK_ENDING = "tfswap_", ".json", ".lock"
HEAD = b'{"written_by": "tfswap"}\n'
"""The first line of each entry."""
WRITTEN = re.compile(rf"{PREFIX}[0-9a-z-]+{re.escape(ENDING)}(\.[0-9a-f]{{32}}\.tmp)?")
"""What entries are called, and those that a process was killed over."""

Read = TypeVar("Read")


@dataclass(frozen=True)
class Unoptimised:
    """What was predicted of the unoptimised step.

    Attributes:
        there_bytes: what was in the arena before anything of the step was made.
        peak_bytes, seconds: as of Baseline.
    """

    there_bytes: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class PlanCache:
    """A folder of plans that processes share; made when the first is written."""

    folder: Path

    @staticmethod
    def of_environment() -> PlanCache | None:
        """The user's: TFSWAP_PLAN_CACHE, else `plans` next to the ops that tfswap has built; None where it is off."""
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
        """What `parse` makes of an entry; None where there is none, or a damaged one."""
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
            log.warning("tfswap: the plan cache's %s can't be used, and is replaced: %s", path, error)
            return None
        return found

    def write(self, name: str, text: str) -> None:
        """Make `text` the entry of that name, and room for it."""
        try:
            with trusted_folder(self.folder, create=True) as folder:
                folder.write(f"{PREFIX}{name}{ENDING}", HEAD + text.encode())
                _make_room(folder)
        except UntrustedPath as error:
            self._distrust(error)
        except OSError as error:
            log.info("tfswap: plans are not kept in %s: %s", self.folder, error)

    def _distrust(self, error: UntrustedPath) -> None:
        if str(error) not in _distrusted:
            _distrusted.add(str(error))
            log.warning(
                "tfswap: the plan cache in %s is ignored: %s. Set %s to a folder of your own that only you can"
                " write to, or to off.",
                self.folder,
                error,
                FOLDER,
            )

    def made_of(self, given: Iterable[bytes], make: Callable[[], bytes], is_whole: Callable[[bytes], bool]) -> bytes:
        """What `make` makes of `given`, this time or an earlier one.

        Args:
            given: all that it depends on, besides the versions.
            is_whole: whether that is what these bytes are.
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
        """One process at a time looks for the entry of that name, and makes it if it is not there."""
        with contextlib.ExitStack() as opened:
            # No such folder, one of another user's, or one that knows no locks: everybody for himself.
            with contextlib.suppress(OSError, UntrustedPath):
                folder = opened.enter_context(trusted_folder(self.folder, create=True))
                _hold(folder, f"{PREFIX}{name}{LOCK_ENDING}", opened)
            yield


_distrusted: set[str] = set()
"""What has been said of folders and entries that are not trusted: each is said once."""


def _hold(folder: TrustedFolder, name: str, held: contextlib.ExitStack) -> None:
    """Hold the lock of that name until `held` is closed, and its file is removed. Without it after WAIT_S."""
    until = time.monotonic() + WAIT_S
    waits = False
    while time.monotonic() < until:
        with contextlib.ExitStack() as opened:
            handle = opened.enter_context(open(folder.open(name, os.O_RDWR | os.O_CREAT), "a"))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again when its process dies
            except BlockingIOError:
                if not waits:
                    log.info("tfswap: another process is working out %s: waiting for it", name)
                waits = True
                time.sleep(POLL_S)
                continue
            # Who held it until now has removed the file: another process can hold the next one of that name.
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
    """What a cache has of one step."""

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
            graph: the step as it was traced, in which it is noted what may be done to tensors.
            fingerprint: its.
            others: what else its plans depend on.
        """
        self._cache = cache
        digest = hashlib.sha256(f"{_versions()}\n{fingerprint}\n{device!r}\n{others!r}\n".encode())
        profile = "" if options.profile is None else options.profile.to_json()
        asked = options.tactics, options.host_limit_bytes, options.spill, options.solver
        asked = *asked, options.portable
        digest.update(f"{asked!r}\n{options.precision!r}\n{profile}\n".encode())
        # A plan calls nodes by their names, which are no part of the fingerprint, and goes by what may be done to them.
        for part in (graph, *graph.all_bodies()):
            permits = sorted(f"{tensor.name} {sorted(permit.tactics)}" for tensor, permit in part.permits.items())
            digest.update("\n".join([*names_everywhere(part), *permits, ""]).encode())
        self._step = digest.hexdigest()[:32]

    def plan(self, limit_bytes: int, ordered: bool) -> Plan | None:
        """The plan that was made last for that limit, in whatever arena."""
        return self._cache.read(self._name(limit_bytes, ordered), Plan.from_json)

    def keep(self, plan: Plan, limit_bytes: int, ordered: bool) -> None:
        self._cache.write(self._name(limit_bytes, ordered), plan.to_json())

    def planning(self, limit_bytes: int, ordered: bool) -> contextlib.AbstractContextManager[None]:
        """As `PlanCache.alone`, while a plan for that limit is made."""
        return self._cache.alone(self._name(limit_bytes, ordered))

    def unoptimised(self) -> Unoptimised | None:
        """What was predicted last of the unoptimised step."""
        return self._cache.read(self._unoptimised, _parse_unoptimised)

    def keep_unoptimised(self, found: Unoptimised) -> None:
        self._cache.write(self._unoptimised, json.dumps(asdict(found)) + "\n")

    def predicting(self) -> contextlib.AbstractContextManager[None]:
        """As `PlanCache.alone`, while that is found out."""
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
    """What plans are made by: TensorFlow, and tfswap's own sources, which change more often than its version."""
    import tensorflow as tf

    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{__version__} {digest.hexdigest()} {tf.version.VERSION} {tf.version.GIT_VERSION}"
