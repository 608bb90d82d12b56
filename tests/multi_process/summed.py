"""Add 1 up over all replicas, and print the sum, as a worker of whatever cluster there is."""

import os
import sys

import jax
import jax.numpy as jnp

import replicax as rx


def connect(how):
    """Connect the processes by another library, before the strategy is made."""
    if how == "initialized":
        index = int(os.environ["INDEX"])
        jax.distributed.initialize(os.environ["ADDRESS"], 2, index)
    if how == "torch":
        from torch import distributed  # noqa: PLC0415 - few tests need it

        address, index = os.environ["ADDRESS"], int(os.environ["INDEX"])
        distributed.init_process_group("gloo", address, rank=index, world_size=2)
    if how == "keras":
        import keras  # noqa: PLC0415 - it chooses its backend by the environment

        addresses = f"{os.environ['ADDRESS']},127.0.0.1:1"
        keras.distribution.initialize(addresses, 2, int(os.environ["INDEX"]))


def main(how):
    connect(how)
    if how == "gce":
        del os.environ["TPU_SKIP_MDS_QUERY"]  # JAX sets it on machines without TPU chips
    if how == "tpu":
        resolver = rx.distribute.cluster_resolver.TPUClusterResolver(tpu="")
        rx.config.experimental_connect_to_cluster(resolver)
        rx.tpu.experimental.initialize_tpu_system(resolver)
        strategy = rx.distribute.TPUStrategy(resolver)
    elif how == "slurm":
        resolver = rx.distribute.cluster_resolver.SlurmClusterResolver()
        strategy = rx.distribute.MultiWorkerMirroredStrategy(resolver)
    elif how == "kubernetes":
        resolver = rx.distribute.cluster_resolver.KubernetesClusterResolver(
            {"worker": ["app=train"]}, tf_server_port=int(os.environ["PORT"])
        )
        resolver.task_type, resolver.task_id = "worker", int(os.environ["INDEX"])
        strategy = rx.distribute.MultiWorkerMirroredStrategy(resolver)
    else:
        strategy = rx.distribute.MultiWorkerMirroredStrategy()
        spec = strategy.cluster_resolver.cluster_spec()
        workers = spec.num_tasks("worker") if spec else 1  # no cluster: alone
        assert workers == strategy.num_replicas_in_sync, workers

    def one():
        context = rx.distribute.get_replica_context()
        return context.all_reduce("SUM", jnp.float32(1))

    total = strategy.experimental_local_results(strategy.run(one))[0]
    print(f"SUM={float(total):g}", flush=True)  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "environment")
