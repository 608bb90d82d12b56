"""``rx.config``: the devices of this machine, virtual ones, and whether functions compile."""

from replicax.function._eagerly import functions_run_eagerly, run_functions_eagerly
from replicax.topology._config import (
    LogicalDevice,
    LogicalDeviceConfiguration,
    PhysicalDevice,
    get_logical_device_configuration,
    list_logical_devices,
    list_physical_devices,
    set_logical_device_configuration,
)
from replicax.topology._system import experimental_connect_to_cluster

__all__ = [
    "LogicalDevice",
    "LogicalDeviceConfiguration",
    "PhysicalDevice",
    "experimental_connect_to_cluster",
    "functions_run_eagerly",
    "get_logical_device_configuration",
    "list_logical_devices",
    "list_physical_devices",
    "run_functions_eagerly",
    "set_logical_device_configuration",
]

__dir__ = __all__.copy
