"""Conversions between one array per replica and one global array on a topology's devices.

A *stacked* array has one row for each replica; it is the form that compiled code takes and returns.
A *joined* array is declared replicated although the replicas may differ; it is used only in this
module and ``replica_functions``, where each replica reads only its own copy. Within a
replica, an array is replicated over the logical devices, or sharded by a spec of their mesh axes.
"""

import functools
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from replicax._src.base.errors import PlacementError
from replicax._src.base.ops import StandIn
from replicax._src.base.rendering import Sheet, short
from replicax._src.compat.jax import at_rest, concrete, put_rows, traced, uncommitted
from replicax._src.topology.devices import shown_devices
from replicax._src.topology.mesh import REPLICA_AXIS, Topology
from replicax._src.workers.elastic import cached_until_resize

WHOLE = PartitionSpec()  # replicated over the logical devices of a replica
HOST_MEMORY = "pinned_host"  # the memory kind of arrays in the memory of the host
NUMERIC = "biufcV"  # kinds of NumPy dtypes that JAX may support; bfloat16 has kind V
_WIDE = 8  # itemsize of integers that JAX narrows, unless x64 is enabled


def is_array(x: Any) -> bool:
    """Whether `x` is a JAX array, concrete or traced, and not a distributed value."""
    return isinstance(x, jax.Array) and not isinstance(x, StandIn)


def is_traced(x: Any) -> bool:
    """Whether `x` is a tracer."""
    return isinstance(x, Tracer)


def is_staging() -> bool:
    """Whether operations on constants are traced instead of executed."""
    return traced.value is not at_rest and is_traced(jax.lax.neg(np.float32(0)))


def on_device(x: Any, device: jax.Device) -> jax.Array:
    """Return `x` on `device`, uncommitted: usable with arrays on other devices."""
    placed: jax.Array = jax.device_put(x, device)
    return uncommitted(placed)


def fitting(x: Any) -> Any:
    """Return a NumPy array with integers in JAX's width: 32 bits unless x64 is enabled.

    Raises:
        OverflowError: If a value does not fit; JAX would silently wrap it.
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
    """Return `x`, or a copy if it is a NumPy array, which its owner may change.

    `device_put` and compiled functions may read the buffer later, even without aliasing it.

    Raises:
        OverflowError: If an integer does not fit.
    """
    if not isinstance(x, np.ndarray | np.generic):
        return x
    taken = fitting(x)
    return x.copy() if taken is x else taken


def is_weak(x: Any) -> bool:
    """Whether `x` has a weak type: made from Python numbers, its dtype yields in promotion."""
    return getattr(x, "weak_type", False) is True


def strong(x: Any) -> Any:
    """Return `x` with a strong type; every replica's value has one."""
    if not is_weak(x):
        return x
    if is_traced(x):
        return jax.lax.convert_element_type(x, x.dtype)
    with jax.default_device(next(iter(x.devices()))):  # stay on its device even if uncommitted
        return jax.lax.convert_element_type(x, x.dtype)


def as_array(x: Any) -> jax.Array:
    """Return `x` as a JAX array; a NumPy array is copied."""
    return jnp.asarray(private(x))


def has_strong_dtype(x: Any, dtype: Any) -> bool:
    """Whether `x` is a tracer that already has the strong type `dtype`."""
    return is_traced(x) and x.dtype == dtype and not x.weak_type


def fresh_copy(x: Any) -> jax.Array:
    """Return a copy of `x` in a new buffer, without compiling as `jnp.copy` does per shape."""
    if is_traced(x):
        return x  # type: ignore[no-any-return]
    if not is_array(x):
        return jax.device_put(fitting(np.array(x)))  # type: ignore[no-any-return]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # device_put would lose their placement
        numbers = fresh_copy(jax.random.key_data(x))
        keys: jax.Array = jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
        return keys
    if not x.is_fully_addressable:
        parts = [jax.device_put(shard.data, may_alias=False) for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts, dtype=x.dtype)
    copied: jax.Array = jax.device_put(x, may_alias=False)
    return copied


def replicate(x: Any, topology: Topology, spec: PartitionSpec = WHOLE) -> jax.Array:
    """Copy `x` to every replica of `topology`, in new buffers."""
    sharding = topology.sharding(spec)
    if isinstance(x, jax.Array) and not is_traced(x) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            raise PlacementError(
                f"An array of shape {x.shape} is divided over other workers than those of"
                f" {topology.num_replicas} replicas, and this process has only a part of it."
            )
        x = first(x)
    own = fresh_copy(x)
    if topology.is_fully_addressable:
        placed: jax.Array = jax.device_put(own, sharding)
        return placed
    # Across processes, device_put is a collective that compares the values; this is local.
    return jax.make_array_from_callback(own.shape, sharding, lambda index: own[index])


def split(joined: jax.Array, topology: Topology) -> tuple[jax.Array, ...]:
    """Return the array of each of this process's replicas, in order."""
    shards = {shard.device: shard.data for shard in joined.addressable_shards}
    if joined.is_fully_replicated:
        return tuple(uncommitted(shards[device]) for device in topology.primary_devices)
    return tuple(
        _assembled(joined, shards, topology, replica) for replica in topology.local_replicas
    )


def _assembled(
    joined: jax.Array, shards: dict[jax.Device, jax.Array], topology: Topology, replica: int
) -> jax.Array:
    """Return one replica's array, sharded over its logical devices."""
    assert isinstance(joined.sharding, NamedSharding)
    own = NamedSharding(topology.mesh_of(replica), joined.sharding.spec)
    parts = [shards[device] for device in topology.devices_of(replica)]
    return jax.make_array_from_single_device_arrays(joined.shape, own, parts, dtype=joined.dtype)


def join(pieces: Sequence[Any], topology: Topology, spec: PartitionSpec = WHOLE) -> jax.Array:
    """Assemble per-replica pieces into one array declared replicated (they may differ)."""
    check_count(len(pieces), topology)
    shards = [
        shard
        for piece, replica in zip(pieces, topology.local_replicas, strict=True)
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
    """Check that a per-replica value has one component for each local replica.

    Raises:
        ValueError: If it has not.
    """
    if components != len(topology.local_replicas):
        raise ValueError(
            f"A per-replica value of {components} components was used with"
            f" {len(topology.local_replicas)} replicas, each of which needs one. Make it with"
            " `strategy.experimental_distribute_values_from_function`, or take it from a `run` of"
            " the same strategy."
        )


def first(x: jax.Array) -> jax.Array:
    """Return the first device's copy of a replicated array; a sharded array unchanged."""
    return uncommitted(x.addressable_data(0)) if x.is_fully_replicated else x


def stack(pieces: Sequence[Any], topology: Topology) -> jax.Array:
    """Stack pieces of equal shape to one array with a row for each replica."""
    placed = topology.is_fully_addressable and all(map(is_array, pieces))
    if any(map(is_traced, pieces)) or (not placed and is_staging()):
        return _stack_staged(pieces, topology)
    if (at_once := stack_at_once(pieces, topology)) is not None:
        return at_once
    check_count(len(pieces), topology)
    if len({p.dtype if is_array(p) else jnp.result_type(p) for p in pieces}) > 1:
        dtype = jnp.result_type(*pieces)
        pieces = [as_array(p).astype(dtype) for p in pieces]
    if not topology.is_fully_addressable:
        return _stack_own(pieces, topology)
    if topology.cores > 1 and all(isinstance(p, np.ndarray) for p in pieces):
        sent: jax.Array = jax.device_put(fitting(np.stack(pieces)), topology.stacked)
        return sent
    stacked: jax.Array = _stacker(topology)(join(pieces, topology))
    return stacked


def stack_at_once(pieces: Sequence[Any], topology: Topology) -> jax.Array | None:
    """Like `stack`, in one transfer and without a program, for concrete pieces of one kind.

    On the path of every step with such arguments, so it does the fewest possible checks.

    Returns:
        The array, or None for other pieces.
    """
    devices, head = topology.primary_devices, pieces[0]
    if topology.cores > 1 or not topology.is_fully_addressable or len(pieces) != len(devices):
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
    """Return NumPy views of arrays in CPU memory, without copies; None for other arrays."""
    head, cpus = pieces[0], _local_cpus(devices[0])
    is_plain = isinstance(head.dtype, np.dtype) and 0 not in head.shape
    if not is_plain or len(pieces) == 1:  # a single piece gets its axis from a program
        return None
    for piece in pieces:
        where = piece.sharding.device_set
        if len(where) > 1 or not where <= cpus or not piece.is_ready():
            return None
    return [np.asarray(p)[None] for p in pieces]


@cached_until_resize
def _local_cpus(device: jax.Device) -> frozenset[jax.Device]:
    """Return all CPU devices of the process, which share memory; empty for other platforms."""
    is_cpu = device.platform == "cpu"
    return frozenset(device.client.local_devices()) if is_cpu else frozenset()


def unstack(stacked: jax.Array, topology: Topology) -> tuple[jax.Array, ...]:
    """Return the rows of a stacked array, each on its replica's device."""
    if is_traced(stacked):
        return tuple(stacked[i] for i in range(topology.num_replicas))
    if not topology.is_fully_addressable:
        return _unstack_own(stacked, topology)
    with concrete():  # JAX may be tracing code that closes over the array
        return split(_unstacker(topology)(stacked), topology)


def _stack_own(pieces: Sequence[Any], topology: Topology) -> jax.Array:
    """Like `stack`, without a multi-process program, which all processes would have to launch."""
    rows = [
        _add_row_axis(jax.device_put(private(piece), device))
        for piece, replica in zip(pieces, topology.local_replicas, strict=True)
        for device in topology.devices_of(replica)
    ]
    shape = (topology.num_replicas, *rows[0].shape[1:])
    return jax.make_array_from_single_device_arrays(
        shape, topology.stacked, rows, dtype=rows[0].dtype
    )


def _stack_staged(pieces: Sequence[Any], topology: Topology) -> jax.Array:
    """Like `stack` in traced code, of all replicas' pieces or of this process's."""
    rows = jnp.stack([as_array(p) for p in pieces])
    count = len(pieces)
    if count == topology.num_replicas:
        return rows
    check_count(count, topology)

    def own_row(rows: jax.Array) -> jax.Array:
        at = jax.lax.axis_index(REPLICA_AXIS) % count
        row: jax.Array = jax.lax.dynamic_index_in_dim(rows, at, keepdims=True)
        return row

    # The program is the same in every process, but each has its own rows as constants.
    spread = per_replica_map(own_row, topology, PartitionSpec(), PartitionSpec(REPLICA_AXIS))
    stacked: jax.Array = spread(rows)
    return stacked


def _unstack_own(stacked: jax.Array, topology: Topology) -> tuple[jax.Array, ...]:
    shards = {shard.device: shard.data for shard in stacked.addressable_shards}
    return tuple(uncommitted(_drop_row_axis(shards[device])) for device in topology.primary_devices)


_add_row_axis = jax.jit(lambda x: x[None])
_drop_row_axis = jax.jit(lambda x: x[0])


@cached_until_resize
def _stacker(topology: Topology) -> Callable[[jax.Array], jax.Array]:
    return per_replica_jit(
        lambda x: x[None], topology, PartitionSpec(), PartitionSpec(REPLICA_AXIS)
    )


@cached_until_resize
def _unstacker(topology: Topology) -> Callable[[jax.Array], jax.Array]:
    return per_replica_jit(lambda x: x[0], topology, PartitionSpec(REPLICA_AXIS), PartitionSpec())


def per_replica_jit(
    fn: Callable[..., Any], topology: Topology, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return `fn` compiled to run on every replica's shard."""
    return jax.jit(per_replica_map(fn, topology, in_specs, out_specs))


def per_replica_map(
    fn: Callable[..., Any], topology: Topology, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return `fn` mapped over the replicas' shards, for use in a traced function.

    ``check_vma=False`` gives the semantics of tf.distribute: a gradient stays local until it is
    all-reduced, and the gradient of an all-reduce is an all-reduce.
    """
    mapped = jax.shard_map(
        fn,
        mesh=topology.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={REPLICA_AXIS},
        check_vma=False,
    )

    @functools.wraps(mapped)
    def call(*args: Any) -> Any:
        refuse_other_mesh(topology)
        return mapped(*args)

    return call


def refuse_other_mesh(topology: Topology) -> None:
    """Raise if the program has set another mesh than that of the replicas."""
    # JAX runs a mapped function only under the mesh that it is mapped over, or under none. A mesh
    # with manual axes is that of an enclosing map, about which JAX raises errors of its own.
    active = jax.sharding.get_abstract_mesh()
    if active.empty or active.manual_axes or active == topology.mesh.abstract_mesh:
        return
    raise PlacementError(
        f"`jax.set_mesh` has set a mesh {dict(active.shape)}, but a strategy runs its replicas on"
        f" a mesh of its own, {dict(topology.mesh.shape)}. Use the strategy outside of"
        " `with jax.set_mesh(...)`, or remove a mesh that is set for the whole program:"
        " `with jax.set_mesh(None): strategy.run(...)`."
    )


_MOST_SHOWN = 8


def values_table(title: str, numbers: Iterable[Any], values: Sequence[Any]) -> str:
    """Return an HTML table of some replicas' values; large arrays are not read."""
    rows = tuple((str(i), *_table_cells(v)) for i, v in zip(numbers, values, strict=True))
    columns = ("replica", "device", "shape", "dtype", "value")
    return Sheet(title, columns=columns, rows=rows).to_html()


def _table_cells(x: Any) -> tuple[str, str, str, str]:
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
