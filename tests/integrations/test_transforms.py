"""Rematerialization and mixed precision: numbers of hand-written JAX, and kept values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import replicax as rx
from tests.replicas import mirrored

X = np.random.default_rng(0).normal(size=(8, 16)).astype("f4")


class Block(nnx.Module):
    """A layer that counts its calls."""

    def __init__(self, rngs):
        self.up = nnx.Linear(16, 16, rngs=rngs)
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, *, scale=1.0):
        self.count[...] += 1
        return x + scale * jnp.tanh(self.up(x))


@pytest.mark.parametrize("policy", [None, "dots_saveable", ["kept"]])
def test_remat_gives_the_numbers_of_the_plain_function(policy):
    strategy = mirrored(2)
    with strategy.scope():
        w = rx.Variable(X.T @ X / 16)
        calls = rx.Variable(
            0, trainable=False, aggregation=rx.VariableAggregation.ONLY_FIRST_REPLICA
        )

    def layer(x, name, scale=2.0):
        assert name == "first"
        calls.assign_add(1)
        return scale * checkpoint_name(jnp.tanh(x @ w), "kept")

    def gradient(layer):
        step = lambda x: rx.value_and_grad(lambda: layer(x, "first").sum(), w)()  # noqa: E731
        return rx.function(lambda x: strategy.run(step, (x,)))(X)

    plain, again = gradient(layer), gradient(rx.remat(layer, policy))

    assert int(calls.numpy()) == 2
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        for x, y in zip(a.values, b.values, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def test_remat_rejects_unknown_policy():
    with pytest.raises(ValueError, match=r"no rematerialization policy 'dot'.*dots_saveable"):
        rx.remat(lambda x: x, "dot")


def test_remat_of_nnx_keeps_updates_of_the_module():
    strategy = mirrored(2)
    with strategy.scope():
        models = [Block(nnx.Rngs(0)) for _ in range(2)]
    call = rx.remat(lambda m, x, flag: m(x, scale=2.0 if flag else 1.0), "dots_saveable")

    def step(x):
        loss = lambda m, f: f(m, x, True).sum()  # noqa: E731
        plain = nnx.grad(lambda m: loss(m, lambda m, x, _: m(x, scale=2.0)))(models[0])
        return plain, nnx.grad(lambda m: loss(m, call))(models[1])

    plain, again = rx.function(lambda x: strategy.run(step, (x,)))(X)

    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert [float(m.count[...]) for m in models] == [1.0, 1.0]


def _nnx_step(strategy, model, optimizer, transform):
    def replica_step(x):
        def loss_fn(model):
            assert model.up.kernel[...].dtype == (jnp.bfloat16 if transform else jnp.float32)
            return rx.nn.mean_loss(jnp.square(model(x)).sum(-1).astype("float32"))

        loss, gradients = nnx.value_and_grad(transform(loss_fn) if transform else loss_fn)(model)
        assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
        optimizer.update(model, gradients)
        return loss

    return rx.function(
        lambda x: strategy.reduce("SUM", strategy.run(replica_step, (x,)), axis=None)
    )


@pytest.mark.parametrize("policy", ["mirrored", "sharded"])
def test_mixed_precision_of_nnx_equals_hand_written_jax(policy):
    strategy = mirrored(2, variable_policy=policy)
    with strategy.scope():
        model = Block(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    graph, params, rest = nnx.split(Block(nnx.Rngs(0)), nnx.Param, ...)
    step = _nnx_step(strategy, model, optimizer, rx.mixed_precision)
    adam = optax.adam(1e-2)
    state = adam.init(params)

    @jax.jit
    def by_hand(params, state):
        def loss_fn(params):
            narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            out = nnx.merge(graph, narrow, rest, copy=True)(X)
            return jnp.square(out).sum(-1).astype("float32").mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state_ = adam.update(gradients, state, params)
        return loss, optax.apply_updates(params, updates), state_

    batches = strategy.experimental_distribute_dataset(
        rx.data.Dataset.from_tensor_slices(X).batch(8).repeat(4)
    )
    for x in batches:
        loss = step(x)
        expected, params, state = by_hand(params, state)
        np.testing.assert_allclose(float(loss), float(expected), rtol=2e-3)
    assert model.up.kernel[...].dtype == jnp.float32
    assert float(model.count[...]) == 4


def test_mixed_precision_of_variables_converts_and_guards_updates():
    strategy = mirrored(2)
    with strategy.scope():
        w, seen = rx.Variable(X.T), rx.Variable(0.0, trainable=False)

    def loss(x):
        y = x @ w
        assert y.dtype == jnp.bfloat16
        seen.assign_add(1.0)
        return y.astype("float32").sum()

    compute = rx.value_and_grad(rx.mixed_precision(loss), w)
    value, gradient = rx.function(lambda x: strategy.run(compute, (x,)))(X)
    narrow = jnp.bfloat16
    expected, wanted = jax.value_and_grad(
        lambda w: (X.astype(narrow) @ w.astype(narrow)).astype("float32").sum()
    )(jnp.asarray(X.T))

    np.testing.assert_allclose(value.values[0], expected, rtol=5e-3)
    np.testing.assert_allclose(gradient.values[1], wanted, rtol=5e-3, atol=1e-2)
    assert float(seen.numpy()) == 1.0

    def update():
        w.assign(w * 2)

    with pytest.raises(rx.errors.TracingError, match=r"inside of rx.mixed_precision"):
        rx.function(rx.mixed_precision(update))()
    with pytest.raises(ValueError, match="floating-point type"):
        rx.mixed_precision(update, "int8")
