"""tfswap's custom ops. Importing this registers them with TensorFlow, building them if needed.

That is all it takes to load a SavedModel that tfswap has rewritten:

    import tfswap.ops
    model = tf.saved_model.load(path)

The codecs are not among them: `import tfswap.ops.codecs`. Op names and `status()` without this side
effect: tfswap.oplib.

Raises (at import):
    tfswap.errors.OpLibraryError: TensorFlow is missing, or the ops can't be built or loaded.
"""

from tfswap.oplib import names
from tfswap.oplib.load import OpLibraryStatus, load, status

load()

from tfswap.ops.copies import await_copy, release, swap_in, swap_out  # noqa: E402 needs the ops
from tfswap.ops.runtime import (  # noqa: E402 needs the ops
    Configuration,
    SwapStats,
    arena_layout,
    claim_host,
    configuration,
    configure,
    drop_host,
    executed,
    forget_gate,
    l3_cache_bytes,
    new_gate,
    open_gate,
    own_buffer,
    reserve,
    reset_stats,
    stats,
)

__all__ = [
    "Configuration",
    "OpLibraryStatus",
    "SwapStats",
    "arena_layout",
    "await_copy",
    "claim_host",
    "configuration",
    "configure",
    "drop_host",
    "executed",
    "forget_gate",
    "l3_cache_bytes",
    "load",
    "names",
    "new_gate",
    "open_gate",
    "own_buffer",
    "release",
    "reserve",
    "reset_stats",
    "stats",
    "status",
    "swap_in",
    "swap_out",
]
