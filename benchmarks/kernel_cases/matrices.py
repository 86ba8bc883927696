"""Products, linear algebra, einsums and reductions."""

from __future__ import annotations

from kernel_cases.case import Case, floats, integers


def reductions() -> list[Case]:
    cases = []
    x = floats(32, 24, 24, 96)
    for op in ("Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm"):
        for axes in ([0, 1, 2], [1, 2], [3], [0], [0, 1, 2, 3], [0, 2], [1, 3], [], [-1]):
            for keep in (True, False):
                cases.append(Case(op, {"input": x, "axis": {"const": axes, "dtype": "int32"}}, {"keep_dims": keep}))
    cases += [
        Case("Sum", {"input": floats(8, 4, 6, 5, 7, 32), "axis": integers([0, 2, 4])}, {"keep_dims": True}),
        Case("Sum", {"input": floats(8, 4, 6, 5, 7, 32), "axis": integers([1, 3, 5])}, {"keep_dims": False}),
        Case("Sum", {"input": floats(1, 1, 64, 32), "axis": integers([0, 1])}, {"keep_dims": False}),
        Case("Mean", {"input": floats(64, 1, 32), "axis": integers([1])}, {"keep_dims": True}),
        Case("All", {"input": ["bool", [64, 512]], "axis": integers([0])}),
        Case("Any", {"input": ["bool", [64, 512]], "axis": integers([1])}),
        Case("ArgMax", {"input": x, "dimension": integers(3)}),
        Case("ArgMin", {"input": x, "dimension": integers(3)}),
        Case("TopKV2", {"input": floats(256, 512), "k": integers(5)}),
        Case("InTopKV2", {"predictions": floats(256, 512), "targets": ["int32", [256]], "k": integers(5)}),
    ]
    return cases


def matrices() -> list[Case]:
    def mm(m: int, k: int, n: int, ta: bool = False, tb: bool = False) -> Case:
        return Case(
            "MatMul",
            {"a": floats(k, m) if ta else floats(m, k), "b": floats(n, k) if tb else floats(k, n)},
            {"transpose_a": ta, "transpose_b": tb},
        )

    def bmm(batch: list[int], m: int, k: int, n: int, ax: bool = False, ay: bool = False) -> Case:
        return Case(
            "BatchMatMulV2",
            {"x": floats(*batch, *((k, m) if ax else (m, k))), "y": floats(*batch, *((n, k) if ay else (k, n)))},
            {"adj_x": ax, "adj_y": ay},
        )

    return [
        mm(2048, 256, 512),
        mm(512, 2048, 256, ta=True),
        mm(2048, 256, 512, tb=True),
        mm(64, 256, 1024),
        mm(1, 1024, 512),
        mm(512, 1024, 1),
        mm(2048, 256, 2000),
        Case("MatMul", {"a": ["float16", [256, 512]], "b": ["float16", [512, 128]]}),
        Case("MatMul", {"a": ["bfloat16", [256, 512]], "b": ["bfloat16", [512, 128]]}),
        Case("MatMul", {"a": ["bfloat16", [512, 256]], "b": ["bfloat16", [512, 128]]}, {"transpose_a": True}),
        bmm([16, 4], 128, 64, 128),
        bmm([16, 4], 128, 64, 128, ax=True),
        bmm([16, 4], 128, 64, 128, ay=True),
        Case("BatchMatMulV2", {"x": ["float16", [8, 64, 64]], "y": ["float16", [8, 64, 64]]}),
        Case("BatchMatMulV2", {"x": ["bfloat16", [8, 64, 64]], "y": ["bfloat16", [8, 64, 64]]}),
        Case("BatchMatMulV2", {"x": floats(4, 1, 256, 256), "y": floats(4, 16, 256, 64)}),
        Case("BatchMatMulV2", {"x": floats(16, 128, 256), "y": floats(256, 768)}),
        Case("BatchMatMulV2", {"x": floats(16, 256, 256), "y": floats(16, 256, 32)}, {"adj_x": True}),
        Case("BatchMatMulV2", {"x": floats(16, 256, 256), "y": floats(16, 32, 256)}, {"adj_x": True, "adj_y": True}),
        Case("BatchMatMul", {"x": floats(16, 128, 256), "y": floats(16, 256, 128)}),
        Case("Einsum", {"inputs": [floats(16, 128, 256), floats(256, 4, 64)]}, {"equation": "abc,cde->abde"}),
        Case("Einsum", {"inputs": [floats(16, 128, 4, 64), floats(16, 128, 4, 64)]}, {"equation": "aecd,abcd->acbe"}),
        Case("Einsum", {"inputs": [floats(16, 4, 128, 128), floats(16, 128, 4, 64)]}, {"equation": "acbe,aecd->abcd"}),
        Case("Einsum", {"inputs": [floats(16, 128, 4, 64), floats(4, 64, 256)]}, {"equation": "abcd,cde->abe"}),
    ]


def linear_algebra() -> list[Case]:
    x, z = floats(4, 64, 64), ["complex64", [64, 64]]
    return [
        Case("Cholesky", {"input": x}),
        Case("CholeskyGrad", {"l": x, "grad": x}),
        Case("MatrixInverse", {"input": x}),
        Case("MatrixLogarithm", {"input": z}),
        Case("MatrixSolve", {"matrix": x, "rhs": x}),
        Case("MatrixSquareRoot", {"input": x}),
        Case("MatrixTriangularSolve", {"matrix": x, "rhs": x}),
        Case("LogMatrixDeterminant", {"input": x}),
        Case("Qr", {"input": x}),
        Case("Qr", {"input": floats(4, 64, 16)}),
        Case("SelfAdjointEigV2", {"input": x}),
        Case("Svd", {"input": x}),
        Case("Conj", {"input": z}),
        Case("FFT2D", {"input": z}),
        Case("RFFT2D", {"input": x, "fft_length": integers([64, 64])}),
        Case("IRFFT2D", {"input": ["complex64", [8, 64, 33]], "fft_length": integers([64, 64])}),
    ]


def einsums() -> list[Case]:
    one, other = floats(16, 8, 32, 24), floats(16, 8, 24, 40)
    return [
        Case("Einsum", {"inputs": inputs}, {"equation": equation})
        for equation, inputs in [
            ("...ij,...jk->...ik", [one, other]),
            ("...ij,...jk->...ik", [one, floats(24, 40)]),
            ("...ij,...jk->...ik", [one, floats(1, 8, 24, 40)]),
            ("...ij,jk->...ik", [one, floats(24, 40)]),
            ("...x,xy->...y", [one, floats(24, 40)]),
            ("...ij,...kj->...ki", [one, floats(16, 8, 40, 24)]),
            ("i...j,...jk->k...i", [floats(32, 16, 8, 24), other]),
            ("bi...,bj...->bij...", [floats(16, 8, 32), floats(16, 24, 32)]),
            ("...ij->...ji", [one]),
            ("...ij->...i", [one]),
            ("...ij->...", [one]),
            ("abcd->abcd", [one]),
            ("abcd->dcba", [one]),
            ("abcd->ab", [one]),
            ("abcd->db", [one]),
            ("abcd->cd", [one]),
            ("iij->ij", [floats(32, 32, 24)]),
            ("iji->ij", [floats(32, 24, 32)]),
            ("ij->iij", [floats(32, 24)]),
            ("ij->iji", [floats(32, 24)]),
            ("iij,jk->ik", [floats(32, 32, 24), floats(24, 40)]),
            ("ij,jk->iki", [floats(32, 24), floats(24, 40)]),
            ("abx,bcy->ac", [floats(16, 8, 32), floats(8, 24, 40)]),
            ("ab,cd->", [floats(16, 8), floats(32, 24)]),
            ("ab,ab->ab", [floats(16, 8), floats(16, 8)]),
            ("a,b->ab", [floats(16), floats(8)]),
            ("aecd,abcd->acbe", [["float16", [16, 12, 4, 6]]] * 2),
            ("...ij,...jk->...ik", [["bfloat16", [16, 8, 24]], ["bfloat16", [1, 24, 10]]]),
        ]
    ]
