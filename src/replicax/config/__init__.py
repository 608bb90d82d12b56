"""``rx.config``: the devices of this machine, virtual ones, and whether functions compile."""

from typing import TYPE_CHECKING

from replicax._lazy import on_demand
from replicax.config import experimental
from replicax.functions._modes import functions_run_eagerly, run_functions_eagerly
from replicax.topology._config import (
    LogicalDevice,
    LogicalDeviceConfiguration,
    PhysicalDevice,
    get_logical_device_configuration,
    get_soft_device_placement,
    get_visible_devices,
    list_logical_devices,
    list_physical_devices,
    set_logical_device_configuration,
    set_soft_device_placement,
    set_visible_devices,
)
from replicax.topology._system import experimental_connect_to_cluster

experimental_functions_run_eagerly = functions_run_eagerly
experimental_run_functions_eagerly = run_functions_eagerly

__all__ = [
    "LogicalDevice",
    "LogicalDeviceConfiguration",
    "PhysicalDevice",
    "experimental",
    "experimental_connect_to_cluster",
    "experimental_functions_run_eagerly",
    "experimental_run_functions_eagerly",
    "functions_run_eagerly",
    "get_logical_device_configuration",
    "get_soft_device_placement",
    "get_visible_devices",
    "list_logical_devices",
    "list_physical_devices",
    "run_functions_eagerly",
    "set_logical_device_configuration",
    "set_soft_device_placement",
    "set_visible_devices",
]

__dir__ = __all__.copy

_ABSENT = {
    "experimental_connect_to_host": (
        "No program drives the devices of another machine: start it on each, with"
        " `replicax run` or TF_CONFIG, and use `rx.distribute.MultiWorkerMirroredStrategy`."
    ),
    "optimizer": (
        "There are no graph optimizers: XLA compiles whatever is in an `rx.function`. Its own"
        " options are in the environment variable XLA_FLAGS."
    ),
    "threading": (
        "XLA has as many threads as the machine has cores; set NPROC in the environment, before"
        " the program starts, for another number."
    ),
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
