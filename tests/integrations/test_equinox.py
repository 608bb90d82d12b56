"""Stateful Equinox layers in replica functions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

ROWS = jnp.arange(24.0).reshape(8, 3)


class Layers(eqx.Module):
    """A batch normalization, and a spectral norm, whose states are of several dtypes."""

    norm: eqx.nn.BatchNorm
    linear: eqx.nn.SpectralNorm

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")
        layer = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        self.linear = eqx.nn.SpectralNorm(layer, "weight", key=jax.random.key(1))

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.linear(x, state)


class Counter(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex({"n": jnp.array(0), "is_first": jnp.array(True)})


def gradient_step(model, state, rows):
    def loss(model, state):
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        outputs, state = batched(rows, state)
        return jnp.mean(outputs**2), state

    return eqx.filter_grad(loss, has_aux=True)(model, state)


@pytest.mark.parametrize("replicas", [1, 2])
def test_stateful_layers_step_in_compiled_replicas_as_under_filter_jit(replicas):
    model, state = eqx.nn.make_with_state(Layers)()
    _, expected = eqx.filter_jit(gradient_step)(model, state, ROWS)
    expected = jax.tree.leaves(expected)
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])

    @rx.function
    def step(model, state, rows):
        # Every replica takes all rows, so that its state is that of one device.
        return strategy.run(gradient_step, args=(model, state, rows))

    _, state = step(*eqx.nn.make_with_state(Layers)(), ROWS)

    for found, wanted in zip(jax.tree.leaves(state), expected, strict=True):
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5, atol=1e-6)


def test_state_made_in_replica_takes_values_of_arguments():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    @rx.function
    def count(n):
        def replica(n):
            counter, state = eqx.nn.make_with_state(Counter)()
            state = state.set(counter.index, {"n": n, "is_first": jnp.array(False)})
            return state.get(counter.index)

        return strategy.run(replica, args=(n,))

    found = count(jnp.array(3))

    assert int(found["n"]) == 3
    assert not bool(found["is_first"])


def test_value_of_another_shape_is_still_refused():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    counter, state = eqx.nn.make_with_state(Counter)()

    def replica(state):
        return state.set(counter.index, {"n": jnp.zeros(3, int), "is_first": jnp.array(False)})

    with pytest.raises(ValueError, match="different structures/shapes/dtypes"):
        rx.function(lambda state: strategy.run(replica, args=(state,)))(state)
