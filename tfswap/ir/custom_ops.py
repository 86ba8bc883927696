"""The names of tfswap's ops, for code that reads or writes graphs without TensorFlow."""

from __future__ import annotations

from typing import Final

NAMESPACE: Final = "Tfswap>"

# (tensor: T) -> (handle: variant); attrs T, owner: int (the step's number), disk: bool (copies to disk). One node of a
# step also has step_bytes and step_limit (ints): the host memory that the step takes and may take; and spill_dir
# (text), spill_bytes and spill_limit (ints): the same on disk. For a copy in another device's memory: lent_block (int),
# LEND_BLOCK's number, and lent_place (int), bytes from its start. Starts the copy to the host, disk, or that device.
SWAP_OUT: Final = "Tfswap>SwapOut"

# (handle: variant) -> (); no attrs. Waits for that copy and frees the device tensor. It has no output, so only control
# edges keep it in a graph.
RELEASE: Final = "Tfswap>Release"

# (handle: variant) -> (tensor: T, ticket: variant); attrs T, shape (for shape inference, by default of unknown rank).
# Allocates the tensor and starts the copy back.
SWAP_IN: Final = "Tfswap>SwapIn"

# (resource) -> (tensor: dtype, ticket: variant); attrs as of READ_HOME. Allocates the tensor and starts the copy of a
# variable at home on the host.
LOAD_HOME: Final = "Tfswap>LoadHome"

STARTED: Final = frozenset((SWAP_IN, LOAD_HOME))
"""The ops whose first output may be read only through an Await."""

# (tensor: T, ticket: variant) -> (output: T); attr T. Waits for that copy; the same buffer.
AWAIT: Final = "Tfswap>Await"

# (list: variant) -> (output: variant); attr nbytes: int (of the tensor, for plans). If the tensor list has elements,
# starts the copy back of its last one, as SwapIn does. Passes the list on.
PREFETCH: Final = "Tfswap>Prefetch"

# () -> (); attrs number: int, nbytes: int. Allocates memory in its device's arena, which another device's SwapOuts with
# that number use.
LEND_BLOCK: Final = "Tfswap>LendBlock"

ALL: Final = frozenset(
    {
        SWAP_OUT,
        RELEASE,
        SWAP_IN,
        LOAD_HOME,
        AWAIT,
        PREFETCH,
    }
)

# --- concurrent kernels ----------------------------------------------------------------------------------

# (inputs of the first..., inputs of the second...) -> (outputs of both...); attrs Tin, Tout: their types, kernels: the
# two nodes, allocations: int (the number of the first kernel's requests). Runs two of TensorFlow's kernels.
PAIR: Final = "Tfswap>Pair"

# (inputs from other kernels...) -> (outputs of all...); attrs Tin, Tout: their types, kernels: the nodes, and lists of
# integers. sources: the source of each input; overwrites: whether an input is written over; chunks: sizes in bytes;
# requests: the chunk and offset of each kernel's requests; kept: whether an output is read by others; ranks: the order
# of starts; waits: pairs of kernels, of which the second starts when the first has ended. Runs several of TensorFlow's
# kernels, each as soon as its inputs are ready.
GROUP: Final = "Tfswap>Group"

# --- chunks of a request's own size ----------------------------------------------------------------------

# () -> (rest: variant); attr nbytes: int. Splits the chunk that a request of nbytes would get, where it is larger, and
# holds the rest.
SPLIT_CHUNK: Final = "Tfswap>SplitChunk"

# () -> (rest: variant). From then on each request gets a chunk of its own size.
EXACT_CHUNKS: Final = "Tfswap>ExactChunks"

# (rest: variant) -> (). Frees the rest that SPLIT_CHUNK holds, or ends the effect of EXACT_CHUNKS.
FREE_REST: Final = "Tfswap>FreeRest"

# --- codecs (docs/encodings.md) --------------------------------------------------------------------------
# `shape` is a vector of int32 or int64 (attr Tshape), in host memory on every device.

# (tensor: T) -> (mask: uint8); attrs T, predicate ("positive", "relu6"; "true" for bool).
ENCODE_MASK: Final = "Tfswap>EncodeMask"

# (mask, shape) -> (tensor: T); attrs T (bool, or a numeric type for 1 and 0), Tshape.
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

# (tensor: T) -> (encoded: uint8, spill: variant); attrs T, capacity: int. `encoded` has room for `capacity` nonzero
# values. `spill` holds the others in host memory.
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

# The ops that encode and decode: stateful, so that TensorFlow neither merges nor folds them.
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

# The ops that replace one of TensorFlow's kernels and read an encoding: pure.
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

# (resource) -> (value: dtype); attrs dtype, shape (for shape inference), begin and rows (ints; 0 and -1 for all).
# Copies a variable at home on the host, or some of its rows, to a new tensor on the device.
READ_HOME: Final = "Tfswap>ReadHome"

# (value: T, before: N * variant) -> (stored: variant); attrs T, N (0 or 1), begin and rows (ints; 0 and -1 for all).
# Starts the copy of a variable's new value to a new buffer in host memory, or of a slice of it: to row `begin` of a
# buffer of `rows` rows, a new one or that of the STORE_HOME `before`.
STORE_HOME: Final = "Tfswap>StoreHome"

# (value: T, stored: variant) -> (); attr T. Waits for that copy.
AWAIT_STORE: Final = "Tfswap>AwaitStore"

# (tensor: T) -> (output: T); attrs T, begin and rows (ints). Some rows of a tensor, in its buffer.
ROWS: Final = "Tfswap>Rows"

# (slice: T, before: N * T) -> (output: T); attrs T, N (0 or 1), begin and rows (ints). Copies a slice to row `begin` of
# a tensor of `rows` rows: a new one, or `before`, in its buffer.
STORE_ROWS: Final = "Tfswap>StoreRows"

# (slice: T, before: N * T) -> (sums: T); attrs T, N (0 or 1), begin, rows and blocks (ints), unrolled (bool). Adds the
# rows of a slice, which begins at row `begin` of `rows`, to `blocks` sums of rows: new ones, or `before`, in place.
ADD_ROWS: Final = "Tfswap>AddRows"

# (sums: T) -> (sum: T); attrs T, divisor (int). Adds up the sums of ADD_ROWS, in order, and divides the result.
ADD_BLOCKS: Final = "Tfswap>AddBlocks"

# (images: T) -> (columns: T); attrs T, window, strides, dilations, padding and sizes (lists of ints, by axis of an
# image), begin and rows (ints). What a filter reads at `rows` positions, from `begin` on of those of all images; each a
# row.
COLUMNS: Final = "Tfswap>Columns"

# (images: T, gradients: T, before: N * T) -> (sum: T, state: T); attrs T, N (0 to 2), those of COLUMNS but for rows,
# which are all rows, shard, last_shard (lists of 4 ints), chunk (int) and closed (bool). Adds the products of patches
# with gradients to a sum, in the order of TensorFlow's kernel: a filter's gradient.
ADD_PRODUCTS: Final = "Tfswap>AddProducts"

# (filter: T, gradients: T) -> (images: T); attrs T, window, strides, dilations, padding and sizes, as of COLUMNS, image
# (list of ints) and chunk (int). A convolution's gradient with respect to its images.
IMAGE_GRADIENT: Final = "Tfswap>ImageGradient"

# (resource, value: T, stored: variant) -> (); attr T. Waits for that copy, and gives the variable that buffer.
COMMIT_HOME: Final = "Tfswap>CommitHome"

# (resource) -> (); attrs host: bool, limit: int, 0 for none. Moves a variable to its home on the host. Fails until once
# no more than `limit` bytes are in the arena.
MOVE_HOME: Final = "Tfswap>MoveHome"

# (result: T) -> (output: T); attrs T, elements and slots (ints). Copies a small result to one of the result slots that
# the kernel holds, for the caller to keep.
HAND_OVER: Final = "Tfswap>HandOver"

# (tensor: T) -> (output: T); attrs T, shape (for shape inference; by default the tensor's). The same buffer. Stateful,
# so that TensorFlow does not fold its readers.
DEFER: Final = "Tfswap>Defer"

# (tensor: T) -> (output: T); attr T. Copies a tensor of the host to the GPU.
TO_DEVICE: Final = "Tfswap>ToDevice"

# (tensor: T) -> (output: T); attrs T, pooled: bool (into the pool of host memory, whose limit counts it). One node of a
# step also has owner, step_bytes and step_limit, as of SWAP_OUT. Copies a tensor of the GPU to the host.
TO_HOST: Final = "Tfswap>ToHost"

# () -> (signal: int32). A number in host memory, which nodes of other devices wait for.
SIGNAL: Final = "Tfswap>Signal"

# () -> (output: dtype); attrs dtype (string) and value. A constant of text, which a GPU's step reads on the host.
TEXT: Final = "Tfswap>Text"

# (terms: N * T, decisions: Tdecisions...) -> (sum: T); attrs N, T, Tdecisions (bool: of an If, int32: of a Case), FIRST
# and FIRST_SHAPE, which after the loops have an entry for each branch of each decision. AddN as tfswap's kernel adds.
SUM: Final = "Tfswap>Sum"

# --- parts of a step on several devices (csrc/core/channel_ops.cc, passes/device_parts.py) -----------------

# (tensor: T) -> (); attrs T, channel (string). Passes a tensor in host memory to another device. Without a channel it
# represents the other devices while one part is planned, and no graph that runs has it.
SEND: Final = "Tfswap>Send"

# () -> (tensor: T); attrs T, shape, channel. Gives the tensor that Send passes.
RECEIVE: Final = "Tfswap>Receive"

# --- a step in two calls (csrc/core/outside_ops.cc) --------------------------------------------------------

# (results...) -> (gradients...); attrs T: their types, room: int (the number of further tensors of each result's size).
# Represents, while a step is planned, the caller's work between the forward and the backward pass. No graph that runs
# has one.
OUTSIDE: Final = "Tfswap>Outside"

# (inputs of all members...) -> (outputs of all members...); attr members. Represents, while a step is planned,
# collectives that run concurrently (passes/prepare/collective_order.py). It is no registered op.
TOGETHER: Final = "Tfswap>Together"

# (tensor: T) -> (carrier: variant); attr T. Holds the tensor for a Deliver in the step's other function.
CARRY: Final = "Tfswap>Carry"

# (carrier: variant) -> (tensor: T); attr T. Takes the tensor out of the carrier, once.
DELIVER: Final = "Tfswap>Deliver"

# () -> (); attrs gate: int, owner: int (the step's number), waits: bool (whether the step's kernels may wait for other
# steps). Every other node of the chain waits for it.
GATE: Final = "Tfswap>Gate"

# (variables: N * resource) -> (); attrs N: int, place: text ("GPU:1"). Fails where a variable is on another device.
REQUIRE_PLACE: Final = "Tfswap>RequirePlace"

# (arguments of the step...) -> (its results...); attrs Tin, Tout: their types, f, config_proto and executor_type as of
# StatefulPartitionedCall, step: int, waits: bool. Runs a planned step inside another function: the step that this
# process has registered under that number, or else f (csrc/core/inside_ops.cc).
INSIDE: Final = "Tfswap>Inside"

# --- names and attributes that are no ops ------------------------------------------------------------------

# The type of the executors that run planned steps (csrc/core/step_executor.cc).
EXECUTOR: Final = "TFSWAP"

# The type of the executors that compute sizes outside of a CPU's arena (csrc/core/host_memory_executor.cc).
HOST_MEMORY_EXECUTOR: Final = "TFSWAP_HOST_MEMORY"

# The attribute that selects a kernel of an op by its label, and the label of tfswap's kernels for TensorFlow's ops
# (csrc/core/loop_ops.cc, ordered_split_ops.cc, random_ops.cc, sum_ops.cc, zeros_ops.cc).
KERNEL: Final = "_kernel"
OWN_KERNEL: Final = "tfswap"

# The results of a loop's iteration, or of a branch, that are copied to buffers whose addresses do not depend on the
# number of iterations, or on the branch (csrc/core/relocation.h).
RELOCATED: Final = "_tfswap_relocated"

# The input that a sum exchanges with its first input, by the iterations of the loops around it and by the decisions of
# a SUM, and how many of each have an entry. The last entry holds for all later iterations
# (simulator/iteration_table.py, csrc/core/sum_ops.cc).
FIRST: Final = "_tfswap_first"
FIRST_SHAPE: Final = "_tfswap_first_shape"

# The owner of the generator's state that a random op shares, by number, and the place of the state among the owner's.
STATE_OWNER: Final = "_tfswap_owner"
STATE_PLACE: Final = "_tfswap_place"

# TensorFlow's ops whose kernels keep a random generator's state.
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

# The prefix of the names of recomputing nodes.
AGAIN: Final = "tfswap/again/"

# The prefix of the names of encoding nodes.
ENCODED: Final = "tfswap/encoded/"
