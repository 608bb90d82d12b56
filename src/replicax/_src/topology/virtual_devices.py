"""Virtual CPU devices: their number, and a thread pool with which they cannot deadlock.

XLA runs all virtual devices on one thread pool with one thread per core, and a thread that waits in
a collective is blocked. Two devices on two cores deadlock as soon as two steps are in flight; XLA
aborts the process after 40 seconds. JAX reads the size of the pool from the environment when it
initializes its CPU backend. replicax therefore sets a sufficient size during the initialization,
and only for several devices: 256 idle threads would cost a one-device process 50 ms and 50 MB.
Workers on one machine share its cores, because pools of all cores each would compete for them.
"""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax

from replicax._src.base import cores
from replicax._src.base.errors import PlacementError
from replicax._src.base.output import filter_output
from replicax._src.compat.jax import (
    backend_is_initialized,
    setting,
    surround_start,
)
from replicax._src.topology.devices import local_devices
from replicax._src.topology.tpu_generations import SliceShape

COUNT_VARIABLE = "REPLICAX_CPU_DEVICES"
_MOST_DEVICES = 16_384  # per process: each takes memory, and a larger number is a typing error
TPU_VARIABLE = "REPLICAX_TPU_TOPOLOGY"

# XLA reads NPROC first. The second name is the one that it is likely to keep.
_POOL_VARIABLES = ("NPROC", "PJRT_NPROC")
# Measured on 2 cores: 2 threads per device suffice and 1.5 deadlock, whatever else runs. A larger
# pool costs time: a step of matmuls on 2 devices took 1.3 times as long with 16 threads as with 8.
_THREADS_PER_DEVICE = 4
# The messages that an installed libtpu prints on a machine without TPUs.
_ABSENT_TPU = re.compile(
    rb"could not determine TPU|before InitGoogle|Source Location Trace|libtpu_init_utils"
)
_CPU_NAME = re.compile(r"/?(?:device:)?CPU:(\d{1,5})", re.IGNORECASE)
_XLA_FLAG = re.compile(r"--xla_force_host_platform_device_count[= ](\d+)")


@cache
def prepare_environment() -> None:
    """Configure JAX to start with the requested virtual devices, and enough threads for them.

    ``import replicax`` calls this; further calls do nothing. It initializes no backend. The number
    of devices may still be changed, by `rx.config` or JAX's own settings, until a backend starts.

    Raises:
        PlacementError: If ``REPLICAX_CPU_DEVICES`` is not a positive number, or
            ``REPLICAX_TPU_TOPOLOGY`` is not a TPU slice.

    Example:
        >>> from replicax._src.topology.virtual_devices import prepare_environment
        >>> prepare_environment()
    """
    requested = requested_devices()
    if backend_is_initialized():
        _warn_if_too_late(requested)
    elif requested is not None:
        jax.config.update("jax_num_cpu_devices", requested)
    if not surround_start("cpu", _enough_threads):  # pragma: no cover - a JAX that moved it
        os.environ.setdefault("NPROC", str(threads_needed(64)))
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":  # set by JAX when it finds no TPU
        surround_start("tpu", lambda: filter_output(2, _ABSENT_TPU))


def planned_cpu_devices() -> int | None:
    """Return the number of CPU devices that JAX is configured with; ``None`` if unset."""
    if (count := setting("jax_num_cpu_devices")) >= 0:
        return int(count)
    counts = _XLA_FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else None


def plan_named_devices(devices: Any) -> None:
    """Configure JAX to start with the CPU devices that a program names, such as CPU:0 and CPU:1.

    Programs of several replicas then run on any machine as they are. Do nothing if JAX has started,
    if the number of CPU devices was set in another way, or if the names leave out a device below
    the highest: that is rather a typing error.

    Args:
        devices: What a program gave a strategy; anything but a list of CPU devices is ignored.
    """
    if backend_is_initialized() or planned_cpu_devices() is not None:
        return
    if not isinstance(devices, list | tuple):
        return
    named = [_CPU_NAME.fullmatch(device) for device in devices if isinstance(device, str)]
    numbers = sorted(int(match[1]) for match in named if match)
    if len(numbers) > 1 and numbers == list(range(len(devices))):
        jax.config.update("jax_num_cpu_devices", len(numbers))


def threads_needed(devices: int) -> int:
    """Return the pool size with which ``devices`` virtual devices cannot deadlock."""
    return _THREADS_PER_DEVICE * devices


def requested_devices() -> int | None:
    """Return the number of CPU devices that ``REPLICAX_CPU_DEVICES`` requests, or None.

    Raises:
        PlacementError: If it is not a positive number.
    """
    text = os.environ.get(COUNT_VARIABLE, "").strip()
    if not text:
        slice_name = os.environ.get(TPU_VARIABLE, "").strip()
        return SliceShape.parse(slice_name).num_devices if slice_name else None
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 0 < int(text) <= _MOST_DEVICES):
        raise PlacementError(
            f"{COUNT_VARIABLE}={text[:40]!r} is not a number of devices. Expected 1 to"
            f" {_MOST_DEVICES}, for example {COUNT_VARIABLE}=8; unset it to run on one CPU device."
        )
    return int(text)


@contextmanager
def _enough_threads() -> Iterator[None]:
    """Set the size of XLA's thread pool while the CPU backend starts."""
    size = _best_pool_size(planned_cpu_devices() or 1)
    if size == _pool_size():
        yield
        return
    outer = {name: os.environ.get(name) for name in _POOL_VARIABLES}
    os.environ.update(dict.fromkeys(_POOL_VARIABLES, str(size)))
    try:
        yield
    finally:
        for name, value in outer.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _best_pool_size(devices: int) -> int:
    if devices > 1:
        return max(_pool_size(), threads_needed(devices))
    # Leave cores for the other workers of this machine: on 2 cores, 2 workers of one thread each
    # took 0.92 of the time that 2 workers of two threads each took (benchmarks/workers.py).
    return _configured_pool_size() or cores.usable()


def _pool_size() -> int:
    """Return the number of threads that XLA would choose for the pool of all CPU devices."""
    return _configured_pool_size() or len(cores.visible())


def _configured_pool_size() -> int | None:
    texts = [os.environ.get(name, "") for name in _POOL_VARIABLES]
    return next((int(text) for text in texts if text.isdigit()), None)


def _warn_if_too_late(requested: int | None) -> None:
    """Warn if JAX was initialized before replicax, with other devices or too few threads."""
    devices = len(local_devices("CPU"))
    if requested not in (None, devices):
        warnings.warn(
            f"{COUNT_VARIABLE}={requested} comes too late: JAX has started with {devices} CPU"
            " device(s). Import replicax before the first JAX computation of the program.",
            RuntimeWarning,
            stacklevel=3,
        )
    if devices > 1 and (threads := _pool_size()) < _THREADS_PER_DEVICE * devices:
        needed = threads_needed(devices)
        warnings.warn(
            f"JAX has started with {devices} virtual CPU devices and only {threads} thread(s) for"
            " them, so collectives can deadlock. Import replicax before"
            " the first JAX computation of the program: it then gives them"
            f" {needed} threads. Or start Python with NPROC={needed} in the environment.",
            RuntimeWarning,
            stacklevel=3,
        )
