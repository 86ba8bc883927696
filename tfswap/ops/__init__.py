"""tfswap's custom ops. Importing this registers them with TensorFlow, building them if needed.

That is all it takes to load a SavedModel that tfswap has rewritten:

    import tfswap.ops
    model = tf.saved_model.load(path)

Op names and `status()` without this side effect: tfswap.oplib.

Raises (at import):
    tfswap.errors.OpLibraryError: TensorFlow is missing, or the ops can't be built or loaded.
"""

from tfswap.oplib import names
from tfswap.oplib.load import OpLibraryStatus, load, status

load()

from tfswap.ops.codecs import (  # noqa: E402 needs the ops
    decode_floats,
    decode_groups,
    decode_integers,
    decode_mask,
    decode_sparse,
    encode_floats,
    encode_groups,
    encode_integers,
    encode_mask,
    encode_max_pool,
    encode_sparse,
    leaky_relu_grad_from_mask,
    max_pool_grad_from_positions,
    multiply_by_mask,
    select_by_mask,
)
from tfswap.ops.copies import await_copy, release, swap_in, swap_out  # noqa: E402 needs the ops
from tfswap.ops.runtime import (  # noqa: E402 needs the ops
    Configuration,
    SwapStats,
    arena_layout,
    closed_gate,
    configuration,
    configure,
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
    "closed_gate",
    "configuration",
    "configure",
    "decode_floats",
    "decode_groups",
    "decode_integers",
    "decode_mask",
    "decode_sparse",
    "encode_floats",
    "encode_groups",
    "encode_integers",
    "encode_mask",
    "encode_max_pool",
    "encode_sparse",
    "leaky_relu_grad_from_mask",
    "load",
    "max_pool_grad_from_positions",
    "multiply_by_mask",
    "names",
    "open_gate",
    "own_buffer",
    "release",
    "reserve",
    "reset_stats",
    "select_by_mask",
    "stats",
    "status",
    "swap_in",
    "swap_out",
]
