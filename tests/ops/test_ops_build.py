"""How the op library is built, cached, loaded and described, and the errors when that fails.

More than 500 lines: these tests share a compiler that takes no time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import fcntl
import functools
import itertools
import json
import os
import shlex
import shutil
import stat
import subprocess
import textwrap
from pathlib import Path

import processes
import pytest
from library_loads import (
    copies_throttle,
    encode_and_free,
    examine,
    fail_to_import,
    fail_without_tensorflow,
    import_and_swap,
    status_and_names,
    swap_after_codecs,
    with_shipped,
)
from processes import ROOT, last_json, run_python, start_python
from sanitize import ALONE

tf = pytest.importorskip("tensorflow")

import tfswap.ops as ops  # noqa: E402 needs TensorFlow
from tfswap.errors import OpLibraryError  # noqa: E402
from tfswap.ir import custom_ops  # noqa: E402
from tfswap.native import build, load  # noqa: E402

run_forked = functools.partial(processes.run_forked, loaded=False)
run_together = functools.partial(processes.run_together, loaded=False)


def script(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def quick_compiler(tmp_path):
    """A "compiler" that returns the core library of this process, and notes each link."""
    return script(
        tmp_path / "quick++",
        f"""\
        #!/bin/sh
        [ "$1" = --version ] && {{ echo "quick 1.0"; exit 0; }}
        for word; do [ "$previous" = -o ] && out=$word; previous=$word; done
        case " $* " in
          *" -shared "*) echo link >> {tmp_path}/links; cp {ops.load().path} "$out" ;;
          *) : > "$out" ;;
        esac
        """,
    )


def shipped_in(folder: Path) -> Path:
    """An installation's folder, with the library of this process."""
    library = ops.load().path
    made = folder / library.parent.name
    made.mkdir(parents=True)
    for name in (library.name, build.MANIFEST_NAME):
        shutil.copy(library.parent / name, made)
    return made


def test_a_library_that_was_shipped_needs_no_compiler_and_no_cache(tmp_path):
    made, cache, empty = shipped_in(tmp_path / "shipped"), tmp_path / "cache", tmp_path / "empty"
    empty.mkdir()
    code = with_shipped(made.parent, import_and_swap)
    found = last_json(run_forked(code, PATH=str(empty), CXX="", TFSWAP_CACHE_DIR=str(cache)))
    assert found == [1, str(made / ops.load().path.name), True]
    assert not cache.exists()


def test_without_a_compiler_the_error_names_the_tensorflow_that_ops_are_compiled_for(tmp_path):
    made, empty = shipped_in(tmp_path / "shipped"), tmp_path / "empty"
    empty.mkdir()
    made.rename(made.with_name("core-tensorflow-2.4.0-0123456789abcdef"))
    code = with_shipped(made.parent, fail_to_import)
    reported = run_forked(code, PATH=str(empty), CXX="", TFSWAP_CACHE_DIR=str(tmp_path / "cache")).stdout
    assert "found no C++ compiler" in reported
    assert "brings its ops compiled for TensorFlow 2.4.0, and " in reported


@pytest.mark.parametrize("damage", ["cut short", "not loadable"])
def test_a_shipped_library_that_can_t_be_used_is_built_instead(tmp_path, quick_compiler, damage):
    made = shipped_in(tmp_path / "shipped")
    library = made / ops.load().path.name
    library.write_bytes(library.read_bytes()[:100])
    if damage == "not loadable":  # and what was shipped, all the same
        manifest = json.loads((made / build.MANIFEST_NAME).read_text())
        manifest["library_sha256"] = build._sha256(library.read_bytes())
        (made / build.MANIFEST_NAME).write_text(json.dumps(manifest))
    code = with_shipped(made.parent, import_and_swap)
    cache = tmp_path / "cache"
    for _ in range(2):  # once for both
        copies, used, loaded = last_json(run_forked(code, CXX=str(quick_compiler), TFSWAP_CACHE_DIR=str(cache)))
        assert (copies, loaded) == (1, True)
        assert damage == "not loadable" or Path(used).is_relative_to(cache)
    assert links(tmp_path) == 1


def links(tmp_path: Path) -> int:
    log = tmp_path / "links"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_two_processes_build_once(tmp_path, quick_compiler):
    env = {"TFSWAP_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(quick_compiler)}
    runs = run_together([import_and_swap] * 2, **env)
    assert sum(run.stderr.count("tfswap: compiling its ops for TensorFlow") for run in runs) == 1
    assert links(tmp_path) == 1
    results = [last_json(run) for run in runs]
    assert results[0] == results[1]
    assert results[0][0] == 1
    folder = Path(results[0][1]).parent
    assert sorted(path.name for path in folder.iterdir()) == ["libtfswap_core.so", "lock", "manifest.json"]
    for private in (folder, tmp_path / "cache"):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700


@pytest.mark.slow  # .ci/run compiles both libraries so, which its tests use
def test_the_sources_have_no_warnings(tmp_path):
    env = {"TFSWAP_CACHE_DIR": str(tmp_path), "CXX": "g++ -Werror"}
    run = run_forked(swap_after_codecs, **env)
    assert run.stderr.count("tfswap: compiling its") == 2
    assert last_json(run)[2]


@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing", "no manifest"])
def test_a_damaged_library_is_built_again(tmp_path, quick_compiler, damage):
    env = {"TFSWAP_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(quick_compiler)}
    library = Path(last_json(run_forked(import_and_swap, **env))[1])
    assert links(tmp_path) == 1
    if damage == "truncated":
        os.truncate(library, library.stat().st_size // 2)
    elif damage == "garbage":
        library.write_bytes(b"not a library")
    elif damage == "missing":
        library.unlink()
    else:
        (library.parent / build.MANIFEST_NAME).unlink()
    assert last_json(run_forked(import_and_swap, **env))[0] == 1
    assert links(tmp_path) == 2
    run_forked(import_and_swap, **env)
    assert links(tmp_path) == 2


def test_a_library_that_does_not_load_is_built_once_more(tmp_path, quick_compiler):
    env = {"TFSWAP_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(quick_compiler)}
    library = Path(last_json(run_forked(import_and_swap, **env))[1])
    manifest_path = library.parent / build.MANIFEST_NAME
    manifest = json.loads(manifest_path.read_text())
    library.write_bytes(b"loadable somewhere else")
    manifest["library_sha256"] = build._sha256(library.read_bytes())
    manifest_path.write_text(json.dumps(manifest))
    assert last_json(run_forked(import_and_swap, **env))[0] == 1
    assert links(tmp_path) == 2


def test_a_filled_cache_needs_no_compiler(tmp_path, quick_compiler):
    env = {"TFSWAP_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(quick_compiler)}
    run_forked(import_and_swap, **env)
    shutil.rmtree(tmp_path / "bin", ignore_errors=True)
    seen = last_json(run_forked(import_and_swap, **{**env, "CXX": "", "PATH": str(tmp_path / "bin")}))
    assert seen[0] == 1
    assert links(tmp_path) == 1


def test_without_a_compiler_the_message_says_what_to_install(tmp_path):
    run = run_forked(fail_to_import, TFSWAP_CACHE_DIR=str(tmp_path), CXX="", PATH=str(tmp_path))
    assert "found no C++ compiler" in run.stdout
    assert "apt-get install g++" in run.stdout
    run = run_forked(fail_to_import, TFSWAP_CACHE_DIR=str(tmp_path), CXX="/no/such/g++")
    assert "CXX='/no/such/g++' is not on the PATH" in run.stdout


def test_a_failed_compilation_shows_the_compilers_words(tmp_path):
    failing = script(
        tmp_path / "failing++",
        """\
        #!/bin/sh
        [ "$1" = --version ] && { echo "failing 1.0"; exit 0; }
        echo "error: this can't be" >&2
        exit 3
        """,
    )
    run = run_forked(fail_to_import, TFSWAP_CACHE_DIR=str(tmp_path / "cache"), CXX=str(failing))
    assert "could not build its ops (exit status 3)" in run.stdout
    assert "error: this can't be" in run.stdout
    assert "Set CXX to a compiler with C++17" in run.stdout
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_cache_that_cant_be_written_is_named(tmp_path, quick_compiler):
    (tmp_path / "file").write_text("")
    cache = str(tmp_path / "file" / "cache")
    run = run_forked(fail_to_import, TFSWAP_CACHE_DIR=cache, CXX=str(quick_compiler))
    assert f"can't write to {cache}" in run.stdout
    assert "TFSWAP_CACHE_DIR" in run.stdout


def test_a_compiler_that_makes_nothing_is_named(tmp_path):
    run = run_forked(fail_to_import, TFSWAP_CACHE_DIR=str(tmp_path / "cache"), CXX="true")
    assert "could not build its ops (exit status 0)" in run.stdout
    assert "Set CXX to a compiler" in run.stdout


def test_who_waits_for_another_process_says_so(tmp_path, quick_compiler):
    environment = {"TFSWAP_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(quick_compiler)}
    run_forked(import_and_swap, **environment)
    (library,) = (tmp_path / "cache").glob("*/*.so")
    library.unlink()
    with open(library.parent / "lock") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        waiting = start_python(import_and_swap, **environment)
        assert waiting.stderr is not None
        messages = next(line for line in waiting.stderr if "tfswap" in line)
    rest = waiting.communicate(timeout=60)[1]
    assert "waiting for another process, which compiles the ops" in messages
    assert waiting.returncode == 0, rest


def test_what_a_killed_build_left_goes_with_the_next(tmp_path, quick_compiler):
    cache = tmp_path / "cache"
    env = {"TFSWAP_CACHE_DIR": str(cache), "CXX": str(quick_compiler)}
    library = Path(last_json(run_forked(import_and_swap, **env))[1])
    library.unlink()
    left, mine = library.parent / "build-a0b_c1d2", ("build-notes", "build-12345678", "manifest.json.bak")
    left.mkdir()
    (left / "unit_0.o").write_text("half")
    (library.parent / f"manifest.json.{'0' * 32}.tmp").write_text("half")
    for name in mine[:2]:
        (library.parent / name).mkdir()
        (library.parent / name / "thesis.tex").touch()
    (library.parent / mine[2]).touch()
    run_forked(import_and_swap, **env)
    assert sorted(p.name for p in library.parent.iterdir()) == sorted([library.name, "lock", "manifest.json", *mine])
    assert all((library.parent / name / "thesis.tex").exists() for name in mine[:2])


def test_the_doctor_knows_where_the_ops_can_t_be_built(tmp_path, quick_compiler):
    (tmp_path / "file").write_text("")
    env = {"CXX": str(quick_compiler), "TFSWAP_CACHE_DIR": str(tmp_path / "file")}
    ok, advice, all_there = last_json(run_forked(examine, **env))
    assert not ok
    assert not all_there
    assert f"can't write to {tmp_path / 'file'}" in advice[0]
    env["TFSWAP_CACHE_DIR"] = str(tmp_path / "cache")
    assert last_json(run_forked(examine, **env))[0]
    assert not (tmp_path / "cache").exists()
    run_forked(import_and_swap, **env)
    hidden = {"CXX": "", "PATH": str(tmp_path / "bin"), "TFSWAP_DISK_LATENCY_US": "none"}
    ok, advice, all_there = last_json(run_forked(examine, **{**env, **hidden}))
    assert not ok
    assert "TFSWAP_DISK_LATENCY_US='none' must be a number of microseconds" in advice[0]
    del hidden["TFSWAP_DISK_LATENCY_US"]
    ok, advice, all_there = last_json(run_forked(examine, **{**env, **hidden}))
    assert not ok
    assert not all_there
    assert advice[0].startswith("encodings: tfswap builds its ops at first use and found no C++ compiler")


def test_without_tensorflow_the_message_says_so(tmp_path):
    run = run_python(fail_without_tensorflow, TFSWAP_CACHE_DIR=str(tmp_path))
    assert "need TensorFlow" in run.stdout
    assert "pip install" in run.stdout


def test_status_and_names_build_nothing(tmp_path):
    run = run_python(status_and_names, TFSWAP_CACHE_DIR=str(tmp_path / "cache"))
    assert last_json(run) == ["Tfswap>SwapOut", False, False, ""]
    assert not (tmp_path / "cache").exists()


def test_the_codecs_are_built_apart_and_share_the_pool(tmp_path, quick_compiler):
    """Handed out in another folder than the one where they were linked, they find the core that is loaded."""
    codecs = load.load_codecs().path
    text = quick_compiler.read_text()
    handed_out = f'case "$out" in *libtfswap_codecs.so) cp {codecs} "$out" ;; *) cp {ops.load().path} "$out" ;; esac ;;'
    quick_compiler.write_text(text.replace(f'cp {ops.load().path} "$out" ;;', handed_out))
    env = {"TFSWAP_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(quick_compiler)}
    built, held, in_use, mapped = last_json(run_forked(encode_and_free, **env))
    assert built == [False, True]
    assert links(tmp_path) == 2
    assert held >= 1000 * 5
    assert in_use == 0
    assert [Path(path).name for path in mapped] == ["libtfswap_codecs.so", "libtfswap_core.so"]
    assert all(path.startswith(str(tmp_path)) for path in mapped)


def test_units_have_each_file_once():
    for sources in (build.CORE, build.CODECS):
        units = build._units(sources.folder, build._UNITS)
        assert len(units) == build._UNITS
        assert [len(files) for files in build._units(sources.folder, 1).values()] == [sum(map(len, units.values()))]
        assert sorted(itertools.chain(*units.values())) == sorted(file.name for file in sources.folder.glob("*.cc"))


def test_what_a_key_covers(tmp_path, monkeypatch):
    """A library's own files, and the headers of the one it is linked with."""
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path / "csrc")
    shutil.copytree(ROOT / "tfswap" / "ops" / "csrc", build.SOURCE_DIR)
    facts = build.tensorflow_facts()

    def changed(file: str) -> list[str]:
        both = (build.CORE, build.CODECS)
        before = [build._inputs_key(sources, facts) for sources in both]
        with open(build.SOURCE_DIR / file, "a") as opened:
            opened.write("// more\n")
        return [s.name for s, key in zip(both, before, strict=True) if build._inputs_key(s, facts) != key]

    assert changed("core/runtime.cc") == ["core"]
    assert changed("core/runtime.h") == ["core", "codecs"]
    assert changed("codecs/mask_ops.cc") == ["codecs"]
    assert changed("codecs/codec_elements.h") == ["codecs"]


def test_each_tensorflow_compiler_and_flag_has_a_library_of_its_own(monkeypatch):
    facts = build.tensorflow_facts()
    compiler = build.Compiler(command=("g++",), version="g++ 1")

    def folder(compiler=compiler, **changes):
        return build.locate(build.CORE, dataclasses.replace(facts, **changes), compiler).folder

    made = [
        folder(),
        folder(version="9.9.9"),
        folder(git_version="another"),
        folder(compile_flags=(*facts.compile_flags, "-D_GLIBCXX_USE_CXX11_ABI=0")),
        folder(link_flags=(*facts.link_flags, "-lother")),
        folder(build.Compiler(command=("clang++",), version="g++ 1")),
        folder(build.Compiler(command=("g++",), version="g++ 2")),
    ]
    assert folder(compile_flags=("-I/elsewhere", *facts.compile_flags)) == made[0]
    monkeypatch.setattr(build, "COMPILE_FLAGS", (*build.COMPILE_FLAGS, "-g"))
    made.append(folder())
    assert len(set(made)) == len(made)


def test_the_sources_are_packaged():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = ROOT / "tfswap" / "ops"
    packaged = {path for pattern in settings["tfswap.ops"] for path in package.glob(pattern)}
    assert packaged == {path for path in (package / "csrc").rglob("*") if path.is_file()}


def test_status_when_loaded():
    status = ops.status()
    assert status.loaded
    assert status.built
    assert status.error == ""
    assert status.tensorflow_version == tf.version.VERSION
    assert status.library == ops.load().path


def test_the_names_are_those_registered():
    from tensorflow.python.framework import op_def_registry

    for name in custom_ops.ALL:
        op_def = op_def_registry.get(name)
        assert op_def is not None
        assert op_def.is_stateful
    assert len(custom_ops.ALL) == 6


def test_the_environment_throttles():
    run = run_forked(
        copies_throttle,
        TFSWAP_COPY_BANDWIDTH="2.5e9",
        TFSWAP_COPY_LATENCY_US="15",
    )
    assert last_json(run) == [2.5e9, 15.0]
    run = run_forked(fail_to_import, TFSWAP_COPY_BANDWIDTH="12GB/s")
    assert "TFSWAP_COPY_BANDWIDTH='12GB/s' must be a number of bytes per second" in run.stdout


def test_the_stamp_is_compared():
    path = ops.load().path
    with pytest.raises(OpLibraryError, match=r"was built for TensorFlow .* but this is TensorFlow 1\.0"):
        load._open(build.Library(build.CORE, path.parent, built_for="1.0"))


def test_the_core_without_tensorflow(tmp_path):
    """The C++ test of pool, lanes and files; `make sanitize` runs it under the sanitizers."""
    sources = sorted((ROOT / "tests" / "ops").glob("ops_core*_test.cc"))
    sources += [build.CORE.folder / f"{name}.cc" for name in ALONE]
    program = tmp_path / "core_test"
    command = [*build.find_compiler().command, "-std=c++17", "-Wall", "-Wextra", "-Werror"]
    command += ["-I", str(build.CORE.folder), *map(str, sources), "-pthread", "-o", str(program)]
    flags = build.tensorflow_facts().link_flags
    folders = [flag.replace("-L", "-Wl,-rpath=") for flag in flags if flag.startswith("-L")]
    subprocess.run([*command, "-Wl,--no-as-needed", *flags, *folders], check=True)  # for its zstd
    run = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    assert run.stdout == "with zstd\nok\n"


# --- the user's machine -------------------------------------------------------------------------------------------

ODD = 'jos\u00e9 "o\'x" \\t\n$HOME `a` %s #;&*'
"""What a folder may be called."""


@pytest.fixture
def odd_sources(tmp_path, monkeypatch):
    """Sources of a small library at an odd path."""
    csrc = tmp_path / ODD / "csrc"
    for name, text in (
        ("core/a.h", "#define NAME TFSWAP_BUILT_FOR\n"),
        ("core/a.cc", '#include "a.h"\nextern "C" const char* tfswap_built_for() { return NAME; }\n'),
        ("codecs/b.cc", '#include "a.h"\n__asm__(".incbin \\"codecs/b.cc\\"\\n");\nextern "C" int b() { return 2; }\n'),
    ):
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).write_text(text)
    monkeypatch.setattr(build, "SOURCE_DIR", csrc)
    monkeypatch.setattr(build, "SHIPPED_DIR", tmp_path / ODD / "prebuilt")
    monkeypatch.setattr(build, "COMPILE_FLAGS", ("-O0", "-fPIC"))
    return csrc


@pytest.mark.parametrize("quoted", [True, False])
def test_any_path_builds(tmp_path, monkeypatch, odd_sources, quoted):
    """Of the installation, the cache, temporary files, TensorFlow and the compiler."""
    for name in ("cache", "tmp", "tensorflow"):
        (tmp_path / ODD / name).mkdir()
    compiler = script(tmp_path / ODD / "my g++", '#!/bin/sh\nexec g++ "$@"\n')
    monkeypatch.setenv("CXX", f"{shlex.quote(str(compiler))} -pipe" if quoted else str(compiler))
    monkeypatch.setenv("TFSWAP_CACHE_DIR", str(tmp_path / ODD / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / ODD / "tmp"))
    there = tmp_path / ODD / "tensorflow"
    facts = build.TensorFlowFacts("9", "git 'g'", (f"-I{there}",), (f"-L{there}",))
    libraries = [build.ensure_built(sources, facts) for sources in (build.CORE, build.CODECS)]
    assert all(library.is_intact() for library in libraries)
    c = ctypes.CDLL(load._path_of(libraries[0].opened(), libraries[0].path))
    c.tfswap_built_for.restype = ctypes.c_char_p
    assert c.tfswap_built_for() == b"9 git 'g'"
    assert sorted(p.name for p in libraries[1].folder.iterdir()) == ["libtfswap_codecs.so", "lock", "manifest.json"]
    monkeypatch.setenv("CXX", "/no/compiler")
    assert build.ensure_built(build.CORE, facts).path == libraries[0].path


def test_a_cache_that_others_may_write_to_is_refused_and_left_alone(tmp_path, quick_compiler):
    cache = tmp_path / "cache"
    env = {"TFSWAP_CACHE_DIR": str(cache), "CXX": str(quick_compiler)}
    library = Path(last_json(run_forked(import_and_swap, **env))[1])
    for path in (cache, library.parent, library, library.parent / "manifest.json"):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(before | stat.S_IWOTH)
        messages = run_forked(fail_to_import, **env).stdout
        assert f"loads no ops from the cache {library.parent}: every user may write to {str(path)!r}" in messages
        assert "Set TFSWAP_CACHE_DIR" in messages
        assert stat.S_IMODE(path.stat().st_mode) == before | stat.S_IWOTH
        path.chmod(before)
    assert links(tmp_path) == 1


def test_folders_that_exist_keep_their_mode(tmp_path, quick_compiler):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o1777)
    env = {"TFSWAP_CACHE_DIR": str(cache), "CXX": str(quick_compiler)}
    library = Path(last_json(run_forked(import_and_swap, **env))[1])
    assert stat.S_IMODE(cache.stat().st_mode) == 0o1777
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("manifest", ["[" * 200_000, "[]", '"text"', '{"library_sha256": []}', "\x00"])
def test_a_manifest_of_anything_is_no_manifest(tmp_path, manifest):
    library = build.Library(build.CORE, tmp_path, "x")
    library.path.write_bytes(b"x")
    (tmp_path / build.MANIFEST_NAME).write_text(manifest)
    assert not library.is_intact()


def test_a_quote_without_an_end_in_cxx_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "g++ -I'include")
    with pytest.raises(OpLibraryError, match=r"CXX=\"g\+\+ -I'include\" can't be split .*No closing quotation.*Close"):
        build.find_compiler()


def test_a_compiler_that_reads_does_not_wait_at_a_terminal(monkeypatch):
    """What CXX names need not be a compiler."""
    monkeypatch.setenv("CXX", "sh -c 'read line; echo \"read $line\"'")
    terminal, other = os.pipe()
    os.write(other, b"typed\n")
    before = os.dup(0)
    try:
        os.dup2(terminal, 0)
        assert build.find_compiler().version == "read"
    finally:
        os.dup2(before, 0)
        for opened in (before, terminal, other):
            os.close(opened)


@pytest.mark.parametrize(
    "says", ["fatal error: error writing to /tmp/x.s: No space left on device", "Disk quota exceeded"]
)
def test_a_full_disk_is_reported(tmp_path, monkeypatch, says):
    more = "code\n 18 | }\n | ^\ncompilation terminated."
    full = script(tmp_path / "full++", f'#!/bin/sh\n[ "$1" = --version ] || {{ echo "{says}\n{more}" >&2; exit 1; }}\n')
    monkeypatch.setenv("TFSWAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(full))
    with pytest.raises(OpLibraryError, match="no more can be written to disk") as reported:
        build.ensure_built(build.CORE, build.tensorflow_facts())
    assert f"the compiler says: {says}\nIt takes" in str(reported.value)
    assert f"in {tmp_path / 'cache'}" in str(reported.value)
    assert " free) and in " in str(reported.value)
    assert "set TFSWAP_CACHE_DIR and TMPDIR" in str(reported.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_of_our_own_files_is_reported(tmp_path, monkeypatch, quick_compiler, number):
    def full(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setenv("TFSWAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(quick_compiler))
    monkeypatch.setattr(build.shutil, "copyfile", full)
    with pytest.raises(OpLibraryError, match=f"no more can be written to disk.*{os.strerror(number)}"):
        build.ensure_built(build.CORE, build.tensorflow_facts())
    assert not list((tmp_path / "cache").rglob("build-*"))
