"""The facts about types of ops that passes and planners depend on."""

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
    ELEMENTWISE = auto()
    """Each element of its output depends on those elements of its inputs that are at the same place (broadcasting)."""
    EINSUM = auto()
    """Multiplies and sums over the labels of its `equation`."""
    ONLY_WAITS = auto()
    """Has neither inputs nor outputs: it joins control edges."""
    INLINE = auto()
    """Its CPU kernel reports that it is not expensive (OpKernel::IsExpensive): the executor runs it on the thread that
    made it ready."""
