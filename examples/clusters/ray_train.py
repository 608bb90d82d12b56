"""Training under Ray's JaxTrainer; after a failure, Ray restarts it from the last checkpoint.

python examples/clusters/ray_train.py --storage /shared/runs    # a folder that all nodes see
"""

import argparse
from typing import Any

import ray
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

import replicax as rx


def train(config: dict[str, Any]) -> None:
    """Run in every worker; Ray calls it again after a failure."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy()  # finds the workers that Ray started
    with strategy.scope():
        weights = rx.Variable(0.0, aggregation=rx.VariableAggregation.MEAN)
        step = rx.Variable(0)
    state = rx.train.Checkpoint(weights=weights, step=step)
    if last := ray.train.get_checkpoint():
        state.read(f"{last.path}/state")
    while step < config["steps"]:
        strategy.run(lambda: weights.assign_add(1.0))
        step.assign_add(1)
        folder = f"{config['storage']}/step-{int(step)}"
        state.write(f"{folder}/state")  # all workers write into one folder, and worker 0 reports it
        is_first = ray.train.get_context().get_world_rank() == 0
        checkpoint = Checkpoint.from_directory(folder) if is_first else None
        ray.train.report({"step": int(step), "weights": float(weights)}, checkpoint=checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", default="/tmp/ray-runs")
    parser.add_argument("--steps", type=int, default=6)
    options = vars(parser.parse_args())
    result = JaxTrainer(
        train,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=options["storage"], failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()
    print(result.metrics)
