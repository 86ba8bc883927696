"""The notebook of the documentation runs as it is, in a kernel of its own, and was saved after it had run."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("tensorflow")

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def shown(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell of code shows, by kind."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kinds = [{kind for o in cell.outputs for kind in o.get("data", {o.get("name"): ""})} - {"stderr"} for cell in cells]
    return [" ".join(sorted(made)) for made in kinds]


def reports(notebook: nbformat.NotebookNode) -> list[str]:
    """What stands for each result that is HTML where HTML can't be shown."""
    results = [o.data for cell in notebook.cells for o in cell.get("outputs", ()) if o.output_type == "execute_result"]
    return [data["text/plain"] for data in results if "text/html" in data]


@pytest.mark.filterwarnings("ignore:::jupyter_client", "ignore:::zmq", "ignore:::traitlets")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    saved = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    run.cells.append(nbformat.v4.new_code_cell("print(report)"))
    nbclient.NotebookClient(run, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = run.cells.pop().outputs
    assert [o.output_type for o in printed] == ["stream"]
    assert "smallest limit" in printed[0].text
    assert shown(run) == shown(saved), "run it again: jupyter execute --inplace docs/notebook.ipynb"
    assert shown(run).count("text/html text/plain") == 2
    for report, curve in (reports(run), reports(saved)):
        assert "smallest limit" in report
        assert "smallest limit" in curve
