"""The one module that touches JAX internals; each use is guarded and tested.

Every function here has a public fallback, slower or less precise, for a JAX that moved things.
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
from jax.extend import core as jaxprs
from jax.interpreters import mlir

from replicax import _jaxlib_private

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
    """The primitives and thread-local states that the modules of JAX, and of replicax, hold.

    Modules that were imported since the last look are added, and no module is searched twice.
    """

    def __init__(self) -> None:
        self._searched: set[str] = set()
        self._primitives: dict[int, Any] = {}
        self._states: dict[int, Any] = {}

    def primitives(self) -> Mapping[int, Any]:
        """Return JAX's own primitives, by their identity."""
        self._search()
        return self._primitives

    def states(self) -> Iterable[Any]:
        """Return every state of JAX that has a value per thread."""
        self._search()
        return self._states.values()

    def _search(self) -> None:
        if len(self._searched) == len(sys.modules):
            return
        kind: Any = getattr(getattr(_config, "config_ext", None), "Config", ())
        for name, module in list(sys.modules.items()):
            if name in self._searched or not name.startswith(("jax.", "replicax.")):
                self._searched.add(name)
                continue
            self._searched.add(name)
            for x in list(getattr(module, "__dict__", {}).values()):
                if isinstance(x, jaxprs.Primitive) and name.startswith("jax."):
                    self._primitives[id(x)] = x
                # A user context, such as ours, keeps its state in an attribute.
                state = getattr(x, "_obj", None) if _is_user_context(x) else x
                if isinstance(state, kind) and hasattr(state, "get_local"):
                    self._states[id(state)] = state
        for state in getattr(_config, "config_states", {}).values():
            self._states[id(state)] = state


_inventory = _Inventory()


def is_of_jax(primitive: Any) -> bool:
    """Whether ``primitive`` is one of JAX's own, and not another that has the same name.

    A primitive is JAX's own if a module of JAX holds it.
    """
    return id(primitive) in _inventory.primitives()


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many constants and carries the parameters of a ``scan`` equation name."""
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
    """The settings of JAX that decide what a trace of the same Python gives, in a hashable form."""
    return _public_settings(jax.config)


settings = getattr(_config, "trace_context", None) or settings


class _TraceNow:
    """What is being traced now, the public way."""

    @property
    def value(self) -> Any:
        with jaxprs.take_current_trace() as trace:
            return trace


# ``traced.value`` is ``at_rest`` where JAX neither traces nor transforms: asked by every `next`.
traced: Any = getattr(_core, "trace_state_strong_ref", None) or _TraceNow()
at_rest: Any = _TraceNow().value


class Listening(jax.core.Trace):
    """A trace that only listens: values stay what they are where it listens, at ``parent``."""

    def __init__(self, parent: Any) -> None:
        super().__init__()
        self.parent = parent


def surrounding(trace: Any) -> Any:
    """A trace of JAX without those that only listen."""
    while isinstance(trace, Listening):
        trace = trace.parent
    return trace


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Have none who listens hear what this thread does until the block ends."""
    return jaxprs.set_current_trace(surrounding(traced.value))


class concrete:  # noqa: N801 - it is used as a function
    """Evaluate operations now until the block ends, also while JAX traces a function.

    It does what `jax.ensure_compile_time_eval` does, whose generator could end late: see
    `replicax._blocks`.
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

    JAX sets the current trace, the axes in scope and many settings for a block, and puts
    them back in Python code, which the exception of a signal handler may interrupt. The thread
    would then stay inside a trace that has ended, and every later call would fail.
    """
    restore = [partial(s.set_local, s.get_local()) for s in _inventory.states()]
    folding = getattr(_config, "eager_constant_folding", None)
    try:
        # An interrupted `jax.ensure_compile_time_eval` may have left this on, and the trace would
        # evaluate operations that stand for the reads of variables.
        if folding is not None:
            folding.set_local(False)
        return fn()
    finally:
        _run_all(map(call, restore))  # one call into C: no handler of a signal runs in between


_run_all: Callable[[Iterable[Any]], None] = deque(maxlen=0).extend


def _is_user_context(x: Any) -> bool:
    return type(x).__module__ == "jax._src.config" and type(x).__name__ == "UserContext"


def uncommitted(x: jax.Array) -> jax.Array:
    """The one-device array ``x``, free to meet arrays of other devices.

    JAX refuses to combine arrays that are *committed* to different devices, which would break
    ordinary programs such as ``sum(strategy.experimental_local_results(x))``. An uncommitted array
    stays where it is and moves when it meets another one. No copy is made.
    """
    if not x.committed:
        return x
    if _ArrayImpl is None:  # pragma: no cover - a JAX that moved it
        with jax.default_device(next(iter(x.devices()))):
            return jax.numpy.asarray(jax.device_get(x))
    buffers = getattr(x, "_arrays", None)
    if buffers is None:  # random keys: an array of numbers in disguise
        numbers = uncommitted(jax.random.key_data(x))
        keys: jax.Array = jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
        return keys
    freed: jax.Array = _ArrayImpl(x.aval, x.sharding, buffers, committed=False, _skip_checks=True)
    return freed


def renewed(x: jax.Array) -> jax.Array:
    """Another array with the content of ``x``; a concrete one shares its memory."""
    buffers = getattr(x, "_arrays", None) if type(x) in ARRAY_TYPES else None
    if buffers is None:
        return jax.numpy.copy(x)
    made: jax.Array = _ArrayImpl(
        x.aval, x.sharding, buffers, committed=x.committed, _skip_checks=True
    )
    return made


def put_rows(rows: Sequence[np.ndarray], sharding: Any, devices: Sequence[jax.Device]) -> jax.Array:
    """One array, whose parts are ``rows`` on ``devices``; it may share their memory."""
    shape, dtype = (sum(map(len, rows)), *rows[0].shape[1:]), rows[0].dtype
    put: Any = getattr(_pxla, "batched_device_put", None)
    if put is None:  # pragma: no cover - a JAX that moved it
        parts = list(map(jax.device_put, rows, devices))
        return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=dtype)
    described = _described(shape, dtype, jax.sharding.get_abstract_mesh())
    return put(described, sharding, rows, devices)  # type: ignore[no-any-return]


# What JAX knows of an array where such a mesh is set: a look-up is a tenth of making it.
_described = functools.lru_cache(lambda shape, dtype, mesh: jax.core.ShapedArray(shape, dtype))


@functools.cache
def ordered_effect() -> Any:
    """What operations declare that must run in the order in which they were traced.

    JAX then ties each to the one before it, in every transformation and all control flow.
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
    """The lowering rule of a primitive with the ordered effect: a call to Python on the host."""
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
    """The value of a setting of JAX; its types know only ``update``."""
    return getattr(jax.config, name)


def backend_is_initialized() -> bool:
    """Whether JAX has started, after which the number of its devices is fixed."""
    if (started := getattr(_xla_bridge, "backends_are_initialized", None)) is not None:
        return bool(started())
    return _refuses_another_device_count()  # pragma: no cover - a JAX that moved it


def _refuses_another_device_count() -> bool:
    """The same, by a rule that JAX documents: this setting cannot change after the start."""
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
    """Have JAX start a platform's client inside ``surroundings()``; False if it offers no way."""
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
    """Put what ``make`` makes of JAX's compiler into its place; False if this JAX offers no way.

    The compiler takes a client, a module, its devices, options and callbacks, and gives a loaded
    program.
    """
    compile_and_load = getattr(_compiler, "backend_compile_and_load", None)
    if compile_and_load is None:  # pragma: no cover - a JAX that moved it
        return False
    _compiler.backend_compile_and_load = make(compile_and_load)
    return True


def keep_programs_of_all() -> bool:
    """Let every process write to JAX's compilation cache; return False if this JAX has no way.

    JAX lets only the first process write, to spare remote file systems. The programs of the others
    have keys of their own, so that a restart would compile them again.
    """
    write: Any = getattr(_compiler, "_cache_write", None)
    put: Any = getattr(_compilation_cache, "put_executable_and_time", None)
    if put is None or write is None:  # pragma: no cover - a JAX that moved them
        return False

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
    """Make this process number ``index`` of ``size``, at a coordination service that is running.

    Unlike ``jax.distributed.initialize``, it starts no service, ends no process when a peer is
    lost, leaves SIGTERM alone, and binds the sockets of CPU collectives to ``hostname`` only.

    Returns:
        Whether this JAX offers a way, and had one to start the service (which then has an
        address); if not, nothing has happened.
    """
    if not service:
        return False
    state: Any = getattr(_distributed, "global_state", None)
    factories: dict[str, Any] = getattr(_xla_bridge, "_backend_factories", {})
    known = hasattr(factories.get("cpu"), "factory") and _jaxlib_private.can_connect()
    if state is None or not known:
        return False  # pragma: no cover - a JAX that moved it
    client = _jaxlib_private.connected_client(service, index, patience)
    _own_clients.append(client)
    state.coordinator_address, state.client = service, client
    state.process_id, state.num_processes = index, size
    registration = factories["cpu"]
    start = registration.factory

    def start_with_collectives() -> Any:
        return start(collectives=_jaxlib_private.tcp_collectives(client, hostname))

    factories["cpu"] = dataclasses.replace(registration, factory=start_with_collectives)
    return True


def disconnect_distributed() -> None:
    """Leave the coordination service of `connect_distributed`; the devices of this process stay."""
    state: Any = getattr(_distributed, "global_state", None)
    client: Any = getattr(state, "client", None)
    if any(client is own for own in _own_clients):
        state.client = None
        with contextlib.suppress(Exception):  # the service may be gone
            client.shutdown()


_own_clients: list[Any] = []  # those of `connect_distributed`

_SHOWN_GPUS = "jax_cuda_visible_devices"


def cuda_is_possible() -> bool:
    """Whether JAX has its CUDA plugin, and may use it."""
    platforms = jax.config.values.get("jax_platforms")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return False
    return any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))


def shown_gpus() -> str:
    """Return which GPUs JAX is to use: "all", or their numbers among the visible ones."""
    return str(jax.config.values.get(_SHOWN_GPUS, "all"))


def show_gpus(numbers: Sequence[int]) -> None:
    """Have JAX use some of the visible GPUs only; before it starts."""
    if _SHOWN_GPUS in jax.config.values:
        jax.config.update(_SHOWN_GPUS, ",".join(map(str, numbers)))


@dataclasses.dataclass(frozen=True)
class FoundCluster:
    """Processes that JAX found or connected: how many, which this one is, and where they meet."""

    count: int
    index: int
    coordinator: str
    source: str


def distributed_client() -> FoundCluster | None:
    """Return the processes that `jax.distributed.initialize` connected; None if it was not called.

    Reading them from JAX's devices would start JAX, which may not have happened yet. A client of
    `connect_distributed` does not count.
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
    """Give ``text`` to all processes that `jax.distributed` connected, or wait for it.

    Args:
        name: What it is; each name can be given once.
        text: The text, in one process; None in the others.
        seconds: How long to wait for it.
    """
    client: Any = _distributed.global_state.client
    if text is not None:
        client.key_value_set(name, text)
    found: str = client.blocking_key_value_get(name, int(seconds * 1000))
    return found


def detected_cluster() -> FoundCluster | None:
    """Return the first cluster that JAX detects by asking a server, if this process is in one.

    `jax.distributed.initialize` uses the same detection, but connects at once.
    """
    kinds: Any = getattr(_inside("clusters"), "ClusterEnv", None)
    wanted = {"GceTpuCluster"}
    if "JOB_COMPLETION_INDEX" in os.environ:  # other pods, such as notebooks, are no workers
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
    """Give an array, or a tracer, a method ``assign``; a JAX that has no room for it gives none."""
    if not isinstance(x, jax.core.Tracer):
        with contextlib.suppress(AttributeError):
            x.assign = assign
        return
    # Tracers have no room for attributes: their class looks the method up. It is changed for the
    # first part of a variable in traced code, so that programs without one see JAX's own class.
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
    """Let JAX functions take objects of ``kind`` where they take arrays.

    ``jnp.asarray`` and operators know ``__jax_array__``, but functions that are jitted, most of
    ``jax.numpy`` among them, refuse it. A JAX that takes them in another way than this expects
    would keep a variable's first value for ever in a compiled function, without a word. So it is
    tried, with a small function that is traced and runs on no device. Where it fails, JAX goes on
    refusing the objects, and the log says once what to write.

    Args:
        kind: The type.
        describe: Gives the `jax.core.ShapedArray` of an object.
        read: Gives its array, or a tracer in a function that is being traced.
    """
    if _reads_objects():
        _enter(kind, describe, read)
    else:
        _log.warning(
            "JAX %s does not take variables where it takes arrays in a way that replicax knows, and"
            " will refuse them. Pass their values: `jnp.sum(variable.value())`. The versions that"
            " replicax is made for are in its requirements: `pip install --upgrade replicax`.",
            jax.__version__,
        )


def _enter(kind: type, describe: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
    _core.pytype_aval_mappings[kind] = describe
    _dtypes.canonicalize_value_handlers[kind] = read
    canonical = getattr(_core, "canonicalize_value_dtype", None)
    if canonical is None:
        return

    # JAX 0.10.1 and before ask the table for numbers only.
    def canonical_too(x: Any) -> Any:
        return read(x) if type(x) is kind else canonical(x)

    _core.canonicalize_value_dtype = canonical_too


def dispatch_as_array(kind: type, read: Callable[[Any], jax.Array]) -> None:
    """Let calls of jitted functions find compiled code for objects of ``kind`` without Python.

    A type that the dispatch of JAX does not know takes the slow way of a first call every time.
    """
    registry: Any = getattr(_tree_util, "dispatch_registry", None)
    with contextlib.suppress(AttributeError):  # only time is lost
        registry.register_node(kind, lambda x: ((read(x),), None), lambda _, leaves: leaves[0])


class _Probe:
    """An object that stands for an array, as variables do."""

    now: Any

    def __jax_array__(self) -> Any:
        return self.now


@functools.cache
def _reads_objects() -> bool:
    """Whether an object in the tables is read where it is used: traced, jitted, differentiated.

    A thread of its own tries it: the caller may be inside a trace or under settings that change
    how JAX traces, and the answer holds for the whole process.
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
    except Exception:  # whatever a JAX of other ways makes of it
        return False
    return not any(t.consts for t in traced) and all(
        any(t.jaxpr.invars[0] in e.invars for e in t.eqns) for t in traced
    )
