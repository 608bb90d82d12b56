"""Device names: parsing all of TensorFlow's spellings, and naming `jax.Device` objects."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
from jax.core import Tracer

from replicax._src.base.errors import PlacementError
from replicax._src.base.managers import contextmanager
from replicax._src.workers import elastic

KINDS = ("GPU", "TPU", "CPU")  # in the order in which a strategy prefers them

_NAME = re.compile(
    r"(/job:(?P<job>\w+))?(/replica:\d+)?(/task:(?P<task>\d+))?"
    r"/?(device:)?(?P<kind>CPU|GPU|TPU)(:(?P<index>\d+))?",
    re.IGNORECASE,
)

_COUNT_VARIABLE = "REPLICAX_CPU_DEVICES"
_OTHER_KINDS = re.compile(r"(cuda|nvidia|rocm|hip|xla)(:\d+)?", re.IGNORECASE)
_VIRTUAL_DEVICES = (
    "To try several devices without the hardware, start Python with REPLICAX_CPU_DEVICES=8 in the"
    " environment, or create the strategy before the first JAX computation, with a list of all of"
    " its devices: ['CPU:0', 'CPU:1']."
)

_simulated_tpus: list[jax.Device] = []
_task_override: list[tuple[str, int]] = []
_current_device: ContextVar[jax.Device | None] = ContextVar("replicax_device", default=None)


@contextmanager
def device(device_name: str | jax.Device | None) -> Iterator[jax.Device | None]:
    """Create arrays on the given device until the block ends.

    Args:
        device_name: A device, in any spelling that `MirroredStrategy` accepts, or ``None`` to
            return to the default device inside an outer block.

    Yields:
        The chosen `jax.Device`, or ``None``.

    Raises:
        PlacementError: If this process has no such device.

    Example:
        >>> with rx.device("CPU:1"):
        ...     x = jnp.ones(3)
        >>> rx.device_name(x)
        '/job:localhost/replica:0/task:0/device:CPU:1'
    """
    chosen = None if device_name is None else resolve(device_name)
    token = _current_device.set(chosen)
    try:
        with jax.default_device(chosen):
            yield chosen
    finally:
        _current_device.reset(token)


def current_device() -> jax.Device | None:
    """Return the device of the innermost `device` block, or ``None`` outside of one."""
    return _current_device.get()


def device_name(x: Any) -> str:
    """Return the full name of a device, or of the device that holds a value.

    Args:
        x: A device, a device name in any spelling, an array on one device, or anything whose
            ``device`` attribute is a name, such as a `Variable`.

    Returns:
        The name in TensorFlow's spelling.

    Raises:
        PlacementError: If ``x`` is on no device, or on more than one.

    Example:
        >>> rx.device_name("cpu:1")
        '/job:localhost/replica:0/task:0/device:CPU:1'
        >>> rx.device_name(jnp.zeros(2))
        '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    if isinstance(x, Tracer):
        raise PlacementError(
            f"{x} is being traced: a value inside a compiled function has no device yet. Ask for"
            " the device of the function's result."
        )
    if isinstance(x, str):
        return device_name_as(resolve(x), _named_kind(x))
    if isinstance(x, jax.Device):
        return _canonical_name(x)
    if isinstance(x, jax.Array):
        return _canonical_name(_only_device(x))
    if isinstance(name := getattr(x, "device", None), str):
        return name
    raise PlacementError(
        f"Expected a device, a device name or an array, but got {x!r} ({type(x).__name__}),"
        " which lies on no device."
    )


def device_name_as(device: jax.Device, kind: str) -> str:
    """Return the full name of a device, with ``kind`` in place of its own kind unless ''."""
    own = _canonical_name(device)
    return own if not kind else own.replace(f"device:{_kind(device)}:", f"device:{kind}:")


def short_name(device: jax.Device, kind: str = "") -> str:
    """Return a short name for display: ``CPU:1``, or ``worker 2 CPU:1`` in a cluster.

    Example:
        >>> from replicax._src.topology.devices import short_name
        >>> short_name(jax.devices()[1])
        'CPU:1'
    """
    task, _, name = device_name_as(device, kind).rpartition("/device:")
    job, _, number = task.removeprefix("/job:").partition("/replica:0/task:")
    return name if job == "localhost" else f"{job} {number} {name}"


def shown_devices(devices: Iterable[jax.Device], most: int = 4, kind: str = "") -> str:
    """Return the names of up to ``most`` devices, followed by the total if there are more."""
    in_order = isinstance(devices, tuple)
    ordered = list(devices) if in_order else sorted(devices, key=lambda d: (d.process_index, d.id))
    names = ", ".join(short_name(d, kind) for d in ordered[:most])
    return names if len(ordered) <= most else f"{names}, ... ({len(ordered)} devices)"


def simulate_tpus(devices: Sequence[jax.Device]) -> None:
    """Make ``TPU:i`` name the i-th of ``devices``; an empty sequence ends the simulation."""
    _simulated_tpus[:] = devices


def larger_simulation() -> str:
    """Return how to simulate a larger slice, for errors; an empty text unless one is simulated."""
    if not _simulated_tpus:
        return ""
    return (
        f" The slice is simulated on {len(_simulated_tpus):,} CPU device(s) of this process: for"
        " more, start Python with REPLICAX_CPU_DEVICES=8 in the environment."
    )


def name_task(job: str, task: int) -> None:
    """Use this process's task in the cluster in the names of its devices."""
    _task_override[:] = [(job, task)]
    _canonical_name.cache_clear()


def default_devices() -> tuple[jax.Device, ...]:
    """Return the default devices of a strategy: all GPUs, else all TPUs, else all CPUs."""
    return next(devices for kind in KINDS if (devices := local_devices(kind)))


def resolve_all(devices: Sequence[str | jax.Device]) -> tuple[jax.Device, ...]:
    """Resolve names of distinct devices of one kind; keep their order.

    Example:
        >>> from replicax._src.topology.devices import resolve_all
        >>> [d.id for d in resolve_all(["cpu:1", "/device:CPU:0"])]
        [1, 0]
    """
    if isinstance(devices, str | jax.Device):
        raise PlacementError(
            f"devices must be a list of names, got {devices!r}: write [{devices!r}]."
        )
    if isinstance(devices, int):
        names = [f"{_kind(default_devices()[0])}:{i}" for i in range(devices)]
        raise PlacementError(
            f"devices must be a list of names, got the number {devices}. For that many write"
            f" {names!r}. {_available()}"
        )
    resolved = tuple(map(resolve, devices))
    names = [_short_name(d) for d in resolved]
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise PlacementError(
            f"Duplicate devices {', '.join(repeated)} in {_quoted(devices)}. Each replica needs a"
            f" device of its own: name every device once. {_available()}"
        )
    if len(kinds := sorted({_kind(d) for d in resolved})) > 1:
        raise PlacementError(
            f"Devices of different kinds ({' and '.join(kinds)}) in {_quoted(devices)}. Replicas"
            f" run one program on equal devices: keep those of one kind. {_available()}"
        )
    return resolved


def resolve(device: str | jax.Device) -> jax.Device:
    """Return the device of this process with the given name.

    All of TensorFlow's spellings are accepted: ``"/gpu:0"``, ``"GPU:0"``, ``"gpu"``,
    ``"/device:CPU:1"``, ``"/job:localhost/replica:0/task:0/device:CPU:0"``. The index counts the
    devices of that kind in this process.

    Example:
        >>> from replicax._src.topology.devices import resolve
        >>> resolve("/job:localhost/replica:0/task:0/device:CPU:1") == jax.devices("cpu")[1]
        True
    """
    if isinstance(device, jax.Device):
        return _require_local(device)
    match = _NAME.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise PlacementError(
            f"{device!r} is not a device name. {_similar(device)}Write for example 'CPU:0',"
            f" '/gpu:1' or '/job:localhost/replica:0/task:0/device:GPU:0'. {_available()}"
        )
    job, task = (match["job"] or "localhost"), int(match["task"] or 0)
    own_job, own_task = _task_of(jax.process_index())
    others = task != own_task or (job.lower() != own_job.lower() and bool(_task_override))
    if job.lower() != "localhost" and others:
        raise PlacementError(
            f"{device!r} belongs to task {task} of {job}, and this process is task {own_task} of"
            f" {own_job}. A process names only its own devices. {_available()}"
        )
    local, index = named_devices(match["kind"].upper()), int(match["index"] or 0)
    if index >= len(local):
        more = _how_to_get_more(match["kind"].upper(), len(local))
        raise PlacementError(f"There is no device {device!r}. {_available()} {more}")
    return local[index]


def _similar(device: Any) -> str:
    """Return the name that was probably meant, for names of JAX and PyTorch."""
    found = _OTHER_KINDS.fullmatch(device) if isinstance(device, str) else None
    if found is None:
        return ""
    kind = "TPU" if found[1].lower() == "xla" else "GPU"
    return f"Did you mean '{kind}{found[2] or ':0'}'? "


def _how_to_get_more(kind: str, started: int) -> str:
    count = os.environ.get(_COUNT_VARIABLE)
    if kind != "CPU":
        return f"`replicax doctor` shows why JAX finds no {kind}. {_VIRTUAL_DEVICES}"
    if not count or count == str(started):
        return _VIRTUAL_DEVICES
    return (
        f"{_COUNT_VARIABLE}={count} is in the environment now, but was not, or named another"
        " number, when JAX started. Set it before Python starts, or before `import replicax` and"
        " the first JAX computation."
    )


def local_devices(kind: str) -> tuple[jax.Device, ...]:
    """Return this process's devices of one kind; empty if there are none."""
    jax.local_devices()  # raises the actual reason if a backend fails to initialize
    try:
        return tuple(jax.local_devices(backend=kind.lower()))
    except RuntimeError:  # JAX has no backend of this kind
        return ()


def named_devices(kind: str) -> tuple[jax.Device, ...]:
    """Return this process's devices of one kind, including simulated TPUs."""
    real = local_devices(kind)
    return tuple(_simulated_tpus) if kind == "TPU" and not real else real


def _named_kind(name: str) -> str:
    match = _NAME.fullmatch(name)
    return match["kind"].upper() if match else ""


def _require_local(device: jax.Device) -> jax.Device:
    if device.process_index != jax.process_index():
        raise PlacementError(
            f"{device} belongs to process {device.process_index}, and this is process"
            f" {jax.process_index()}. A process names only its own devices. {_available()}"
        )
    return device


def _only_device(x: jax.Array) -> jax.Device:
    devices = x.devices()
    if len(devices) != 1:
        raise PlacementError(
            f"An array of shape {x.shape} lies on {len(devices)} devices, not on one. Take the"
            " part of each replica with `strategy.experimental_local_results(value)` first."
        )
    return next(iter(devices))


@cache
def _canonical_name(device: jax.Device) -> str:
    job, task = _task_of(device.process_index)
    return f"/job:{job}/replica:0/task:{task}/device:{_short_name(device)}"


elastic.after.register(elastic.DEVICES, _canonical_name.cache_clear)


def _task_of(process: int) -> tuple[str, int]:
    if _task_override and process == jax.process_index():
        return _task_override[0]
    return ("localhost" if jax.process_count() == 1 else "worker"), process


def _short_name(device: jax.Device) -> str:
    peers = jax.local_devices(process_index=device.process_index, backend=device.platform)
    return f"{_kind(device)}:{peers.index(device)}"


def _kind(device: jax.Device) -> str:
    platform = device.platform.upper()
    return "GPU" if platform in ("CUDA", "ROCM") else platform


def _quoted(devices: Sequence[str | jax.Device]) -> str:
    return f"[{', '.join(map(repr, devices))}]"


def _available() -> str:
    """Return a sentence on the devices of this process, short even for hundreds of them."""
    ranges = []
    for kind in KINDS:
        if count := len(named_devices(kind)):
            ranges.append(f"{kind}:0" + (f" to {kind}:{count - 1}" if count > 1 else ""))
    return f"This process has {' and '.join(ranges)}."
