"""Steps with variables in the memory of the host, compiled for devices that are not here."""

import jax.numpy as jnp
import pytest

import replicax as rx
from tests.preflight.needs import needs_compiler, needs_cuda
from tests.replicas import mirrored

WIDTH = 1024
SIZE = WIDTH * WIDTH * 4


def report(name, *, offloaded):
    strategy = mirrored(2)
    with strategy.scope():
        weight = rx.Variable(jnp.zeros((WIDTH, WIDTH)), name="weight")
        if offloaded:
            with rx.offload():
                moment = rx.Variable(jnp.zeros((WIDTH, WIDTH)), name="moment")
        else:
            moment = rx.Variable(jnp.zeros((WIDTH, WIDTH)), name="moment")

    def replica(x):
        def loss():
            return jnp.square(jnp.tanh(x @ weight.read_value())).mean()

        gradient = rx.grad(loss, weight)()
        gradient = rx.distribute.get_replica_context().all_reduce("SUM", gradient)
        moment.assign(0.9 * moment.read_value() + gradient)
        weight.assign_sub(moment.read_value())

    return rx.preflight(lambda x: strategy.run(replica, (x,)), (jnp.ones((8, WIDTH)),), name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("v5e:2x2", marks=needs_compiler),
        pytest.param("h100:1x2", marks=[needs_cuda, pytest.mark.slow]),
    ],
)
def test_offloaded_variables_take_memory_of_the_host(name):
    usual, moved = (report(name, offloaded=x) for x in (False, True))

    assert (usual.compiles, moved.compiles) == (True, True), moved.error
    assert (usual.memory.host, moved.memory.host) == (0, SIZE)
    assert moved.memory.arguments == usual.memory.arguments - SIZE
    assert "4 MiB in the memory of the host" in " ".join(str(moved).replace("│", " ").split())
