import gc
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.input.feed import BufferPool

PROGRAM = """
import os
os.environ["REPLICAX_CPU_DEVICES"] = "2"
import sys, time
import numpy as np
import replicax as rx
strategy = rx.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
dataset = rx.data.Dataset.range(10**6).map(lambda x: np.full(20_000, x)).batch(8)
iterator = iter(strategy.experimental_distribute_dataset(dataset))
for _ in range(3):
    next(iterator)
time.sleep({pause})
sys.exit(3)
"""


def test_a_program_that_ends_while_its_data_are_fed_ends_with_its_own_code():
    """A feeding thread that came back from JAX after Python was gone aborted the process."""
    pauses = [0.0, 0.002, 0.005, 0.01]
    programs = [subprocess.Popen([sys.executable, "-c", PROGRAM.format(pause=p)]) for p in pauses]
    assert [p.wait(timeout=120) for p in programs] == [3] * len(pauses)


# Memory of batches is used again. What is kept of a batch, in whatever form, must not change.
ROWS, WIDTH = 24, 5_001  # rows of 20,004 bytes: a batch is large, and not aligned by itself

_double = jax.jit(lambda x: x * 2, donate_argnums=0)

KEPT = {
    "nothing": lambda strategy, batch: None,
    "the batch": lambda strategy, batch: batch,
    "a replica's part": lambda strategy, batch: strategy.experimental_local_results(batch)[-1],
    "a view of NumPy": lambda strategy, batch: np.asarray(
        strategy.experimental_local_results(batch)[-1]
    ),
    "what was computed": lambda strategy, batch: strategy.run(lambda x: x * 2, args=(batch,)),
    "what it was donated to": lambda strategy, batch: _double(
        strategy.experimental_local_results(batch)[-1]
    ),
}


def numbers(strategy, kept):
    parts = strategy.experimental_local_results(kept)
    return np.concatenate([np.asarray(p) for p in parts])


def expected(kind, rows, replicas):
    last = np.array_split(rows, replicas)[-1] if len(rows) % replicas == 0 else None
    return {
        "the batch": rows,
        "a replica's part": last,
        "a view of NumPy": last,
        "what was computed": 2 * rows,
        "what it was donated to": None if last is None else 2 * last,
    }[kind]


WAYS = {
    "batches": lambda d: d,
    "batches of shuffled rows": lambda d: d,
    "read ahead": lambda d: d.prefetch(2),
    "kept in memory": lambda d: d.cache().prefetch(1),
    "through a function": lambda d: d.map(lambda x: x),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@settings(max_examples=15, deadline=None)
@given(
    way=st.sampled_from(sorted(WAYS)),
    replicas=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([6, 12]),
    passes=st.integers(1, 3),
    kinds=st.lists(st.sampled_from(sorted(KEPT)), min_size=4, max_size=12),
    kept_for=st.integers(0, 5),
)
def test_what_is_kept_of_a_batch_never_changes(way, replicas, size, passes, kinds, kept_for):
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    rows = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    order = np.arange(ROWS)
    dataset = rx.data.Dataset.from_tensor_slices(rows)
    if "shuffled" in way:
        dataset = dataset.shuffle(ROWS, seed=5, reshuffle_each_iteration=False)
        numbered = rx.data.Dataset.range(ROWS)
        order = np.array(list(numbered.shuffle(ROWS, seed=5, reshuffle_each_iteration=False)))
    dist = strategy.experimental_distribute_dataset(WAYS[way](dataset.repeat(2).batch(size)))
    kept = []

    def check(kind, places, value):
        want = expected(kind, rows[places], replicas)
        np.testing.assert_array_equal(numbers(strategy, value), want)

    number = 0
    for _ in range(passes):
        for place, batch in enumerate(dist):
            kind = kinds[number % len(kinds)]
            number += 1
            value = KEPT[kind](strategy, batch)
            if value is not None:
                kept.append((kind, np.tile(order, 2)[place * size :][:size], value))
            del batch, value
            while len(kept) > kept_for:
                check(*kept.pop(0))
        gc.collect(1)  # the heap of a whole test run takes a second
    for one in kept:
        check(*one)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_function_that_keeps_what_it_was_given_and_writes_into_it_changes_no_batch(replicas):
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    rows = np.ones((48, 8_000), np.float32)
    seen = []

    def keep(batch):
        seen.append(batch)
        return True

    dataset = rx.data.Dataset.from_tensor_slices(rows).batch(8).filter(keep)
    batches = []
    for number, batch in enumerate(strategy.experimental_distribute_dataset(dataset)):
        seen[number][...] = -1
        batches.append(batch)

    for batch in batches:
        assert (numbers(strategy, batch) == 1).all()


@given(
    kept=st.lists(st.sampled_from(["nothing", "it", "a view", "a buffer"]), min_size=1, max_size=30)
)
def test_memory_is_used_again_once_nothing_refers_to_it(kept):
    buffers, held = BufferPool(), {}
    for number, what in enumerate(kept):
        copied = buffers.copy(np.full((3, 40_000), number, np.float32), by_rows=True)
        place = copied.ctypes.data
        views = {"it": copied, "a view": copied[1:].T, "a buffer": memoryview(copied)[:1]}

        assert place % 64 == 0
        assert place not in held
        held[place] = number, views.get(what)
        del copied, views
        held = {p: kept for p, kept in held.items() if kept[1] is not None}

    assert all((np.asarray(view) == number).all() for number, view in held.values())


def test_a_batch_gets_the_memory_of_one_that_is_gone():
    buffers, x = BufferPool(), np.zeros((4, 50_000), np.float32)
    places = {buffers.copy(x, by_rows=False).ctypes.data for _ in range(100)}

    assert len(places) == 1


def test_devices_take_a_large_batch_as_it_was_copied():
    buffers = BufferPool()
    copied = buffers.copy(np.ones((3, 33_333), np.float32), by_rows=True)

    put = [jax.device_put(copied[i], jax.devices()[i]) for i in range(3)]

    places = [x.unsafe_buffer_pointer() for x in put]
    assert places == [row.ctypes.data for row in copied]
