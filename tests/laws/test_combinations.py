"""Replicate x shard x tensor on eight devices: every combination has the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from tests.replicas import context, mirrored

WIDTH, HIDDEN, LAYERS, ROWS, LENGTH = 16, 64, 2, 16, 8
SHAPES = {
    "embedding": (64, WIDTH * 8),
    "up/kernel": (LAYERS, WIDTH * 8, HIDDEN),
    "down/kernel": (LAYERS, HIDDEN, WIDTH * 8),
    "odd": (67, 101),
}
TENSOR = {
    # Not its rows: XLA of JAX 0.12 aborts if the rows that it reads are sharded over another axis.
    "embedding": [None, "tensor"],
    "up/kernel": [None, None, "tensor"],
    "down/kernel": [None, "tensor", None],
}
COMBINATIONS = {
    "replicate 8": {},
    "shard 8": {"variable_policy": "sharded"},
    "replicate 2 shard 4": {"variable_policy": "sharded", "shards": 4},
    "replicate 4 tensor 2": {"devices_per_replica": 2},
    "shard 4 tensor 2": {"variable_policy": "sharded", "devices_per_replica": 2},
    "replicate 2 shard 2 tensor 2": {
        "variable_policy": "sharded",
        "shards": 2,
        "devices_per_replica": 2,
    },
    "tensor 8": {"devices_per_replica": 8},
    "shard 2 tensor 2 sequence 2": {
        "variable_policy": "sharded",
        "devices_per_replica": {"tensor": 2, "sequence": 2},
    },
}


class Model:
    """Stacked layers that Adam trains, clipped by the global norm."""

    def __init__(self, strategy):
        self.strategy, self.adam = (
            strategy,
            optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
        )
        rng = np.random.default_rng(0)
        named = strategy.topology.cores > 1
        layouts = rx.tpu.LayoutMap(TENSOR if named else {})
        with strategy.scope(), layouts.scope():
            self.weights = {
                n: rx.Variable(rng.normal(size=s).astype("f4") / 8, name=n)
                for n, s in SHAPES.items()
            }
            state = self.adam.init({n: w.read_value() for n, w in self.weights.items()})
            self.state = jax.tree.map(lambda x: rx.Variable(x), state)
        self.step = rx.function(self._step)

    def loss(self, tokens):
        constrain = self.strategy.constrain
        is_long = "sequence" in self.strategy.topology.named_axes
        x = constrain(self.weights["embedding"][tokens], None, "sequence" if is_long else None)
        stacks = self.weights["up/kernel"].read_value(), self.weights["down/kernel"].read_value()

        @jax.checkpoint
        def layer(x, pair):
            up, down = pair
            hidden = constrain(jnp.tanh(x @ up), None, None, "tensor")
            return x + hidden @ down, None

        x, _ = jax.lax.scan(layer, x, stacks)
        own = jnp.sum(jnp.sin(self.weights["odd"].read_value()))
        return rx.nn.mean_loss(jnp.square(x).mean((1, 2))) + rx.nn.scale_regularization_loss(own)

    def _replica_step(self, tokens):
        names = list(self.weights)
        variables = list(self.weights.values())
        loss, gradients = rx.value_and_grad(lambda: self.loss(tokens), variables)()
        gradients = dict(zip(names, context().all_reduce("SUM", gradients), strict=True))
        is_variable = lambda v: isinstance(v, rx.Variable)  # noqa: E731
        state = jax.tree.map(lambda v: v.read_value(), self.state, is_leaf=is_variable)
        weights = {n: w.read_value() for n, w in self.weights.items()}
        updates, new = self.adam.update(gradients, state, weights)
        for n, value in optax.apply_updates(weights, updates).items():
            self.weights[n].assign(value)
        slots = jax.tree.leaves(self.state, is_leaf=is_variable)
        for slot, value in zip(slots, jax.tree.leaves(new), strict=True):
            slot.assign(value)
        return loss

    def _step(self, tokens):
        losses = self.strategy.run(self._replica_step, (tokens,))
        return self.strategy.reduce("SUM", losses, axis=None)

    def train(self, steps=2):
        tokens = np.random.default_rng(1).integers(64, size=(ROWS * steps, LENGTH))
        data = rx.data.Dataset.from_tensor_slices(tokens.astype("i4")).batch(ROWS)
        return [float(self.step(x)) for x in self.strategy.experimental_distribute_dataset(data)]

    def numbers(self):
        return {n: w.numpy() for n, w in self.weights.items()}


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

    path = rx.train.Checkpoint(**{k.replace("/", "_"): v for k, v in model.weights.items()}).save(
        str(tmp_path / "ckpt")
    )
    other = Model(mirrored(2, variable_policy="sharded"))
    back = {k.replace("/", "_"): v for k, v in other.weights.items()}
    rx.train.Checkpoint(**back).restore(path).assert_consumed()
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
