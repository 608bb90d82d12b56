"""Nothing is left behind: memory, threads, files."""

import gc
import threading
import tracemalloc
import weakref

import numpy as np
import pytest

from replicax.data import Dataset


def pipeline():
    rows = np.zeros((2000, 64), np.float32)
    return (
        Dataset.from_tensor_slices(rows)
        .shuffle(500)
        .map(lambda x: x * 2)
        .filter(lambda x: x.sum() >= 0)
        .batch(32)
        .prefetch(2)
    )


def test_memory_stays_flat_over_many_epochs():
    dataset = pipeline()
    for _ in range(3):
        list(dataset)
    gc.collect()
    tracemalloc.start()
    try:
        for _ in dataset:
            pass
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20):
            for _ in dataset:
                pass
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert after - before < 100_000


def test_an_infinite_iterator_stays_flat():
    iterator = iter(Dataset.range(1000).shuffle(100).repeat().batch(10))
    for _ in range(2000):
        next(iterator)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5000):
            next(iterator)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert after - before < 50_000


def test_an_iterator_dies_without_the_garbage_collector():
    gc.disable()
    try:
        iterator = iter(pipeline())
        next(iterator)
        ghost = weakref.ref(iterator)
        del iterator
        assert ghost() is None
    finally:
        gc.enable()


def test_a_consumed_batch_is_not_kept():
    iterator = iter(Dataset.from_tensor_slices(np.zeros((64, 4000))).batch(8))
    ghosts = []
    for _ in range(4):
        batch = next(iterator)
        ghosts.append(weakref.ref(batch))
        del batch
    next(iterator)

    assert not [ghost for ghost in ghosts if ghost() is not None]


@pytest.mark.parametrize("stage", ["map", "prefetch", "interleave"])
def test_many_iterators_leave_no_threads(stage):
    build = {
        "map": lambda d: d.map(lambda x: x, num_parallel_calls=2),
        "prefetch": lambda d: d.prefetch(1).prefetch(1),
        "interleave": lambda d: d.interleave(Dataset.range, 3, num_parallel_calls=2),
    }[stage]
    before = threading.active_count()
    for _ in range(20):
        for _ in build(Dataset.range(100)):
            break

    deadline = threading.Event()
    for _ in range(500):
        if threading.active_count() <= before:
            break
        deadline.wait(0.01)
    assert threading.active_count() <= before
