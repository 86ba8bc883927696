"""The names of tfswap's ops, for code that reads or writes graphs without TensorFlow."""

from __future__ import annotations

from typing import Final

NAMESPACE: Final = "Tfswap>"

# (tensor: T) -> (handle: variant); attrs T, owner: int (whose step it is), disk: bool (where it goes), and of one node
# per step step_bytes and step_limit (ints): the host memory that the step takes and may take; spill_dir (text),
# spill_bytes and spill_limit (ints): the same on disk. Starts the copy to the host, or to disk.
SWAP_OUT: Final = "Tfswap>SwapOut"

# (handle: variant) -> (); no attrs. Waits for that copy and frees the device tensor. Has no output:
# only control edges keep it in a graph.
RELEASE: Final = "Tfswap>Release"

# (handle: variant) -> (tensor: T, ticket: variant); attrs T, shape (for shape inference; default
# unknown rank). Allocates the tensor and starts the copy back.
SWAP_IN: Final = "Tfswap>SwapIn"

# (tensor: T, ticket: variant) -> (output: T); attr T. Waits for that copy; the same buffer.
AWAIT: Final = "Tfswap>Await"

# (list: variant) -> (output: variant); attr nbytes: int (of the tensor, for plans). Does SwapIn's part for the last
# handle of a tensor list, if there is one, and passes the list on.
PREFETCH: Final = "Tfswap>Prefetch"

ALL: Final = frozenset(
    {
        SWAP_OUT,
        RELEASE,
        SWAP_IN,
        AWAIT,
        PREFETCH,
    }
)

# --- kernels side by side --------------------------------------------------------------------------------

# (what the first reads..., what the second reads...) -> (what both make...); attrs Tin, Tout: their types, kernels: the
# two nodes, allocations: int (how many the first makes). Runs two of TensorFlow's kernels.
PAIR: Final = "Tfswap>Pair"

# (what the kernels read of others...) -> (what they make...); attrs Tin, Tout: their types, kernels: the nodes, and
# lists of integers. sources: of each input where it comes from; overwrites: whether it is written over; chunks: bytes;
# requests: of each kernel, by chunk and offset; kept: which outputs are read; ranks: who starts first; waits: pairs of
# kernels of which the second starts when the first has ended. Runs several of TensorFlow's kernels, each as soon as
# what it reads is there.
GROUP: Final = "Tfswap>Group"

# --- chunks of a request's own size ----------------------------------------------------------------------

# () -> (rest: variant); attr nbytes: int. Parts the chunk that such a request would be given, where it is too large.
SPLIT_CHUNK: Final = "Tfswap>SplitChunk"

# () -> (rest: variant). From then on each request gets a chunk of its own size.
EXACT_CHUNKS: Final = "Tfswap>ExactChunks"

# (rest: variant) -> (). Gives back what SPLIT_CHUNK keeps between the two, or ends what EXACT_CHUNKS has begun.
FREE_REST: Final = "Tfswap>FreeRest"

# --- codecs (docs/encodings.md) --------------------------------------------------------------------------
# `shape` is a vector of int32 or int64 (attr Tshape), in host memory on every device.

# (tensor: T) -> (mask: uint8); attrs T, predicate ("positive", "relu6"; "true" for bool).
ENCODE_MASK: Final = "Tfswap>EncodeMask"

# (mask, shape) -> (tensor: T); attrs T (bool, or numbers that are 1 and 0), Tshape.
DECODE_MASK: Final = "Tfswap>DecodeMask"

# (gradients: T, mask) -> (products: T); attr T. ReluGrad, Relu6Grad.
MULTIPLY_BY_MASK: Final = "Tfswap>MultiplyByMask"

# (gradients: T, mask) -> (backprops: T); attrs T, alpha. LeakyReluGrad.
LEAKY_RELU_GRAD_FROM_MASK: Final = "Tfswap>LeakyReluGradFromMask"

# (mask, then: T, else: T, shape) -> (output: T); attrs T, Tshape. SelectV2 of a condition.
SELECT_BY_MASK: Final = "Tfswap>SelectByMask"

# (image: T) -> (positions: uint8); attrs T and MaxPool's ksize, strides, padding, explicit_paddings.
ENCODE_MAX_POOL: Final = "Tfswap>EncodeMaxPool"

# (gradients: T, positions, shape) -> (backprops: T); attrs T, Tshape and MaxPool's. MaxPoolGrad.
MAX_POOL_GRAD_FROM_POSITIONS: Final = "Tfswap>MaxPoolGradFromPositions"

# (tensor: T) -> (encoded: U); attrs T, U, minimum: int.
ENCODE_INTEGERS: Final = "Tfswap>EncodeIntegers"

# (encoded: U) -> (tensor: T); attrs T, U, minimum: int.
DECODE_INTEGERS: Final = "Tfswap>DecodeIntegers"

# (tensor: T) -> (encoded: uint8, spill: variant); attrs T, capacity: int. `encoded` has room for `capacity`
# values that are not zero; what is more goes to host memory, which `spill` holds.
ENCODE_SPARSE: Final = "Tfswap>EncodeSparse"

# (encoded, spill, shape) -> (tensor: T); attrs T, Tshape, capacity: int.
DECODE_SPARSE: Final = "Tfswap>DecodeSparse"

# (tensor: T) -> (encoded: uint8); attrs T, format. Lossy.
ENCODE_FLOATS: Final = "Tfswap>EncodeFloats"

# (encoded, shape) -> (tensor: T); attrs T, Tshape, format.
DECODE_FLOATS: Final = "Tfswap>DecodeFloats"

# (tensor: T) -> (encoded: uint8); attrs T, seed, bits, group_size (ints). Lossy.
ENCODE_GROUPS: Final = "Tfswap>EncodeGroups"

# (encoded, shape) -> (tensor: T); attrs T, Tshape, bits, group_size.
DECODE_GROUPS: Final = "Tfswap>DecodeGroups"

# Those that make or undo an encoding: stateful, so that TensorFlow neither merges nor folds them.
CODECS: Final = frozenset(
    {
        ENCODE_MASK,
        DECODE_MASK,
        ENCODE_INTEGERS,
        DECODE_INTEGERS,
        ENCODE_MAX_POOL,
        ENCODE_SPARSE,
        DECODE_SPARSE,
        ENCODE_FLOATS,
        DECODE_FLOATS,
        ENCODE_GROUPS,
        DECODE_GROUPS,
    }
)

# Those that stand in the place of one of TensorFlow's kernels and take an encoding: pure.
FROM_ENCODED: Final = frozenset(
    {
        MULTIPLY_BY_MASK,
        LEAKY_RELU_GRAD_FROM_MASK,
        SELECT_BY_MASK,
        MAX_POOL_GRAD_FROM_POSITIONS,
    }
)

# (resource, value: T) -> (); attr T. AssignVariableOp that keeps the variable's buffer.
ASSIGN_IN_PLACE: Final = "Tfswap>AssignInPlace"

# (result: T) -> (output: T); attrs T, elements and slots (ints). Copies a result to where its caller may keep it: the
# kernel has room for so many results of so many elements.
HAND_OVER: Final = "Tfswap>HandOver"

# (tensor: T) -> (output: T); attrs T, shape (for shape inference; by default the tensor's). The same buffer. Stateful,
# so that TensorFlow computes nothing that reads it before the step runs.
DEFER: Final = "Tfswap>Defer"

# --- a step in two calls (csrc/core/outside_ops.cc) --------------------------------------------------------

# (results...) -> (gradients...); attrs T: their types, room: int (so many tensors of each result's size besides).
# Stands, while a step is planned, for what its caller does between its forward and its backward pass; no graph that
# runs has one.
OUTSIDE: Final = "Tfswap>Outside"

# (what all members are given...) -> (what all members give...); attr members. Stands, while a step is planned, for
# collectives that run concurrently (passes/prepare/collective_order.py); TensorFlow does not know it.
TOGETHER: Final = "Tfswap>Together"

# (tensor: T) -> (carrier: variant); attr T. Puts it where the other half of the step finds it.
CARRY: Final = "Tfswap>Carry"

# (carrier: variant) -> (tensor: T); attr T. Takes it out again, once.
DELIVER: Final = "Tfswap>Deliver"

# () -> (); attrs gate: int, owner: int (whose step begins here), waits: bool (whether its kernels may wait for other
# steps). Every other node of the chain waits for it.
GATE: Final = "Tfswap>Gate"

# (what the step is given...) -> (its results...); attrs Tin, Tout: their types, f, config_proto and executor_type as of
# StatefulPartitionedCall, step: int, waits: bool. Runs a planned step inside another function: what Python has for it
# by that number, or else f (csrc/core/inside_ops.cc).
INSIDE: Final = "Tfswap>Inside"

# Not an op: the type of the executors that run planned steps (csrc/core/step_executor.cc).
EXECUTOR: Final = "TFSWAP"

# Not an op: the attribute that names a node's kernel among those of its op, and what names the kernels of ours that
# TensorFlow's ops have in a planned step (csrc/core/loop_ops.cc, ordered_split_ops.cc, random_ops.cc, sum_ops.cc,
# zeros_ops.cc).
KERNEL: Final = "_kernel"
OWN_KERNEL: Final = "tfswap"

# Not an op: which results of a loop's iteration, or of a branch, are copied to buffers that lie where they would after
# any other number of iterations, or any other branch (csrc/core/relocation.h).
RELOCATED: Final = "_tfswap_relocated"

# Not an op: which input of a sum in a loop takes the place of the first one, and that one its own, by iteration of the
# loops around it, and how many iterations of each have an entry; the last holds for all that follow
# (simulator/iteration_table.py, csrc/core/sum_ops.cc).
FIRST: Final = "_tfswap_first"
FIRST_SHAPE: Final = "_tfswap_first_shape"

# Not an op: whose generator's state a random op shares, by number, and which of theirs.
STATE_OWNER: Final = "_tfswap_owner"
STATE_PLACE: Final = "_tfswap_place"

# TensorFlow's ops that have a generator's state in their kernels.
DRAWS: Final = frozenset(
    {
        "AllCandidateSampler",
        "FixedUnigramCandidateSampler",
        "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomCrop",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "ThreadUnsafeUnigramCandidateSampler",
        "TruncatedNormal",
        "UniformCandidateSampler",
    }
)

# Not an op: how the names of kernels that run again begin.
AGAIN: Final = "tfswap/again/"

# Not an op: how the names of nodes that make an encoding begin.
ENCODED: Final = "tfswap/encoded/"
