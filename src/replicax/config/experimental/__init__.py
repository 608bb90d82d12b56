"""Names that TensorFlow keeps under ``tf.config.experimental``.

Example:
    >>> rx.config.experimental.get_memory_info("CPU:0")["peak"]
    0
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.functions.modes import (
    enable_tensor_float_32_execution,
    tensor_float_32_execution_enabled,
)
from replicax._src.topology.config import (
    LogicalDeviceConfiguration,
    get_device_details,
    get_logical_device_configuration,
    get_memory_growth,
    get_memory_info,
    get_memory_usage,
    get_visible_devices,
    list_logical_devices,
    list_physical_devices,
    set_logical_device_configuration,
    set_memory_growth,
    set_visible_devices,
)

VirtualDeviceConfiguration = LogicalDeviceConfiguration
get_virtual_device_configuration = get_logical_device_configuration
set_virtual_device_configuration = set_logical_device_configuration

__all__ = [
    "VirtualDeviceConfiguration",
    "enable_tensor_float_32_execution",
    "get_device_details",
    "get_memory_growth",
    "get_memory_info",
    "get_memory_usage",
    "get_virtual_device_configuration",
    "get_visible_devices",
    "list_logical_devices",
    "list_physical_devices",
    "set_memory_growth",
    "set_virtual_device_configuration",
    "set_visible_devices",
    "tensor_float_32_execution_enabled",
]

__dir__ = __all__.copy

_ABSENT = {
    "ClusterDeviceFilters": "Every worker uses only its own devices, so there are no filters.",
    "disable_mlir_bridge": "There is no such bridge: JAX hands its programs to XLA itself.",
    "enable_mlir_bridge": "There is no such bridge: JAX hands its programs to XLA itself.",
    "enable_op_determinism": (
        "XLA is deterministic on CPUs and TPUs. For GPUs set"
        " XLA_FLAGS=--xla_gpu_deterministic_ops=true in the environment; for random numbers and"
        " the order of datasets write `rx.random.set_seed(seed)`."
    ),
    "get_device_policy": "Arrays are not moved silently here: write `jax.device_put(x, device)`.",
    "get_synchronous_execution": (
        "JAX always runs ahead of Python: `jax.block_until_ready(x)` waits for a result."
    ),
    "reset_memory_stats": "JAX does not reset its counts; see `device.memory_stats()`.",
    "set_device_policy": "Arrays are not moved silently here: write `jax.device_put(x, device)`.",
    "set_synchronous_execution": (
        "JAX always runs ahead of Python: `jax.block_until_ready(x)` waits for a result."
    ),
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
