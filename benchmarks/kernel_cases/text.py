"""Kernels of strings, each of 24 bytes, and of ragged rows."""

from __future__ import annotations

from kernel_cases.case import Case


def text() -> list[Case]:
    lines, words = ["string", [200]], ["string", [800]]
    separator = {"const": "", "dtype": "string"}
    ragged = {
        "shape": {"const": [200, 8], "dtype": "int64"},
        "values": words,
        "default_value": separator,
        "row_partition_tensors": [
            {"const": 200, "dtype": "int64"},
            {"const": [i // 4 for i in range(800)], "dtype": "int64"},
        ],
    }
    return [
        Case("StringSplitV2", {"input": lines, "sep": separator}),
        Case("StringJoin", {"inputs": [words, separator]}),
        Case("StringToHashBucketFast", {"input": words}, {"num_buckets": 50}),
        Case("StringLower", {"input": words}),
        Case("StringUpper", {"input": words}),
        Case("StringStrip", {"input": words}),
        Case("StringLength", {"input": words}),
        Case("StringToHashBucketStrong", {"input": words}, {"num_buckets": 50, "key": [1, 2]}),
        Case("AsString", {"input": ["int32", [300]]}),
        Case("StaticRegexReplace", {"input": words}, {"pattern": "1", "rewrite": "2"}),
        Case("RaggedTensorToTensor", ragged, {"row_partition_types": ["FIRST_DIM_SIZE", "VALUE_ROWIDS"]}),
    ]
