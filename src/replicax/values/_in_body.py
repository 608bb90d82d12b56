"""One function of the replicas' pieces, wherever they are.

Inside compiled code the pieces are at hand; outside it the same function is compiled and run on the
pieces' devices. So a collective has one implementation, and eager and compiled agree to the bit.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from replicax.topology._mesh import REPLICA_AXIS, Topology
from replicax.topology._together import together
from replicax.values._per_replica import (
    DistributedValues,
    Form,
    InBody,
    Joined,
    Mirrored,
    PerReplica,
    Pieces,
    Stacked,
    mirrored,
)
from replicax.values._placement import (
    is_array,
    is_staging,
    is_traced,
    join,
    per_replica_jit,
    per_replica_map,
    stack,
)


def apply_in_body(
    fn: Callable[[list[jax.Array]], list[jax.Array]],
    values: Sequence[PerReplica],
    topology: Topology,
) -> list[Mirrored]:
    """What ``fn`` makes of the pieces of ``values`` on each replica; equal on all.

    Args:
        fn: Takes this replica's pieces and returns arrays; may use collectives over the replica
            axis. Hashable, as it is compiled once.
        values: The per-replica values, all in one context.
        topology: Where they live.

    Returns:
        One mirrored value for each array that ``fn`` returned.
    """
    forms = [v.form for v in values]
    if any(isinstance(f, InBody) for f in forms):
        results = fn([jnp.asarray(f.piece) for f in forms])  # type: ignore[union-attr]
        return [Mirrored.of(InBody(r, topology)) for r in results]
    staged_rows = any(isinstance(f, Stacked) and is_traced(f.array) for f in forms)
    if staged_rows or (not topology.is_whole and is_staging()):
        rows = [stacked_array(v, topology) for v in values]
        staged = per_replica_map(
            lambda xs: fn([x[0] for x in xs]),
            topology,
            PartitionSpec(REPLICA_AXIS),
            PartitionSpec(),
        )
        return [mirrored(r, topology) for r in staged(rows)]
    joined = [join(v.values, topology) for v in values]
    with together(topology, _described(fn, joined)) as finished:
        results = finished(_compiled(fn, topology)(joined))
    return [mirrored(r, topology) for r in results]


def _described(fn: Any, arrays: Sequence[jax.Array]) -> str:
    purpose = getattr(fn, "purpose", None) or getattr(fn, "__name__", type(fn).__name__).strip("_")
    return f"{purpose} of {', '.join(f'{x.dtype}{list(x.shape)}' for x in arrays)}"


def stacked_array(value: PerReplica | Mirrored, topology: Topology) -> jax.Array:
    """The value as one array with a row for each replica."""
    form = value.form
    if isinstance(form, Stacked):
        return form.array
    if (known := known_stack(form, topology)) is not None:
        return known
    array = stack(form.values, topology)
    if isinstance(form, Pieces) and all(map(is_array, form.values)) and not is_traced(array):
        vars(form)["stacked"] = topology, array
    return array


def known_stack(form: Form, topology: Topology | None) -> jax.Array | None:
    """The array that the pieces were made before: what every step is given is put together once.

    Arrays never change, so that only values of nothing else are remembered.
    """
    place, array = vars(form).get("stacked", (None, None))
    return array if place is not None and place == topology else None


def local_piece(value: Any) -> Any:
    """This replica's component, inside compiled code; anything else as it is."""
    if not isinstance(value, DistributedValues):
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
    rows = jnp.stack([jnp.asarray(x) for x in components])
    # With several processes the components are this one's, and others have theirs in their place.
    return rows[jax.lax.axis_index(REPLICA_AXIS) % len(components)]


@cache
def _compiled(fn: Hashable, topology: Topology) -> Callable[..., Any]:
    return per_replica_jit(fn, topology, PartitionSpec(), PartitionSpec())  # type: ignore[arg-type]
