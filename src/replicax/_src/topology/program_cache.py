"""A cache of compiled programs that virtual CPU devices share."""

import contextlib
import copy
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from replicax._src.compat.jax import setting, surround_compiler


class SharedPrograms:
    """A cache of programs for single virtual CPU devices: compiled once, loaded for the others.

    JAX compiles every operation for every device, although CPU code does not depend on the device.
    The cache is active inside `sharing_programs` only, and never with JAX's persistent compilation
    cache: an executable that was deserialized cannot be serialized again.
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
            with turn:  # among threads that need the same program, the first compiles it
                return self._load(key, backend, devices, options) or self._store(key, build())
        finally:
            with self._lock:
                self._busy.pop(key, None)

    def _key(self, backend: Any, module: Any, options: Any) -> bytes | None:
        """Return a cache key without the device; None if the program must not be cached."""
        is_whole = backend.local_device_count() == backend.device_count()
        if backend.platform != "cpu" or not is_whole or setting("jax_compilation_cache_dir"):
            return None
        try:
            placed = copy.deepcopy(options)
            placed.device_assignment = type(options.device_assignment).create(
                np.zeros((1, 1), np.int32)
            )
            text: str = module.operation.get_asm(enable_debug_info=False)
            if "callback" in text:  # the code refers to a Python object of this program
                return None
            return hashlib.sha256(placed.SerializeAsString() + text.encode()).digest()
        except (AttributeError, TypeError):  # pragma: no cover - a JAX that changed them
            return None

    def _load(self, key: bytes, backend: Any, devices: Any, options: Any) -> Any:
        program = self._programs.get(key)
        if program is None:
            return None
        try:
            loaded = backend.deserialize_executable(program, devices, options)
        except Exception:
            return None
        self.loads += 1
        return loaded

    def _store(self, key: bytes, built: Any) -> Any:
        with contextlib.suppress(Exception):  # a program that cannot be serialized is not cached
            program = built.serialize()
            with self._lock:
                self._programs[key] = program
                self._bytes += len(program)
                while self._bytes > self.most_bytes:
                    self._bytes -= len(self._programs.popitem(last=False)[1])
        return built


@cache
def _install_cache() -> None:
    # If JAX has moved its compiler function, every operation is compiled for every device.
    surround_compiler(SharedPrograms)


@contextmanager
def sharing_programs() -> Iterator[None]:
    """Share the programs that this thread compiles for one virtual CPU device with the others."""
    _install_cache()
    SharedPrograms.here.shares = True
    try:
        yield
    finally:
        SharedPrograms.here.shares = False
