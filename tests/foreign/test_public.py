"""Public example programs compute with replicas the numbers of one device, or the table says why.

`PUBLIC_SOURCES` names a folder with checkouts of keras-io, Flax and Equinox, or some of them.
"""

import ast
import contextlib
import faulthandler
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from replicax.distribute import PerReplica
from tests.foreign.public import compare, cuts, recording, steps
from tests.foreign.public.programs import Program, discover, statements

SOURCES = os.environ.get("PUBLIC_SOURCES")
FOLDERS = {"keras": "keras-io", "flax": "flax", "equinox": "equinox"}


def programs() -> list[Program]:
    roots = {library: Path(SOURCES or "") / name for library, name in FOLDERS.items()}
    found = [p for library, root in roots.items() if root.exists() for p in discover(library, root)]
    return found if SOURCES else []


@pytest.mark.foreign
@pytest.mark.slow
@pytest.mark.skipif(not SOURCES, reason="PUBLIC_SOURCES names no folder with public programs")
@pytest.mark.parametrize("program", programs(), ids=lambda program: program.name)
def test_public_program_is_unchanged(program):
    faulthandler.cancel_dump_traceback_later()  # a program takes longer than any other test
    verdict = compare.Comparison(program, replicas=2, timeout=240).verdict()
    sys.stdout.write(verdict.row + "\n")  # `-rP` shows it
    if verdict.verdict == "not run":
        pytest.skip(verdict.reason)

    if verdict.verdict == "not distributed":
        pytest.skip(f"no step runs on all replicas: {verdict.reason}")

    assert verdict.verdict in compare.GOOD, verdict.reason


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("EPOCHS = 100", "EPOCHS = 2"),
        ("TIME_STEPS = 288", "TIME_STEPS = 288"),
        ("model.fit(x, epochs=50, batch_size=8)", "model.fit(x, epochs=2, batch_size=8)"),
        (
            "def f(num_epochs=9, *, batch_size=64): pass",
            "def f(num_epochs=2, *, batch_size=16): pass",
        ),
        ("for x in enumerate(data): pass", "for x in enumerate(__few__(data)): pass"),
    ],
)
def test_cut_knows_numbers_by_their_names(source, expected, tmp_path):
    (tmp_path / "a.py").write_text(source)
    tree = cuts.Cut().visit(statements(Program("keras", tmp_path, "a.py")))

    assert ast.unparse(tree) == ast.unparse(ast.parse(expected))


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.1], [1.0, 2.0], 0.05),
        ([np.nan], [np.nan], 0.0),
        ([np.nan], [1.0], np.inf),
        ([1.0], [1.0, 1.0], np.inf),
    ],
)
def test_difference_is_relative_to_the_largest(got, expected, difference):
    found = compare.difference(np.array(got), np.array(expected))

    np.testing.assert_allclose(found, difference)


def printed(*values: object) -> list[list[float]]:
    """What is recorded of some values that are printed, without the means."""
    recorder = recording.Recorder()
    with contextlib.redirect_stdout(recording.Printed(recorder)):
        for value in values:
            print(value)  # noqa: T201 - what a program prints is recorded
    return [array[:-1].tolist() for array in recorder.arrays.values()]


def test_printed_replicas_count_once():
    found = printed([PerReplica([1.5, 2.5]), PerReplica([3.5, 4.5])], 5.5, "6.5\n7.5")

    assert found == [[1.5, 3.5], [5.5], [6.5, 7.5]]


def test_printed_arrays_and_replicas_are_the_same_numbers():
    rows = [np.array([[0.5], [1.5]]), np.array([2.5, 3.5])]

    assert printed([PerReplica([x, x]) for x in rows]) == printed(rows)


def test_step_returns_all_rows_and_the_mean_of_statistics(two):
    def step(x):
        return 2 * x, x.mean(axis=0), x.mean()

    jit = steps.Steps(two).names()["__jit__"]
    rows = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    found = jit(jax.jit)(step)(rows)

    for got, expected in zip(found, step(rows), strict=True):
        np.testing.assert_allclose(got, expected)


PLAIN_PROGRAM = "import jax.numpy as jnp\nprint(jnp.arange(4.0).sum())\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        (PLAIN_PROGRAM, "not distributed"),
        (
            f"import jax\n{PLAIN_PROGRAM}print(jax.jit(lambda x: x.mean())(jnp.ones(4)))\n",
            "unchanged",
        ),
    ],
)
def test_program_without_steps_is_not_distributed(source, verdict, tmp_path):
    faulthandler.cancel_dump_traceback_later()
    (tmp_path / "a.py").write_text(source)
    found = compare.Comparison(Program("flax", tmp_path, "a.py"), replicas=2, timeout=200)

    assert found.verdict().verdict == verdict
