"""map and filter: one element at a time, errors with their place."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.base.tf_errors import InvalidArgumentError, StructureError
from replicax._src.data.seeds import Run
from replicax.data import AUTOTUNE, Dataset
from tests.data.pipelines import ints

ROWS = np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)

# Functions of one element with three numbers: most would give something else for blocks.
FUNCTIONS = {
    "elementwise": lambda x: x * 2 + 1,
    "constant of its shape": lambda x: x + np.array([1, 2, 3], np.float32),
    "last axis": lambda x: x / x.sum(axis=-1, keepdims=True),
    "mean": lambda x: x - x.mean(),
    "maximum": lambda x: x / np.max(np.abs(x)),
    "reversed": lambda x: x[::-1],
    "first": lambda x: x[0],
    "reshaped": lambda x: x.reshape(3, 1),
    "flattened": lambda x: x.reshape(-1),
    "sorted": lambda x: np.sort(x),
    "cumulated": lambda x: np.cumsum(x),
    "branch": lambda x: x * 2 if x[0] > 0 else x,
    "branch on a rare value": lambda x: x * 2 if (x > 1e9).any() else x,
    "length": lambda x: x * len(x),
    "matrix": lambda x: np.ones((2, 3), np.float32) @ x,
    "outer": lambda x: np.outer(x, x),
    "tuple": lambda x: (x, x.sum()),
    "dict": lambda x: {"a": x * 2, "b": x[1:]},
    "integers": lambda x: np.floor(x).astype(np.int8),
    "python": lambda x: sum(float(v) for v in x),
    "text": lambda x: str(x[0]),
    "in place": lambda x: np.multiply(x, 2, out=x),
    "transposed": lambda x: x.T,
    "argmax": lambda x: x.argmax(),
    "clipped": lambda x: np.clip(x, 0, 1),
    "one constant": lambda x: np.float32(1.0),
}


def assert_same(left, right):
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        left, right = tuple(left.values()), tuple(right.values())
    if isinstance(left, tuple):
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
        return
    assert type(left) is type(right)
    assert getattr(left, "dtype", None) == getattr(right, "dtype", None)
    np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("size", [1, 16])
def test_a_function_is_given_one_element_whatever_is_read_at_once(name, size):
    function = FUNCTIONS[name]

    got = list(Dataset.from_tensor_slices(ROWS).map(function).batch(size).unbatch())
    expected = [next(iter(Dataset.from_tensors(function(row.copy())))) for row in ROWS]

    for left, right in zip(got, expected, strict=True):
        assert_same(left, right)


def test_no_element_is_computed_before_it_is_asked_for():
    calls = []

    def remember(x):
        calls.append(int(x))
        return x

    iterator = iter(Dataset.range(100).map(remember).take(5))
    next(iterator)
    assert calls == [0]
    list(iterator)
    assert calls == [0, 1, 2, 3, 4]


def test_vectorize_true_gives_the_function_blocks():
    shapes = []

    def remember(x):
        shapes.append(x.shape)
        return x - x.min()

    list(Dataset.range(6).map(remember, vectorize=True).batch(3))

    assert shapes == [(3,), (3,)]


def test_vectorize_true_checks_the_first_axis():
    with pytest.raises(InvalidArgumentError, match="first axis of that size"):
        list(Dataset.range(6).map(lambda x: x.sum(), vectorize=True).batch(3))


def test_tuples_are_arguments_and_dicts_are_one():
    pairs = Dataset.from_tensor_slices((np.arange(3), np.arange(3) * 10))

    assert ints(pairs.map(lambda a, b: a + b)) == [0, 11, 22]
    assert ints(pairs.map(lambda a, b: {"s": a - b}).map(lambda d: -d["s"])) == [0, 9, 18]


def test_python_numbers_become_what_tensorflow_makes_of_them():
    spec = Dataset.range(2).map(lambda x: (1, 1.5, True, "a", [1, 2], 2**40)).element_spec

    assert [part.dtype.name for part in spec] == [
        "int32",
        "float32",
        "bool",
        "object",
        "int32",
        "int64",
    ]


def test_a_list_is_a_tuple_of_results_and_a_nested_one_an_array():
    assert isinstance(next(iter(Dataset.range(2).map(lambda x: [x, x]))), tuple)
    assert next(iter(Dataset.range(2).map(lambda x: (x, [x, x]))))[1].shape == (2,)


def fail_at_seven(x):
    if x == 7:
        raise KeyError("seven")
    return x


@pytest.mark.parametrize("options", [{}, {"num_parallel_calls": 3}])
@pytest.mark.parametrize("batched", [False, True])
def test_an_error_names_the_element_and_comes_after_the_good_ones(options, batched):
    dataset = Dataset.range(20).map(fail_at_seven, **options)
    iterator = iter(dataset.batch(7) if batched else dataset)
    good = []

    def read():
        for element in iterator:
            good.extend(np.atleast_1d(element).tolist())

    with pytest.raises(InvalidArgumentError, match="KeyError: 'seven', on element 7") as info:
        read()

    assert good == list(range(7))
    assert isinstance(info.value.__cause__, KeyError)
    rest = np.concatenate([np.atleast_1d(element) for element in iterator]).tolist()
    assert rest == list(range(14 if batched else 8, 20))


def test_the_element_index_counts_from_the_start_after_a_restore():
    dataset = Dataset.range(20).map(fail_at_seven)
    iterator = iter(dataset)
    iterator.restore_state({**iterator.save_state(), "position": 5})

    with pytest.raises(InvalidArgumentError, match="on element 7"):
        list(iterator)


@given(
    workers=st.sampled_from([None, 2, 4]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=8),
)
def test_elements_keep_their_numbers_where_a_pass_skips_some(workers, steps):
    """Also those that threads have made already when they are skipped."""

    def fail_late(x):
        if x >= 50:
            raise KeyError(int(x))
        return x

    dataset = Dataset.range(60).map(fail_late, num_parallel_calls=workers)
    stream = dataset.node.open(Run())
    position, found, expected = 0, [], []
    for skips, count in steps:
        if skips:
            position += stream.skip(count)
            continue
        block = stream.pull(count)
        found.extend(int(x) for x in block.elements())
        expected.extend(range(position, position + len(block)))
        position += len(block)

    assert found == expected
    while position < 50:
        position += len(stream.pull(1))
    with pytest.raises(InvalidArgumentError, match="KeyError: 50, on element 50 "):
        stream.pull(1)
    with pytest.raises(InvalidArgumentError, match="KeyError: 51, on element 51 "):
        stream.pull(1)
    stream.close()


def test_results_built_differently_are_refused():
    dataset = Dataset.range(5).map(lambda x: (x, x) if x == 3 else x)

    with pytest.raises(StructureError, match=r"map\(\) built element 3 differently.*\*, got \(\*"):
        list(dataset)


def test_map_needs_a_function():
    with pytest.raises(InvalidArgumentError, match=r"map\(\) needs a function, got 3"):
        Dataset.range(3).map(3)


@pytest.mark.parametrize("workers", [2, 5, AUTOTUNE])
@pytest.mark.parametrize("size", [1, 4])
def test_threads_keep_the_order(workers, size):
    def slow(x):
        time.sleep(0.002 * (int(x) % 3))
        return x

    dataset = Dataset.range(30).map(slow, num_parallel_calls=workers).batch(size)

    assert np.concatenate(list(dataset)).tolist() == list(range(30))


@pytest.mark.parametrize("quick", [0, 60], ids=["from the start", "after many quick calls"])
@pytest.mark.parametrize("size", [1, 12])
def test_threads_work_at_the_same_time(quick, size):
    together = threading.Barrier(3, timeout=5)

    def meet(x):
        if x >= quick:
            together.wait()
        return x

    dataset = Dataset.range(quick + 12).map(meet, num_parallel_calls=3).batch(size)

    assert np.concatenate(list(dataset)).tolist() == list(range(quick + 12))


def test_threads_end_with_their_iterator():
    dataset = Dataset.range(1000).map(lambda x: x, num_parallel_calls=4)
    for _ in dataset:
        break

    def alive():
        return [t for t in threading.enumerate() if t.name.startswith("replicax-map")]

    deadline = time.monotonic() + 5
    while alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive()


@given(count=st.integers(0, 100), modulus=st.integers(1, 9), size=st.integers(1, 10))
def test_filter_keeps_what_a_mask_keeps(count, modulus, size):
    dataset = Dataset.range(count).filter(lambda x: x % modulus == 0).batch(size)
    numbers = np.arange(count)

    kept = np.concatenate([np.empty(0, np.int64), *dataset])

    np.testing.assert_array_equal(kept, numbers[numbers % modulus == 0])


def test_filter_needs_one_bool():
    dataset = Dataset.from_tensor_slices(np.zeros((4, 2)))

    with pytest.raises(InvalidArgumentError, match=r"must return one bool, but it returns"):
        dataset.filter(lambda x: x > 0)
    with pytest.raises(InvalidArgumentError, match=r"must return one bool, but for element 0"):
        list(dataset.filter(lambda x: repr(x) and x > 0))


def test_take_while_stops_for_good_and_looks_no_further():
    seen = []

    def small(x):
        seen.append(int(x))
        return x % 5 < 3

    assert ints(Dataset.range(20).take_while(small)) == [0, 1, 2]
    assert seen == [0, 1, 2, 3]


def test_reduce_folds_nested_states():
    total, count = Dataset.range(5).reduce((0, 0), lambda state, x: (state[0] + x, state[1] + 1))

    assert (int(total), count) == (10, 5)


def test_the_spec_after_a_map_keeps_the_open_axis():
    spec = Dataset.range(10).batch(4).map(lambda x: (x * 2.0, np.float32(x.sum()))).element_spec

    assert spec[0].shape == (None,)
    assert spec[1].shape == ()
    assert spec[0].dtype == np.float64


def test_spec_of_untraceable_function_needs_an_element():
    spec = r"map\(\) is known only when it is called"
    with pytest.raises(InvalidArgumentError, match=spec):
        _ = Dataset.range(0).map(lambda x: repr(x) and x + 1.0).element_spec


@pytest.mark.parametrize("batched", [False, True])
def test_a_function_may_fill_one_buffer_again_and_again(batched):
    buffer = np.empty(2)

    def fill(x):
        buffer[:] = int(x)
        return buffer

    dataset = Dataset.range(5).map(fill)
    rows = np.concatenate(list(dataset.batch(2))) if batched else np.stack(list(dataset))

    assert rows.tolist() == [[k, k] for k in range(5)]
