"""Laws of `element_spec`: it holds for every element, and asking for it runs nothing twice."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import replicax as rx

D = rx.data.Dataset
TABLE = np.arange(12.0).reshape(3, 4)

# Functions that can be traced; a step that does not fit the rank of an element is left out.
MAPS = {
    "identity": lambda x: x,
    "pair": lambda x: (x, x),
    "add": lambda x: x + 1,
    "half": lambda x: x / 2,
    "cast": lambda x: np.float32(x),
    "astype": lambda x: x.astype(np.int16),
    "sum": lambda x: x.sum(),
    "sum_first": lambda x: np.sum(x, 0),
    "mean_last": lambda x: x.mean(-1, keepdims=True),
    "expand": lambda x: np.expand_dims(x, 0),
    "new_axis": lambda x: x[..., None],
    "stack": lambda x: np.stack([x, x], -1),
    "concatenate": lambda x: np.concatenate([x, x]),
    "flat": lambda x: x.reshape(-1),
    "column": lambda x: np.reshape(x, (-1, 1)),
    "dict": lambda x: {"a": x, "b": [x, x]},
    "compare": lambda x: x > 0,
    "first": lambda x: x[0],
    "two": lambda x: x[:2],
    "rest": lambda x: x[1:],
    "reverse": lambda x: x[::-1],
    "mask": lambda x: x[x > 0],
    "gather": lambda x: TABLE[x % 3],
    "zeros": lambda x: np.zeros((3, 2), np.float32),
    "full": lambda x: np.full((2, 3), x),
    "outer": lambda x: x[:, None] + x[None, :],
    "where": lambda x: np.where(x > 0, x, 0.5),
    "transpose": lambda x: x.T,
    "by_shape": lambda x: np.zeros((*x.shape, 2)),
    "counted": lambda x: np.arange(x),
}
NESTED = {
    "one": lambda x: D.from_tensors(x),
    "repeated": lambda x: D.from_tensors(x).repeat(2),
    "slices": lambda x: D.from_tensor_slices(x),
    "numbers": lambda x: D.range(x),
    "pairs": lambda x: D.range(2).map(lambda y: (y, x)),
    "batches": lambda x: D.range(3).batch(2),
    "zipped": lambda x: D.zip((D.range(2), D.from_tensors(x))),
}
STEPS = {
    "batch": lambda d: d.batch(2),
    "batch_full": lambda d: d.batch(2, drop_remainder=True),
    "padded": lambda d: d.padded_batch(2),
    "repeat": lambda d: d.repeat(2),
    "skip": lambda d: d.skip(1),
    "unbatch": lambda d: d.unbatch(),
    "windows": lambda d: d.window(2).flat_map(lambda window: window.batch(2)),
    "twice": lambda d: d.concatenate(d),
    "numbered": lambda d: d.enumerate(),
    "scan": lambda d: d.scan(np.float32(0), lambda s, x: (s + np.float32(1), (s, x))),
    "groups": lambda d: d.group_by_window(lambda *_: 0, lambda _, w: w.batch(2), window_size=2),
}
SOURCES = {
    "range": lambda n: D.range(n),
    "rows": lambda n: D.from_tensor_slices(np.ones((n, 3), np.float32)),
    "matrices": lambda n: D.from_tensor_slices(np.ones((n, 2, 3), np.int64)),
    "generator": lambda n: D.from_generator(
        lambda: [np.ones(k + 1, np.float32) for k in range(n)],
        output_signature=rx.TensorSpec([None], np.float32),
    ),
    "undeclared": lambda n: D.from_generator(lambda: [np.ones(k + 1) for k in range(n)]),
}


def steps():
    maps = [("map", name) for name in MAPS]
    nested = [(verb, name) for name in NESTED for verb in ("flat_map", "interleave")]
    return st.lists(
        st.sampled_from([*maps, *nested, *((None, name) for name in STEPS)]), min_size=1, max_size=4
    )


def add(dataset, step):
    verb, name = step
    if verb is None:
        return STEPS[name](dataset)
    return getattr(dataset, verb)(MAPS[name] if verb == "map" else NESTED[name])


def leaves(value):
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in leaves(part)]
    if isinstance(value, dict):
        return [leaf for key in value for leaf in leaves(value[key])]
    return [value]


def built(source, plan):
    """A dataset of the steps that fit, with those steps."""
    dataset, taken = source, []
    for step in plan:
        try:
            following = add(dataset, step)
            _ = following.element_spec, list(following.take(3))
        except Exception:
            continue
        dataset, taken = following, [*taken, step]
    return dataset, taken


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(SOURCES)), steps())
def test_every_element_is_compatible_with_the_spec(source, plan):
    dataset, taken = built(SOURCES[source](4), plan)
    specs = leaves(dataset.element_spec)

    for element in dataset.take(20):
        parts = leaves(element)
        assert len(parts) == len(specs), taken
        for part, spec in zip(parts, specs, strict=True):
            assert spec.is_compatible_with(part), (taken, spec, part)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(set(SOURCES) - {"undeclared"})), steps())
def test_empty_dataset_has_the_spec_of_a_full_one(source, plan):
    full, taken = built(SOURCES[source](4), plan)
    assume(full.node.is_spec_sure)  # others are learnt from an element
    empty = SOURCES[source](0)
    for step in taken:
        empty = add(empty, step)

    assert empty.element_spec == full.element_spec


def test_tracing_is_not_observable():
    seen, table, numbers = [], {}, np.zeros(1)
    count = 0

    def append(x):
        seen.append(x)
        return x

    def write(x):
        table["x"] = x
        return x

    def assign(x):
        numbers[0] += 1
        return x

    def rebind(x):
        nonlocal count
        count += 1
        return x

    for function in (append, write, assign, rebind):
        _ = D.range(0).map(function).node.is_spec_sure

    assert (seen, table, numbers.tolist(), count) == ([], {}, [0.0], 0)


@pytest.mark.parametrize("asked", [1, 3])
def test_untraceable_function_is_called_once_for_the_spec(asked):
    seen = []
    dataset = D.range(3).map(lambda x: seen.append(x) or x)

    for _ in range(asked):
        assert dataset.element_spec == rx.TensorSpec((), np.int64)

    assert len(seen) == 1


def test_traceable_function_needs_no_element():
    advanced = []

    def rows():
        advanced.append(1)
        yield np.ones(2, np.float32)

    signature = rx.TensorSpec([2], np.float32)
    dataset = D.from_generator(rows, output_signature=signature).map(lambda x: (x.sum(), x))

    assert dataset.element_spec == (rx.TensorSpec((), np.float32), signature)
    assert not advanced


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.zeros(int(x)),
        lambda x: np.zeros(2) if x > 1 else np.zeros(3),
        lambda x: np.zeros(len(range(x))),
        lambda x: np.unique(np.array([x, 0])),
    ],
)
def test_sizes_that_values_decide_are_open(function):
    assert D.range(3).map(function).element_spec.shape == (None,)


def hidden(x):
    try:
        return np.zeros(int(x))
    except Exception:
        return np.zeros(7)


def test_a_handler_in_the_function_does_not_hide_that_values_decide():
    assert D.range(3).map(hidden).element_spec.shape == (None,)


# Specs that TensorFlow 2.21 has for the same pipelines.
AS_TENSORFLOW = [
    (D.range(0).map(lambda x: x * 2), ((), "int64")),
    (D.range(5).batch(2).map(lambda x: np.stack([x, x], 1)), ((None, 2), "int64")),
    (D.range(5).batch(2, drop_remainder=True).map(lambda x: x.reshape(-1, 1)), ((2, 1), "int64")),
    (
        D.from_tensor_slices(np.ones((4, 3), np.float32)).batch(2).map(lambda x: x[:, :2]),
        ((None, 2), "float32"),
    ),
    (D.range(0).flat_map(lambda x: D.from_tensors(x).repeat(x)), ((), "int64")),
    (D.range(0).window(3).flat_map(lambda w: w.batch(3)), ((None,), "int64")),
    (D.range(0).flat_map(lambda x: D.range(x).batch(4, drop_remainder=True)), ((4,), "int64")),
    (
        D.from_tensors(np.ones((2, 4), np.int32)).flat_map(lambda x: D.from_tensor_slices(x)),
        ((4,), "int32"),
    ),
    (D.range(0).flat_map(lambda x: rx.data.TFRecordDataset(b"none")), ((), "object")),
    (rx.data.TFRecordDataset(D.from_tensor_slices(["a"]).take(0)), ((), "object")),
]


@pytest.mark.parametrize(("dataset", "spec"), AS_TENSORFLOW)
def test_specs_are_those_of_tensorflow(dataset, spec):
    assert (dataset.element_spec.shape, dataset.element_spec.dtype.name) == spec
