"""Arrays on the devices of a topology: one for each replica <-> one global array.

A *stacked* array has one row for each replica and is what compiled code takes and gives. A *joined*
array is declared the same on all replicas while they may differ; it never leaves this module and
``replicax.values._pieces``, where each replica looks at its own part only. Within a replica, an
array is on every logical device, or cut over them as a spec of their mesh axes says.
"""

import reprlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from replicax._basics import StandIn
from replicax._jax_private import at_rest, concrete, put_rows, traced, uncommitted
from replicax._show import Sheet, short
from replicax.topology._devices import shown_devices
from replicax.topology._mesh import REPLICA_AXIS, Topology

WHOLE = PartitionSpec()  # not cut: on every logical device of a replica
NUMERIC = "biufcV"  # kinds of NumPy's dtypes that JAX may have; bfloat16 is a V
_WIDE = 8  # bytes of the integers that JAX does not have, unless x64 is on


def is_array(x: Any) -> bool:
    """Whether ``x`` is a JAX array, concrete or traced, and no distributed value."""
    return isinstance(x, jax.Array) and not isinstance(x, StandIn)


def is_traced(x: Any) -> bool:
    """Whether ``x`` is the stand-in for an array in a function that is being traced."""
    return isinstance(x, Tracer)


def is_staging() -> bool:
    """Whether operations on constants are recorded rather than run."""
    return traced.value is not at_rest and is_traced(jax.lax.neg(np.float32(0)))


def on_device(x: Any, device: jax.Device) -> jax.Array:
    """``x`` on ``device``, free to meet arrays of other devices."""
    placed: jax.Array = jax.device_put(x, device)
    return uncommitted(placed)


def fitting(x: Any) -> Any:
    """An array of NumPy with the integers that JAX will have: 32 bits wide, unless x64 is on.

    Raises:
        OverflowError: If that would make other numbers of them, as JAX does without a word.
    """
    if x.dtype.kind not in "iu" or x.dtype.itemsize < _WIDE:
        return x
    narrow = jax.dtypes.canonicalize_dtype(x.dtype)
    if narrow == x.dtype:
        return x
    limits = np.iinfo(narrow)
    if x.size and (x.max() > limits.max or x.min() < limits.min):
        found = x.max() if x.max() > limits.max else x.min()
        raise OverflowError(
            f"{found} does not fit into {narrow}, which JAX has in place of {x.dtype}. Write"
            ' `jax.config.update("jax_enable_x64", True)` before anything else, or set'
            " JAX_ENABLE_X64=1, to have 64 bits; or keep such numbers out of what devices compute,"
            " for example as strings or by `% 2**31`."
        )
    return x.astype(narrow)


def private(x: Any) -> Any:
    """``x``, or a copy if it is an array of NumPy, which its owner may change.

    `device_put` and compiled functions read it later, even if they may not alias it.

    Raises:
        OverflowError: If an integer does not fit.
    """
    if not isinstance(x, np.ndarray | np.generic):
        return x
    taken = fitting(x)
    return x.copy() if taken is x else taken


def is_weak(x: Any) -> bool:
    """Whether ``x`` was made of Python numbers, so that JAX lets what it meets decide its dtype."""
    return getattr(x, "weak_type", False) is True


def strong(x: Any) -> Any:
    """``x``; if it is a weak array, one with its dtype for good, as every replica's value has."""
    if not is_weak(x):
        return x
    if is_traced(x):
        return jax.lax.convert_element_type(x, x.dtype)
    with jax.default_device(next(iter(x.devices()))):  # where it is, also if it is free to move
        return jax.lax.convert_element_type(x, x.dtype)


def as_array(x: Any) -> jax.Array:
    """``x`` as an array of JAX, in memory of its own if it is NumPy's."""
    return jnp.asarray(private(x))


def is_settled(x: Any, dtype: Any) -> bool:
    """Whether ``x`` is traced and has the type ``dtype`` for good, with nothing left to do."""
    return is_traced(x) and x.dtype == dtype and not x.weak_type


def own_copy(x: Any) -> jax.Array:
    """``x`` in memory of its own; nothing is compiled for it, as `jnp.copy` does for each shape."""
    if is_traced(x):
        return x  # type: ignore[no-any-return]
    if not is_array(x):
        return jax.device_put(fitting(np.array(x)))  # type: ignore[no-any-return]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # device_put would forget where they are
        numbers = own_copy(jax.random.key_data(x))
        keys: jax.Array = jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
        return keys
    if not x.is_fully_addressable:
        parts = [jax.device_put(shard.data, may_alias=False) for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts, dtype=x.dtype)
    copied: jax.Array = jax.device_put(x, may_alias=False)
    return copied


def replicate(x: Any, topology: Topology, spec: PartitionSpec = WHOLE) -> jax.Array:
    """The same value on every replica of ``topology``, in memory of its own."""
    sharding = topology.sharding(spec)
    own = own_copy(x)
    if topology.is_whole:
        placed: jax.Array = jax.device_put(own, sharding)
        return placed
    # Across processes device_put is a collective that compares; this is local.
    return jax.make_array_from_callback(own.shape, sharding, lambda index: own[index])


def split(joined: jax.Array, topology: Topology) -> tuple[jax.Array, ...]:
    """What each of this process's replicas holds, in their order."""
    shards = {shard.device: shard.data for shard in joined.addressable_shards}
    if joined.is_fully_replicated:
        return tuple(uncommitted(shards[device]) for device in topology.leads)
    return tuple(_assembled(joined, shards, topology, replica) for replica in topology.own)


def _assembled(
    joined: jax.Array, shards: dict[jax.Device, jax.Array], topology: Topology, replica: int
) -> jax.Array:
    """One replica's array, cut over its logical devices."""
    assert isinstance(joined.sharding, NamedSharding)
    own = NamedSharding(topology.mesh_of(replica), joined.sharding.spec)
    parts = [shards[device] for device in topology.devices_of(replica)]
    return jax.make_array_from_single_device_arrays(joined.shape, own, parts, dtype=joined.dtype)


def join(pieces: Sequence[Any], topology: Topology, spec: PartitionSpec = WHOLE) -> jax.Array:
    """One piece for each replica, as an array that claims to be the same on all of them."""
    check_count(len(pieces), topology)
    shards = [
        shard
        for piece, replica in zip(pieces, topology.own, strict=True)
        for shard in _shards(piece, topology, replica, spec)
    ]
    piece = pieces[0]
    dtype = piece.dtype if is_array(piece) else jnp.result_type(piece)
    return jax.make_array_from_single_device_arrays(
        np.shape(piece), topology.sharding(spec), shards, dtype=dtype
    )


def _shards(piece: Any, topology: Topology, replica: int, spec: PartitionSpec) -> list[jax.Array]:
    devices = topology.devices_of(replica)
    if spec == WHOLE:
        return [_at(piece, device) for device in devices]
    cut = jax.device_put(private(piece), NamedSharding(topology.mesh_of(replica), spec))
    at = {shard.device: shard.data for shard in cut.addressable_shards}
    return [at[device] for device in devices]


def _at(piece: Any, device: jax.Device) -> jax.Array:
    if isinstance(piece, jax.Array) and piece.devices() == {device}:
        return piece
    placed: jax.Array = jax.device_put(private(piece), device)
    return placed


def check_count(components: int, topology: Topology) -> None:
    """Refuse a per-replica value of another number of replicas.

    Raises:
        ValueError: If there is not one component for each replica.
    """
    if components != len(topology.own):
        raise ValueError(
            f"A per-replica value of {components} components was used with"
            f" {len(topology.own)} replicas, each of which needs one. Make it with"
            " `strategy.experimental_distribute_values_from_function`, or take it from a `run` of"
            " the same strategy."
        )


def first(x: jax.Array) -> jax.Array:
    """The first device's copy of a replicated array; one that is cut over devices as it is."""
    return uncommitted(x.addressable_data(0)) if x.is_fully_replicated else x


def stack(pieces: Sequence[Any], topology: Topology) -> jax.Array:
    """Equal-shaped pieces as one array with a row for each replica."""
    placed = topology.is_whole and all(map(is_array, pieces))
    if any(map(is_traced, pieces)) or (not placed and is_staging()):
        return _stack_staged(pieces, topology)
    if (at_once := stack_at_once(pieces, topology)) is not None:
        return at_once
    check_count(len(pieces), topology)
    if len({p.dtype if is_array(p) else jnp.result_type(p) for p in pieces}) > 1:
        dtype = jnp.result_type(*pieces)
        pieces = [as_array(p).astype(dtype) for p in pieces]
    if not topology.is_whole:
        return _stack_own(pieces, topology)
    if topology.cores > 1 and all(isinstance(p, np.ndarray) for p in pieces):
        sent: jax.Array = jax.device_put(fitting(np.stack(pieces)), topology.stacked)
        return sent
    stacked: jax.Array = _stacker(topology)(join(pieces, topology))
    return stacked


def stack_at_once(pieces: Sequence[Any], topology: Topology) -> jax.Array | None:
    """The same in one transfer and without a program, for pieces in memory that are all alike.

    Every step that is given such pieces comes here: each is asked for no more than it must be.

    Returns:
        None for other pieces.
    """
    devices, head = topology.leads, pieces[0]
    if topology.cores > 1 or not topology.is_whole or len(pieces) != len(devices):
        return None
    is_host = type(head) is np.ndarray
    if not is_host and (not is_array(head) or is_traced(head)):
        return None
    kind, shape, dtype = type(head), head.shape, head.dtype
    for p in pieces:
        if type(p) is not kind or p.shape != shape or p.dtype != dtype:
            return None
    rows = _host_rows(pieces, dtype) if is_host else _device_rows(pieces, devices)
    return None if rows is None else put_rows(rows, topology.stacked, devices)


def _host_rows(pieces: Sequence[np.ndarray], dtype: np.dtype) -> list[np.ndarray] | None:
    if dtype.kind not in NUMERIC:
        return None
    narrow = jax.dtypes.canonicalize_dtype(dtype)
    return [np.array(fitting(p), narrow)[None] for p in pieces]


def _device_rows(pieces: Sequence[Any], devices: Sequence[jax.Device]) -> list[np.ndarray] | None:
    """What NumPy sees of arrays where they are, without copies."""
    head, cpus = pieces[0], _cpus_beside(devices[0])
    is_plain = isinstance(head.dtype, np.dtype) and 0 not in head.shape
    if not is_plain or len(pieces) == 1:  # one piece is a row where it is, by a program
        return None
    for piece in pieces:
        where = piece.sharding.device_set
        if len(where) > 1 or not where <= cpus or not piece.is_ready():
            return None
    return [np.asarray(p)[None] for p in pieces]


@cache
def _cpus_beside(device: jax.Device) -> frozenset[jax.Device]:
    """The devices that share the memory of a CPU, which are all of its process; none for others."""
    is_cpu = device.platform == "cpu"
    return frozenset(device.client.local_devices()) if is_cpu else frozenset()


def unstack(stacked: jax.Array, topology: Topology) -> tuple[jax.Array, ...]:
    """The rows of a stacked array, each on its replica's device."""
    if is_traced(stacked):
        return tuple(stacked[i] for i in range(topology.num_replicas))
    if not topology.is_whole:
        return _unstack_own(stacked, topology)
    with concrete():  # JAX may be tracing code that closes over it
        return split(_unstacker(topology)(stacked), topology)


def _stack_own(pieces: Sequence[Any], topology: Topology) -> jax.Array:
    """The same without a program of all processes, which they would have to start together."""
    rows = [
        _raised(jax.device_put(private(piece), device))
        for piece, replica in zip(pieces, topology.own, strict=True)
        for device in topology.devices_of(replica)
    ]
    shape = (topology.num_replicas, *rows[0].shape[1:])
    return jax.make_array_from_single_device_arrays(
        shape, topology.stacked, rows, dtype=rows[0].dtype
    )


def _stack_staged(pieces: Sequence[Any], topology: Topology) -> jax.Array:
    """The same in code that is traced, of all replicas' pieces or of this process's."""
    rows = jnp.stack([as_array(p) for p in pieces])
    count = len(pieces)
    if count == topology.num_replicas:
        return rows
    check_count(count, topology)

    def own_row(rows: jax.Array) -> jax.Array:
        at = jax.lax.axis_index(REPLICA_AXIS) % count
        row: jax.Array = jax.lax.dynamic_index_in_dim(rows, at, keepdims=True)
        return row

    # In other processes the same program holds their rows.
    spread = per_replica_map(own_row, topology, PartitionSpec(), PartitionSpec(REPLICA_AXIS))
    stacked: jax.Array = spread(rows)
    return stacked


def _unstack_own(stacked: jax.Array, topology: Topology) -> tuple[jax.Array, ...]:
    shards = {shard.device: shard.data for shard in stacked.addressable_shards}
    return tuple(uncommitted(_lowered(shards[device])) for device in topology.leads)


_raised = jax.jit(lambda x: x[None])
_lowered = jax.jit(lambda x: x[0])


@cache
def _stacker(topology: Topology) -> Callable[[jax.Array], jax.Array]:
    return per_replica_jit(
        lambda x: x[None], topology, PartitionSpec(), PartitionSpec(REPLICA_AXIS)
    )


@cache
def _unstacker(topology: Topology) -> Callable[[jax.Array], jax.Array]:
    return per_replica_jit(lambda x: x[0], topology, PartitionSpec(REPLICA_AXIS), PartitionSpec())


def per_replica_jit(
    fn: Callable[..., Any], topology: Topology, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``fn`` compiled to run on every replica's own shard."""
    return jax.jit(per_replica_map(fn, topology, in_specs, out_specs))


def per_replica_map(
    fn: Callable[..., Any], topology: Topology, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``fn`` on every replica's own shard, inside a traced function.

    ``check_vma=False`` is tf.distribute's meaning: a gradient stays local until it is all-reduced,
    and the gradient of an all-reduce is an all-reduce.
    """
    return jax.shard_map(
        fn,
        mesh=topology.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={REPLICA_AXIS},
        check_vma=False,
    )


_MOST_SHOWN = 8


def glanced(title: str, numbers: Iterable[Any], values: Sequence[Any]) -> str:
    """The values of some replicas as a table in HTML; large arrays are not looked at."""
    rows = tuple((str(i), *_glance(v)) for i, v in zip(numbers, values, strict=True))
    columns = ("replica", "device", "shape", "dtype", "value")
    return Sheet(title, columns=columns, rows=rows).to_html()


def _glance(x: Any) -> tuple[str, str, str, str]:
    if is_traced(x) or not isinstance(x, jax.Array | np.ndarray):
        return "", "", "", "traced" if is_traced(x) else short(reprlib.repr(x))
    where, is_here = "", True
    if isinstance(x, jax.Array):
        where = shown_devices(x.devices())
        is_here = x.is_fully_addressable and not x.is_deleted()
    is_plain = np.issubdtype(x.dtype, np.number) or x.dtype == bool
    is_small = is_here and is_plain and x.size <= _MOST_SHOWN
    value = short(np.array2string(np.asarray(x), separator=", ")) if is_small else "not shown"
    return where, str(tuple(x.shape)), str(x.dtype), value
