"""Any value of any option of any command ends with the right exit status, and with at most one error line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

import fuzz_files
from absl import flags
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tfswap.frontends import cli

EXAMPLES = int(os.environ.get("TFSWAP_FUZZ_ARGUMENTS", "60"))
SIZES = (
    "",
    " ",
    "-1",
    "0",
    "1",
    "nan",
    "-inf",
    "1e309",
    "9" * 23,
    "NaN%",
    "-5%",
    "0%",
    "50%",
    "60 %",
    "1KiB",
    "12XB",
    "٣",
    "²",
)
SHAPES = "x=1", "x=", "=1", "x=-1", "x=0", "x=64,32", "x=256,32", "x=1;x=2", "y=1", "x:0", "x:5", "y:0", ":", ";", "x:²"
NAMES = (
    "/",
    ".",
    "/dev/null",
    "/nonexistent/x.html",
    "x.html",
    "x.trace.json",
    "a" * 5000,
    "\x1b[31m",
    "x\x00y",
    "\ud800",
)
WORDS = (
    "train_step",
    "swap,,",
    "fp8",
    "=fp8",
    "*=",
    "a100",
    "this",
    "--",
    "-",
    "@",
    "%s",
    "a\nb",
    "MODEL",
    "PLAN",
    "PROFILE",
)
PLACES = {"saved_model_dir": "MODEL", "other_dir": "MODEL", "output_dir": "OUT", "trace_file": "OUT.trace.json"}
# absl's own, which an unlike reader of values has.
OF_ABSL = "--flagfile", "--undefok", "--verbosity", "--stderrthreshold"

values = st.sampled_from((*SIZES, *SHAPES, *NAMES, *WORDS))


def _subcommands() -> dict[str, argparse.ArgumentParser]:
    actions = cli._parser()._actions
    return next(dict(a.choices) for a in actions if isinstance(a, argparse._SubParsersAction))


@st.composite
def commands(draw: st.DrawFn) -> list[str]:
    """A command that is well but for what is drawn."""
    found = _subcommands()
    name = draw(st.sampled_from(sorted(found)))
    options, arguments = [*OF_ABSL], [name]
    for action in found[name]._actions:
        if action.option_strings:
            options += [o for o in action.option_strings if o.strip("-") not in flags.FLAGS and "help" not in o]
        elif action.nargs != "?" or draw(st.booleans()):
            arguments.append(draw(st.one_of(st.just(PLACES.get(action.dest, "matmul")), values)))
    options = [o for o in options if o.startswith("--") and o != "--json"]
    for option in draw(st.lists(st.sampled_from(options), min_size=1, max_size=2)):
        arguments += draw(st.sampled_from(([option], [f"{option}={draw(values)}"], [option, draw(values)])))
    return arguments


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    fuzz_files.save_profile(folder)
    plain, rewritten = fuzz_files.save_models(folder)
    plan, profile = rewritten / "tfswap_plan.json", folder / "profile.json"
    return {"MODEL": str(plain), "PLAN": str(plan), "PROFILE": str(profile), "OUT": "out"}


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(arguments=commands(), as_json=st.booleans())
def test_any_argument_ends_with_one_error(
    files: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    as_json: bool,
) -> None:
    folder = tmp_path_factory.mktemp("work")
    monkeypatch.chdir(folder)
    for word, path in files.items():
        arguments = [argument.replace(word, path) for argument in arguments]
    assert fuzz_files.failure(arguments, as_json=as_json) is None, arguments
    assert [path.name for path in Path(folder).iterdir() if path.suffix == ".tmp"] == []


@pytest.mark.parametrize(
    "flag", ["--flagfile=/nonexistent", "--flagfile=/", "--flagfile=x\x00y", "--verbosity=x", "--stderrthreshold=x"]
)
def test_values_that_absl_refuses_are_usage_errors(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", flag]) == cli.USAGE
    assert capsys.readouterr().err.startswith("tfswap: ")


def test_help_keeps_names_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--help"]) == cli.OK
    assert "Check a SavedModel" in capsys.readouterr().out
