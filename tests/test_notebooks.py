"""The notebooks of the examples run from their first cell to their last."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
SOURCE = FOLDER.parents[1] / "src"
NOTEBOOKS = ["keras_fit", "nnx_loop", pytest.param("tpu_slice", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", NOTEBOOKS)
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_runs(name, monkeypatch, tmp_path):
    if name == "tpu_slice" and find_spec("libtpu") is None:
        pytest.skip("needs the TPU compiler")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), os.getenv("PYTHONPATH", "")]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("REPLICAX_CPU_DEVICES", raising=False)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)

    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": tmp_path}}
    ).execute()

    nbformat.validate(notebook)
