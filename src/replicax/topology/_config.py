"""What ``rx.config`` offers: which devices a machine has, and how many virtual ones to make."""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from replicax._errors import PlacementError, ScopeError
from replicax._jax_private import backend_is_initialized, setting
from replicax.topology._devices import KINDS, local_devices, named_devices
from replicax.topology._virtual import planned_cpu_devices


@dataclass(frozen=True)
class PhysicalDevice:
    """A device of the machine. All of its CPUs count as one.

    Attributes:
        name: Such as ``/physical_device:CPU:0``.
        device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``.

    Example:
        >>> rx.config.list_physical_devices("CPU")[0]
        PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')
    """

    name: str
    device_type: str


@dataclass(frozen=True)
class LogicalDevice:
    """A device that programs see: a GPU, a TPU core, or a virtual CPU device.

    Attributes:
        name: Such as ``/device:CPU:1``; strategies and `rx.device` take it.
        device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``.

    Example:
        >>> rx.config.list_logical_devices("CPU")[1]
        LogicalDevice(name='/device:CPU:1', device_type='CPU')
    """

    name: str
    device_type: str


@dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """One virtual device to make out of a physical one.

    Attributes:
        memory_limit: Of no use here, and refused: CPU devices share the memory of the process.
        experimental_priority: Of no use here, and refused.

    Example:
        >>> rx.config.LogicalDeviceConfiguration()
        LogicalDeviceConfiguration(memory_limit=None, experimental_priority=None)
    """

    memory_limit: int | None = None
    experimental_priority: int | None = None


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The devices of this machine, however many virtual ones they are split into.

    No backend starts, unless accelerators are asked for on a machine with an accelerator plugin.

    Args:
        device_type: Only those of this type: ``"CPU"``, ``"GPU"`` or ``"TPU"``.

    Returns:
        The CPU first, then the accelerators.

    Example:
        >>> rx.config.list_physical_devices()
        [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
    """
    return [
        PhysicalDevice(f"/physical_device:{kind}:{index}", kind)
        for kind in _selected_kinds(device_type)
        for index in range(1 if kind == "CPU" else _num_accelerators(kind))
    ]


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """The devices on which replicas can run. This starts JAX's backend.

    Args:
        device_type: Only those of this type: ``"CPU"``, ``"GPU"`` or ``"TPU"``.

    Returns:
        The CPU devices first, then the accelerators.

    Example:
        >>> len(rx.config.list_logical_devices("CPU"))
        8
    """
    return [
        LogicalDevice(f"/device:{kind}:{index}", kind)
        for kind in _selected_kinds(device_type)
        for index in range(len(named_devices(kind)))
    ]


def set_logical_device_configuration(
    device: PhysicalDevice, logical_devices: Sequence[LogicalDeviceConfiguration]
) -> None:
    """Split the CPU into virtual devices, to try several replicas without the hardware.

    Args:
        device: The CPU, as `list_physical_devices` gives it.
        logical_devices: One entry for each virtual device.

    Raises:
        PlacementError: ``device`` is not the CPU, or an entry asks for what a CPU cannot do.
        ScopeError: JAX has started with another number of devices; this must come first.

    Example:
        >>> [cpu] = rx.config.list_physical_devices("CPU")
        >>> eight = [rx.config.LogicalDeviceConfiguration()] * 8
        >>> rx.config.set_logical_device_configuration(cpu, eight)
        >>> len(rx.config.list_logical_devices("CPU"))
        8
    """
    _require_cpu(device)
    count = _num_virtual(logical_devices)
    if not backend_is_initialized():
        jax.config.update("jax_num_cpu_devices", count)
    elif (started := len(local_devices("CPU"))) != count:
        raise ScopeError(
            f"Cannot make {count} logical devices: JAX has already started with {started} CPU"
            " device(s), and their number cannot change. Call"
            " `rx.config.set_logical_device_configuration` at the top of the program, before the"
            " first array, strategy or list of logical devices."
        )


def get_logical_device_configuration(
    device: PhysicalDevice,
) -> list[LogicalDeviceConfiguration] | None:
    """The virtual devices that a physical one is split into, or ``None`` if it is left whole.

    Args:
        device: As `list_physical_devices` gives it.

    Returns:
        One entry for each virtual device.

    Example:
        >>> [cpu] = rx.config.list_physical_devices("CPU")
        >>> rx.config.get_logical_device_configuration(cpu)[:1]
        [LogicalDeviceConfiguration(memory_limit=None, experimental_priority=None)]
    """
    _require_known(device)
    count = planned_cpu_devices() if device.device_type == "CPU" else None
    return None if count is None else [LogicalDeviceConfiguration()] * count


def _selected_kinds(device_type: str | None) -> list[str]:
    cpu_first = sorted(KINDS)
    return [kind for kind in cpu_first if device_type is None or kind == device_type.upper()]


def _num_accelerators(kind: str) -> int:
    return len(local_devices(kind)) if backend_is_initialized() or _may_have(kind) else 0


def _may_have(kind: str) -> bool:
    """Whether JAX could find devices of this kind, as far as can be told without starting it."""
    platforms = (setting("jax_platforms") or "").replace("cuda", "gpu").replace("rocm", "gpu")
    if platforms and kind.lower() not in platforms.split(","):
        return False
    if kind == "TPU":
        return importlib.util.find_spec("libtpu") is not None
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or importlib.util.find_spec("jax_plugins") is not None


def _require_known(device: PhysicalDevice) -> None:
    if not isinstance(device, PhysicalDevice):
        raise PlacementError(
            f"Expected a device from `rx.config.list_physical_devices()`, but got {device!r}."
        )


def _require_cpu(device: PhysicalDevice) -> None:
    _require_known(device)
    if device.name != "/physical_device:CPU:0":
        raise PlacementError(
            f"Cannot split {device.name}: JAX gives a GPU or TPU core to a program as a whole."
            " Only the CPU, `rx.config.list_physical_devices('CPU')[0]`, has virtual devices."
        )


def _num_virtual(logical_devices: Sequence[LogicalDeviceConfiguration]) -> int:
    for entry in logical_devices:
        if not isinstance(entry, LogicalDeviceConfiguration):
            raise PlacementError(
                f"Expected a list of `rx.config.LogicalDeviceConfiguration()`, one for each logical"
                f" device, but it holds {entry!r}."
            )
        if entry != LogicalDeviceConfiguration():
            raise PlacementError(
                f"{entry} asks for a memory limit or a priority, which a CPU device does not have."
                " Write `rx.config.LogicalDeviceConfiguration()`."
            )
    if not logical_devices:
        raise PlacementError(
            "No logical device in the list. Expected one `rx.config.LogicalDeviceConfiguration()`"
            " for each device to make, for example `[rx.config.LogicalDeviceConfiguration()] * 4`."
        )
    return len(logical_devices)
