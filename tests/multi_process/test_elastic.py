"""In an elastic run the survivors of lost workers go on in process, and the result is exact."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax
from replicax._src.cli.main import main
from replicax._src.workers.resizes import Resizes
from replicax._src.workers.wire import free_ports
from tests.multi_process.gang import left_behind

BATCH, STEPS = 12, 8
TRAINEE = str(Path(__file__).with_name("elastic.py"))
LIBRARIES = str(Path(__file__).with_name("elastic_models.py"))
slow = pytest.mark.slow


def launch(folder, workers, *plan, options=("--elastic",), steps=STEPS, library="", **variables):
    folder.mkdir(exist_ok=True)
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "RX_TEST_MARK": str(folder)}
    env |= {"PYTHONPATH": str(Path(replicax.__file__).parents[1]), **variables}
    command = [sys.executable, "-m", "replicax", "launch", "--workers", workers, *options]
    command += [LIBRARIES, library] if library else [TRAINEE]
    command += [str(folder), str(steps), *plan]
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


def check_ledger(found, steps=STEPS, batch=BATCH):
    """Check that all steps are there, and the survivors met every example exactly once."""
    assert sorted(found) == list(range(1, steps + 1))
    met = [examples(lines) for step, lines in found.items() if len(lines) == lines[0][0]]
    assert all(len(ids) == batch for ids in met)
    assert len({i for ids in met for i in ids}) == sum(map(len, met))


@pytest.mark.multi_process
def test_survivors_equal_a_run_with_the_same_workers(tmp_path):
    # Worker 0 dies before step 4, and worker 2 when both have computed step 6 but none stored it.
    done = launch(tmp_path / "elastic", "1:3", "0@step@4", "2@barrier@6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[worker 1] sizes [2, 1] chief True" in done.stdout
    assert done.stderr.count("the others go on") == 2
    # Once, and not at every resize.
    assert (done.stdout + done.stderr).count("The dataset is not read from files") == 1
    assert "starting all workers again" not in done.stderr
    for workers, last in (("3", "3"), ("2", "6"), ("1", "8")):
        reference = launch(tmp_path / "reference", workers, options=(), STOP_AFTER=last)
        assert reference.returncode == 0, reference.stderr

    found, expected = ledger(tmp_path / "elastic"), ledger(tmp_path / "reference")
    check_ledger(found)
    assert [bits(found[k]) for k in sorted(found)] == [bits(expected[k]) for k in sorted(expected)]
    assert left_behind(str(tmp_path)) == []


@pytest.mark.multi_process
@pytest.mark.parametrize(
    "point",
    ["registered", pytest.param("register", marks=slow), pytest.param("connect@1", marks=slow)],
)
def test_survivors_continue_if_another_is_lost_while_jax_connects_them(tmp_path, point):
    point, _, number = point.partition("@")  # without a number: the second pass
    done = launch(tmp_path, "1:4", "0@step@4", f"3@{point}@{number or 2}", PACE="0.2")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "starting all workers again" not in said
    assert "[worker 1] sizes [2] chief True" in said

    found = ledger(tmp_path)
    check_ledger(found)
    assert sizes(found) == [4, 4, 4, 2, 2, 2, 2, 2]
    for k, weights in zip(sorted(found), expected_weights(found, STEPS), strict=True):
        seen = np.frombuffer(bytes.fromhex(bits(found[k])[1]), "float32")
        np.testing.assert_allclose(seen, weights, rtol=1e-4)
    assert left_behind(str(tmp_path)) == []


@pytest.mark.multi_process
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=slow)])
def test_survivor_that_is_a_step_behind_catches_up(tmp_path, every):
    """Worker 0 has begun step 7, and a commit, when worker 1 is still in the barrier of step 6."""
    plan = ["2@step@7", "1@cut@6"]
    done = launch(tmp_path / "elastic", "1:3", *plan, EVERY=str(every))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "starting all workers again" not in said
    assert "[worker 1] sizes [2] chief False" in said
    for workers, last in (("3", "6"), ("2", "8")):
        reference = launch(tmp_path / "reference", workers, options=(), STOP_AFTER=last)
        assert reference.returncode == 0, reference.stderr
    found, expected = ledger(tmp_path / "elastic"), ledger(tmp_path / "reference")
    assert [bits(found[k]) for k in sorted(found)] == [bits(expected[k]) for k in sorted(expected)]
    del found[6]  # worker 1 notes its part of that batch after the resize
    assert [examples(lines) for lines in found.values()] == [examples(expected[k]) for k in found]
    # The next commit is complete: a new run of it ends at once.
    again = launch(tmp_path / "elastic", "2", options=())
    assert again.returncode == 0, again.stderr
    assert sorted(ledger(tmp_path / "elastic")) == list(range(1, STEPS + 1))
    assert left_behind(str(tmp_path)) == []


@slow
@pytest.mark.multi_process
def test_survivors_may_compile_for_long_when_a_worker_is_lost(tmp_path):
    """A compilation cannot be interrupted; they re-form after it, and compile again."""
    waits = {"COMPILES": "20", "REPLICAX_STEP_TIMEOUT": "12"}
    done = launch(tmp_path, "1:3", "2@compile@1", **waits)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "starting all workers again" not in said
    assert "[worker 0] sizes [2] chief True" in said
    found = ledger(tmp_path)
    check_ledger(found)
    assert sizes(found) == [2] * STEPS
    assert left_behind(str(tmp_path)) == []


@slow
@pytest.mark.multi_process
def test_survivors_continue_when_they_wait_for_a_lost_worker_to_save(tmp_path):
    """Before its first save, the workers agree on who may write into the folder."""
    done = launch(tmp_path, "1:3", "2@claim@1")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "starting all workers again" not in said
    found = ledger(tmp_path)
    check_ledger(found)
    assert sizes({k: v for k, v in found.items() if k > 2}) == [2] * (STEPS - 2)
    assert left_behind(str(tmp_path)) == []


def per_replica_ids(found, rows):
    """Check that the steps take as many rows of the dataset as ``rows`` says, one after another."""
    ids = np.concatenate(
        list(replicax.data.Dataset.range(BATCH * STEPS).shuffle(30, seed=7).batch(1))
    ).tolist()
    assert sorted(found) == list(range(1, len(rows) + 1))
    for k, count in enumerate(rows, 1):
        mine, ids = ids[:count], ids[count:]
        met = examples(found[k])
        assert set(met) <= set(mine), k
        if {size for size, *_ in found[k]} == {len(found[k])}:  # none was lost or behind
            assert met == sorted(mine), k


@slow
@pytest.mark.multi_process
@pytest.mark.parametrize("form", ["batch", "iterator"])
def test_survivor_that_is_behind_takes_the_same_batch_per_replica(tmp_path, form):
    """All take the batch of step 7 as worker 0 does, which had begun it with three workers."""
    plan = ["2@step@7", "1@cut@6"]
    done = launch(tmp_path, "1:3", *plan, PER_REPLICA="4", FORM=form)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "starting all workers again" not in said
    found = ledger(tmp_path)
    if form == "batch":
        per_replica_ids(found, [12] * 7 + [8])
    assert all(len({tuple(rest) for _, _, *rest in lines}) == 1 for lines in found.values())
    assert left_behind(str(tmp_path)) == []


@pytest.mark.multi_process
def test_batch_per_replica_keeps_its_rows_when_two_workers_are_lost_in_a_step(tmp_path):
    done = launch(tmp_path, "1:4", "3@step@4", "2@resize@1", PER_REPLICA="4")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "starting all workers again" not in said
    assert "[worker 0] sizes [3, 2] chief True" in said
    per_replica_ids(ledger(tmp_path), [16] * 4 + [8] * 4)
    assert left_behind(str(tmp_path)) == []


@slow
@pytest.mark.multi_process
def test_worker_lost_while_one_joins_interrupts_others_at_different_places(tmp_path):
    """Worker 0 waits for the one that joins, and worker 1 is in the barrier of the step before."""
    steps = 60
    plan = ["3@step@3", "2@regroup@1", "1@cut@0"]
    done = launch(tmp_path, "1:4", *plan, options=JOINS, steps=steps, WAIT_FOR="3", PACE="0.3")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "starting all workers again" not in said
    found = ledger(tmp_path)
    assert sorted(found) == list(range(1, steps + 1))
    assert {size for size, *_ in found[steps]} == {3}
    rows = np.random.default_rng(0).normal(size=(BATCH * steps, 4)).astype("float32")
    order = replicax.data.Dataset.range(len(rows)).shuffle(30, seed=7).batch(BATCH)
    weights, speed = np.ones(4), np.zeros(4)
    for k, ids in enumerate(order, 1):
        x = rows[np.asarray(ids)]
        speed = 0.9 * speed + 2 * (x @ weights - 1) @ x / BATCH
        weights = weights - 0.01 * speed
        assert set(examples(found[k])) <= set(np.asarray(ids).tolist())
        seen = np.frombuffer(bytes.fromhex(bits(found[k])[1]), "float32")
        np.testing.assert_allclose(seen, weights, rtol=1e-3)
    apart = [k for k in found if len({size for size, *_ in found[k]}) > 1]
    assert len(apart) == 1  # the others were a step ahead of worker 1
    assert left_behind(str(tmp_path)) == []


NEIGHBOR = {"SHARDED": "1", "REPLICAX_ELASTIC_SHARDS": "neighbor"}


@pytest.mark.multi_process
def test_sharded_variables_survive_a_loss_with_a_neighbors_copy(tmp_path):
    done = launch(tmp_path / "elastic", "1:3", "0@step@4", "2@barrier@6", **NEIGHBOR)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "[worker 1] sizes [2, 1] chief True" in said
    assert "starting all workers again" not in said
    for workers, last in (("3", "3"), ("2", "6"), ("1", "8")):
        reference = launch(
            tmp_path / "reference", workers, options=(), STOP_AFTER=last, SHARDED="1"
        )
        assert reference.returncode == 0, reference.stderr
    found, expected = ledger(tmp_path / "elastic"), ledger(tmp_path / "reference")
    check_ledger(found)
    assert [bits(found[k]) for k in sorted(found)] == [bits(expected[k]) for k in sorted(expected)]
    assert left_behind(str(tmp_path)) == []


@slow
@pytest.mark.multi_process
@pytest.mark.parametrize("plan", [["1@step@4"], ["0@step@4", "1@step@4"]])
def test_sharded_variables_without_a_copy_fall_back_to_a_restart(tmp_path, plan):
    """No copies are kept; or a worker and the one that has its copies are lost at once."""
    options = ("--elastic", "--max-restarts", "1")
    kept = NEIGHBOR if len(plan) > 1 else {"SHARDED": "1"}
    done = launch(tmp_path, "1:3", *plan, options=options, **kept)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    why = "next to each other are lost" if len(plan) > 1 else "is sharded, so each worker has only"
    assert why in said
    assert "starting all workers again (restart 1 of 1)" in said
    assert sorted(ledger(tmp_path)) == list(range(1, STEPS + 1))


@pytest.mark.multi_process
def test_preempted_worker_with_a_part_that_others_lack_ends_the_run(tmp_path):
    # Slow steps, so that the workers agree on the last one before the run is over.
    done = launch(tmp_path, "1:2", "1@term@4", SHARDED="1", PACE="1")
    said = done.stdout + done.stderr
    assert done.returncode == 143, said
    assert "A worker was preempted, and all end, with a checkpoint." in said
    last = max(ledger(tmp_path))
    assert 4 <= last < STEPS
    done = launch(tmp_path, "2", options=(), SHARDED="1")
    assert done.returncode == 0, done.stderr
    found = ledger(tmp_path)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert all(len(lines) == 2 for lines in found.values())  # none was taken again


@slow
@pytest.mark.multi_process
def test_newcomer_is_refused_if_the_others_cannot_change(tmp_path):
    """The others go on as they are, with the state that they had."""
    plan = ["2@step@4"]
    steps = 40
    done = launch(
        *(tmp_path / "elastic", "1:3", *plan),
        options=JOINS,
        steps=steps,
        PACE="0.5",
        **NEIGHBOR,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "is sharded, and workers cannot join then" in said
    assert "[worker 0] sizes [2] chief True" in said
    for workers, last in (("3", "3"), ("2", str(steps))):
        reference = launch(
            *(tmp_path / "reference", workers),
            options=(),
            steps=steps,
            STOP_AFTER=last,
            SHARDED="1",
        )
        assert reference.returncode == 0, reference.stderr
    found, expected = ledger(tmp_path / "elastic"), ledger(tmp_path / "reference")
    assert [bits(found[k]) for k in sorted(found)] == [bits(expected[k]) for k in sorted(expected)]


RAGGED = 8  # rows: three workers have 3, 3 and 2 of them


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("form", "fault"),
    [
        ("batch", "2@step@3"),
        ("iterator", "1@collective@26"),
        *(
            pytest.param(form, f"{worker}@collect{end}@{number}", marks=slow)
            for form, worker, end, number in [
                ("batch", 0, "ed", 21),
                ("batch", 1, "ive", 23),
                ("batch", 2, "ed", 24),
                ("batch", 1, "ed", 25),
                ("iterator", 2, "ed", 25),
                ("iterator", 0, "ive", 27),
                ("iterator", 1, "ed", 28),
            ]
        ),
    ],
)
def test_survivors_continue_while_batches_have_different_sizes(tmp_path, form, fault):
    done = launch(tmp_path, "1:3", fault, FORM=form, ROWS=str(RAGGED))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "starting all workers again" not in said
    assert "sizes [2] chief True" in said

    found = ledger(tmp_path)
    assert set(sizes(found)) == {3, 2}
    if form == "batch":
        check_ledger(found, batch=RAGGED)
    rows = np.random.default_rng(0).normal(size=(RAGGED * STEPS, 4)).astype("float32")
    order = replicax.data.Dataset.range(len(rows)).shuffle(30, seed=7).batch(RAGGED)
    weights, speed = np.ones(4), np.zeros(4)
    for k, ids in enumerate(order, 1):
        x = rows[np.asarray(ids)]
        speed = 0.9 * speed + 2 * (x @ weights - 1) @ x / RAGGED
        weights = weights - 0.01 * speed
        seen = np.frombuffer(bytes.fromhex(bits(found[k])[1]), "float32")
        np.testing.assert_allclose(seen, weights, rtol=1e-4)
    assert left_behind(str(tmp_path)) == []


def sizes(found):
    """The number of replicas of each step."""
    (each,) = zip(*({size for size, *_ in found[k]} for k in sorted(found)), strict=True)
    return list(each)


def expected_weights(found, steps):
    """The weights after each step, by NumPy, from the examples in the ledger."""
    rows = np.random.default_rng(0).normal(size=(BATCH * steps, 4)).astype("float32")
    weights, speed = np.ones(4), np.zeros(4)
    for k in sorted(found):
        x = rows[examples(found[k])]
        speed = 0.9 * speed + 2 * (x @ weights - 1) @ x / BATCH
        weights = weights - 0.01 * speed
        yield weights


JOINS = ("--elastic", "--max-restarts", "1")


@pytest.mark.multi_process
def test_lost_worker_is_started_again_and_joins(tmp_path):
    steps = 60  # slow ones, while there are two workers
    done = launch(tmp_path, "2:3", "0@step@4", options=JOINS, steps=steps, WAIT_FOR="3")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "It is started again, to join them (1 of 1)" in said
    assert "[worker 0] sizes [3] chief False" in said  # it ranks behind those that stayed
    assert "[worker 1] sizes [2, 3] chief True" in said
    assert "starting all workers again" not in said

    found = ledger(tmp_path)
    check_ledger(found, steps)
    # The workers before and after each change; all take part in every step.
    assert [k for k, _ in itertools.groupby(sizes(found))] == [3, 2, 3]
    assert [len(found[k]) for k in sorted(found)] == sizes(found)
    for k, weights in zip(sorted(found), expected_weights(found, steps), strict=True):
        np.testing.assert_allclose(
            np.frombuffer(bytes.fromhex(bits(found[k])[1]), "float32"), weights, rtol=1e-4
        )
    assert left_behind(str(tmp_path)) == []


@slow
@pytest.mark.multi_process
def test_stopped_worker_is_ended_started_again_and_joins(tmp_path):
    """It stays stopped for good: its machine swaps, or a debugger holds it."""
    steps = 60
    slow_until = {"WAIT_FOR": "2", "REPLICAX_PING_TIMEOUT": "3"}
    done = launch(tmp_path, "1:2", "0@stop@4", options=JOINS, steps=steps, **slow_until)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "and killed by the launcher; the others go on. It is started again" in said
    assert "[worker 0] sizes [2] chief False" in said
    assert "[worker 1] sizes [1, 2] chief True" in said
    found = ledger(tmp_path)
    check_ledger(found, steps)
    assert [k for k, _ in itertools.groupby(sizes(found))] == [2, 1, 2]
    assert left_behind(str(tmp_path)) == []


@pytest.mark.multi_process
def test_preempted_worker_says_goodbye_and_the_others_continue(tmp_path):
    steps = 30
    done = launch(tmp_path, "1:2", "0@term@4", options=JOINS, steps=steps, WAIT_FOR="3")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "This worker was preempted: it leaves the others, which go on." in said
    assert "exited with code 143; the others go on." in said  # and is not started again
    assert "[worker 1] sizes [1] chief True" in said
    found = ledger(tmp_path)
    check_ledger(found, steps)
    assert [k for k, _ in itertools.groupby(sizes(found))] == [2, 1]
    assert [len(found[k]) for k in sorted(found)] == sizes(found)
    assert left_behind(str(tmp_path)) == []


@pytest.mark.multi_process
def test_too_few_workers_wait_and_end_with_a_commit(tmp_path):
    options = ("--elastic", "--wait", "2")
    done = launch(tmp_path, "2:2", "0@step@4", options=options)
    said = done.stdout + done.stderr
    assert done.returncode == 75, said
    assert "As at least 2 are needed, they wait up to 2 s for others to join." in said
    assert "Only 1 of at least 2 worker(s) are left, and no other has joined within 2 s." in said
    last = max(ledger(tmp_path))
    assert last < STEPS
    # The run goes on from the step at which it ended.
    done = launch(tmp_path, "2", options=())
    assert done.returncode == 0, done.stderr
    found = ledger(tmp_path)
    check_ledger(found)
    assert [len(found[k]) for k in sorted(found)] == sizes(found)
    assert left_behind(str(tmp_path)) == []


def launch_hosts(folder, workers, steps, *plan, again=False, **variables):
    """Launchers of two hosts; with ``again``, the second one is started again when it ends."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "RX_TEST_MARK": str(folder)}
    env |= {"PYTHONPATH": str(Path(replicax.__file__).parents[1]), "REPLICAX_TOKEN": "of both"}
    command = [sys.executable, "-m", "replicax", "launch", "--workers", workers, "--elastic"]
    command += ["--hosts", "127.0.0.1,127.0.0.2", "--port", str(free_ports(1)[0])]
    command += ["--max-restarts", "0" if again else "2"]
    program = [TRAINEE, str(folder), str(steps)]

    def start(host, *more):
        return subprocess.Popen(
            [*command, "--host-index", str(host), *program, *more],
            env=env | variables | {"TMPDIR": str(folder / str(host))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    for host in range(2):
        (folder / str(host)).mkdir()
    first, second = start(0, *plan), start(1, *plan)
    ended = []
    if again:
        ended.append(second.communicate(timeout=300)[0])
        second = start(1)
    said = [first.communicate(timeout=300)[0], second.communicate(timeout=300)[0], *ended]
    assert [first.returncode, second.returncode] == [0, 0], said
    return said


@pytest.mark.multi_process
def test_run_goes_on_without_the_workers_of_a_host_which_join_again(tmp_path):
    steps = 60
    said = "".join(launch_hosts(tmp_path, "1:4", steps, "2@step@4", "3@step@4", WAIT_FOR="4"))
    assert "starting all workers again" not in said
    assert "[worker 2] replicax: joined: there are" in said
    found = ledger(tmp_path)
    check_ledger(found, steps)
    assert [len(found[k]) for k in sorted(found)] == sizes(found)
    assert sizes(found)[:4] == [4, 4, 4, 2]
    assert sizes(found)[-1] == 4
    for k, weights in zip(sorted(found), expected_weights(found, steps), strict=True):
        np.testing.assert_allclose(
            np.frombuffer(bytes.fromhex(bits(found[k])[1]), "float32"), weights, rtol=1e-4
        )
    assert left_behind(str(tmp_path)) == []


@slow
@pytest.mark.multi_process
def test_host_that_is_started_again_joins_the_run(tmp_path):
    steps = 60
    said = launch_hosts(tmp_path, "1:2", steps, "1@step@4", again=True, WAIT_FOR="2")
    assert "was killed by SIGKILL" in said[2]
    found = ledger(tmp_path)
    check_ledger(found, steps)
    assert [k for k, _ in itertools.groupby(sizes(found))] == [2, 1, 2]
    assert [len(found[k]) for k in sorted(found)] == sizes(found)
    assert left_behind(str(tmp_path)) == []


@slow
@pytest.mark.multi_process
@pytest.mark.parametrize("lost", [[], ["0@step@120"]])
def test_another_launcher_adds_a_worker(tmp_path, lost):
    """Without the last worker of its own, the launcher stays for that of the other one."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "RX_TEST_MARK": str(tmp_path)}
    env |= {"PYTHONPATH": str(Path(replicax.__file__).parents[1]), "WAIT_FOR": "2"}
    env |= {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "replicax", "launch"]
    program = [TRAINEE, str(tmp_path), "150", "1@term@4"]
    with subprocess.Popen(
        [*command, "--workers", "1:2", "--elastic", *program, *lost],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        lines = []
        for line in launcher.stdout:
            lines.append(line)
            if "the others go on" in line:
                break
        joiner = subprocess.run(
            [*command, "--workers", "1", "--join", str(launcher.pid), *program[:-1]],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        lines += launcher.stdout
    assert launcher.returncode == (143 if lost else 0), lines  # of the first
    assert joiner.returncode == 0, joiner.stdout + joiner.stderr
    assert f"[worker 1] sizes [2{', 1] chief True' if lost else '] chief False'}" in joiner.stdout
    found = ledger(tmp_path)
    check_ledger(found, 150)
    assert [k for k, _ in itertools.groupby(sizes(found))] == [2, 1, 2, *([1] if lost else [])]
    assert [len(found[k]) for k in sorted(found)] == sizes(found)
    assert left_behind(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--workers", "1:2", "--join", "1"], "--workers 1"),
        (["--workers", "1", "--join", "1", "--elastic"], "omit --elastic"),
        (["--workers", "1", "--join", "1", "-m"], "launched by process 1"),
    ],
)
def test_joining_launcher_refuses_other_options_and_unknown_runs(arguments, fault, capsys):
    assert main(["launch", *arguments, "train.py"]) == 2
    assert fault in " ".join(capsys.readouterr().err.split())


@slow
@pytest.mark.multi_process
def test_too_few_workers_continue_when_one_joins(tmp_path):
    done = launch(tmp_path, "2:2", "0@step@4", options=JOINS)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "There are too few workers: waiting for others to join." in said
    assert "starting all workers again" not in said
    found = ledger(tmp_path)
    check_ledger(found)
    assert [len(found[k]) for k in sorted(found)] == sizes(found)
    assert sizes(found).count(1) <= 2  # the step of the loss, and one that had begun
    for k, weights in zip(sorted(found), expected_weights(found, STEPS), strict=True):
        np.testing.assert_allclose(
            np.frombuffer(bytes.fromhex(bits(found[k])[1]), "float32"), weights, rtol=1e-4
        )


@slow
@pytest.mark.multi_process
@pytest.mark.parametrize("form", ["batch", "iterator"])
def test_joined_run_equals_one_with_the_same_workers(tmp_path, form):
    steps = 60
    done = launch(
        tmp_path / "elastic", "1:2", "0@step@4", options=JOINS, steps=steps, WAIT_FOR="2", FORM=form
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = ledger(tmp_path / "elastic")
    changes = list(itertools.accumulate(len(list(g)) for _, g in itertools.groupby(sizes(found))))
    assert len(changes) == 3
    for workers, last in zip(("2", "1", "2"), map(str, changes), strict=True):
        reference = launch(
            tmp_path / "reference", workers, options=(), steps=steps, STOP_AFTER=last, FORM=form
        )
        assert reference.returncode == 0, reference.stderr
    expected = ledger(tmp_path / "reference")
    assert [bits(found[k]) for k in sorted(found)] == [bits(expected[k]) for k in sorted(expected)]


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
@pytest.mark.parametrize("library", ["keras", "nnx"])
def test_training_of_a_library_equals_one_with_the_same_workers(tmp_path, library):
    """A worker is killed in the middle of an epoch, is started again, and joins the other."""
    steps = 12
    options = (*JOINS, "--wait", "250")
    done = launch(
        tmp_path / "elastic", "2:2", "0@step@4", options=options, steps=steps, library=library
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "starting all workers again" not in said
    assert "[worker 1] sizes [1, 2] chief True" in said
    assert "[worker 0] sizes [2] chief False" in said
    found = ledger(tmp_path / "elastic")
    changes = list(itertools.accumulate(len(list(g)) for _, g in itertools.groupby(sizes(found))))
    assert len(changes) == 3
    assert [len(found[k]) for k in sorted(found)] == sizes(found)
    for workers, last in zip(("2", "1", "2"), map(str, changes), strict=True):
        reference = launch(
            *(tmp_path / "reference", workers),
            options=(),
            steps=steps,
            library=library,
            STOP_AFTER=last,
        )
        assert reference.returncode == 0, reference.stdout + reference.stderr
    expected = ledger(tmp_path / "reference")
    assert sorted(found) == list(range(1, steps + 1)) == sorted(expected)
    for k in found:
        assert len({str(line) for line in [*found[k], *expected[k]]}) == 1, k
    # The metrics of the last epoch, too.
    results = [line.partition("{")[2] for line in (said + reference.stdout).splitlines()]
    assert len({text for text in results if text}) == 1
    assert left_behind(str(tmp_path)) == []


@slow
@pytest.mark.multi_process
@pytest.mark.parametrize("library", ["", "keras"])
def test_survivors_continue_when_a_worker_is_lost_while_it_saves(tmp_path, library):
    # Every step begins a save, and waits for the one before it, outside of a step.
    steps = 12
    done = launch(tmp_path, "1:2", "1@commit-write@2", steps=steps, library=library, EVERY="1")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "was not completed, as a worker was lost" in said
    assert sizes(ledger(tmp_path))[-1] == 1
    assert sorted(ledger(tmp_path)) == list(range(1, steps + 1))


@slow
@pytest.mark.multi_process
def test_batch_per_replica_scales_and_every_example_is_used_once(tmp_path):
    done = launch(tmp_path, "1:3", "1@step@4", "2@barrier@6", steps=STEPS, PER_REPLICA="4")
    assert done.returncode == 0, done.stdout + done.stderr
    found = ledger(tmp_path)
    complete = [k for k in found if len(found[k]) == found[k][0][0]]
    # The batch in which a worker was lost keeps its rows, also for the others.
    for k in complete:
        size = found[k][0][0]
        was_lost = k > 1 and found[k - 1][0][0] != size
        assert len(examples(found[k])) == 4 * (found[k - 1][0][0] if was_lost else size)
    ids = np.concatenate(
        list(replicax.data.Dataset.range(BATCH * STEPS).shuffle(30, seed=7).batch(1))
    ).tolist()
    for k in sorted(found):  # the stream goes on where the step before ended
        rows = 12 if k <= 4 else 8
        if k > 6:
            break
        mine, ids = ids[:rows], ids[rows:]
        assert set(examples(found[k])) <= set(mine)
        if k in complete:
            assert sorted(mine) == examples(found[k])
    assert left_behind(str(tmp_path)) == []


@slow
@pytest.mark.multi_process
def test_total_of_the_copies_survives_a_loss(tmp_path):
    done = launch(tmp_path, "1:2", "1@step@4", ON_READ="SUM")
    assert done.returncode == 0, done.stdout + done.stderr
    found = ledger(tmp_path)
    assert sizes(found) == [2] * 3 + [1] * 5
    assert f"sizes [1] chief True total {float(sum(sizes(found)))}" in done.stdout


@slow
@pytest.mark.multi_process
def test_state_that_would_be_lost_falls_back_to_a_restart(tmp_path):
    options = ("--elastic", "--max-restarts", "1")
    done = launch(tmp_path, "1:2", "1@step@4", options=options, ON_READ="NONE")

    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "has a value for each replica (synchronization ON_READ, aggregation NONE)" in said
    assert "starting all workers again (restart 1 of 1)" in said
    assert bits(ledger(tmp_path)[STEPS])


@slow
@pytest.mark.multi_process
def test_program_of_the_page_continues_when_a_worker_is_killed(tmp_path):
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
        (["--workers", "1:2", "--metrics-port", "1"], "omit --metrics-port"),
    ],
)
def test_options_that_elastic_runs_lack_are_refused(arguments, fault, capsys):
    assert main(["launch", "--elastic", *arguments, "train.py"]) == 2
    assert fault in " ".join(capsys.readouterr().err.split())


@pytest.mark.soak
@pytest.mark.multi_process
def test_resizes_leave_nothing_behind(tmp_path):
    rounds = 50  # of a loss and a join
    options = ("--elastic", "--max-restarts", "1000")
    folder = tmp_path / "run"
    folder.mkdir()
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "RX_TEST_MARK": str(folder)}
    env |= {"PYTHONPATH": str(Path(replicax.__file__).parents[1]), "TURNOVER": "12", "PACE": "0.1"}
    command = [sys.executable, "-m", "replicax", "launch", "--workers", "1:3", *options, TRAINEE]
    with subprocess.Popen([*command, str(folder), "100000", "2@step@4"], env=env) as launcher:
        deadline = time.monotonic() + 60 * rounds
        while time.monotonic() < deadline and launcher.poll() is None:
            time.sleep(5)
            usage = [p.read_text().splitlines() for p in folder.glob("usage0.*")]
            if usage and len(usage[0]) >= 2 * rounds:
                break
        launcher.terminate()
    assert len(usage) == 1, "worker 0 was started again"
    used = np.array([json.loads(line)[1:] for line in usage[0]])
    assert len(used) >= 2 * rounds
    # Of the same size of the group: the changes alternate between a loss and a join.
    early, late = used[4:10].max(axis=0), used[-6:].max(axis=0)
    assert late[0] <= early[0] + 2, used[:, 0]
    assert late[1] <= early[1] + 2, used[:, 1]
    assert late[2] <= early[2] * 1.1 + 20, used[:, 2]
    assert left_behind(str(tmp_path)) == []
