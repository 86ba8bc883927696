"""Builds the wheels of a release:

    make wheels                                       # or: python release/wheels.py dist
    make wheels VERSIONS="2.20.0 2.21.0"              # or: python release/wheels.py dist --tensorflow 2.20.0 2.21.0

The pure wheel, whose ops are compiled where they are first used, and for each TensorFlow one that has them compiled
for it: for those that are named, each in an environment that is made for it and thrown away, or for that of the Python
that runs this. Such a wheel needs no compiler where that very TensorFlow is, and is like the pure one everywhere else.
Each is installed and its ops are loaded where no compiler is found, before it is handed over.

Run it on the oldest Linux that the wheels are for: the libraries need its libc or a newer one. What is compiled does
not depend on Python: any version that all the TensorFlows have will do.

Needs g++, pip and the extra "release"; and where no TensorFlow is named, one that can be imported.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "tensorflow-cpu"
"""What is compiled against. The package for GPUs has the same headers and the same stamp."""
LOAD = """
import tfswap.ops.codecs
from tfswap.native import build, load
for library in (load.load(), load.load_codecs()):
    assert library.path.is_relative_to(build.SHIPPED_DIR), f"{library.path} is not the wheel's own"
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheels go")
    parser.add_argument("--tensorflow", nargs="*", default=(), metavar="VERSION", help="by default the one at hand")
    parser.add_argument("--into", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    if args.into:
        print(compile_into(folder))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        pure = build_pure(Path(work))
        print(shutil.copy(pure, folder), flush=True)
        for python in environments(args.tensorflow, Path(work)):
            made = add_libraries(pure, python, Path(work))
            require_loadable(made, python, Path(work))
            print(shutil.copy(made, folder), flush=True)
    return 0


def build_pure(work: Path) -> Path:
    """The wheel that the project's files make."""
    source = work / "source"  # a copy, since building leaves files next to the sources, and takes up those it finds
    shutil.copytree(ROOT / "tfswap", source / "tfswap", ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(work), str(source))
    shutil.rmtree(source)
    return next(work.glob("*.whl"))


def environments(versions: Sequence[str], work: Path) -> Iterator[str]:
    """A Python for each TensorFlow, which is there until the next is asked for."""
    if not versions:
        yield sys.executable
    for version in versions:
        folder = work / f"tensorflow-{version}"
        _run(sys.executable, "-m", "venv", str(folder))
        python = str(folder / "bin" / "python")
        _run(python, "-m", "pip", "install", "--quiet", f"{PACKAGE}=={version}")
        yield python
        shutil.rmtree(folder)


def add_libraries(pure: Path, python: str, work: Path) -> Path:
    """The wheel with libraries for the TensorFlow of `python`."""
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        _run(sys.executable, "-m", "wheel", "unpack", "--dest", scratch, str(pure))
        unpacked = next(Path(scratch).iterdir())
        version = _run(python, __file__, "--into", str(unpacked)).splitlines()[-1]
        for cached in unpacked.rglob("__pycache__"):
            shutil.rmtree(cached)
        described = next(unpacked.glob("*.dist-info")) / "WHEEL"
        text = described.read_text()
        text = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        text = text.replace("Tag: py3-none-any", f"Tag: py3-none-linux_{platform.machine()}")
        described.write_text(f"{text.rstrip()}\nBuild: 1tf{version}\n")
        made = work / f"for-{version}"
        made.mkdir()
        _run(sys.executable, "-m", "wheel", "pack", "--dest-dir", str(made), str(unpacked))
    return next(made.iterdir())


def compile_into(unpacked: Path) -> str:
    """Compile what an unpacked wheel holds, into it, for this Python's TensorFlow; the version of that."""
    sys.path.insert(0, str(unpacked))
    from tfswap.native import build

    facts = build.tensorflow_facts()
    for sources in (build.CORE, build.CODECS):
        made = build.ensure_built(sources, facts)
        shipped = build.SHIPPED_DIR / made.folder.name
        assert shipped.is_relative_to(unpacked)
        shipped.mkdir(parents=True)
        for name in (made.path.name, build.MANIFEST_NAME):
            shutil.copy(made.folder / name, shipped)
    return facts.version


def require_loadable(wheel: Path, python: str, work: Path) -> None:
    """Fail where the ops of a wheel don't load without a compiler and a cache."""
    with tempfile.TemporaryDirectory(dir=work) as site:
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, str(wheel))
        hidden = {"PATH": "", "CXX": "", "TFSWAP_CACHE_DIR": str(Path(site, "cache")), "PYTHONPATH": site}
        _run(python, "-c", LOAD, folder=site, **hidden)  # there: Python looks for modules where it is run, first


def _run(*command: str, folder: str | None = None, **environment: str) -> str:
    """What a program prints, which must succeed."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
