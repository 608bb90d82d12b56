"""Functions of all replicas' pieces, in a replica body, within a process or across workers.

- `apply_in_body`: inside compiled code the function is applied to the local pieces; outside, the
  same function is compiled and run on the pieces' devices. A collective therefore has a single
  implementation, and eager and compiled results are bitwise equal.
- `sum_across`, `gather_across`, `broadcast_from_first` and the like: collectives of all workers,
  which must call them in the same order. XLA moves the tensors; the hub only exchanges shapes.
- The dtypes of sums and means.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec, use_abstract_mesh

from replicax._src.base.types import ReduceOp
from replicax._src.topology.mesh import REPLICA_AXIS, Topology, on_all_replicas, sum_between_cpus
from replicax._src.values.per_replica import (
    Distributed,
    Form,
    InBody,
    Joined,
    Mirrored,
    PerReplica,
    Pieces,
    Stacked,
    mirrored,
    pieces,
)
from replicax._src.values.placement import (
    as_array,
    fresh_copy,
    is_array,
    is_staging,
    is_traced,
    join,
    per_replica_jit,
    per_replica_map,
    stack,
    stack_at_once,
)
from replicax._src.workers import group
from replicax._src.workers.elastic import cached_until_resize


def apply_in_body(
    fn: Callable[[list[jax.Array]], list[jax.Array]],
    values: Sequence[PerReplica],
    topology: Topology,
) -> list[Mirrored]:
    """Apply `fn` to the pieces of `values` on each replica; the results are equal on all.

    Args:
        fn: Takes this replica's pieces and returns arrays; may use collectives over the replica
            axis. Must be hashable, since it is compiled once.
        values: The per-replica values, all in one context.
        topology: The topology of the replicas.

    Returns:
        One mirrored value for each array that `fn` returned.
    """
    forms = [v.form for v in values]
    if any(isinstance(f, InBody) for f in forms):
        results = fn([jnp.asarray(f.piece) for f in forms])  # type: ignore[union-attr]
        return [Mirrored.of(InBody(r, topology)) for r in results]
    staged_rows = any(isinstance(f, Stacked) and is_traced(f.array) for f in forms)
    if staged_rows or (not topology.is_fully_addressable and is_staging()):
        rows = [stacked_array(v, topology) for v in values]
        staged = per_replica_map(
            lambda xs: fn([x[0] for x in xs]),
            topology,
            PartitionSpec(REPLICA_AXIS),
            PartitionSpec(),
        )
        return [mirrored(r, topology) for r in staged(rows)]
    joined = [join(v.values, topology) for v in values]
    with on_all_replicas(topology, _described(fn, joined)) as finished:
        results = finished(_compiled(fn, topology)(joined))
    return [mirrored(r, topology) for r in results]


def _described(fn: Any, arrays: Sequence[jax.Array]) -> str:
    purpose = getattr(fn, "purpose", None) or getattr(fn, "__name__", type(fn).__name__).strip("_")
    return f"{purpose} of {', '.join(f'{x.dtype}{list(x.shape)}' for x in arrays)}"


def stacked_array(value: PerReplica | Mirrored, topology: Topology) -> jax.Array:
    """Return the value as one array with a row for each replica."""
    form = value.form
    if isinstance(form, Stacked):
        return form.array
    if (known := _known_stack(form, topology)) is not None:
        return known
    array = stack(form.values, topology)
    if isinstance(form, Pieces) and all(map(is_array, form.values)) and not is_traced(array):
        vars(form)["stacked"] = topology, array
    return array


def stacked_at_once(form: Pieces) -> jax.Array | None:
    """Like `stacked_array`, for local pieces of one shape and dtype; None for other pieces."""
    topology = form.topology
    if topology is None:
        return None
    if (known := _known_stack(form, topology)) is not None:
        return known
    array = stack_at_once(form.values, topology)
    if array is not None and type(form.values[0]) is not np.ndarray:
        vars(form)["stacked"] = topology, array
    return array


def _known_stack(form: Form, topology: Topology) -> jax.Array | None:
    """Return the stacked array that was built from the same pieces before, if any.

    An argument passed to every step is stacked once. Only immutable pieces (JAX arrays) are cached.
    """
    place, array = vars(form).get("stacked", (None, None))
    return array if place is topology or place == topology else None


def local_piece(value: Any) -> Any:
    """Return this replica's component, inside compiled code; any other value unchanged."""
    if not isinstance(value, Distributed):
        return value
    form = value.form
    if isinstance(form, InBody):
        return form.piece
    if isinstance(form, Joined):
        return form.array
    if isinstance(form, Stacked) and is_traced(form.array):
        at = jax.lax.axis_index(REPLICA_AXIS)
        return jax.lax.dynamic_index_in_dim(form.array, at, keepdims=False)
    components = form.values
    if isinstance(value, Mirrored) or all(x is components[0] for x in components):
        return components[0]
    return _local_component(components)


def _local_component(components: Sequence[Any]) -> Any:
    """Return this replica's element of `components`, inside compiled code."""
    # With several processes, each process traces its own components at the same indices.
    at = jax.lax.axis_index(REPLICA_AXIS) % len(components)
    if not all(isinstance(x, int | float | complex) for x in components):
        return jnp.stack([as_array(x) for x in components])[at]
    own = components[0]
    for i, number in enumerate(components[1:], 1):  # keeps the weak type of Python numbers
        own = jnp.where(at == i, number, own)
    return own


@cached_until_resize
def _compiled(fn: Hashable, topology: Topology) -> Callable[..., Any]:
    return per_replica_jit(fn, topology, PartitionSpec(), PartitionSpec())  # type: ignore[arg-type]


_PARTS = (1 << 12, 1 << 17, 1 << 22)  # words; few sizes, to compile few programs
_ALONE = AbstractMesh((), ())
_REPEATS = 4  # more chunks of one size take longer than one of the next size


def sum_across(op: ReduceOp, parts: Sequence[Any], topology: Topology) -> jax.Array:
    """Return the sum or mean over all replicas of `parts`, pairs of a sum and its entry count."""
    sums, counts = zip(*parts, strict=True)
    values = [pieces([as_array(s) for s in sums], topology)]
    if op is ReduceOp.MEAN:
        values.append(pieces([jnp.int32(c) for c in counts], topology))
    summed = _sum_between_cpus if topology.is_between_cpus and topology.cores == 1 else _sum
    totals = [m.values[0] for m in apply_in_body(summed, values, topology)]
    total: jax.Array = totals[0] if op is ReduceOp.SUM else totals[0] / totals[1]
    return total


def all_shapes(
    shapes: Sequence[tuple[int, ...]], topology: Topology, what: str
) -> list[tuple[int, ...]]:
    """Return the shapes of all replicas, given the local ones; a collective of all workers."""
    if topology.is_fully_addressable:
        return list(shapes)
    answers = group.required().agree(f"the shapes of {what}", [list(s) for s in shapes])
    return [tuple(s) for one in answers for s in one]


def gather_across(
    parts: Sequence[Any], axis: int, sizes: Sequence[int], topology: Topology
) -> tuple[jax.Array, ...]:
    """Concatenate all replicas' values along `axis`, on each of this process's devices.

    Args:
        parts: The values of this process's replicas.
        axis: The axis.
        sizes: The size along `axis` for each replica, of all processes.
        topology: The topology of the replicas.
    """
    longest = max(sizes)
    padded = [_padded(as_array(p), axis, longest) for p in parts]
    (rows,) = apply_in_body(_gather, [pieces(padded, topology)], topology)
    return tuple(_trim_and_concatenate(r, axis, sizes) for r in rows.values)


def broadcast_from_first(x: Any, topology: Topology, what: str) -> jax.Array:
    """Return worker 0's value, bitwise; other workers contribute only shape and dtype.

    Args:
        x: An array, with the same shape and dtype on all workers.
        topology: The topology of the workers.
        what: Its description in messages.
    """
    if topology.is_fully_addressable:
        return jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        numbers = broadcast_from_first(jax.random.key_data(x), topology, what)
        keys: jax.Array = jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
        return keys
    host = np.asarray(x)
    aval = f"{host.dtype}{list(host.shape)}"
    words = np.frombuffer(host.tobytes() + b"\0" * (-host.nbytes % 4), np.uint32)
    # Must not become part of a replica function that this thread may be tracing.
    with (
        on_all_replicas(topology, f"the value of worker 0 for {what}, {aval}"),
        use_abstract_mesh(_ALONE),
    ):
        sent = [_send(part, topology) for part in _parts(words)]
    data = np.concatenate(sent).tobytes() if sent else b""
    return fresh_copy(np.frombuffer(data[: host.nbytes], host.dtype).reshape(host.shape))


def first_replica_value(value: PerReplica, topology: Topology) -> Any:
    """Return the component of the first replica of all processes."""
    own = value.values[0]
    if topology.is_fully_addressable:
        return own
    return broadcast_from_first(jnp.asarray(own), topology, "the first replica's value")


def equal_across(digest: str, topology: Topology, what: str) -> bool:
    """Whether all workers have the same digest; a collective of all workers."""
    return topology.is_fully_addressable or len(set(group.required().agree(what, digest))) == 1


def _sum(leaves: list[jax.Array]) -> list[jax.Array]:
    summed: list[jax.Array] = jax.lax.psum(leaves, REPLICA_AXIS)
    return summed


def _sum_between_cpus(leaves: list[jax.Array]) -> list[jax.Array]:
    return [sum_between_cpus(x) for x in leaves]


def _gather(leaves: list[jax.Array]) -> list[jax.Array]:
    return [jax.lax.all_gather(x, REPLICA_AXIS) for x in leaves]


def _padded(x: jax.Array, axis: int, size: int) -> jax.Array:
    missing = size - x.shape[axis]
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def _trim_and_concatenate(rows: jax.Array, axis: int, sizes: Sequence[int]) -> jax.Array:
    parts = [jax.lax.slice_in_dim(rows[i], 0, n, axis=axis) for i, n in enumerate(sizes)]
    return jnp.concatenate(parts, axis=axis)


def _parts(words: np.ndarray) -> Iterator[np.ndarray]:
    """Split the words into chunks of the sizes in `_PARTS`; the last chunk is padded."""
    at = 0
    while at < len(words):
        left = len(words) - at
        size = next((n for n in _PARTS if left <= _REPEATS * n), _PARTS[-1])
        part = words[at : at + size]
        yield np.pad(part, (0, size - len(part)))
        at += size


def _send(words: np.ndarray, topology: Topology) -> np.ndarray:
    rows = np.zeros((len(topology.local_replicas), len(words)), np.uint32)
    if topology.local_replicas[0] == 0:  # all other workers contribute zeros
        rows[0] = words
    sent = _sender(topology)(join(list(rows), topology))
    return np.asarray(sent.addressable_data(0))


@cached_until_resize
def _sender(topology: Topology) -> Any:
    return per_replica_jit(
        lambda row: jax.lax.psum(row, REPLICA_AXIS), topology, PartitionSpec(), PartitionSpec()
    )


# Dtypes of sums and means over replicas, the same for every function that reduces. A sum has the
# dtype of its summands, and integers wrap, as in TensorFlow; booleans are counted in int32. A mean
# is accumulated without overflow, and is a float for integers; TensorFlow divides the wrapped sum.


def summand(op: ReduceOp, x: Any) -> Any:
    """Return `x`, a JAX or NumPy array, in the dtype in which its sum or mean is accumulated."""
    dtype = sum_dtype(op, x.dtype)
    return x if x.dtype == dtype else x.astype(dtype)


def sum_dtype(op: ReduceOp, dtype: Any) -> Any:
    """Return the dtype in which values of `dtype` are accumulated for a sum or a mean."""
    if op is ReduceOp.SUM:
        return jnp.dtype(jnp.int32) if dtype == jnp.bool_ else dtype
    mean = mean_dtype(dtype)
    # bfloat16 has the range of float32, and half its traffic.
    overflows = jnp.finfo(mean).maxexp < jnp.finfo(jnp.float32).maxexp
    return jnp.dtype(jnp.float32) if overflows else mean


def reduced_dtype(op: ReduceOp, dtype: Any) -> Any:
    """Return the dtype of a sum or mean of values of `dtype`."""
    return sum_dtype(op, dtype) if op is ReduceOp.SUM else mean_dtype(dtype)


def mean_dtype(dtype: Any) -> Any:
    """Return the dtype of a mean of values of `dtype`."""
    return (
        dtype
        if jnp.issubdtype(dtype, jnp.inexact)
        else _divided(dtype, jax.dtypes.canonicalize_dtype("float64"))
    )


@cache
def _divided(dtype: Any, _: Any) -> Any:
    return jax.eval_shape(lambda x: x / 1, jax.ShapeDtypeStruct((), dtype)).dtype
