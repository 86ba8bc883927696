"""Plans on disk: the same step is planned once for a limit, by whichever process comes first.

What TensorFlow's optimizers make of a step is kept too, which takes them longer than reading it.

An entry is named by all that a plan is chosen by except the arena: the graph, the options, the device, the versions of
TensorFlow and of tfswap's own sources, and the limit. The arena is another one in each process. So what is found here
is a proposal, which whoever takes it simulates in the arena that he has, and plans anew where it does not fit.

Invariant: without the cache, with one that can't be read or written, and with damaged files in it, everything goes on
as if nothing were there. Several processes may use one folder: files are written whole, and who wants what another one
is working out waits for that.
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
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import tfswap
from tfswap.analysis.device import DeviceModel
from tfswap.errors import InvalidModel, TfswapError
from tfswap.files import write_whole
from tfswap.ir.graph import Graph
from tfswap.oplib.build import cache_dir
from tfswap.planner.decode import decode
from tfswap.planner.plan import Plan

if TYPE_CHECKING:
    from tfswap.frontends.options import Options

log = logging.getLogger("tfswap")

FOLDER = "TFSWAP_PLAN_CACHE"
"""The environment variable that names the folder; OFF for no cache."""
OFF = ("0", "off")
MOST_BYTES = 256 << 20
"""What the folder may hold: then what has not been used for longest goes."""
LEFT_SHARE = 0.75
"""Of that, what then stays."""
LARGEST_SHARE = 0.1
"""Of that, what one graph may take: one that holds large constants is made anew rather."""
WAIT_S, POLL_S = 600.0, 0.05
"""Who waits for another process's plan plans by himself after so long."""
ENDING = ".json"

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
        """The user's: TFSWAP_PLAN_CACHE, else `plans` beside the ops that tfswap has built; None where it is off."""
        given = os.environ.get(FOLDER, "").strip()
        if given.lower() in OFF:
            return None
        return PlanCache(Path(given).expanduser().absolute() if given else cache_dir() / "plans")

    def read(self, name: str, parse: Callable[[str], Read]) -> Read | None:
        """What `parse` makes of an entry; None where there is none, or a damaged one."""
        path = self.folder / (name + ENDING)
        try:
            found = parse(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError, InvalidModel) as error:
            log.warning("tfswap: the plan cache's %s is of no use, and is made anew: %s", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it is in use
        return found

    def write(self, name: str, text: str) -> None:
        """Make `text` the entry of that name, and room for it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(self.folder / (name + ENDING), text)
            self._make_room()
        except (OSError, TfswapError) as error:
            log.info("tfswap: plans are not kept in %s: %s", self.folder, error)

    def _make_room(self) -> None:
        there: list[tuple[float, int, str]] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # another process has removed it
                    found = entry.stat()
                    there.append((found.st_mtime, found.st_size, entry.path))
        total = sum(size for _, size, _ in there)
        if total <= MOST_BYTES:
            return
        for _, size, path in sorted(there):
            if total <= MOST_BYTES * LEFT_SHARE:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size

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
            with contextlib.suppress(OSError):  # no such folder, or one that knows no locks: everybody for himself
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                path = self.folder / f"{name}.lock"
                handle = opened.enter_context(open(path, "a"))
                self._lock(handle.fileno(), name)
                # Whoever waits has it open. If one more comes and makes another, two plan the same: no harm.
                opened.callback(path.unlink, missing_ok=True)
            yield

    @staticmethod
    def _lock(handle: int, name: str) -> None:
        """Locks a file, which is free again when it is closed or its process dies."""
        until = time.monotonic() + WAIT_S
        told = False
        while time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not told:
                    log.info("tfswap: another process is working out %s: waiting for it", name)
                told = True
                time.sleep(POLL_S)


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
            digest.update("\n".join([*(node.name for node in part), *permits, ""]).encode())
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
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"it is no JSON: {error}") from error
    return decode(Unoptimised, content, "unoptimised")


@functools.cache
def _versions() -> str:
    """What plans are made by: TensorFlow, and tfswap's own sources, which change more often than its version."""
    import tensorflow as tf

    digest = hashlib.sha256()
    root = Path(tfswap.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{tfswap.__version__} {digest.hexdigest()} {tf.version.VERSION} {tf.version.GIT_VERSION}"
