"""Ray Train with three workers that it starts again whenever one is lost: recovering_ray FOLDER."""

import os
import signal
import sys

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from recovering import train_with_ray


def main(folder):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    variables = {name: os.environ[name] for name in ("PACE", "EVERY", "PYTHONPATH")}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    TorchTrainer(
        train_with_ray,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RunConfig(
            storage_path=f"{folder}/storage",
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
