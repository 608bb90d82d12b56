"""`rx.train.track` with the real Weights & Biases and MLflow: a restart continues the run."""

import os
import subprocess
import sys

import pytest

wandb = pytest.importorskip("wandb")
mlflow = pytest.importorskip("mlflow")

pytestmark = pytest.mark.foreign

PROGRAM = """
import sys
import replicax as rx
tracker, folder, step = sys.argv[1:]
rx.train.track(tracker, folder=folder, project="p")
rx.train.log({"loss": 0.5}, int(step))
"""


def start_twice(tracker, folder, **env):
    for step in ("0", "1"):
        command = [sys.executable, "-c", PROGRAM, tracker, str(folder), step]
        subprocess.run(command, check=True, env=os.environ | env, timeout=900)


def test_wandb_continues_its_run(tmp_path):
    start_twice("wandb", tmp_path, WANDB_MODE="offline")

    run_id = (tmp_path / "wandb_run_id").read_text()
    runs = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert runs
    assert all(name.endswith(run_id) for name in runs)


def test_mlflow_continues_its_run(tmp_path):
    place = f"file://{tmp_path}/store"
    settings = {"MLFLOW_TRACKING_URI": place, "MLFLOW_ALLOW_FILE_STORE": "true"}
    start_twice("mlflow", tmp_path / "run", **settings)

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient(place)
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(0, 0.5), (1, 0.5)]
