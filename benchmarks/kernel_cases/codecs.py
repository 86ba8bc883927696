"""tfswap's codecs."""

from __future__ import annotations

from kernel_cases.case import Case, floats, integers, number


def codecs() -> list[Case]:
    """Large enough that they run on several threads."""
    x, gradient, image = floats(1_000_003), floats(1_000_003), floats(8, 64, 63, 33)
    mask = ["uint8", [125_001]]
    window = {"ksize": [1, 3, 3, 1], "strides": [1, 2, 2, 1], "padding": "SAME", "explicit_paddings": []}
    large = {**window, "ksize": [1, 5, 5, 1]}
    # The middle of each window, which lies inside of the image whatever the padding: 4 of 9, twice in a byte; 12 of 25.
    positions, pooled = ["uint8", [8 * 32 * 32 * 17], 0x44], floats(8, 32, 32, 33)
    bytes_each = ["uint8", [8 * 32 * 32 * 33], 12]
    half, levels = ["uint8", [2_000_006]], ["uint8", [3907 * (8 + 256)]]
    f32, levels_of = {"T": "float32"}, {"bits": 8, "group_size": 256}
    return [
        Case("Tfswap>EncodeMask", {"tensor": x}, {"predicate": "relu6"}),
        Case("Tfswap>EncodeMask", {"tensor": ["bool", [1000, 1001]]}, {"predicate": "true"}),
        Case("Tfswap>DecodeMask", {"mask": mask, "shape": integers([1_000_003])}),
        Case("Tfswap>DecodeMask", {"mask": mask, "shape": integers([1_000_003])}, {"T": "float32"}),
        Case("Tfswap>MultiplyByMask", {"gradients": gradient, "mask": mask}),
        Case("Tfswap>LeakyReluGradFromMask", {"gradients": gradient, "mask": mask}, {"alpha": 0.2}),
        Case("Tfswap>SelectByMask", {"mask": mask, "then": x, "else": number(0.0), "shape": integers([1_000_003])}),
        Case("Tfswap>SelectByMask", {"mask": mask, "then": number(0.0), "else": x, "shape": integers([1_000_003])}),
        Case("Tfswap>EncodeIntegers", {"tensor": ["int64", [1_000_003]]}, {"minimum": -3, "U": "uint8"}),
        Case("Tfswap>DecodeIntegers", {"encoded": ["uint8", [1_000_003]]}, {"minimum": -3, "T": "int64"}),
        Case("Tfswap>EncodeSparse", {"tensor": x}, {"capacity": 600_000}),
        Case("Tfswap>EncodeFloats", {"tensor": x}, {"format": "gist_float10"}),
        Case("Tfswap>DecodeFloats", {"encoded": half, "shape": integers([1_000_003])}, {"format": "float16", **f32}),
        Case("Tfswap>EncodeGroups", {"tensor": x}, {"seed": 7, "bits": 4, "group_size": 256}),
        Case("Tfswap>DecodeGroups", {"encoded": levels, "shape": integers([1_000_003])}, {**f32, **levels_of}),
        Case("Tfswap>EncodeMaxPool", {"image": image}, window),
        Case("Tfswap>EncodeMaxPool", {"image": image}, large),
        Case(
            "Tfswap>MaxPoolGradFromPositions",
            {"gradients": pooled, "positions": positions, "shape": integers([8, 64, 63, 33])},
            window,
        ),
        Case(
            "Tfswap>MaxPoolGradFromPositions",
            {"gradients": pooled, "positions": bytes_each, "shape": integers([8, 64, 63, 33])},
            large,
        ),
    ]
