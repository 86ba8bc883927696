"""Colours, contrast and resizing of images."""

from __future__ import annotations

from math import prod

from tfswap.kernels.memory_rules import UNARY, Entry, events_rule, in_order
from tfswap.kernels.temporaries import (
    OUT0,
    UNKNOWN,
    Events,
    Facts,
    after_output,
    element_bytes,
    known_shape,
    summed_in_float32,
)


def rgb_to_hsv(facts: Facts) -> Events:
    """colorspace_op.cc: the range of each pixel's colours, a temporary."""
    pixels = (facts.outputs[0].num_elements or 0) // 3
    return after_output([pixels * element_bytes(facts.outputs[0])])


def adjust_contrast(facts: Facts) -> Events:
    """adjust_contrast_op.cc: the mean of each image's channels."""
    shape = known_shape(facts.inputs[0])
    if shape is None:
        return UNKNOWN
    return after_output([4 * prod(shape[:-3]) * shape[-1]], exact=not facts.device.is_gpu)


def _weights(source: int, result: int) -> tuple[int, int]:
    """scale_and_translate_op.cc: the first source pixel of each result, and at most one weight per source pixel."""
    return 4 * result, 4 * source * result


def scale_and_translate(facts: Facts) -> Events:
    """scale_and_translate_op.cc: weights for rows and for columns, and the image after the first resizing."""
    image, result = known_shape(facts.inputs[0]), known_shape(facts.outputs[0])
    if image is None or result is None:
        return UNKNOWN
    between = 4 * image[0] * result[1] * image[2] * image[3]
    sizes = [*_weights(image[1], result[1]), *_weights(image[2], result[2]), between]
    return after_output(sizes, exact=False)


def scale_and_translate_grad(facts: Facts) -> Events:
    """scale_and_translate_op.cc: the transposed weights as well, and the image between the two resizings."""
    gradient, image = known_shape(facts.inputs[0]), known_shape(facts.outputs[0])
    if gradient is None or image is None:
        return UNKNOWN
    sizes = [size for i in (1, 2) for size in (*_weights(image[i], gradient[i]), *_weights(gradient[i], image[i]))]
    return after_output([*sizes, 4 * image[0] * image[1] * gradient[2] * image[3]], exact=False)


def resize_grad(facts: Facts) -> Events:
    """resize_bilinear_op.cc: of 16-bit floats, the output in float32."""
    return summed_in_float32(facts, (OUT0,), facts.outputs[0].num_elements)


RULES: dict[str, Entry] = {
    "AdjustHue": UNARY,
    "AdjustContrastv2": Entry(events_rule(adjust_contrast)),
    "ResizeBilinearGrad": Entry(events_rule(resize_grad)),
    "RGBToHSV": Entry(events_rule(rgb_to_hsv)),
    "ScaleAndTranslate": Entry(events_rule(scale_and_translate)),
    "ScaleAndTranslateGrad": Entry(events_rule(scale_and_translate_grad)),
    "CombinedNonMaxSuppression": Entry(in_order(3)),
}
