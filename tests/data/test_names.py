"""Names and forms of tf.data, tf.io and tf.train: TensorFlow's recorded answers, and more."""

import collections
import dataclasses
import json
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax.data import Dataset
from tests.data.pipelines import ints
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


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Point(x, {"y": x}),
        lambda x: Named(first=x, second=Point(x, (x,))),
        lambda x: collections.OrderedDict([("z", x), ("a", (x, x))]),
        lambda x: collections.defaultdict(list, {"z": x}),
    ],
)
def test_an_element_of_ones_own_type_keeps_it(make, tmp_path):
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


def test_slices_and_generators_of_ones_own_type_keep_it():
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
    for _ in range(20):
        dataset = dataset.concatenate(dataset)

    assert len(dataset) == 2**20
    assert len(list(dataset.take(5))) == 5


# The sizes that a spec tells.


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
