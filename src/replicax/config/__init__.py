"""``rx.config``: physical, virtual and visible devices, and eager execution of functions."""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.functions.modes import functions_run_eagerly, run_functions_eagerly
from replicax._src.topology.config import (
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
from replicax._src.topology.tpu_system import experimental_connect_to_cluster
from replicax.config import experimental

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
        "No program controls the devices of another machine: start it on each, with"
        " `replicax run` or TF_CONFIG, and use `rx.distribute.MultiWorkerMirroredStrategy`."
    ),
    "optimizer": (
        "There are no graph optimizers: XLA compiles the body of an `rx.function`. Set XLA's"
        " options in the environment variable XLA_FLAGS."
    ),
    "threading": (
        "XLA uses one thread per core; to change the number, set NPROC in the environment before"
        " the program starts."
    ),
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
