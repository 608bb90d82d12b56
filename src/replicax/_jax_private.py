"""The one module that touches JAX internals; each use is guarded and tested.

Every function here has a public fallback, slower or less precise, for a JAX that moved things.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import take_current_trace

_xla_bridge: Any = None
with contextlib.suppress(ImportError):
    from jax._src import xla_bridge as _xla_bridge

_distributed: Any = None
with contextlib.suppress(ImportError):
    from jax._src import distributed as _distributed

_jaxlib: Any = None
with contextlib.suppress(ImportError):
    from jaxlib import _jax as _jaxlib  # type: ignore[no-redef]

_core: Any = None
_dtypes: Any = None
with contextlib.suppress(ImportError):
    from jax._src import core as _core
    from jax._src import dtypes as _dtypes

_ArrayImpl: Any = None
with contextlib.suppress(ImportError):
    from jax._src.array import ArrayImpl as _ArrayImpl


class _TraceNow:
    """What is being traced now, the public way."""

    @property
    def trace(self) -> Any:
        with take_current_trace() as trace:
            return trace


# ``tracing.trace`` is ``at_rest`` where JAX neither traces nor transforms: asked by every `next`.
tracing: Any = getattr(_core, "trace_ctx", None) or _TraceNow()
at_rest: Any = _TraceNow().trace


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


def surround_cpu_start(surroundings: Callable[[], contextlib.AbstractContextManager[None]]) -> bool:
    """Have JAX start its CPU client inside ``surroundings()``; False if this JAX offers no way."""
    factories: dict[str, Any] = getattr(_xla_bridge, "_backend_factories", {})
    registration: Any = factories.get("cpu")
    if not hasattr(registration, "factory"):  # pragma: no cover - a JAX that moved it
        return False
    start = registration.factory

    def start_inside(**options: Any) -> Any:
        with surroundings():
            return start(**options)

    factories["cpu"] = dataclasses.replace(registration, factory=start_inside)
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
    new_client: Any = getattr(_jaxlib, "get_distributed_runtime_client", None)
    new_collectives: Any = getattr(_jaxlib, "make_gloo_tcp_collectives", None)
    factories: dict[str, Any] = getattr(_xla_bridge, "_backend_factories", {})
    if None in (state, new_client, new_collectives) or not hasattr(factories.get("cpu"), "factory"):
        return False  # pragma: no cover - a JAX that moved it
    client = new_client(
        service,
        index,
        init_timeout=patience,
        heartbeat_timeout=1_000_000,
        shutdown_timeout=5,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state.coordinator_address, state.client = service, client
    state.process_id, state.num_processes = index, size
    registration = factories["cpu"]
    start = registration.factory

    def start_with_collectives() -> Any:
        return start(collectives=new_collectives(distributed_client=client, hostname=hostname))

    factories["cpu"] = dataclasses.replace(registration, factory=start_with_collectives)
    return True


def accept_as_array(
    kind: type, describe: Callable[[Any], Any], read: Callable[[Any], jax.Array]
) -> None:
    """Let JAX functions take objects of ``kind`` where they take arrays.

    ``jnp.asarray`` and operators know ``__jax_array__``, but functions that are jitted, most of
    ``jax.numpy`` among them, refuse it. Where the tables of JAX have moved, they go on refusing:
    then ``jnp.sum(variable.value())`` works.

    Args:
        kind: The type.
        describe: Gives the `jax.core.ShapedArray` of an object.
        read: Gives its array, or a tracer in a function that is being traced.
    """
    with contextlib.suppress(AttributeError):
        _core.pytype_aval_mappings[kind] = describe
        _dtypes.canonicalize_value_handlers[kind] = read
