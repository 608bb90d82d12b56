"""Collectives of eager replicas, as JAX primitives.

Executed op by op, a collective is a barrier of the replica threads, see `Rendezvous`. Its gradient
is again a collective, it can be vmapped, and inside a compiled function of one replica it becomes a
host callback to the rendezvous.

Collectives of different replicas are matched only by their order. The primitives therefore have an
ordered effect: in compiled code each waits for the one traced before it, even without shared data.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jaxprs
from jax.interpreters import ad, batching, mlir

from replicax._src.base.errors import ReplicaError, ScopeError
from replicax._src.base.managers import contextmanager
from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.base.types import ReduceOp
from replicax._src.collectives.consistency import Call
from replicax._src.collectives.cross_device_ops import CrossDeviceOps
from replicax._src.collectives.options import CommunicationOptions
from replicax._src.collectives.packing import packed
from replicax._src.collectives.rendezvous import Rendezvous
from replicax._src.compat.jax import lower_ordered_call, ordered_effect
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import pieces
from replicax._src.values.placement import is_array, on_device
from replicax._src.values.replica_functions import (
    all_shapes,
    gather_across,
    mean_dtype,
    reduced_dtype,
    summand,
)
from replicax._src.values.sharded import SMALL_BYTES
from replicax._src.values.structures import select


@dataclass(frozen=True)
class Seat:
    """One replica in eager runs of a topology.

    Attributes:
        topology: The devices of all replicas.
        replica: The replica's index in this process.
        ops: The algorithm of its reductions.
        reduce_dtype: The type in which gradients must be summed, which only compiled steps do;
            None if any type will do.
    """

    topology: Topology
    replica: int
    ops: CrossDeviceOps
    reduce_dtype: Any = None

    @property
    def number(self) -> int:
        """The replica's number among all processes."""
        return self.topology.local_replicas[self.replica]

    @property
    def device(self) -> jax.Device:
        """The device on which this replica computes."""
        return self.topology.primary_devices[self.replica]

    @property
    def rendezvous(self) -> Rendezvous:
        """The rendezvous of the current run."""
        if (own := _current_rendezvous.get()) is not None:
            return own
        # Called on a thread of the XLA runtime, which has no context of a run.
        rendezvous = _open_rendezvous.get(self.topology, ())
        if not rendezvous:
            raise ReplicaError(
                "A collective of an eager replica ran after its `strategy.run` had ended."
            )
        if len(rendezvous) > 1:
            raise ReplicaError(
                f"{len(rendezvous)} eager runs are under way on the same devices, in several"
                " threads, and a collective inside a function compiled with jax.jit, jax.lax.scan"
                " or the like cannot know to which it belongs. Let one thread run at a time, or"
                " compile the whole step with `rx.function`."
            )
        return rendezvous[0]


_open_rendezvous: dict[Topology, list[Rendezvous]] = {}
_current_rendezvous: ContextVar[Rendezvous | None] = ContextVar("replicax_rendezvous", default=None)
# Nonempty once a collective was compiled into a program: from then on results may be pending when a
# replica function returns, and its rendezvous must stay open until they are ready.
_staged: list[bool] = []
_STRUCTURE = "the structure of the value"


@contextmanager
def open_rendezvous(topology: Topology) -> Iterator[Rendezvous]:
    """Open a rendezvous that collectives of `topology` find, also from threads of the runtime."""
    rendezvous = Rendezvous(len(topology.local_replicas))
    _open_rendezvous.setdefault(topology, []).append(rendezvous)
    token = _current_rendezvous.set(rendezvous)  # inherited by the replicas' threads
    try:
        yield rendezvous
    finally:
        _current_rendezvous.reset(token)
        _open_rendezvous[topology].remove(rendezvous)


@dataclass(frozen=True)
class SeatAcross:
    """The collectives of a replica that is compiled separately: they meet the other replicas."""

    seat: Seat

    def index(self) -> int:
        """Return the replica's number, which is a constant here."""
        return self.seat.number

    def sum(self, xs: list[Any]) -> list[Any]:
        """Sum each array over the replicas, in one rendezvous."""
        leaves = [jnp.asarray(x) for x in xs]
        return all_reduce(self.seat, ReduceOp.SUM, leaves, CommunicationOptions())

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """Concatenate `x` over the replicas: one rendezvous for the sizes, one for the values."""
        return all_gather(self.seat, x, axis, CommunicationOptions())


def wait_if_staged(result: Any) -> Any:
    """Wait for `result` if collectives in compiled code may still be running; return it."""
    return jax.block_until_ready(result) if _staged else result


def all_reduce(
    seat: Seat,
    op: ReduceOp,
    leaves: Sequence[jax.Array],
    options: CommunicationOptions,
    structure: str = "",
) -> list[jax.Array]:
    """Return the sum or mean over all replicas of each leaf of a value of this structure.

    Raises:
        ScopeError: If a leaf may be a gradient that must be summed in another type.
    """
    for x in leaves:
        _check_reduce_dtype(x, seat.reduce_dtype)
    results: list[jax.Array] = _reduce_p.bind(
        *leaves, seat=seat, op=op, options=options, structure=structure, number=None
    )
    return results


def _check_reduce_dtype(x: Any, dtype: Any) -> None:
    """Raise `ScopeError` if a compiled step would round `x`, a gradient, to `dtype` to sum it.

    Eager code cannot know whether `x` is the gradient of a sharded variable, so all large arrays
    of floating-point numbers count as one.
    """
    if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return
    if x.dtype.itemsize > dtype.itemsize and x.nbytes > SMALL_BYTES:
        raise ScopeError(
            f"Eager replicas sum an array of shape {x.shape} and type {x.dtype}, and their strategy"
            f" has reduce_dtype={str(dtype)!r}, which only compiled steps apply to gradients."
            " Compile the step with `rx.function`, or make the strategy without reduce_dtype to"
            " run eagerly."
        )


def all_gather(
    seat: Seat, x: jax.Array, axis: int, options: CommunicationOptions, structure: str = ""
) -> jax.Array:
    """Return all replicas' values concatenated along `axis`; their sizes may differ there."""

    def settle(own: list[tuple[int, ...]]) -> list[Any]:
        shapes = all_shapes(own, seat.topology, f"all_gather(axis={axis})")
        check_gathered(shapes, axis)
        return [tuple(s[axis] for s in shapes)] * len(own)

    # The sizes are exchanged in Python: the result needs a static shape, and `x` may be a tracer.
    call = Call(f"all_gather(axis={axis})", {_STRUCTURE: structure})
    sizes = seat.rendezvous.meet(
        seat.replica, call, x.shape, settle, timeout=options.timeout_seconds
    )
    gathered: jax.Array = _gather_p.bind(
        x, seat=seat, axis=axis, sizes=sizes, options=options, number=None
    )
    return gathered


_reduce_p = jaxprs.Primitive("replica_all_reduce")
_reduce_p.multiple_results = True
_gather_p = jaxprs.Primitive("replica_all_gather")
_call_p = jaxprs.Primitive("replica_call")
_call_p.multiple_results = True

# A description of each collective. Its parameter `number` is its position in the program, which
# lets the rendezvous check that the replicas' collectives match.
COLLECTIVES: dict[jaxprs.Primitive, Callable[[Mapping[str, Any], Sequence[Any]], str]] = {
    _reduce_p: lambda p, avals: (
        f"all_reduce({p['op'].name}) of {', '.join(map(str, avals))}"
        f"{' as ' if p['structure'] else ''}{p['structure']}"
    ),
    _gather_p: lambda p, _: f"all_gather(axis={p['axis']})",
}


def _reduce_now(
    *leaves: Any,
    seat: Seat,
    op: ReduceOp,
    options: CommunicationOptions,
    structure: str,
    number: int | None,
) -> list[Any]:
    """Reduce in a rendezvous; called eagerly with arrays, or from a callback with NumPy arrays."""

    def settle(rows: list[Any]) -> list[Any]:
        _check_reduced(rows)
        columns = list(zip(*rows, strict=True))
        on_host = not is_array(columns[0][0])  # called back from a program
        if on_host and seat.topology.is_fully_addressable:
            return [[_host_reduction(op, c) for c in columns]] * len(rows)
        values = [pieces(c, seat.topology) for c in columns]
        results = seat.ops.batch_reduce(op, [(v, v) for v in values], options)
        answers = [select(results, i) for i in range(len(rows))]
        return [list(map(np.asarray, a)) for a in answers] if on_host else answers

    call = Call(_named(f"all_reduce({op.name})", number), {_STRUCTURE: structure})
    results = seat.rendezvous.meet(
        seat.replica, call, leaves, settle, timeout=options.timeout_seconds
    )
    return list(results)


def _gather_now(x: Any, *, seat: Seat, axis: int, sizes: tuple[int, ...], **how: Any) -> Any:
    """Gather in a rendezvous; called eagerly with arrays, or from a callback with NumPy arrays."""

    def settle(pieces: list[Any]) -> list[Any]:
        _check_traced_sizes(
            [p.shape[axis] for p in pieces], [sizes[i] for i in seat.topology.local_replicas]
        )
        if not seat.topology.is_fully_addressable:
            rows = gather_across(pieces, axis, sizes, seat.topology)
            return list(rows) if is_array(pieces[0]) else list(map(np.asarray, rows))
        if not is_array(pieces[0]):
            return [np.concatenate(pieces, axis)] * len(pieces)
        whole = jnp.concatenate(
            [on_device(p, seat.topology.primary_devices[0]) for p in pieces], axis
        )
        return [on_device(whole, d) for d in seat.topology.primary_devices]

    call = Call(_named(f"all_gather(axis={axis}) of rows {sizes}", how["number"]))
    timeout = how["options"].timeout_seconds
    return seat.rendezvous.meet(seat.replica, call, x, settle, timeout=timeout)


def _named(what: str, number: int | None) -> str:
    return what if number is None else f"{what}, collective {number} of its program"


def _check_reduced(rows: Sequence[Any]) -> None:
    kinds = [[f"{x.dtype}{list(x.shape)}" for x in row] for row in rows]
    if any(k != kinds[0] for k in kinds):
        shown = "; ".join(f"replica {i}: {', '.join(k)}" for i, k in enumerate(kinds))
        raise ReplicaError(
            f"all_reduce needs the same shapes and dtypes on all replicas, got {shown}. Reduce"
            " over the rows that differ first, or join them with all_gather."
        )


def check_gathered(shapes: Sequence[tuple[int, ...]], axis: int) -> None:
    """Check that shapes can be concatenated along `axis`.

    Raises:
        InvalidArgumentError: If they differ along another axis; also a ValueError.
    """
    if len({(len(s), *s[:axis], *s[axis + 1 :]) for s in shapes}) > 1:
        raise InvalidArgumentError(
            f"all_gather along axis={axis} of values of shapes {list(shapes)}, which can only"
            " differ along that axis."
        )


def _check_traced_sizes(sizes: Sequence[int], traced: Sequence[int]) -> None:
    if tuple(sizes) != tuple(traced):
        raise ReplicaError(
            f"all_gather of {list(sizes)} rows, in a function that jax.jit compiled for"
            f" {list(traced)} rows. Call all_gather outside of jax.jit, where sizes may change."
        )


def _host_reduction(op: ReduceOp, column: Sequence[np.ndarray]) -> Any:
    """Reduce NumPy arrays on the host."""
    given = column[0].dtype
    rows = summand(op, np.stack(column))
    total = np.sum(rows, axis=0, dtype=rows.dtype)
    return total if op is ReduceOp.SUM else (total / len(column)).astype(mean_dtype(given))


def _reduced_aval(x: Any, op: ReduceOp) -> Any:
    return x.update(dtype=reduced_dtype(op, x.dtype))


def _from_runtime(now: Any, args: Sequence[Any], avals: Sequence[Any], params: Any) -> Any:
    """Bind the collective as an operation of compiled code: a callback to the rendezvous."""
    _staged[:] = [True]
    call = lambda *xs: now(*map(np.asarray, xs), **params)  # noqa: E731
    return _call_p.bind(*args, callback=call, avals=tuple(avals))


def _reduce_from_runtime(*leaves: Any, **params: Any) -> Any:
    return packed(
        lambda flat: _from_runtime(_reduce_now, flat, _reduce_avals(*flat, **params), params),
        leaves,
    )


def _gather_from_runtime(x: Any, **params: Any) -> Any:
    now = lambda x, **params: [_gather_now(x, **params)]  # noqa: E731
    return _from_runtime(now, [x], [_gather_avals(x, **params)], params)[0]


def _in_order(avals: Any) -> Any:
    return lambda *args, **params: (avals(*args, **params), {ordered_effect()})


def _reduce_avals(*leaves: Any, op: ReduceOp, **_: Any) -> Any:
    return [_reduced_aval(jax.typeof(x) if is_array(x) else x, op) for x in leaves]


def _gather_avals(x: Any, *, axis: int, sizes: tuple[int, ...], **_: Any) -> Any:
    aval = jax.typeof(x) if is_array(x) else x
    return aval.update(shape=(*aval.shape[:axis], sum(sizes), *aval.shape[axis + 1 :]))


def _reduce_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    outs = _reduce_p.bind(*primals, **params)
    # Integers have no tangents, and symbolic zeros need not be sent.
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    out_tangents: list[Any] = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    if moving:
        sent = _reduce_p.bind(*(tangents[i] for i in moving), **params)
        for i, tangent in zip(moving, sent, strict=True):
            out_tangents[i] = tangent
    return outs, out_tangents


def _reduce_transposed(cotangents: Any, *leaves: Any, **params: Any) -> Any:
    return _reduce_p.bind(*map(ad.instantiate_zeros, cotangents), **params)


def _gather_transposed(cotangent: Any, x: Any, *, axis: int, sizes: Any, **params: Any) -> Any:
    seat: Seat = params["seat"]
    (total,) = _reduce_p.bind(
        ad.instantiate_zeros(cotangent), op=ReduceOp.SUM, structure="", **params
    )
    at = sum(sizes[: seat.number])
    return [jax.lax.slice_in_dim(total, at, at + sizes[seat.number], axis=axis)]


def _gather_batched(args: Any, dims: Any, *, axis: int, **params: Any) -> Any:
    (x,), (dim,) = args, dims
    return _gather_p.bind(jnp.moveaxis(x, dim, 0), axis=axis + 1, **params), 0


# JAX may pass constants of a gradient as other types than arrays.
_reduce_p.def_impl(lambda *leaves, **params: _reduce_now(*map(jnp.asarray, leaves), **params))
_reduce_p.def_effectful_abstract_eval(_in_order(_reduce_avals))
ad.primitive_jvps[_reduce_p] = _reduce_jvp
ad.primitive_transposes[_reduce_p] = _reduce_transposed
batching.primitive_batchers[_reduce_p] = lambda args, dims, **kw: (
    _reduce_p.bind(*args, **kw),
    dims,
)
mlir.register_lowering(_reduce_p, mlir.lower_fun(_reduce_from_runtime, multiple_results=True))

_gather_p.def_impl(lambda x, **params: _gather_now(jnp.asarray(x), **params))
_gather_p.def_effectful_abstract_eval(_in_order(_gather_avals))
ad.deflinear2(_gather_p, _gather_transposed)
batching.primitive_batchers[_gather_p] = _gather_batched
mlir.register_lowering(_gather_p, mlir.lower_fun(_gather_from_runtime, multiple_results=False))

_call_p.def_effectful_abstract_eval(_in_order(lambda *_, avals, **__: avals))
mlir.register_lowering(_call_p, lower_ordered_call)
