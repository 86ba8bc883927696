"""Builds the op libraries with the user's compiler, once per TensorFlow, into a cache.

TensorFlow's C++ interface changes from release to release, so a library is compiled at first use, unless the
installation has one that was compiled for this exact TensorFlow (release/wheels.py). There are two libraries, so that a
step without encodings does not wait for the compilation of the codecs. The cache has one folder per key: a hash over
sources, flags, compiler version and TensorFlow version. A folder has the library and a manifest with the library's
hash.

The codecs' library is linked with the core library by its name without a folder, which load.py has loaded before. So a
process has one core library, and one host pool.

Invariants: a library is opened only if its hash is the manifest's. A file that a full disk has truncated is built
again; mapping it could kill the process (SIGBUS). Nothing is loaded from a cache that another user could have written
(trusted_files.py). The compiler reads copies of the sources by relative paths, so that the sources may have any path.

Not handled: Windows and macOS (the flags and the locking are Linux's).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tfswap.errors import INSTALL_TENSORFLOW, InvalidModel, OpLibraryError
from tfswap.native.cpp_compiler import BUILD_MB, Compiler, find_compiler, full_disk, run_compiler
from tfswap.support import progress
from tfswap.support.files import FULL
from tfswap.support.json_fields import parse_json
from tfswap.support.trusted_files import TrustedFolder, UntrustedPath, is_own, trusted_folder

SOURCE_DIR = Path(__file__).resolve().parent.parent / "ops" / "csrc"
SHIPPED_DIR = SOURCE_DIR.parent / "prebuilt"
"""The libraries of an installation, in folders as in the cache."""
MANIFEST_NAME = "manifest.json"
LOCK_NAME = "lock"
READABLE = 0o644
"""The mode of a built library, whatever the umask: files that others may write to are not loaded."""
_WORK = "build-"
_WORK_FOLDER = re.compile(rf"{_WORK}[a-z0-9_]{{8}}")
_WORK_FILE = re.compile(r"unit_\d+\.(cc|o)|libtfswap_\w+\.so|core|codecs|emulated_gpu")
_HALF_MANIFEST = re.compile(rf"{re.escape(MANIFEST_NAME)}\.[0-9a-f]{{32}}\.tmp")
"""The names of folders for builds, of files in them, and of a manifest that is being written."""

# No -march=native: different machines may share a cache by a network file system.
# NDEBUG as in TensorFlow's own build: it changes classes in the headers.
COMPILE_FLAGS = (
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-DNDEBUG",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
)
LINK_FLAGS = (
    "-shared",
    "-pthread",
)


_UNITS = 2
"""The most translation units per library; one where there is one core. Most of a file's compilation is TensorFlow's
headers, so several files are compiled as one unit; no two define the same name. Each unit takes up to 1.5 GiB of
memory."""
_DURATION = "20 s to 2 min"
"""The time to compile a library, on four free cores and on one."""


@dataclasses.dataclass(frozen=True)
class Sources:
    """The sources of one library.

    Attributes:
        name: the library's name, which begins the name of its folder in the cache.
        content: its content, for messages.
        links_with: libraries whose headers it includes and whose exported functions it calls.
        at: the folder with its .cc files. None: the folder of its name in SOURCE_DIR.
    """

    name: str
    content: str
    links_with: tuple[Sources, ...] = ()
    at: Path | None = None

    @property
    def folder(self) -> Path:
        return self.at or SOURCE_DIR / self.name

    @property
    def library_name(self) -> str:
        return f"libtfswap_{self.name}.so"

    def included(self) -> list[Path]:
        """Every file that the library's bytes depend on."""
        own = [*self.folder.glob("*.cc"), *self.folder.glob("*.h")]
        return sorted([*own, *(header for linked in self.links_with for header in linked.folder.glob("*.h"))])


CORE = Sources("core", "ops")
CODECS = Sources("codecs", "codecs", links_with=(CORE,))


@dataclasses.dataclass(frozen=True)
class TensorFlowFacts:
    """The facts about TensorFlow that a build depends on."""

    version: str
    git_version: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    @property
    def built_for(self) -> str:
        """The stamp in the library, which load.py compares."""
        return f"{self.version} {self.git_version}"


@dataclasses.dataclass(frozen=True)
class Library:
    """A library in the cache or in the installation, whether or not it has been built.

    Attributes:
        shipped: whether it is a part of the installation, and trusted as its Python modules are.
    """

    sources: Sources
    folder: Path
    built_for: str
    shipped: bool = False

    @property
    def path(self) -> Path:
        return self.folder / self.sources.library_name

    def opened(self, inputs_key: str | None = None) -> int | None:
        """A descriptor of the library's file; None where it is missing, or does not have the manifest's hash.

        Args:
            inputs_key: the required hash of its sources and flags. None: any.

        Raises:
            OpLibraryError: another user could have written it.
        """
        try:
            with self._read_from() as (read, open_file):
                manifest = parse_json(read(MANIFEST_NAME))
                if not isinstance(manifest, dict) or inputs_key not in (None, manifest.get("inputs_key")):
                    return None
                descriptor = open_file(self.path.name)
                with open(descriptor, "rb", closefd=False) as file:
                    intact = manifest.get("library_sha256") == _sha256(file.read())
                if not intact:
                    os.close(descriptor)
                return descriptor if intact else None
        except UntrustedPath as error:
            raise _untrusted(self.folder, error) from error
        except (OSError, InvalidModel):
            return None

    @contextlib.contextmanager
    def _read_from(self) -> Iterator[tuple[Callable[[str], bytes], Callable[[str], int]]]:
        """Functions that read and open its files by name."""
        if self.shipped:
            yield lambda name: (self.folder / name).read_bytes(), lambda name: os.open(self.folder / name, os.O_RDONLY)
        else:
            with trusted_folder(self.folder) as folder:
                yield folder.read, folder.open

    def is_intact(self, inputs_key: str | None = None) -> bool:
        """Whether it can be opened. Raises as `opened`."""
        descriptor = self.opened(inputs_key)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is not None


def tensorflow_facts() -> TensorFlowFacts:
    """Imports TensorFlow and describes it.

    Raises:
        OpLibraryError: TensorFlow can't be imported.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise OpLibraryError(
            f"tfswap's ops need TensorFlow, which can't be imported ({error}). {INSTALL_TENSORFLOW}"
        ) from error
    return TensorFlowFacts(
        version=tf.version.VERSION,
        git_version=tf.version.GIT_VERSION,
        compile_flags=tuple(tf.sysconfig.get_compile_flags()),
        link_flags=tuple(tf.sysconfig.get_link_flags()),
    )


def cache_dir() -> Path:
    """TFSWAP_CACHE_DIR, else `tfswap` in XDG_CACHE_HOME, else ~/.cache/tfswap."""
    own = os.environ.get("TFSWAP_CACHE_DIR")
    if own:
        return absolute(own)
    xdg = os.environ.get("XDG_CACHE_HOME")
    # By the specification, relative paths are ignored.
    if xdg and os.path.isabs(xdg):
        return Path(xdg) / "tfswap"
    return absolute("~/.cache/tfswap")


def absolute(folder: str) -> Path:
    """The absolute path of a folder from an environment variable. Raises OpLibraryError for an unknown home folder."""
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError as error:
        raise OpLibraryError(
            f"tfswap keeps what it builds in {folder!r}, and there is no such home folder ({error}). Set "
            "TFSWAP_CACHE_DIR to a folder that this user can write to."
        ) from error


def locate(sources: Sources, facts: TensorFlowFacts, compiler: Compiler) -> Library:
    """The library for this TensorFlow and compiler, which may not have been built yet."""
    key = _sha256("\n".join([_inputs_key(sources, facts), *compiler.command, compiler.version]).encode())[:24]
    return Library(sources, cache_dir() / f"{sources.name}-tensorflow-{facts.version}-{key}", facts.built_for)


def locate_without_compiler(sources: Sources, facts: TensorFlowFacts) -> Library | None:
    """An intact library that any compiler has built from these sources, for machines without a compiler."""
    return _built_in(cache_dir(), sources, facts)


def shipped(sources: Sources, facts: TensorFlowFacts) -> Library | None:
    """The installation's library for this TensorFlow, if it is intact."""
    return _built_in(SHIPPED_DIR, sources, facts, shipped=True)


def _built_in(folder: Path, sources: Sources, facts: TensorFlowFacts, *, shipped: bool = False) -> Library | None:
    prefix = f"{sources.name}-tensorflow-{facts.version}-"
    inputs_key = _inputs_key(sources, facts)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        for name in sorted(os.listdir(folder)):
            library = Library(sources, folder / name, facts.built_for, shipped)
            if name.startswith(prefix) and library.is_intact(inputs_key):
                return library
    return None


def ensure_built(sources: Sources, facts: TensorFlowFacts, *, rebuild: bool = False) -> Library:
    """The library, built first where it is missing or damaged (or with `rebuild`), after the libraries it links with.

    Of concurrent processes that need the same library one builds it: the others wait for the lock.

    Raises:
        OpLibraryError: no compiler, a compilation that fails, or a cache that can't be written.
    """
    try:
        compiler = find_compiler()
    except OpLibraryError as error:
        found = None if rebuild else locate_without_compiler(sources, facts)
        if found is not None:
            return found
        brought = sorted({path.name.split("-")[2] for path in SHIPPED_DIR.glob(f"{sources.name}-tensorflow-*-*")})
        if not brought or facts.version in brought:
            raise
        raise OpLibraryError(
            f"{error} This installation brings its ops compiled for TensorFlow {', '.join(brought)}, and "
            f"{facts.version} is here."
        ) from error
    library = locate(sources, facts, compiler)
    # Without the lock, so that a read-only cache works once it is filled.
    if not rebuild and library.is_intact():
        return library
    linked = [shipped(needed, facts) or ensure_built(needed, facts) for needed in sources.links_with]
    with _locked(library) as folder:
        if rebuild or not library.is_intact():
            _build(library, folder, linked, facts, compiler)
    return library


def require_place(library: Library) -> None:
    """Raise OpLibraryError where the library can't be written to the cache. Leaves no file there."""
    there = next(p for p in (library.folder, *library.folder.parents) if os.path.lexists(p))
    try:
        with trusted_folder(there) as folder:
            tempfile.TemporaryDirectory(prefix="tfswap-", dir=folder.path).cleanup()
    except UntrustedPath as error:
        raise _untrusted(library.folder, error) from error
    except OSError as error:
        raise _unwritable(library.folder, error) from error


def _build(
    library: Library, folder: TrustedFolder, linked: Sequence[Library], facts: TensorFlowFacts, compiler: Compiler
) -> None:
    name = compiler.version.splitlines()[0] if compiler.version else compiler.command[0]
    content = library.sources.content
    progress.announce(f"compiling its {content} for TensorFlow {facts.version} with {name}: once, {_DURATION}")
    start = time.monotonic()
    try:
        _clear(folder)
        # In the cache, not in /tmp: a rename needs one file system.
        with tempfile.TemporaryDirectory(prefix=_WORK, dir=folder.path) as work:
            built = _compile(library, linked, Path(work), facts, compiler)
            manifest = {
                "library_sha256": _sha256(built.read_bytes()),
                "inputs_key": _inputs_key(library.sources, facts),
                "tensorflow": facts.built_for,
                "compiler": name,
                "compile_flags": COMPILE_FLAGS,
            }
            built.chmod(READABLE)
            # The manifest is last: a library without one is not used.
            os.replace(built, library.path.name, dst_dir_fd=folder.descriptor)
            folder.write(MANIFEST_NAME, (json.dumps(manifest, indent=1) + "\n").encode())
    except OSError as error:
        raise _unwritable(library.folder, error) from error
    progress.announce(f"compiled its {content} in {time.monotonic() - start:.0f} s; kept in {library.folder}")


def _clear(folder: TrustedFolder) -> None:
    """Remove the files of builds that were killed. The caller has the lock, so no other process builds."""
    for name in os.listdir(folder.path):
        left = folder.path / name
        with contextlib.suppress(OSError):
            found = left.lstat()
            if _HALF_MANIFEST.fullmatch(name) and is_own(found):
                left.unlink()
            elif _WORK_FOLDER.fullmatch(name) and _is_work(left, found):
                shutil.rmtree(left, ignore_errors=True)


def _is_work(left: Path, found: os.stat_result) -> bool:
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and all(map(_WORK_FILE.fullmatch, os.listdir(left)))


def _compile(
    library: Library, linked: Sequence[Library], work: Path, facts: TensorFlowFacts, compiler: Compiler
) -> Path:
    """Compile all sources, concurrently, and link them. Returns the library's path in `work`.

    The compiler runs in `work` on copies of the sources: a path in an `#include` can have no quote and no newline.
    """
    used = [library.sources, *(needed.sources for needed in linked)]
    workers = min(len(os.sched_getaffinity(0)), _UNITS)
    units = _units(library.sources.folder, workers)
    if not units:
        raise OpLibraryError(
            f"tfswap's C++ sources are missing from {library.sources.folder}. The installation is incomplete: "
            "install it again, from a clone of tfswap: pip install --force-reinstall --no-deps ."
        )
    for sources in used:
        _copy_files(sources.folder, work / sources.name)
    for name, files in units.items():
        (work / f"{name}.cc").write_text("".join(f'#include "{library.sources.name}/{file}"\n' for file in files))
    stamp = json.dumps(facts.built_for)  # a JSON string of ASCII is a C string literal as well
    compile_command = [
        *compiler.command,
        *COMPILE_FLAGS,
        *_quiet_headers(facts.compile_flags),
        f"-DTFSWAP_BUILT_FOR={stamp}",
        *(f"-I{sources.name}" for sources in used),
    ]
    commands = [[*compile_command, "-c", f"{name}.cc", "-o", f"{name}.o"] for name in units]
    building = progress.task(f"compiling the {library.sources.content}", len(commands))
    with ThreadPoolExecutor(max_workers=workers) as pool, building as advance:
        for _ in pool.map(functools.partial(run_compiler, work), commands):
            advance()
    built = library.path.name
    name_flag = f"-Wl,-soname,{built}"  # the name by which libraries that link with this one find it
    inputs = [*(f"{name}.o" for name in units), *(str(needed.path) for needed in linked)]
    run_compiler(work, [*compiler.command, *LINK_FLAGS, name_flag, "-o", built, *inputs, *facts.link_flags])
    return work / built


def _copy_files(folder: Path, copy: Path) -> None:
    """Copy the files of a folder. Unlike `shutil.copytree`, it raises the first error itself, for full disks."""
    copy.mkdir()
    for file in sorted(folder.iterdir()):
        shutil.copyfile(file, copy / file.name)


def _units(folder: Path, count: int) -> dict[str, list[str]]:
    """The files of each of `count` translation units, by the unit's name; units are of about equal size."""
    files = sorted(folder.glob("*.cc"))
    parts: list[list[Path]] = [[] for _ in range(count)]
    for file in sorted(files, key=lambda file: -file.stat().st_size):
        min(parts, key=lambda part: sum(other.stat().st_size for other in part)).append(file)
    return {f"unit_{number}": [file.name for file in part] for number, part in enumerate(parts)} if files else {}


def _quiet_headers(flags: Sequence[str]) -> list[str]:
    """Flags that make TensorFlow's headers system headers, whose warnings are not shown."""
    quiet: list[str] = []
    for flag in flags:
        quiet += ["-isystem", flag[2:]] if flag.startswith("-I") else [flag]
    return quiet


def _inputs_key(sources: Sources, facts: TensorFlowFacts) -> str:
    """A hash over the library's sources and flags, without the compiler.

    Paths (-I, -L) are left out, so that two environments with the same TensorFlow share one library.
    """
    digest = hashlib.sha256()
    for file in sources.included():
        digest.update(f"{file.parent.name}/{file.name}\0{_sha256(file.read_bytes())}\n".encode())
    flags = [flag for flag in facts.compile_flags + facts.link_flags if not flag.startswith(("-I", "-L"))]
    for part in [*COMPILE_FLAGS, *LINK_FLAGS, *flags, facts.built_for, platform.machine()]:
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(library: Library) -> Iterator[TrustedFolder]:
    """The library's folder, locked against builds of other processes."""
    with contextlib.ExitStack() as opened:
        try:
            folder = opened.enter_context(trusted_folder(library.folder, create=True))
            handle = opened.enter_context(open(folder.open(LOCK_NAME, os.O_RDWR | os.O_CREAT), "a"))
        except UntrustedPath as error:
            raise _untrusted(library.folder, error) from error
        except OSError as error:
            raise _unwritable(library.folder, error) from error
        # Freed by the system when the process dies, so a crash leaves no stale lock.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting = f"waiting for another process, which compiles the {library.sources.content}"
            progress.announce(waiting)
            with progress.task(waiting):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder


def _unwritable(folder: Path, error: OSError) -> OpLibraryError:
    if error.errno in FULL:
        return full_disk(folder, str(error))
    return OpLibraryError(
        f"tfswap builds its ops into a cache and can't write to {folder} ({error}). "
        f"Set TFSWAP_CACHE_DIR to a folder that this user can write to and that has {BUILD_MB} MB free."
    )


def _untrusted(folder: Path, error: UntrustedPath) -> OpLibraryError:
    return OpLibraryError(
        f"tfswap loads no ops from the cache {folder}: {error}. Set TFSWAP_CACHE_DIR to a folder of your own that only "
        "you can write to; or, if you trust its content, give it to you or to root (chown -R) and take the right "
        "to write from others (chmod -R go-w)."
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
