"""Where elements come from, and how datasets are put together."""

import operator
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax import TensorSpec
from replicax._src.base.tf_errors import InvalidArgumentError, OutOfRangeError, StructureError
from replicax.data import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset
from tests.data.pipelines import ints, pipelines

_NUMBERS = st.integers(-30, 30)


@given(start=_NUMBERS, stop=_NUMBERS, step=_NUMBERS.filter(bool))
def test_range_counts_like_python(start, stop, step):
    dataset = Dataset.range(start, stop, step)

    assert ints(dataset) == list(range(start, stop, step)) == ints(dataset.shuffle(1))
    assert len(dataset) == len(range(start, stop, step))
    assert dataset.element_spec == TensorSpec((), np.int64)


def test_range_takes_a_dtype():
    assert next(iter(Dataset.range(3, output_type=np.float32).batch(3))).dtype == np.float32


@pytest.mark.parametrize("args", [(), (1, 2, 0), (1, 2, 3, 4)])
def test_range_needs_sensible_numbers(args):
    with pytest.raises(InvalidArgumentError, match=r"needs stop"):
        Dataset.range(*args)


def test_slices_keep_the_dtype_of_arrays_and_convert_python_numbers():
    dataset = Dataset.from_tensor_slices(
        (np.arange(2, dtype=np.uint8), [1, 2], [1.5, 2.5], ["a", "b"], jnp.ones((2, 3)))
    )

    assert [(part.shape, part.dtype.name) for part in dataset.element_spec] == [
        ((), "uint8"),
        ((), "int32"),
        ((), "float32"),
        ((), "object"),
        ((3,), "float32"),
    ]
    assert next(iter(dataset))[3] == b"a"


def test_slices_need_a_common_first_axis():
    with pytest.raises(InvalidArgumentError, match=r"first axes differ: \[3, 4\]"):
        Dataset.from_tensor_slices((np.zeros(3), np.zeros(4)))


def test_a_scalar_has_no_slices():
    with pytest.raises(InvalidArgumentError, match=r"is a scalar. Use `Dataset.from_tensors`"):
        Dataset.from_tensor_slices(3)


def test_a_ragged_list_is_not_an_array():
    with pytest.raises((InvalidArgumentError, ValueError)):
        Dataset.from_tensor_slices([[1], [1, 2]])


def test_an_element_holds_numbers_and_strings_only():
    with pytest.raises(InvalidArgumentError, match=r"cannot hold .* of type object"):
        Dataset.from_tensors(object())


def test_from_tensors_is_one_element():
    dataset = Dataset.from_tensors({"x": np.arange(3), "n": 1})

    assert len(dataset) == 1
    assert dataset.get_single_element()["x"].tolist() == [0, 1, 2]


def test_dataset_is_not_made_from_arrays_directly():
    with pytest.raises(InvalidArgumentError, match=r"from_tensor_slices"):
        Dataset(np.zeros(3))


def test_a_generator_function_is_called_for_each_pass():
    dataset = Dataset.from_generator(lambda n: range(n), args=(3,))

    assert ints(dataset) == ints(dataset) == [0, 1, 2]
    assert dataset.element_spec == TensorSpec((), np.int32)
    assert dataset.cardinality() == UNKNOWN_CARDINALITY


def test_a_generator_object_is_refused():
    with pytest.raises(
        StructureError, match=r"could be used only once. Write `from_generator"
    ) as e:
        Dataset.from_generator(x for x in range(3))
    assert isinstance(e.value, TypeError)


@pytest.mark.parametrize("make", [lambda: iter([1, 2]), lambda: (x for x in (1, 2))])
def test_a_one_shot_iterator_is_refused_the_second_time(make):
    items = make()
    dataset = Dataset.from_generator(lambda: items, output_types=np.int32)

    assert ints(dataset) == [1, 2]
    with pytest.raises(InvalidArgumentError, match=r"same iterator again; it was used up"):
        list(dataset)


def test_a_signature_converts_and_checks():
    signature = {"x": TensorSpec([None], np.float32), "n": TensorSpec([], np.int64)}
    dataset = Dataset.from_generator(
        lambda: [{"x": [1], "n": 2}, {"n": 3, "x": [1, 2]}], output_signature=signature
    )

    assert dataset.element_spec == signature
    assert [e["x"].dtype.name for e in dataset] == ["float32", "float32"]


def test_a_generator_that_breaks_its_signature_is_reported_with_its_place():
    dataset = Dataset.from_generator(lambda: [[1], [1, 2]], output_signature=TensorSpec([1]))

    with pytest.raises(InvalidArgumentError, match=r"Element 1 .* shape \(2,\), where \(1,\) was"):
        list(dataset)


def test_a_generator_of_the_wrong_dtype_is_reported_with_its_place():
    dataset = Dataset.from_generator(lambda: [1, "a"], output_signature=TensorSpec([], np.int32))

    with pytest.raises(InvalidArgumentError, match=r"Element 1 .*'a'.*converted to int32"):
        list(dataset)


def test_elements_built_differently_are_refused_after_the_good_ones():
    iterator = iter(Dataset.from_generator(lambda: [(1, 2), (3, 4), {"a": 5}]).batch(2))

    assert next(iterator)[0].tolist() == [1, 3]
    with pytest.raises(StructureError, match=r"Element 2 .*expected \(\*, \*\), got {'a': \*}"):
        next(iterator)


def test_a_generator_is_closed_with_its_iterator():
    closed = []

    def numbers():
        try:
            yield from range(100)
        finally:
            closed.append(True)

    for _ in Dataset.from_generator(numbers):
        break

    assert closed == [True]


def test_zip_nests_like_its_arguments():
    a, b = Dataset.range(3), Dataset.range(10, 20)

    assert [tuple(map(int, pair)) for pair in Dataset.zip(a, b)] == [(0, 10), (1, 11), (2, 12)]
    nested = next(iter(Dataset.zip({"a": a, "b": (a, b)})))
    assert (int(nested["a"]), int(nested["b"][1])) == (0, 10)
    assert ints(Dataset.zip(a)) == [0, 1, 2]
    assert len(Dataset.zip((a, b.repeat()))) == 3


def test_zip_refuses_lists():
    with pytest.raises(StructureError, match=r"tuple or dict, got a list"):
        Dataset.zip([Dataset.range(3)])


def test_zip_refuses_arrays():
    with pytest.raises(InvalidArgumentError, match=r"zip\(\) needs datasets, got ndarray"):
        Dataset.zip((Dataset.range(3), np.arange(3)))


@given(left=pipelines(2), right=pipelines(2))
def test_concatenate_joins(left, right):
    left, right = left.cache(), right.cache()  # the same order in every pass

    assert ints(left.concatenate(right)) == ints(left) + ints(right)


def test_concatenate_refuses_other_elements():
    with pytest.raises(StructureError, match=r"dtypes differ \(int64 and float32\)"):
        Dataset.range(3).concatenate(Dataset.from_tensor_slices(np.zeros(2, np.float32)))
    with pytest.raises(StructureError, match=r"nesting differs"):
        Dataset.range(3).concatenate(Dataset.range(3).enumerate())


def test_concatenate_accepts_dicts_in_another_order():
    left = Dataset.from_tensor_slices({"a": [1], "b": [2]})
    right = Dataset.from_tensor_slices({"b": [4], "a": [3]})

    assert [int(e["a"]) for e in left.concatenate(right)] == [1, 3]
    assert next(iter(left.concatenate(right).batch(2)))["b"].tolist() == [2, 4]


@given(dataset=pipelines(3), shards=st.integers(1, 5))
def test_shards_are_a_partition(dataset, shards):
    elements = ints(dataset.cache())
    dataset = Dataset.from_tensor_slices(np.array(elements, np.int64)).shuffle(3, seed=1)
    whole = ints(dataset.shard(1, 0))
    dataset = Dataset.from_tensor_slices(np.array(whole, np.int64))

    parts = [ints(dataset.shard(shards, k)) for k in range(shards)]

    assert parts == [whole[k::shards] for k in range(shards)]
    assert [len(p) for p in parts] == [len(dataset.shard(shards, k)) for k in range(shards)]


@pytest.mark.parametrize(("shards", "index"), [(2, 2), (2, -1), (0, 0), (-2, 0)])
def test_a_shard_must_exist(shards, index):
    with pytest.raises(InvalidArgumentError, match=rf"num_shards={shards}, index={index}"):
        Dataset.range(4).shard(shards, index)


@given(dataset=pipelines(3), count=st.integers(0, 20))
def test_take_and_skip_cut_in_two(dataset, count):
    dataset = dataset.cache()
    whole = ints(dataset)

    assert ints(dataset.take(count)) == whole[:count]
    assert ints(dataset.skip(count)) == whole[count:]


@given(dataset=pipelines(4))
def test_a_known_length_is_the_number_of_elements(dataset):
    count = int(dataset.cardinality())

    assert count == UNKNOWN_CARDINALITY or count == len(ints(dataset))


def test_negative_counts_mean_all():
    assert len(Dataset.range(5).take(-1)) == 5
    assert len(Dataset.range(5).skip(-1)) == 0
    assert ints(Dataset.range(5).skip(-1)) == []
    assert Dataset.range(5).repeat(-1).cardinality() == INFINITE_CARDINALITY


def test_repeating_nothing_forever_ends():
    assert ints(Dataset.range(0).repeat()) == []
    assert ints(Dataset.range(5).filter(lambda x: x > 9).repeat()) == []


def test_an_infinite_dataset_has_no_length():
    with pytest.raises(TypeError, match=r"The dataset is infinite"):
        len(Dataset.range(3).repeat())
    with pytest.raises(TypeError, match=r"The dataset length is unknown"):
        len(Dataset.range(3).filter(lambda x: x > 1))
    assert ints(Dataset.counter(3, -1).take(3)) == [3, 2, 1]


def test_choices_pick_the_dataset():
    datasets = [Dataset.range(3), Dataset.range(100, 102)]
    choices = Dataset.from_tensor_slices(np.array([0, 1, 0, 1, 1, 0, 0]))

    def chosen(**options):
        return ints(Dataset.choose_from_datasets(datasets, choices, **options))

    assert chosen() == [0, 100, 1, 101]
    assert chosen(stop_on_empty_dataset=False) == [0, 100, 1, 101, 2]


def one_by_one(sizes, choices, broken, *, stop):
    """What choices from ranges give, and the name of the error that ends it, if one does."""
    places, given = [0] * len(sizes), []
    is_open = [True] * len(sizes)
    for number in choices:
        if number >= len(sizes):
            return given, "InvalidArgumentError"
        if not is_open[number]:
            continue
        place = places[number]
        if broken.get(number) == place < sizes[number]:
            return given, "ZeroDivisionError"
        if place == sizes[number]:
            is_open[number] = False
            if stop or not any(is_open):
                break
            continue
        given.append(100 * number + place)
        places[number] += 1
    return given, None


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    choices=st.lists(st.sampled_from([0, 0, 0, 1, 1, 2]), max_size=25),
    broken=st.dictionaries(st.integers(0, 2), st.integers(0, 8), max_size=1),
    stop=st.booleans(),
    ahead=st.sampled_from([0, 1, 3, 20]),
)
def test_choices_give_what_they_give_one_by_one(sizes, choices, broken, stop, ahead):
    def branch(number, size):
        def checked(x):
            if x == 100 * number + broken[number]:
                raise ZeroDivisionError
            return x

        whole = Dataset.range(100 * number, 100 * number + size)
        return whole.map(checked) if number in broken else whole

    numbers = Dataset.from_tensor_slices(np.asarray(choices, np.int64))
    dataset = Dataset.choose_from_datasets(
        [branch(*item) for item in enumerate(sizes)], numbers, stop_on_empty_dataset=stop
    )
    found, error = [], None
    try:
        for x in dataset.batch(ahead).unbatch() if ahead else dataset:
            found.append(int(x))
    except Exception as raised:
        error = raised

    expected, ends = one_by_one(sizes, choices, broken, stop=stop)
    if ahead and ends:  # a batch that could not be filled for an error is not given
        expected = expected[: len(expected) // ahead * ahead]
    assert found == expected
    assert (error is None) == (ends is None)


def test_a_choice_must_exist():
    dataset = Dataset.choose_from_datasets([Dataset.range(3)] * 2, Dataset.range(5))

    with pytest.raises(InvalidArgumentError, match=r"choice 2, but there are 2 datasets"):
        list(dataset.batch(10))


def test_samples_follow_the_weights():
    datasets = [Dataset.from_tensors(k).repeat() for k in range(3)]
    sample = Dataset.sample_from_datasets(datasets, weights=[0.7, 0.3, 0.0], seed=1)

    counts = np.bincount(ints(sample.take(4000)), minlength=3) / 4000

    assert abs(counts[0] - 0.7) < 0.05
    assert counts[2] == 0


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0], [-1.0, 2.0]])
def test_weights_must_make_sense(weights):
    with pytest.raises(InvalidArgumentError, match=r"one weight for each dataset"):
        Dataset.sample_from_datasets([Dataset.range(3)] * 2, weights=weights)


def test_samples_take_everything_or_stop_at_the_first_end():
    datasets = [Dataset.range(5), Dataset.range(100, 103)]

    everything = ints(Dataset.sample_from_datasets(datasets, seed=4))
    first_end = ints(Dataset.sample_from_datasets(datasets, seed=4, stop_on_empty_dataset=True))

    assert sorted(everything) == [0, 1, 2, 3, 4, 100, 101, 102]
    assert everything[: len(first_end)] == first_end


def test_the_iterator_ends_like_tensorflows():
    iterator = iter(Dataset.range(1))

    assert int(iterator.get_next()) == 0
    with pytest.raises(OutOfRangeError, match=r"End of sequence: .* all its 1 elements"):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(OutOfRangeError):
        next(iterator)
    assert not iterator.get_next_as_optional().has_value()
    assert iter(iterator) is iterator


def test_the_end_in_a_generator_is_as_with_any_iterator_and_get_next_ends_no_loop_by_itself():
    iterator = iter(Dataset.range(2))

    def all_of():
        result = yield from iterator
        assert result is None

    assert [int(x) for x in all_of()] == [0, 1]
    assert next(iterator, "nothing") == "nothing"
    with pytest.raises(OutOfRangeError):
        list(map(operator.methodcaller("get_next"), [iterator] * 5))


def test_an_optional_holds_an_element():
    optional = iter(Dataset.range(3).batch(3)).get_next_as_optional()

    assert optional.has_value()
    assert optional.get_value().tolist() == [0, 1, 2]
    assert optional.element_spec == TensorSpec((3,), np.int64)


def test_list_files_sorts_or_shuffles(tmp_path: pathlib.Path):
    for name in ("b.txt", "a.txt", "c.bin"):
        (tmp_path / name).write_text(name)
    pattern = str(tmp_path / "*.txt")

    assert [pathlib.Path(p.decode()).name for p in Dataset.list_files(pattern, shuffle=False)] == [
        "a.txt",
        "b.txt",
    ]
    assert len(list(Dataset.list_files([pattern, str(tmp_path / "c*")], seed=1))) == 3


def test_single_elements_are_single():
    with pytest.raises(InvalidArgumentError, match=r"more than one"):
        Dataset.range(2).get_single_element()
    with pytest.raises(InvalidArgumentError, match=r"none"):
        Dataset.range(0).get_single_element()


@pytest.mark.parametrize("signature", [None, TensorSpec([2], np.float64)])
def test_a_generator_may_fill_one_buffer_again_and_again(signature):
    def numbers():
        buffer = np.empty(2)
        for k in range(5):
            buffer[:] = k
            yield buffer

    dataset = Dataset.from_generator(numbers, output_signature=signature)

    assert np.concatenate(list(dataset.batch(2))).tolist() == [[k, k] for k in range(5)]
    assert np.stack(list(dataset)).tolist() == [[k, k] for k in range(5)]


@given(
    size=st.integers(0, 7),
    passes=st.integers(0, 4),
    batch=st.integers(1, 12),
    skipped=st.integers(0, 9),
)
def test_passes_over_a_source_follow_each_other_without_a_seam(size, passes, batch, skipped):
    expected = np.tile(np.arange(size) * 3, passes)[skipped:]
    for source in (Dataset.range(0, size * 3, 3), Dataset.from_tensor_slices(np.arange(size) * 3)):
        for repeated in (source.repeat(passes), source.repeat().take(size * passes)):
            found = [b.tolist() for b in repeated.skip(skipped).batch(batch)]

            assert [len(b) for b in found[:-1]] == [batch] * len(found[:-1])
            assert [x for b in found for x in b] == expected.tolist()
