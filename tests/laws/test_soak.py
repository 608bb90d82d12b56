"""Long runs stay as they are: memory, open files and threads do not creep (``make soak``)."""

import os
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import mirrored

pytestmark = pytest.mark.soak


def resources():
    """Megabytes in memory, open files, threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, threading.active_count()


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


@pytest.mark.parametrize("policy", ["AUTO", "DATA", "FILE", "OFF"])
@pytest.mark.parametrize("files", [1, 3_000])
def test_every_example_of_many_files_or_one_comes_exactly_once(tmp_path, policy, files):
    for i in range(files):
        (tmp_path / f"{i:06d}.txt").write_text("".join(f"{i}-{j}\n" for j in range(6_000 // files)))
    strategy = mirrored(4)
    dataset = rx.data.TextLineDataset(sorted(map(str, tmp_path.iterdir()))).batch(64)
    options = rx.data.Options()
    options.experimental_distribute.auto_shard_policy = rx.data.experimental.AutoShardPolicy[policy]
    seen = []
    for batch in strategy.experimental_distribute_dataset(dataset.with_options(options)):
        for part in strategy.experimental_local_results(batch):
            seen += np.asarray(part).tolist()

    assert len(seen) == len(set(seen)) == 6_000


def test_a_thousand_new_shapes_cost_a_bounded_amount_each():
    @rx.function
    def step(x):
        return x.sum()

    for n in range(1, 101):
        step(jnp.ones(n))
    before = resources()[0]
    for n in range(101, 1_101):
        step(jnp.ones(n))

    assert (resources()[0] - before) / 1_000 < 1.0  # megabytes for each program that is kept
