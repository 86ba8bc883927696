"""The plan cache: a step is planned once, and a cached plan keeps its limit in the present arena."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

from layered_steps import Layer, training_step
from processes import last_json, on_arena, run_forked, run_python, run_together

from tfswap.compiler import plan_cache
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.known_plans import RECALLED_NOTE
from tfswap.compiler.options import Options
from tfswap.compiler.plan_cache import PlanCache
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.ir.graph import Graph
from tfswap.ir.text import format_graph, parse_graph
from tfswap.kernels.calibration import Calibration
from tfswap.kernels.device import DeviceModel
from tfswap.plan.plan import Plan, fingerprint
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.unordered import Baseline

KINDS = ("dense", "relu", "scale", "add", "dense", "relu", "add", "dense", "scale", "relu") * 2


def step() -> Graph:
    return training_step([Layer(kind, (3 * i) // 4) for i, kind in enumerate(KINDS)], 512, 128)


class Counted(Optimizer):
    """Counts what it plans and predicts."""

    planned = predicted = 0

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        predict = self.unoptimised.predict

        def counted() -> Baseline:
            self.predicted += 1
            return predict()

        self.unoptimised.predict = counted

    def _planned(self, limit_bytes: int | None, aim: int | None) -> Plan:
        self.planned += 1
        return super()._planned(limit_bytes, aim)


@pytest.fixture
def cache(tmp_path: Path) -> PlanCache:
    return PlanCache(tmp_path / "plans")


def optimizer(cache: PlanCache | None, *, graph: Graph | None = None, **given: Any) -> Counted:
    device = given.pop("device", DeviceModel())
    snapshot = given.pop("snapshot", ArenaSnapshot())
    options = Options(**{"tactics": ("swap",), **given})
    return Counted(graph or step(), device, options, snapshot=snapshot, plan_cache=cache)


def entries(cache: PlanCache) -> list[Path]:
    return sorted(cache.folder.glob("*.json"))


def test_what_was_planned_is_not_planned_again(cache: PlanCache) -> None:
    first, again = optimizer(cache), optimizer(cache)
    plan = first.plan("60%")
    assert again.plan("60%") == plan
    assert (first.planned, first.predicted) == (1, 1)
    assert (again.planned, again.predicted) == (0, 0)
    assert RECALLED_NOTE in again.report(plan).notes
    assert RECALLED_NOTE not in first.report(plan).notes
    assert plan == optimizer(None).plan("60%")
    assert not list(cache.folder.glob("*.lock"))


@pytest.mark.parametrize(
    "other",
    [
        {"tactics": ("swap", "recompute")},
        {"device": DeviceModel(intra_op_threads=4)},
        {"host_limit_bytes": 1 << 30},
        {"solver": "vdnn_all"},
        {"keep": frozenset({"relu1:0"})},
    ],
)
def test_what_is_asked_otherwise_is_another_plan(cache: PlanCache, other: dict[str, Any]) -> None:
    limit = optimizer(cache).plan("80%").limit_bytes
    asked = optimizer(cache, **other)
    asked.plan(limit)
    assert asked.planned == 1


def test_a_plan_is_of_the_names_that_it_calls_nodes_by(cache: PlanCache) -> None:
    limit = optimizer(cache).plan("60%").limit_bytes
    graph = parse_graph(re.sub(r"\brelu1\b", "other1", format_graph(step())))
    renamed = optimizer(cache, graph=graph)
    assert renamed.fingerprint == optimizer(cache).fingerprint
    renamed.plan(limit)
    assert renamed.planned == 1


def test_another_limit_is_another_plan(cache: PlanCache) -> None:
    limit = optimizer(cache).plan("60%").limit_bytes or 0
    other = optimizer(cache)
    other.plan(limit + 1)
    assert other.planned == 1


def test_other_sources_make_other_plans(cache: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer(cache).plan("60%")
    monkeypatch.setattr(plan_cache, "_versions", lambda: "another tfswap")
    other = optimizer(cache)
    other.plan("60%")
    assert other.planned == 1


def test_other_rates_make_other_plans(cache: PlanCache) -> None:
    optimizer(cache).plan("60%")
    rates = Calibration(2.0, 2.0, 2.0, 2.0, 2.0, 1e-6)
    other = optimizer(cache, device=DeviceModel()._replace(calibration=rates))
    other.plan("60%")
    assert other.planned == 1


def test_a_plan_that_does_not_fit_here_is_made_anew(cache: PlanCache) -> None:
    plan = optimizer(cache).plan("60%")
    limit, spare = plan.limit_bytes or 0, (plan.limit_bytes or 0) - plan.planned_peak_bytes
    there = plan.persistent_bytes
    fuller = optimizer(cache, snapshot=ArenaSnapshot(there + spare + 4096))
    made = fuller.plan(limit)
    assert fuller.planned == 1
    assert made.keeps_limit
    assert made.actions != plan.actions
    last = optimizer(cache, snapshot=ArenaSnapshot(there + spare + 4096))
    assert last.plan(limit) == made
    assert last.planned == 0


def test_a_plan_that_lacks_requested_room_is_made_anew(cache: PlanCache) -> None:
    plan = optimizer(cache).plan("60%")
    roomy = optimizer(cache)
    roomy.extra_margin_bytes = (plan.limit_bytes or 0) - plan.planned_peak_bytes + 1
    assert roomy.recall(plan.limit_bytes) is None
    assert roomy.plan(plan.limit_bytes).keeps_limit
    assert roomy.planned == 1


def test_a_share_is_of_the_arena_s_free_bytes(cache: PlanCache) -> None:
    limit = optimizer(cache).plan("60%").limit_bytes or 0
    fuller = optimizer(cache, snapshot=ArenaSnapshot(1 << 30))
    assert (fuller.analysis("60%").limit_bytes or 0) > limit + (1 << 28)
    assert fuller.predicted == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", "\x00", '{"format": 1}', "other graph"])
def test_damaged_entries_are_made_anew(cache: PlanCache, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    plan = optimizer(cache).plan("60%")
    assert len(entries(cache)) == 2
    stranger = dataclasses.replace(plan, fingerprint="0" * 64).to_json()
    for entry in entries(cache):
        entry.write_bytes(plan_cache.HEAD + (stranger if damage == "other graph" else damage).encode())
    again = optimizer(cache)
    with caplog.at_level(logging.WARNING, logger="tfswap"):
        assert again.plan("60%") == plan
    assert (again.planned, again.predicted) == (1, 1)
    assert len(caplog.records) == 2
    assert all("replaced" in record.message for record in caplog.records)
    last = optimizer(cache)
    assert last.plan("60%") == plan
    assert (last.planned, last.predicted) == (0, 0)


def test_a_folder_that_can_t_be_used_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lost = PlanCache(tmp_path / "file" / "plans")
    assert optimizer(lost).plan("60%") == optimizer(None).plan("60%")


def test_refusals_are_as_ever(cache: PlanCache) -> None:
    for _ in range(2):
        with pytest.raises(InfeasibleMemoryLimit) as refused:
            optimizer(cache).plan(1)
        assert refused.value.floor_bytes == optimizer(None).floor_bytes()
    assert not entries(cache)


def test_what_was_not_used_for_longest_goes(cache: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_BYTES", 4 * (10 + len(plan_cache.HEAD)))
    for i, name in enumerate("abcd"):
        cache.write(name, "x" * 10)
        os.utime(cache.folder / f"tfswap_{name}.json", (i, i))
    cache.read("a", str)
    cache.write("e", "x" * 10)
    assert [entry.stem for entry in entries(cache)] == ["tfswap_a", "tfswap_d", "tfswap_e"]


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TFSWAP_PLAN_CACHE", str(tmp_path))
    assert PlanCache.of_environment() == PlanCache(tmp_path)
    monkeypatch.setenv("TFSWAP_PLAN_CACHE", "off")
    assert PlanCache.of_environment() is None
    monkeypatch.delenv("TFSWAP_PLAN_CACHE")
    monkeypatch.setenv("TFSWAP_CACHE_DIR", str(tmp_path))
    assert PlanCache.of_environment() == PlanCache(tmp_path / "plans")
    monkeypatch.delenv("TFSWAP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert PlanCache.of_environment() == PlanCache(tmp_path / "tfswap" / "plans")


# --- real processes -----------------------------------------------------------------------------------------


def train(sleep_s: float) -> list[Any]:
    import time

    import tensorflow as tf
    from models import settle
    from nets import Net, batch, bits

    import tfswap

    planned = []
    plan_now = Optimizer._planned

    def slow(self, *given):
        planned.append(given)
        time.sleep(sleep_s)
        return plan_now(self, *given)

    Optimizer._planned = slow
    settle()
    net = Net(20)  # with the batch they fill the arena's first region, and constants find no hole of twice their size
    step = tfswap.optimize(tf.function(net.step), memory_limit="60%", tactics=("swap",), on_exceeded="raise")
    losses = [bits(step(batch(900, seed=i))) for i in range(3)]
    tf.config.experimental.reset_memory_stats("CPU:0")
    losses.append(bits(step(batch(900, seed=3))))
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return [
        len(planned),
        RECALLED_NOTE in step.report().notes,
        step.plan().to_json(),
        peak <= step.plan().limit_bytes,
        repr(losses),
    ]


def test_a_later_process_plans_nothing(tmp_path: Path) -> None:
    runs = [on_arena(lambda: train(0), TFSWAP_PLAN_CACHE=str(tmp_path)) for _ in range(2)]
    (first, from_cache, plan, within, losses), again = runs
    assert first >= 1
    assert within
    assert not from_cache
    assert again == [0, True, plan, True, losses]


def test_of_processes_that_start_together_one_plans(tmp_path: Path) -> None:
    env = {"TFSWAP_PLAN_CACHE": str(tmp_path), "TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "512"}
    reported = [last_json(run) for run in run_together([lambda: train(2)] * 2, **env)]
    assert sorted(planned > 0 for planned, *_ in reported) == [False, True]
    assert len({tuple(rest) for _, _, *rest in reported}) == 1


def test_files_are_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    import tfswap

    monkeypatch.setenv("TFSWAP_PLAN_CACHE", str(tmp_path / "plans"))
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [512, 128], name="x")
        w = tf.compat.v1.get_variable("w", initializer=tf.zeros([128, 128]), use_resource=True)
        h = x
        for _ in range(6):
            h = tf.sin(h @ w)
        loss = tf.reduce_mean(h, name="loss")
        tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
    asked: dict[str, Any] = {"feeds": ["x"], "fetches": ["loss:0", "train"], "memory_limit": "70%"}
    first, again = (tfswap.optimize_graph(graph.as_graph_def(), **asked) for _ in range(2))
    assert again.plan == first.plan
    assert again.graph_def == first.graph_def
    assert RECALLED_NOTE in again.report.notes
    assert RECALLED_NOTE not in first.report.notes


# --- what other processes find ----------------------------------------------------------------------------------


def counted() -> tuple[list[Any], set[str]]:
    """What Grappler runs on from here on, and the names of the files of plans that are read."""
    from tfswap.compiler import grappler

    ran: list[Any] = []
    names: set[str] = set()
    run, read = grappler.run_grappler, PlanCache.read
    grappler.run_grappler = lambda *given: (ran.append(given), run(*given))[1]
    PlanCache.read = lambda self, name, parse: (names.add(name), read(self, name, parse))[1]
    return ran, names


def trace_before(times: int) -> None:
    """What it makes is named by a counter of the process."""
    import tensorflow as tf

    def traced(x):
        x = tf.while_loop(
            lambda i, x: i < 2, lambda i, x: (i + 1, tf.custom_gradient(lambda x: (x, tf.sin))(x)), [0, x]
        )[1]
        return tf.py_function(lambda x: x, [x], tf.float32)

    for _ in range(times):
        tf.function(traced).get_concrete_function(tf.zeros([]))


def optimize_steps(traced_before: int) -> list[Any]:
    import numpy as np
    import tensorflow as tf
    from nets import Net, batch

    import tfswap

    ran, names = counted()
    trace_before(traced_before)
    net, factor = Net(6), tf.random.stateless_normal([128], (1, 2))

    @tf.custom_gradient
    def passed(x):
        return tf.identity(x), lambda given: 2.0 * given

    scaled = tf.function(lambda x: x * factor)

    def checked(x):
        x = scaled(passed(x))
        tf.debugging.assert_less(tf.reduce_mean(x), factor[0] + 1e9)
        return net.step(tf.ensure_shape(tf.py_function(lambda x: x, [x], tf.float32), x.shape))

    def looped(x):
        x = tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, tf.sin(x * factor)), [0, x])[1]
        return net.step(x)

    def apart(x):  # functions outside of the graph, which capture, call, and have arguments named by the counter
        rows = tf.data.Dataset.range(3).map(lambda n: n + tf.cast(factor[0] > 9.0, tf.int64))
        total = rows.reduce(np.int64(0), lambda total, n: total + scaled(tf.cast(n, tf.float32)).shape[0] // 128)
        return net.step(x) + tf.cast(total, tf.float32)

    for function in (checked, looped, apart):
        step = tfswap.optimize(tf.function(function), memory_limit="90%", tactics=("swap",))
        step(batch(512))
        step.report()
    return [len(ran), sorted(names)]


def test_what_was_kept_is_found_by_other_processes_whatever_was_traced_there_before(tmp_path: Path) -> None:
    folder = {"TFSWAP_PLAN_CACHE": str(tmp_path)}
    ran, names = last_json(run_forked(lambda: optimize_steps(1), **folder))
    fresh = {"PYTHONHASHSEED": "4", "TF_ENABLE_ONEDNN_OPTS": "0", **folder}
    again, found = last_json(run_python(lambda: optimize_steps(4), **fresh))
    assert ran > 0 == again
    assert found  # the prediction was kept, for which Grappler is not asked then
    assert set(found) <= set(names)


def test_functions_outside_of_the_graph_are_distinguished_by_their_content() -> None:
    import tensorflow as tf

    from tfswap.compiler.process_names import contents
    from tfswap.importers.function import import_function

    def printed(factor: float, before: int) -> str:
        for _ in range(before):
            tf.function(lambda x: x).get_concrete_function(tf.TensorSpec([]))

        @tf.function
        def step(x: Any) -> Any:
            inner = tf.function(lambda x: x * factor)
            return tf.function(lambda x: inner(x) + 1.0, jit_compile=True)(x)

        graph = import_function(step.get_concrete_function(tf.TensorSpec([4])))
        return fingerprint(graph, contents(graph))

    assert printed(2.0, 0) == printed(2.0, 7) != printed(3.0, 0)


def test_the_ends_of_a_step_come_in_the_order_of_its_nodes() -> None:
    import tensorflow as tf

    from tfswap.importers.function import import_function

    variables = [tf.Variable(0.0) for _ in range(8)]

    @tf.function
    def step() -> None:
        for variable in variables:
            variable.assign_add(1.0)

    concrete = step.get_concrete_function()
    ends = concrete.graph.control_outputs
    orders = []
    for shuffled in (sorted(ends, key=lambda end: end.name), sorted(ends, key=lambda end: end.name, reverse=True)):
        concrete.graph.control_outputs = shuffled
        orders.append([target.name for target in import_function(concrete).targets])
    assert len(orders[0]) >= len(variables)
    assert orders[0] == orders[1]
