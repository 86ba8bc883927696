"""Ops with any wrong arguments return or raise. Accesses out of bounds are for `make sanitize`."""

from __future__ import annotations

import os

import pytest
from processes import last_json, run_forked

pytest.importorskip("tensorflow")

CALLS = int(os.environ.get("TFSWAP_FUZZ_CALLS", "250"))


def test_wrong_arguments_are_refused():
    """In a process of its own: what a crash says last is the call that made it."""
    done, registered = last_json(
        run_forked(f"import json, fuzz_ops as f; print(json.dumps([f.main(seed=3, calls={CALLS}), f.registered()]))")
    )
    assert done["calls"] >= CALLS
    assert set(done["ops"]) == set(registered)
    # A third of all calls are right, or wrong in nothing that matters.
    assert 0.2 < done["refused"] / done["calls"] < 0.8
