"""Names and forms of tf.data, tf.io and tf.train: TensorFlow's recorded answers, and more."""

import collections
import csv
import dataclasses
import json
import sys
from functools import reduce
from pathlib import Path

import attrs
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax.data import Dataset
from tests.data.pipelines import ints
from tests.fresh_process import run_fresh
from tests.golden.names_cases import ALL, Point, agrees, outcome

ANSWERS = json.loads(Path(__file__).parents[1].joinpath("golden", "names.json").read_text())


@pytest.mark.parametrize("name", ALL)
def test_a_name_gives_what_tensorflows_gives(name):
    found, expected = json.loads(json.dumps(outcome(ALL[name], rx))), ANSWERS[name]

    assert agrees(found, expected), f"{found} is not {expected}"


# Forms of elements.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named:
    first: object
    second: object = None


@attrs.define
class Attributes:
    first: object
    second: object = None


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Point(x, {"y": x}),
        lambda x: Named(first=x, second=Point(x, (x,))),
        lambda x: Attributes(x, {"y": x}),
        lambda x: collections.OrderedDict([("z", x), ("a", (x, x))]),
        lambda x: collections.defaultdict(list, {"z": x}),
    ],
)
def test_an_element_of_a_user_defined_type_keeps_it(make, tmp_path):
    dataset = Dataset.range(4).map(make)
    steps = {
        "alone": dataset,
        "shuffled": dataset.shuffle(1),
        "kept": dataset.cache(),
        "kept in a file": dataset.cache(str(tmp_path / "kept")),
        "joined": dataset.concatenate(dataset),
        "mapped": dataset.map(lambda x: x),
    }

    for passes in (1, 2):
        for name, step in steps.items():
            found = next(iter(step.take(1)))
            assert (type(found), found) == (type(make(0)), make(np.int64(0))), (name, passes)
            list(step)
    assert type(dataset.batch(2).element_spec) is type(make(0))
    assert type(next(iter(dataset.batch(2)))) is type(make(0))


def test_batches_of_a_class_that_jax_knows_are_divided_and_of_others_refused_with_advice(two):
    @dataclasses.dataclass
    class Pair:
        a: object
        b: object

    batches = Dataset.range(4).map(lambda x: Pair(x, 2 * x)).batch(4)
    with pytest.raises(TypeError, match=r"register_dataclass\(Pair\).*named tuple"):
        next(iter(two.experimental_distribute_dataset(batches)))

    jax.tree_util.register_dataclass(Pair)
    batch = next(iter(two.experimental_distribute_dataset(batches)))
    total = two.run(lambda pair: pair.a.sum() + pair.b.sum(), args=(batch,))

    assert [x.tolist() for x in batch.b.values] == [[0, 2], [4, 6]]
    assert int(two.reduce("SUM", total, axis=None)) == 18


def test_slices_and_generators_of_a_user_defined_type_keep_it():
    slices = Dataset.from_tensor_slices(Point(np.arange(2), np.arange(2)))
    made = Dataset.from_generator(lambda: iter([Point(1, 2.5)]))

    assert list(slices) == [Point(0, 0), Point(1, 1)]
    assert list(made) == [Point(1, 2.5)]


def test_elements_of_another_class_with_other_fields_are_refused():
    dataset = Dataset.from_generator(lambda: iter([Point(1, 2), Named(first=1)]))

    with pytest.raises(rx.errors.StructureError, match=r"expected Point\(x=\*, y=\*\)"):
        list(dataset)


def test_a_chain_of_a_thousand_concatenations_works():
    dataset = reduce(lambda a, b: a.concatenate(b), [Dataset.range(k, k + 1) for k in range(1000)])
    other = reduce(lambda a, b: b.concatenate(a), [Dataset.range(k, k + 1) for k in range(1000)])

    assert ints(dataset.batch(7).unbatch()) == list(range(1000))
    assert ints(other) == list(range(999, -1, -1))
    assert len(dataset) == 1000
    assert dataset.element_spec == rx.TensorSpec((), np.int64)


def test_a_dataset_that_is_joined_with_itself_again_and_again_stays_small():
    dataset = Dataset.range(1)
    for _ in range(10):
        dataset = dataset.concatenate(dataset)

    assert len(dataset) == 2**10
    assert len(dataset.node.branches) == 2
    assert len(list(dataset.take(5))) == 5


# The sizes that a spec tells.


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 5), width=st.integers(1, 5), count=st.integers(1, 12))
def test_a_size_in_a_spec_is_that_of_every_element(rows, width, count):
    batches = Dataset.from_tensor_slices(np.zeros((count, width))).batch(rows)
    functions = {
        "reshape": lambda x: x.reshape(-1),
        "transpose": lambda x: x.T,
        "in two": lambda x: np.concatenate([x, x], axis=1).reshape(2, -1),
        "one more": lambda x: np.zeros(len(x) + 1),
        "same": lambda x: x,
        "double": lambda x: x * 2,
        "sum": lambda x: x.sum(),
    }

    for name, function in functions.items():
        dataset = batches.map(function)
        spec = dataset.element_spec
        assert all(spec.is_compatible_with(np.asarray(x)) for x in dataset), name
    assert batches.map(functions["same"]).element_spec.shape == (None, width)


def test_a_worker_without_rows_has_the_other_sizes_of_the_first_element():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    options = rx.data.Options()
    options.experimental_distribute.auto_shard_policy = rx.data.experimental.AutoShardPolicy.OFF
    dataset = Dataset.from_tensor_slices(np.zeros((9, 3))).batch(8).map(lambda x: x + 1)
    steps = iter(strategy.experimental_distribute_dataset(dataset.with_options(options)))

    shapes = [[x.shape for x in strategy.experimental_local_results(step)] for step in steps]

    assert shapes == [[(4, 3), (4, 3)], [(1, 3), (0, 3)]]


# Options.


def test_every_option_of_tensorflow_is_accepted():
    options = rx.data.Options()
    options.autotune.enabled = True
    options.autotune.cpu_budget = 3
    options.autotune.autotune_algorithm = rx.data.experimental.AutotuneAlgorithm.HILL_CLIMB
    options.threading.private_threadpool_size = 4
    options.experimental_optimization.map_fusion = True
    options.experimental_slack = True
    options.dataset_name = "training"
    options.experimental_deterministic = False
    options.experimental_threading.max_intra_op_parallelism = 1

    found = Dataset.range(3).with_options(options).options()

    assert found == options
    assert (found.deterministic, found.experimental_deterministic) == (False, False)
    assert found.threading is found.experimental_threading
    assert found.threading.max_intra_op_parallelism == 1


def test_an_option_of_another_type_is_refused():
    with pytest.raises(TypeError, match=r"Options.deterministic = 'yes': this option is of type"):
        rx.data.Options().deterministic = "yes"


# Datasets on disk.


def test_a_saved_dataset_is_exchanged_when_all_is_written(tmp_path):
    path = tmp_path / "saved"
    Dataset.range(4).save(path)
    before = Dataset.load(path)

    with pytest.raises(rx.errors.InvalidArgumentError, match="raised ZeroDivisionError"):
        Dataset.range(3).map(lambda x: 1 // int(2 - x)).save(path)
    assert ints(before) == ints(Dataset.load(path)) == [0, 1, 2, 3]

    Dataset.range(6).save(path)
    assert ints(Dataset.load(path)) == [0, 1, 2, 3, 4, 5]
    assert len(list(path.iterdir())) == 2
    with pytest.raises(rx.errors.NotFoundError, match="the dataset was saved again"):
        list(before)


@settings(max_examples=15, deadline=None)
@given(count=st.integers(0, 700), files=st.integers(1, 4), width=st.integers(0, 2))
def test_what_was_saved_is_loaded(count, files, width, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    dataset = Dataset.range(count).map(lambda x: (x, np.full(width * int(x % 2), x), b"%d" % x))
    shard = (lambda x, *_: x % files) if files > 1 else None
    dataset.save(path, shard_func=shard)
    if not count:
        with pytest.raises(rx.errors.InvalidArgumentError, match="Pass element_spec"):
            Dataset.load(path)
        return

    loaded = Dataset.load(path)
    found = sorted((int(a), b.tolist(), c) for a, b, c in loaded)

    assert found == [(k, [k] * (width * (k % 2)), b"%d" % k) for k in range(count)]
    assert len(loaded) == count
    assert all(loaded.element_spec[1].is_compatible_with(b) for _, b, _ in loaded)


def test_a_folder_of_tensorflow_is_refused_with_advice(tmp_path):
    (tmp_path / "dataset_spec.pb").write_bytes(b"")

    with pytest.raises(rx.errors.DataLossError, match="saved by TensorFlow"):
        Dataset.load(tmp_path)


def test_elements_of_a_user_defined_class_are_loaded_with_their_spec(tmp_path):
    dataset = Dataset.range(3).map(lambda x: Point(x, x * 2))
    dataset.save(tmp_path)

    with pytest.raises(rx.errors.InvalidArgumentError, match="of a class of your own"):
        Dataset.load(tmp_path)
    assert list(Dataset.load(tmp_path, dataset.element_spec)) == list(dataset)


def test_a_snapshot_is_kept_once_and_only_for_the_same_pipeline(tmp_path):
    class Calls:
        def __len__(self):
            return self.count

        count = 0

    calls = Calls()

    def build(by):
        def count_and_multiply(x):
            calls.count += 1
            return x * by

        return Dataset.range(4).map(count_and_multiply).snapshot(tmp_path)

    assert [ints(build(2)) for _ in range(3)] == [[0, 2, 4, 6]] * 3
    assert len(calls) == 4
    assert ints(build(3)) == [0, 3, 6, 9]


OTHERS = {
    "number": lambda: Dataset.range(5),
    "batch": lambda: Dataset.range(4).batch(2),
    "array": lambda: Dataset.from_tensor_slices(np.arange(4)),
    "other array": lambda: Dataset.from_tensor_slices(np.arange(4) + 1),
    "function": lambda: Dataset.range(4).map(lambda x: x + 1),
    "other function": lambda: Dataset.range(4).map(lambda x: x + 2),
    "closure": lambda: (lambda k: Dataset.range(4).map(lambda x: x + k))(3),
    "other closure": lambda: (lambda k: Dataset.range(4).map(lambda x: x + k))(4),
    "list": lambda: (lambda k: Dataset.range(4).map(lambda x: x + k[0]))([3]),
    "other list": lambda: (lambda k: Dataset.range(4).map(lambda x: x + k[0]))([4]),
    "array in a closure": lambda: (lambda k: Dataset.range(4).map(lambda x: x + k))(np.ones(2)),
    "numpy": lambda: Dataset.range(4).map(np.sqrt),
    "other of numpy": lambda: Dataset.range(4).map(np.exp),
    "seed": lambda: Dataset.range(4).shuffle(4, seed=1),
    "other seed": lambda: Dataset.range(4).shuffle(4, seed=2),
    "inner": lambda: Dataset.range(4).flat_map(lambda x: Dataset.range(x)),
    "inner map": lambda: Dataset.range(4).flat_map(lambda x: Dataset.range(x).map(lambda y: y)),
}


def test_fingerprints_are_equal_for_the_same_program_and_for_no_other():
    found = {name: int(make().fingerprint()) for name, make in OTHERS.items()}

    assert {name: int(make().fingerprint()) for name, make in OTHERS.items()} == found
    assert len(set(found.values())) == len(OTHERS)


def test_an_object_without_a_value_counts_only_as_itself():
    class Scale:
        def __init__(self, by):
            self.by = by

        def __call__(self, x):
            return x * self.by

    scale = Scale(2)
    dataset = Dataset.range(3).map(scale)

    assert dataset.fingerprint() == Dataset.range(3).map(scale).fingerprint()
    found = {int(Dataset.range(3).map(Scale(k)).fingerprint()) for k in range(20)}
    assert len(found) == 20


def test_a_fingerprint_of_plain_functions_is_the_same_in_another_process():
    program = """
        import numpy as np
        import replicax as rx
        dataset = rx.data.Dataset.range(4).map(lambda x: np.sqrt(x) + len([x])).batch(2)
        print(int(dataset.fingerprint()))
    """

    found = {run_fresh(program).stdout for _ in range(2)}

    assert len(found) == 1
    assert int(found.pop()) > 0


@pytest.mark.parametrize("initial", [None, [0.9, 0.1]])
def test_resampling_gives_the_classes_that_are_wanted_and_no_element_twice(initial):
    numbers = Dataset.range(20_000).map(lambda x: (x, x % 10 == 0), vectorize=True)
    dataset = numbers.rejection_resample(lambda x, y: int(y), [0.5, 0.5], initial, seed=1)

    found = [(int(label), int(x), bool(y)) for label, (x, y) in dataset]

    assert all(label == y for label, _, y in found)
    assert len({x for _, x, _ in found}) == len(found)
    assert abs(np.mean([label for label, _, _ in found]) - 0.5) < 0.03
    assert len(found) > 3500  # of 4000 that are possible


def test_the_classes_of_a_resampling_are_checked():
    with pytest.raises(rx.errors.InvalidArgumentError, match="an int from 0 to 1"):
        list(Dataset.range(3).rejection_resample(lambda x: x, [0.5, 0.5]))
    with pytest.raises(rx.errors.InvalidArgumentError, match="none negative and not all zero"):
        Dataset.range(3).rejection_resample(lambda x: x, [0.5, -0.5])


def test_a_bucket_is_padded_to_its_boundary_only_where_the_axes_to_pad_are_known():
    learnt = Dataset.range(1, 4).map(lambda n: np.full((int(n), 2), n))
    with pytest.raises(rx.errors.InvalidArgumentError, match="Give padded_shapes"):
        learnt.bucket_by_sequence_length(len, [5], [2, 2], pad_to_bucket_boundary=True)

    dataset = learnt.bucket_by_sequence_length(
        len, [5], [2, 2], padded_shapes=[None, 2], pad_to_bucket_boundary=True
    )
    assert [x.shape for x in dataset] == [(2, 4, 2), (1, 4, 2)]

    with pytest.raises(rx.errors.InvalidArgumentError, match="at least 2 long, and the last"):
        list(learnt.bucket_by_sequence_length(len, [2], [2, 2], [None, 2], None, True))


def test_errors_that_are_ignored_can_be_logged(caplog):
    dataset = Dataset.range(-1, 2).map(lambda x: 6 // int(x))

    assert ints(dataset.ignore_errors(log_warning=True)) == [-6, 6]
    assert "leaves out an element" in caplog.text


def test_a_scan_may_not_change_how_its_state_is_built():
    with pytest.raises(rx.errors.StructureError, match="must be built like its initial_state"):
        list(Dataset.range(3).scan(np.int64(0), lambda s, x: ((s, s), x)))
    with pytest.raises(TypeError, match=r"Begin with a value of that dtype"):
        list(Dataset.range(3).scan(0, lambda s, x: (s + x, x)))


def test_names_have_no_effect_on_which_workers_read_what():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = Dataset.range(8).batch(4).ignore_errors()

    steps = iter(strategy.experimental_distribute_dataset(dataset))

    found = [[x.tolist() for x in strategy.experimental_local_results(s)] for s in steps]
    assert found == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


# What has no array.


@pytest.mark.parametrize("feature", [rx.io.VarLenFeature(np.int64), rx.io.RaggedFeature(np.int64)])
def test_sparse_and_ragged_elements_are_refused_where_they_are_put_together(feature):
    records = [rx.io.serialize_example({"x": [1] * k}) for k in (2, 2, 1)]
    dataset = Dataset.from_tensor_slices(records)
    one = dataset.map(lambda r: rx.io.parse_example([r], {"x": feature})["x"])

    assert len(list(one)) == 3
    for batched in (one.batch(2), one.padded_batch(2)):
        with pytest.raises(rx.errors.StructureError, match=r"in a `map` before, `x.to_"):
            list(batched)
    with pytest.raises(rx.errors.StructureError, match="use `padded_batch` if lengths differ"):
        Dataset.from_tensor_slices(rx.io.parse_example(records, {"x": feature}))


def test_lists_of_different_lengths_are_refused_with_the_padded_way():
    with pytest.raises(rx.errors.InvalidArgumentError, match="padded_batch"):
        Dataset.from_tensor_slices([[1, 2], [3]])


def test_images_need_pillow_only_when_they_are_decoded(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)

    with pytest.raises(ModuleNotFoundError, match=r"pip install 'replicax\[images\]'"):
        rx.io.decode_png(b"")


def test_a_csv_file_is_read_the_same_in_pieces_of_any_size(tmp_path, monkeypatch):
    rows = [(k, 'a,"b"\nc' * (k % 3), k / 4) for k in range(50)]
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    expected = [(k, text.encode(), x) for k, text, x in rows]

    for size in (1, 7, 1 << 20):
        monkeypatch.setattr("replicax._src.data.records.tfrecord._CHUNK", size)
        dataset = rx.data.experimental.CsvDataset(path, [np.int64, [""], np.float64])
        assert [(int(k), text, float(x)) for k, text, x in dataset] == expected


def test_an_iterator_over_csv_files_continues_after_a_bad_record_and_is_restored(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("1\nx\n3\n4\n")
    iterator = iter(rx.data.experimental.CsvDataset(path, [np.int32]))

    assert int(next(iterator)[0]) == 1
    with pytest.raises(
        rx.errors.InvalidArgumentError, match="Field 0 of record 1 is not of dtype int32"
    ):
        next(iterator)
    state = iterator.save_state()
    assert [int(x) for (x,) in iterator] == [3, 4]
    iterator.restore_state(state)
    assert [int(x) for (x,) in iterator] == [3, 4]
