"""All uses of JAX internals, each guarded and tested.

Every function here falls back to public API, slower or less precise, if JAX moves its internals.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import logging
import operator
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import call
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend import backend as jax_backend
from jax.extend import core as jaxprs
from jax.interpreters import mlir

from replicax._src.compat import jaxlib

_log = logging.getLogger("replicax")


def _inside(name: str) -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module(f"jax._src.{name}")
    return None  # pragma: no cover - a JAX that moved it


_callback, _config, _core = map(_inside, ("callback", "config", "core"))
_compilation_cache, _compiler = map(_inside, ("compilation_cache", "compiler"))
_distributed, _xla_bridge = map(_inside, ("distributed", "xla_bridge"))
_dtypes, _effects = map(_inside, ("dtypes", "effects"))
_pxla, _tree_util = map(_inside, ("interpreters.pxla", "tree_util"))
_ArrayImpl: Any = getattr(_inside("array"), "ArrayImpl", None)
ARRAY_TYPES: frozenset[type] = frozenset(() if _ArrayImpl is None else (_ArrayImpl,))


class _Inventory:
    """The primitives and thread-local states found in the modules of JAX and replicax.

    Modules imported since the last search are added; no module is searched twice.
    """

    def __init__(self) -> None:
        self._searched: set[str] = set()
        self._primitives: dict[int, Any] = {}
        self._states: dict[int, Any] = {}
        self._user_states: dict[int, Any] = {}

    def primitives(self) -> Mapping[int, Any]:
        """Return JAX's own primitives, by id."""
        self._search()
        return self._primitives

    def states(self) -> Iterable[Any]:
        """Return every state of JAX that has a value per thread."""
        self._search()
        return self._states.values()

    def user_states(self) -> Iterable[Any]:
        """Return the states of `jax.make_user_context`, such as replicax's key of trace caches."""
        self._search()
        return self._user_states.values()

    def _search(self) -> None:
        if len(self._searched) == len(sys.modules):
            return
        kind: Any = getattr(getattr(_config, "config_ext", None), "Config", ())
        for name, module in list(sys.modules.items()):
            if name not in self._searched and name.startswith(("jax.", "replicax.")):
                for x in list(getattr(module, "__dict__", {}).values()):
                    self._add(x, name, kind)
            self._searched.add(name)
        for state in getattr(_config, "config_states", {}).values():
            self._states[id(state)] = state

    def _add(self, x: Any, module: str, kind: Any) -> None:
        if isinstance(x, jaxprs.Primitive) and module.startswith("jax."):
            self._primitives[id(x)] = x
        elif isinstance(x, kind) and hasattr(x, "get_local"):
            self._states[id(x)] = x
        elif type(x).__module__ == "jax._src.config":
            state = getattr(x, "_obj", None)  # of `jax.make_user_context`
            if isinstance(state, kind):
                self._user_states[id(state)] = state


_inventory = _Inventory()


def is_of_jax(primitive: Any) -> bool:
    """Whether a module of JAX defines ``primitive``; another may have the same name."""
    return id(primitive) in _inventory.primitives()


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and carries of a ``scan`` equation with ``params``."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # JAX 0.12
    return len(consts), len(carries)


_public_settings = operator.attrgetter(
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
)


def settings() -> Any:
    """Return the settings of JAX on which tracing depends, as part of a cache key."""
    return _public_settings(jax.config)


settings = getattr(_config, "trace_context", None) or settings


class _TraceNow:
    """The current trace, read through public API."""

    @property
    def value(self) -> Any:
        with jaxprs.take_current_trace() as trace:
            return trace


# ``traced.value`` is ``at_rest`` if JAX neither traces nor transforms. Every `next` checks this, so
# it must be fast.
traced: Any = getattr(_core, "trace_state_strong_ref", None) or _TraceNow()
at_rest: Any = _TraceNow().value


class Listening(jax.core.Trace):
    """A trace that observes operations, and evaluates them in the trace ``parent``."""

    def __init__(self, parent: Any) -> None:
        super().__init__()
        self.parent = parent


def surrounding(trace: Any) -> Any:
    """Return the innermost trace around ``trace``, or itself, that is not a `Listening` one."""
    while isinstance(trace, Listening):
        trace = trace.parent
    return trace


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which no `Listening` trace observes this thread."""
    return jaxprs.set_current_trace(surrounding(traced.value))


class concrete:  # noqa: N801 - it is used as a function
    """A context manager in which operations are evaluated eagerly, even during tracing.

    It replaces `jax.ensure_compile_time_eval`, which is a generator whose exit may run late: see
    `replicax._src.base.managers`.
    """

    __slots__ = ("_setting",)

    def __enter__(self) -> None:
        folding = getattr(_config, "eager_constant_folding", None)
        public = jax.ensure_compile_time_eval
        self._setting: Any = public() if folding is None else folding(True)
        self._setting.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._setting.__exit__(*error)


def undisturbed(fn: Callable[[], Any]) -> Any:
    """Return ``fn()``, which traces or compiles, and restore JAX's thread-local state after it.

    JAX sets the current trace, the axes in scope and many settings for a block, and restores them
    in Python code, which an exception in a signal handler may interrupt. The thread would then stay
    inside a trace that has ended, and every later call would fail.
    """
    restore = [partial(s.set_local, s.get_local()) for s in _inventory.states()]
    user = [partial(s.set_local, s.get_local()) for s in _inventory.user_states()]
    folding = getattr(_config, "eager_constant_folding", None)
    try:
        # An interrupted `jax.ensure_compile_time_eval` may have left this on. The trace would then
        # evaluate operations that must be recorded, such as reads of variables.
        if folding is not None:
            folding.set_local(False)
        return fn()
    except BaseException:
        # Only then: `fn` may have written a variable, and so changed the key of an enclosing block.
        restore += user
        raise
    finally:
        _run_all(map(call, restore))  # one call into C: no signal handler runs in between


_run_all: Callable[[Iterable[Any]], None] = deque(maxlen=0).extend


def uncommitted(x: jax.Array) -> jax.Array:
    """Return the single-device array ``x`` as an uncommitted array, without copying.

    JAX refuses to combine arrays that are committed to different devices, which would break
    ordinary programs such as ``sum(strategy.experimental_local_results(x))``. An uncommitted array
    stays on its device until it is combined with an array on another one.
    """
    if not x.committed:
        return x
    if _ArrayImpl is None:  # pragma: no cover - a JAX that moved it
        with jax.default_device(next(iter(x.devices()))):
            return jax.numpy.asarray(jax.device_get(x))
    buffers = getattr(x, "_arrays", None)
    if buffers is None:  # an array of random keys, which wraps an array of numbers
        numbers = uncommitted(jax.random.key_data(x))
        keys: jax.Array = jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
        return keys
    freed: jax.Array = _ArrayImpl(x.aval, x.sharding, buffers, committed=False, _skip_checks=True)
    return freed


def renewed(x: jax.Array) -> jax.Array:
    """Return a new array object equal to ``x``; if ``x`` is concrete, it shares the buffers."""
    buffers = getattr(x, "_arrays", None) if type(x) in ARRAY_TYPES else None
    if buffers is None:
        return jax.numpy.copy(x)
    made: jax.Array = _ArrayImpl(
        x.aval, x.sharding, buffers, committed=x.committed, _skip_checks=True
    )
    return made


def put_rows(rows: Sequence[np.ndarray], sharding: Any, devices: Sequence[jax.Device]) -> jax.Array:
    """Return a global array with the shards ``rows`` on ``devices``; it may alias their memory."""
    shape, dtype = (sum(map(len, rows)), *rows[0].shape[1:]), rows[0].dtype
    put: Any = getattr(_pxla, "batched_device_put", None)
    if put is None:  # pragma: no cover - a JAX that moved it
        parts = list(map(jax.device_put, rows, devices))
        return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)
    described = _described(shape, dtype, jax.sharding.get_abstract_mesh())
    return put(described, sharding, rows, devices)  # type: ignore[no-any-return]


# The aval of an array under the ambient mesh. A cache lookup takes a tenth of creating it.
_described = functools.lru_cache(lambda shape, dtype, mesh: jax.core.ShapedArray(shape, dtype))


@functools.cache
def ordered_effect() -> Any:
    """Return the effect of operations that must run in the order in which they were traced.

    JAX then makes each depend on the one before it, in all transformations and control flow.
    """
    sets: list[Any] = [getattr(_effects, name, None) for name in _EFFECT_SETS]
    if None in sets:  # pragma: no cover - a JAX that moved them
        ordered = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None, ordered=True))()
        return next(iter(ordered.effects))
    kind = type("ReplicaOrder", (_effects.Effect,), {"__str__": lambda _: "ReplicaOrder"})
    for allowed in sets:
        allowed.add_type(kind)
    return kind()


_EFFECT_SETS = (
    "ordered_effects",
    "lowerable_effects",
    "control_flow_allowed_effects",
    "custom_derivatives_allowed_effects",
    "remat_allowed_effects",
    "shardable_ordered_effects",
)


def lower_ordered_call(ctx: Any, *args: Any, callback: Callable[..., Any], **_: Any) -> Any:
    """Lower a primitive with the ordered effect to a host callback of ``callback``."""
    effect = ordered_effect()
    where: Any = getattr(_callback, "_callback_op_sharding", lambda *_: None)
    results, token, _ = mlir.emit_python_callback(
        ctx,
        lambda *xs: tuple(callback(*xs)),
        ctx.tokens_in.get(effect),
        list(args),
        list(ctx.avals_in),
        list(ctx.avals_out),
        has_side_effect=True,
        sharding=where(ctx.module_context.axis_context, None, ctx.avals_out),
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
    return results


def setting(name: str) -> Any:
    """Return a setting of JAX, whose type stubs declare only ``update``."""
    return getattr(jax.config, name)


def backend_is_initialized() -> bool:
    """Whether JAX's backends are initialized, after which the number of devices is fixed."""
    if (started := getattr(_xla_bridge, "backends_are_initialized", None)) is not None:
        return bool(started())
    return _refuses_another_device_count()  # pragma: no cover - a JAX that moved it


def _refuses_another_device_count() -> bool:
    """Answer `backend_is_initialized` by a documented rule: this setting is fixed afterwards."""
    count = setting("jax_num_cpu_devices")
    try:
        jax.config.update("jax_num_cpu_devices", max(count, 0) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def surround_start(
    platform: str, surroundings: Callable[[], contextlib.AbstractContextManager[None]]
) -> bool:
    """Make JAX create a platform's client inside the context manager ``surroundings()``.

    Return False if this version of JAX does not allow it.
    """
    factories: dict[str, Any] = getattr(_xla_bridge, "_backend_factories", {})
    registration: Any = factories.get(platform)
    if not hasattr(registration, "factory"):  # pragma: no cover - a JAX that moved it
        return False
    start = registration.factory

    def start_inside(**options: Any) -> Any:
        with surroundings():
            return start(**options)

    factories[platform] = dataclasses.replace(registration, factory=start_inside)
    return True


def surround_compiler(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replace JAX's compile function by ``make`` of it; return False if JAX does not allow it.

    The function takes a client, a module, its devices, options and callbacks, and returns a loaded
    executable.
    """
    compile_and_load = getattr(_compiler, "backend_compile_and_load", None)
    if compile_and_load is None:  # pragma: no cover - a JAX that moved it
        return False
    _compiler.backend_compile_and_load = make(compile_and_load)
    return True


def keep_programs_of_all() -> bool:
    """Let every process write to JAX's compilation cache; return False if JAX does not allow it.

    JAX lets only the first process write, to spare remote file systems. But the programs of the
    other processes have different cache keys, so a restart would compile them again.
    """
    write: Any = getattr(_compiler, "_cache_write", None)
    put: Any = getattr(_compilation_cache, "put_executable_and_time", None)
    if put is None or write is None:  # pragma: no cover - a JAX that moved them
        return False

    if hasattr(write, "__wrapped__"):  # replaced already
        return True

    @functools.wraps(write)
    def write_from_every_process(
        key: str, seconds: float, name: str, backend: Any, executable: Any, *rest: Any
    ) -> None:
        if jax.process_index() == 0:
            write(key, seconds, name, backend, executable, *rest)
        elif seconds >= setting("jax_persistent_cache_min_compile_time_secs"):
            try:
                put(key, name, executable, backend, int(seconds))
            except Exception as error:  # as JAX does: a cache that fails only costs time
                text = f"Cannot write {name!r} to JAX's compilation cache: {error}"
                warnings.warn(text, stacklevel=2)

    _compiler._cache_write = write_from_every_process
    return True


def connect_distributed(service: str, index: int, size: int, hostname: str, patience: int) -> bool:
    """Connect this process as number ``index`` of ``size`` to a running coordination service.

    Unlike ``jax.distributed.initialize``, this starts no service, terminates no process when a peer
    is lost, does not handle SIGTERM, and binds the sockets of CPU collectives to ``hostname`` only.

    Args:
        service: The address of the service; empty if this JAX could not start one.
        index: The number of this process.
        size: The number of processes.
        hostname: The address for CPU collectives.
        patience: Seconds to wait for the connection.

    Returns:
        Whether this JAX allows it; if not, nothing was changed.
    """
    if not service:
        return False
    state: Any = getattr(_distributed, "global_state", None)
    factories: dict[str, Any] = getattr(_xla_bridge, "_backend_factories", {})
    known = hasattr(factories.get("cpu"), "factory") and jaxlib.can_connect()
    if state is None or not known:
        return False  # pragma: no cover - a JAX that moved it
    client = jaxlib.connected_client(service, index, patience)
    _own_clients.append(client)
    state.coordinator_address, state.client = service, client
    state.process_id, state.num_processes = index, size
    registration = _local_cpu.setdefault("cpu", factories["cpu"])
    start = registration.factory

    def start_with_collectives() -> Any:
        return start(collectives=jaxlib.tcp_collectives(client, hostname))

    factories["cpu"] = dataclasses.replace(registration, factory=start_with_collectives)
    return True


def disconnect_distributed() -> None:
    """Disconnect from the service of `connect_distributed`; JAX's devices remain usable.

    A thread that waits at the service for another process gets an error.
    """
    state: Any = getattr(_distributed, "global_state", None)
    client: Any = getattr(state, "client", None)
    if any(client is ours for ours in _own_clients):
        state.client = None
        with contextlib.suppress(Exception):  # the service may be gone
            client.shutdown()


def can_reset_backends() -> bool:
    """Whether `reset_backends` works with this JAX."""
    state: Any = getattr(_distributed, "global_state", None)
    names = ("client", "process_id", "num_processes", "coordinator_address")
    return callable(getattr(jax_backend, "clear_backends", None)) and all(
        hasattr(state, name) for name in names
    )


def reset_backends() -> None:
    """Drop JAX's backends, programs and connection; the next use of JAX starts new backends.

    Arrays of the old backends stay readable, and JAX copies uncommitted ones to the new devices
    where they are used. The process is alone afterwards; `connect_distributed` connects it again.
    """
    state: Any = _distributed.global_state
    disconnect_distributed()
    _own_clients.clear()
    state.process_id, state.num_processes, state.coordinator_address = 0, 1, None
    if (registration := _local_cpu.get("cpu")) is not None:
        _xla_bridge._backend_factories["cpu"] = registration
    jax_backend.clear_backends()
    jax.clear_caches()
    _described.cache_clear()


_local_cpu: dict[str, Any] = {}  # the registration of the CPU without the collectives of processes
_own_clients: list[Any] = []  # the clients that `connect_distributed` created

_SHOWN_GPUS = "jax_cuda_visible_devices"


def cuda_is_possible() -> bool:
    """Whether JAX's CUDA plugin is installed, and the setting of platforms allows it."""
    platforms = jax.config.values.get("jax_platforms")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return False
    return any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))


def shown_gpus() -> str:
    """Return the GPUs that JAX uses: "all", or comma-separated numbers of visible GPUs."""
    return str(jax.config.values.get(_SHOWN_GPUS, "all"))


def show_gpus(numbers: Sequence[int]) -> None:
    """Make JAX use only some of the visible GPUs; call before JAX is initialized."""
    if _SHOWN_GPUS in jax.config.values:
        jax.config.update(_SHOWN_GPUS, ",".join(map(str, numbers)))


@dataclasses.dataclass(frozen=True)
class FoundCluster:
    """A cluster that JAX detected or connected to.

    Attributes:
        count: The number of processes.
        index: The number of this process.
        coordinator: The address of the coordinator.
        source: The name of the environment that it was detected in.
    """

    count: int
    index: int
    coordinator: str
    source: str


def distributed_client() -> FoundCluster | None:
    """Return the cluster of `jax.distributed.initialize`; None if it was not called.

    It is not read from JAX's devices, which would initialize the backends. A client that
    `connect_distributed` created does not count.
    """
    state: Any = getattr(_distributed, "global_state", None)
    if not jax.distributed.is_initialized() or getattr(state, "client", None) in _own_clients:
        return None
    names = ("num_processes", "process_id", "coordinator_address")
    count, index, coordinator = (getattr(state, name, None) for name in names)
    if count is None or index is None:  # pragma: no cover - a JAX that moved them
        count, index = jax.process_count(), jax.process_index()
    return FoundCluster(count, index, coordinator or "", "jax.distributed")


def share_text(name: str, text: str | None, seconds: float) -> str:
    """Share ``text`` with all processes that `jax.distributed` connected; return it in each.

    Args:
        name: The key; each can be used once.
        text: The text, in one process; None in the others, which wait for it.
        seconds: The timeout.
    """
    client: Any = _distributed.global_state.client
    if text is not None:
        client.key_value_set(name, text)
    found: str = client.blocking_key_value_get(name, int(seconds * 1000))
    return found


def detected_cluster() -> FoundCluster | None:
    """Return the cluster that JAX detects on Cloud TPU or Kubernetes; None if there is none.

    `jax.distributed.initialize` uses the same detection, but connects immediately.
    """
    kinds: Any = getattr(_inside("clusters"), "ClusterEnv", None)
    wanted = {"GceTpuCluster"}
    if "JOB_COMPLETION_INDEX" in os.environ:  # other pods, such as notebooks, are not workers
        wanted.add("K8sCluster")
    for kind in getattr(kinds, "_cluster_types", ()):
        if kind.__name__ not in wanted or not kind.is_env_present():
            continue
        port = os.environ.get("JAX_COORDINATOR_PORT")
        address = kind.get_coordinator_address(timeout_secs=300, override_coordinator_port=port)
        source = {"GceTpuCluster": "Cloud TPU", "K8sCluster": "Kubernetes"}[kind.__name__]
        return FoundCluster(kind.get_process_count(), kind.get_process_id(), address, source)
    return None


_assigns: dict[int, tuple[Any, Callable[..., Any]]] = {}


def give_assign(x: Any, assign: Callable[..., Any]) -> None:
    """Attach a method ``assign`` to an array or a tracer; do nothing if JAX does not allow it."""
    if not isinstance(x, jax.core.Tracer):
        with contextlib.suppress(AttributeError):
            x.assign = assign
        return
    # Tracers cannot have new attributes, so their class gets a property that looks the method up.
    # This is done on first use: other programs see JAX's class unchanged.
    if not hasattr(jax.core.Tracer, "assign"):
        jax.core.Tracer.assign = property(_given_assign)  # type: ignore[attr-defined]
    number = id(x)
    with contextlib.suppress(TypeError):
        _assigns[number] = (weakref.ref(x, lambda _: _assigns.pop(number, None)), assign)


def _given_assign(x: Any) -> Any:
    found = _assigns.get(id(x))
    if found is None or found[0]() is not x:
        raise AttributeError(f"{type(x).__name__!r} object has no attribute 'assign'")
    return found[1]


def accept_as_array(
    kind: type, describe: Callable[[Any], Any], read: Callable[[Any], jax.Array]
) -> None:
    """Make JAX functions accept objects of ``kind`` as arrays.

    ``jnp.asarray`` and operators support ``__jax_array__``, but jitted functions, including most of
    ``jax.numpy``, do not. If a version of JAX handled the objects differently than expected here, a
    compiled function would silently use a variable's first value forever. So this is tested once by
    tracing a small function. If the test fails, JAX keeps rejecting the objects, and a warning is
    logged.

    Args:
        kind: The type.
        describe: Returns the `jax.core.ShapedArray` of an object.
        read: Returns the array of an object, or a tracer in a function that is being traced.
    """
    if _reads_objects():
        _enter(kind, describe, read)
    else:
        _log.warning(
            "JAX %s does not accept variables as arrays in a way that replicax supports, and will"
            " reject them. Pass their values: `jnp.sum(variable.value())`. The supported versions"
            " of JAX are in replicax's requirements: `pip install --upgrade replicax`.",
            jax.__version__,
        )


def _enter(kind: type, describe: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
    _core.pytype_aval_mappings[kind] = describe
    _dtypes.canonicalize_value_handlers[kind] = read
    canonical = getattr(_core, "canonicalize_value_dtype", None)
    if canonical is None:
        return

    # JAX 0.10.1 and earlier look only numbers up in the table.
    def canonical_too(x: Any) -> Any:
        return read(x) if type(x) is kind else canonical(x)

    _core.canonicalize_value_dtype = canonical_too


def dispatch_as_array(kind: type, read: Callable[[Any], jax.Array]) -> None:
    """Enable JAX's fast C++ dispatch of jitted functions for arguments of type ``kind``.

    With an unknown type, every call would take the slow path through Python.
    """
    registry: Any = getattr(_tree_util, "dispatch_registry", None)
    with contextlib.suppress(AttributeError):  # without it, calls are only slower
        registry.register_node(kind, lambda x: ((read(x),), None), lambda _, leaves: leaves[0])


class _Probe:
    """An array-like object, as variables are, for testing how JAX handles it."""

    now: Any

    def __jax_array__(self) -> Any:
        return self.now


@functools.cache
def _reads_objects() -> bool:
    """Whether JAX reads a registered object at each use: traced, jitted and differentiated.

    This runs in a new thread, because the answer holds for the whole process, and the caller may be
    inside a trace, or under settings that change how JAX traces.
    """
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(_tried()), name="replicax-probe")
    thread.start()
    thread.join()
    return answers == [True]


def _tried() -> bool:
    probe: Any = _Probe()

    def use(x: jax.Array) -> jax.Array:
        probe.now = x
        used: jax.Array = jax.lax.neg(probe) + jax.numpy.add(probe, 1) + jax.numpy.square(probe)
        return used

    number = jax.ShapeDtypeStruct((), "float32")
    try:
        _enter(_Probe, lambda p: jax.typeof(p.now), lambda p: p.now)
        traced = [jax.make_jaxpr(f)(number) for f in (use, jax.grad(use))]
    except Exception:  # any failure means that this JAX is not supported
        return False
    return not any(t.consts for t in traced) and all(
        any(t.jaxpr.invars[0] in e.invars for e in t.eqns) for t in traced
    )
