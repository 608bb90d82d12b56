"""`track` and `log`: metrics to TensorBoard, Weights & Biases and MLflow, from the first worker."""

import importlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from replicax._src.base.errors import ScopeError, TracingError
from replicax._src.files import storage
from replicax._src.files.paths import is_url, user_path
from replicax._src.state.variables import value_of
from replicax._src.summary.summary import is_first, scalar
from replicax._src.summary.writer import create_file_writer
from replicax._src.values.placement import is_traced

Tracker = Callable[[dict[str, float], int], Any]

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# The trackers that `track` has started, with the functions that end them; None before its first
# call, and empty on all workers but the first.
_started: list[tuple[Tracker, Callable[[], Any]]] | None = None


def track(
    *trackers: str | Tracker,
    folder: str | os.PathLike[str],
    project: str | None = None,
) -> None:
    """Choose where `rx.train.log` writes. Call it on all workers, after the strategy was created.

    Only the first worker writes. The folder keeps the id of the run, so a program that is
    restarted with the same folder continues its run instead of starting another. The settings of
    Weights & Biases (``WANDB_MODE=offline``) and MLflow (``MLFLOW_TRACKING_URI``) apply.

    Args:
        *trackers: ``"tensorboard"``, ``"wandb"`` or ``"mlflow"``, or functions
            ``f(metrics, step)``. They replace those of an earlier call.
        folder: The folder (or URL) of the run: its id and its event files for TensorBoard.
        project: The project of Weights & Biases, or the experiment of MLflow.

    Raises:
        ValueError: A tracker is unknown.
        ModuleNotFoundError: The package of a tracker is not installed.

    Example:
        >>> import tempfile
        >>> rx.train.track(lambda metrics, step: print(step, metrics), folder=tempfile.mkdtemp())
        >>> rx.train.log({"loss": jnp.asarray(0.5)}, step=1)
        1 {'loss': 0.5}
        >>> rx.train.track(folder=tempfile.mkdtemp())  # ends it
    """
    global _started
    unknown = [t for t in trackers if not callable(t) and t not in _STARTERS]
    if unknown:
        raise ValueError(
            f"There is no tracker {unknown[0]!r}: name {', '.join(map(repr, _STARTERS))}, or pass a"
            " function of metrics and step."
        )
    for _, end in _started or ():
        end()
    _started = []
    if is_first():
        place = user_path(folder)
        storage.make_folders(place)
        for tracker in trackers:
            if callable(tracker):
                _started.append((tracker, lambda: None))
            else:
                _started.append(_STARTERS[tracker](place, project))


def log(metrics: Mapping[str, Any], step: Any) -> None:
    """Write metrics of a step to the trackers that `rx.train.track` has chosen.

    Call it on all workers; the first one writes. It waits until the values are computed.

    Args:
        metrics: Numbers by name: Python's, arrays and variables of one element.
        step: The number of the step.

    Raises:
        ScopeError: `rx.train.track` was not called.
        TypeError: A value differs between replicas, or is not one number.

    Example:
        >>> import tempfile
        >>> rx.train.track("tensorboard", folder=tempfile.mkdtemp())
        >>> rx.train.log({"loss": 0.5, "accuracy": np.float32(0.9)}, step=100)
    """
    if any(is_traced(x) for x in (*metrics.values(), step)):
        raise TracingError(
            "rx.train.log was called in a function that is being compiled, where the values are not"
            " known yet. Return them from the function, and log the result."
        )
    if _started is None:
        raise ScopeError(
            "rx.train.log has no tracker. Choose some before:"
            ' `rx.train.track("tensorboard", folder="runs/1")`.'
        )
    if not _started or not is_first():
        return
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    for tracker, _ in _started:
        tracker(numbers, int(np.asarray(value_of(step))))


def _number(name: str, value: Any) -> float:
    array = np.asarray(value_of(value))
    if array.size != 1 or array.dtype.kind not in "biufV":  # V: bfloat16
        raise TypeError(
            f"The metric {name!r} must be one number, got {array.dtype.name} of shape"
            f" {array.shape}."
        )
    return float(array.reshape(()))


def _stored_run_id(folder: str, name: str, make: Callable[[], str]) -> str:
    """Return the run id in a file, which the first start of the run writes with ``make()``."""
    path = f"{folder}/{name}"
    if storage.is_file(path):
        text = storage.read_bytes(path).decode(errors="replace").strip()
        if _RUN_ID.fullmatch(text):
            return text
        raise ValueError(f"{path!r} must contain the id of a run, got {text[:80]!r}. Remove it.")
    text = make()
    storage.put(path, text.encode())
    return text


def _tensorboard(folder: str, project: str | None) -> tuple[Tracker, Callable[[], Any]]:
    writer = create_file_writer(folder)

    def write(metrics: dict[str, float], step: int) -> None:
        with writer.as_default(step):
            for name, value in metrics.items():
                scalar(name, value)

    return write, writer.close


def _wandb(folder: str, project: str | None) -> tuple[Tracker, Callable[[], Any]]:
    wandb = _package("wandb")
    run_id = _stored_run_id(folder, "wandb_run_id", lambda: secrets.token_hex(8))
    local = None if is_url(folder) else folder
    run = wandb.init(project=project, id=run_id, resume="allow", dir=local)
    # Its own step may only grow, and a restart repeats the steps since the last checkpoint.
    run.define_metric("*", step_metric="step")
    return lambda metrics, step: run.log({**metrics, "step": step}), run.finish


def _mlflow(folder: str, project: str | None) -> tuple[Tracker, Callable[[], Any]]:
    mlflow = _package("mlflow")
    if project is not None:
        mlflow.set_experiment(project)
    client = mlflow.MlflowClient()

    def make() -> str:
        experiment = mlflow.get_experiment_by_name(project or "Default")
        name = os.path.basename(folder.rstrip("/"))
        return str(client.create_run(experiment.experiment_id, run_name=name).info.run_id)

    run_id = _stored_run_id(folder, "mlflow_run_id", make)
    client.update_run(run_id, status="RUNNING")

    def write(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            client.log_metric(run_id, name, value, step=step)

    return write, lambda: client.set_terminated(run_id)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f"rx.train.track({name!r}) needs the package {name}: `pip install {name}`."
        ) from None


_STARTERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
