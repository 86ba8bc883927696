"""`policy=`: its facts, its valid answers, and that an answer holds for every tactic and file."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
import test_body_plan
import test_encode_in_bodies
import test_loop_recompute
import test_loop_swap
import test_packings
from layered_steps import Layer, training_step
from processes import on_arena

import tfswap
from tfswap.compiler import unoptimised
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.compiler.plan_cache import PlanCache
from tfswap.compiler.request import as_rules
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, TfswapError
from tfswap.ir.permits import TENSOR_TACTICS as TACTICS
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.prepare import unroll_loops
from tfswap.passes.prepare.common_subexpressions import merge_equal_nodes

CPU = DeviceModel("cpu", False, 2, 2)
LAYERS = [Layer(kind, 3 * i // 4) for i, kind in enumerate(("dense", "relu", "scale", "add", "dense", "relu") * 3)]
HERE = Path(__file__)


def optimizer(graph: Any = None, **options: Any) -> Optimizer:
    return Optimizer(graph or training_step(LAYERS, 512, 128), CPU, Options(**options))


def without(name: str, *tactics: str) -> Any:
    """A policy that forbids these for one tensor."""
    return lambda facts: [t for t in TACTICS if t not in tactics] if facts.name == name else None


@pytest.fixture
def as_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts name no functions, without which there is no GraphDef to ask TensorFlow's optimizers about. Their loops
    stay loops, however few their iterations are.
    """
    monkeypatch.setattr(unoptimised, "as_executed", lambda graph, device, held: graph)
    monkeypatch.setattr(unroll_loops, "MOST_TRIPS", -1)


# --- a traced step ----------------------------------------------------------------------------------------


def step() -> Any:
    weights = [tf.Variable(tf.random.stateless_normal([256, 256], seed=(i, 1)) * 0.06) for i in range(6)]

    @tf.function
    def train_step(x):
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = x + tf.nn.relu(h @ w)
            loss = tf.reduce_mean(h * h)
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    return train_step


def batch(rows: int = 4096) -> Any:
    return tf.random.stateless_normal([rows, 256], seed=(1, 2))


@pytest.mark.parametrize(("tactic", "limit"), [("swap", "70%"), ("recompute", "70%"), ("encode", "75%")])
def test_a_tactic_is_not_used_where_it_is_forbidden(tactic: str, limit: str) -> None:
    def used(policy: Any) -> dict[str, str]:
        optimized = tfswap.optimize(step(), memory_limit=limit, tactics=(tactic,), policy=policy)
        optimized(batch())
        report = optimized.report()
        assert report.keeps_limit
        return {row.name: f"{row.tactic}: {row.reason}" for row in report.rows}

    free = used(None)
    name = next(name for name, reported in free.items() if reported.startswith(f"{tactic}: "))
    restricted = used(without(name, tactic))
    others = " and ".join(repr(t) for t in TACTICS if t != tactic)
    assert restricted[name].startswith(f"keep: policy allows only {others}")
    assert any(reported.startswith(f"{tactic}: ") for reported in restricted.values())


def test_no_tactic_is_as_with_keep() -> None:
    names = "Relu_1:0", "Relu_2:0"
    optimized = tfswap.optimize(step(), memory_limit="60%", policy=lambda facts: () if facts.name in names else None)
    optimized(batch())
    reported = {row.name: row for row in optimized.report().rows}
    assert {(reported[name].tactic, reported[name].reason) for name in names} == {("keep", "policy allows nothing")}
    assert optimized.report().explain(names[0]).reason == "policy allows nothing"
    assert any(row.tactic != "keep" for row in reported.values())


def test_what_it_is_given_once_of_each_tensor() -> None:
    reported: list[tfswap.TensorFacts] = []

    def policy(facts: tfswap.TensorFacts) -> None:
        reported.append(facts)

    tfswap.optimize(step(), memory_limit="60%", policy=policy)(batch())
    names = Counter(facts.name for facts in reported)
    assert set(names.values()) == {1}
    relu = next(facts for facts in reported if facts.name == "Relu_2:0")
    assert (relu.op, relu.shape, relu.dtype, relu.nbytes) == ("Relu", (4096, 256), "float32", 4096 * 256 * 4)
    line = 1 + HERE.read_text(encoding="utf-8").splitlines().index("                h = x + tf.nn.relu(h @ w)")
    assert relu.line == f"{HERE}:{line}"
    ops = {facts.op for facts in reported}
    assert {"Relu", "ReluGrad", "MatMul"} <= ops
    assert ops.isdisjoint({"Placeholder", "ReadVariableOp", "Const", "Identity", "Reshape", "AssignSubVariableOp"})
    with pytest.raises(AttributeError):
        relu.nbytes = 0  # pyright: ignore[reportAttributeAccessIssue] frozen


def kept(make: Callable[[], Any], rows: int, limit: str, tactics: dict[str, tuple[str, ...]]) -> list[Any]:
    """What a step's report has of each tensor, and which the policy was called for. Values and limit are checked.

    Args:
        tactics: what is allowed, by op.
    """
    memory, x, named = tf.config.experimental, batch(rows), []

    def policy(facts):
        named.append(facts.name)
        return tactics.get(facts.op)

    def bits(function):
        return [function(x).numpy().tobytes().hex() for _ in range(3)]

    plain = bits(make())
    memory.reset_memory_stats("CPU:0")
    optimized = tfswap.optimize(make(), memory_limit=limit, policy=policy)
    assert bits(optimized) == plain
    assert memory.get_memory_info("CPU:0")["peak"] <= optimized.plan().limit_bytes
    return [[(row.op, row.tactic, row.reason) for row in optimized.report().rows], named]


def test_values_and_limit_are_kept() -> None:
    policy = {"Relu": ("recompute",), "AddV2": ("swap",)}
    rows, _ = on_arena(lambda: kept(step, 4096, "60%", policy))
    assert {(op, tactic) for op, tactic, _ in rows if op in policy} == {
        ("Relu", "keep"),
        ("AddV2", "swap"),
        ("AddV2", "keep"),
    }


def scan() -> Any:
    w = tf.Variable(tf.random.stateless_normal([256, 256], seed=(1, 1)) * 0.06)

    @tf.function
    def train_step(x):
        with tf.GradientTape() as tape:
            _, h = tf.while_loop(lambda i, _: i < 8, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, x], maximum_iterations=8)
            loss = tf.reduce_mean(h * h)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    return train_step


@pytest.mark.parametrize(
    ("allowed", "limit", "reported"),
    [
        ("swap", "70%", "swap: saved for the backward pass, and swapped inside of the body"),
        ("encode", "100%", "keep: saved for the backward pass; policy allows only 'encode'"),
    ],
)
def test_a_loop_follows_the_policy_of_the_tensors_in_its_body(allowed: str, limit: str, reported: str) -> None:
    policy = {"Tanh": (allowed,)}
    rows, asked = on_arena(lambda: kept(scan, 2048, limit, policy))
    assert any(name.startswith("while[1]/") and name.endswith("Tanh:0") for name in asked)
    assert reported in {f"{tactic}: {reason}" for op, tactic, reason in rows if op == "list"}


# --- bodies -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_traced")
def test_what_a_loop_saves_is_swapped_if_what_is_pushed_may_be() -> None:
    graph = parse_graph(test_loop_swap.TEXT)
    (pushed,) = {
        push.graph: push.pushed.name
        for a in Optimizer(graph, CPU).search.variants.accumulators.values()
        for push in a.pushes
    }.values()
    free = optimizer(graph, tactics=("swap",))
    plan = free.plan(free.floor_bytes())
    assert plan.accumulators
    body = next(name for name, part in graph.named_bodies().items() if pushed.partition(":")[0] in part)
    named: list[str] = []

    def policy(facts: tfswap.TensorFacts) -> Any:
        named.append(facts.name)
        return ("encode",) if facts.name == f"{body}/{pushed}" else None

    bound = optimizer(graph, tactics=("swap",), policy=policy)
    assert f"{body}/{pushed}" in named
    assert bound.plan(bound.floor_bytes()).accumulators == ()
    assert bound.floor_bytes() > free.floor_bytes()
    with pytest.raises(InvalidModel, match=r"swaps what loops save .*policy allows only 'encode'"):
        bound.adopt(plan, None)


@pytest.mark.usefixtures("as_traced")
def test_a_loop_makes_nothing_again_by_kernels_that_may_not_run_again() -> None:
    graph = parse_graph(test_loop_recompute.TEXT)
    free = optimizer(graph, tactics=("recompute",))
    both = free.search.alternatives.recomputed(0, free.costs, swap=False)[-1]
    assert both.recomputed == ("sums", "tanhs")
    (body,) = (name for name, part in graph.named_bodies().items() if "shifted" in part)
    bound = optimizer(graph, tactics=("recompute",), policy=without(f"{body}/shifted:0", "recompute"))
    # `tanhs` can still be made of `sums`, if that is saved.
    assert {r.recomputed for r in bound.search.alternatives.recomputed(0, bound.costs, swap=False)} == {("tanhs",)}
    with pytest.raises(InvalidModel, match=r"recomputes 'shifted:0' in place of saving 'sums'"):
        bound.search.variants[both]
    # What may be recomputed and not swapped is not swapped where it is recomputed either.
    carried = optimizer(graph, policy=without(f"{body}/tanh:0", "swap"))
    made = carried.search.variants[both].graph
    permits = {t.name: permit for part in made.all_bodies() for t, permit in part.permits.items()}
    assert {name for name, permit in permits.items() if not permit.allows("swap")} == {
        "tanh:0",
        "tfswap/tanh/again:0",
    }


@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("tactic", ["swap", "recompute"])
def test_what_waits_inside_of_a_body(tactic: str) -> None:
    graph = parse_graph(test_body_plan.text())
    free = optimizer(graph, tactics=(tactic,))
    plan = free.plan(free.floor_bytes())

    def moved(inside: Any) -> set[str]:
        again = {f"{name}:0" for name, count in Counter(inside.order).items() if count > 1}
        return again | {a.tensor for a in inside.evictions}

    (inside,) = plan.inside
    name = sorted(moved(inside))[1]
    bound = optimizer(graph, tactics=(tactic,), policy=without(f"{inside.body}/{name}", tactic))
    (bound_inside,) = bound.plan(bound.floor_bytes()).inside
    assert name not in moved(bound_inside)
    assert moved(bound_inside)
    with pytest.raises(InvalidModel, match=rf"{name}.*policy allows only"):
        bound.adopt(plan, None)


@pytest.mark.usefixtures("as_traced")
def test_what_a_loop_saves_is_encoded_if_what_is_pushed_may_be() -> None:
    graph = parse_graph(test_encode_in_bodies.SAVED)
    kernel = "back[1]/grad"
    accumulator = optimizer(graph).search.variants.accumulators["saved"]
    (push,) = accumulator.pushes
    body = next(name for name, part in graph.named_bodies().items() if push.node.name in part)
    assert optimizer(graph).search.alternatives._worth_inside(0, 0) == (kernel,)
    bound = optimizer(graph, policy=without(f"{body}/{push.pushed.name}", "encode"))
    assert bound.search.alternatives._worth_inside(0, 0) == ()
    with pytest.raises(InvalidModel, match="encodes what loops save in 'saved'"):
        bound.search.variants[bound.search.variants.base._replace(encoded=(kernel,))]


# --- plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tactic", ["swap", "recompute"])
def test_a_plan_that_does_what_is_forbidden_is_refused(tactic: str) -> None:
    free = optimizer(tactics=(tactic,))
    plan = free.plan(free.floor_bytes())
    again = [f"{name}:0" for name, count in Counter(plan.order).items() if count > 1]
    name = again[0] if tactic == "recompute" else plan.evictions[0].tensor
    with pytest.raises(InvalidModel, match=rf"{name}' ?.*must not be .policy allows only .*Plan again"):
        optimizer(tactics=(tactic,), policy=without(name, tactic)).adopt(plan, None)
    optimizer(tactics=(tactic,), policy=without(name)).adopt(plan, None)
    if tactic == "swap":
        with pytest.raises(InvalidModel, match=rf"moves '{name}', which must stay .policy allows nothing"):
            optimizer(tactics=(tactic,), policy=without(name, *TACTICS)).adopt(plan, None)


def test_intermediate_results_are_recomputed_too() -> None:
    """A tensor that may not be recomputed is not made for another one either."""
    free = optimizer(tactics=("recompute",))
    plan = free.plan(free.floor_bytes())
    again = [name for name, count in Counter(plan.order).items() if count > 1]
    for name in again:
        bound = optimizer(tactics=("recompute",), policy=without(f"{name}:0", "recompute"))
        assert Counter(bound.plan(bound.floor_bytes()).order)[name] == 1


def test_with_all_tactics_those_that_are_left_are_used() -> None:
    """Swapped where nothing may be recomputed, recomputed where nothing may be swapped."""
    for allowed, moved, not_moved in (("swap", "evictions", "again"), ("recompute", "again", "evictions")):
        made = optimizer(tactics=("swap", "recompute"), policy=lambda _, allowed=allowed: [allowed])
        plan = made.plan(made.floor_bytes())
        again = [name for name, count in Counter(plan.order).items() if count > 1]
        done = {"evictions": plan.evictions, "again": again}
        assert done[moved]
        assert not done[not_moved]


def test_nothing_is_rounded_or_encoded_that_may_not_be() -> None:
    asked = {"precision": as_rules("fp16")}
    free = optimizer(**asked)
    plan = free.plan(free.floor_bytes())
    name = plan.reduced[0].tensor
    bound = optimizer(**asked, policy=without(name, "encode"))
    assert name not in {r.tensor for r in bound.plan(bound.floor_bytes()).reduced}
    with pytest.raises(InvalidModel, match=rf"keeps '{name}' in a smaller form"):
        bound.adopt(plan, None)
    masks = [Layer(kind, i) for i, kind in enumerate(("dense", "relu") * 6)]
    exact = optimizer(training_step(masks, 512, 128), tactics=("encode",))
    plan = exact.plan(exact.floor_bytes())
    assert plan.encoded
    tensor = exact.variant_of(plan).encodings[0].tensor.name
    bound = optimizer(training_step(masks, 512, 128), tactics=("encode",), policy=without(tensor, "encode"))
    found = bound.plan(bound.floor_bytes())
    assert tensor not in {e.tensor.name for e in bound.variant_of(found).encodings}
    with pytest.raises(InvalidModel, match=rf"encoding in place of '{tensor}'"):
        bound.adopt(plan, None)


def test_nothing_waits_in_a_smaller_form_that_may_not_be() -> None:
    free, bound = (
        test_packings.optimizer_of(tactics=("encode",), policy=policy) for policy in (None, without("at:0", "encode"))
    )
    plan = test_packings.floor_plan(free)
    assert [p.tensor for p in plan.packed] == ["at:0"]
    assert test_packings.floor_plan(bound).packed == ()
    with pytest.raises(InvalidModel, match="keeps 'at:0' in a smaller form, which must not be"):
        bound.rewrite(plan)


def test_an_encoding_goes_where_its_tensor_may_go() -> None:
    free = optimizer()
    encoded = free.search._encoded
    assert encoded is not None
    tensor = free.search.variants[encoded].encodings[0].tensor.name
    bound = optimizer(policy=without(tensor, "swap", "recompute"))
    flow = bound.search.variants[encoded].flow
    smaller = [v for v, value in enumerate(flow.values) if value.tensor.node.op.startswith("Tfswap>Encode")]
    held = [v for v in smaller if flow.values[v].tensor.node.inputs[0].name == tensor]
    assert held
    assert all((v in held) is not flow.may(v, "swap") for v in smaller)


def test_a_tensor_that_stands_for_two_may_do_what_both_may() -> None:
    graph = parse_graph(
        "%x = Placeholder() -> float32[8]\n%a = Tanh(%x) -> float32[8]\n%b = Tanh(%x) -> float32[8]\n"
        "%c = AddV2(%a, %b) -> float32[8]\nfeeds %x\nfetches %c\n"
    )
    made = optimizer(policy=without("a:0"), graph=graph).settled
    assert not made.permits
    made = optimizer(policy=lambda facts: {"a:0": ["swap", "encode"], "b:0": ["encode"]}.get(facts.name), graph=graph)
    assert {t.name: set(p.tactics) for t, p in made.settled.permits.items()} == {"a:0": {"encode"}}
    assert merge_equal_nodes(graph.copy(), Target(DeviceModel())) == 1


def test_a_policy_is_part_of_a_plan_s_name_and_not_its_source(tmp_path: Path) -> None:
    def name(policy: Any) -> str:
        made = Optimizer(training_step(LAYERS, 512, 128), CPU, Options(policy=policy), plan_cache=PlanCache(tmp_path))
        assert made._known._stored is not None
        return made._known._stored._name(1, False)

    forbid = without("relu1:0", "swap")
    assert name(forbid) == name(without("relu1:0", "swap"))
    assert len({name(None), name(forbid), name(without("relu1:0", "encode")), name(without("relu5:0", "swap"))}) == 4
    assert name(lambda _: TACTICS) == name(None)


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("swap", "policy returned 'swap', of type str, for"),
        (("swap", "page"), r"policy returned \('swap', 'page'\), of type tuple, for '.*:0': it may return None"),
        (True, "policy returned True, of type bool"),
        ({"swap": False}, "of type dict"),
        ([["swap"]], "of type list, for .* of 'swap', 'recompute', 'encode'"),
    ],
)
def test_what_is_no_answer_is_refused(answer: Any, says: str) -> None:
    with pytest.raises(TfswapError, match=says):
        optimizer(policy=lambda _: answer)


def test_what_a_policy_raises_passes_on() -> None:
    with pytest.raises(ZeroDivisionError):
        optimizer(policy=lambda facts: 1 / 0)


@pytest.mark.parametrize("given", ["swap", ("swap",), 3])
def test_a_policy_is_a_callable(given: Any) -> None:
    with pytest.raises(TfswapError, match="policy is .*give a function from a tensor's facts"):
        tfswap.optimize(step(), policy=given)


def test_baselines_take_none() -> None:
    with pytest.raises(TfswapError, match="solver='meng' takes no policy"):
        Options(tactics=("swap",), solver="meng", policy=lambda _: None)


def test_a_refused_limit_says_that_a_policy_forbids_something() -> None:
    for policy, says in (
        (None, "its largest kernels need"),
        (lambda _: (), "it holds at the same time with tactics=.* and policy"),
    ):
        made = optimizer(policy=policy)
        with pytest.raises(InfeasibleMemoryLimit, match=says) as refused:
            made.plan(made.floor_bytes() - 1)
        assert ("let policy allow more" in str(refused.value)) is (policy is not None)


# --- entry points -----------------------------------------------------------------------------------------


def _no_relu(facts: tfswap.TensorFacts) -> Any:
    return () if facts.name.endswith("Relu:0") or facts.op == "Relu" else None  # Keras' are one kernel with a product


def test_keras_takes_one() -> None:
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Dense(256, "relu") for _ in range(6)])
    model.compile("sgd", "mse")
    tfswap.keras.optimize(model, memory_limit="90%", policy=_no_relu)
    model.train_on_batch(batch(), batch())
    rows = [row for row in tfswap.keras.report(model).rows if row.name.endswith("Relu:0")]
    assert rows
    assert {(row.tactic, row.reason) for row in rows} == {("keep", "policy allows nothing")}


def test_optimize_graph_takes_one(tmp_path: Path) -> None:
    module = tf.Module()
    module.train_step = made = step()
    made(batch())
    module.held = made.get_concrete_function(batch()).graph.variables
    tf.saved_model.save(module, str(tmp_path / "model"))
    lines: set[Any] = set()

    def policy(facts: tfswap.TensorFacts) -> Any:
        lines.add(facts.line)
        return _no_relu(facts)

    report = tfswap.optimize_graph(tmp_path / "model", memory_limit="90%", mode="analyze", policy=policy)
    rows = [row for row in report.rows if row.op == "Relu"]
    assert rows
    assert {row.tactic for row in rows} == {"keep"}
    assert lines == {None}


def test_simulate_takes_one() -> None:
    floors = [tfswap.simulate(step(), batch(), limits=2, policy=p).floor_bytes for p in (None, _no_relu)]
    assert floors[0] < floors[1]


def test_a_copy_has_it_too() -> None:
    assert pickle.loads(pickle.dumps(Options(policy=_no_relu))).policy is _no_relu


def test_what_a_loop_is_given_and_saves_is_asked_about_too() -> None:
    """An iteration's argument, saved for the backward loop, is made by nothing in the body."""
    weight = tf.Variable(tf.random.stateless_normal([64, 64], seed=(1, 1)) * 0.1)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            h = tf.while_loop(
                lambda i, h: i < 12, lambda i, h: (i + 1, tf.tanh(h @ weight)), [0, x], maximum_iterations=12
            )[1]
            loss = tf.reduce_mean(h * h)
        return tape.gradient(loss, weight)

    x = tf.random.stateless_normal([1024, 64], seed=(1, 2))
    free = tfswap.optimize(step, memory_limit="80%", tactics=("swap",))
    free(x)
    assert free.report().swapped
    with pytest.raises(tfswap.InfeasibleMemoryLimit):
        tfswap.optimize(step, memory_limit="80%", tactics=("swap",), policy=lambda tensor: ())(x)
