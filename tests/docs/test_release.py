"""A release's wheels: libraries compiled beforehand are used, and each wheel names its TensorFlow."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import ROOT

tf = pytest.importorskip("tensorflow")
pytest.importorskip("wheel")

import tfswap  # noqa: E402 needs TensorFlow
from tfswap.native import load  # noqa: E402

SPEC = importlib.util.spec_from_file_location("wheels", ROOT / "release" / "wheels.py")
assert SPEC is not None and SPEC.loader is not None
wheels = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(wheels)

NAME = f"tfswap-{tfswap.__version__}"


def pure_wheel(folder: Path) -> Path:
    """As pip makes it of the sources, which takes a network."""
    source = folder / NAME
    shutil.copytree(ROOT / "tfswap", source / "tfswap", ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    described = source / f"{NAME}.dist-info"
    described.mkdir()
    (described / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tfswap\nVersion: {tfswap.__version__}\n")
    subprocess.run([sys.executable, "-m", "wheel", "pack", "--dest-dir", str(folder), str(source)], check=True)
    return next(folder.glob("*.whl"))


def test_a_wheel_has_the_libraries_for_one_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "quick++"
    compiler.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/sh
            [ "$1" = --version ] && {{ echo "quick 1.0"; exit 0; }}
            for word; do [ "$previous" = -o ] && out=$word; previous=$word; done
            case "$out" in
              *libtfswap_core.so) cp {load.load().path} "$out" ;;
              *libtfswap_codecs.so) cp {load.load_codecs().path} "$out" ;;
              *) : > "$out" ;;
            esac
            """
        )
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TFSWAP_CACHE_DIR", str(tmp_path / "cache"))
    made = wheels.add_libraries(pure_wheel(tmp_path), sys.executable, tmp_path)
    assert made.name.startswith(f"{NAME}-1tf{tf.version.VERSION}-py3-none-linux_")
    wheels.require_loadable(made, sys.executable, tmp_path)


def test_the_pure_wheel_is_built_of_all_that_the_project_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The licence among it. Building takes a network, so its inputs are checked."""
    found: list[str] = []

    def instead(*command: str) -> str:
        found.extend(path.name for path in Path(command[-1]).iterdir())
        (tmp_path / "made.whl").touch()
        return ""

    monkeypatch.setattr(wheels, "_run", instead)
    wheels.build_pure(tmp_path)
    named = re.findall(r'^(?:readme|license-files) = \[?"([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {*named, "LICENSE"} <= {*found}


def test_the_source_distribution_has_the_whole_project() -> None:
    """Its tests need more than the package; setuptools takes up that by itself, and what MANIFEST.in names."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no clone")
    named = {word for line in (ROOT / "MANIFEST.in").read_text().splitlines() for word in line.split()[1:]}
    packaged = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "tfswap"}
    assert {path.partition("/")[0] for path in listed.stdout.splitlines()} - packaged - named == set()
