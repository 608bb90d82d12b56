"""Implementation of ``rx.config``: physical, logical and virtual devices."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from replicax._src.base.errors import PlacementError, ScopeError
from replicax._src.compat.jax import backend_is_initialized, setting
from replicax._src.topology.devices import KINDS, local_devices, named_devices, resolve
from replicax._src.topology.virtual_devices import planned_cpu_devices


@dataclass(frozen=True)
class PhysicalDevice:
    """A device of the machine. All of its CPUs count as one device.

    Attributes:
        name: A name such as ``/physical_device:CPU:0``.
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
        name: A name such as ``/device:CPU:1``, which strategies and `rx.device` accept.
        device_type: ``"CPU"``, ``"GPU"`` or ``"TPU"``.

    Example:
        >>> rx.config.list_logical_devices("CPU")[1]
        LogicalDevice(name='/device:CPU:1', device_type='CPU')
    """

    name: str
    device_type: str


@dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """The configuration of one virtual device of a physical one.

    Attributes:
        memory_limit: Not supported, and rejected: CPU devices share the memory of the process.
        experimental_priority: Not supported, and rejected.
        experimental_device_ordinal: Not supported, and rejected.

    Example:
        >>> rx.config.LogicalDeviceConfiguration().memory_limit is None
        True
    """

    memory_limit: int | None = None
    experimental_priority: int | None = None
    experimental_device_ordinal: int | None = None


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Return the devices of this machine, not counting virtual ones.

    This initializes no backend, unless there is an accelerator plugin and accelerators are listed.

    Args:
        device_type: Restricts the list to this type: ``"CPU"``, ``"GPU"`` or ``"TPU"``.

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
    """Return the devices on which replicas can run. This initializes JAX's backend.

    Args:
        device_type: Restricts the list to this type: ``"CPU"``, ``"GPU"`` or ``"TPU"``.

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
    """Split the CPU into virtual devices, to test several replicas without accelerators.

    Args:
        device: The CPU, from `list_physical_devices`.
        logical_devices: One entry per virtual device.

    Raises:
        PlacementError: If ``device`` is not the CPU, or an entry has options that a CPU lacks.
        ScopeError: If JAX is already initialized with another number of devices; call this first.

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
    """Return the virtual devices of a physical one, or ``None`` if it is not split.

    Args:
        device: A device from `list_physical_devices`.

    Returns:
        One entry per virtual device.

    Example:
        >>> [cpu] = rx.config.list_physical_devices("CPU")
        >>> len(rx.config.get_logical_device_configuration(cpu))
        8
    """
    _require_known(device)
    count = planned_cpu_devices() if device.device_type == "CPU" else None
    return None if count is None else [LogicalDeviceConfiguration()] * count


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Return the devices that this program may use: all that `set_visible_devices` did not hide.

    Args:
        device_type: Restricts the list to this type: ``"CPU"``, ``"GPU"`` or ``"TPU"``.

    Example:
        >>> rx.config.get_visible_devices("GPU")
        []
    """
    return list_physical_devices(device_type)


def set_visible_devices(
    devices: PhysicalDevice | Sequence[PhysicalDevice], device_type: str | None = None
) -> None:
    """Set the devices that this program may use. All or none of the GPUs or TPUs can be hidden.

    Args:
        devices: The devices to keep.
        device_type: Restricts hiding to devices of this type.

    Raises:
        PlacementError: If a device does not exist, or this would hide the CPU or some of several.
        ScopeError: If JAX is already initialized; call this first.

    Example:
        >>> rx.config.set_visible_devices([], "GPU")
        >>> rx.config.get_visible_devices("GPU")
        []
    """
    visible = [devices] if isinstance(devices, PhysicalDevice) else list(devices)
    now = list_physical_devices(device_type)
    for device in visible:
        if device not in now:
            raise PlacementError(f"Unrecognized device: {device!r}. There are {now}.")
    if len(visible) == len(now):
        return
    if backend_is_initialized():
        raise ScopeError(
            f"Visible devices cannot be changed from {now} to {visible} after JAX has started. Call"
            " `rx.config.set_visible_devices` at the top of the program."
        )
    jax.config.update("jax_platforms", ",".join(_remaining_platforms(visible, now)))


def _remaining_platforms(
    visible: Sequence[PhysicalDevice], now: Sequence[PhysicalDevice]
) -> list[str]:
    """Return the values of ``jax_platforms`` that leave the visible devices."""
    hidden = {device.device_type for device in now} - {device.device_type for device in visible}
    cut = [device for device in now if device not in visible and device.device_type not in hidden]
    if cut or "CPU" in hidden:
        raise PlacementError(
            f"Cannot hide {', '.join(d.name for d in cut) or 'the CPU'}: JAX takes all devices of a"
            " kind, and always the CPU. Name the devices of the strategy, such as"
            " `MirroredStrategy(['GPU:0'])`, or set CUDA_VISIBLE_DEVICES before the program starts."
        )
    names = {"CPU": "cpu", "GPU": "cuda", "TPU": "tpu"}
    left = {device.device_type for device in list_physical_devices()} - hidden
    return [names[kind] for kind in sorted(left, reverse=True)]


_soft_placement = [True]


def get_soft_device_placement() -> bool:
    """Return the last value of `set_soft_device_placement`; initially True, as in TensorFlow.

    Example:
        >>> rx.config.get_soft_device_placement()
        True
    """
    return _soft_placement[0]


def set_soft_device_placement(enabled: bool) -> None:  # noqa: FBT001 - TensorFlow's signature
    """Accepted for compatibility: a device that does not exist always raises `PlacementError`.

    Example:
        >>> rx.config.set_soft_device_placement(True)
    """
    _soft_placement[0] = bool(enabled)


def get_device_details(device: PhysicalDevice) -> dict[str, Any]:
    """Return the details of a device: an accelerator's name and capability; {} for the CPU.

    Example:
        >>> rx.config.experimental.get_device_details(rx.config.list_physical_devices("CPU")[0])
        {}
    """
    _require_known(device)
    if device.device_type == "CPU":
        return {}
    found = resolve(device.name.removeprefix("/physical_device:"))
    details: dict[str, Any] = {"device_name": found.device_kind}
    if capability := getattr(found, "compute_capability", None):
        details["compute_capability"] = tuple(int(n) for n in str(capability).split("."))
    return details


def get_memory_info(device: str) -> dict[str, int]:
    """Return the bytes in use on a device and their peak; 0 for the CPU, which does not count them.

    Args:
        device: A name such as ``"GPU:0"``.

    Raises:
        PlacementError: If there is no such device.

    Example:
        >>> rx.config.experimental.get_memory_info("CPU:0")
        {'current': 0, 'peak': 0}
    """
    counts = resolve(device).memory_stats() or {}
    return {"current": counts.get("bytes_in_use", 0), "peak": counts.get("peak_bytes_in_use", 0)}


def get_memory_usage(device: str) -> int:
    """Return the bytes in use on a device; see `get_memory_info`.

    Example:
        >>> rx.config.experimental.get_memory_usage("CPU:0")
        0
    """
    return get_memory_info(device)["current"]


def get_memory_growth(device: PhysicalDevice) -> bool:
    """Return whether GPU memory is allocated as needed, instead of most of it at the start.

    Example:
        >>> [cpu] = rx.config.list_physical_devices("CPU")
        >>> rx.config.experimental.get_memory_growth(cpu)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.PlacementError: Memory growth is for GPUs, ...
    """
    _require_gpu(device)
    return os.environ.get(_PREALLOCATE, "true").lower() in ("false", "0")


def set_memory_growth(device: PhysicalDevice, enable: bool) -> None:  # noqa: FBT001 - TensorFlow's
    """Allocate GPU memory as needed, instead of most of it at the start; applies to all GPUs.

    Raises:
        PlacementError: If it is not a GPU of this machine.
        ScopeError: If JAX is already initialized; call this first.

    Example:
        >>> for gpu in rx.config.list_physical_devices("GPU"):
        ...     rx.config.experimental.set_memory_growth(gpu, True)
    """
    _require_gpu(device)
    if backend_is_initialized():
        raise ScopeError(
            "Memory growth cannot be set after JAX has started. Set XLA_PYTHON_CLIENT_PREALLOCATE="
            f"{str(not enable).lower()} in the environment, before the program starts."
        )
    os.environ[_PREALLOCATE] = str(not enable).lower()


_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def _require_gpu(device: PhysicalDevice) -> None:
    _require_known(device)
    if device not in list_physical_devices("GPU"):
        raise PlacementError(
            f"Memory growth is for GPUs, and {device.name} is not a GPU of this machine:"
            " `rx.config.list_physical_devices('GPU')` lists them."
        )


def _selected_kinds(device_type: str | None) -> list[str]:
    cpu_first = sorted(KINDS)
    return [kind for kind in cpu_first if device_type is None or kind == device_type.upper()]


def _num_accelerators(kind: str) -> int:
    return len(local_devices(kind)) if backend_is_initialized() or _may_have(kind) else 0


def _may_have(kind: str) -> bool:
    """Whether JAX could find devices of this kind, as far as is known without initializing it."""
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
