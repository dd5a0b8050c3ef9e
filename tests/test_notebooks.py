"""The notebooks run from the first cell to the last on the small sets, and are committed with their outputs."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebooks extra is not installed: pip install -e '.[notebooks]'")
nbclient = pytest.importorskip("nbclient", reason="the notebooks extra is not installed: pip install -e '.[notebooks]'")
pytest.importorskip("ipykernel", reason="the notebooks extra is not installed: pip install -e '.[notebooks]'")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert [path.stem[:2] for path in NOTEBOOKS][:4] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_committed(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(output.output_type != "error" for cell in cells for output in cell.outputs)
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs) or "01" in path.stem


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, demo_model, monkeypatch):
    """Raises on the first cell that fails. ``demo_model`` skips where the model has not been fetched."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("KVREUSE_DATA", raising=False)
    notebook = nbformat.read(path, as_version=4)
    # a deadline for a hung kernel only: speed is no matter of tests
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        coalesce_streams=True,  # into how many pieces a cell's prints come depends on its speed
    )
    client.execute()
    kept = [[o.output_type for o in c.outputs if o.get("name") != "stderr"] for c in code_cells(notebook)]
    committed = [[o.output_type for o in c.outputs] for c in code_cells(nbformat.read(path, as_version=4))]
    assert kept == committed
