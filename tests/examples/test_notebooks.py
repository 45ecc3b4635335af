"""The notebooks run from the first cell to the last, and are saved with their outputs."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="requires the extra notebook")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_saved_with_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run it from the first cell to the last"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    text = path.read_text(encoding="utf-8")
    assert len(text) < 400_000
    assert not re.search(r"/(home|root|tmp|work)/", text), "a path of one machine"
    links = [link for cell in notebook.cells for link in re.findall(r"\]\(([^)#]+)\)", cell.source) if cell.cell_type == "markdown"]
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.nightly(120)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="requires the extra notebook")
    pytest.importorskip("ipykernel", reason="requires the extra notebook")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    saved = [output.text for cell in code_cells(notebook) for output in cell.outputs if output.output_type == "stream"]
    # Its asserts are the test: each run compares memory and loss of O2 with BF16's.
    nbclient.NotebookClient(notebook, timeout=1500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output.text for cell in code_cells(notebook) for output in cell.outputs if output.output_type == "stream"]
    bytes_per_parameter = [text for text in (*saved, *printed) if text.startswith("bytes per parameter")]
    assert len(bytes_per_parameter) == 2
    assert bytes_per_parameter[0] == bytes_per_parameter[1], "save it anew"
