import dataclasses

import jax.numpy as jnp
import pytest

import replicax as rx
from replicax._src.collectives.options import plain_reduction, replicas_of, topology_of
from tests.replicas import mirrored

E = rx.distribute.experimental
Options = E.CommunicationOptions


def test_options_have_tensorflows_defaults():
    options = Options()

    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert options.implementation is E.CommunicationImplementation.AUTO


@pytest.mark.parametrize("name", ["ring", "RING", "Ring", E.CommunicationImplementation.RING])
def test_an_implementation_is_named_in_any_case(name):
    assert Options(implementation=name).implementation is E.CommunicationImplementation.RING


def test_the_older_names_are_the_same_things():
    assert E.CollectiveCommunication is E.CommunicationImplementation
    hints = E.CollectiveHints(bytes_per_pack=5, timeout_seconds=2.5)

    assert hints == Options(bytes_per_pack=5, timeout_seconds=2.5)
    assert [i.name for i in E.CollectiveCommunication] == ["AUTO", "RING", "NCCL"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bytes_per_pack": -1}, r"bytes_per_pack must be 0 \(automatic\) or more, got -1"),
        ({"timeout_seconds": 0}, "timeout_seconds must be more than 0, or None, got 0"),
        ({"timeout_seconds": -2.0}, "timeout_seconds must be more than 0, or None, got -2"),
        ({"implementation": "warp"}, "There is no communication implementation 'warp'.*NCCL"),
        ({"implementation": 5}, "There is no communication implementation 5"),
    ],
)
def test_options_without_meaning_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Options(**given)


def test_options_are_values():
    assert Options(bytes_per_pack=3) == Options(bytes_per_pack=3)
    assert hash(Options(bytes_per_pack=3)) == hash(Options(bytes_per_pack=3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().bytes_per_pack = 4


def test_run_options_have_tensorflows_fields():
    options = rx.distribute.RunOptions(experimental_bucketizing_dynamic_shape=True)

    assert options.experimental_enable_dynamic_batch_size is True
    assert options.experimental_bucketizing_dynamic_shape is True
    assert options.experimental_xla_options is None


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
