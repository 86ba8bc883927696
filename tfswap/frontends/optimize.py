"""`tfswap.optimize`: puts a `tf.function` under a memory limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from tfswap.compiler.policy import Policy
from tfswap.compiler.request import PlanOptions, Precision, check, one_of
from tfswap.compiler.rival_rewriters import HIDES
from tfswap.device import machine
from tfswap.errors import TfswapError, UnsupportedGraph
from tfswap.frontends.function import OptimizedFunction
from tfswap.ir.permits import BITS, TACTICS
from tfswap.kernels.profile import Profile
from tfswap.plan.plan import Plan
from tfswap.support.limit_file import from_environment
from tfswap.support.sizes import Limit

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
R = TypeVar("R")


class OptimizeOptions(PlanOptions, total=False):
    """What `optimize` takes besides the function and the limit, for type checkers."""

    on_exceeded: str
    limit_workspaces: bool


@overload
def optimize(
    *, memory_limit: Limit = None, **options: Unpack[OptimizeOptions]
) -> Callable[[Callable[P, R]], OptimizedFunction[P, R]]: ...
@overload
def optimize(
    function: Callable[P, R], *, memory_limit: Limit = None, **options: Unpack[OptimizeOptions]
) -> OptimizedFunction[P, R]: ...
def optimize(
    function: Any = None,
    *,
    memory_limit: Limit = None,
    tactics: Sequence[str] = TACTICS,
    host_memory_limit: int | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    mode: str = "optimize",
    on_exceeded: str = "warn",
    profile: Profile | str | os.PathLike[str] | None = None,
    precision: Precision = None,
    spill_dir: str | os.PathLike[str] | None = None,
    spill_limit: int | str | None = None,
    limit_workspaces: bool = False,
    policy: Policy | None = None,
    max_slowdown: float | None = None,
    values: str = BITS,
) -> Any:
    """Keep a training step's device memory under a limit. Use it on a `tf.function` or as its decorator.

        @tfswap.optimize(memory_limit="6GiB")
        @tf.function
        def train_step(x, y): ...

    Args:
        function: a `tf.function` or a Python function; None when used as a decorator.
        memory_limit: the most that the allocator's peak may be: bytes, a size ("6GiB"), a share of the unoptimised
            step's predicted peak ("60%"), or None for all that the device's allocator may have. Of several GPUs
            each has this limit, or its own: {"GPU:0": "6GiB", "GPU:1": "4GiB"}. "file:/run/job/limit" names a file
            that has the limit, read before each call; processes can share a budget in it.
        tactics: of ("swap", "recompute", "encode", "state"); () for an order of kernels alone, which is always chosen.
            "state" moves variables to host memory. Opt-in: "slice" runs kernels in slices, "fuse" in blocks of XLA's.
        host_memory_limit: the most host memory for swapped tensors and variables, bytes or a size; None for no limit.
        plan: a `Plan` or the path of a saved one, applied under `memory_limit`, or under its own where that is None.
        mode: "optimize", or "analyze" to change nothing and only report, also for a limit that can't be met.
        on_exceeded: "warn" or "raise" where a step's measured peak, or that of a given plan, passes the limit.
        profile: a `Profile` or the path of a saved one: measured times to plan with. By default they are modelled.
        precision: the form that tensors saved for the backward pass may be rounded to: "fp16", "bf16", "fp10", "fp8",
            "fp8_e4m3", "fp8_e5m2", "int8" or "int4", for all, or by pattern of node names, of which the first match
            holds: {"head/*": "exact", "*": "fp8"}. It changes gradients. By default none.
        spill_dir: a folder on a local disk for what is beyond `host_memory_limit`; its file ends with the process.
        spill_limit: the most that they may take there, bytes or a size.
        limit_workspaces: limit cuDNN's workspaces to what the plan leaves, for the whole process (docs/gpu_memory.md).
        max_slowdown: find the lowest peak within this multiple of the unoptimised step's predicted time, such as 1.1.
        policy: a function from a tensor's `TensorFacts` to those of `tactics` that may be used on it; it returns None
            for all, () where the tensor must stay, as with `tfswap.keep`. Called once for each tensor of a plan.
        values: "bits" for the traced step's to the bit, or "close": "slice" may then add in another order, "fuse" run.

    Returns:
        An `OptimizedFunction`, or a decorator that makes one.

    Raises:
        TfswapError: an argument is malformed. At the first call of a signature, before anything runs, also
            InfeasibleMemoryLimit, with `.floor_bytes`, and UnsupportedGraph. With `on_exceeded="raise"`, after a step
            whose peak has passed the limit.
    """
    one_of("on_exceeded", on_exceeded, ("warn", "raise"))
    request = check(
        from_environment(memory_limit) if plan is None else memory_limit,
        tactics,
        host_memory_limit,
        plan,
        mode,
        profile,
        precision,
        spill_dir,
        spill_limit,
        limit_workspaces,
        policy=policy,
        max_slowdown=max_slowdown,
        values=values,
    )

    def decorate(target: Any) -> OptimizedFunction[..., Any]:
        return OptimizedFunction(as_tf_function(target), request, on_exceeded)

    return decorate if function is None else decorate(function)


def undecorated(function: Any) -> Any:
    """As `as_tf_function`, also of a function that is optimized already: the one that it was made from."""
    return as_tf_function(function.traced if isinstance(function, OptimizedFunction) else function)


KERAS = ("keras", "tf_keras")
"""The packages of Keras 3 and of Keras 2."""


def as_tf_function(target: Any) -> Any:
    """The `tf.function` to optimise. Raises TfswapError, saying what to give, for what is none and makes none."""
    tf = machine.require_tensorflow()
    name = getattr(target, "__name__", repr(target))
    if isinstance(target, OptimizedFunction):
        raise TfswapError(f"{name} is optimized already: call tfswap.optimize on the tf.function itself")
    if isinstance(target, tf.types.experimental.ConcreteFunction):
        raise TfswapError(
            "optimize got a ConcreteFunction, one trace of a tf.function: give the tf.function itself, or the "
            "Python function, and each of its traces is optimized at its first call"
        )
    if any(b.__name__ == "Model" and b.__module__.partition(".")[0] in KERAS for b in type(target).__mro__):
        raise TfswapError(
            f"{name} is a Keras model, and a call of it does not train: to keep its fit() to a limit, call "
            "tfswap.keras.optimize(model, memory_limit=...); else give the tf.function that trains it"
        )
    if not isinstance(target, tf.types.experimental.PolymorphicFunction):
        if not callable(target) or isinstance(target, type):
            raise TfswapError(f"optimize needs a tf.function or a Python function, not {target!r}")
        target = tf.function(target)
    if getattr(target, "_jit_compile", None):
        raise UnsupportedGraph(f"{name} has jit_compile=True: {HIDES}. Remove jit_compile=True and decorate again.")
    return target
