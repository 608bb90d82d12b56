"""Variables in the memory of the host: where they are, and the numbers of steps with them."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.state.cell import Cell
from tests.replicas import context, mirrored

SHAPE = (128, 64)
POLICIES = ["mirrored", "sharded"]


class Momentum:
    """A matrix and its momentum, trained by rows of numbers."""

    def __init__(self, strategy, *, offloaded):
        self.strategy = strategy
        with strategy.scope():
            self.weight = rx.Variable(np.full(SHAPE, 0.5, "f4"), name="weight")
            with rx.offload() if offloaded else nullcontext():
                self.momentum = rx.Variable(np.zeros(SHAPE, "f4"), name="momentum")
                self.count = rx.Variable(0, name="count")
        self.step = rx.function(self.eager_step)

    def eager_step(self, x):
        return self.strategy.reduce("SUM", self.strategy.run(self._replica, (x,)), axis=None)

    def _replica(self, x):
        def loss():
            return rx.nn.mean_loss(jnp.square(x @ self.weight).sum(1))

        value, gradient = rx.value_and_grad(loss, self.weight)()
        gradient = context().all_reduce("SUM", gradient)
        self.count.assign_add(1)
        self.momentum.assign(0.9 * self.momentum + gradient)
        self.weight.assign_sub(1e-4 * self.momentum)
        return value

    def train(self, steps=3):
        rows = np.random.default_rng(0).normal(size=(8 * steps, SHAPE[0])).astype("f4")
        data = rx.data.Dataset.from_tensor_slices(rows).batch(8)
        return [float(self.step(x)) for x in self.strategy.experimental_distribute_dataset(data)]


def kind(v):
    return v.cell.array().sharding.memory_kind


@pytest.mark.parametrize("policy", POLICIES)
def test_offloaded_variables_stay_on_the_host_and_have_the_same_numbers(policy, tmp_path):
    usual = Momentum(mirrored(2, variable_policy=policy), offloaded=False)
    moved = Momentum(mirrored(2, variable_policy=policy), offloaded=True)
    assert [kind(v) for v in (moved.weight, moved.momentum, moved.count)] == [
        "device",
        "pinned_host",
        "device",
    ]

    losses = usual.train()
    assert moved.train() == losses
    assert kind(moved.momentum) == "pinned_host"
    np.testing.assert_array_equal(moved.momentum.numpy(), usual.momentum.numpy())

    # Read, assigned, saved and restored as others.
    saved = moved.momentum.numpy()
    path = rx.train.Checkpoint(m=moved.momentum).save(str(tmp_path / "ckpt"))
    moved.momentum.assign(2 * moved.momentum)
    np.testing.assert_array_equal(moved.momentum.numpy(), 2 * saved)
    assert kind(moved.momentum) == "pinned_host"
    rx.train.Checkpoint(m=moved.momentum).restore(path).assert_consumed()
    np.testing.assert_array_equal(moved.momentum.numpy(), saved)
    rx.train.Checkpoint(m=usual.momentum).restore(path).assert_consumed()
    np.testing.assert_array_equal(usual.momentum.numpy(), saved)
    assert (kind(moved.momentum), kind(usual.momentum)) == ("pinned_host", "device")
    assert moved.train() == usual.train()


@pytest.mark.parametrize("policy", POLICIES)
def test_offloaded_variables_have_the_same_numbers_in_eager_replicas(policy):
    x = np.random.default_rng(0).normal(size=(4, SHAPE[0])).astype("f4")
    found = []
    for offloaded in (False, True):
        model = Momentum(mirrored(2, variable_policy=policy), offloaded=offloaded)
        found += [[float(model.eager_step(x)), float(model.step(x)), float(model.eager_step(x))]]

    assert found[0] == found[1]


def test_a_step_that_fails_leaves_offloaded_variables(tmp_path):
    model = Momentum(mirrored(2), offloaded=True)
    model.train(1)
    before = model.momentum.numpy()

    def fails():
        model.momentum.assign_add(jnp.ones(SHAPE))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model.strategy.run(fails)
    np.testing.assert_array_equal(model.momentum.numpy(), before)
    assert model.train(1)


def test_variables_without_a_strategy_stay_on_the_device():
    with rx.offload():
        v = rx.Variable(np.zeros(SHAPE, "f4"))
    with mirrored(2).scope(), rx.offload():
        keys = rx.Variable(jax.random.key(0))
        own = rx.Variable(np.zeros(SHAPE, "f4"), synchronization=rx.VariableSynchronization.ON_READ)

    assert {kind(x) for x in (v, keys, own)} == {"device"}
    assert not any(isinstance(x.cell, Cell) and x.cell.offloaded for x in (v, keys, own))
