"""What all metrics do: add up on every replica, and read as one."""

import jax.numpy as jnp
import pytest

import replicax as rx
from tests.replicas import context, mirrored, replica_id

STRATEGIES = {
    "none": lambda: rx.distribute.get_strategy(),
    "one device": lambda: rx.distribute.OneDeviceStrategy("CPU:0"),
    "one replica": lambda: mirrored(1),
    "three replicas": lambda: mirrored(3),
}


@pytest.fixture(params=["eager", "compiled"])
def mode(request):
    return rx.function if request.param == "compiled" else lambda f: f


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)
def test_the_mean_of_a_dataset_with_a_short_end_is_its_mean(make, mode):
    strategy = make()
    with strategy.scope():
        mean, total = rx.metrics.Mean(), rx.metrics.Sum()
    dataset = rx.data.Dataset.range(17).map(lambda x: x * 1.0).batch(6)

    @mode
    def step(batch):
        def replica_step(x):
            mean.update_state(x)
            total.update_state(x)

        strategy.run(replica_step, args=(batch,))

    for batch in strategy.experimental_distribute_dataset(dataset):
        step(batch)

    assert float(mean.result()) == 8.0
    assert float(total.result()) == 136.0


def test_a_result_in_a_replica_is_that_of_all(mode):
    strategy = mirrored(2)
    with strategy.scope():
        mean = rx.metrics.Mean()

    results = mode(lambda: strategy.run(lambda: mean(replica_id())))()

    assert [float(r) for r in results.values] == [0.5, 0.5]


def test_a_value_of_all_replicas_counts_once_outside_of_them():
    strategy = mirrored(2)
    with strategy.scope():
        mean = rx.metrics.Mean()
        mean.update_state(3.0)
        mean.update_state(5.0)
    strategy.run(lambda: mean.update_state(4.0))

    assert float(mean.result()) == 4.0
    assert float(mean.count.read_value()) == 4.0


def test_replicas_add_to_their_own_sums_without_communication():
    strategy = mirrored(2)
    with strategy.scope():
        mean = rx.metrics.Mean()

    strategy.run(lambda: mean.update_state(replica_id() + 1))

    assert [float(c.read_value()) for c in mean.total.components] == [1.0, 2.0]


def test_made_outside_of_a_scope_it_counts_all_replicas_too():
    mean = rx.metrics.Mean()

    mirrored(2).run(lambda: mean.update_state(replica_id() * 4))

    assert float(mean.result()) == 2.0


def test_a_checkpoint_brings_the_counts_back(tmp_path):
    strategy = mirrored(2)
    with strategy.scope():
        mean = rx.metrics.Mean()
    strategy.run(lambda: mean.update_state(replica_id()))
    saved = rx.train.Checkpoint(mean=mean).save(tmp_path / "c")

    with mirrored(3).scope():
        other = rx.metrics.Mean()
    rx.train.Checkpoint(mean=other).restore(saved)

    assert float(other.result()) == 0.5
    assert float(other.count.read_value()) == 2.0


def test_without_anything_the_mean_is_zero_and_weights_of_zero_are_nothing():
    mean = rx.metrics.Mean(name="loss")

    assert float(mean.result()) == 0.0
    assert float(mean([1.0, 2.0], sample_weight=[0.0, 0.0])) == 0.0
    assert mean.name == "loss"
    assert rx.metrics.SparseTopKCategoricalAccuracy().name == "sparse_top_k_categorical_accuracy"


def test_weights_that_do_not_fit_are_refused_with_the_shapes():
    with pytest.raises(rx.errors.InvalidArgumentError, match=r"\(3,\).*\(2,\).*each row"):
        rx.metrics.Mean().update_state([1.0, 2.0], sample_weight=[1.0, 2.0, 3.0])


def test_a_user_defined_metric_adds_up(mode):
    class Largest(rx.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.rows = self.add_weight("rows", (2,))

        def update_state(self, x, sample_weight=None):
            self.add(self.rows, jnp.stack([x.sum(), x.size]))

        def result(self):
            return self.total_of(self.rows)[0]

    strategy = mirrored(2)
    with strategy.scope():
        metric = Largest()
    mode(lambda: strategy.run(lambda: metric.update_state(jnp.ones(3))))()

    assert metric.result().tolist() == [6.0, 6.0]
    assert metric.name == "largest"
    assert strategy.run(lambda: context().num_replicas_in_sync) == 2
