"""Each way to save memory, in the bytes that preflight reports for GPUs."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.preflight.needs import needs_cuda
from tests.replicas import context, mirrored

LAYERS, WIDTH, HIDDEN, ROWS = 6, 512, 4096, 4096
WEIGHTS, BATCH = 4 * LAYERS * 2 * WIDTH * HIDDEN, 4 * ROWS * WIDTH  # bytes
RECIPES = ["none", "sharded", "offload", "remat", "accumulate", "mixed_precision"]


def report_of(recipe, devices):
    """A step of some layers with Adam, compiled with one recipe."""
    strategy = mirrored(2, variable_policy="sharded" if recipe == "sharded" else "mirrored")
    zeros = [jnp.zeros(s) for _ in range(LAYERS) for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    with strategy.scope():
        weights = [rx.Variable(x) for x in zeros]
        if recipe == "offload":
            with rx.offload():
                slots = [[rx.Variable(x) for x in zeros] for _ in range(2)]
        else:
            slots = [[rx.Variable(x) for x in zeros] for _ in range(2)]

    def layer(x, up, down):
        return x + jnp.tanh(x @ up) @ down

    called = rx.remat(layer) if recipe == "remat" else layer

    def loss_fn(x):
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = called(x, up.read_value(), down.read_value())
        return rx.nn.mean_loss(jnp.square(x.astype("float32")).mean(axis=-1))

    compute = rx.mixed_precision(loss_fn) if recipe == "mixed_precision" else loss_fn
    both = rx.value_and_grad(compute, weights)
    both = rx.accumulate(both, 4) if recipe == "accumulate" else both

    def replica_step(x):
        loss, gradients = both(x)
        gradients = context().all_reduce("SUM", gradients)
        for w, m, v, g in zip(weights, *slots, gradients, strict=True):
            m.assign(0.9 * m + 0.1 * g)
            v.assign(0.99 * v + 0.01 * g * g)
            w.assign_sub(0.01 * m.read_value() / (jnp.sqrt(v.read_value()) + 1e-8))
        return loss

    @rx.function
    def step(x):
        return strategy.reduce("SUM", strategy.run(replica_step, (x,)), axis=None)

    rows = strategy.experimental_distribute_values_from_function(
        lambda _: np.zeros((ROWS, WIDTH), np.float32)
    )
    return rx.preflight(step, (rows,), devices)


@pytest.mark.slow
@needs_cuda
def test_each_recipe_takes_less_memory():
    memory = {recipe: report_of(recipe, "h100:1x8").memory for recipe in RECIPES}

    usual = memory.pop("none")
    assert usual.arguments == 3 * WEIGHTS + BATCH
    for recipe, found in memory.items():
        assert found.total < usual.total, recipe
    assert memory["sharded"].arguments == 3 * WEIGHTS / 8 + BATCH
    assert memory["offload"].arguments == WEIGHTS + BATCH
    assert memory["offload"].host == 2 * WEIGHTS
    for recipe in ("remat", "accumulate", "mixed_precision"):
        assert memory[recipe].arguments == usual.arguments
        assert memory[recipe].temporaries < 0.9 * usual.temporaries
