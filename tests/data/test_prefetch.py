"""prefetch: ahead, in order, in a thread that ends."""

import gc
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax.data import AUTOTUNE, Dataset
from tests.data.pipelines import ints, pipelines


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("replicax")]


def wait_for_no_threads():
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.005)
    return not threads()


@given(dataset=pipelines(3), size=st.integers(1, 5))
def test_elements_and_order_stay(dataset, size):
    dataset = dataset.cache()

    assert ints(dataset.prefetch(size)) == ints(dataset)


@pytest.mark.parametrize("size", [0, 1, 7, AUTOTUNE])
def test_any_buffer_size_works(size):
    assert ints(Dataset.range(20).prefetch(size).batch(3).unbatch()) == list(range(20))


def test_elements_are_made_before_they_are_asked_for():
    made = threading.Semaphore(0)

    def notice(x):
        made.release()
        return x

    iterator = iter(Dataset.range(10).map(notice).prefetch(3))
    next(iterator)

    assert all(made.acquire(timeout=5) for _ in range(4))
    assert not made.acquire(timeout=0.05)
    iterator.close()


def test_the_thread_ends_at_the_end():
    list(Dataset.range(10).prefetch(2))

    assert wait_for_no_threads()


def test_the_thread_ends_after_break():
    for _ in Dataset.range(10**6).batch(2).prefetch(2):
        break

    assert wait_for_no_threads()


def test_the_thread_ends_when_the_iterator_is_collected():
    iterator = iter(Dataset.range(10**6).prefetch(2).map(lambda x: x).prefetch(3))
    next(iterator)
    assert threads()

    del iterator
    gc.collect()

    assert wait_for_no_threads()


def test_the_thread_ends_when_the_consumer_raises():
    def consume():
        for _ in Dataset.range(10**6).prefetch(2):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"mine"):
        consume()

    assert wait_for_no_threads()


def test_an_error_comes_in_its_place_and_the_thread_continues_to_the_end():
    iterator = iter(Dataset.range(10).map(lambda x: 7 // (3 - int(x))).prefetch(2))
    good = [int(next(iterator)) for _ in range(3)]

    with pytest.raises(InvalidArgumentError, match=r"ZeroDivisionError: .*, on element 3"):
        next(iterator)
    assert good == [2, 3, 7]
    assert len(list(iterator)) == 6
    assert wait_for_no_threads()


def test_the_thread_ends_with_an_iterator_that_an_error_left():
    def loop():
        for _ in Dataset.range(10).map(lambda x: 7 // (3 - int(x))).prefetch(2):
            pass

    with pytest.raises(InvalidArgumentError, match=r"ZeroDivisionError"):
        loop()
    assert wait_for_no_threads()


def test_a_closed_iterator_is_empty():
    iterator = iter(Dataset.range(10).prefetch(2))
    next(iterator)
    iterator.close()

    assert list(iterator) == []
    assert wait_for_no_threads()


def test_two_iterators_are_independent():
    dataset = Dataset.range(4).prefetch(2)
    first, second = iter(dataset), iter(dataset)

    assert [int(next(i)) for i in (first, first, second, first)] == [0, 1, 0, 2]


def test_a_thread_that_never_started_leaves_nothing():
    iterator = iter(Dataset.range(4).prefetch(2))
    del iterator

    assert not threads()
