"""Add 1 up over two processes of a Ray cluster on this machine: a trainer's workers, or actors."""

import json
import os
import sys

TOKEN = "a secret"


def add_up():
    import jax.numpy as jnp  # noqa: PLC0415 - after Ray has initialized JAX

    import replicax as rx  # noqa: PLC0415

    strategy = rx.distribute.MultiWorkerMirroredStrategy()

    def one():
        return rx.distribute.get_replica_context().all_reduce("SUM", jnp.float32(1))

    total = strategy.experimental_local_results(strategy.run(one))[0]
    sys.stdout.write(f"SUM={float(total):g}\n")
    sys.stdout.flush()


class Actor:
    """A worker, which is told of the others, or not."""

    def address(self):
        from replicax._src.integrations.ray import free_address  # noqa: PLC0415

        return free_address()

    def train(self, addresses, index):
        if addresses:
            task = {"type": "worker", "index": index}
            os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
            os.environ["REPLICAX_TOKEN"] = TOKEN
        add_up()


def main(mode):
    import ray  # noqa: PLC0415 - not installed where other tests run
    from ray.train import ScalingConfig  # noqa: PLC0415

    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - or a busy machine starves them
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "JAX_PLATFORMS")}
    ray.init(num_cpus=4, runtime_env={"env_vars": environment}, include_dashboard=False)
    if "actors" in mode:
        actors = [ray.remote(Actor).remote() for _ in range(2)]
        addresses = ray.get([actor.address.remote() for actor in actors])
        known = addresses if mode == "actors" else []
        ray.get([actor.train.remote(known, index) for index, actor in enumerate(actors)])
    elif mode == "backend":
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: PLC0415

        import replicax as rx  # noqa: PLC0415

        config = rx.integrations.ray.Config()
        scaling = ScalingConfig(num_workers=2)
        DataParallelTrainer(lambda _: add_up(), backend_config=config, scaling_config=scaling).fit()
    else:
        from ray.train.v2.jax import JaxTrainer  # noqa: PLC0415

        JaxTrainer(add_up, scaling_config=ScalingConfig(num_workers=2)).fit()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "trainer")
