"""Add 1 up over two workers of Ray's JaxTrainer, on a Ray cluster of this machine."""

import os
import sys


def train():
    import jax.numpy as jnp  # noqa: PLC0415 - after Ray has initialized JAX

    import replicax as rx  # noqa: PLC0415

    strategy = rx.distribute.MultiWorkerMirroredStrategy()

    def one():
        return rx.distribute.get_replica_context().all_reduce("SUM", jnp.float32(1))

    total = strategy.experimental_local_results(strategy.run(one))[0]
    sys.stdout.write(f"SUM={float(total):g}\n")
    sys.stdout.flush()


def main():
    import ray  # noqa: PLC0415 - not installed where other tests run
    from ray.train import ScalingConfig  # noqa: PLC0415
    from ray.train.v2.jax import JaxTrainer  # noqa: PLC0415

    environment = {name: os.environ[name] for name in ("PYTHONPATH", "JAX_PLATFORMS")}
    ray.init(num_cpus=4, runtime_env={"env_vars": environment}, include_dashboard=False)
    JaxTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()


if __name__ == "__main__":
    main()
