"""Builds the op libraries with the user's compiler, once per TensorFlow, into a cache.

TensorFlow's C++ interface changes from release to release, so a library is compiled at first use, unless
the installation has brought one that was compiled for this very TensorFlow (release/wheels.py). There
are two, so that a step without encodings does not wait for the codecs' compilation. The cache holds one
folder per key, a hash over everything that changes the library: sources, flags, compiler version,
TensorFlow version. A folder holds the library and a manifest with the library's own hash.

A library that is linked with another names it without a folder, and finds it because load.py has
loaded it before: so there is one of it, and one host pool, in a process.

Invariant: a library is only ever returned when its bytes are those the manifest names. So a file cut
short by a full disk is built again instead of being mapped, which can kill the process (SIGBUS).

Not handled: Windows and macOS (the flags and the locking are Linux's).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tfswap import progress
from tfswap.errors import INSTALL_TENSORFLOW, OpLibraryError

log = logging.getLogger("tfswap")

SOURCE_DIR = Path(__file__).resolve().parent.parent / "ops" / "csrc"
SHIPPED_DIR = SOURCE_DIR.parent / "prebuilt"
"""Where an installation has its libraries, in folders as the cache has them."""
MANIFEST_NAME = "manifest.json"
_WORK = "build-"

# No -march=native: a cache may lie on a file system that unlike machines share.
# NDEBUG as in TensorFlow's own build, whose headers it changes.
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
"""How many compilations a library's files are put together in: reading TensorFlow's headers is most of what a file
takes, and no two files use one name. Each takes up to 1.25 GiB."""


@dataclasses.dataclass(frozen=True)
class Sources:
    """What one library is built from.

    Attributes:
        name: the library's, and its folder's in SOURCE_DIR, all of whose .cc files go into it.
        content: what it holds, in messages.
        links_with: libraries whose headers it includes and whose exported functions it calls.
    """

    name: str
    content: str
    links_with: tuple[Sources, ...] = ()

    @property
    def folder(self) -> Path:
        return SOURCE_DIR / self.name

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
    """What a build depends on of the TensorFlow it is for."""

    version: str
    git_version: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    @property
    def built_for(self) -> str:
        """What the library is stamped with, and what load.py compares."""
        return f"{self.version} {self.git_version}"


@dataclasses.dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str


@dataclasses.dataclass(frozen=True)
class Library:
    """A library in the cache, whether or not it has been built."""

    sources: Sources
    folder: Path
    built_for: str

    @property
    def path(self) -> Path:
        return self.folder / self.sources.library_name

    def is_intact(self) -> bool:
        try:
            manifest = json.loads((self.folder / MANIFEST_NAME).read_text())
            return manifest["library_sha256"] == _sha256(self.path.read_bytes())
        except (OSError, ValueError, KeyError, TypeError):
            return False


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


def find_compiler() -> Compiler:
    """The compiler that CXX names, else the first of g++, c++ and clang++ on the PATH.

    Raises:
        OpLibraryError: there is none, or it does not run.
    """
    asked = os.environ.get("CXX", "").strip()
    candidates = [tuple(shlex.split(asked))] if asked else [("g++",), ("c++",), ("clang++",)]
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        try:
            run = subprocess.run(
                [*command, "--version"], capture_output=True, text=True, check=True, env=_compiler_env()
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise OpLibraryError(
                f"tfswap builds its ops with a C++ compiler, but `{shlex.join(command)} --version` failed "
                f"({error}). Repair it, or set CXX to one that works."
            ) from error
        return Compiler(command=command, version=run.stdout.strip())
    if asked:
        raise OpLibraryError(
            f"tfswap builds its ops with the compiler that CXX names, and CXX={asked!r} is not on the PATH. "
            "Set CXX to an installed C++17 compiler, or unset it to use g++."
        )
    raise OpLibraryError(
        "tfswap builds its ops at first use and found no C++ compiler (looked for g++, c++ and clang++). "
        "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; conda: "
        "conda install -c conda-forge gxx), or set CXX to its path."
    )


def cache_dir() -> Path:
    """TFSWAP_CACHE_DIR, else `tfswap` in XDG_CACHE_HOME, else ~/.cache/tfswap."""
    own = os.environ.get("TFSWAP_CACHE_DIR")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    # The specification has relative paths ignored.
    if xdg and os.path.isabs(xdg):
        return Path(xdg) / "tfswap"
    return Path("~/.cache/tfswap").expanduser().absolute()


def locate(sources: Sources, facts: TensorFlowFacts, compiler: Compiler) -> Library:
    """Where the library for this TensorFlow and compiler is, or will be."""
    key = _sha256("\n".join([_inputs_key(sources, facts), *compiler.command, compiler.version]).encode())[:24]
    return Library(sources, cache_dir() / f"{sources.name}-tensorflow-{facts.version}-{key}", facts.built_for)


def locate_without_compiler(sources: Sources, facts: TensorFlowFacts) -> Library | None:
    """An intact library that some compiler built from these inputs, for machines that have none now."""
    return _built_in(cache_dir(), sources, facts)


def shipped(sources: Sources, facts: TensorFlowFacts) -> Library | None:
    """The library that the installation has brought for this TensorFlow, if it is intact."""
    return _built_in(SHIPPED_DIR, sources, facts)


def _built_in(folder: Path, sources: Sources, facts: TensorFlowFacts) -> Library | None:
    pattern = f"{sources.name}-tensorflow-{facts.version}-*/{MANIFEST_NAME}"
    for manifest_path in sorted(folder.glob(pattern)):
        try:
            inputs_key = json.loads(manifest_path.read_text())["inputs_key"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        library = Library(sources, manifest_path.parent, facts.built_for)
        if inputs_key == _inputs_key(sources, facts) and library.is_intact():
            return library
    return None


def ensure_built(sources: Sources, facts: TensorFlowFacts, *, rebuild: bool = False) -> Library:
    """Returns the library, building it when it is missing or damaged (or `rebuild`), after what it links with.

    Processes that need the same library at once build it one time: the others wait for the lock.

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
    # Without the lock, so that a cache that can only be read works once it is filled.
    if not rebuild and library.is_intact():
        return library
    linked = [shipped(needed, facts) or ensure_built(needed, facts) for needed in sources.links_with]
    with _locked(library):
        if rebuild or not library.is_intact():
            _build(library, linked, facts, compiler)
    return library


def require_place(library: Library) -> None:
    """Raises OpLibraryError where the cache has no room for the library, as building it would; leaves nothing there."""
    there = next(p for p in (library.folder, *library.folder.parents) if os.path.lexists(p))
    try:
        tempfile.TemporaryDirectory(prefix="tfswap-", dir=there).cleanup()
    except OSError as error:
        raise _unwritable(library.folder, error) from error


def _build(library: Library, linked: Sequence[Library], facts: TensorFlowFacts, compiler: Compiler) -> None:
    name = compiler.version.splitlines()[0] if compiler.version else compiler.command[0]
    content = library.sources.content
    log.info("tfswap: building its %s for TensorFlow %s with %s (once)", content, facts.version, name)
    start = time.monotonic()
    for left in library.folder.glob(f"{_WORK}*"):  # by a process that was killed: this one has the lock
        shutil.rmtree(left, ignore_errors=True)
    try:
        # In the cache, not in /tmp: os.replace only works within one file system.
        with tempfile.TemporaryDirectory(prefix=_WORK, dir=library.folder) as work:
            built = _compile(library, linked, Path(work), facts, compiler)
            manifest = {
                "library_sha256": _sha256(built.read_bytes()),
                "inputs_key": _inputs_key(library.sources, facts),
                "tensorflow": facts.built_for,
                "compiler": name,
                "compile_flags": COMPILE_FLAGS,
            }
            built_manifest = Path(work) / MANIFEST_NAME
            built_manifest.write_text(json.dumps(manifest, indent=1) + "\n")
            # The manifest last: until it is there, nobody takes the library.
            os.replace(built, library.path)
            os.replace(built_manifest, library.folder / MANIFEST_NAME)
    except OSError as error:
        raise _unwritable(library.folder, error) from error
    log.info("tfswap: built in %.0f s, kept in %s", time.monotonic() - start, library.folder)


def _compile(
    library: Library, linked: Sequence[Library], work: Path, facts: TensorFlowFacts, compiler: Compiler
) -> Path:
    """Compiles all sources, side by side, and links them. Returns the library's path in `work`."""
    folder = library.sources.folder
    units = _units(folder, work)
    if not units:
        raise OpLibraryError(
            f"tfswap's C++ sources are missing from {folder}. The installation is incomplete: "
            "install it anew, from a clone of tfswap: pip install --force-reinstall --no-deps ."
        )
    stamp = json.dumps(facts.built_for)  # a JSON string of ASCII is a C string literal as well
    compile_command = [
        *compiler.command,
        *COMPILE_FLAGS,
        *_quiet_headers(facts.compile_flags),
        f"-DTFSWAP_BUILT_FOR={stamp}",
        f"-DTFSWAP_SOURCE_DIR={json.dumps(str(folder))}",
        *(f"-I{included}" for included in (folder, *(needed.sources.folder for needed in linked))),
    ]
    objects = [work / f"{unit.stem}.o" for unit in units]
    commands = [
        [*compile_command, "-c", str(unit), "-o", str(object_file)]
        for unit, object_file in zip(units, objects, strict=True)
    ]
    workers = min(len(os.sched_getaffinity(0)), _UNITS)
    building = progress.task(f"building the {library.sources.content}", len(commands))
    with ThreadPoolExecutor(max_workers=workers) as pool, building as advance:
        for _ in pool.map(_run, commands):
            advance()
    built = work / library.path.name
    name_flag = f"-Wl,-soname,{built.name}"  # what a library that is linked with this one looks for
    inputs = [*objects, *(needed.path for needed in linked)]
    _run([*compiler.command, *LINK_FLAGS, name_flag, "-o", str(built), *map(str, inputs), *facts.link_flags])
    return built


def _units(folder: Path, work: Path) -> list[Path]:
    """The files that are compiled, in `work`: they include those in `folder`, and are of about one size."""
    files = sorted(folder.glob("*.cc"))
    parts: list[list[Path]] = [[] for _ in range(_UNITS)]
    for file in sorted(files, key=lambda file: -file.stat().st_size):
        min(parts, key=lambda part: sum(other.stat().st_size for other in part)).append(file)
    units = [work / f"unit_{number}.cc" for number in range(len(parts))]
    for unit, part in zip(units, parts, strict=True):
        unit.write_text("".join(f"#include {json.dumps(str(file))}\n" for file in part))
    return units if files else []


def _run(command: Sequence[str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, env=_compiler_env())
    if run.returncode == 0 and os.path.exists(command[command.index("-o") + 1]):
        return
    output = (run.stderr + run.stdout).strip()
    if run.returncode < 0 or "Killed" in output:
        remedy = "The compiler was killed, most often for lack of memory: free 1 GiB per core."
    elif "No such file or directory" in output and "tensorflow/" in output:
        remedy = "TensorFlow's headers are missing: reinstall it with pip (some packagers leave them out)."
    else:
        remedy = (
            "Set CXX to a compiler that knows C++17 (g++ 9 or newer), and use a TensorFlow that tfswap "
            "supports (2.18 to 2.21). If both are so, please report this message."
        )
    raise OpLibraryError(
        f"tfswap could not build its ops (exit status {run.returncode}).\n{remedy}\n"
        f"The command was:\n{shlex.join(command)}\nIt printed:\n{_tail(output)}"
    )


def _quiet_headers(flags: Sequence[str]) -> list[str]:
    """TensorFlow's headers as system headers: their warnings are not ours."""
    quiet: list[str] = []
    for flag in flags:
        quiet += ["-isystem", flag[2:]] if flag.startswith("-I") else [flag]
    return quiet


def _inputs_key(sources: Sources, facts: TensorFlowFacts) -> str:
    """A hash over all that goes into the library but the compiler.

    Paths (-I, -L) are left out: the same TensorFlow in two environments shares one library.
    """
    digest = hashlib.sha256()
    for file in sources.included():
        digest.update(f"{file.parent.name}/{file.name}\0{_sha256(file.read_bytes())}\n".encode())
    flags = [flag for flag in facts.compile_flags + facts.link_flags if not flag.startswith(("-I", "-L"))]
    for part in [*COMPILE_FLAGS, *LINK_FLAGS, *flags, facts.built_for, platform.machine()]:
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(library: Library) -> Iterator[None]:
    try:
        library.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # mkdir gives `mode` to the last folder only.
        if library.folder.parent.stat().st_uid == os.getuid():
            library.folder.parent.chmod(0o700)
        handle = open(library.folder / "lock", "a")  # noqa: SIM115 closed below, after the lock's use
    except OSError as error:
        raise _unwritable(library.folder, error) from error
    with handle:
        # Freed by the system when the process dies, so a crash leaves no stale lock.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting = f"another process is building the {library.sources.content}: waiting for it"
            log.info("tfswap: %s", waiting)
            with progress.task(waiting):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _unwritable(folder: Path, error: OSError) -> OpLibraryError:
    return OpLibraryError(
        f"tfswap builds its ops into a cache and can't write to {folder} ({error}). "
        "Set TFSWAP_CACHE_DIR to a folder that this user can write to and that has 10 MB free."
    )


def _compiler_env() -> dict[str, str]:
    # Messages are searched for in English above.
    return {**os.environ, "LC_ALL": "C"}


def _tail(text: str, lines: int = 30) -> str:
    return "\n".join(text.splitlines()[-lines:])


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
