"""Agreement: what the replicas wrote to one mirrored variable -> the one value that all hold.

One rule for eager replicas, compiled ones, those that are compiled each by itself, and workers:
values are compared as numbers, where NaN is NaN and 0.0 is -0.0, and all take the first's.
Where they differ it is an error, or their mean if the variable averages (`Cell.averages`). Then a
replica that was given no rows does not take part: it has nothing to average.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._errors import DivergenceError
from replicax._types import ReduceOp
from replicax.state._cell import Cell, on_host
from replicax.topology._mesh import Across, Topology
from replicax.values._per_replica import InBody, PerReplica
from replicax.values._pieces import equal_across, sum_across
from replicax.values._reduce import first_value


def settled(
    cell: Cell, values: Sequence[Any], rows: Sequence[bool], topology: Topology | None
) -> Any:
    """The one value of what this process's replicas wrote, all known now.

    Args:
        cell: What they wrote to.
        values: What each wrote.
        rows: Whether each was given any rows.
        topology: Whose replicas they are; None for copies that no other worker need know.

    Raises:
        DivergenceError: If they differ, here or on other workers.
    """
    if cell.averages:
        return _averaged(values, rows, topology)
    arrays = [on_host(v) for v in values]
    alike = all(a.shape == arrays[0].shape and bool(is_same(a, arrays[0])) for a in arrays[1:])
    # All workers ask, whatever they found at home.
    told = _digest(arrays[0]) if alike else "differs"
    what = f"the value written to variable {cell.name!r}"
    elsewhere = topology is None or equal_across(told, topology, what)
    if not (alike and elsewhere):
        raise DivergenceError(diverging(cell, values))
    return values[0]


def check_workers_agree(cell: Cell, value: Any) -> None:
    """See that all workers assign the same value to a variable of which each holds a part.

    Raises:
        DivergenceError: If they do not; the parts would be of different values.
    """
    assert cell.topology is not None
    what = f"the value assigned to variable {cell.name!r}"
    if not cell.topology.is_whole and not equal_across(
        _digest(on_host(value)), cell.topology, what
    ):
        raise DivergenceError(
            f"The workers assigned different values to the sharded variable {cell.name!r}, of which"
            " each holds a part. Nothing was assigned. Assign the same value on all workers, or"
            " write it inside `strategy.run`."
        )


def settled_in_body(
    cell: Cell, x: jax.Array, topology: Topology, across: Across
) -> tuple[jax.Array, jax.Array | None]:
    """The one value of what this replica and the others wrote, in compiled code.

    Returns:
        The value, and whether the replicas agreed on it; None if they need not.
    """
    first = first_value(PerReplica.of(InBody(x, topology, across)))
    differ = across.sum([(~is_same(x, first)).astype(jnp.int32)])[0]
    if not cell.averages:
        return first, differ == 0
    mean = across.sum([_wide(x)])[0] / topology.num_replicas
    return jnp.where(differ == 0, first, mean.astype(x.dtype)), None


def settled_copies(where: Any, cell: Cell, copies: Sequence[Any]) -> Any:
    """The one value of all replicas' values, known when the program runs.

    Args:
        where: The level whose program finds out whether they agree.
        cell: What they are written to.
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
    """Have the compiled call at ``where`` find out whether the copies of ``cell`` agree."""
    verdict = cell.verdict()
    where.write(verdict, where.read(verdict) & agreed)


def is_same(a: Any, b: Any) -> Any:
    """Whether two arrays are the same numbers, where NaN is NaN; of NumPy's or of JAX's."""
    return ((a == b) | ((a != a) & (b != b))).all()


def diverging(cell: Cell, values: Sequence[Any]) -> str:
    """What to say of replicas that write different values; without values, in compiled code."""
    shown = ", ".join(f"replica {i}: {v}" for i, v in enumerate(values))
    line = cell.line
    return (
        f"The replicas assigned different values to the mirrored variable {cell.name!r}, whose"
        f" aggregation is NONE{f' ({shown})' if shown else ''}{f', at {line}' if line else ''}."
        " Nothing was assigned. Make the values equal first. Gradients of a loss that is divided by"
        " the global batch size, as `rx.nn.compute_average_loss` does, are added up: `gradients ="
        ' rx.distribute.get_replica_context().all_reduce("SUM", gradients)`; "MEAN" is for a loss'
        " that each replica divides by its own rows, and for statistics. Or declare how to combine"
        " what is assigned: `rx.Variable(..., aggregation=rx.VariableAggregation.MEAN)`."
    )


def _averaged(values: Sequence[Any], rows: Sequence[bool], topology: Topology | None) -> Any:
    pairs = list(zip(values, rows, strict=True))
    if topology is not None and not topology.is_whole:
        parts = [(_wide(v if has else jnp.zeros_like(v)), int(has)) for v, has in pairs]
        return sum_across(ReduceOp.MEAN, parts, topology).astype(values[0].dtype)
    taking_part = [on_host(v) for v, has in pairs if has]
    lead = taking_part[0]
    if all(is_same(a, lead) for a in taking_part[1:]):
        return jnp.asarray(lead)
    return jnp.asarray(np.mean([_wide(a) for a in taking_part], axis=0).astype(lead.dtype))


def _wide(x: Any) -> Any:
    # The sum of narrow floats loses digits, and may be too large for them.
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _digest(x: np.ndarray) -> str:
    if x.dtype.kind in "iub":
        return hashlib.sha256(x.tobytes()).hexdigest()
    normal = np.where(x != x, np.asarray(np.nan, x.dtype), x) + np.asarray(0, x.dtype)
    return hashlib.sha256(normal.tobytes()).hexdigest()


def equal_shares(x: jax.Array, topology: Topology) -> tuple[jax.Array, jax.Array]:
    """The first replica's part of ``x`` and each other's; their sum is ``x`` to the bit."""
    count = topology.num_replicas
    if jnp.iscomplexobj(x):
        pairs = zip(equal_shares(x.real, topology), equal_shares(x.imag, topology), strict=True)
        lead, other = (jax.lax.complex(a, b) for a, b in pairs)
        return lead, other
    if jnp.issubdtype(x.dtype, jnp.integer):
        other = x // count
    elif jnp.issubdtype(x.dtype, jnp.floating):
        # A multiple of the last bit of x: then so is every partial sum, and none is rounded.
        # Halved, so that nothing overflows; rounded by force, as XLA may keep more bits.
        half, kind = x / 2, jnp.finfo(x.dtype)
        near = jax.lax.reduce_precision(half + half / count, kind.nexp, kind.nmant)
        other = jnp.where(jnp.isfinite(x), (near - half) * 2, 0)
    else:  # truth values
        other = jnp.zeros_like(x)
    return (x - other * (count - 1) if x.dtype != bool else x), other
