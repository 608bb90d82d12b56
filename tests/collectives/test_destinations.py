import jax.numpy as jnp

import replicax as rx
from replicax.collectives._options import plain_reduction, replicas_of, topology_of
from tests.replicas import mirrored

D = rx.distribute
PerReplica = D.PerReplica


def test_the_sum_of_zero_is_zero_however_often():
    assert plain_reduction(D.ReduceOp.SUM, 0, 4) == 0
    assert plain_reduction(D.ReduceOp.SUM, 5, 1) == 5
    assert plain_reduction(D.ReduceOp.MEAN, 5, 4) == 5


def test_destinations_know_their_replicas():
    with mirrored(3).scope():
        variable = rx.Variable(0.0)

    assert replicas_of(variable) == 3
    assert replicas_of(["CPU:0", "CPU:1"]) == 2
    assert replicas_of("CPU:0") == 1
    assert replicas_of(jnp.ones(2)) == 1
    assert topology_of(PerReplica([jnp.ones(2)] * 2)) is None
