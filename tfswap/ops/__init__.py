"""tfswap's custom ops. Importing this registers them with TensorFlow, building them if needed.

This suffices to load a SavedModel that tfswap has rewritten:

    import tfswap.ops
    model = tf.saved_model.load(path)

The codecs are in `tfswap.ops.codecs`. The ops' names are in `tfswap.ir.custom_ops`, which registers nothing.

Raises (at import):
    tfswap.errors.OpLibraryError: TensorFlow is missing, or the ops can't be built or loaded.
"""

from tfswap.ir import custom_ops
from tfswap.native.load import OpLibraryStatus, load, status

load()

from tfswap.ops.copies import await_copy, release, swap_in, swap_out  # noqa: E402 needs the ops
from tfswap.ops.runtime import (  # noqa: E402 needs the ops
    Configuration,
    StepStats,
    SwapStats,
    arena_reader,
    configuration,
    configure,
    executed,
    forget_gate,
    forget_owner,
    forget_step,
    gate_number,
    instantiating,
    keep_states,
    l1_l2_bytes,
    l3_cache_bytes,
    limits_unchecked,
    new_gate,
    new_step,
    onednn_dtypes,
    peak_at_gate,
    register,
    reserve,
    reserve_disk,
    reset_stats,
    stats,
    step_stats,
    unregister,
    watch_gate,
)

__all__ = [
    "Configuration",
    "OpLibraryStatus",
    "StepStats",
    "SwapStats",
    "arena_reader",
    "await_copy",
    "configuration",
    "configure",
    "custom_ops",
    "executed",
    "forget_gate",
    "forget_owner",
    "forget_step",
    "gate_number",
    "instantiating",
    "keep_states",
    "l1_l2_bytes",
    "l3_cache_bytes",
    "limits_unchecked",
    "load",
    "new_gate",
    "new_step",
    "onednn_dtypes",
    "peak_at_gate",
    "register",
    "release",
    "reserve",
    "reserve_disk",
    "reset_stats",
    "stats",
    "status",
    "step_stats",
    "swap_in",
    "swap_out",
    "unregister",
    "watch_gate",
]
