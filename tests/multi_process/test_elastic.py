"""In an elastic run the survivors of lost workers go on in process, and the result is exact."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax
from replicax._src.cli.main import main
from replicax._src.workers.resizes import Resizes
from tests.multi_process.gang import left_behind

BATCH, STEPS = 12, 8
TRAINEE = str(Path(__file__).with_name("elastic.py"))
slow = pytest.mark.slow


def launch(folder, workers, *plan, options=("--elastic",), **variables):
    folder.mkdir(exist_ok=True)
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "RX_TEST_MARK": str(folder)}
    env |= {"PYTHONPATH": str(Path(replicax.__file__).parents[1]), **variables}
    command = [sys.executable, "-m", "replicax", "launch", "--workers", workers, *options]
    command += [TRAINEE, str(folder), str(STEPS), *plan]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def ledger(folder):
    """The lines of each step: ``{step: [(size, ids, loss, weights, speed), ...]}``."""
    found = {}
    for path in sorted(folder.glob("ledger*")):
        for line in path.read_text().splitlines():
            step, *rest = json.loads(line)
            found.setdefault(step, []).append(tuple(rest))
    return found


def examples(lines):
    return sorted(i for _, ids, *_ in lines for i in ids)


def bits(lines):
    """The bits that all workers found in a step."""
    (found,) = {tuple(rest) for _, _, *rest in lines}
    return found


def check_ledger(found):
    """Check that all steps are there, and the survivors met every example exactly once."""
    assert sorted(found) == list(range(1, STEPS + 1))
    met = [examples(lines) for step, lines in found.items() if len(lines) == lines[0][0]]
    assert all(len(ids) == BATCH for ids in met)
    assert len({i for ids in met for i in ids}) == sum(map(len, met))


@pytest.mark.multi_process
def test_survivors_equal_a_run_with_the_same_workers(tmp_path):
    # Worker 0 dies before step 4, and worker 2 when both have computed step 6 but none stored it.
    done = launch(tmp_path / "elastic", "1:3", "0@step@4", "2@barrier@6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[worker 1] sizes [2, 1] chief True" in done.stdout
    assert done.stderr.count("the others go on") == 2
    assert "starting all workers again" not in done.stderr
    for workers, last in (("3", "3"), ("2", "6"), ("1", "8")):
        reference = launch(tmp_path / "reference", workers, options=(), STOP_AFTER=last)
        assert reference.returncode == 0, reference.stderr

    found, expected = ledger(tmp_path / "elastic"), ledger(tmp_path / "reference")
    check_ledger(found)
    assert [bits(found[k]) for k in sorted(found)] == [bits(expected[k]) for k in sorted(expected)]
    assert left_behind(str(tmp_path)) == []


@slow
@pytest.mark.multi_process
@pytest.mark.parametrize("form", ["batch", "iterator"])
def test_losses_at_every_point_of_a_step(tmp_path, form):
    for point in ("collective", "barrier", "collected", "input"):
        folder = tmp_path / point
        done = launch(folder, "1:2", f"1@{point}@12", FORM=form)
        assert done.returncode == 0, done.stdout + done.stderr
        assert bits(ledger(folder)[STEPS])


@slow
@pytest.mark.multi_process
def test_state_that_would_be_lost_falls_back_to_a_restart(tmp_path):
    options = ("--elastic", "--max-restarts", "1")
    done = launch(tmp_path, "1:2", "1@step@4", options=options, ON_READ="1")

    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "has a value for each replica (synchronization ON_READ)" in said
    assert "starting all workers again (restart 1 of 1)" in said
    assert bits(ledger(tmp_path)[STEPS])


@slow
@pytest.mark.multi_process
def test_program_of_the_page_goes_on_when_a_worker_is_killed(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "elastic.md"
    program = tmp_path / "train.py"
    program.write_text(page.read_text().split("```python\n")[1].split("```")[0])
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "RX_TEST_MARK": str(tmp_path)}
    env |= {"PYTHONPATH": str(Path(replicax.__file__).parents[1])}
    command = [sys.executable, "-m", "replicax", "launch", "--workers", "2:3", "--elastic"]
    with subprocess.Popen(
        [*command, str(program)], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as launcher:
        lines = []
        for line in launcher.stdout:
            lines.append(line)
            if line.startswith("[worker 1] step 10 "):
                os.kill(next(p for p, c in left_behind(str(tmp_path), 0) if _rank(p) == "1"), 9)
    assert launcher.returncode == 0, lines
    for worker in (0, 2):
        mine = [line.split() for line in lines if line.startswith(f"[worker {worker}] step")]
        assert [int(words[3]) for words in mine] == list(range(1, 61))
        assert f"[worker {worker}] replicas: 2\n" in lines
    losses = [float(line.split()[5]) for line in lines if " step 60 " in line]
    assert len(losses) == 2
    assert losses[0] == losses[1] < 0.1


def _rank(pid):
    """The number of the worker with this process id."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = [v.decode() for v in variables if v.startswith(b"RANK=")]
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return found[0].removeprefix("RANK=") if found and b"train.py" in command else ""


@given(st.data(), st.integers(2, 6))
def test_agreed_step_is_one_that_all_have_and_none_has_passed(data, workers):
    """Law of the two phases, for any interruption of any interleaving.

    A worker begins step n after it has completed n - 1, computes it, and completes it only when all
    workers have computed it.
    """
    computed, completed = [0] * workers, [0] * workers
    for _ in range(data.draw(st.integers(0, 60))):
        i = data.draw(st.integers(0, workers - 1))
        if computed[i] == completed[i]:
            computed[i] += 1
        elif min(computed) >= computed[i]:
            completed[i] = computed[i]
    order = data.draw(st.permutations(range(workers)))
    first, second = sorted(data.draw(st.tuples(*[st.integers(0, workers - 1)] * 2)))
    finished = {i for i in order[first:second] if computed[i] == completed[i]}
    survivors = [*(i for i in order[first:second] if i not in finished), *order[second:]]
    resizes = Resizes(1)
    resizes.begin(order[0], "lost")
    for i in finished:
        resizes.leave(i, completed[i])
    for i in survivors:
        resizes.note(i, 0, computed[i], completed[i])
    last = resizes.last()

    assert last is not None
    assert all(completed[i] <= last <= computed[i] for i in survivors)
    assert all(completed[i] <= last for i in finished)


def test_survivors_that_cannot_agree_end():
    resizes = Resizes(1)
    resizes.begin(2, "lost")
    assert not resizes.is_ready([0, 1])
    assert resizes.note(0, 0, 5, 5)
    assert not resizes.note(1, 1, 3, 3)  # of another generation
    assert resizes.note(1, 0, 3, 3)
    assert resizes.is_ready([0, 1])
    assert resizes.last() is None


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--workers", "2"], "--workers MIN:MAX"),
        (["--workers", "1:2", "--hosts", "a,b", "--port", "1"], "omit --hosts"),
        (["--workers", "1:2", "--metrics-port", "1"], "omit --metrics-port"),
    ],
)
def test_options_that_elastic_runs_lack_are_refused(arguments, fault, capsys):
    assert main(["launch", "--elastic", *arguments, "train.py"]) == 2
    assert fault in " ".join(capsys.readouterr().err.split())
