"""The traits of each type of op, one op a line: data, which ir/op_traits.py reads.

A type that is not here is unknown. Source: TensorFlow 2.21's op registry and kernels; the tests check each name there.
"""

from __future__ import annotations

from enum import Flag, auto


class Trait(Flag):
    """A fact about a type of op."""

    PURE = auto()
    """Its outputs depend on its inputs and attributes only: it may be recomputed, or dropped when unused."""
    VIEW = auto()
    """Its output is its input's buffer, and it is cheap to repeat."""
    SAME = auto()
    """Each output is the input of the same position: its buffer, and its shape."""
    METADATA = auto()
    """It needs its inputs' shapes or dtypes, not their contents."""
    CONST = auto()
    """A tensor that is part of the graph."""
    FEED = auto()
    """An argument of the graph."""
    FETCH = auto()
    """Returns a value to the caller."""
    HANDLE = auto()
    """Makes a handle to a resource."""
    READS_VARIABLE = auto()
    """Its result depends on when it runs relative to writes of a variable."""
    WRITES_VARIABLE = auto()
    """Changes a variable."""
    COPY_ON_READ = auto()
    """Turns its variable's copy-on-read mode on, until an op turns it off. In this mode every ReadVariableOp and every
    dense update of the variable allocates a copy (training_op_helpers.h, EnsureSparseVariableAccess). Sparse updates
    are in place, unless a read from before the mode is still held."""
    SHARED_READS = auto()
    """Turns its variable's copy-on-read mode off: reads share the buffer again."""
    ADOPTS = auto()
    """The variable adopts the buffer of the value that it is given."""
    SIZED_BY_VALUE = auto()
    """The size of its output depends on its inputs' values, and not on their sizes."""
    SMALL_EXTRAS = auto()
    """Outputs whose size TensorFlow does not infer are small."""
    NOT_FOLDED = auto()
    """TensorFlow computes it in each step, even from constants alone."""
    SUM = auto()
    """Adds up any number of inputs, and holds all of them until the last has been computed."""
    DEPENDS_ON_OWNERS = auto()
    """The last bits of its result depend on which of its inputs have no other owner when it runs: the input whose
    buffer is forwarded is added first."""
    ADDS_WHEN_READY = auto()
    """Adds each input as soon as it is ready, so that the order of execution is the order of the additions."""
    RUNS_PYTHON = auto()
    """Runs Python code, whose allocations are not known."""
    SHARES_BY_VALUE = auto()
    """Its output is a view of its input where values and alignment allow it, and a copy otherwise."""
    RANDOM = auto()
    """Gives another value each time it runs."""
    SIDE_EFFECT = auto()
    """Does something outside the graph that must happen once."""
    WAITS = auto()
    """Its kernel may wait for other steps, other processes or the user's Python code."""
    CALLS = auto()
    """Runs functions, whose nodes are not in this graph."""
    PIPELINE = auto()
    """Makes or saves a data pipeline, which runs its functions on the host, when an element is requested."""
    DATASET_LOOP = auto()
    """Runs a function for each element of a dataset, one after the other."""
    NEXT_ELEMENT = auto()
    """Gives the next element of a data pipeline, perhaps in an optional."""
    FRAME = auto()
    """Lowered control flow: outputs may be dead, or live in another iteration."""
    LOOP_FRAME = auto()
    """Of a lowered loop: it makes the graph cyclic, and a node in it runs many times."""
    TENSOR_LIST = auto()
    """Makes or reads a tensor list, which keeps the buffers of its elements."""
    EMPTY_LIST = auto()
    """Makes a tensor list without elements, or an optional without value."""
    PUSHES = auto()
    """Adds its second input at the end of the list that is its first."""
    POPS = auto()
    """Gives the list that is its first input without its last element, and that element."""
    WRAPS = auto()
    """Makes an optional of its inputs."""
    UNWRAPS = auto()
    """Gives the components of the optional that is its input."""
    LENGTH = auto()
    """Reads the number of a list's elements only."""
    ENCODES = auto()
    """Encodes its input: gives a smaller form that is kept in its place."""
    DECODES = auto()
    """Decodes: gives the tensor from its smaller form."""
    ONE_NODE = auto()
    """Repeated runs of one node differ from single runs of several nodes: its kernel keeps a state, a resource or a
    rendezvous has the node's name, or it writes over a tensor that others read."""
    COLLECTIVE = auto()
    """One of a group on several devices or workers, none of which ends before all have begun."""
    JOINED = auto()
    """oneDNN's graph pass fuses it with another reader of the same tensor, at any distance, where both have the same
    control edges (mkl_layout_pass.cc, CheckForNodeMerge)."""
    COMMUTATIVE = auto()
    """TensorFlow's optimizers merge two nodes of it whose inputs are the same in another order."""
    EINSUM = auto()
    """Multiplies and sums over the labels of its `equation`."""
    ONLY_WAITS = auto()
    """Has neither inputs nor outputs: it joins control edges."""
    INLINE = auto()
    """Its CPU kernel reports that it is not expensive (OpKernel::IsExpensive): the executor runs it on the thread that
    made it ready."""


_PURE = Trait.PURE
_VIEW = Trait.PURE | Trait.VIEW | Trait.INLINE
_SAME = _VIEW | Trait.SAME
_METADATA = Trait.PURE | Trait.METADATA
_CONST = Trait.PURE | Trait.CONST | Trait.INLINE
_FEED = Trait.FEED | Trait.INLINE
_FETCH = Trait.FETCH
_HANDLE = Trait.HANDLE
_READS = Trait.READS_VARIABLE
_WRITES = Trait.WRITES_VARIABLE
_SPARSE_READS = Trait.READS_VARIABLE | Trait.COPY_ON_READ
_SPARSE_WRITES = Trait.WRITES_VARIABLE | Trait.COPY_ON_READ
_RANDOM = Trait.RANDOM
_DRAWS = Trait.RANDOM | Trait.ONE_NODE
_EFFECT = Trait.SIDE_EFFECT
_ONE_EFFECT = Trait.SIDE_EFFECT | Trait.ONE_NODE
_COLLECTIVE = Trait.SIDE_EFFECT | Trait.COLLECTIVE | Trait.WAITS
_WAITS = Trait.SIDE_EFFECT | Trait.WAITS
_ONE_WAITS = Trait.SIDE_EFFECT | Trait.WAITS | Trait.ONE_NODE
_CALL = Trait.CALLS
_PIPELINE = Trait.PIPELINE
_FRAME = Trait.FRAME
_LOOP_FRAME = Trait.FRAME | Trait.LOOP_FRAME
_LIST = Trait.PURE | Trait.TENSOR_LIST
_COMMUTATIVE = Trait.PURE | Trait.COMMUTATIVE
_ENCODE = Trait.PURE | Trait.NOT_FOLDED | Trait.ENCODES
_DECODE = Trait.PURE | Trait.NOT_FOLDED | Trait.DECODES
_DECODE_SIZED = _DECODE | Trait.SIZED_BY_VALUE

TRAITS: dict[str, Trait] = {
    # Views: the output is the input's buffer; pure, and as cheap to repeat as to keep.
    "Bitcast": Trait.PURE | Trait.VIEW,  # same bits under another dtype
    "EnsureShape": _SAME,  # passes its input on, or fails
    "ExpandDims": _VIEW,  # shape only
    "Identity": _SAME,  # renames
    "IdentityN": _SAME,  # renames several; may carry a custom gradient
    "PreventGradient": _SAME,  # renames
    "Reshape": _VIEW,  # shape only
    "Squeeze": _VIEW,  # shape only
    "StopGradient": _SAME,  # renames
    "Tfswap>Defer": _SAME | Trait.NOT_FOLDED,  # renames, and only when the step runs
    # Metadata: read the shape or dtype of a tensor, not its contents.
    "OnesLike": _METADATA,  # needs no contents, but keeps the buffer where it can reuse it
    "Rank": _METADATA | Trait.INLINE,
    "Shape": _METADATA | Trait.INLINE,
    "ShapeN": _METADATA | Trait.INLINE,
    "Size": _METADATA | Trait.INLINE,
    "VariableShape": Trait.METADATA | Trait.READS_VARIABLE,  # a variable's shape, which a write may change
    "ZerosLike": _METADATA,  # as OnesLike
    # Constants and what callers give.
    "Const": _CONST,  # its tensor lives as long as the kernel
    "HostConst": _CONST,  # the same, in host memory
    "ImmutableConst": _CONST,  # mapped from a file
    "Placeholder": _FEED,  # an argument of a traced function
    "PlaceholderWithDefault": _FEED,  # passes its input on unless fed
    "PlaceholderV2": _FEED,  # deprecated
    "_Arg": _FEED,  # an argument of an instantiated function
    "_DeviceArg": _FEED,  # the same, in device memory
    "_Retval": _FETCH,  # a result of an instantiated function
    "_DeviceRetval": _FETCH,  # the same, in device memory
    "Tfswap>HandOver": _PURE | Trait.INLINE | Trait.NOT_FOLDED,  # a copy for the caller to keep
    "Tfswap>ToDevice": _PURE | Trait.NOT_FOLDED,  # a copy of what the host has
    "Tfswap>ToHost": _PURE | Trait.NOT_FOLDED,  # a copy of what the device has
    # Variables.
    "VarHandleOp": _HANDLE,  # makes a handle; the variable outlives the step
    "VarIsInitializedOp": _READS,  # of the variable's state
    "ReadVariableOp": _READS,  # shares the buffer; a later write copies it if the read is still held
    "_ReadVariablesOp": _READS | Trait.INLINE,  # several variables in one op
    "ResourceGather": _SPARSE_READS,  # rows of a variable, without reading the rest
    "ResourceGatherNd": _SPARSE_READS,  # as ResourceGather
    "DisableCopyOnRead": _EFFECT | Trait.SHARED_READS,  # later reads must stay after it
    "Tfswap>AssignInPlace": _WRITES,  # copies into the variable's own buffer
    "AssignVariableOp": _WRITES | Trait.ADOPTS,  # drops the old buffer
    "AssignAddVariableOp": _WRITES,  # in place
    "AssignSubVariableOp": _WRITES,  # in place
    "ResourceApplyAdaMax": _WRITES,  # in place
    "ResourceApplyAdadelta": _WRITES,  # in place
    "ResourceApplyAdagrad": _WRITES,  # in place
    "ResourceApplyAdagradV2": _WRITES,  # in place
    "ResourceApplyAdam": _WRITES,  # in place
    "ResourceApplyAdamWithAmsgrad": _WRITES,  # in place
    "ResourceApplyAddSign": _WRITES,  # in place
    "ResourceApplyCenteredRMSProp": _WRITES,  # in place
    "ResourceApplyFtrl": _WRITES,  # in place
    "ResourceApplyFtrlV2": _WRITES,  # in place
    "ResourceApplyGradientDescent": _WRITES,  # in place
    "ResourceApplyKerasMomentum": _WRITES,  # in place
    "ResourceApplyMomentum": _WRITES,  # in place
    "ResourceApplyPowerSign": _WRITES,  # in place
    "ResourceApplyProximalGradientDescent": _WRITES,  # in place
    "ResourceApplyRMSProp": _WRITES,  # in place
    "ResourceScatterAdd": _SPARSE_WRITES,  # in place
    "ResourceScatterDiv": _SPARSE_WRITES,  # in place
    "ResourceScatterMax": _SPARSE_WRITES,  # in place
    "ResourceScatterMin": _SPARSE_WRITES,  # in place
    "ResourceScatterMul": _SPARSE_WRITES,  # in place
    "ResourceScatterSub": _SPARSE_WRITES,  # in place
    "ResourceScatterUpdate": _SPARSE_WRITES,  # in place
    "ResourceSparseApplyAdadelta": _SPARSE_WRITES,  # in place
    "ResourceSparseApplyAdagrad": _SPARSE_WRITES,  # in place
    "ResourceSparseApplyAdagradV2": _SPARSE_WRITES,  # in place
    "ResourceSparseApplyKerasMomentum": _SPARSE_WRITES,  # in place
    "ResourceSparseApplyMomentum": _SPARSE_WRITES,  # in place
    "ResourceSparseApplyRMSProp": _SPARSE_WRITES,  # in place
    "ResourceStridedSliceAssign": _SPARSE_WRITES,  # in place
    "DestroyResourceOp": _EFFECT,  # frees the variable
    "ResourceScatterNdAdd": _SPARSE_WRITES,  # in place
    "ResourceScatterNdMax": _SPARSE_WRITES,  # in place
    "ResourceScatterNdMin": _SPARSE_WRITES,  # in place
    "ResourceScatterNdUpdate": _SPARSE_WRITES,  # in place
    "ResourceScatterNdSub": _SPARSE_WRITES,  # in place
    "ResourceSparseApplyCenteredRMSProp": _SPARSE_WRITES,  # in place
    "ResourceSparseApplyFtrl": _SPARSE_WRITES,  # in place
    "ResourceSparseApplyFtrlV2": _SPARSE_WRITES,  # in place
    "ResourceSparseApplyProximalAdagrad": _SPARSE_WRITES,  # in place
    "ResourceSparseApplyProximalGradientDescent": _SPARSE_WRITES,  # in place
    "TemporaryVariable": _ONE_EFFECT,  # Grappler's, for sums in any order
    "DestroyTemporaryVariable": _ONE_EFFECT,  # the same
    "Variable": _READS | Trait.ONE_NODE,  # TensorFlow 1: a reference
    "VariableV2": _READS | Trait.ONE_NODE,  # TensorFlow 1: a reference
    "Assign": _WRITES,  # TensorFlow 1: through a reference
    "AssignAdd": _WRITES,  # TensorFlow 1: through a reference
    "AssignSub": _WRITES,  # TensorFlow 1: through a reference
    # Random: a new value in each run.
    "Multinomial": _DRAWS,
    "ParameterizedTruncatedNormal": _DRAWS,
    "RandomGamma": _DRAWS,
    "RandomPoisson": _DRAWS,
    "RandomPoissonV2": _DRAWS,
    "RandomShuffle": _DRAWS,
    "RandomStandardNormal": _DRAWS | Trait.SIZED_BY_VALUE,
    "RandomUniform": _DRAWS | Trait.SIZED_BY_VALUE,
    "RandomUniformInt": _DRAWS | Trait.SIZED_BY_VALUE,
    "RngReadAndSkip": _RANDOM,
    "RngSkip": _RANDOM,
    "StatefulRandomBinomial": _RANDOM,
    "StatefulStandardNormalV2": _RANDOM,
    "StatefulTruncatedNormal": _RANDOM,
    "StatefulUniform": _RANDOM,
    "StatefulUniformFullInt": _RANDOM,
    "StatefulUniformInt": _RANDOM,
    "TruncatedNormal": _DRAWS | Trait.SIZED_BY_VALUE,
    # Side effects outside the graph, which must happen once.
    "Assert": _EFFECT,
    "Abort": _EFFECT,
    "AudioSummaryV2": _EFFECT,
    "CheckNumerics": _EFFECT,  # passes its input on, or fails: it must not be dropped
    "CheckNumericsV2": _EFFECT,  # logs what it finds
    "CollectiveAllToAllV2": _COLLECTIVE,
    "CollectiveAllToAllV3": _COLLECTIVE,
    "CollectiveBcastRecv": _COLLECTIVE,
    "CollectiveBcastRecvV2": _COLLECTIVE,
    "CollectiveBcastSend": _COLLECTIVE,
    "CollectiveBcastSendV2": _COLLECTIVE,
    "CollectiveGather": _COLLECTIVE,
    "CollectiveGatherV2": _COLLECTIVE,
    "CollectiveInitializeCommunicator": _COLLECTIVE,
    "CollectiveReduce": _COLLECTIVE,
    "CollectiveReduceScatterV2": _COLLECTIVE,
    "CollectiveReduceV2": _COLLECTIVE,
    "CollectiveReduceV3": _COLLECTIVE,
    "EagerPyFunc": _WAITS | Trait.RUNS_PYTHON,
    "HashTableV2": _ONE_EFFECT,
    "InitializeTableV2": _EFFECT,
    "InplaceAdd": _ONE_EFFECT,  # writes over its first input, even if others read it
    "InplaceSub": _ONE_EFFECT,  # the same
    "InplaceUpdate": _ONE_EFFECT,  # the same
    "IteratorGetNext": _WAITS | Trait.NEXT_ELEMENT,
    "IteratorGetNextAsOptional": _WAITS | Trait.NEXT_ELEMENT,
    "IteratorGetNextSync": _WAITS | Trait.NEXT_ELEMENT,
    "LookupTableFindV2": _EFFECT,
    "LookupTableImportV2": _EFFECT,
    "LookupTableInsertV2": _EFFECT,
    "MergeV2Checkpoints": _EFFECT,
    "MutableHashTableV2": _ONE_EFFECT,
    "NcclAllReduce": _ONE_WAITS,
    "NcclBroadcast": _ONE_WAITS,
    "NcclReduce": _ONE_WAITS,
    "NoOp": _EFFECT | Trait.ONLY_WAITS | Trait.INLINE,  # nothing but its control edges, which must stay
    "OptionalGetValue": _EFFECT | Trait.UNWRAPS,
    "OptionalHasValue": _EFFECT,
    "Print": _EFFECT,
    "PrintV2": _EFFECT,
    "PyFunc": _WAITS | Trait.RUNS_PYTHON,
    "PyFuncStateless": _WAITS | Trait.RUNS_PYTHON,
    "QueueDequeueV2": _WAITS,
    "QueueEnqueueV2": _WAITS,
    "ReadFile": _EFFECT,
    "Recv": _ONE_WAITS,
    "RestoreV2": _EFFECT,
    "SaveV2": _EFFECT,
    "Send": _ONE_EFFECT,
    "ShardedFilename": _EFFECT,
    "StackPopV2": _EFFECT,
    "StackPushV2": _EFFECT,
    "StackV2": _ONE_EFFECT,
    "TensorArrayCloseV3": _EFFECT,
    "TensorArrayGatherV3": _EFFECT,
    "TensorArrayGradV3": _ONE_EFFECT,
    "TensorArrayReadV3": _EFFECT,
    "TensorArrayScatterV3": _EFFECT,
    "TensorArrayV3": _ONE_EFFECT,
    "TensorArrayWriteV3": _EFFECT,
    "Timestamp": _EFFECT,
    "WriteFile": _EFFECT,
    "WriteScalarSummary": _EFFECT,
    "WriteSummary": _EFFECT,
    "_HostRecv": _ONE_WAITS,
    "_HostSend": _ONE_EFFECT,
    "_Recv": _ONE_WAITS,
    "_Send": _ONE_EFFECT,
    "_ScopedAllocator": _ONE_EFFECT,
    "_ScopedAllocatorConcat": _ONE_EFFECT,
    "_ScopedAllocatorSplit": _ONE_EFFECT,
    # Functional control flow and calls: their bodies are graphs of their own.
    "Case": _CALL,
    "If": _CALL,
    "PartitionedCall": _CALL,
    "RemoteCall": _CALL | Trait.WAITS,
    "StatefulPartitionedCall": _CALL,
    "StatelessCase": _CALL,
    "StatelessIf": _CALL,
    "StatelessWhile": _CALL,
    "SymbolicGradient": _CALL,
    "TPUPartitionedCall": _CALL,
    "While": _CALL,
    "XlaLaunch": _CALL,
    "_If": _CALL,
    "_While": _CALL,
    # Data pipelines: their functions run on the host, when an element is requested.
    "ChooseFastestBranchDataset": _PIPELINE,
    "DataServiceDatasetV3": _PIPELINE,
    "DataServiceDatasetV4": _PIPELINE,
    "ExperimentalGroupByReducerDataset": _PIPELINE,
    "ExperimentalGroupByWindowDataset": _PIPELINE,
    "ExperimentalMapAndBatchDataset": _PIPELINE,
    "ExperimentalMapDataset": _PIPELINE,
    "ExperimentalParallelInterleaveDataset": _PIPELINE,
    "ExperimentalTakeWhileDataset": _PIPELINE,
    "FilterDataset": _PIPELINE,
    "FlatMapDataset": _PIPELINE,
    "GeneratorDataset": _PIPELINE,
    "GroupByReducerDataset": _PIPELINE,
    "GroupByWindowDataset": _PIPELINE,
    "IndexFlatMapDataset": _PIPELINE,
    "InterleaveDataset": _PIPELINE,
    "LegacyParallelInterleaveDatasetV2": _PIPELINE,
    "LoadDataset": _PIPELINE,
    "MapAndBatchDataset": _PIPELINE,
    "MapDataset": _PIPELINE,
    "OneShotIterator": _PIPELINE,
    "ParallelFilterDataset": _PIPELINE,
    "ParallelInterleaveDataset": _PIPELINE,
    "ParallelInterleaveDatasetV2": _PIPELINE,
    "ParallelInterleaveDatasetV3": _PIPELINE,
    "ParallelInterleaveDatasetV4": _PIPELINE,
    "ParallelMapDataset": _PIPELINE,
    "ParallelMapDatasetV2": _PIPELINE,
    "SaveDataset": _PIPELINE,
    "SaveDatasetV2": _PIPELINE,
    "SnapshotDatasetV2": _PIPELINE,
    "TakeWhileDataset": _PIPELINE,
    # AutoGraph turns `for x in dataset` into a scan on the step's device, which a reduction reads.
    "ExperimentalScanDataset": _PIPELINE | Trait.DATASET_LOOP,
    "ReduceDataset": Trait.DATASET_LOOP,
    "ScanDataset": _PIPELINE | Trait.DATASET_LOOP,
    # Lowered control flow: frames and dead tensors.
    "ControlTrigger": _FRAME,
    "Enter": _LOOP_FRAME,
    "Exit": _LOOP_FRAME,
    "LoopCond": _LOOP_FRAME,
    "Merge": _FRAME,
    "NextIteration": _LOOP_FRAME,
    "RefEnter": _LOOP_FRAME,
    "RefExit": _LOOP_FRAME,
    "RefMerge": _FRAME,
    "RefNextIteration": _LOOP_FRAME,
    "RefSwitch": _FRAME,
    "Switch": _FRAME,
    "_SwitchN": _FRAME,
    # Tensor lists: pure, but a list holds its elements' buffers.
    "EmptyTensorList": _LIST | Trait.EMPTY_LIST,
    "OptionalFromValue": _LIST | Trait.WRAPS,  # as a list that keeps its components
    "OptionalNone": _LIST | Trait.EMPTY_LIST,
    "TensorListConcatV2": _LIST,
    "TensorListElementShape": _LIST,
    "TensorListFromTensor": _LIST,
    "TensorListGather": _LIST,
    "TensorListGetItem": _LIST,
    "TensorListLength": _LIST | Trait.LENGTH,
    "TensorListPopBack": _LIST | Trait.POPS,
    "TensorListPushBack": _LIST | Trait.PUSHES,
    "TensorListPushBackBatch": _LIST,
    "TensorListReserve": _LIST,
    "TensorListResize": _LIST,
    "TensorListScatterIntoExistingList": _LIST,
    "TensorListScatterV2": _LIST,
    "TensorListSetItem": _LIST,
    "TensorListSplit": _LIST,
    "TensorListStack": _LIST,
    "TensorListConcatLists": _LIST,
    # Pure: functions of their inputs (of stateless random ops the seed is one) and attributes, which may be recomputed.
    "Abs": _PURE,
    "AccumulateNV2": _COMMUTATIVE | Trait.ADDS_WHEN_READY,  # a kernel for each term (accumulate_n_optimizer.cc)
    "Acos": _PURE,
    "Acosh": _PURE,
    "Add": _PURE,
    "AddN": _COMMUTATIVE | Trait.SUM | Trait.DEPENDS_ON_OWNERS,  # begins with an input that has no other owner
    "AddV2": _COMMUTATIVE,
    "AdjustContrastv2": _PURE,
    "AdjustHue": _PURE,
    "AdjustSaturation": _PURE,
    "All": _PURE,
    "Angle": _PURE,
    "Any": _PURE,
    "ApproximateEqual": _COMMUTATIVE,
    "ArgMax": _PURE,
    "ArgMin": _PURE,
    "AsString": _PURE,
    "Asin": _PURE,
    "Asinh": _PURE,
    "Atan": _PURE,
    "Atan2": _PURE,
    "Atanh": _PURE,
    "AvgPool": _PURE,
    "AvgPool3D": _PURE,
    "AvgPool3DGrad": _PURE,
    "AvgPoolGrad": _PURE,
    "BandedTriangularSolve": _PURE,
    "BatchMatMul": _PURE,
    "BatchMatMulV2": _PURE,
    "BatchMatMulV3": _PURE,
    "BatchNormWithGlobalNormalization": _PURE,
    "BatchToSpace": _PURE,
    "BatchToSpaceND": _PURE,
    "BesselI0": _PURE,
    "BesselI0e": _PURE,
    "BesselI1": _PURE,
    "BesselI1e": _PURE,
    "BesselJ0": _PURE,
    "BesselJ1": _PURE,
    "BesselK0": _PURE,
    "BesselK0e": _PURE,
    "BesselK1": _PURE,
    "BesselK1e": _PURE,
    "BesselY0": _PURE,
    "BesselY1": _PURE,
    "Betainc": _PURE,
    "BiasAdd": _PURE,
    "BiasAddGrad": _PURE | Trait.JOINED,  # with Conv2DBackpropFilter
    "BiasAddV1": _PURE,
    "Bincount": _PURE | Trait.SIZED_BY_VALUE,
    "BitwiseAnd": _COMMUTATIVE,
    "BitwiseOr": _COMMUTATIVE,
    "BitwiseXor": _COMMUTATIVE,
    "BlockLSTM": _PURE,
    "BlockLSTMGrad": _PURE,
    "BlockLSTMGradV2": _PURE,
    "BlockLSTMV2": _PURE,
    "BroadcastArgs": _PURE | Trait.INLINE,
    "BroadcastGradientArgs": _PURE | Trait.INLINE,
    "BroadcastTo": _PURE | Trait.SIZED_BY_VALUE | Trait.SHARES_BY_VALUE,
    "Bucketize": _PURE,
    "CTCBeamSearchDecoder": _PURE,
    "CTCGreedyDecoder": _PURE,
    "CTCLoss": _PURE,
    "Cast": _PURE,
    "Ceil": _PURE,
    "Cholesky": _PURE,
    "CholeskyGrad": _PURE,
    "ClipByValue": _PURE,
    "CombinedNonMaxSuppression": _PURE,
    "Complex": _PURE,
    "ComplexAbs": _PURE,
    "ComputeAccidentalHits": _PURE,
    "Concat": _PURE,
    "ConcatOffset": _PURE | Trait.INLINE,
    "ConcatV2": _PURE,
    "Conj": _PURE,
    "ConjugateTranspose": _PURE,
    "Conv2D": _PURE,
    "Conv2DBackpropFilter": _PURE,
    "Conv2DBackpropInput": _PURE,
    "Conv3D": _PURE,
    "Conv3DBackpropFilterV2": _PURE,
    "Conv3DBackpropInputV2": _PURE,
    "Cos": _PURE,
    "Cosh": _PURE,
    "CropAndResize": _PURE,
    "CropAndResizeGradBoxes": _PURE,
    "CropAndResizeGradImage": _PURE,
    "Cross": _PURE,
    "Cumprod": _PURE,
    "Cumsum": _PURE,
    "CumulativeLogsumexp": _PURE,
    "DataFormatDimMap": _PURE,
    "DataFormatVecPermute": _PURE,
    "Dawsn": _PURE,
    "DecodeAndCropJpeg": _PURE,
    "DecodeBase64": _PURE,
    "DecodeBmp": _PURE,
    "DecodeCSV": _PURE,
    "DecodeCompressed": _PURE,
    "DecodeGif": _PURE,
    "DecodeImage": _PURE,
    "DecodeJpeg": _PURE,
    "DecodePaddedRaw": _PURE,
    "DecodePng": _PURE,
    "DecodeRaw": _PURE | Trait.SIZED_BY_VALUE,
    "DecodeWav": _PURE,
    "DeepCopy": _EFFECT,  # a copy that shares nothing, for in-place ops
    "DenseBincount": _PURE | Trait.SIZED_BY_VALUE,
    "DenseCountSparseOutput": _PURE,
    "DenseToDenseSetOperation": _PURE,
    "DenseToSparseSetOperation": _PURE,
    "DepthToSpace": _PURE,
    "DepthwiseConv2dNative": _PURE,
    "DepthwiseConv2dNativeBackpropFilter": _PURE,
    "DepthwiseConv2dNativeBackpropInput": _PURE,
    "DeserializeManySparse": _PURE,
    "DeserializeSparse": _PURE,
    "Diag": _PURE,
    "DiagPart": _PURE,
    "Digamma": _PURE,
    "Dilation2D": _PURE,
    "Dilation2DBackpropFilter": _PURE,
    "Dilation2DBackpropInput": _PURE,
    "Div": _PURE,
    "DivNoNan": _PURE,
    "DrawBoundingBoxesV2": _PURE,
    "DynamicPartition": _PURE,
    "DynamicStitch": _PURE,
    "EditDistance": _PURE,
    "Eig": _PURE,
    "Einsum": _PURE | Trait.EINSUM,
    "Elu": _PURE,
    "EluGrad": _PURE,
    "EncodeBase64": _PURE,
    "Equal": _COMMUTATIVE,
    "Erf": _PURE,
    "Erfc": _PURE,
    "Erfinv": _PURE,
    "EuclideanNorm": _PURE,
    "Exp": _PURE,
    "Expint": _PURE,
    "Expm1": _PURE,
    "ExtractGlimpseV2": _PURE,
    "ExtractImagePatches": _PURE,
    "ExtractVolumePatches": _PURE,
    "FFT": _PURE,
    "FFT2D": _PURE,
    "FFT3D": _PURE,
    "FakeQuantWithMinMaxArgs": _PURE,
    "FakeQuantWithMinMaxArgsGradient": _PURE,
    "FakeQuantWithMinMaxVars": _PURE,
    "FakeQuantWithMinMaxVarsGradient": _PURE,
    "FakeQuantWithMinMaxVarsPerChannel": _PURE,
    "FakeQuantWithMinMaxVarsPerChannelGradient": _PURE,
    "Fill": _PURE | Trait.SIZED_BY_VALUE,
    "Fingerprint": _PURE,
    "Floor": _PURE,
    "FloorDiv": _PURE,
    "FloorMod": _PURE,
    "FractionalAvgPool": _PURE,
    "FractionalAvgPoolGrad": _PURE,
    "FractionalMaxPool": _PURE,
    "FractionalMaxPoolGrad": _PURE,
    "FresnelCos": _PURE,
    "FresnelSin": _PURE,
    "FusedBatchNorm": _PURE,
    "FusedBatchNormGrad": _PURE,
    "FusedBatchNormGradV2": _PURE,
    "FusedBatchNormGradV3": _PURE,
    "FusedBatchNormV2": _PURE,
    "FusedBatchNormV3": _PURE | Trait.SMALL_EXTRAS,  # reserve_space_3 is cuDNN's; empty elsewhere
    "GRUBlockCell": _PURE,
    "GRUBlockCellGrad": _PURE,
    "Gather": _PURE,
    "GatherNd": _PURE,
    "GatherV2": _PURE,
    "Greater": _PURE,
    "GreaterEqual": _PURE,
    "HSVToRGB": _PURE,
    "HistogramFixedWidth": _PURE,
    "IFFT": _PURE,
    "IFFT2D": _PURE,
    "IFFT3D": _PURE,
    "IRFFT": _PURE,
    "IRFFT2D": _PURE,
    "IRFFT3D": _PURE,
    "Igamma": _PURE,
    "IgammaGradA": _PURE,
    "Igammac": _PURE,
    "Imag": _PURE,
    "ImageProjectiveTransformV2": _PURE,
    "ImageProjectiveTransformV3": _PURE,
    "InTopK": _PURE,
    "InTopKV2": _PURE,
    "Inv": _PURE,
    "InvGrad": _PURE,
    "Invert": _PURE,
    "InvertPermutation": _PURE,
    "IsFinite": _PURE,
    "IsInf": _PURE,
    "IsNan": _PURE,
    "L2Loss": _PURE,
    "LRN": _PURE,
    "LRNGrad": _PURE,
    "LSTMBlockCell": _PURE,
    "LSTMBlockCellGrad": _PURE,
    "LeakyRelu": _PURE,
    "LeakyReluGrad": _PURE,
    "LeftShift": _PURE,
    "Less": _PURE,
    "LessEqual": _PURE,
    "Lgamma": _PURE,
    "LinSpace": _PURE | Trait.SIZED_BY_VALUE,
    "ListDiff": _PURE,
    "Log": _PURE,
    "Log1p": _PURE,
    "LogMatrixDeterminant": _PURE,
    "LogSoftmax": _PURE,
    "LogicalAnd": _COMMUTATIVE,
    "LogicalNot": _PURE,
    "LogicalOr": _COMMUTATIVE,
    "LowerBound": _PURE,
    "Lu": _PURE,
    "MatMul": _PURE,
    "MatrixBandPart": _PURE,
    "MatrixDeterminant": _PURE,
    "MatrixDiag": _PURE,
    "MatrixDiagPart": _PURE,
    "MatrixDiagPartV2": _PURE,
    "MatrixDiagPartV3": _PURE,
    "MatrixDiagV2": _PURE,
    "MatrixDiagV3": _PURE,
    "MatrixInverse": _PURE,
    "MatrixLogarithm": _PURE,
    "MatrixSetDiag": _PURE,
    "MatrixSetDiagV2": _PURE,
    "MatrixSetDiagV3": _PURE,
    "MatrixSolve": _PURE,
    "MatrixSolveLs": _PURE,
    "MatrixSquareRoot": _PURE,
    "MatrixTriangularSolve": _PURE,
    "Max": _PURE,
    "MaxPool": _PURE,
    "MaxPool3D": _PURE,
    "MaxPool3DGrad": _PURE,
    "MaxPool3DGradGrad": _PURE,
    "MaxPoolGrad": _PURE,
    "MaxPoolGradGrad": _PURE,
    "MaxPoolGradV2": _PURE,
    "MaxPoolGradWithArgmax": _PURE,
    "MaxPoolV2": _PURE,
    "MaxPoolWithArgmax": _PURE,
    "Maximum": _PURE,
    "Mean": _PURE,
    "Min": _PURE,
    "Minimum": _PURE,
    "MirrorPad": _PURE,
    "MirrorPadGrad": _PURE,
    "Mod": _PURE,
    "Mul": _COMMUTATIVE,
    "MulNoNan": _PURE,
    "Ndtri": _PURE,
    "Neg": _PURE,
    "NextAfter": _PURE,
    "NonMaxSuppression": _PURE,
    "NonMaxSuppressionV2": _PURE,
    "NonMaxSuppressionV3": _PURE,
    "NonMaxSuppressionV4": _PURE,
    "NonMaxSuppressionV5": _PURE,
    "NonMaxSuppressionWithOverlaps": _PURE,
    "NotEqual": _COMMUTATIVE,
    "NthElement": _PURE,
    "OneHot": _PURE | Trait.SIZED_BY_VALUE,
    "Pack": _PURE,
    "Pad": _PURE,
    "PadV2": _PURE,
    "ParallelConcat": _PURE,
    "ParallelDynamicStitch": _PURE,
    "ParseExampleV2": _PURE,
    "ParseSequenceExampleV2": _PURE,
    "ParseSingleExample": _PURE,
    "ParseTensor": _PURE,
    "Polygamma": _PURE,
    "PopulationCount": _PURE,
    "Pow": _PURE,
    "Prod": _PURE,
    "Qr": _PURE,
    "QuantizeAndDequantizeV2": _PURE,
    "QuantizeAndDequantizeV3": _PURE,
    "QuantizeAndDequantizeV4": _PURE,
    "QuantizeAndDequantizeV4Grad": _PURE,
    "RFFT": _PURE,
    "RFFT2D": _PURE,
    "RFFT3D": _PURE,
    "RGBToHSV": _PURE,
    "RaggedBincount": _PURE,
    "RaggedCountSparseOutput": _PURE,
    "RaggedCross": _PURE,
    "RaggedFillEmptyRows": _PURE,
    "RaggedFillEmptyRowsGrad": _PURE,
    "RaggedGather": _PURE,
    "RaggedRange": _PURE | Trait.SIZED_BY_VALUE,
    "RaggedTensorToSparse": _PURE,
    "RaggedTensorToTensor": _PURE,
    "RandomGammaGrad": _PURE,
    "Range": _PURE | Trait.SIZED_BY_VALUE,
    "Real": _PURE,
    "RealDiv": _PURE,
    "Reciprocal": _PURE,
    "ReciprocalGrad": _PURE,
    "ReduceJoin": _PURE,
    "RegexFullMatch": _PURE,
    "RegexReplace": _PURE,
    "Relu": _PURE,
    "Relu6": _PURE,
    "Relu6Grad": _PURE,
    "ReluGrad": _PURE,
    "ResizeArea": _PURE,
    "ResizeBicubic": _PURE,
    "ResizeBicubicGrad": _PURE,
    "ResizeBilinear": _PURE,
    "ResizeBilinearGrad": _PURE,
    "ResizeNearestNeighbor": _PURE,
    "ResizeNearestNeighborGrad": _PURE,
    "ReverseSequence": _PURE,
    "ReverseV2": _PURE,
    "RightShift": _PURE,
    "Rint": _PURE,
    "Roll": _PURE,
    "Round": _PURE,
    "Rsqrt": _PURE,
    "RsqrtGrad": _PURE,
    "ScaleAndTranslate": _PURE,
    "ScaleAndTranslateGrad": _PURE,
    "ScatterNd": _PURE | Trait.SIZED_BY_VALUE,
    "ScatterNdNonAliasingAdd": _PURE,
    "SegmentMax": _PURE,
    "SegmentMean": _PURE,
    "SegmentMin": _PURE,
    "SegmentProd": _PURE,
    "SegmentSum": _PURE,
    "Select": _PURE,
    "SelectV2": _PURE,
    "SelfAdjointEigV2": _PURE,
    "Selu": _PURE,
    "SeluGrad": _PURE,
    "SetSize": _PURE,
    "Sigmoid": _PURE,
    "SigmoidGrad": _PURE,
    "Sign": _PURE,
    "Sin": _PURE,
    "Sinh": _PURE,
    "Slice": _PURE | Trait.SHARES_BY_VALUE,
    "Snapshot": _PURE,
    "Softmax": _PURE,
    "SoftmaxCrossEntropyWithLogits": _PURE,
    "Softplus": _PURE,
    "SoftplusGrad": _PURE,
    "Softsign": _PURE,
    "SoftsignGrad": _PURE,
    "SpaceToBatch": _PURE,
    "SpaceToBatchND": _PURE,
    "SpaceToDepth": _PURE,
    "SparseAdd": _PURE,
    "SparseAddGrad": _PURE,
    "SparseBincount": _PURE,
    "SparseConcat": _PURE,
    "SparseCountSparseOutput": _PURE,
    "SparseCross": _PURE,
    "SparseCrossHashed": _PURE,
    "SparseCrossV2": _PURE,
    "SparseDenseCwiseAdd": _PURE,
    "SparseDenseCwiseDiv": _PURE,
    "SparseDenseCwiseMul": _PURE,
    "SparseFillEmptyRows": _PURE | Trait.SHARES_BY_VALUE,
    "SparseFillEmptyRowsGrad": _PURE,
    "SparseMatMul": _PURE,
    "SparseReduceMax": _PURE,
    "SparseReduceMaxSparse": _PURE,
    "SparseReduceSum": _PURE,
    "SparseReduceSumSparse": _PURE,
    "SparseReorder": _PURE,
    "SparseReshape": _PURE,
    "SparseSegmentMean": _PURE,
    "SparseSegmentMeanGrad": _PURE,
    "SparseSegmentMeanGradV2": _PURE,
    "SparseSegmentMeanWithNumSegments": _PURE,
    "SparseSegmentSqrtN": _PURE,
    "SparseSegmentSqrtNGrad": _PURE,
    "SparseSegmentSqrtNGradV2": _PURE,
    "SparseSegmentSqrtNWithNumSegments": _PURE,
    "SparseSegmentSum": _PURE,
    "SparseSegmentSumGrad": _PURE,
    "SparseSegmentSumGradV2": _PURE,
    "SparseSegmentSumWithNumSegments": _PURE,
    "SparseSlice": _PURE,
    "SparseSliceGrad": _PURE,
    "SparseSoftmax": _PURE,
    "SparseSoftmaxCrossEntropyWithLogits": _PURE,
    "SparseSparseMaximum": _PURE,
    "SparseSparseMinimum": _PURE,
    "SparseSplit": _PURE,
    "SparseTensorDenseAdd": _PURE,
    "SparseTensorDenseMatMul": _PURE,
    "SparseToDense": _PURE | Trait.SIZED_BY_VALUE,
    "SparseToSparseSetOperation": _PURE,
    "Spence": _PURE,
    "Split": _PURE,
    "SplitV": _PURE,
    "Sqrt": _PURE,
    "SqrtGrad": _PURE,
    "Square": _PURE,
    "SquaredDifference": _COMMUTATIVE,
    "StatelessMultinomial": _PURE,
    "StatelessParameterizedTruncatedNormal": _PURE | Trait.SIZED_BY_VALUE,
    "StatelessRandomBinomial": _PURE | Trait.SIZED_BY_VALUE,
    "StatelessRandomGammaV2": _PURE | Trait.SIZED_BY_VALUE,
    "StatelessRandomGammaV3": _PURE,
    "StatelessRandomGetKeyCounter": _PURE | Trait.NOT_FOLDED,
    "StatelessRandomGetKeyCounterAlg": _PURE | Trait.NOT_FOLDED,
    "StatelessRandomNormal": _PURE | Trait.SIZED_BY_VALUE,
    "StatelessRandomNormalV2": _PURE | Trait.SIZED_BY_VALUE,
    "StatelessRandomPoisson": _PURE | Trait.SIZED_BY_VALUE,
    "StatelessRandomUniform": _PURE | Trait.SIZED_BY_VALUE,
    "StatelessRandomUniformInt": _PURE | Trait.SIZED_BY_VALUE,
    "StatelessRandomUniformIntV2": _PURE | Trait.SIZED_BY_VALUE,
    "StatelessRandomUniformV2": _PURE | Trait.SIZED_BY_VALUE,
    "StatelessShuffle": _PURE,
    "StatelessTruncatedNormal": _PURE | Trait.SIZED_BY_VALUE,
    "StatelessTruncatedNormalV2": _PURE | Trait.SIZED_BY_VALUE,
    "StaticRegexFullMatch": _PURE,
    "StaticRegexReplace": _PURE,
    "StridedSlice": _PURE | Trait.SHARES_BY_VALUE,
    "StridedSliceGrad": _PURE,
    "StringFormat": _PURE,
    "StringJoin": _PURE,
    "StringLength": _PURE,
    "StringLower": _PURE,
    "StringNGrams": _PURE | Trait.SIZED_BY_VALUE,
    "StringSplit": _PURE | Trait.SIZED_BY_VALUE,
    "StringSplitV2": _PURE | Trait.SIZED_BY_VALUE,
    "StringStrip": _PURE,
    "StringToHashBucket": _PURE,
    "StringToHashBucketFast": _PURE,
    "StringToHashBucketStrong": _PURE,
    "StringToNumber": _PURE,
    "StringUpper": _PURE,
    "Sub": _PURE,
    "Substr": _PURE,
    "Sum": _PURE,
    "Svd": _PURE,
    "Tan": _PURE,
    "Tanh": _PURE,
    "TanhGrad": _PURE,
    "TensorScatterAdd": _PURE,
    "TensorScatterMax": _PURE,
    "TensorScatterMin": _PURE,
    "TensorScatterSub": _PURE,
    "TensorScatterUpdate": _PURE,
    "TensorStridedSliceUpdate": _PURE,
    "Tile": _PURE | Trait.SIZED_BY_VALUE | Trait.SHARES_BY_VALUE,
    "TileGrad": _PURE,
    "TopK": _PURE,
    "TopKV2": _PURE,
    "Transpose": _PURE,
    "TridiagonalMatMul": _PURE,
    "TridiagonalSolve": _PURE,
    "TruncateDiv": _PURE,
    "TruncateMod": _PURE,
    "UnicodeDecode": _PURE | Trait.SIZED_BY_VALUE,
    "UnicodeDecodeWithOffsets": _PURE | Trait.SIZED_BY_VALUE,
    "UnicodeEncode": _PURE,
    "UnicodeScript": _PURE,
    "UnicodeTranscode": _PURE,
    "Unique": _PURE,
    "UniqueV2": _PURE,
    "UniqueWithCounts": _PURE,
    "UniqueWithCountsV2": _PURE,
    "Unpack": _PURE | Trait.SHARES_BY_VALUE,
    "UnravelIndex": _PURE,
    "UnsortedSegmentJoin": _PURE | Trait.SIZED_BY_VALUE,
    "UnsortedSegmentMax": _PURE,
    "UnsortedSegmentMin": _PURE,
    "UnsortedSegmentProd": _PURE,
    "UnsortedSegmentSum": _PURE,
    "UpperBound": _PURE,
    "Where": _PURE,
    "Xdivy": _PURE,
    "Xlog1py": _PURE,
    "Xlogy": _PURE,
    "Zeta": _PURE,
    "_EagerConst": _PURE | Trait.INLINE,
    "_FusedBatchNormEx": _PURE,
    "_FusedBatchNormGradEx": _PURE,
    "_FusedConv2D": _PURE,
    "_FusedConv3D": _PURE,
    "_FusedDepthwiseConv2dNative": _PURE,
    "_FusedMatMul": _PURE,
    "_MklFusedBatchMatMulV2": _PURE,
    "_MklFusedInstanceNorm": _PURE,
    "_MklFusedMish": _PURE,
    "_MklLayerNorm": _PURE,
    "_MklNativeConv2DBackpropFilterWithBias": _PURE,
    "_MklNativeConv2DWithBias": _PURE,
    "_MklNativeFusedConv2D": _PURE,
    "_MklNativeMaxPool": _PURE,
    "_MklNativeMaxPool3D": _PURE,
    "_MklNativeMaxPool3DGrad": _PURE,
    "_MklNativeMaxPoolGrad": _PURE,
    "_MklNativePadWithConv2D": _PURE,
    "_MklNativePadWithFusedConv2D": _PURE,
    "_MklSwish": _PURE,
    "_UnaryOpsComposition": _PURE,
    "Tfswap>Group": Trait(0),  # added after planning
    "Tfswap>Outside": _EFFECT,  # the caller's work between its two calls
    # Codecs (docs/encodings.md). Those that encode and decode are registered as stateful: TensorFlow folds none.
    "Tfswap>DecodeFloats": _DECODE_SIZED,
    "Tfswap>DecodeGroups": _DECODE_SIZED,
    "Tfswap>DecodeIntegers": _DECODE,
    "Tfswap>DecodeMask": _DECODE_SIZED,
    "Tfswap>DecodeSparse": _DECODE_SIZED,
    "Tfswap>EncodeFloats": _ENCODE,
    "Tfswap>EncodeGroups": _ENCODE,
    "Tfswap>EncodeIntegers": _ENCODE,
    "Tfswap>EncodeMask": _ENCODE,
    "Tfswap>EncodeMaxPool": _ENCODE,
    "Tfswap>EncodeSparse": _ENCODE,
    "Tfswap>LeakyReluGradFromMask": _PURE,
    "Tfswap>MaxPoolGradFromPositions": _PURE,
    "Tfswap>MultiplyByMask": _PURE,
    "Tfswap>SelectByMask": _PURE,
    "Tfswap>Sum": _PURE,
}
