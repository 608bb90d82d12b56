"""Threads that share an iterator get each element once between them, and each finds the end."""

import signal
import sys
import threading
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax.data import Dataset
from tests.data.pipelines import ints, pipelines
from tests.fresh_process import run_fresh
from tests.replicas import mirrored

PATIENCE = 60.0  # seconds after which a thread counts as hanging


@pytest.fixture(autouse=True, scope="module")
def _switch_often():
    """Let other threads in at nearly every step of Python's."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def all_of(*takes):
    """Call each function in a thread of its own until StopIteration; return all they gave."""
    given, ended, gate = [], [], threading.Barrier(len(takes))

    def loop(take):
        gate.wait()
        try:
            while True:
                given.append(take())
        except StopIteration:
            ended.append(True)

    threads = [threading.Thread(target=loop, args=(take,), daemon=True) for take in takes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(ended) == len(takes), "a thread found no end"
    return given


def taking(iterator, way):
    """Return a function that takes the next element in one of the ways that there are."""

    def get_next():
        try:
            return iterator.get_next()
        except rx.errors.OutOfRangeError as error:
            raise StopIteration from error

    def optional():
        element = iterator.get_next_as_optional()
        if not element.has_value():
            raise StopIteration
        return element.get_value()

    return {"next": lambda: next(iterator), "get_next": get_next, "optional": optional}[way]


WAYS = st.lists(st.sampled_from(["next", "get_next", "optional"]), min_size=2, max_size=5)


@settings(max_examples=60, deadline=None)
@given(dataset=pipelines(), ways=WAYS)
def test_threads_take_each_element_of_a_pipeline_once(dataset, ways):
    alone = iter(dataset)
    start = alone.save_state()
    expected = ints(alone)

    shared = iter(dataset)
    shared.restore_state(start)
    found = all_of(*(taking(shared, way) for way in ways))

    assert Counter(map(int, found)) == Counter(expected)


LARGE = {
    "range": lambda: Dataset.range(2000),
    "map": lambda: Dataset.range(2000).map(lambda x: x + 0),
    "map in threads": lambda: Dataset.range(2000).map(lambda x: x + 0, num_parallel_calls=4),
    "shuffle": lambda: Dataset.range(2000).shuffle(100),
    "interleave": lambda: Dataset.range(200).interleave(
        lambda x: Dataset.range(10 * x, 10 * x + 10), cycle_length=4
    ),
    "generator": lambda: Dataset.from_generator(lambda: iter(range(2000)), np.int64),
    "prefetch": lambda: Dataset.range(2000).prefetch(3),
    "nested": lambda: Dataset.range(2000).map(lambda x: sum(Dataset.range(x, x + 1))),
}


@pytest.mark.parametrize("kind", LARGE)
def test_threads_take_each_of_many_elements_once(kind):
    iterator = iter(LARGE[kind]())

    found = all_of(*[lambda: next(iterator)] * 4)

    assert sorted(map(int, found)) == list(range(2000))
    assert iterator.save_state()["position"] == 2000


@pytest.mark.parametrize("replicas", [1, 2])
def test_threads_take_each_element_of_a_distributed_dataset_once(replicas):
    strategy = mirrored(replicas)
    dataset = strategy.experimental_distribute_dataset(Dataset.range(200).batch(2))
    iterator = iter(dataset)

    found = all_of(*[lambda: next(iterator)] * 4)

    rows = [int(x) for e in found for part in strategy.experimental_local_results(e) for x in part]
    assert sorted(rows) == list(range(200))


@pytest.mark.parametrize("distributed", [False, True])
def test_compiled_steps_and_plain_code_take_each_element_once(distributed):
    strategy = mirrored(2)
    dataset = Dataset.range(400).batch(2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset) if distributed else dataset)
    rows = lambda x: jnp.stack(strategy.experimental_local_results(x)).reshape(2)  # noqa: E731
    step = rx.function(lambda: rows(next(iterator)) if distributed else next(iterator) + 0)
    given_as_argument = rx.function(lambda it: rows(next(it)) if distributed else next(it) + 0)

    def plain():
        element = next(iterator)
        return rows(element) if distributed else element

    found = all_of(plain, step, plain, lambda: given_as_argument(iterator))

    assert sorted(int(x) for pair in found for x in pair) == list(range(400))


@pytest.mark.parametrize("threads", [None, 3])
def test_an_element_that_fails_is_raised_in_one_thread_and_the_next_follows(threads):
    def fail_at_sevenths(x):
        if x % 7 == 0:
            raise KeyError(int(x))
        return x

    iterator = iter(Dataset.range(700).map(fail_at_sevenths, num_parallel_calls=threads))

    def take():
        try:
            return int(next(iterator))
        except rx.errors.InvalidArgumentError as error:
            return error.__cause__.args[0]

    found = all_of(*[take] * 4)

    assert sorted(found) == list(range(700))
    state = iterator.save_state()
    assert (state["position"], state["errors"]) == (600, 100)


@pytest.mark.parametrize("kind", ["range", "map", "shuffle", "prefetch"])
def test_a_state_that_is_saved_while_threads_pull_stands_between_two_elements(kind):
    dataset = LARGE[kind]()
    iterator = iter(dataset)
    start = iterator.save_state()
    states = []

    def save_and_take():
        states.append(iterator.save_state())
        return next(iterator)

    all_of(lambda: next(iterator), save_and_take, save_and_take)

    alone = iter(dataset)
    alone.restore_state(start)
    expected = ints(alone)
    assert all(0 <= state["position"] <= 2000 for state in states)
    for state in states[:: len(states) // 5 + 1]:
        again = iter(dataset)
        again.restore_state(state)
        assert ints(again) == expected[state["position"] :]


class Slow:
    """A pipeline whose first element is made when the test says so."""

    def __init__(self):
        self.begun, self.go = threading.Event(), threading.Event()
        self.iterator = iter(Dataset.range(3).map(self._wait))
        self.thread = threading.Thread(target=lambda: next(self.iterator, None), daemon=True)
        self.thread.start()
        assert self.begun.wait(PATIENCE)

    def _wait(self, x):
        self.begun.set()
        self.go.wait(PATIENCE)
        return x

    def finish(self):
        self.go.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def test_ctrl_c_ends_the_wait_for_an_element_that_another_thread_makes():
    slow = Slow()
    main = threading.get_ident()
    interrupt = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT))
    interrupt.start()

    with pytest.raises(KeyboardInterrupt):
        next(slow.iterator)

    slow.finish()
    assert ints(slow.iterator) == [1, 2]


def test_closing_does_not_wait_forever_for_another_thread():
    slow = Slow()

    slow.iterator.close()

    slow.finish()
    assert list(slow.iterator) == []


def test_a_function_of_the_pipeline_may_ask_its_own_iterator():
    ask = lambda x: x + next(held[0], 0) if x % 2 == 0 else x  # noqa: E731
    held = [iter(Dataset.range(4).map(ask))]

    assert [int(x) for x in held[0]] == [0 + 1, 2 + 3]


def test_a_program_ends_while_threads_wait_for_an_element():
    ended = run_fresh(
        """
        import threading
        from replicax.data import Dataset

        begun = threading.Event()
        iterator = iter(Dataset.range(9).map(lambda x: begun.set() or threading.Event().wait()))
        for _ in range(3):
            threading.Thread(target=lambda: next(iterator), daemon=True).start()
        begun.wait()
        print("done")
        """
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
