"""shuffle: a permutation, by seed, in the reach of its buffer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax.data import UNKNOWN_CARDINALITY, Dataset, set_seed_source
from tests.data.pipelines import ints

_COUNTS = st.integers(0, 60)
_BUFFERS = st.integers(1, 80)
_SEEDS = st.integers(0, 2**40)

_FORMS = {
    "places": lambda n: Dataset.range(n),
    "columns": lambda n: Dataset.range(n).map(lambda x: x + 0, vectorize=True),
    "rows": lambda n: Dataset.range(n).batch(1).map(lambda x: x[0]),
    "two sources": lambda n: Dataset.range(n // 2).concatenate(Dataset.range(n // 2, n)),
}


@pytest.mark.parametrize("form", sorted(_FORMS))
@given(count=_COUNTS, buffer=_BUFFERS, seed=_SEEDS)
def test_shuffle_is_a_permutation(form, count, buffer, seed):
    dataset = _FORMS[form](count).shuffle(buffer, seed=seed)

    assert sorted(ints(dataset)) == list(range(count))


@given(count=_COUNTS, buffer=_BUFFERS, seed=_SEEDS)
def test_the_order_does_not_depend_on_how_elements_are_held(count, buffer, seed):
    orders = {tuple(ints(make(count).shuffle(buffer, seed=seed))) for make in _FORMS.values()}

    assert len(orders) == 1


@given(count=_COUNTS, buffer=_BUFFERS, seed=_SEEDS)
def test_no_element_comes_earlier_than_the_buffer_allows(count, buffer, seed):
    order = ints(Dataset.range(count).shuffle(buffer, seed=seed))

    assert all(element < place + buffer for place, element in enumerate(order))


@given(count=_COUNTS, buffer=_BUFFERS, seed=_SEEDS, size=st.integers(1, 9))
def test_the_order_does_not_depend_on_how_it_is_pulled(count, buffer, seed, size):
    one_by_one = ints(Dataset.range(count).shuffle(buffer, seed=seed))
    batched = list(Dataset.range(count).shuffle(buffer, seed=seed).batch(size))

    assert [int(x) for batch in batched for x in batch] == one_by_one


def test_each_pass_and_each_epoch_has_its_own_order():
    dataset = Dataset.range(50).shuffle(50, seed=1)
    first, second = ints(dataset), ints(dataset)
    epochs = ints(dataset.repeat(2))

    assert len({tuple(first), tuple(second), tuple(epochs[:50]), tuple(epochs[50:])}) == 4


def test_the_same_program_gives_the_same_orders():
    def orders():
        dataset = Dataset.range(50).shuffle(10, seed=1)
        return [ints(dataset), ints(dataset.repeat(2)), ints(dataset)]

    assert orders() == orders()


def test_without_reshuffling_every_pass_is_alike():
    dataset = Dataset.range(50).shuffle(50, reshuffle_each_iteration=False)

    assert ints(dataset) == ints(dataset)
    assert ints(dataset.repeat(2)) == ints(dataset) * 2


def test_without_a_seed_datasets_differ():
    assert ints(Dataset.range(100).shuffle(100)) != ints(Dataset.range(100).shuffle(100))


def test_a_shared_seed_source_makes_workers_agree():
    def worker():
        seeds = np.random.default_rng(7)
        before = set_seed_source(lambda: int(seeds.integers(1 << 60)))
        try:
            dataset = Dataset.range(30).shuffle(30).batch(5).shuffle(3)
            return [batch.tolist() for batch in dataset]
        finally:
            set_seed_source(before)

    assert worker() == worker()


def test_a_buffer_of_unknown_size_holds_everything():
    order = ints(Dataset.range(200).shuffle(UNKNOWN_CARDINALITY, seed=2))

    assert sorted(order) == list(range(200))
    assert max(element - place for place, element in enumerate(order)) > 100


def test_every_order_has_the_same_chance():
    counts = np.zeros((4, 4))
    for seed in range(2000):
        for place, element in enumerate(ints(Dataset.range(4).shuffle(4, seed=seed))):
            counts[place, element] += 1

    assert np.abs(counts / 2000 - 0.25).max() < 0.05


def test_elements_of_different_shapes_can_be_shuffled():
    dataset = Dataset.range(1, 20).map(lambda n: np.full(int(n), n)).shuffle(6, seed=1)

    assert sorted(len(x) for x in dataset) == list(range(1, 20))


@pytest.mark.parametrize("size", [0, -1, -3])
def test_a_buffer_needs_room(size):
    with pytest.raises(InvalidArgumentError, match=rf"shuffle\(buffer_size={size}\)"):
        Dataset.range(3).shuffle(size)
