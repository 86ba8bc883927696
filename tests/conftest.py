"""Fixtures and options of all tests."""

from __future__ import annotations

import gc
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# How fast the machine is says nothing of a property.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")

# What a test plans must not be what another run has planned; processes of tests inherit it.
os.environ["TFSWAP_PLAN_CACHE"] = "off"

# Nor may it depend on how fast this machine is.
os.environ["TFSWAP_CALIBRATION"] = "off"


def _settings() -> dict[str, str]:
    """Those that decide what is planned and run. The command line sets the level of TensorFlow's log."""
    kinds, left_out = ("TF_", "TFSWAP_", "ONEDNN_"), "TF_CPP_MIN_LOG_LEVEL"
    return {name: value for name, value in os.environ.items() if name.startswith(kinds) and name != left_out}


SETTINGS = _settings()


@pytest.fixture(autouse=True)
def _leaves_settings():
    """TensorFlow and tfswap read settings when they need them: one that a test or an import leaves decides for all
    later tests.
    """
    yield
    found = _settings()
    for name in found.keys() - SETTINGS.keys():
        del os.environ[name]
    os.environ.update(SETTINGS)
    assert found == SETTINGS, "this test, or a module that was imported for it, changed the environment"


@pytest.fixture
def on_gpus(request):
    """Runs a program on emulated GPUs, such as the test's mark `emulated_gpu(memory=..., ...)` describes.

    Its arguments: the program, and variables of its environment. It returns what the program prints on its last line.
    """
    import emulated_gpu
    import processes

    if why := emulated_gpu.why_not():
        pytest.skip(why)
    emulated_gpu.library()  # compiled here, once, and not in each program's time
    mark = request.node.get_closest_marker("emulated_gpu")
    gpus = emulated_gpu.Gpus(**(mark.kwargs if mark else {}))

    def run(code, **env):
        return processes.on_gpus(code, gpus, **env)

    return run


class _NoTensorFlow:
    """An importer that has none."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("tensorflow", "keras"):
            raise ImportError(f"{name} is imported by a test of tests/unit that is not marked `tensorflow`")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-tensorflow", action="store_true", help="fail what imports it, as `make test-fast` does")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--without-tensorflow"):
        sys.meta_path.insert(0, _NoTensorFlow())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "unit" and not item.get_closest_marker("tensorflow"):
            item.add_marker("fast")


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # a first call collects garbage, and need not go through all that tests import


@pytest.fixture
def nothing_left_in_the_pool():
    """A step has given back its host memory when it ends, however it ends."""
    yield
    from nets import pool_in_use

    assert pool_in_use() == 0


@pytest.fixture
def fresh_copy_settings():
    """The swap ops' settings are their defaults again after the test, and no host memory is in use."""
    import swap_copies

    import tfswap.ops as ops

    gc.collect()  # variables of tests before, whose homes are host memory
    ops.reset_stats()
    yield
    ops.configure(host_memory_limit=None, copy_threads=1, bandwidth_bytes_per_s=None, latency_us=0.0)
    assert swap_copies.eventually(lambda: ops.stats().pool_in_use_bytes == 0), "a test leaked host memory"
