"""The notebook runs from beginning to end, and is kept with its outputs."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

PATH = Path(__file__).parent.parent / "notebooks" / "segments.ipynb"


@pytest.fixture
def notebook() -> NotebookNode:
    return nbformat.read(PATH, as_version=4)


def outputs(notebook: NotebookNode, kind: str) -> list[NotebookNode]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs if output.output_type == kind]


@pytest.mark.timeout(600)
def test_it_runs(notebook: NotebookNode, monkeypatch: pytest.MonkeyPatch):
    """XLA need not optimise for this, which halves the time that it compiles."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PATH.parent.parent), os.environ.get("PYTHONPATH", "")]))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    printed = "".join(output.text for output in outputs(notebook, "stream"))
    assert "all values and logits are equal: True" in printed
    assert len(outputs(notebook, "display_data")) == 4


def test_it_is_kept_with_its_plots_and_without_errors(notebook: NotebookNode):
    plots = outputs(notebook, "display_data")
    assert len(plots) == 4
    assert all("image/png" in plot.data for plot in plots)
    assert not outputs(notebook, "error")
    assert all(output.name == "stdout" for output in outputs(notebook, "stream"))
    assert PATH.stat().st_size < 200_000
