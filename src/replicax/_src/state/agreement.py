"""Agreement: combine the values that replicas wrote to a mirrored variable into one.

The same rule holds for eager replicas, replicas compiled together or separately, and workers.
Values are compared as numbers (NaN equals NaN, 0.0 equals -0.0), and all copies take the first
replica's value. Different values are an error, or are averaged if `Cell.averages`. A replica
without input rows does not take part in the average.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.errors import DivergenceError
from replicax._src.base.types import ReduceOp
from replicax._src.state.cell import Cell, on_host
from replicax._src.topology.mesh import Across, Topology
from replicax._src.values.per_replica import InBody, PerReplica
from replicax._src.values.reduce import first_value
from replicax._src.values.replica_functions import equal_across, sum_across


def agreed_value(
    cell: Cell, values: Sequence[Any], rows: Sequence[bool], topology: Topology | None
) -> Any:
    """Return the one value for the concrete values that this process's replicas wrote.

    Args:
        cell: The variable's storage.
        values: Each replica's value.
        rows: Whether each replica has any input rows.
        topology: The topology of the replicas; None to compare within this process only.

    Raises:
        DivergenceError: If the values differ, here or on other workers.
    """
    if cell.averages:
        return _average(values, rows, topology)
    arrays = [on_host(v) for v in values]
    alike = all(a.shape == arrays[0].shape and bool(is_same(a, arrays[0])) for a in arrays[1:])
    # A collective: every worker must call it, whatever its local result.
    digest = _digest(arrays[0]) if alike else "differs"
    what = f"the value written to variable {cell.name!r}"
    elsewhere = topology is None or equal_across(digest, topology, what)
    if not (alike and elsewhere):
        raise DivergenceError(divergence_message(cell, values))
    return values[0]


def check_workers_agree(cell: Cell, value: Any) -> None:
    """Check that all workers assign the same value to a sharded variable.

    Raises:
        DivergenceError: If they do not; the shards would belong to different values.
    """
    assert cell.topology is not None
    what = f"the value assigned to variable {cell.name!r}"
    if not cell.topology.is_fully_addressable and not equal_across(
        _digest(on_host(value)), cell.topology, what
    ):
        raise DivergenceError(
            f"The workers assigned different values to the sharded variable {cell.name!r}, of which"
            " each holds a part. Nothing was assigned. Assign the same value on all workers, or"
            " write it inside `strategy.run`."
        )


def agreed_value_in_body(
    cell: Cell, x: jax.Array, topology: Topology, across: Across
) -> tuple[jax.Array, jax.Array | None]:
    """Combine the values that all replicas wrote, inside a compiled replica body.

    Returns:
        The value, and whether the replicas agreed on it (None if they need not).
    """
    first = first_value(PerReplica.of(InBody(x, topology, across)))
    differ = across.sum([(~is_same(x, first)).astype(jnp.int32)])[0]
    if not cell.averages:
        return first, differ == 0
    mean = across.sum([_wide(x)])[0] / topology.num_replicas
    return jnp.where(differ == 0, first, mean.astype(x.dtype)), None


def agreed_traced_value(where: Any, cell: Cell, copies: Sequence[Any]) -> Any:
    """Return the one value for all replicas' traced values; they are compared at run time.

    Args:
        where: The level whose program records whether they agree.
        cell: The variable's storage.
        copies: The values.
    """
    cell.note_line()
    agreed = jnp.stack([is_same(c, copies[0]) for c in map(jnp.asarray, copies)]).all()
    if not cell.averages:
        note_verdict(where, cell, agreed)
        return copies[0]
    mean = jnp.mean(jnp.stack([_wide(c) for c in copies]), axis=0).astype(cell.dtype)
    return jnp.where(agreed, copies[0], mean)


def note_verdict(where: Any, cell: Cell, agreed: jax.Array) -> None:
    """Make the program traced at `where` record whether the copies of `cell` agree."""
    verdict = cell.verdict()
    where.write(verdict, where.read(verdict) & agreed)


def is_same(a: Any, b: Any) -> Any:
    """Whether two arrays (both NumPy or both JAX) are equal, with NaN equal to NaN."""
    return ((a == b) | ((a != a) & (b != b))).all()


def divergence_message(cell: Cell, values: Sequence[Any]) -> str:
    """Return the error message for replicas that wrote different values.

    Args:
        cell: The variable's storage.
        values: Each replica's value; empty if compiled code compared them, which also compares
            what a variable with an aggregation gets at indices, or in a `merge_call`.
    """
    shown = ", ".join(f"replica {i}: {v}" for i, v in enumerate(values))
    line = cell.line
    why = (
        f", whose aggregation is NONE ({shown}){f', at {line}' if line else ''}. Nothing was"
        " assigned."
        if shown
        else f"{f', at {line}' if line else ''}. Nothing was assigned. No aggregation combined"
        " them: it is NONE, the replicas wrote at different indices, or a merge_call closes over"
        " a value of one replica, which belongs in its `args`."
    )
    return (
        f"The replicas assigned different values to the mirrored variable {cell.name!r}{why}"
        " Make the values equal first. Gradients of a loss that is divided by"
        " the global batch size, as `rx.nn.compute_average_loss` does, are added up: `gradients ="
        ' rx.distribute.get_replica_context().all_reduce("SUM", gradients)`; "MEAN" is for a loss'
        " that each replica divides by its own rows, and for statistics. Or declare how to combine"
        " the assigned values: `rx.Variable(..., aggregation=rx.VariableAggregation.MEAN)`."
    )


def _average(values: Sequence[Any], rows: Sequence[bool], topology: Topology | None) -> Any:
    """Return the mean over the replicas that have rows; exact if their values are equal."""
    pairs = list(zip(values, rows, strict=True))
    if topology is not None and not topology.is_fully_addressable:
        parts = [(_wide(v if has else jnp.zeros_like(v)), int(has)) for v, has in pairs]
        return sum_across(ReduceOp.MEAN, parts, topology).astype(values[0].dtype)
    taking_part = [on_host(v) for v, has in pairs if has]
    lead = taking_part[0]
    if all(is_same(a, lead) for a in taking_part[1:]):
        return jnp.asarray(lead)
    return jnp.asarray(np.mean([_wide(a) for a in taking_part], axis=0).astype(lead.dtype))


def _wide(x: Any) -> Any:
    # Summing narrow floats loses precision and may overflow.
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _digest(x: np.ndarray) -> str:
    """Return a hash that is equal for equal numbers: NaNs are unified, and -0.0 becomes 0.0."""
    if x.dtype.kind in "iub":
        return hashlib.sha256(x.tobytes()).hexdigest()
    normal = np.where(x != x, np.asarray(np.nan, x.dtype), x) + np.asarray(0, x.dtype)
    return hashlib.sha256(normal.tobytes()).hexdigest()


def equal_shares(x: jax.Array, topology: Topology) -> tuple[jax.Array, jax.Array]:
    """Return the first replica's share of `x` and every other's; they sum to exactly `x`."""
    count = topology.num_replicas
    if jnp.iscomplexobj(x):
        pairs = zip(equal_shares(x.real, topology), equal_shares(x.imag, topology), strict=True)
        lead, other = (jax.lax.complex(a, b) for a, b in pairs)
        return lead, other
    if jnp.issubdtype(x.dtype, jnp.integer):
        other = x // count
    elif jnp.issubdtype(x.dtype, jnp.floating):
        # `other` is a multiple of the last bit of x, and then so is every partial sum: no rounding.
        # Computed on x / 2 so that nothing overflows; `reduce_precision` forces the rounding, since
        # XLA may compute with more bits.
        half, kind = x / 2, jnp.finfo(x.dtype)
        near = jax.lax.reduce_precision(half + half / count, kind.nexp, kind.nmant)
        other = jnp.where(jnp.isfinite(x), (near - half) * 2, 0)
    else:  # booleans
        other = jnp.zeros_like(x)
    return (x - other * (count - 1) if x.dtype != bool else x), other
