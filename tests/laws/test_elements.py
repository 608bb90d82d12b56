"""Laws of elements: a function sees each element once, and a pipeline holds what it was given."""

import functools
import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax.data import AUTOTUNE, Dataset
from tests.data.pipelines import ints

D = Dataset


class Recorder:
    """A function of an element that remembers what it was called on."""

    def __init__(self, function=lambda x: x):
        self._function = function
        self._lock = threading.Lock()
        self.seen = []

    def __call__(self, *element):
        with self._lock:
            self.seen.append(np.array(element[-1]).tolist())
        return self._function(*element)


# What stands before a recorder: each gives numbers.
BEFORE = {
    "range": D.range,
    "slices": lambda n: D.from_tensor_slices(np.arange(n) * 3),
    "generator": lambda n: D.from_generator(lambda: iter(range(n)), np.int64),
    "columns": lambda n: D.range(n).map(lambda x: x * 2, vectorize=True),
    "map": lambda n: D.range(n).map(lambda x: x + 1),
    "filter": lambda n: D.range(n).filter(lambda x: x % 3 != 1),
    "shuffle": lambda n: D.range(n).shuffle(5, seed=1, reshuffle_each_iteration=False),
    "flat_map": lambda n: D.range(n).flat_map(lambda x: D.range(x % 3)),
    "cache": lambda n: D.range(n).cache(),
    "repeat": lambda n: D.range(n).repeat(2),
    "rows": lambda n: D.range(n).batch(3, drop_remainder=True),
    "zip": lambda n: D.zip(D.range(n), D.range(1, n + 1)),
}
# What stands after it: each asks for all elements, in steps of other sizes.
AFTER = {
    "nothing": lambda d: d,
    "batch": lambda d: d.batch(4),
    "remainder": lambda d: d.batch(4, drop_remainder=True),
    "batch and map": lambda d: d.batch(3).map(lambda *x: x[-1]),
    "shuffle": lambda d: d.shuffle(6),
    "prefetch": lambda d: d.prefetch(3),
    "skip": lambda d: d.skip(4),
    "shard": lambda d: d.shard(3, 1),
    "window": lambda d: d.window(2, shift=5).flat_map(lambda *w: w[-1]),
    "filter": lambda d: d.filter(lambda *x: x[-1].sum() % 2 == 0),
    "vectorized": lambda d: d.map(lambda *x: x[-1], vectorize=True).batch(5),
}
CALLS = {
    "map": lambda f: lambda d: d.map(f),
    "map in threads": lambda f: lambda d: d.map(f, num_parallel_calls=3),
    "map as it thinks best": lambda f: lambda d: d.map(f, num_parallel_calls=AUTOTUNE),
    "filter": lambda f: lambda d: d.filter(lambda *x: f(*x) is not None),
    "take_while": lambda f: lambda d: d.take_while(lambda *x: f(*x) is not None),
    "flat_map": lambda f: lambda d: d.flat_map(lambda *x: D.from_tensors(f(*x))),
    "interleave": lambda f: lambda d: d.interleave(lambda *x: D.from_tensors(f(*x)), 2),
    "scan": lambda f: (
        lambda d: d.scan(np.int64(0), lambda s, x: (s, f(*(x if isinstance(x, tuple) else (x,)))))
    ),
    "group_by_window": lambda f: (
        lambda d: d.group_by_window(lambda *x: f(*x) is None, lambda _, group: group, window_size=1)
    ),
    "resample": lambda f: (
        lambda d: d.rejection_resample(lambda *x: int(f(*x) is None), [1, 0]).map(lambda _, x: x)
    ),
}


def last_parts(dataset):
    return [np.array(x[-1] if isinstance(x, tuple) else x).tolist() for x in dataset]


@settings(deadline=None)
@given(
    before=st.sampled_from(sorted(BEFORE)),
    call=st.sampled_from(sorted(CALLS)),
    after=st.sampled_from(sorted(AFTER)),
    count=st.integers(0, 20),
)
def test_a_function_is_called_once_for_each_element_in_order(before, call, after, count):
    source = BEFORE[before](count)
    expected = last_parts(source)
    recorder = Recorder(lambda *x: x)
    dataset = AFTER[after](CALLS[call](recorder)(source))

    assert recorder.seen == []
    list(dataset)

    got = sorted(recorder.seen) if "thread" in call or "best" in call else recorder.seen
    assert got == (sorted(expected) if got is not recorder.seen else expected)


@given(count=st.integers(1, 12), passes=st.integers(1, 3), cached=st.booleans())
def test_each_pass_calls_it_once_more_unless_the_results_are_kept(count, passes, cached):
    recorder = Recorder()
    dataset = D.range(count).map(recorder)
    dataset = dataset.cache() if cached else dataset

    for _ in range(passes):
        assert ints(dataset) == list(range(count))
    assert ints(dataset.repeat(2)) == [*range(count), *range(count)]

    assert recorder.seen == list(range(count)) * (1 if cached else passes + 2)


@settings(deadline=None, max_examples=20)
@given(
    count=st.integers(1, 20),
    batch=st.integers(1, 6),
    parallel=st.sampled_from([None, 2]),
    after=st.booleans(),
)
def test_distribution_calls_it_once_for_each_element(count, batch, parallel, after):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    recorder = Recorder()
    source = D.range(count)
    if after:
        dataset = source.batch(batch).map(recorder, num_parallel_calls=parallel)
        expected = [x.tolist() for x in source.batch(batch)]
    else:
        dataset = source.map(recorder, num_parallel_calls=parallel).batch(batch)
        expected = list(range(count))

    distributed = strategy.experimental_distribute_dataset(dataset)
    assert recorder.seen == []
    for _ in distributed:
        pass

    assert sorted(recorder.seen) == expected


LARGE = np.ones((1000, 3))
LARGE[137] = 1e9
DECEIVING = {
    "norm": lambda v: v * 0 if np.linalg.norm(v) > 1e8 else v,
    "dot": lambda v: v * 0 if np.dot(v, v) > 1e16 else v,
    "count_nonzero": lambda v: v * 0 if np.count_nonzero(v > 1e8) else v,
    "argmax": lambda v: v * 0 if v[np.argmax(v)] > 1e8 else v,
    "isin": lambda v: v * 0 if np.isin(v, [1e9]).any() else v,
    "asarray": lambda v: v * 0 if np.asarray(v).max() > 1e8 else v,
}


@pytest.mark.parametrize("name", sorted(DECEIVING))
def test_a_rare_element_changes_no_other(name):
    rows = np.concatenate(list(D.from_tensor_slices(LARGE).map(DECEIVING[name]).batch(100)))

    assert np.flatnonzero((rows == 0).all(axis=1)).tolist() == [137]


def test_functions_with_state_count_every_element():
    counter = itertools.count(1)
    total = 0

    def every_hundredth(x):
        nonlocal total
        total += 1
        return next(counter) % 100 == 0

    assert sum(int(b.sum()) for b in D.range(1000).map(every_hundredth).batch(100)) == 10
    assert total == 1000


def test_rare_randomness_is_drawn_for_each_element():
    rng, expected = np.random.default_rng(3), np.random.default_rng(3)

    rows = np.concatenate(
        list(D.range(1, 1001).map(lambda x: -x if rng.random() < 0.05 else x).batch(100))
    )

    assert (rows < 0).tolist() == [expected.random() < 0.05 for _ in range(1000)]


@given(buffers=st.integers(1, 5), count=st.integers(0, 12), batch=st.integers(1, 5))
def test_a_function_may_write_again_into_what_it_returned(buffers, count, batch):
    pool = [np.zeros(2) for _ in range(buffers)]

    def fill(x):
        buffer = pool[int(x) % buffers]
        buffer[:] = x
        return buffer, (buffer if x % 2 else buffer.copy())

    got = list(D.range(count).map(fill).batch(batch))

    for part in range(2):
        rows = [row.tolist() for element in got for row in element[part]]
        assert rows == [[k, k] for k in range(count)]


# What a pipeline was given is what it holds. Each program is one of TensorFlow's results, run there
# (2.21) line by line; the names are global ones in the first half, and closures in the second.

GLOBAL_PROGRAMS = {
    "map": ("d.map(lambda x: x + k)", [[111, 112, 113]]),
    "map in threads": ("d.map(lambda x: x + k, num_parallel_calls=2)", [[111, 112, 113]]),
    "blocks": ("d.map(lambda x: x + k, vectorize=True)", [[111, 112, 113]]),
    "helper": ("d.map(lambda x: helper(x))", [[111, 112, 113]]),
    "helper of a helper": ("d.map(outer)", [[111, 112, 113]]),
    "partial": ("d.map(functools.partial(helper))", [[111, 112, 113]]),
    "comprehension": ("d.map(lambda x: sum([x, *(k for _ in range(1))]))", [[111, 112, 113]]),
    "filter": ("d.filter(lambda x: x != k - 1)", [[1, 2]]),
    "take_while": ("d.take_while(lambda x: x <= k)", [[0, 1]]),
    "flat_map": ("d.flat_map(lambda x: D.from_tensors(x + k))", [[111, 112, 113]]),
    "interleave": ("d.interleave(lambda x: D.from_tensors(x + k))", [[111, 112, 113]]),
}


@pytest.mark.parametrize("name", sorted(GLOBAL_PROGRAMS))
def test_global_names_are_taken_when_the_transformation_is_made(name):
    step, (expected,) = GLOBAL_PROGRAMS[name]
    program = f"""
def helper(x):
    return x + k
def outer(x):
    return helper(x)
for k in (1, 10, 100):
    d = {step}
k = 1000
def helper(x):
    return x + 5000
"""
    names = {"d": D.range(3), "D": D, "functools": functools, "__name__": "program"}
    exec(program, names)

    assert ints(names["d"]) == expected


# Of each step: it gives the same elements, whatever it keeps them in.
KEEPING = {
    "scan": lambda d: d.scan(np.int64(0), lambda s, x: (s, x)),
    "group_by_window": lambda d: d.group_by_window(lambda x: 0, lambda _, g: g, window_size=3),
    "unique": lambda d: d.unique(),
    "from_list": lambda d: rx.data.experimental.from_list(list(d)),
}


@pytest.mark.parametrize("name", sorted(KEEPING))
def test_what_a_step_hands_out_may_be_written_to_and_is_there_again(name):
    dataset = KEEPING[name](D.from_tensor_slices(np.arange(6).reshape(3, 2)))
    for _ in range(2):
        elements = list(dataset)
        assert [x.tolist() for x in elements] == [[0, 1], [2, 3], [4, 5]]
        for element in elements:
            element[:] = -1


VERBS = ["map", "filter", "take_while", "flat_map", "interleave", "inner map"]


@given(steps=st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 3)), max_size=4))
def test_closures_are_taken_when_the_transformation_is_made(steps):
    dataset, expected = D.range(4), list(range(4))
    k = -1
    ours = {
        "map": lambda d: d.map(lambda x: x + k),
        "filter": lambda d: d.filter(lambda x: x != k),
        "take_while": lambda d: d.take_while(lambda x: x < 8 - k),
        "flat_map": lambda d: d.flat_map(lambda x: D.range(x, x + k)),
        "interleave": lambda d: d.interleave(lambda x: D.range(x, x + k), cycle_length=1),
        "inner map": lambda d: d.flat_map(lambda x: D.range(x, x + 2).map(lambda y: y * k)),
    }
    plain = {
        "map": lambda xs: [x + k for x in xs],
        "filter": lambda xs: [x for x in xs if x != k],
        "take_while": lambda xs: list(itertools.takewhile(lambda x: x < 8 - k, xs)),
        "flat_map": lambda xs: [y for x in xs for y in range(x, x + k)],
        "inner map": lambda xs: [y * k for x in xs for y in range(x, x + 2)],
    }
    plain["interleave"] = plain["flat_map"]

    for verb, value in steps:
        k = value
        dataset, expected = ours[verb](dataset), plain[verb](expected)
    k = 100

    assert ints(dataset) == expected


def test_a_name_in_a_loop_is_that_of_its_turn():
    dataset = D.range(3)
    for k in (1, 10, 100):
        dataset = dataset.map(lambda x: x + k)  # noqa: B023

    assert ints(dataset) == [111, 112, 113]


def test_names_that_a_function_assigns_stay_its_state():
    count = 0

    def bump():
        nonlocal count
        count += 1

    def number(x):
        bump()
        return count * 10 + x

    dataset = D.range(3).map(number)

    assert ints(dataset) == [10, 21, 32]
    assert count == 3


def test_global_names_that_a_function_assigns_stay_its_state():
    names = {"D": D}
    exec(
        """
count = 0
def bump():
    global count
    count += 1
def number(x):
    bump()
    return count * 10 + x
d = D.range(3).map(number)
""",
        names,
    )

    assert ints(names["d"]) == [10, 21, 32]
    assert names["count"] == 3


def test_names_that_do_not_exist_yet_are_found_later():
    names = {"D": D}
    exec("d = D.range(3).map(lambda x: later(x) + len([k]))\nk = 5", names)
    exec("def later(x): return x + k", names)

    assert ints(names["d"]) == [6, 7, 8]


def test_a_function_that_calls_itself_and_one_with_attributes_are_bound_too():
    def depth(x):
        depth.calls += 1
        return x if x <= step else depth(x - step)

    depth.calls, step = 0, 2
    dataset = D.range(5).map(depth)
    step = 1

    assert ints(dataset) == [0, 1, 2, 1, 2]
    assert depth.calls == 7


def test_methods_see_their_object_as_it_is():
    class Scale:
        by = 2

        def __call__(self, x):
            return x * self.by

        def method(self, x):
            return x * self.by

    scale = Scale()
    dataset = D.zip(D.range(3).map(scale), D.range(3).map(scale.method))
    scale.by = 5

    assert [(int(a), int(b)) for a, b in dataset] == [(0, 0), (5, 5), (10, 10)]


@pytest.mark.parametrize("make", [D.from_tensor_slices, lambda x: D.from_tensors(x).unbatch()])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": (x,)}, lambda x: memoryview(x)])
def test_arrays_that_are_written_to_later_do_not_change_a_dataset(make, wrap):
    array = np.arange(4)
    dataset = make(wrap(array))
    view = array[:2]

    array[:] = 99
    view[:] = 98
    got = [x["a"][0] if isinstance(x, dict) else x for x in dataset]

    assert [int(x) for x in got] == [0, 1, 2, 3]


def test_strings_and_arguments_that_are_written_to_later_do_not_change_a_dataset():
    words, numbers = np.array([b"a", b"b"], object), np.arange(3)
    texts = D.from_tensor_slices(words)
    generated = D.from_generator(lambda n: iter(n), np.int64, args=(numbers,))

    words[0], numbers[0] = b"z", 9

    assert list(texts) == [b"a", b"b"]
    assert ints(generated) == [0, 1, 2]


def test_a_read_only_array_is_not_copied_and_a_read_only_view_of_a_writable_one_is():
    array = np.arange(4)
    view = array.view()
    view.setflags(write=False)
    dataset = D.from_tensor_slices(view)
    array[0] = 9
    assert ints(dataset) == [0, 1, 2, 3]

    frozen = np.arange(4)
    frozen.setflags(write=False)
    source = D.from_tensor_slices(frozen).node.source
    assert any(np.shares_memory(frozen, held) for held in vars(source)["_arrays"])


def test_what_a_dataset_hands_out_may_be_written_to():
    dataset = D.from_tensor_slices(np.arange(6).reshape(3, 2))
    for element in dataset:
        element[:] = -1

    assert [x.tolist() for x in dataset] == [[0, 1], [2, 3], [4, 5]]


# What is known of elements without running the pipeline.


class Counted:
    """A generator function that counts how far it was advanced."""

    def __init__(self, count):
        self._count = count
        self.advanced = 0

    def __call__(self):
        for number in range(self._count):
            self.advanced += 1
            yield np.full(2, number, np.float32)


SIGNATURES = {"declared": rx.TensorSpec((2,), np.float32), "learnt": None}
# Each gives pairs of numbers from pairs of numbers.
QUIET = {
    "shuffle": lambda d: d.shuffle(4000),
    "repeat": lambda d: d.repeat(),
    "prefetch": lambda d: d.prefetch(10),
    "cache": lambda d: d.cache(),
    "take": lambda d: d.take(100),
    "batch": lambda d: d.batch(8).unbatch(),
    "padded": lambda d: d.padded_batch(8).unbatch(),
    "enumerate": lambda d: d.enumerate().map(lambda i, x: x, vectorize=True),
    "zip": lambda d: D.zip(d, D.range(9)).map(lambda x, y: x, num_parallel_calls=4),
    "concatenate": lambda d: d.concatenate(d),
    "map": lambda d: d.map(lambda x: x + 1),
    "flat_map": lambda d: d.flat_map(lambda x: D.from_tensors(x)),
    "interleave": lambda d: d.interleave(lambda x: D.from_tensors(x), num_parallel_calls=4),
    "filter": lambda d: d.filter(lambda x: x[0] >= 0),
    "window": lambda d: d.window(1).flat_map(lambda w: w),
}


@settings(deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(QUIET)), max_size=4),
    signature=st.sampled_from(sorted(SIGNATURES)),
)
def test_making_and_distributing_a_dataset_reads_nothing_and_its_spec_one_element(names, signature):
    source = Counted(4500)
    dataset = D.from_generator(source, output_signature=SIGNATURES[signature])
    for name in names:
        dataset = QUIET[name](dataset)
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    assert source.advanced == 0
    distributed = strategy.experimental_distribute_dataset(dataset.batch(8))
    # Whether a function reads files shows only in the first dataset that it makes.
    assert source.advanced == 0 or {"flat_map", "interleave", "window"} & set(names)

    spec = dataset.element_spec
    assert (spec.dtype, len(spec.shape)) == (np.float32, 1)
    assert all(size in (2, None) for size in spec.shape)
    functions = {"map", "flat_map", "interleave", "window", "zip", "enumerate"}
    if signature == "declared" and not functions & set(names):
        assert source.advanced == 0
    elif not {"batch", "padded"} & set(names):  # a function of a batch is shown a whole one
        assert source.advanced <= 2 ** names.count("concatenate") * (len(names) + 1)

    before = source.advanced
    assert dataset.element_spec == spec
    assert source.advanced == before
    del distributed


def test_a_generator_behind_a_shuffle_is_advanced_once_for_the_spec_and_not_for_distribution():
    source, calls = Counted(5000), []

    def double(x):
        calls.append(x[0])
        return x * 2

    dataset = D.from_generator(source, output_signature=SIGNATURES["declared"])
    dataset = dataset.shuffle(4000).map(double).batch(8)
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    distributed = strategy.experimental_distribute_dataset(dataset)
    assert (source.advanced, calls) == (0, [])

    assert dataset.element_spec == rx.TensorSpec((None, 2), np.float32)
    assert distributed.element_spec.value_specs[0] == rx.TensorSpec((None, 2), np.float32)
    _ = dataset.element_spec, distributed.element_spec

    assert source.advanced == len(calls) <= 1
