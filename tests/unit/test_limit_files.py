"""Limit files: what they may have, and damage; the leases of a budget that processes share."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfswap.compiler.request import check
from tfswap.errors import TfswapError
from tfswap.support.limit_file import Budget, limit_file, parse
from tfswap.support.shared_budget import Leases, Share, shares

RECORD_BYTES = 64


@pytest.mark.parametrize(
    ("content", "limit"),
    [
        (b"4GiB", "4GiB"),
        (b"  60%\n", "60%"),
        (b"4000000000\n", "4000000000"),
        (b"# by the prolog\n\nGPU:0 4GiB\ngpu:1=50%\n", {"GPU:0": "4GiB", "GPU:1": "50%"}),
        (b"budget 8GiB\n", Budget(8 << 30)),
    ],
)
def test_what_a_file_may_have(content: bytes, limit: object) -> None:
    assert parse(content) == limit


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\n", b"4000", b"-1\n", b"0%", b"four\n", b"\xff\xfe\n", b"1GiB" + b" " * 4096),
        *(b"budget 80", b"budget", b"budget 60%\n", b"4GiB\n5GiB\n", b"GPU:0 4GiB\n5GiB\n"),
    ],
)
def test_what_is_damaged_is_refused(content: bytes) -> None:
    with pytest.raises(TfswapError):
        parse(content)


def test_damage_keeps_the_last_limit_and_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "limit"
    path.write_text("GPU:0 4GiB\nGPU:1 4GiB\n")
    file = limit_file(str(path))
    both = {"GPU:0": "4GiB", "GPU:1": "4GiB"}
    with caplog.at_level(logging.WARNING, "tfswap"):
        for content in ("GPU:0 4GiB\n", "GPU:0 4GiB\n", "none\n", ""):
            path.write_text(content)
            assert file.read() == both
        path.unlink()
        assert file.read() == both
        assert len(caplog.records) == 1
        path.write_text("3GiB")
        assert file.read() == "3GiB"
        path.write_text("3")
        assert file.read() == "3GiB"
    assert len(caplog.records) == 2


def test_a_file_of_others_is_refused_and_later_keeps_the_last_limit(tmp_path: Path) -> None:
    path = tmp_path / "limit"
    path.write_text("4GiB")
    file = limit_file(str(path))
    path.chmod(0o666)
    path.write_text("1GiB")
    assert file.read() == "4GiB"
    path.chmod(0o600)
    assert file.read() == "1GiB"
    (tmp_path / "other").write_text("4GiB")
    (tmp_path / "other").chmod(0o666)
    for missing in (tmp_path / "missing", tmp_path / "other", tmp_path / "no" / "folder"):
        with pytest.raises(TfswapError, match=missing.name):
            limit_file(str(missing))


def test_a_request_has_the_file_and_is_copied_with_it(tmp_path: Path) -> None:
    (tmp_path / "limit").write_text("4GiB")
    request = check(f"file:{tmp_path}/limit", (), None, None, "optimize")
    assert request.memory_limit == "4GiB"
    for each in (pickle.loads(pickle.dumps(request)), copy.deepcopy(request)):
        assert each.limit_file is request.limit_file is limit_file(f"{tmp_path}/./limit")
    assert request.with_limit("2GiB").limit_file is None


@given(st.integers(1, 10**12), st.lists(st.integers(0, 10**12), min_size=1, max_size=8))
def test_shares_fit_the_budget_cover_the_floors_and_are_equal_otherwise(budget: int, floors: list[int]) -> None:
    found = shares(budget, floors)
    if sum(floors) > budget:
        assert found is None
        return
    assert found is not None
    assert budget - len(floors) < sum(found) <= budget
    assert all(share >= floor for share, floor in zip(found, floors, strict=True))
    above = [share for share, floor in zip(found, floors, strict=True) if share != floor]
    assert len({*above}) <= 1


def opened(path: Path) -> Leases:
    return Leases(lambda: os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def taken(leases: Leases, budget: int, floor: int = 0, release_to: int | None = None, take: bool = False) -> Share:
    share = leases.update(budget, floor_bytes=floor, release_to=release_to, take=take)
    assert share is not None
    return share


@contextlib.contextmanager
def another(path: Path, budget: int, floor: int = 0) -> Iterator[int]:
    """A process that has its share of the budget until it is killed."""
    ready, report = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(report, str(taken(opened(path), budget, floor, take=True).granted_bytes).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(report)
    try:
        yield int(os.read(ready, 64))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)


def test_a_share_is_granted_once_it_is_free_and_a_killed_process_gives_up_its_own(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    own = opened(path)
    assert taken(own, 900) == Share(900, 900, 900)
    with another(path, 900) as granted:
        assert granted == 0  # nothing is free
        assert taken(own, 900) == Share(450, 900, 900)
        assert taken(own, 900, release_to=600) == Share(450, 600, 900)  # 600 are still in use
        with another(path, 900) as third:
            assert third == 300
            assert taken(own, 900, release_to=0) == Share(300, 300, 900)
    assert taken(own, 900) == Share(900, 900, 900)


def test_a_floor_that_does_not_fit_has_no_share(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    with another(path, 900, floor=600) as granted:
        assert granted == 900
        own = opened(path)
        assert taken(own, 900) == Share(300, 0, 300)
        assert taken(own, 900, floor=301) == Share(None, 0, 300)
        own.withdraw()


def test_a_forked_child_has_no_lease_and_leaves_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    own = opened(path)
    taken(own, 900)
    child = os.fork()
    if child == 0:
        share = own.update(900, floor_bytes=0, release_to=None, take=True)
        os._exit(0 if share == Share(450, 0, 900) else 1)
    assert os.waitpid(child, 0)[1] == 0
    with another(path, 900) as granted:
        assert granted == 0
    assert taken(own, 900).granted_bytes == 900


def test_damaged_records_grant_nothing_until_they_are_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    own = opened(path)
    with another(path, 900) as granted:
        assert granted == 900
        content = path.read_bytes()
        path.write_bytes(b"\xff" * RECORD_BYTES)
        assert own.update(900, floor_bytes=0, release_to=None, take=True) is None
        path.write_bytes(content)
        assert taken(own, 900) == Share(450, 0, 900)
    path.write_bytes(b"damaged" * 100)  # of processes that have ended
    assert taken(own, 900).granted_bytes == 900
