"""Normalisation, losses and random numbers."""

from __future__ import annotations

from kernel_cases.case import Case, floats, integers


def normalisation_and_random() -> list[Case]:
    x, c = floats(32, 24, 24, 64), floats(64)
    seeds = {"key": ["uint64", [1]], "counter": {"const": [1, 2], "dtype": "uint64"}, "alg": integers(1)}
    given = {"x": x, "scale": c, "offset": c, "mean": c, "variance": c}
    kept = {"reserve_space_1": c, "reserve_space_2": c, "reserve_space_3": c}
    gradient = {"y_backprop": x, "x": x, "scale": c, **kept}
    modes = ({"is_training": True}, {"is_training": False})
    return [
        *(Case("FusedBatchNormV3", given, mode) for mode in modes),
        *(Case("FusedBatchNormGradV3", gradient, mode) for mode in modes),
        Case("StatelessRandomUniformV2", {"shape": integers([16, 4, 128, 128]), **seeds}),
        Case("StatelessRandomNormalV2", {"shape": integers([16, 4, 128, 128]), **seeds}),
        Case("StatelessTruncatedNormalV2", {"shape": integers([16, 4, 128, 128]), **seeds}),
        Case(
            "StatelessRandomUniformIntV2",
            {"shape": integers([16, 4, 128]), **seeds, "minval": integers(0), "maxval": integers(9)},
        ),
        Case("StatelessRandomUniform", {"shape": integers([16, 4, 128, 128]), "seed": ["int32", [2]]}),
        Case("StatelessRandomGetKeyCounter", {"seed": ["int32", [2]]}),
        Case("RandomUniform", {"shape": integers([16, 4, 128, 128])}, {"dtype": "float32"}),
        Case("RandomStandardNormal", {"shape": integers([16, 4, 128, 128])}, {"dtype": "float32"}),
        Case("TruncatedNormal", {"shape": integers([16, 4, 128, 128])}, {"dtype": "float32"}),
        Case(
            "LSTMBlockCell",
            {
                "x": floats(64, 128),
                "cs_prev": floats(64, 256),
                "h_prev": floats(64, 256),
                "w": floats(384, 1024),
                "wci": floats(256),
                "wcf": floats(256),
                "wco": floats(256),
                "b": floats(1024),
            },
        ),
        Case(
            "GRUBlockCell",
            {
                "x": floats(64, 128),
                "h_prev": floats(64, 256),
                "w_ru": floats(384, 512),
                "w_c": floats(384, 256),
                "b_ru": floats(512),
                "b_c": floats(256),
            },
        ),
    ]
