"""Builds the wheels of a release:

    make wheels      # or: python release/wheels.py dist

Two of them: the pure one, whose ops are compiled where they are first used, and one that has them compiled for the
TensorFlow of the Python that runs this. The second needs no compiler where that very TensorFlow is, and is like the
first everywhere else. Run it on the oldest Linux that the wheel is for: the libraries need its libc or a newer one.

Needs TensorFlow, g++, pip and the extra "release".
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheels go")
    folder: Path = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        pure = build_pure(Path(work))
        shutil.copy(pure, folder)
        print(folder / pure.name)
        print(folder / add_libraries(pure, Path(work), folder))
    return 0


def build_pure(work: Path) -> Path:
    """The wheel that the project's files make."""
    source = work / "source"  # a copy, since building leaves files beside the sources, and takes up those it finds
    shutil.copytree(ROOT / "tfswap", source / "tfswap", ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    _python("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(work), str(source))
    shutil.rmtree(source)
    return next(work.glob("*.whl"))


def add_libraries(pure: Path, work: Path, folder: Path) -> str:
    """Writes the wheel with libraries for the TensorFlow at hand; returns its name."""
    _python("-m", "wheel", "unpack", "--dest", str(work), str(pure))
    unpacked = next(path for path in work.iterdir() if path.is_dir())
    sys.path.insert(0, str(unpacked))  # what the wheel holds is what is compiled
    from tfswap.oplib import build

    facts = build.tensorflow_facts()
    for sources in (build.CORE, build.CODECS):
        made = build.ensure_built(sources, facts)
        shipped = build.SHIPPED_DIR / made.folder.name
        assert shipped.is_relative_to(unpacked)
        shipped.mkdir(parents=True)
        for name in (made.path.name, build.MANIFEST_NAME):
            shutil.copy(made.folder / name, shipped)
    for cached in unpacked.rglob("__pycache__"):
        shutil.rmtree(cached)
    described = next(unpacked.glob("*.dist-info")) / "WHEEL"
    text = described.read_text()
    text = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    text = text.replace("Tag: py3-none-any", f"Tag: py3-none-linux_{platform.machine()}")
    described.write_text(f"{text.rstrip()}\nBuild: 1tf{facts.version}\n")
    before = set(folder.iterdir())
    _python("-m", "wheel", "pack", "--dest-dir", str(folder), str(unpacked))
    made_wheels = set(folder.glob("*.whl")) - before
    return (made_wheels or set(folder.glob(f"*1tf{facts.version}*"))).pop().name


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
