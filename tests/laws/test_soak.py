"""Long runs stay as they are: memory, open files and threads do not creep (``make soak``)."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.chaos.rig import chaos, golden, plan_of
from tests.multi_process.gang import _with_mark
from tests.replicas import mirrored

pytestmark = pytest.mark.soak


def resources(pid="self"):
    """Megabytes in memory, open files, threads of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    files, tasks = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
    threads = threading.active_count() if pid == "self" else tasks
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, threads


def train(steps, strategy, step, batches):
    for _ in range(steps):
        step(next(batches))


def test_ten_thousand_steps_take_no_more_than_a_thousand():
    strategy = mirrored(8)
    with strategy.scope():
        w = rx.Variable(jnp.zeros((64, 64)))
    dataset = rx.data.Dataset.from_tensor_slices(np.ones((640, 64), np.float32))
    batches = iter(strategy.experimental_distribute_dataset(dataset.shuffle(64).batch(64).repeat()))

    @rx.function
    def step(batch):
        def replica(x):
            context = rx.distribute.get_replica_context()
            w.assign_sub(1e-3 * context.all_reduce("SUM", x.T @ jnp.tanh(x @ w)))

        strategy.run(replica, args=(batch,))

    train(1_000, strategy, step, batches)
    memory, files, threads = resources()
    train(9_000, strategy, step, batches)
    now = resources()
    batches.close()

    assert now[0] < 1.05 * memory
    assert now[1:] == (files, threads)


def test_two_thousand_variables_are_made_saved_and_restored(tmp_path):
    strategy = mirrored(4)

    def made(value):
        with strategy.scope():
            return [rx.Variable(jnp.full((100,), value + i, jnp.float32)) for i in range(2_000)]

    path = rx.train.Checkpoint(v=made(1.0)).save(str(tmp_path / "c"))
    new = made(0.0)
    rx.train.Checkpoint(v=new).restore(path)

    for i, v in enumerate(new):
        np.testing.assert_array_equal(v.numpy(), np.full(100, 1.0 + i, np.float32))


POLICIES = ["AUTO", "DATA", "FILE", "OFF"]
EXAMPLES = 100_000


def read_all(folder, policies):
    """What this worker reads of a folder's files, of two that share them: numbers of examples."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    names = sorted(str(path) for path in Path(folder).iterdir())
    found = {}
    for policy in policies:
        options = rx.data.Options()
        options.experimental_distribute.auto_shard_policy = getattr(
            rx.data.experimental.AutoShardPolicy, policy
        )
        dataset = rx.data.FixedLengthRecordDataset(names, 8).batch(1_000).with_options(options)
        dataset = dataset.map(lambda x: rx.io.decode_raw(x, np.int64))
        seen = np.zeros(EXAMPLES, np.int32)
        for batch in strategy.experimental_distribute_dataset(dataset):
            for part in strategy.experimental_local_results(batch):
                np.add.at(seen, np.asarray(part).ravel(), 1)
        found[policy] = seen
    return found


@pytest.mark.parametrize("files", [1, 1_000, EXAMPLES])
def test_every_example_of_many_files_or_one_comes_exactly_once(tmp_path, files):
    numbers = np.arange(EXAMPLES, dtype=np.int64).reshape(files, -1)
    for i, own in enumerate(numbers):
        (tmp_path / f"{i:06d}").write_bytes(own.tobytes())
    policies = [p for p in POLICIES if files > 1 or p != "FILE"]  # it needs a file for each

    first, second = rx.testing.run_in_processes(
        read_all, 2, args=(str(tmp_path), policies), timeout=3_000
    )

    for policy in policies:
        times = 2 if policy == "OFF" else 1  # there, every worker reads all
        assert (first[policy] + second[policy] == times).all(), policy


def sum_of_all():
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    return float(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(())), axis=None))


def test_sixteen_workers_fit_on_one_machine():
    env = {"REPLICAX_PING_TIMEOUT": "120", "REPLICAX_STEP_TIMEOUT": "300"}

    assert rx.testing.run_in_processes(sum_of_all, 16, env=env, timeout=900) == [16.0] * 16


def test_fifty_restarts_lose_nothing_and_the_launcher_does_not_grow(tmp_path):
    plan = [
        {"family": "restart", "worker": i % 2, "blow": "self:KILL", "after": 1} for i in range(50)
    ]
    right = golden(tmp_path / "golden", 120)
    samples = []
    with sampled(tmp_path / "run", samples):
        outcome = chaos(tmp_path / "run", 0, plan, right)

    assert outcome.violations == []
    assert len(outcome.happened) == 50
    early, late = samples[len(samples) // 5], samples[-2]
    assert late[0] < 1.05 * early[0]
    assert late[1] <= early[1] + 2
    assert late[2] <= early[2] + 2


@contextlib.contextmanager
def sampled(folder, samples):
    """Note memory, files and threads of the launcher of a run, every now and then."""
    done = threading.Event()

    def look():
        while not done.wait(1.0):
            for pid, command in _with_mark(f"TMPDIR={folder}/tmp"):
                if " -m replicax launch " in command:
                    with contextlib.suppress(OSError):
                        samples.append(resources(pid))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_two_jobs_on_one_machine_do_not_disturb_each_other(tmp_path):
    right = golden(tmp_path / "golden", 60)
    plans = [plan_of(seed, 4, ("killed at any time", "raises", "preempted")) for seed in (1, 2)]

    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(chaos, tmp_path / f"run{i}", i, plan, right) for i, plan in enumerate(plans)
        ]
        outcomes = [run.result() for run in runs]

    assert [o.violations for o in outcomes] == [[], []]
    assert [len(o.happened) for o in outcomes] == [4, 4]


def test_a_thousand_new_shapes_cost_what_they_cost_jax_itself():
    own, plain = rx.function(lambda x: x.sum()), jax.jit(lambda x: x.sum())

    def megabytes_for_each(step, first, count):
        before = resources()[0]
        for n in range(first, first + count):
            step(np.ones(n, np.float32))
        return (resources()[0] - before) / count

    megabytes_for_each(plain, 1, 100), megabytes_for_each(own, 1, 100)
    usual = megabytes_for_each(plain, 101, 200)

    assert megabytes_for_each(own, 301, 1_000) < 1.2 * usual
