"""Variables in reports and refusals, and what `tfswap.keep` and `policy=` say of them."""

from __future__ import annotations

import json

import tensorflow as tf
from processes import on_arena

import tfswap
from tfswap.ir.op_traits import VARIABLE
from tfswap.ir.permits import TACTICS, TENSOR_TACTICS

WIDTH, LAYERS = 256, 5
NBYTES = 4 * WIDTH * WIDTH


@tfswap.scope()
def net():
    """Dense layers with Adam."""
    tf.keras.backend.clear_session()  # for its names
    dense = [tf.keras.layers.Dense(WIDTH) for _ in range(LAYERS)]
    model = tf.keras.Sequential([tf.keras.Input((WIDTH,)), *dense])
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    return model, optimizer


def step_of(model, optimizer, kept=()):
    """A step that marks variables."""

    def step(x):
        for variable in kept:
            tfswap.keep(variable)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    return tf.function(step)


def reported(kept=(), policy=None, limit="2560KiB"):
    """The rows of variables, by the end of their names, after a step; and the report."""
    model, optimizer = net()
    kept = [model.variables[number] for number in kept]
    step = tfswap.optimize(step_of(model, optimizer, kept), memory_limit=limit, tactics=TACTICS, policy=policy)
    step(tf.ones([32, WIDTH]))
    report = step.report()
    return {row.name.partition("/")[2]: row for row in report.variables}, report


def test_a_row_per_variable_has_its_home_its_copies_and_a_reason(tmp_path) -> None:
    folder = str(tmp_path)

    def program():
        rows, report = reported()
        model_rows = len(rows)
        home = [row for row in rows.values() if row.tactic == "state"]
        report.save(f"{folder}/page.html")
        with open(f"{folder}/page.html", encoding="utf-8") as file:
            page = file.read()
        found = json.loads(report.to_json())
        return {
            "rows": model_rows,
            "home": len(home),
            "home_bytes": sum(row.nbytes for row in home) == report.at_home_bytes,
            "copied": all(row.cost_bytes in (2 * NBYTES, 3 * NBYTES) for row in home),
            "swapped": len(report.swapped) == 0 or all(row.tactic != "state" for row in report.swapped),
            "why": sorted({row.reason.partition(",")[0] for row in home}),
            "small": rows["dense/bias"].reason,
            "text": home[0].name in str(report) and home[0].name in page,
            "explained": home[0].reason in str(report.explain(home[0].name)),
            "json": [row["tactic"] for row in found["rows"] if row["op"] == "VarHandleOp"].count("state"),
        }

    found = on_arena(program, 64)
    assert found["rows"] == 2 * LAYERS * 3 + 2
    assert 0 < found["home"] == found["json"]
    assert found["home_bytes"] and found["explained"] and found["copied"] and found["swapped"] and found["text"]
    assert found["why"] == ["at home in host memory"]
    assert "costs more to move" in found["small"]


def test_keep_and_policy_say_which_variables_stay() -> None:
    def program():
        seen = []

        def policy(facts):
            if facts.op == VARIABLE:
                seen.append(facts.name)
            if facts.name == "adam/sequential_dense_1_kernel_velocity":
                return ()
            return ("state",) if facts.op == VARIABLE else None

        free, _ = reported(limit="1MiB")
        rows, _ = reported([0], policy, limit="2MiB")
        first, slot = rows["dense/kernel"], rows["sequential_dense_1_kernel_velocity"]
        return {
            "free": [free[name].tactic for name in ("dense/kernel", "sequential_dense_1_kernel_velocity")],
            "kept": [first.tactic, first.reason],
            "policy": [slot.tactic, slot.reason],
            "others": sum(row.tactic == "state" for row in rows.values()) > LAYERS,
            "once": len(seen) == len({*seen}) == len(rows),
        }

    found = on_arena(program, 64)
    assert found["free"] == ["state", "state"]
    assert found["kept"] == ["keep", "marked with tfswap.keep"]
    assert found["policy"] == ["keep", "policy allows nothing"]
    assert found["others"] and found["once"]


def test_a_refusal_names_the_variable_that_stays_and_what_lowers_the_floor() -> None:
    def program():
        model, optimizer = net()
        kept, x = step_of(model, optimizer, [model.variables[0]]), tf.ones([32, WIDTH])
        refused = []
        for step, tactics in ((kept, TACTICS), (kept, TENSOR_TACTICS)):
            try:
                tfswap.optimize(step, memory_limit="256KiB", tactics=tactics)(x)
            except tfswap.InfeasibleMemoryLimit as error:
                refused.append([error.floor_bytes, str(error).partition("\n")[0]])
        return refused

    (floor, with_state), (higher, without) = on_arena(program, 64)
    assert floor < higher / 2
    assert "variables, such as 'sequential/dense/kernel' of 256.0 KiB (marked with tfswap.keep)" in with_state
    assert "add 'state' to tactics" in without and "add 'state'" not in with_state
