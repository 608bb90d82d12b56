"""Corner cases in which TensorFlow 2.21 was asked, and does the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax._src.base.tf_errors import InvalidArgumentError
from replicax.data import Dataset, Optional
from tests.data.pipelines import ints

NESTED = st.recursive(
    st.integers(-9, 9), lambda inner: st.lists(inner, min_size=2, max_size=2), max_leaves=8
)


def as_tuples(value):
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def shape_of(value):
    return (2, *shape_of(value[0])) if isinstance(value, list) else ()


def is_regular(value):
    if not isinstance(value, list):
        return True
    return all(map(is_regular, value)) and shape_of(value[0]) == shape_of(value[1])


def outcome(value, signature):
    dataset = Dataset.from_generator(lambda: iter([value]), output_signature=signature)
    try:
        return [np.asarray(leaf).tolist() for leaf in next(iter(dataset))]
    except InvalidArgumentError:
        return "error"


@given(value=NESTED)
def test_a_generator_may_yield_a_tuple_wherever_it_may_yield_a_list(value):
    signature = rx.TensorSpec(None, np.int64), rx.TensorSpec((), np.int64)

    found = outcome((as_tuples(value), 1), signature)

    assert found == outcome((value, 1), signature)
    assert found == ([value, 1] if is_regular(value) else "error")


def test_a_tuple_is_not_a_scalar():
    signature = rx.TensorSpec((), np.int64), rx.TensorSpec((), np.int64)
    assert outcome(((1, 2), 3), signature) == "error"


# Patterns, and the files that TensorFlow 2.21 finds with them.
FILES = [".hidden", ".x/y", "*s", "[q]", "a", "b.txt", "d/.z", "d/e/f", "d/w"]
PATTERNS = {
    "*": ["*s", ".hidden", ".x", "[q]", "a", "b.txt", "d"],
    ".*": [".hidden", ".x"],
    "*/*": [".x/y", "d/.z", "d/e", "d/w"],
    "?hidden": [".hidden"],
    "[.]hidden": [".hidden"],
    "d/*": ["d/.z", "d/e", "d/w"],
    "d/.*": ["d/.z"],
    "**": ["*s", ".hidden", ".x", "[q]", "a", "b.txt", "d"],
    "**/*": [".x/y", "d/.z", "d/e", "d/w"],
    "[!a]": ["d"],
    "[^a]": ["d"],
    r"\*s": ["*s"],
    "[[]q]": ["[q]"],
    "b.tx?": ["b.txt"],
    "[ab]*": ["a", "b.txt"],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_stand_for_the_files_that_tensorflow_finds(pattern, tmp_path):
    for name in FILES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    wanted = [str(tmp_path / name) for name in PATTERNS[pattern]]
    given = f"{tmp_path}/{pattern}"

    listed = [name.decode() for name in Dataset.list_files(given, shuffle=False)]

    assert listed == wanted
    assert rx.io.gfile.glob(given) == wanted


def epochs(*sizes):
    """A dataset that has another number of elements in each pass."""
    left = list(sizes)
    return Dataset.from_generator(lambda: iter(range(left.pop(0))), np.int64)


def test_a_repeated_shuffle_continues_after_an_empty_epoch():
    assert sorted(ints(epochs(1, 0, 2, 0, 0, 1).shuffle(2).repeat().take(4))) == [0, 0, 0, 1]


def test_without_a_shuffle_an_empty_epoch_ends_the_repetition():
    assert ints(epochs(1, 0, 2).repeat().take(4)) == [0]


def test_an_empty_first_epoch_ends_every_repetition():
    assert ints(Dataset.range(0).shuffle(2).repeat()) == []


@pytest.mark.parametrize("value", [None, (), (None, None), {}])
def test_an_optional_holds_at_least_one_array(value):
    with pytest.raises(InvalidArgumentError, match=r"Optional\.empty"):
        Optional.from_value(value)


def test_an_optional_may_hold_none_beside_an_array():
    assert Optional.from_value((None, 1)).get_value() == (None, 1)


def test_an_empty_optional_tells_the_spec_that_it_was_given():
    spec = rx.TensorSpec((2,), np.float32)
    assert Optional.empty(spec).element_spec == spec


ENDLESS = Dataset.range(3).repeat()
# TensorFlow's answers, but where it calls endless what ends (see docs/deviations.md).
CARDINALITIES = {
    "sample with one endless": (Dataset.sample_from_datasets([ENDLESS, Dataset.range(5)]), -1),
    "sample until one ends": (
        Dataset.sample_from_datasets([ENDLESS, Dataset.range(5)], stop_on_empty_dataset=True),
        -2,
    ),
    "choose from endless": (Dataset.choose_from_datasets([ENDLESS], Dataset.range(1).repeat()), -1),
    "choices that end": (
        Dataset.choose_from_datasets([ENDLESS], Dataset.range(1), stop_on_empty_dataset=False),
        -2,
    ),
    "groups": (ENDLESS.group_by_window(lambda x: 0, lambda key, group: group, window_size=2), -1),
    "zip": (Dataset.zip(ENDLESS, Dataset.range(5)), 5),
    "concatenate": (Dataset.range(5).concatenate(ENDLESS), -1),
    "take": (ENDLESS.take(4), 4),
    "skip": (ENDLESS.skip(4), -1),
    "skip all": (ENDLESS.skip(-1), 0),
    "shard": (ENDLESS.shard(3, 1), -1),
    "repeat none": (ENDLESS.repeat(0), 0),
    "repeat": (ENDLESS.repeat(2), -1),
    "flat_map": (ENDLESS.flat_map(Dataset.range), -2),
    "filter": (ENDLESS.filter(lambda x: x > 1), -2),
    "batch": (ENDLESS.batch(4), -1),
    "window": (ENDLESS.window(4), -1),
}


@pytest.mark.parametrize("name", CARDINALITIES)
def test_cardinalities_of_infinite_datasets(name):
    dataset, count = CARDINALITIES[name]
    assert dataset.cardinality() == count
    if count >= 0:
        assert sum(1 for _ in dataset) == count
