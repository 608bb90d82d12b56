"""A mesh that the program sets with `jax.set_mesh` is refused by name, and does no harm."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import replicax as rx
from tests.replicas import context


def total(x):
    return context().all_reduce("SUM", x)


WAYS = {
    "eager": lambda strategy, x: strategy.reduce("MEAN", strategy.run(total, args=(x,)), axis=None),
    "compiled": lambda strategy, x: strategy.reduce(
        "MEAN", rx.function(lambda: strategy.run(total, args=(x,)))(), axis=None
    ),
    "dataset": lambda strategy, x: strategy.reduce(
        "SUM",
        next(iter(strategy.experimental_distribute_dataset(rx.data.Dataset.range(1, 5).batch(4)))),
        axis=0,
    ),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_another_mesh_is_refused_by_name(two, way, kind):
    mesh = jax.make_mesh((4,), ("rows",), (kind,), devices=jax.devices()[:4])
    x = jnp.float32(5)

    with (
        jax.set_mesh(mesh),
        pytest.raises(
            rx.errors.PlacementError, match=r"`jax.set_mesh` has set a mesh \{'rows': 4\}"
        ),
    ):
        way(two, x)

    with jax.set_mesh(mesh), jax.set_mesh(None):
        assert way(two, x) == 10
    assert way(two, x) == 10
