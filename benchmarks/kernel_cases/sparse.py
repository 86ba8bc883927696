"""Sparse tensors, recurrent cells and other kernels."""

from __future__ import annotations

from kernel_cases.case import Case, floats, integers, number


def cells() -> list[Case]:
    """Of steps whose rows are aligned, of steps whose inputs are not, and of steps where nothing is."""
    cases: list[Case] = []
    for (batch, width, cell), steps, version in [((32, 48, 64), 12, ""), ((8, 7, 64), 12, "V2"), ((5, 7, 9), 3, "V2")]:
        x, state, gates, peephole = floats(batch, width), floats(batch, cell), floats(4 * cell), floats(cell)
        lstm = {
            "x": x, "cs_prev": state, "h_prev": state, "w": floats(width + cell, 4 * cell),
            "wci": peephole, "wcf": peephole, "wco": peephole, "b": gates,
        }  # fmt: skip
        gru = {
            "x": x, "h_prev": state, "w_ru": floats(width + cell, 2 * cell), "w_c": floats(width + cell, cell),
            "b_ru": floats(2 * cell), "b_c": floats(cell),
        }  # fmt: skip
        all_steps = {"seq_len_max": {"const": steps, "dtype": "int64"}, **lstm, "x": floats(12, batch, width)}
        names = ("i", "cs", "f", "o", "ci", "co", "h", "cs_grad", "h_grad")
        made = dict.fromkeys(names, floats(12, batch, cell))
        of_step = {name: state for name in names if name != "h"}
        cases += [
            Case("LSTMBlockCell", lstm),
            Case("LSTMBlockCellGrad", {**lstm, **of_step}, {"use_peephole": True}),
            Case("GRUBlockCell", gru),
            Case("GRUBlockCellGrad", {**gru, "r": state, "u": state, "c": state, "d_h": state}),
            Case(f"BlockLSTM{version}", all_steps),
            Case(f"BlockLSTMGrad{version}", {**all_steps, **made}, {"use_peephole": True}),
        ]
    return cases


def sparse() -> list[Case]:
    where = {"const": [[i, i * 7 % 50] for i in range(64)], "dtype": "int64"}
    shape, values = {"const": [64, 50], "dtype": "int64"}, floats(64)
    sparse = {"sp_indices": where, "sp_values": values, "sp_shape": shape}
    given = {"input_indices": where, "input_values": values, "input_shape": shape}
    rows, segments = integers([i % 32 for i in range(64)]), integers(sorted(i % 40 for i in range(64)))
    cases = [
        Case("SparseAdd", {f"{one}_{part}": spec for one in "ab" for part, spec in
             (("indices", where), ("values", values), ("shape", shape))} | {"thresh": number(0.0)}),
        Case("SparseConcat", {"indices": [where] * 3, "values": [values] * 3, "shapes": [shape] * 3},
             {"concat_dim": 0}),
        Case("SparseDenseCwiseAdd", {**sparse, "dense": floats(64, 50)}),
        Case("SparseDenseCwiseDiv", {**sparse, "dense": floats(64, 50)}),
        Case("SparseDenseCwiseMul", {**sparse, "dense": floats(50)}),
        Case("SparseFillEmptyRows",
             {"indices": where, "values": values, "dense_shape": shape, "default_value": number(0.0)}),
        Case("SparseFillEmptyRowsGrad",
             {"reverse_index_map": {"const": list(range(64)), "dtype": "int64"}, "grad_values": values}),
        Case("SparseReduceMax", {**given, "reduction_axes": integers([1])}),
        Case("SparseReshape", {"input_indices": ["int64", [64, 2]], "input_shape": shape,
                               "new_shape": {"const": [50, 64], "dtype": "int64"}}),
        Case("SparseSlice", {"indices": where, "values": values, "shape": shape,
                             "start": {"const": [0, 0], "dtype": "int64"}, "size": shape}),
    ]  # fmt: skip
    for kind, dtype in (("Sum", "float32"), ("Mean", "bfloat16"), ("SqrtN", "float16")):
        taken, counted = (
            {"data": [dtype, [32, 16]], "indices": rows, "segment_ids": segments},
            {"num_segments": integers(41)},
        )
        back = {"grad": [dtype, [40, 16]], "indices": rows, "segment_ids": segments}
        cases += [
            Case(f"SparseSegment{kind}", taken),
            Case(f"SparseSegment{kind}WithNumSegments", {**taken, **counted}),
            Case(f"SparseSegment{kind}Grad", {**back, "output_dim0": integers(32)}),
            Case(f"SparseSegment{kind}GradV2", {**back, "dense_output_dim0": integers(32)}),
        ]
    return cases


def others() -> list[Case]:
    image = ["float16", [4, 16, 16, 3]]
    boxes = {"boxes": floats(2, 64, 1, 4), "scores": floats(2, 64, 3), "max_output_size_per_class": integers(5)}
    kept = {"max_total_size": integers(10), "iou_threshold": number(0.5), "score_threshold": number(0.0)}
    return [
        Case("CTCGreedyDecoder", {"inputs": floats(12, 4, 6), "sequence_length": integers([12] * 4)}),
        Case("CombinedNonMaxSuppression", {**boxes, **kept}),
        Case("HistogramFixedWidth", {"values": floats(64, 32), "value_range": {"const": [0.0, 1.0], "dtype": "float32"},
                                     "nbins": integers(10)}),
        Case("InplaceAdd", {"x": floats(64, 32), "i": integers([1, 2]), "v": floats(2, 32)}),
        Case("InplaceSub", {"x": floats(64, 32), "i": integers([1, 2]), "v": floats(2, 32)}),
        Case("InplaceUpdate", {"x": floats(64, 32), "i": integers([1, 2]), "v": floats(2, 32)}),
        Case("Lu", {"input": floats(8, 32, 32)}),
        Case("MatrixSetDiagV2", {"input": floats(8, 32, 32), "diagonal": floats(8, 32), "k": integers(0)}),
        Case("ResizeBilinearGrad", {"grads": floats(4, 32, 32, 3), "original_image": image}),
        Case("UnravelIndex", {"indices": ["int32", [64]], "dims": integers([4, 4, 16])}),
    ]  # fmt: skip
