"""A run goes on with the workers that are left when a host is lost or one keeps failing."""

import json
import os
import subprocess
import textwrap
import time

import pytest

from replicax._src.cli.main import main
from replicax._src.cli.membership import Membership
from replicax._src.cli.ssh import _fatal
from replicax._src.cluster.checks import ClusterError
from tests.cli.test_launch import command, environment, free_ports, launch

pytestmark = pytest.mark.multi_process

BATCH, STEPS = 6, 12
# Integers, whose sums are exact in float32 in any order: the weights do not depend on how the
# batches are divided, and NumPy is an oracle for every membership.
TRAINEE = f"""
    import json, os, sys, time
    import jax.numpy as jnp
    import numpy as np
    import replicax as rx

    folder, fault = sys.argv[1:]
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with strategy.scope():
        w, count = rx.Variable(0.0), rx.Variable(0)
    data = rx.data.Dataset.range({BATCH * STEPS}).batch({BATCH})
    batches = iter(strategy.experimental_distribute_dataset(data))

    @rx.function
    def train(batch):
        def step(x):
            w.assign_add(rx.distribute.get_replica_context().all_reduce("SUM", x.sum() + 0.0))
            count.assign_add(1)
        strategy.run(step, args=(batch,))

    with rx.train.Resumable(f"{{folder}}/commits", every=2, w=w, count=count, data=batches) as run:
        for batch in batches:
            ids = np.concatenate(strategy.experimental_local_results(batch))
            train(batch)
            line = [int(os.environ["REPLICAX_RESTART"]), size, int(count), ids.tolist(), float(w)]
            with open(f"{{folder}}/ledger{{rank}}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\\n")
            if fault == "dies" and rank == size - 1 == 1 and int(count) == 5:
                os.kill(os.getpid(), 9)
            if fault == "slow":
                time.sleep(0.2)
            run.step()
    print("weight", float(w), "of", size, flush=True)
"""


@pytest.fixture
def trainee(tmp_path):
    path = tmp_path / "trainee.py"
    path.write_text(textwrap.dedent(TRAINEE))
    return str(path)


def ledger(folder):
    """The examples of each step, by attempt: ``{attempt: {step: [(size, ids, weight), ...]}}``."""
    found = {}
    for path in folder.glob("ledger*.jsonl"):
        for line in path.read_text().splitlines():
            attempt, size, step, ids, weight = json.loads(line)
            found.setdefault(attempt, {}).setdefault(step, []).append((size, ids, weight))
    return found


def check_exact(folder):
    """Check that the attempts that count have each example once, and NumPy's weights."""
    found, steps = ledger(folder), {}
    for attempt in sorted(found):  # a later attempt repeats the steps after the last commit
        first = min(found[attempt])
        steps = {k: v for k, v in steps.items() if k < first} | found[attempt]
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step, rows in steps.items():
        size = rows[0][0]
        assert len(rows) == size
        met = sorted(example for _, ids, _ in rows for example in ids)
        assert met == list(range(BATCH * (step - 1), BATCH * step))
        assert {weight for *_, weight in rows} == {float(np_sum(BATCH * step))}
    return [steps[k][0][0] for k in sorted(steps)]


def np_sum(count):
    return count * (count - 1) // 2


@pytest.mark.slow
def test_worker_that_keeps_failing_is_left_out(trainee, tmp_path):
    done = launch("--workers", "1:2", "--max-restarts", "4", trainee, str(tmp_path), "dies")

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("starting all workers again") == 2
    assert (
        "The worker in slot 1 failed first 2 times in a row: going on without it, with 1 worker(s)."
    ) in done.stderr
    sizes = check_exact(tmp_path)
    assert sizes.count(2) in (2, 4)  # the last commit: that of step 4 may not have been complete
    assert sizes == [2] * sizes.count(2) + [1] * sizes.count(1)
    assert f"weight {float(np_sum(BATCH * STEPS))} of 1" in done.stdout


def test_lost_host_is_left_out(trainee, tmp_path):
    port = str(free_ports(1)[0])
    env = environment() | {"REPLICAX_TOKEN": "known to both", "REPLICAX_JOIN_TIMEOUT": "30"}
    launchers, outputs = [], []
    try:
        for index in range(2):
            outputs.append(tmp_path / f"launcher{index}.txt")
            words = ("--workers", "1:2", "--hosts", "127.0.0.1,127.0.0.2", "--port", port)
            words += ("--host-index", str(index), "--max-restarts", "2")
            with outputs[-1].open("w") as output:
                launchers.append(
                    subprocess.Popen(
                        command(*words, trainee, str(tmp_path), "slow"),
                        env=env,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline = time.monotonic() + 60
        while len(ledger(tmp_path).get(0, {})) < 4:
            assert time.monotonic() < deadline, [path.read_text() for path in outputs]
            time.sleep(0.05)
        launchers[1].kill()  # its guard ends its worker
        assert launchers[0].wait(60) == 0, outputs[0].read_text()
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    assert "Going on without host 1, with 1 worker(s)." in outputs[0].read_text()
    sizes = check_exact(tmp_path)
    assert sizes[0] == 2
    assert sizes[-1] == 1


def test_membership_keeps_the_slots_that_work():
    members = Membership.of("2:4", None, 1)

    assert [members.blame(slot) for slot in (1, 3, 1)] == ["", "", ""]
    assert "slot 1" in members.blame(1)
    assert members.slots == [0, 2, 3]
    assert "slot 0" in [members.blame(0), members.blame(0)][1]
    assert (members.slots, members.may_shrink) == ([2, 3], False)
    assert [members.blame(2), members.blame(2), members.blame(2)] == ["", "", ""]
    assert members.slots == [2, 3]


def test_membership_counts_hosts():
    members = Membership.of("5:8", None, 4)

    assert (members.size, members.least_hosts) == (8, 3)
    assert members.keep_hosts([0, 1, 2, 3]) == ""
    assert members.keep_hosts([0, 2, 3]) == "going on without host 1, with 6 worker(s)"
    assert members.keep_hosts([0, 2]) == "going on without host 2, with 4 worker(s)"
    assert members.hosts == [0, 3]


@pytest.mark.parametrize(
    ("codes", "least", "fatal"),
    [
        ([None, None, None], 3, None),
        ([None, 1, None], 3, 1),
        ([None, 1, None], 2, None),
        ([None, 1, 255], 2, 1),
        ([1, None, None], 2, 0),
        ([0, 1, 0], 2, None),
        ([0, 1, 0], 3, 1),
    ],
)
def test_ssh_continues_with_enough_hosts(codes, least, fatal):
    assert _fatal(codes, least) == fatal


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--workers", "2:"], "--workers 2: is not a number of workers"),
        (["--workers", ":3"], "is not a number of workers"),
        (["--workers", "two"], "is not a number of workers"),
        (["--workers", "3:2"], "the fewest workers must be 1 to 2, and are 3"),
        (["--workers", "0:2"], "the fewest workers must be 1 to 2, and are 0"),
        (["--workers", "2", "--min-workers", "3"], "must be 1 to 2, and are 3"),
        (["--workers", "1:2", "--min-workers", "1"], "omit --min-workers"),
        (["--workers", "1:2"], "1 to 2 workers are for restarts: add --max-restarts"),
    ],
)
def test_wrong_numbers_of_workers_are_refused(arguments, fault, capsys):
    assert main(["launch", *arguments, "train.py"]) == 2
    assert fault in " ".join(capsys.readouterr().err.split())


def test_gpus_stay_with_their_slots(capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ | {"CUDA_VISIBLE_DEVICES": "4,5,6"})
    members = Membership.of("2:3", None, 1)
    members.slots.remove(1)
    monkeypatch.setattr(Membership, "of", lambda *_: members)
    words = ["--max-restarts", "1", "--gpus-per-worker", "1", "--dry-run", "train.py"]
    assert main(["launch", "--workers", "2:3", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("CUDA_VISIBLE_DEVICES=")[1].split()[0] for line in lines] == ["4", "6"]


def test_membership_rejects_indivisible_hosts():
    with pytest.raises(ClusterError, match="cannot be divided evenly over 2 hosts"):
        Membership.of("1:3", None, 2)
