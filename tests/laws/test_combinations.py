"""Replicate x shard x tensor on eight devices: every combination has the numbers of one device."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.combinations import COMBINATIONS, Model
from tests.replicas import context, mirrored


@pytest.fixture(scope="module")
def one():
    model = Model(mirrored(1))
    return model.train(), model.numbers()


@pytest.mark.parametrize(
    "name",
    [
        n
        if n in ("replicate 2 shard 4", "shard 2 tensor 2 sequence 2")
        else pytest.param(n, marks=pytest.mark.slow)
        for n in COMBINATIONS
    ],
)
def test_combination_has_the_numbers_of_one_device(one, name, tmp_path):
    model = Model(mirrored(8, **COMBINATIONS[name]))
    losses, numbers = one

    np.testing.assert_allclose(model.train(), losses, rtol=1e-4)
    for n, value in model.numbers().items():
        np.testing.assert_allclose(value, numbers[n], rtol=1e-3, atol=1e-5, err_msg=n)

    path = model.checkpoint().save(str(tmp_path / "ckpt"))
    other = Model(mirrored(2, variable_policy="sharded"))
    other.checkpoint().restore(path).assert_consumed()
    for n, value in other.numbers().items():
        np.testing.assert_array_equal(value, model.numbers()[n], err_msg=n)


def test_each_group_of_replicas_holds_a_copy():
    strategy = mirrored(8, variable_policy="sharded", shards=4, devices_per_replica=1)
    with strategy.scope():
        v = rx.Variable(np.arange(128.0 * 64).reshape(128, 64).astype("f4"))

    parts = v.cell.array().addressable_shards

    assert [p.data.shape for p in parts] == [(32, 64)] * 8
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(part.data, v.numpy()[i % 4 * 32 : (i % 4 + 1) * 32])


@pytest.mark.parametrize("options", [{"shards": 4}, {"shards": 2, "devices_per_replica": 2}])
def test_groups_of_replicas_exchange_nothing_but_sums(options):
    strategy = mirrored(8, variable_policy="sharded", **options)
    shapes = (128, 64), (67, 101), (2, 64, 64)  # the second is stored flat
    with strategy.scope():
        weights = [rx.Variable(np.ones(s, "f4")) for s in shapes]
        slots = [rx.Variable(np.zeros(s, "f4")) for s in shapes]

    def replica_step(x):
        loss = lambda: sum(jnp.sum(jnp.sin(w.read_value() * x.mean())) for w in weights)  # noqa: E731
        gradients = context().all_reduce("SUM", rx.grad(loss, weights)())
        for w, slot, g in zip(weights, slots, gradients, strict=True):
            w.assign_sub(slot.assign(0.9 * slot + g).read_value())

    step = rx.function(lambda x: strategy.run(replica_step, (x,)))
    text = step.get_concrete_function(jnp.ones(4)).as_text()

    kinds = re.findall(r" (all-\w+(?:-\w+)?|reduce-scatter|collective-\w+)\(", text)
    assert set(kinds) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert kinds.count("all-gather") == kinds.count("reduce-scatter") == len(shapes)


def test_shards_and_devices_are_checked():
    with pytest.raises(ValueError, match="shards is 3, and there are 8 replicas"):
        mirrored(8, variable_policy="sharded", shards=3)
    with pytest.raises(ValueError, match="variable_policy is 'mirrored'"):
        mirrored(8, shards=2)
    with pytest.raises(ValueError, match="cores is 3"):
        mirrored(8, devices_per_replica=3)
    with pytest.raises(ValueError, match="must be a positive number"):
        mirrored(8, devices_per_replica={"tensor": 0})


def test_constrain_checks_names_and_does_nothing_on_one_device():
    pairs, single = mirrored(8, devices_per_replica={"tensor": 4}), mirrored(2)

    with pytest.raises(ValueError, match="there is no axis 'tensr'"):
        pairs.constrain(jnp.ones(8), "tensr")
    with pytest.raises(ValueError, match="6 is not divisible by the 4 devices"):
        pairs.constrain(jnp.ones(6), "tensor")
    with pytest.raises(ValueError, match="used twice"):
        pairs.constrain(jnp.ones((8, 8)), "tensor", "tensor")
    x = jnp.ones(3)
    assert single.constrain(x, "anything") is x
    assert pairs.constrain(jnp.ones(8), "tensor").sharding.shard_shape((8,)) == (2,)


def test_short_batches_of_replicas_of_several_devices_are_refused():
    strategy = mirrored(8, devices_per_replica=2)
    data = rx.data.Dataset.from_tensor_slices(np.ones((6, 2), "f4")).batch(6)
    (batch,) = strategy.experimental_distribute_dataset(data)

    with pytest.raises(ValueError, match="drop_remainder=True"):
        strategy.run(lambda x: x.sum(), (batch,))
