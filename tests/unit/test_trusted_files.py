"""Files that another user could have written are not read, and the user's own files and folders stay as they are."""

from __future__ import annotations

import logging
import os
import stat
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest

from tfswap.compiler import plan_cache
from tfswap.compiler.plan_cache import PlanCache
from tfswap.support import trusted_files
from tfswap.support.trusted_files import UntrustedPath, trusted_folder

STRANGER = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def read(folder: Path, name: str = "file") -> bytes:
    with trusted_folder(folder) as opened:
        return opened.read(name)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "above" / "folder"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"content")
    for path in (folder, folder / "file"):
        path.chmod(0o755)
    return folder


def test_folders_that_are_made_are_private_and_others_keep_their_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with trusted_folder(shared / "a" / "b", create=True) as folder:
        folder.write("file", b"content")
        assert folder.read("file") == b"content"
        assert folder.path == shared / "a" / "b"
    assert mode(shared) == 0o1777
    assert mode(shared / "a") == mode(shared / "a" / "b") == 0o700
    assert os.listdir(shared / "a" / "b") == ["file"]


@pytest.mark.parametrize("writable", ["..", ".", "file"])
@pytest.mark.parametrize(("bits", "who"), [(0o002, "every user may"), (0o020, "the group .* may")])
def test_what_others_may_write_to_is_not_read(
    own: Path, monkeypatch: pytest.MonkeyPatch, writable: str, bits: int, who: str
) -> None:
    monkeypatch.setattr(trusted_files, "_is_own_group", lambda gid: False)
    assert read(own) == b"content"
    (own / writable).resolve().chmod(0o755 | bits)
    with pytest.raises(UntrustedPath, match=f"{who} write to .*, and"):
        read(own)


def test_a_group_of_the_user_s_own_is_the_user(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "file").chmod(0o664)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name="ann"))
    for name, members, trusted in (("ann", [], True), ("ann", ["ann"], True), ("ann", ["bob"], False), ("all", [], 0)):
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr("grp.getgrgid", lambda gid, group=group: group)
        if trusted:
            assert read(own) == b"content"
        else:
            with pytest.raises(UntrustedPath, match=f"the group {name}"):
                read(own)


def _access_list(uid: int) -> bytes:
    """A list that lets the user `uid` write, as Linux keeps it: tag, permissions and id of each entry."""
    unmapped = 2**32 - 1
    entries = (0x01, 7, unmapped), (0x02, 7, uid), (0x04, 5, unmapped), (0x10, 7, unmapped), (0x20, 5, unmapped)
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.mark.parametrize("writable", ["..", ".", "file"])
def test_users_of_an_access_control_list_are_others(own: Path, monkeypatch: pytest.MonkeyPatch, writable: str) -> None:
    monkeypatch.setattr(trusted_files, "_is_own_group", lambda gid: True)
    path = (own / writable).resolve()
    path.chmod(0o775)
    assert read(own) == b"content"
    try:
        os.setxattr(path, "system.posix_acl_access", _access_list(STRANGER))
    except OSError as error:
        pytest.skip(f"no access control lists here: {error}")
    with pytest.raises(UntrustedPath, match="access control list"):
        read(own)


@root_only
@pytest.mark.parametrize("foreign", ["..", ".", "file"])
def test_what_belongs_to_another_is_neither_read_nor_replaced(own: Path, foreign: str) -> None:
    os.chown((own / foreign).resolve(), STRANGER, STRANGER)
    with pytest.raises(UntrustedPath, match=rf"belongs to the user .*{STRANGER}"):
        read(own)
    with pytest.raises(UntrustedPath), trusted_folder(own) as folder:
        folder.write("file", b"other")
    assert (own / "file").read_bytes() == b"content"


def test_links_and_what_is_no_file_are_not_read(own: Path) -> None:
    (own / "link").symlink_to(own / "file")
    os.mkfifo(own / "pipe")
    with pytest.raises(OSError, match="link"):
        read(own, "link")
    with pytest.raises(UntrustedPath, match="no regular file"):
        read(own, "pipe")


def test_a_folder_that_is_exchanged_for_a_link_is_not_followed(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.path.realpath(own)
    own.rename(own.with_name("elsewhere"))
    own.symlink_to(own.with_name("elsewhere"))
    assert read(own) == b"content"
    monkeypatch.setattr("os.path.realpath", lambda path: real)  # as it was when it was asked for
    with pytest.raises(OSError, match="directory|link"):
        read(own)


def test_an_owner_that_a_user_namespace_does_not_know_is_taken_for_root_above(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trusted_files, "ROOT", -1)
    monkeypatch.setattr("os.geteuid", lambda: STRANGER)
    monkeypatch.setattr(trusted_files, "_is_unmapped", lambda uid: True)
    with pytest.raises(UntrustedPath, match=r"above/folder' belongs to"):  # not one of those above
        read(own)


# --- the plan cache ---------------------------------------------------------------------------------------------


def test_housekeeping_removes_its_own_entries_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_BYTES", 4 * len(plan_cache.HEAD))
    folder = tmp_path / "thesis"
    folder.mkdir()
    cache = PlanCache(folder)
    names = "results.h5", "0123abcd.json", "x.lock", "tfswap_notes.json", "tfswap_plan.json", "tfswap_a.json.bak"
    for name in names:
        (folder / name).write_bytes(b"\0" * 10_000)
        os.utime(folder / name, (1, 1))
    (folder / "tfswap_dir.json").mkdir()
    (folder / "tfswap_link.json").symlink_to(folder / "results.h5")
    half = folder / f"tfswap_half.json.{'0' * 32}.tmp"
    half.write_bytes(plan_cache.HEAD[:5] + b"")
    os.utime(half, (2, 2))
    before = {path.name for path in folder.iterdir()}
    for i, name in enumerate("bcdefgh"):
        with cache.alone(name):
            cache.write(name, "x" * len(plan_cache.HEAD))
        os.utime(folder / f"tfswap_{name}.json", (i + 3, i + 3))
    left = {path.name for path in folder.iterdir()}
    assert before - left == {half.name}
    assert "tfswap_h.json" in left
    assert "tfswap_b.json" not in left


def test_a_shared_cache_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = PlanCache(tmp_path / "plans")
    cache.write("a", "kept")
    assert cache.read("a", str) == "kept"
    cache.folder.chmod(0o777)
    with caplog.at_level(logging.WARNING, "tfswap"), cache.alone("a"):
        assert cache.read("a", str) is None
        cache.write("b", "new")
    assert [path.name for path in cache.folder.iterdir()] == ["tfswap_a.json"]
    assert len(caplog.records) == 1
    assert "every user may write to" in caplog.text
    cache.folder.chmod(0o1777)  # no user can replace another's files
    assert cache.read("a", str) == "kept"
    (cache.folder / "tfswap_a.json").chmod(0o666)
    assert cache.read("a", str) is None


@root_only
def test_an_entry_of_another_user_is_left_alone(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    cache.write("a", "planted")
    os.chown(tmp_path / "tfswap_a.json", STRANGER, STRANGER)
    assert cache.read("a", str) is None
    cache.write("a", "mine")
    assert (tmp_path / "tfswap_a.json").read_bytes().endswith(b"planted")


def test_who_waits_for_a_lock_that_is_removed_takes_the_next(tmp_path: Path) -> None:
    """The one that waits has the removed file open: another process makes a new one, and both would be alone."""
    cache, lock = PlanCache(tmp_path), tmp_path / "tfswap_a.lock"
    locked: list[int] = []
    flock = plan_cache.fcntl.flock

    def exchanged(handle: TextIO, how: int) -> None:
        flock(handle, how)
        locked.append(os.stat(handle.fileno()).st_ino)
        if len(locked) == 1:
            lock.rename(tmp_path / "removed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_cache.fcntl, "flock", exchanged)
        with cache.alone("a"):
            assert lock.stat().st_ino == locked[-1] != locked[0]
    assert not lock.exists()


def test_a_lock_that_is_not_got_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache(tmp_path)
    with cache.alone("a"):
        monkeypatch.setattr(plan_cache, "WAIT_S", 0.1)
        with cache.alone("a"):
            pass
        assert (tmp_path / "tfswap_a.lock").exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["off", "0", "no", "None", "FALSE", " false ", "n", "f", "disabled", "Disable"])
def test_words_that_switch_the_cache_off(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSWAP_PLAN_CACHE", word)
    assert PlanCache.of_environment() is None


def test_a_home_that_is_not_known_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSWAP_PLAN_CACHE", "~no_such_user/plans")
    assert PlanCache.of_environment() is None
