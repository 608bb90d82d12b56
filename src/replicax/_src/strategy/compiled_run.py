"""`Strategy.run` in compiled code: one program, mapped over the replicas' pieces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from replicax._src.base.types import TensorSpec
from replicax._src.context.current import entered
from replicax._src.context.replica import ReplicaContext
from replicax._src.functions.boundary import replica_value
from replicax._src.functions.jaxpr.lift import LiftedBody, as_input, from_output, lift_body
from replicax._src.functions.jaxpr.local_means import summed_local_means
from replicax._src.functions.jaxpr.on_shards import on_shards
from replicax._src.functions.jaxpr.replica_variance import varying_outputs
from replicax._src.state.agreement import agreed_value_in_body, note_verdict
from replicax._src.state.cell import Cell
from replicax._src.state.levels import Level, TraceLevel, level
from replicax._src.topology.mesh import MESH_AXIS, REPLICA_AXIS, Topology
from replicax._src.values.per_replica import (
    Joined,
    Mirrored,
    PerReplica,
    Stacked,
    is_opaque,
    is_result_leaf,
    result,
)
from replicax._src.values.placement import NUMERIC, is_array, per_replica_map, strong
from replicax._src.values.replica_functions import local_piece, stacked_array
from replicax._src.values.sharded import ShardLayout
from replicax._src.values.structures import (
    component_specs,
    dict_orders,
    expand_dataclasses,
    in_order,
    is_same_scalar,
    rebuild_dataclasses,
)

_PER_REPLICA, _REPLICATED = PartitionSpec(REPLICA_AXIS), PartitionSpec()


def run_compiled(
    context: ReplicaContext, topology: Topology, fn: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call `fn` on every replica, inside a function that is being traced."""
    outside = level()
    outside.uses(topology, context.strategy)
    with entered(strategy=context.strategy):
        inputs = _Inputs.of((args, kwargs), topology)
    body = _Body(context, fn, inputs)
    traced = body.trace(topology)
    if traced.summed_means:
        context.warn_summed_means(traced.summed_means)
    return body.rebuild(traced.run(outside))


@dataclass(frozen=True)
class _Inputs:
    """The arguments of a run: arrays with their partition specs, and static leaves."""

    leaves: list[Any]
    treedef: Any
    arrays: list[Any]
    specs: list[PartitionSpec]
    places: list[int]
    orders: list[tuple[Any, ...]]

    @classmethod
    def of(cls, tree: Any, topology: Topology) -> "_Inputs":
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_opaque)
        arrays, specs, places = [], [], []
        for i, x in enumerate(leaves):
            leaves[i], array, spec = _input(x, topology)
            if spec is not None:
                arrays.append(array)
                specs.append(spec)
                places.append(i)
        return cls(leaves, treedef, arrays, specs, places, dict_orders(tree, is_opaque))

    def rebuild(self, pieces: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one replica, given its pieces of the arrays."""
        leaves = list(map(local_piece, self.leaves))
        for place, spec, piece in zip(self.places, self.specs, pieces, strict=True):
            leaves[place] = piece[0] if spec == _PER_REPLICA else piece
        made = jax.tree.unflatten(self.treedef, leaves)
        args, kwargs = in_order(made, self.orders, leaves)
        return args, kwargs


def _input(x: Any, topology: Topology) -> tuple[Any, Any, PartitionSpec | None]:
    """Return the static leaf, the array and its partition spec for one argument."""
    if isinstance(x, Mirrored):
        return None, local_piece(x), _REPLICATED
    if isinstance(x, PerReplica):
        specs = component_specs(x)
        if not all(isinstance(s, TensorSpec) for s in specs):
            values = x.values
            if _is_one_object(values):
                return values[0], None, None
            if not all(isinstance(v, int | float | complex | np.generic) for v in values):
                raise TypeError(
                    f"The replicas hold {list(values)!r}, which differ and are not numbers:"
                    " compiled code is one program for all replicas. Run without `rx.function`; of"
                    " variables use the whole one, of which each replica sees its own copy."
                )
            return x, None, None
        if any(s != specs[0] for s in specs):
            raise ValueError(
                f"The replicas hold values of different shapes, {[s.shape for s in specs]}, which"
                " one compiled program cannot take. Pass them as an argument of the rx.function,"
                " which then compiles each replica separately, or batch with `drop_remainder=True`."
            )
        return None, stacked_array(x, topology), _PER_REPLICA
    if is_array(x) or (isinstance(x, np.ndarray) and x.dtype.kind in NUMERIC):
        return None, x, _REPLICATED
    return x, None, None


def _is_one_object(values: Sequence[Any]) -> bool:
    first = values[0]
    return not hasattr(first, "__jax_array__") and all(is_same_scalar(v, first) for v in values)


class _Body:
    """The replica function: traces it, and keeps the structure of its result."""

    def __init__(self, context: ReplicaContext, fn: Callable[..., Any], inputs: _Inputs) -> None:
        self._context = context
        self._fn = fn
        self._inputs = inputs
        self._treedef: Any = None
        self._orders: list[tuple[Any, ...]] = []
        self._static: list[Any] = []

    def trace(self, topology: Topology) -> "_Traced":
        """Trace the function once, for all replicas."""
        inner = TraceLevel(in_replica=True)
        per_replica: list[Cell] = []
        replicated: list[Cell] = []

        def body(*pieces: Any) -> Any:
            with (
                inner.active(),
                entered(strategy=self._context.strategy, replica=self._context, body=None),
            ):
                args, kwargs = self._inputs.rebuild(pieces)
                outs = self._flatten_result(self._fn(*args, **kwargs))
            per_replica[:] = [c for c in inner.writes if c.per_replica]
            replicated[:] = [c for c in inner.writes if not c.per_replica]
            return (
                [x[None] for x in outs],
                [inner.writes[c][None] for c in per_replica],
                [inner.writes[c] for c in replicated],
                [start for _, start in inner.created],
            )

        mapped = per_replica_map(
            body,
            topology,
            tuple(self._inputs.specs),
            (_PER_REPLICA, _PER_REPLICA, _REPLICATED, _REPLICATED),
        )
        lifted = lift_body(mapped, self._inputs.arrays, inner, replicated)
        dtype = self._context.strategy.reduce_dtype
        return _Traced(lifted, (per_replica, replicated), topology, dtype)

    def rebuild(self, outs: Sequence[Stacked | Joined]) -> Any:
        """Return the result of the run: the structure, with a per-replica value for each array."""
        rest = iter(outs)
        leaves = [result(next(rest)) if x is _ARRAY else x for x in self._static]
        made = jax.tree.unflatten(self._treedef, leaves)
        return rebuild_dataclasses(in_order(made, self._orders, leaves))

    def _flatten_result(self, returned: Any) -> list[jax.Array]:
        tree = expand_dataclasses(returned)
        leaves, self._treedef = jax.tree.flatten(tree, is_leaf=is_result_leaf)
        self._orders = dict_orders(tree, is_result_leaf)
        arrays = []
        for x in leaves:
            piece = replica_value(x)
            is_one = is_array(piece) or isinstance(piece, np.ndarray | np.generic)
            self._static.append(_ARRAY if is_one else piece)
            if is_one:
                arrays.append(strong(jnp.asarray(piece)))
        return arrays


_ARRAY = object()


class _Traced:
    """A traced replica function, ready to be called with the variables of some level."""

    def __init__(
        self,
        lifted: LiftedBody,
        written: tuple[list[Cell], list[Cell]],
        topology: Topology,
        reduce_dtype: Any,
    ) -> None:
        per_replica, replicated = written
        self._arrays, self._in_specs, self._reads = lifted.arrays, lifted.in_specs, lifted.reads
        self._topology = topology
        self._writes = [*per_replica, *replicated]
        self._num_outs = lifted.num_outs - len(self._writes)
        varying_inputs = [REPLICA_AXIS in s for s in self._in_specs]
        varying_inputs += [c.per_replica for c in self._reads]
        varying = varying_outputs(lifted.jaxpr, varying_inputs)
        self.summed_means = summed_local_means(lifted.jaxpr, varying_inputs, topology.num_replicas)
        # Outputs that are provably equal on all replicas, such as functional state, stay one array.
        whole = topology.is_fully_addressable and topology.cores == 1
        self._equal_outputs = [i for i in range(self._num_outs) if whole and not varying[i]]
        self._may_diverge = [
            i
            for i, (c, v) in enumerate(zip(self._writes, varying[self._num_outs :], strict=True))
            if v and not c.per_replica
        ]
        in_layouts = [None] * len(self._in_specs) + [self._shard_layout(c) for c in self._reads]
        out_layouts = [None] * self._num_outs + [self._shard_layout(c) for c in self._writes]
        for i in self._may_diverge:  # compared as whole arrays, and sliced afterwards
            out_layouts[self._num_outs + i] = None
        layouts = in_layouts, out_layouts
        self._call = on_shards(lifted.jaxpr, *layouts, varying_inputs, reduce_dtype)

    def _shard_layout(self, cell: Cell) -> ShardLayout | None:
        """Return the layout of a variable sharded over these replicas; None for other variables."""
        layout = cell.shard_layout if cell.topology == self._topology else None
        return None if layout is None else layout.of_body

    def _spec(self, cell: Cell) -> PartitionSpec:
        if cell.per_replica:
            return _PER_REPLICA
        layout = self._shard_layout(cell)
        return _REPLICATED if layout is None else layout.spec

    def run(self, outside: Level) -> list[Stacked | Joined]:
        """Run the function on every replica, apply its writes to `outside`; return its outputs."""
        reads, writes, may_diverge = self._reads, self._writes, self._may_diverge
        topology, first_write = self._topology, self._num_outs
        equal = set(self._equal_outputs)
        compared = [writes[i] for i in may_diverge if not writes[i].averages]

        def replay(*inputs: Any) -> list[Any]:
            arrays, state = inputs[: len(inputs) - len(reads)], inputs[len(inputs) - len(reads) :]
            local = [s[0] if c.per_replica else s for s, c in zip(state, reads, strict=True)]
            results = self._call(*arrays, *local)
            for i in self._equal_outputs:  # without the axis of its own that each replica adds
                results[i] = results[i][0]
            flags = []
            for i in may_diverge:
                at, layout = first_write + i, self._shard_layout(writes[i])
                value, agreed = agreed_value_in_body(writes[i], results[at], topology, MESH_AXIS)
                results[at] = value if layout is None else layout.local_shard(value)
                flags += [] if agreed is None else [agreed]
            return [*results, *flags]

        mapped = per_replica_map(
            replay,
            topology,
            (*self._in_specs, *map(self._spec, reads)),
            [
                *(_REPLICATED if i in equal else _PER_REPLICA for i in range(first_write)),
                *map(self._spec, writes),
                *([_REPLICATED] * len(compared)),
            ],
        )
        results = mapped(*self._arrays, *(self._read(outside, c) for c in reads))
        forms: list[Stacked | Joined] = [
            (Joined if i in equal else Stacked)(x, topology)
            for i, x in enumerate(results[:first_write])
        ]
        rest = results[first_write:]
        for cell, value in zip(writes, rest, strict=False):
            outside.write(cell, from_output(value, cell))
        for cell, flag in zip(compared, rest[len(writes) :], strict=True):
            note_verdict(outside, cell, flag)
        return forms

    def _read(self, outside: Level, cell: Cell) -> Any:
        """Return the value of a variable at level `outside` in the form that the replicas take."""
        value = outside.read(cell)
        is_elsewhere = cell.sharded and cell.topology != self._topology
        return value if is_elsewhere else as_input(value, cell)
