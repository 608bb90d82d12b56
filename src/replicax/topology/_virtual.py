"""Virtual CPU devices: how many are asked for -> a JAX that starts with them and cannot deadlock.

XLA runs every virtual device on one pool of threads, as many as the machine has cores, and a thread
that waits in a collective is not free for others. Two devices on two cores stop for ever as soon as
two steps are under way; XLA ends the process after 40 seconds. The size of the pool is read from
the environment when JAX starts its CPU backend, so replicax puts a large enough number there, for
just that moment and only if there are several devices: 256 idle threads would cost a one-device
process 50 ms and 50 MB. Workers on one machine share its cores: a pool each of all cores would
have their threads push each other aside.
"""

import contextlib
import copy
import hashlib
import os
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import numpy as np

from replicax._errors import PlacementError
from replicax._jax_private import (
    backend_is_initialized,
    setting,
    surround_compiler,
    surround_start,
)
from replicax.topology._devices import local_devices
from replicax.topology._generations import SliceShape
from replicax.workers._sockets import filter_output

COUNT_VARIABLE = "REPLICAX_CPU_DEVICES"
_MOST_DEVICES = 16_384  # of a process: each takes memory, and more is a slip
TPU_VARIABLE = "REPLICAX_TPU_TOPOLOGY"

# XLA reads NPROC first. The second name is the one it would keep if it dropped the first.
_POOL_VARIABLES = ("NPROC", "PJRT_NPROC")
# Measured on 2 cores: 2 threads for each device pass and 1.5 hang, whatever else runs. More than
# needed cost time: a step of matrix products on 2 devices took 1.3 times as long with 16 as with 8.
_THREADS_PER_DEVICE = 4
_sharing: list[int] = [1]
# What an installed libtpu prints, beside what it tells JAX, on a machine that has no TPU.
_ABSENT_TPU = re.compile(
    rb"could not determine TPU|before InitGoogle|Source Location Trace|libtpu_init_utils"
)
_XLA_FLAG = re.compile(r"--xla_force_host_platform_device_count[= ](\d+)")


@cache
def prepare_environment() -> None:
    """Have JAX start with the virtual devices that were asked for, and threads enough for them.

    ``import replicax`` calls this; a second call does nothing. It starts no backend. Devices may
    still be asked for later, by `rx.config` or JAX's own settings, while no backend has started.

    Raises:
        PlacementError: ``REPLICAX_CPU_DEVICES`` is not a positive number, or
            ``REPLICAX_TPU_TOPOLOGY`` no TPU slice.

    Example:
        >>> from replicax.topology._virtual import prepare_environment
        >>> prepare_environment()
    """
    requested = requested_devices()
    if backend_is_initialized():
        _warn_if_too_late(requested)
    elif requested is not None:
        jax.config.update("jax_num_cpu_devices", requested)
    if not surround_start("cpu", _enough_threads):  # pragma: no cover - a JAX that moved it
        os.environ.setdefault("NPROC", str(threads_needed(64)))
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":  # how JAX notes that it saw no TPU
        surround_start("tpu", lambda: filter_output(2, _ABSENT_TPU))


def planned_cpu_devices() -> int | None:
    """The number of CPU devices that JAX is told to start with; ``None`` if it is told nothing."""
    if (count := setting("jax_num_cpu_devices")) >= 0:
        return int(count)
    counts = _XLA_FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    return int(counts[-1]) if counts else None


def threads_needed(devices: int) -> int:
    """How many threads let ``devices`` virtual devices wait for each other."""
    return _THREADS_PER_DEVICE * devices


def share_cores(processes: int) -> None:
    """Have JAX, when it starts, leave room for the other processes of a cluster.

    Args:
        processes: How many of them run on this machine. On 2 cores, 2 workers of one thread each
            took 0.92 of the time that 2 workers of two threads each took (benchmarks/workers.py).
    """
    _sharing[:] = [processes]


def requested_devices() -> int | None:
    """The number of CPU devices that ``REPLICAX_CPU_DEVICES`` asks for.

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
    return _asked_pool_size() or max(1, _cores() // _sharing[0])


def _pool_size() -> int:
    """The number of threads that XLA gives to all CPU devices together."""
    return _asked_pool_size() or _cores()


def _asked_pool_size() -> int | None:
    texts = [os.environ.get(name, "") for name in _POOL_VARIABLES]
    return next((int(text) for text in texts if text.isdigit()), None)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _warn_if_too_late(requested: int | None) -> None:
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
            " them, so that collectives can wait for each other for ever. Import replicax before"
            " the first JAX computation of the program: it then gives them"
            f" {needed} threads. Or start Python with NPROC={needed} in the environment.",
            RuntimeWarning,
            stacklevel=3,
        )


class SharedPrograms:
    """Compiles what runs on one virtual CPU device once, and loads it for the others.

    JAX compiles every operation for every device, which the code of a CPU does not depend on. Only
    in the block of `sharing_programs`, and not where JAX keeps programs in files: what was loaded
    once cannot be written again.
    """

    most_bytes = 2**28
    here = threading.local()

    def __init__(self, compile_and_load: Callable[..., Any]) -> None:
        self._compile = compile_and_load
        self._programs: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._busy: dict[bytes, threading.Lock] = {}
        self.loads = 0

    def __call__(
        self, backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any
    ) -> Any:
        build = lambda: self._compile(backend, module, devices, options, host_callbacks)  # noqa: E731
        key = None
        if getattr(self.here, "shares", False) and len(devices) == 1 and not host_callbacks:
            key = self._key(backend, module, options)
        if key is None:
            return build()
        with self._lock:
            turn = self._busy.setdefault(key, threading.Lock())
        try:
            with turn:  # of threads that ask for one program, the first compiles it
                return self._loaded(key, backend, devices, options) or self._kept(key, build())
        finally:
            with self._lock:
                self._busy.pop(key, None)

    def _key(self, backend: Any, module: Any, options: Any) -> bytes | None:
        is_whole = backend.local_device_count() == backend.device_count()
        if backend.platform != "cpu" or not is_whole or setting("jax_compilation_cache_dir"):
            return None
        try:
            anywhere = copy.deepcopy(options)
            anywhere.device_assignment = type(options.device_assignment).create(
                np.zeros((1, 1), np.int32)
            )
            text: str = module.operation.get_asm(enable_debug_info=False)
            if "callback" in text:  # it names an object of this one program
                return None
            return hashlib.sha256(anywhere.SerializeAsString() + text.encode()).digest()
        except (AttributeError, TypeError):  # pragma: no cover - a JAX that changed them
            return None

    def _loaded(self, key: bytes, backend: Any, devices: Any, options: Any) -> Any:
        program = self._programs.get(key)
        if program is None:
            return None
        try:
            loaded = backend.deserialize_executable(program, devices, options)
        except Exception:
            return None
        self.loads += 1
        return loaded

    def _kept(self, key: bytes, built: Any) -> Any:
        with contextlib.suppress(Exception):  # what cannot be kept is compiled again
            program = built.serialize()
            with self._lock:
                self._programs[key] = program
                self._bytes += len(program)
                while self._bytes > self.most_bytes:
                    self._bytes -= len(self._programs.popitem(last=False)[1])
        return built


@cache
def _share() -> None:
    # Where JAX has moved its compiler, everything is compiled for every device.
    surround_compiler(SharedPrograms)


@contextmanager
def sharing_programs() -> Iterator[None]:
    """Let what this thread compiles for one virtual CPU device serve all others, and reversely."""
    _share()
    SharedPrograms.here.shares = True
    try:
        yield
    finally:
        SharedPrograms.here.shares = False
