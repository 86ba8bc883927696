"""What test files share by name."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# How fast the machine is says nothing of a property.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")

# What a test plans must not be what another run has planned; processes of tests inherit it.
os.environ["TFSWAP_PLAN_CACHE"] = "off"


@pytest.fixture
def nothing_left_in_the_pool():
    """A step has given back its host memory when it ends, however it ends."""
    yield
    from nets import pool_in_use

    assert pool_in_use() == 0
