"""One kernel at a time, whole and in slices that may add in another order: the lines of kernels/close_lines.py."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from kernels_in_slices import MOST_CALLS, Cases, in_slices, this_device

from tfswap.kernels.close_lines import CLOSE_LINES, most_difference

R = tf.raw_ops
ROUNDING = 2.0**-20
"""Of functions of sums: a share of the result's magnitude."""
POOL = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}
FUNCTIONS = ("Erf", "Exp", "Log", "Rsqrt", "RsqrtGrad", "Sigmoid", "Softplus", "Tanh")
"""Ops that are computed in packets of elements, and otherwise one by one, with other last bits."""
NOT_LINEAR = ("LogSoftmax", "Max", "Min", "Softmax", *FUNCTIONS)
EQUATIONS = ("abc,cde->abde", "acbe,aecd->acbd", "abc,abd->cd", "abcd,ade->abce", "abc->b")


class CloseCases(Cases):
    """Random calls of the ops of CLOSE_LINES."""

    def of(self, op):
        """A call of an op, as a function and its arguments."""
        if "MaxPool" in op and op.startswith("_MklNative"):
            return self.pool_with_places(op)
        if op.startswith("_MklNativeConv2D"):
            return self.with_bias(op)
        if "3D" in op:
            return self.volume(op)
        if op.startswith("Depthwise"):
            return self.depthwise(op)
        rows, width = self.size(8, 400), self.size(2, 300)
        if op in ("Softmax", "LogSoftmax"):
            return lambda x: getattr(R, op)(logits=x), [self.tensor(rows, width)]
        if op in ("Max", "Mean", "Min", "Sum"):
            axes = self.choice([-1], [1], [-1, -2], *([[0, 1, 2], [0]] if op == "Sum" else []))
            return lambda x: getattr(R, op)(input=x, axis=axes, keep_dims=False), [self.tensor(rows, 3, width)]
        if op == "BatchMatMulV2":
            batch, adjoint = [self.size(2, 12), self.size(1, 6)], self.choice(False, True)
            left, right = self.tensor(*batch, 9, width), self.tensor(*batch, *((7, width) if adjoint else (width, 7)))
            return lambda x, y: R.BatchMatMulV2(x=x, y=y, adj_y=adjoint), [left, right]
        if op == "Einsum":
            equation = self.choice(*EQUATIONS)
            sizes = {label: self.size(2, 24) for label in "abcde"}
            shapes = [[sizes[label] for label in term] for term in equation.split("->")[0].split(",")]
            call = lambda *given: R.Einsum(inputs=given, equation=equation)  # noqa: E731
            return call, [self.tensor(*shape) for shape in shapes]
        return super().of(op)

    def convolution(self, large=False):
        """Sizes also of one image, whose rows begin where kernels need it."""
        image, kernel, stride = super().convolution(large)
        if self.choice(False, True):
            image = [1, image[1], -(-image[2] // 16) * 16, image[3]]
        return image, kernel, stride

    def volume(self, op):
        # Of one image the rows are sliced, which begin where kernels need it.
        shape = [self.choice(1, self.size(2, 6)), 8, 2 * self.size(2, 8), 8, self.choice(1, 4, 8)]
        x = self.tensor(*shape)
        if "Pool" in op:
            made = R.MaxPool3D(input=x, **POOL)
            grad = self.tensor(*made.shape)
            return {
                "AvgPool3D": (lambda x: R.AvgPool3D(input=x, **POOL), [x]),
                "AvgPool3DGrad": (lambda g: R.AvgPool3DGrad(orig_input_shape=shape, grad=g, **POOL), [grad]),
                "MaxPool3D": (lambda x: R.MaxPool3D(input=x, **POOL), [x]),
                "MaxPool3DGrad": (
                    lambda x, y, g: R.MaxPool3DGrad(orig_input=x, orig_output=y, grad=g, **POOL),
                    [x, made, grad],
                ),
            }[op]
        sizes = [3, 3, 3, shape[-1], self.size(1, 8)]
        kernel, grad = self.tensor(*sizes), self.tensor(*shape[:-1], sizes[-1])
        attrs = {"strides": [1] * 5, "padding": "SAME"}
        if op == "Conv3D":
            return lambda x, w: R.Conv3D(input=x, filter=w, **attrs), [x, kernel]
        if op == "Conv3DBackpropFilterV2":
            backward = lambda x, g: R.Conv3DBackpropFilterV2(input=x, filter_sizes=sizes, out_backprop=g, **attrs)  # noqa: E731
            return backward, [x, grad]
        backward = lambda w, g: R.Conv3DBackpropInputV2(input_sizes=shape, filter=w, out_backprop=g, **attrs)  # noqa: E731
        return backward, [kernel, grad]

    def pool_with_places(self, op):
        """A call of a pooling and its gradient, which oneDNN gives the positions of the maxima."""
        volume = "3D" in op
        axes = 3 if volume else 2
        pool, grad = (R.MaxPool3D, R.MaxPool3DGrad) if volume else (R.MaxPool, R.MaxPoolGrad)
        attrs = {"ksize": [1, *axes * [2], 1], "strides": [1, *axes * [2], 1], "padding": "VALID"}
        # The positions of an image, one byte each, begin where kernels need it.
        x = self.tensor(self.size(2, 8), *axes * [8], 16 * self.size(1, 4))
        gradient = self.tensor(x.shape[0], *axes * [4], x.shape[-1])

        def both(x, g):
            pooled = pool(input=x, **attrs)
            return grad(orig_input=x, orig_output=pooled, grad=g, **attrs), pooled

        return both, [x, gradient]

    def with_bias(self, op):
        """A call of a convolution and a bias, or of their gradients, which oneDNN's graph pass makes one kernel."""
        image, kernel, stride = self.convolution()
        attrs = {"strides": [1, stride, stride, 1], "padding": "SAME"}
        if op == "_MklNativeConv2DWithBias":
            added = lambda x, w, b: R.BiasAdd(value=R.Conv2D(input=x, filter=w, **attrs), bias=b)  # noqa: E731
            return added, [self.tensor(*image), self.tensor(*kernel), self.tensor(kernel[3])]
        gradient = self.tensor(image[0], -(-image[1] // stride), -(-image[2] // stride), kernel[3])

        def both(x, g):
            of_filter = R.Conv2DBackpropFilter(input=x, filter_sizes=kernel, out_backprop=g, **attrs)
            return of_filter, R.BiasAddGrad(out_backprop=g)

        return both, [self.tensor(*image), gradient]

    def depthwise(self, op):
        shape = [self.size(2, 8), 9, self.size(4, 20), self.size(1, 12)]
        sizes = [3, 3, shape[-1], 2]
        x, kernel, grad = self.tensor(*shape), self.tensor(*sizes), self.tensor(*shape[:-1], 2 * shape[-1])
        attrs = {"strides": [1] * 4, "padding": "SAME"}
        if op == "DepthwiseConv2dNative":
            return lambda x, w: R.DepthwiseConv2dNative(input=x, filter=w, **attrs), [x, kernel]
        if op.endswith("Filter"):
            return lambda x, g: R.DepthwiseConv2dNativeBackpropFilter(
                input=x, filter_sizes=sizes, out_backprop=g, **attrs
            ), [x, grad]
        return lambda w, g: R.DepthwiseConv2dNativeBackpropInput(
            input_sizes=shape, filter=w, out_backprop=g, **attrs
        ), [kernel, grad]


def beyond_bounds(seed, tries, threads):
    """By op, how many slicings of random calls were compared, and what those were that differ by more than their bound.

    Args:
        seed, tries, threads: as of `kernels_in_slices.differing`.
    """
    cases, device = CloseCases(seed), this_device(threads)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    found = {}
    for op in (*CLOSE_LINES, *FUNCTIONS):
        if op.startswith("_MklNative") and not device.onednn:
            continue
        compared, wrong = 0, []
        for _ in range(MOST_CALLS * tries):
            if compared == tries:
                break
            call, arguments = cases.of(op)
            made = in_slices(op, call, arguments, device, cases, close=True)
            if made is None:
                continue
            wholes, parts, node, described = made
            compared += 1
            of_magnitudes = tf.nest.flatten(tf.function(call)(*map(tf.abs, arguments)))
            for whole, part, magnitude in zip(wholes, parts, of_magnitudes, strict=True):
                of = np.abs(whole) + 1 if op in NOT_LINEAR or "MaxPool" in op else np.asarray(magnitude)
                if not (np.abs(whole - part) <= (most_difference(node) + ROUNDING) * of + 1e-30).all():
                    wrong.append(described)
        found[op] = compared, wrong
    return found
