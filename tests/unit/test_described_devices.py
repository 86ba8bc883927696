"""Machines with several devices, by name and as lists."""

from __future__ import annotations

import pytest

from tfswap.errors import TfswapError
from tfswap.kernels.hardware import SYSTEMS, described, described_devices


def test_a_list_has_a_device_for_each_name_which_copy_by_way_of_the_host():
    assert described_devices("A100") == [described("a100")]
    found = described_devices("a100, H100")
    assert [each.name for each in found] == ["a100", "h100"]
    assert [each.rates.peer_bytes_per_s for each in found] == [0, 0]


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_machine_has_its_devices_and_a_link_faster_than_the_hosts(name: str):
    found = described_devices(name)
    assert len(found) == 8 and len(set(found)) == 1
    assert found[0].rates.peer_bytes_per_s > found[0].rates.out_bytes_per_s
    some = described_devices(f"{name.upper()}:2")
    assert [each.rates for each in some] == [each.rates for each in found[:2]]
    assert described_devices(f"{name}:1")[0].rates.peer_bytes_per_s == 0  # to whom?


@pytest.mark.parametrize("names", ["", "abacus", "a100,", "a100,abacus", "this,a100", "dgx-a100:0", "dgx-a100:9"])
def test_other_names_are_refused(names: str):
    with pytest.raises(TfswapError, match="no device is called|has 8 GPUs, so give 1 to 8"):
        described_devices(names)


@pytest.mark.parametrize("number", ["x", "-1", "\N{SUPERSCRIPT TWO}"])
def test_a_number_that_is_none_is_refused(number: str):
    with pytest.raises(TfswapError, match="give 1 to 8"):
        described_devices(f"dgx-a100:{number}")


def test_a_list_has_an_end():
    with pytest.raises(TfswapError, match="65 devices"):
        described_devices(",".join(["a100"] * 65))
