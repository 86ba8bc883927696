"""The documentation's notebooks run as they are, each in a kernel of its own, and were saved after they had run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT
from slow import slow

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("tensorflow")

FOLDER = ROOT / "docs" / "notebooks"
ASKED = {
    "first_step": "print(report)",
    "keras": """
import json

print(json.dumps({
    "before": before,
    "epochs": [[epoch.planned_peak_bytes, epoch.measured_peak_bytes, epoch.limit_bytes] for epoch in memory.epochs],
    "same": [loss.hex() for loss in history["loss"]] == [loss.hex() for loss in history_before["loss"]],
    "weights": all((a == b).all() for a, b in zip(model.get_weights(), plain.get_weights(), strict=True)),
    "large": [peak, report_large.memory_limit_bytes, history_large["loss"]],
    "swapped": [row.op for row in report_large.swapped],
    "device": int(os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"]) << 20,
}))
""",
}
"""What is run in each when it has run, after its last cell."""


@dataclass(frozen=True)
class Ran:
    """A notebook as it was saved, as a run leaves it, and what the code after it printed."""

    name: str
    saved: Any
    run: Any
    printed: str


@pytest.fixture(scope="module", params=["first_step", *slow("keras")])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    saved, run = (nbformat.read(FOLDER / f"{name}.ipynb", as_version=4) for _ in range(2))
    run.cells.append(nbformat.v4.new_code_cell(ASKED[name]))
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
            patch.setenv(variable, str(folder))
        patch.setenv("PYTHONPATH", str(ROOT))
        nbclient.NotebookClient(run, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = run.cells.pop().outputs
    assert [o.output_type for o in outputs] == ["stream"]
    yield Ran(name, saved, run, outputs[0].text)


pytestmark = pytest.mark.filterwarnings("ignore:::jupyter_client", "ignore:::zmq", "ignore:::traitlets")
of_first_step = pytest.mark.parametrize("ran", ["first_step"], indirect=True)
of_keras = pytest.mark.parametrize("ran", slow("keras"), indirect=True)


def shown(notebook: Any) -> list[str]:
    """What each cell of code shows, by kind."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kinds = [{kind for o in cell.outputs for kind in o.get("data", {o.get("name"): ""})} - {"stderr"} for cell in cells]
    return [" ".join(sorted(made)) for made in kinds]


def reports(notebook: Any) -> list[str]:
    """What stands for each result that is HTML where HTML can't be shown."""
    results = [o.data for cell in notebook.cells for o in cell.get("outputs", ()) if o.output_type == "execute_result"]
    return [data["text/plain"] for data in results if "text/html" in data]


def test_each_notebook_is_run_and_in_the_site() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == ASKED.keys()
    assert not [path for path in FOLDER.parent.rglob("*.ipynb") if path.parent != FOLDER]
    listed = re.findall(r"^ +- .*: notebooks/(\w+)\.ipynb$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(ASKED)


@pytest.mark.parametrize("name", sorted(ASKED))
def test_what_was_saved_is_clean(name: str) -> None:
    saved = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    outputs = [o for cell in saved.cells if cell.cell_type == "code" for o in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"], "leave it out"
    for of_a_machine in ("site-packages", str(Path.home()), str(ROOT)):
        assert of_a_machine not in json.dumps(outputs)


def test_a_run_shows_what_was_saved(ran: Ran) -> None:
    assert shown(ran.run) == shown(ran.saved), (
        f"run it again: jupyter execute --inplace docs/notebooks/{ran.name}.ipynb"
    )
    assert reports(ran.run)
    for text in (*reports(ran.run), *reports(ran.saved)):
        assert "smallest limit" in text


@of_first_step
def test_a_step_shows_its_report_and_a_curve(ran: Ran) -> None:
    assert len(reports(ran.run)) == 2
    assert "smallest limit" in ran.printed


@of_keras
def test_fit_gives_the_same_under_a_limit_and_takes_a_larger_batch(ran: Ran) -> None:
    found = json.loads(ran.printed)
    assert found["same"]
    assert found["weights"]
    for planned, measured, limit in found["epochs"]:
        assert planned <= limit
        assert measured <= limit < 0.6 * found["before"]
    peak, limit, losses = found["large"]
    assert peak <= limit < found["device"]
    assert losses[1] < losses[0]
    assert found["swapped"]
    assert "Softmax" not in found["swapped"]  # the policy's
    printed = [o.text for cell in ran.run.cells for o in cell.get("outputs", ()) if o.get("name") == "stdout"]
    assert sum("OOM when allocating" in text for text in printed) == 1
