"""Tensor lists (list_kernels.h): here the list itself. Its elements are in analysis/tensor_lists.py."""

from __future__ import annotations

from tfswap.kernels.memory_rules import FRESH, UNARY, Entry

RULES: dict[str, Entry] = {
    "EmptyTensorList": FRESH,
    "TensorListFromTensor": FRESH,
    "TensorListPopBack": UNARY,
    "TensorListPushBack": UNARY,
    "TensorListPushBackBatch": UNARY,
    "TensorListReserve": FRESH,
    "TensorListResize": UNARY,
    "TensorListScatterIntoExistingList": UNARY,
    "TensorListSetItem": UNARY,
    "TensorListElementShape": FRESH,
    "TensorListLength": FRESH,
    "TensorListStack": FRESH,
}
