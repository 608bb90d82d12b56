"""A backend for Ray Train: Ray starts the workers, and replicax connects them.

Unlike Ray's ``JaxTrainer``, it does not call ``jax.distributed.initialize``, whose service
terminates all processes when one is lost. A worker that fails notifies the others, and Ray restarts
all of them.
"""

import contextlib
import importlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from replicax._src.workers import group as _group

if TYPE_CHECKING:  # with a base class of type Any, checkers would accept every attribute

    class _Backend: ...

    class _BackendConfig: ...
else:
    _backend = None
    with contextlib.suppress(ImportError):
        _backend = importlib.import_module("ray.train.backend")
    _Backend = getattr(_backend, "Backend", object)
    _BackendConfig = getattr(_backend, "BackendConfig", object)


class Config(_BackendConfig):
    """The ``backend_config`` that connects Ray Train's workers for a multi-worker strategy.

    Pass it to ``ray.train.v2.api.data_parallel_trainer.DataParallelTrainer`` as
    ``backend_config``. The training function must first create a
    `rx.distribute.MultiWorkerMirroredStrategy()`.

    Example:
        >>> config = rx.integrations.ray.Config()
        >>> config.backend_cls.__name__
        'ReplicaxBackend'
    """

    @property
    def backend_cls(self) -> type:
        """The backend class that Ray calls after starting the workers."""
        return ReplicaxBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """The context manager in which Ray calls the training function."""
        return leaving


class ReplicaxBackend(_Backend):
    """Sends the cluster's addresses and a secret to every worker of a group, through Ray."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Send the cluster's description to the workers; Ray calls this for every new group."""
        del backend_config
        addresses = worker_group.execute(free_address)
        token = secrets.token_hex(32)
        for index in range(len(addresses)):
            worker_group.execute_single(index, describe, addresses, index, token)


def free_address() -> str:
    """Return ``host:port`` with the IP address of this worker's node and a free port."""
    host = importlib.import_module("ray.util").get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def describe(addresses: list[str], index: int, token: str) -> None:
    """Configure this process as worker ``index``; call before it creates a strategy."""
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    os.environ["REPLICAX_TOKEN"] = token


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Notify the other workers if the training function raises.

    Ray's process keeps running then, so they would not see it exit.
    """
    try:
        yield
    except BaseException as error:
        if (group := _group.current()) is not None:
            group.depart(error)
        raise
