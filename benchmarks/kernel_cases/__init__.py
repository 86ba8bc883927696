"""The cases that `kernel_memory.py` measures: shapes from common training steps, one op each, a module per family."""

from __future__ import annotations

from kernel_cases.codecs import codecs
from kernel_cases.convolutions import convolutions, pools
from kernel_cases.elementwise import elementwise
from kernel_cases.fused import fused
from kernel_cases.images import images_and_counts
from kernel_cases.layout import layout, views
from kernel_cases.matrices import einsums, linear_algebra, matrices, reductions
from kernel_cases.normalisation import normalisation_and_random
from kernel_cases.sparse import cells, others, sparse
from kernel_cases.text import text
from kernel_cases.variables import variables_and_lists, variables_in_part

CASES = [
    *cells(),
    *sparse(),
    *others(),
    *einsums(),
    *codecs(),
    *views(),
    *convolutions(),
    *pools(),
    *elementwise(),
    *reductions(),
    *matrices(),
    *layout(),
    *linear_algebra(),
    *images_and_counts(),
    *normalisation_and_random(),
    *variables_and_lists(),
    *variables_in_part(),
    *fused(),
    *text(),
]
