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


def test_progress_and_values_in_a_notebook(monkeypatch, tmp_path):
    """Progress is on standard output, and the repr of a mirrored result says that it is one."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), os.getenv("PYTHONPATH", "")]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code = """
import os
os.environ["REPLICAX_CPU_DEVICES"] = "2"
import replicax as rx
for _ in rx.train.progress(range(3)):
    pass
strategy = rx.distribute.MirroredStrategy()
total = rx.function(lambda: strategy.run(
    lambda: rx.distribute.get_replica_context().all_reduce("SUM", 1.0)))()
print(repr(total))
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])

    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": tmp_path}}
    ).execute()

    outputs = notebook.cells[0].outputs
    assert {output.name for output in outputs} == {"stdout"}
    text = "".join(output.text for output in outputs)
    assert text.startswith("step 3/3, ")
    assert "} (Mirrored: equal on all replicas)" in text
