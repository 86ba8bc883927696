"""Images and counts."""

from __future__ import annotations

from kernel_cases.case import Case, floats, integers, number


def images_and_counts() -> list[Case]:
    x, image, twice = floats(64, 512), floats(8, 32, 32, 3), {"const": [1.5, 1.5], "dtype": "float32"}
    nowhere = {"const": [0.0, 0.0], "dtype": "float32"}
    places = {"const": [[i, i] for i in range(64)], "dtype": "int64"}
    shape = {"const": [64, 64], "dtype": "int64"}
    bounds = {"input_min": number(-1.0), "input_max": number(1.0)}
    return [
        Case("AdjustContrastv2", {"images": image, "contrast_factor": number(1.1)}),
        Case("AdjustHue", {"images": image, "delta": number(0.1)}),
        Case("RGBToHSV", {"images": image}),
        Case(
            "ScaleAndTranslate",
            {"images": image, "size": integers([48, 40]), "scale": twice, "translation": nowhere},
        ),
        Case(
            "ScaleAndTranslateGrad",
            {"grads": floats(8, 48, 40, 3), "original_image": image, "scale": twice, "translation": nowhere},
        ),
        Case("BesselI0e", {"x": x}),
        Case("Polygamma", {"a": x, "x": x}),
        Case("IgammaGradA", {"a": x, "x": x}),
        Case("FakeQuantWithMinMaxArgs", {"inputs": x}),
        Case("FakeQuantWithMinMaxArgsGradient", {"gradients": x, "inputs": x}),
        Case("QuantizeAndDequantizeV2", {"input": x, **bounds}, {"range_given": True}),
        Case("QuantizeAndDequantizeV4", {"input": x, **bounds}, {"range_given": False}),
        Case(
            "QuantizeAndDequantizeV4",
            {"input": x, "input_min": floats(512), "input_max": floats(512)},
            {"range_given": False, "axis": 1},
        ),
        Case("Bincount", {"arr": ["int32", [4096]], "size": integers(64), "weights": floats(4096)}),
        Case("DenseBincount", {"input": ["int32", [4096]], "size": integers(64), "weights": floats(4096)}),
        Case(
            "DenseBincount",
            {"input": ["int32", [8, 512]], "size": integers(64), "weights": floats(0)},
            {"binary_output": True},
        ),
        Case("Unique", {"x": ["int32", [4096]]}),
        Case("Multinomial", {"logits": x, "num_samples": integers(8)}),
        Case("SparseSoftmax", {"sp_indices": places, "sp_values": floats(64), "sp_shape": shape}),
        Case(
            "SparseToDense",
            {
                "sparse_indices": integers([0, 1, 2]),
                "output_shape": integers([512]),
                "sparse_values": floats(3),
                "default_value": number(0.0),
            },
        ),
        Case(
            "TensorStridedSliceUpdate",
            {
                "input": x,
                "begin": integers([0, 0]),
                "end": integers([32, 512]),
                "strides": integers([1, 1]),
                "value": floats(32, 512),
            },
        ),
    ]
