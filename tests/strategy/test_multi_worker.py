"""MultiWorkerMirroredStrategy without a cluster, and where it cannot be made."""

import json

import jax.numpy as jnp
import pytest

import replicax as rx
from tests.fresh_process import run_fresh

CLUSTER = {
    "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
    "task": {"type": "worker", "index": 0},
}


def test_without_a_cluster_there_is_one_worker_with_one_cpu_device():
    strategy = rx.distribute.MultiWorkerMirroredStrategy()

    assert strategy.num_replicas_in_sync == 1
    assert strategy.is_chief
    assert strategy.extended.should_checkpoint
    assert strategy.cluster_resolver.task_type is None
    assert strategy.cluster_resolver.cluster_spec().as_dict() == {}
    assert float(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(())), axis=None)) == 1.0


def test_a_resolver_without_a_cluster_is_kept():
    resolver = rx.distribute.cluster_resolver.SimpleClusterResolver(rx.train.ClusterSpec({}))

    strategy = rx.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)

    assert strategy.cluster_resolver is resolver


def test_more_cpu_devices_come_from_the_environment():
    done = run_fresh(
        """
        import replicax as rx
        print(rx.distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync)
        """,
        REPLICAX_CPU_DEVICES="3",
    )

    assert done.stdout.strip() == "3", done.stderr


@pytest.mark.parametrize("name", ["AUTO", "RING", "NCCL"])
def test_the_older_forms_take_a_communication(name):
    communication = rx.distribute.experimental.CollectiveCommunication[name]

    current = rx.distribute.experimental.MultiWorkerMirroredStrategy(communication=communication)
    older = rx.compat.v1.distribute.experimental.MultiWorkerMirroredStrategy(communication)

    assert isinstance(current, rx.distribute.MultiWorkerMirroredStrategy)
    assert isinstance(older, rx.compat.v1.distribute.Strategy)
    assert current.num_replicas_in_sync == older.num_replicas_in_sync == 1


def test_in_a_cluster_it_must_come_before_the_first_array(monkeypatch):
    jnp.zeros(())  # JAX has started
    monkeypatch.setenv("TF_CONFIG", json.dumps(CLUSTER))

    with pytest.raises(rx.errors.ScopeError, match="made after JAX had started"):
        rx.distribute.MultiWorkerMirroredStrategy()


def test_a_parameter_server_is_refused(monkeypatch):
    config = {**CLUSTER, "task": {"type": "ps", "index": 0}}
    config["cluster"] = {**CLUSTER["cluster"], "ps": ["127.0.0.1:3"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    with pytest.raises(rx.errors.ClusterError, match="parameter server"):
        rx.distribute.MultiWorkerMirroredStrategy()


def test_an_evaluator_is_a_worker_of_its_own(monkeypatch):
    config = {**CLUSTER, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    assert rx.distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync == 1


def test_every_multi_worker_strategy_is_one_of_the_older_form_as_in_tensorflow():
    older = rx.distribute.experimental.MultiWorkerMirroredStrategy
    strategy = rx.distribute.MultiWorkerMirroredStrategy()

    assert isinstance(strategy, older)
    assert isinstance(older(), rx.distribute.MultiWorkerMirroredStrategy)
    assert not isinstance(rx.distribute.get_strategy(), older)


@pytest.mark.parametrize("name", ["cluster_resolver", "communication_options"])
@pytest.mark.parametrize("value", [5, "NCCL"])
def test_arguments_of_another_class_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*got {value!r}"):
        rx.distribute.MultiWorkerMirroredStrategy(**{name: value})
