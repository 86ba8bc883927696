"""What editors know of optimised functions: checked by pyright (`make lint`), which fails where a type is another one.

Not run. `tf.function` has no type, which pyright takes for a decorator that changes none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf

import tfswap
from tfswap import OptimizedFunction

if TYPE_CHECKING:
    from typing_extensions import assert_type

    from tfswap import OptimizedGraph, Plan, Report
    from tfswap.ops import StepStats


@tfswap.optimize(memory_limit="6GiB")
@tf.function
def decorated(x: int, *, scale: float = 1.0) -> str:
    return str(x * scale)


@tfswap.optimize
def plain(x: int) -> str:
    return str(x)


def step(x: int, y: bytes = b"") -> tuple[int, bytes]:
    return x, y


class Trainer:
    @tfswap.optimize(memory_limit="60%", tactics=("swap",))
    @tf.function(reduce_retracing=True)
    def train(self, x: int, name: str = "") -> list[int]:
        return [x]

    def evaluate(self, x: int) -> float:
        return float(x)


def called() -> None:
    assert_type(decorated(1, scale=2.0), str)
    assert_type(plain(1), str)
    assert_type(tfswap.optimize(step, memory_limit=1 << 30)(1), tuple[int, bytes])
    assert_type(tfswap.optimize(tf.function(step), memory_limit="60%").report(), Report)
    decorated("1")  # pyright: ignore[reportArgumentType]
    decorated(1, size=2.0)  # pyright: ignore[reportCallIssue]
    plain()  # pyright: ignore[reportCallIssue]


def of_methods(trainer: Trainer) -> None:
    assert_type(trainer.train(1, name="first"), list[int])
    assert_type(trainer.train.report(), Report)
    assert_type(Trainer.train(trainer, 1), list[int])
    trainer.train()  # pyright: ignore[reportCallIssue]
    trainer.train("1")  # pyright: ignore[reportArgumentType]
    evaluate = tfswap.optimize(trainer.evaluate, memory_limit="1GiB")
    assert_type(evaluate(1), float)


def members(optimized: OptimizedFunction[[int], str]) -> None:
    assert_type(optimized.report(), Report)
    assert_type(optimized.plan(), Plan)
    assert_type(optimized.stats(), StepStats)
    assert_type(decorated.report(), Report)
    assert_type(optimized.memory_limit, int | str | Mapping[str, int | str] | None)
    assert_type(optimized.experimental_get_tracing_count(), int)
    optimized.reprot()  # pyright: ignore[reportAttributeAccessIssue]


def options() -> None:
    tfswap.optimize(memory_limit=1.5)  # pyright: ignore[reportArgumentType, reportCallIssue]
    tfswap.optimize(step, memory="6GiB")  # pyright: ignore[reportCallIssue]


def of_files(folder: Path, proto: Any) -> None:
    assert_type(tfswap.optimize_graph("model", "smaller", memory_limit="60%", batch_size=64), Report)
    assert_type(tfswap.optimize_graph(folder, mode="analyze", function="trainer.step"), Report)
    assert_type(tfswap.optimize_graph(proto, feeds=["x"], fetches=["loss"], memory_limit=1 << 30), OptimizedGraph)
    assert_type(tfswap.optimize_graph(proto, signature="train", portable=True), OptimizedGraph)
    tfswap.optimize_graph("model", "smaller", limit="60%")  # pyright: ignore[reportCallIssue]
    tfswap.optimize_graph("model", "smaller", batch_size="64")  # pyright: ignore[reportCallIssue, reportArgumentType]


class Model(tf.Module):
    layers: int = 2


def of_keras(model: Model) -> None:
    assert_type(tfswap.keras.optimize(model, memory_limit="6GiB", on_exceeded="raise"), Model)
