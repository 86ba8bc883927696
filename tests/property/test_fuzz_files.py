"""Damaged files are refused with one error and the right exit status by every command (fuzz_files.py)."""

from __future__ import annotations

import os
import re
import shutil
import weakref
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

import fuzz_files
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tfswap.errors import InvalidModel
from tfswap.frontends.verify_model import verify_model
from tfswap.importers.corrupt_files import named_as_damage
from tfswap.importers.shapes import shape_of

EXAMPLES = int(os.environ.get("TFSWAP_FUZZ_FILES", "25"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    fuzz_files.save_profile(folder)
    return fuzz_files.save_models(folder)


edits = st.lists(
    st.tuples(st.sampled_from(fuzz_files.KINDS), st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=2
)


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(which=st.integers(0, 10**6), edits=edits)
def test_a_command_on_a_damaged_file_ends_with_one_error(
    models: tuple[Path, Path], which: int, edits: list[fuzz_files.Edit]
) -> None:
    assert fuzz_files.run(models, models[0].parent, which, edits) is None


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ("drop node", "does not exist|without"),
        ("rename node", "not exist|taken|more than one"),
        ("drop attribute", "without its attribute"),
        ("rewire", "does not exist"),
        ("drop input", "inputs, and it takes"),
        ("drop result", "returns ''"),
        ("control result", "waits for"),
        ("move argument attributes", "describes arguments"),
        ("drop argument", "does not exist|arguments"),
    ],
)
def test_the_border_names_what_is_wrong(models: tuple[Path, Path], tmp_path: Path, edit: str, says: str) -> None:
    found = []
    for where in range(0, 60, 5):
        model = tmp_path / str(where)
        shutil.copytree(models[1], model)
        fuzz_files.damage(model, [(edit, where, 8 if edit == "rewire" else 1)])
        try:
            verify_model(model)
        except InvalidModel as error:
            found.append(str(error))
    assert any(re.search(says, message) for message in found), found
    assert all("\n" not in message for message in found)


def test_a_damaged_file_is_named_for_what_python_s_own_code_raises_under_tensorflow() -> None:
    with pytest.raises(InvalidModel, match="the file is damaged: .* TypeError"), named_as_damage("the file"):
        tf.nest.map_structure(weakref.WeakSet, 1)  # raises in a module of Python's own
    with pytest.raises(TypeError), named_as_damage("the file"):
        weakref.WeakSet(1)  # type: ignore[arg-type]
    with pytest.raises(AttributeError), named_as_damage("the file"):
        tf.nest.map_structure(shape_of, 1)  # which is tfswap's
