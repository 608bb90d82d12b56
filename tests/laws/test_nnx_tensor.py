"""NNX models over a tensor axis, by the partitions of NNX: the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
from replicax._src.integrations.nnx_storage import backing_variable
from tests.replicas import mirrored

WIDTH, HIDDEN, LAYERS = 32, 128, 2


def _partitioned(*axes):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=_partitioned(None, "tensor"), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=_partitioned("tensor", None), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.tanh(self.up(x)))


class Stack(nnx.Module):
    def __init__(self, rngs):
        named = nnx.vmap(Layer, transform_metadata={nnx.PARTITION_NAME: None})
        self.layers = named(rngs.split(LAYERS))

    def __call__(self, x):
        layer = rx.remat(lambda x, layer: layer(x))
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def _train(strategy, make=Stack):
    with strategy.scope():
        model = make(nnx.Rngs(0))
        adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
        optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)

    def replica_step(model, optimizer, x):
        loss_of = lambda model: rx.nn.mean_loss(jnp.square(model(x)).mean(1))  # noqa: E731
        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    @rx.function
    def step(x):
        losses = strategy.run(replica_step, (model, optimizer, x))
        return strategy.reduce("SUM", losses, axis=None)

    rows = np.random.default_rng(0).normal(size=(32, WIDTH)).astype("f4")
    data = rx.data.Dataset.from_tensor_slices(rows).batch(16)
    losses = [float(step(x)) for x in strategy.experimental_distribute_dataset(data)]
    return losses, model, optimizer


def _shard(v):
    """Return the shape of a device's shard of the value that backs an NNX variable."""
    return backing_variable(v).cell.value.addressable_shards[0].data.shape


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        pytest.param({}, (LAYERS, WIDTH, HIDDEN // 2), marks=pytest.mark.slow),
        ({"variable_policy": "sharded"}, (LAYERS, WIDTH // 4, HIDDEN // 2)),
    ],
)
def test_partitioned_layers_have_the_numbers_of_one_device(options, shape):
    losses, one, _ = _train(mirrored(1))

    found, model, optimizer = _train(mirrored(8, devices_per_replica={"tensor": 2}, **options))

    np.testing.assert_allclose(found, losses, rtol=1e-4)
    pairs = zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, one)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert _shard(model.layers.up.kernel) == shape
    slots = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    large = [v for v in slots if v.shape == (LAYERS, WIDTH, HIDDEN)]
    assert [_shard(v) for v in large] == [shape, shape]


def test_partition_of_another_number_of_axes_is_refused():
    strategy = mirrored(2, devices_per_replica=2)
    with strategy.scope():
        layers = nnx.vmap(Layer)(nnx.Rngs(0).split(LAYERS))

    with pytest.raises(rx.errors.VariableError, match="PARTITION_NAME"):
        strategy.run(lambda layers: layers.up.kernel[...], (layers,))


def test_layer_that_is_not_stacked_has_the_numbers_of_one_device():
    # The state of its optimizer is created sharded, as zeros like its kernels.
    losses, one, _ = _train(mirrored(1), Layer)

    found, model, optimizer = _train(mirrored(4, devices_per_replica={"tensor": 2}), Layer)

    np.testing.assert_allclose(found, losses, rtol=1e-4)
    np.testing.assert_allclose(model.up.kernel[...], one.up.kernel[...], rtol=1e-3, atol=1e-5)
    slots = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    moments = [v for v in slots if v.shape == (WIDTH, HIDDEN)]
    assert [_shard(v) for v in moments] == [(WIDTH, HIDDEN // 2)] * 2
