"""A backend of Ray Train: Ray starts the workers, and replicax connects them.

Config: the ``backend_config`` of a Ray trainer.

Unlike Ray's ``JaxTrainer``, it does not call ``jax.distributed.initialize``, whose service ends all
processes when one is lost. A worker that fails notifies the others, and Ray restarts all of them.
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

from replicax.workers import _group

if TYPE_CHECKING:  # with a base of any type, checkers would accept every attribute

    class _Backend: ...

    class _BackendConfig: ...
else:
    _backend = None
    with contextlib.suppress(ImportError):
        _backend = importlib.import_module("ray.train.backend")
    _Backend = getattr(_backend, "Backend", object)
    _BackendConfig = getattr(_backend, "BackendConfig", object)


class Config(_BackendConfig):
    """Has Ray Train's workers find each other, so that a multi-worker strategy spans them.

    Give it to ``ray.train.v2.api.data_parallel_trainer.DataParallelTrainer`` as
    ``backend_config``. The training function then makes a
    `rx.distribute.MultiWorkerMirroredStrategy()` as its first act.

    Example:
        >>> config = rx.integrations.ray.Config()
        >>> config.backend_cls.__name__
        'ReplicaxBackend'
    """

    @property
    def backend_cls(self) -> type:
        """The backend that Ray calls when it has started the workers."""
        return ReplicaxBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """What Ray calls the training function in."""
        return leaving


class ReplicaxBackend(_Backend):
    """Sends the cluster's addresses and a secret to every worker of a group, through Ray."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Describe the cluster to the workers; Ray calls it for every new group of them."""
        del backend_config
        addresses = worker_group.execute(free_address)
        token = secrets.token_hex(32)
        for index in range(len(addresses)):
            worker_group.execute_single(index, describe, addresses, index, token)


def free_address() -> str:
    """Return an address of this worker's node with a free port."""
    host = importlib.import_module("ray.util").get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def describe(addresses: list[str], index: int, token: str) -> None:
    """Make this process number ``index`` of the cluster; before it makes a strategy."""
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    os.environ["REPLICAX_TOKEN"] = token


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Notify the other workers if the training function fails: Ray's process keeps running."""
    try:
        yield
    except BaseException as error:
        if (group := _group.current()) is not None:
            group.depart(error)
        raise
