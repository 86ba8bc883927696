"""How long a kernel takes, from its operations and bytes, or from a measurement of it.

The analytic model takes the longest of three: arithmetic in contractions, arithmetic that goes element by element,
and memory traffic; and adds what it takes to start a kernel. Rates describe a kind of machine, so that the same
graph and limit give the same plan everywhere. `Costs` is what planners use; a `Profile` in it comes first.

A loop or a conditional takes as long as all that its bodies run, copies inside of them included.

Checked against measured kernels by `benchmarks/cost_model.py`. Not handled: what a kernel finds in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from tfswap.errors import TfswapError
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import is_const, is_feed, is_view, pops_list, reads_metadata_only
from tfswap.ir.types import TensorType
from tfswap.ir.views import passed_on
from tfswap.kernels.columns import conv3d_columns
from tfswap.kernels.cudnn_algorithms import CHANNELS_FIRST, copied_bytes
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.einsum import einsum_parts
from tfswap.kernels.hardware import Rates, default_rates
from tfswap.kernels.profile import Profile
from tfswap.support.reach import reach

if TYPE_CHECKING:
    from tfswap.analysis.dataflow import Dataflow


@dataclass(frozen=True)
class Costs:
    """Where the seconds of a step's kernels and copies come from.

    Attributes:
        rates: of the copies, and of kernels that nobody has measured.
        profile: measured kernels, which come first.
        measured: whether the rates were measured without a profile, on this machine.
    """

    rates: Rates
    profile: Profile | None = None
    measured: bool = False

    @classmethod
    def of(cls, device: DeviceModel, profile: Profile | None = None) -> Costs:
        """Of a device of this kind; as measured when there is a profile.

        Raises TfswapError when the profile is of another kind of device.
        """
        if profile is None:
            return cls(default_rates(device))
        if profile.kind != device.kind:
            raise TfswapError(
                f"the profile was taken on a {profile.kind} ({profile.machine}), and this step runs on a "
                f"{device.kind}: call tfswap.profile where the step runs, or leave profile= out"
            )
        return cls(profile.rates, profile)

    @property
    def source(self) -> str:
        if self.profile is not None:
            return "profiled"
        return "analytic, at measured rates" if self.measured else "analytic"

    def seconds(self, node: Node) -> float:
        """Of one run of `node`."""
        measured = None if self.profile is None else self.profile.seconds(node)
        return kernel_seconds(node, self.rates) if measured is None else self.rates.launch_s + measured

    def of_step(self, flow: Dataflow) -> list[float]:
        """Seconds of one run of each node of a step."""
        return [
            self._looped(node, flow.runs[i]) if flow.runs.get(i) else self.seconds(node)
            for i, node in enumerate(flow.nodes)
        ]

    def _looped(self, node: Node, runs: Mapping[Graph, float]) -> float:
        """Of a loop or a conditional that runs its bodies so often."""
        if self.profile is not None and self.profile.seconds(node) is not None:
            return self.seconds(node)
        return self.rates.launch_s + sum(times * self.body_seconds(body) for body, times in runs.items())

    def body_seconds(self, body: Graph) -> float:
        """Of one run of a body that has an order, without the bodies of its own loops and conditionals.

        Of a body that starts copies for its next run, one after others.
        """
        return self.body_run(body).seconds

    def body_run(self, body: Graph) -> BodyRun:
        """As `body_seconds`, with what it waits for."""
        loads = _prefetched(body)
        carried = BodyRun(0.0, {}, {})
        for _ in range(FIRST_RUNS if loads else 0):
            carried = self._run(body, loads, carried.under_way)
        return self._run(body, loads, carried.under_way)

    def group_seconds(self, group: Sequence[Node]) -> float:
        """Of the kernels of a body's group, in their order: each runs as soon as what it reads is there."""
        place = {node: n for n, node in enumerate(group)}
        waits_for = [sorted({place[k] for k in makers(node, place)}) for node in group]
        cost_s = [self.seconds(node) for node in group]
        cores = [group_cores(node, seconds, self.rates) for node, seconds in zip(group, cost_s, strict=True)]
        return unordered_seconds(cost_s, cores, waits_for, self.rates)

    def _run(self, body: Graph, loads: Mapping[Node, Node], under_way: Mapping[Node, float]) -> BodyRun:
        """
        Args:
            loads: by Prefetch, the SwapIn whose copy it starts in the run before.
            under_way: by SwapIn, when the copy that was started then ends.
        """
        rates = self.rates
        now = out_free = lost = 0.0
        in_free = max(under_way.values(), default=0.0)
        ends: dict[Node, float] = {}  # of copies, by the node that started them
        ahead: dict[Node, float] = {}
        waits: dict[Node, float] = {}
        groups = {group[-1]: group for group in body.groups()}
        grouped = {node for group in groups.values() for node in group}
        for node in body.topological():
            copy_s = 0.0
            if node.op == custom_ops.SWAP_OUT:
                copy_s = (node.inputs[0].type.nbytes or 0) / rates.out_bytes_per_s
                ends[node] = out_free = max(out_free, now) + copy_s
            elif node in under_way:
                ends[node] = under_way[node]
            elif node.op == custom_ops.SWAP_IN or node in loads:
                load = loads.get(node, node)
                copy_s = (load.outputs[0].nbytes or 0) / rates.in_bytes_per_s
                in_free = max(in_free, now) + copy_s
                (ends if load is node else ahead)[load] = in_free
            lost += copy_s * rates.copy_share
            if node.op in (custom_ops.RELEASE, custom_ops.AWAIT):
                waits[node] = max(0.0, ends[node.inputs[0].node] - now)
            if node.op in custom_ops.ALL:
                now += waits.get(node, 0.0) + rates.launch_s
            elif node in body.bodies:
                now += rates.launch_s
            elif node in groups:
                now += self.group_seconds(groups[node])
            elif not (node in grouped or is_view(node.op) or is_const(node.op) or is_feed(node.op)):
                now += self.seconds(node)
        return BodyRun(now + lost, waits, {load: end - now for load, end in ahead.items()})


FIRST_RUNS = 2
"""After so many runs of a body each takes as long as the one before it, copies for the next one included."""


class BodyRun(NamedTuple):
    """One run of a body.

    Attributes:
        seconds: that it takes.
        waits: by node that waits for a copy, the seconds.
        under_way: by SwapIn of the next run, when its copy ends, counted from this run's end.
    """

    seconds: float
    waits: dict[Node, float]
    under_way: dict[Node, float]


def _prefetched(body: Graph) -> dict[Node, Node]:
    """By Prefetch of a loop's body, the SwapIn of the next run whose copy it starts."""
    ahead = {feed.out(): fetch.node for feed, fetch in zip(body.feeds, body.fetches, strict=False)}
    found: dict[Node, Node] = {}
    for node in body:
        if node.op == custom_ops.SWAP_IN and pops_list((pop := node.inputs[0].node).op):
            source = ahead.get(passed_on(pop.inputs[0]))
            if source is not None and source.op == custom_ops.PREFETCH:
                found[source] = node
    return found


GRAIN_S = 34e-6
"""Eigen spreads a kernel over one more core for each so much work (100,000 cycles: TensorCostModel), so that
smaller ones run on one core."""

Count = Callable[[Node], float]
"""From a node to a number of operations."""


class Work(NamedTuple):
    """What a kernel does, by type of op.

    Attributes:
        flops: operations of its contraction, if it is one.
        efficiency: share of the machine's rate of contractions that it reaches.
        steps: element-wise operations, for each element of its largest input or output. As many as fit next to the
            memory traffic are not counted: 0 for most.
        passes: bytes that it moves, for each of its inputs and outputs.
        spread: share of the machine's cores that it keeps busy, and one at least: from the times of the kernels of
            four ordered steps (ResNet-50, VGG16, MobileNetV2, a transformer) with one thread over those with two, or
            from the share of a kernel's CPU time that the thread takes which calls it (`benchmarks/one_core.py`).
        alone: what it takes where it stays on one core, over what it takes where threads share it and gain nothing.
        gathers: whether it touches no more of its first input than it gives: a table may be a thousand times as large.
    """

    flops: Count | None = None
    efficiency: float = 1.0
    steps: float = 0.0
    passes: float = 1.0
    spread: float = 1.0
    alone: float = 1.0
    gathers: bool = False


def _elements(kind: TensorType) -> int:
    return kind.num_elements or 0


def _window(kind: TensorType, dims: int | None = None) -> int:
    """Elements of a filter under one output channel, or the product of its first dimensions."""
    shape = kind.shape or (1,)
    return math.prod(d or 1 for d in (shape[:-1] if dims is None else shape[:dims]))


def _matmul(node: Node) -> float:
    """2 m n k: the contracted dimension is the one that the transposition leaves."""
    left = node.inputs[0].type.shape
    transposed = node.attrs.get("transpose_a") or node.attrs.get("adj_x")
    if not left or len(left) < 2:
        return 0.0
    return 2.0 * _elements(node.outputs[0]) * (left[-2 if transposed else -1] or 1)


def _convolution(node: Node) -> float:
    """Each output element takes a multiply-add per filter element of its channel."""
    return 2.0 * _elements(node.outputs[0]) * _window(node.inputs[1].type)


PATCH_FLOPS = 32.0
"""So much arithmetic is as long as it takes to move one element of the image's patches, which a filter's gradient lays
out and an image's gradient adds up, in about half of the time. Each is used once per channel, so that few channels are
slow. From CPU times of kernels of 16 to 512 channels."""


def _pixels(node: Node) -> int:
    """Elements of one channel of the gradient that a gradient of a convolution is given."""
    shape = node.inputs[2].type.shape or (1,)
    channels_first = node.attrs.get("data_format") in CHANNELS_FIRST
    return math.prod(d or 1 for d in ((shape[0], *shape[2:]) if channels_first else shape[:-1]))


def _filter_gradient(node: Node) -> float:
    """As many multiply-adds as the forward convolution, the gradient's elements times the window; and the patches."""
    return (2.0 * _third_input(node) + PATCH_FLOPS * _pixels(node)) * _window(node.outputs[0])


PACKING_FLOPS = 160.0
"""Conv2DBackpropInput multiplies image by image, and brings the whole filter into its layout for each: so much of a
contraction's arithmetic is as long as that takes for one element (VGG16 and ResNet-50 within 1.7)."""


def _input_gradient(node: Node) -> float:
    kernel, images = node.inputs[1].type, (node.inputs[2].type.shape or (1,))[0] or 1
    adding = PATCH_FLOPS / 2 * _pixels(node)
    return (2.0 * _third_input(node) + adding) * _window(kernel) + PACKING_FLOPS * images * _elements(kernel)


def _gradients(window: int | None, others: Work) -> Callable[[Node, Rates], Work]:
    """Of a convolution, whose filter is input `window`, or the output.

    Args:
        others: what kernels do that are not cuDNN's.
    """

    def flops(node: Node) -> float:
        return 2.0 * _third_input(node) * _window(node.outputs[0] if window is None else node.inputs[window].type)

    cudnn = Work(flops)
    return lambda _, rates: cudnn if rates.cudnn else others


COLUMNS_CACHE = 8 << 20
"""Elements of a last-level cache of 32 MiB: whether a gradient of a volume lays out columns depends on it."""
FILTER_COLUMN_FLOPS, COLUMN_FLOPS, EIGEN_FILTER_FLOPS = 40.0, 30.0, 170.0
"""So much arithmetic for each element of a volume's patches: laid out as columns for a filter's gradient, or for an
image's, and for a filter's in Eigen's kernel, which lays none out. An image's then takes no more than its product. From
CPU times of 34 kernels of 4 to 128 channels in an arena; those of 100,000 pixels keep both cores busy."""


def _volume_filter_gradient(node: Node, rates: Rates) -> Work:
    return _of_volume(node, rates, node.inputs[0].type, node.outputs[0], one_by_one=False)


def _volume_gradient(node: Node, rates: Rates) -> Work:
    return _of_volume(node, rates, node.outputs[0], node.inputs[1].type, one_by_one=True)


def _of_volume(node: Node, rates: Rates, volume: TensorType, kernel: TensorType, *, one_by_one: bool) -> Work:
    """Of a gradient of a 3-D convolution: of its filter, or of its image, which can be made `one_by_one`."""
    gradient, window = (tuple(d or 1 for d in kind.shape or (1,) * 5) for kind in (node.inputs[2].type, kernel))
    has_columns = conv3d_columns(gradient, window, _elements(volume), COLUMNS_CACHE, one_by_one=one_by_one)
    if rates.cudnn:
        element = 0.0
    elif one_by_one:
        element = COLUMN_FLOPS if has_columns else 0.0
    else:
        element = FILTER_COLUMN_FLOPS if has_columns else EIGEN_FILTER_FLOPS

    def flops(node: Node) -> float:
        return (2.0 * _third_input(node) + element * _pixels(node)) * _window(kernel)

    return Work(flops)


def _depthwise(maps: Count, window: int | None) -> Count:
    """A multiply-add for each element of the maps and of the filter's window: input `window`, or the output."""

    def flops(node: Node) -> float:
        kind = node.outputs[0] if window is None else node.inputs[window].type
        return 2.0 * maps(node) * _window(kind, 2)

    return flops


def _output(node: Node) -> float:
    return float(_elements(node.outputs[0]))


def _third_input(node: Node) -> float:
    return float(_elements(node.inputs[2].type))


LARGE_PRODUCT_FLOPS = 64e6
"""Eigen shares a product among cores where each matrix of the batch takes more: one of 256 x 256 x 256 ran on one core,
one of 128 x 384 x 1536 on 1.5 of two."""
_MATMUL = Work(_matmul)
_SMALL_PRODUCTS = Work(_matmul, 0.55, spread=0.0, alone=0.5)
_LARGE_PRODUCTS = Work(_matmul, 0.8, spread=0.77)
_ONEDNN_PRODUCTS = Work(_matmul, 0.85, spread=0.8)
"""oneDNN shares all of them. Shares and rates of nine shapes, with one thread and with two."""


def _product(node: Node, rates: Rates) -> Work:
    """Of a product of two matrices. Of 3 to 34 million operations, an LSTM's of 128 to 256 units, those of sixteen
    shapes took 0.89 to 1.89 times as long on one thread as on two, 1.09 in the middle; of 67 to 4,300 million 1.56."""
    return _of_product(_matmul(node), rates)


def _of_product(flops: float, rates: Rates) -> Work:
    small = not (rates.onednn or rates.cudnn) and flops <= LARGE_PRODUCT_FLOPS
    return _SMALL_PRODUCTS if small else _MATMUL


def _products(node: Node, rates: Rates) -> Work:
    """Of a batch of products of matrices."""
    matrices = math.prod(d or 1 for d in (node.outputs[0].shape or ())[:-2])
    return _of_products(_matmul(node), matrices, rates)


def _of_products(flops: float, matrices: int, rates: Rates) -> Work:
    if rates.onednn:
        return _ONEDNN_PRODUCTS
    return _LARGE_PRODUCTS if flops > matrices * LARGE_PRODUCT_FLOPS else _SMALL_PRODUCTS


TRANSPOSED_STEPS = 5
"""Element-wise operations that it takes to transpose an element."""
FILLED_STEPS = 12
"""Those that it takes to write an element of a slice's gradient among the zeros."""


def _einsum(node: Node, rates: Rates) -> Work:
    """A product of matrices, or a batch of them, and what is transposed before and after.

    A product with a vector, or of two, streams: TensorFlow shares a batch of these among the cores
    (batch_matmul_op_impl.h).
    """
    parts = einsum_parts(node.attrs.get("equation"), [t.type for t in node.inputs])
    if parts is None:
        return _STREAM
    product, copied = parts
    largest = max(map(_elements, (*node.outputs, *(t.type for t in node.inputs))))
    steps = TRANSPOSED_STEPS * copied / max(largest, 1)
    if product is None or min(product.rows, product.inner, product.columns) == 1:
        return Work(steps=steps)
    flops = 2.0 * product.batch * product.rows * product.inner * product.columns
    work = _of_product(flops, rates) if product.batch == 1 else _of_products(flops, product.batch, rates)

    def computed(_: Node) -> float:
        return flops

    return work._replace(flops=computed, steps=steps, alone=1.0)


def _slice_gradient(node: Node, _: Rates) -> Work:
    """Zeros, and the gradient of the slice among them."""
    filled, of = _elements(node.inputs[-1].type), _elements(node.outputs[0])
    return Work(steps=FILLED_STEPS * filled / max(filled, of, 1))


_STREAM = Work()
_NOTHING = Work(passes=0.0)

# What is not here streams through memory once. Efficiencies and steps are those of TensorFlow's own CPU kernels on
# one core, at CPU_CORE_FLOPS_PER_S and CPU_CORE_STEPS_PER_S.
_WORK: dict[str, Work | Callable[[Node, Rates], Work]] = {
    "_FusedConv2D": Work(_convolution, spread=0.86),
    "_FusedMatMul": Work(_matmul),
    "_MklNativeConv2DBackpropFilterWithBias": Work(_filter_gradient, 0.8, spread=0.8),
    "_MklNativeConv2DWithBias": Work(_convolution, spread=0.86),
    "_MklNativeFusedConv2D": Work(_convolution, spread=0.86),
    "_MklNativePadWithConv2D": Work(_convolution, spread=0.86),
    "_MklNativePadWithFusedConv2D": Work(_convolution, spread=0.86),
    "_MklNativeMaxPool3DGrad": Work(steps=3),
    "_MklNativeMaxPoolGrad": Work(steps=3),
    "ArgMax": Work(steps=2.5),
    "ArgMin": Work(steps=2.5),
    "AssignAddVariableOp": Work(passes=3),  # the variable, read and written
    "AssignSubVariableOp": Work(passes=3),
    "AvgPool": Work(spread=0.0),
    "AvgPool3DGrad": Work(steps=7.5, spread=0.0),
    "BatchMatMul": _products,
    "BatchMatMulV2": _products,
    "BatchMatMulV3": _products,
    "Conv2D": Work(_convolution, spread=0.86),
    "Conv2DBackpropFilter": _gradients(None, Work(_filter_gradient, 0.8, spread=0.8)),
    "Conv2DBackpropInput": _gradients(1, Work(_input_gradient, spread=0.87)),
    "Conv3D": Work(_convolution),
    "Conv3DBackpropFilterV2": _volume_filter_gradient,
    "Conv3DBackpropInputV2": _volume_gradient,
    "Cumsum": Work(steps=21),
    "DepthwiseConv2dNative": Work(_depthwise(_output, 1), 0.16),
    "DepthwiseConv2dNativeBackpropFilter": Work(_depthwise(_third_input, None), 0.14),
    "DepthwiseConv2dNativeBackpropInput": Work(_depthwise(_third_input, 1), 0.12),
    "Einsum": _einsum,
    "Erfc": Work(steps=3.5),
    "Expm1": Work(steps=4),
    "FloorMod": Work(steps=4),
    "FusedBatchNorm": Work(steps=5),
    "FusedBatchNormGrad": Work(steps=5),
    "FusedBatchNormGradV2": Work(steps=5),
    "FusedBatchNormGradV3": Work(steps=5),
    "FusedBatchNormV2": Work(steps=5),
    "FusedBatchNormV3": Work(steps=5),
    "Gather": Work(steps=2, gathers=True),
    "GatherNd": Work(steps=2, gathers=True),
    "GatherV2": Work(steps=2, gathers=True),
    "LRN": Work(steps=8),
    "LRNGrad": Work(steps=8),
    "Log": Work(steps=5.5),
    "Log1p": Work(steps=5.5),
    "LogSoftmax": Work(steps=3),
    "MatMul": _product,
    "MaxPool3DGrad": Work(steps=35, spread=0.0),
    "MaxPoolGrad": Work(steps=12),
    "Mean": Work(steps=1.5),
    "Pow": Work(steps=22),
    "RandomStandardNormal": Work(steps=24),
    "RandomUniform": Work(steps=9),
    "ReadVariableOp": _NOTHING,  # the variable's own buffer
    "ResizeBilinear": Work(steps=0.5, spread=0.0),
    "ResizeBilinearGrad": Work(steps=3, spread=0.0),
    "ResizeNearestNeighbor": Work(steps=5),
    "ResizeNearestNeighborGrad": Work(spread=0.0),
    "ResourceApplyAdam": Work(passes=7),  # the variable and two slots, read and written
    "ResourceApplyGradientDescent": Work(passes=3),
    "ResourceApplyKerasMomentum": Work(passes=5),
    "ResourceApplyMomentum": Work(passes=5),
    "ScatterNd": Work(steps=9, spread=0.0),
    "SelectV2": Work(steps=2),
    "Softmax": Work(steps=3.5),
    "SoftmaxCrossEntropyWithLogits": Work(steps=7),
    "Softplus": Work(steps=6),
    "SpaceToDepth": Work(spread=0.0),
    "SparseSoftmaxCrossEntropyWithLogits": Work(steps=9),
    "StatelessRandomNormal": Work(steps=24),
    "StatelessRandomNormalV2": Work(steps=24),
    "StatelessRandomUniform": Work(steps=9),
    "StatelessRandomUniformV2": Work(steps=9),
    "StatelessTruncatedNormal": Work(steps=46),
    "StatelessTruncatedNormalV2": Work(steps=46),
    "StridedSliceGrad": _slice_gradient,
    "Sum": Work(steps=1.2),
    "TensorListGetItem": _NOTHING,  # lists pass on what they keep
    "TensorListPopBack": _NOTHING,
    "TensorListPushBack": _NOTHING,
    "TensorListSetItem": _NOTHING,
    "TensorScatterAdd": Work(steps=10, spread=0.0),
    "TopKV2": Work(steps=9),
    "Transpose": Work(steps=TRANSPOSED_STEPS),
    "TruncatedNormal": Work(steps=46),
    "UnsortedSegmentSum": Work(steps=9),
    "Where": Work(steps=25, spread=0.0),
    # tfswap's codecs; those of pooling as with windows of 2 x 2 and 3 x 3 that do not overlap much.
    "Tfswap>DecodeFloats": Work(steps=1.3),
    "Tfswap>DecodeGroups": Work(steps=1.5),
    "Tfswap>DecodeMask": Work(steps=1),
    "Tfswap>EncodeFloats": Work(steps=1.7),
    "Tfswap>EncodeGroups": Work(steps=9),
    "Tfswap>EncodeMask": Work(steps=0.9),
    "Tfswap>EncodeMaxPool": Work(steps=1.2),
    "Tfswap>EncodeSparse": Work(steps=1.7),
    "Tfswap>MaxPoolGradFromPositions": Work(steps=2.5),
}


def work_seconds(node: Node, rates: Rates) -> float:
    """Seconds of the work of one run of `node`, on the cores that it is spread over."""
    alone = (max(_parts(node, rates)) + copying_seconds(node, rates)) * rates.cores
    return min(alone, max(alone / spread_over(node, rates), GRAIN_S))


def copying_seconds(node: Node, rates: Rates) -> float:
    """Of what TensorFlow copies before and after cuDNN's kernel, each read and written once."""
    if not rates.cudnn or rates.channels_last:
        return 0.0
    return 2 * copied_bytes(node) / rates.memory_bytes_per_s


def _parts(node: Node, rates: Rates) -> tuple[float, float, float]:
    """Seconds of a node's contraction, its element-wise operations and its memory traffic, on all cores."""
    work = _work(node, rates)
    read = [t.type for t in node.inputs]
    kinds = [*node.outputs, *read[1:], *node.outputs] if work.gathers else [*read, *node.outputs]
    flops = work.flops(node) / work.efficiency if work.flops else 0.0
    steps = work.steps * max(map(_elements, kinds), default=0)
    moved = work.passes * sum(kind.nbytes or 0 for kind in kinds)
    return flops / rates.flops_per_s, steps / rates.steps_per_s, moved / rates.memory_bytes_per_s


def cores_used(node: Node, rates: Rates) -> float:
    """How many of the machine's cores a run of `node` keeps busy."""
    return 1.0 if work_seconds(node, rates) <= GRAIN_S else spread_over(node, rates)


def spread_over(node: Node, rates: Rates) -> float:
    """The cores that a large kernel of this op gains by."""
    return max(1.0, _work(node, rates).spread * rates.cores)


def concurrent_seconds(kernels: Sequence[tuple[Node, float]], rates: Rates) -> float:
    """Seconds of kernels side by side: of their work on all cores, and no less than the longest takes alone.

    Args:
        kernels: each with its seconds.
    """
    work_s = sum(seconds * spread_over(node, rates) for node, seconds in kernels)
    return max(work_s / rates.cores, *(seconds for _, seconds in kernels))


ONE_CORE_WORK = 0.8
"""Of the core seconds that a kernel takes of all cores so much on one: the kernels of a transformer's step take 0.24 in
all on one core, and 0.32 shared by two, without what they wait for."""


def one_core_seconds(node: Node, seconds: float, rates: Rates) -> float:
    """Seconds of a kernel that stays on one core, concurrently with others.

    Args:
        seconds: that it takes when it may have all cores.
    """
    shared = 1.0 if seconds <= GRAIN_S else spread_over(node, rates)
    return seconds * _work(node, rates).alone * max(1.0, ONE_CORE_WORK * shared)


def _work(node: Node, rates: Rates) -> Work:
    work = _NOTHING if reads_metadata_only(node.op) else _WORK.get(node.op, _STREAM)
    return work if isinstance(work, Work) else work(node, rates)


def kernel_seconds(node: Node, rates: Rates) -> float:
    """Seconds that one run of `node` takes on a machine with these rates."""
    body_s = node.attrs.get(custom_ops.BODY_SECONDS)
    return rates.launch_s + (body_s if isinstance(body_s, float) else work_seconds(node, rates))


def fitted(rates: Rates, measured: Sequence[tuple[Node, float]]) -> Rates:
    """`rates` with those of kernels such that each kind of work takes as long in all as it was measured to take.

    Args:
        measured: kernels, and the seconds that one run of each took once it had started.
    """
    terms = ("flops_per_s", "steps_per_s", "memory_bytes_per_s")
    predicted, found = dict.fromkeys(terms, 0.0), dict.fromkeys(terms, 0.0)
    for node, seconds in measured:
        parts = _parts(node, rates)
        if max(parts) * rates.cores <= GRAIN_S:
            continue  # its time is that of starting it
        longest = terms[parts.index(max(parts))]
        predicted[longest] += work_seconds(node, rates)
        found[longest] += seconds
    scales = {t: predicted[t] / found[t] for t in terms if predicted[t] and found[t]}
    return replace(rates, **{t: getattr(rates, t) * scale for t, scale in scales.items()})


LOOPED_S = 150e-6
"""In a loop a kernel that takes no longer gains little by being shared among threads, which wait for each other at its
end: the large kernels of a decoder's iteration, 50 to 150 us each, take as long on one thread as on two."""


def group_cores(node: Node, seconds: float, rates: Rates) -> float:
    """The cores that a kernel of a group, which takes so long, keeps busy."""
    return 1.0 if seconds <= LOOPED_S else spread_over(node, rates)


def makers(node: Node, wanted: Collection[Node]) -> Iterator[Node]:
    """Those of `wanted` that a node reads, behind views too. Groups know no other order of their kernels."""

    def sources(of: Node) -> list[Node]:
        through = of is node or (of not in wanted and (is_view(of.op) or reads_metadata_only(of.op)))
        return [t.node for t in of.inputs] if through else []

    yield from (source for source in reach(sources(node), sources) if source in wanted)


def unordered_seconds(
    cost_s: Sequence[float], cores: Sequence[float], waits_for: Sequence[Sequence[int]], rates: Rates
) -> float:
    """Seconds of a step whose kernels run as soon as they can: those on one core side by side.

    Args:
        cost_s: of each node, in topological order; 0 for those that are no kernels.
        cores: that each keeps busy.
        waits_for: the nodes that each waits for.
    """
    ends: list[float] = []
    for seconds, before in zip(cost_s, waits_for, strict=True):
        ends.append(seconds + max((ends[b] for b in before), default=0.0))
    busy = sum(seconds * used for seconds, used in zip(cost_s, cores, strict=True))
    return max(busy / rates.cores, max(ends, default=0.0))
