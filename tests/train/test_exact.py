"""Real processes, killed at several moments: what they find is what one run finds, bit for bit."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.multi_process.exact import EVERY, KINDS, STEPS
from tests.multi_process.gang import Gang

ROOT = pathlib.Path(__file__).parents[2]


def ledger(folder, worker=0):
    lines = (folder / f"ledger{worker}").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps_of(lines):
    """What was found at each step, each time that it was made."""
    found = {}
    for step, *values in lines:
        if step not in ("start", "go on"):
            found.setdefault(str(step), []).append(values)
    return found


def run(folder, kind, strategy, kills=()):
    folder.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "TF_CONFIG")}
    env |= {"REPLICAX_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    given = [kind, strategy, str(folder), json.dumps(list(kills))]
    command = [sys.executable, "-m", "tests.multi_process.exact", *given]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return ledger(folder)


def assert_exact(lines, whole):
    expected = steps_of(whole)
    assert len(expected) == STEPS + 1
    for step, times in steps_of(lines).items():
        assert all(values == expected[step][0] for values in times), step
    assert steps_of(lines).keys() == expected.keys()


def at(steps, milliseconds=0):
    return steps, milliseconds / 1000


@pytest.mark.parametrize("kind", ["fit on a dataset"])  # the others: the slow test below
def test_a_run_that_is_killed_continues_bit_for_bit(tmp_path, kind):
    whole = run(tmp_path / "whole", kind, "mirrored")

    lines = run(tmp_path / "cut", kind, "mirrored", [at(6)])

    assert_exact(lines, whole)
    assert ["go on"] in lines  # not from the start
    assert len(lines) <= len(whole) + 1 + 2 * EVERY  # and little is done again


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_again_and_again_continues_bit_for_bit(tmp_path, kind):
    whole = run(tmp_path / "whole", kind, "mirrored")
    moments = [at(0), at(1, 3), at(3, 1), at(4, 7), at(2, 20), at(5, 2), at(3, 40), at(2, 5)]

    lines = run(tmp_path / "cut", kind, "mirrored", moments)

    assert_exact(lines, whole)


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.parametrize("kind", ["fit on a dataset", "Keras loop"])
def test_workers_that_are_killed_continue_bit_for_bit(tmp_path, kind):
    def gang(name, *, kill):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        with Gang(tmp_path, 2) as workers:
            for index in range(2):
                workers.start(index, kind, "workers", folder, program="exact")
            if kill:
                path = folder / "ledger1"
                while not path.exists() or len(path.read_text().splitlines()) < 8:
                    assert all(w.process.poll() is None for w in workers.workers)
                workers.workers[1].process.kill()
            codes = [w.code for w in workers.wait(seconds=300)]
            assert (codes == [0, 0]) != kill, [w.text for w in workers.workers]
        return [ledger(folder, k) for k in range(2)]

    whole = gang("whole", kill=False)
    gang("cut", kill=True)
    for lines, expected in zip(gang("cut", kill=False), whole, strict=True):
        assert_exact(lines, expected)
        assert ["go on"] in lines
