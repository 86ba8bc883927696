"""Sizes as text: "6GiB", "60%"."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tfswap.errors import TfswapError
from tfswap.support.sizes import MAX_BYTES, check_limit, format_bytes, parse_limit


@pytest.mark.parametrize(
    ("limit", "nbytes"),
    [
        (4096, 4096),
        (np.int64(4096), 4096),
        (np.uint8(200), 200),
        ("4096", 4096),
        ("1KiB", 1024),
        ("1 kb", 1000),
        (" 1.5GiB ", 3 << 29),
        ("0.1GB", 100_000_000),
        ("9007199254740993", 9007199254740993),  # a float would lose the last digit
        (MAX_BYTES, MAX_BYTES),
    ],
)
def test_a_size_is_read_to_the_byte(limit: Any, nbytes: int) -> None:
    found = parse_limit(limit)
    assert found == nbytes
    assert type(found) is int


@pytest.mark.parametrize(("share", "nbytes"), [("60%", 600), ("33.3%", 333), ("150%", 1500), ("0.1%", 1)])
def test_a_share_is_of_the_unoptimised_peak(share: str, nbytes: int) -> None:
    assert parse_limit(share, baseline_bytes=lambda: 1000) == nbytes


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (True, "of type bool"),
        (np.True_, "of type bool"),
        (1.5, "of type float"),
        (float("nan"), "of type float"),
        (np.float32(3), "of type float32"),
        (None, "of type NoneType"),
        (b"1GiB", "of type bytes"),
        ([1], "of type list"),
        (0, "must be positive"),
        (-1, "must be positive"),
        ("0%", "must be positive"),
        ("0.4B", "must be positive"),
        ("-3GiB", "must be positive"),
        ("-5", "must be positive"),
        ("-60%", "must be positive"),
        ("--5", "not a size"),
        ("six", "not a size"),
        ("", "not a size"),
        ("1e30GiB", "not a size"),
        ("1,5GiB", "not a size"),
        ("\N{SUPERSCRIPT TWO}", "not a size"),
        ("9" * 5000, "not a size"),
        ("3 parsecs", "'parsecs' is not a unit"),
        (10**40, "more bytes than any device has"),
        (MAX_BYTES + 1, "more bytes than any device has"),
        pytest.param(1 << 100_000, "an int of 100001 bits", id="more digits than Python prints"),
        ("9999999999999TiB", "more bytes than any device has"),
        ("999999999999999999999%", "more bytes than any device has"),
    ],
)
def test_what_is_no_size_is_refused_with_an_example(limit: Any, says: str) -> None:
    with pytest.raises(TfswapError, match="memory_limit is .*6GiB") as error:
        check_limit(limit)
    assert says in str(error.value)
    assert len(str(error.value)) < 300


def test_a_share_of_nothing_known_is_refused_by_the_argument_s_name() -> None:
    with pytest.raises(TfswapError, match="host_memory_limit is '50%', a share"):
        parse_limit("50%", name="host_memory_limit")


@pytest.mark.parametrize("limit", ["50%", "abc", "0B", True])
def test_where_a_share_means_nothing_none_is_offered(limit: Any) -> None:
    with pytest.raises(TfswapError, match='size as "6GiB"') as error:
        parse_limit(limit)
    assert "share of" not in str(error.value)


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (5, 1536, 3 << 29, 1 << 42)] == ["5 B", "1.5 KiB", "1.5 GiB", "4.0 TiB"]
