"""The v1 form of TPUStrategy."""

import jax.numpy as jnp

import replicax as rx

v1 = rx.compat.v1.distribute


def test_it_is_a_v1_strategy_that_compiles_its_runs():
    strategy = v1.experimental.TPUStrategy(steps_per_run=3)
    traced = []

    def step(x):
        traced.append(1)
        return x + 1

    for _ in range(2):
        result = strategy.run(step, args=(jnp.float32(1),))

    assert isinstance(strategy, v1.Strategy)
    assert not isinstance(strategy, rx.distribute.Strategy)
    assert len(traced) == 1
    assert float(strategy.reduce("SUM", result)) == 2.0 * strategy.num_replicas_in_sync
    assert strategy.steps_per_run == 3
    assert isinstance(rx.distribute.TPUStrategy(), rx.distribute.Strategy)
