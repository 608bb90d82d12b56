"""Tracing of a step for a target slice, into a serialized program and its mesh."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding

from replicax._src.base.errors import PlacementError, TracingError
from replicax._src.functions.boundary import Fields, Outputs
from replicax._src.functions.function import BoundFunction, Function
from replicax._src.functions.jaxpr.lift import lift
from replicax._src.functions.program import Program
from replicax._src.functions.signature import Arguments, flatten_arguments
from replicax._src.preflight.advice import DeviceContents
from replicax._src.preflight.targets import Target, move_to, redeclare_variables
from replicax._src.state.cell import Cell
from replicax._src.state.levels import TraceLevel
from replicax._src.topology.device_assignment import DeviceAssignment
from replicax._src.topology.mesh import REPLICA_AXIS, PlannedTopology, Topology
from replicax._src.topology.tpu_topology import TPUTopology
from replicax._src.values.per_replica import (
    PerReplica,
    is_distributed,
    is_ragged,
    pieces,
    stacked,
)
from replicax._src.values.sharded import is_sharded_over_replicas

Places = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Traced:
    """A step, lowered for a slice.

    Attributes:
        name: The name of the function.
        program: The program, serialized by `jax.export`.
        axes: The names and sizes of the mesh axes.
        donated: The indices of the donated inputs.
        places: The coordinates of the devices in mesh order; empty for the default order.
        notes: Differences from the script.
        num_replicas: The number of replicas that fill the slice; 0 without a strategy.
        names: The names of the inputs: of variables, or positions of arguments.
        contents: The contents of a device's memory.
        host_inputs: The indices of the inputs in the memory of the host.
        host_outputs: The same of outputs.
    """

    name: str
    program: bytes
    axes: dict[str, int]
    donated: tuple[int, ...]
    places: Places = ()
    notes: tuple[str, ...] = ()
    num_replicas: int = 0
    names: tuple[str, ...] = ()
    contents: DeviceContents = field(default_factory=DeviceContents)
    host_inputs: tuple[int, ...] = ()
    host_outputs: tuple[int, ...] = ()

    def request(self) -> dict[str, Any]:
        """Return the part of a compiler request that describes the step."""
        names = "places", "axes", "donated", "host_inputs", "host_outputs"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Step:
    """A function, and the arguments of one call."""

    function: Callable[..., Any]
    arguments: Arguments
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Step:
        """Return the step for the call ``function(*args, **kwargs)``."""
        if isinstance(function, Function | BoundFunction):
            function = function.python_function
        given = tuple(args), dict(kwargs)
        is_partial = any(map(is_ragged, jax.tree.leaves(given, is_leaf=is_distributed)))
        filled = jax.tree.map(_full_batch, given, is_leaf=is_distributed)
        return cls(function, flatten_arguments(*filled), _PARTIAL_BATCH if is_partial else ())

    def cores(self) -> int:
        """Return the number of logical devices per replica of its strategy."""
        found = None if self.is_jitted else _trace_topology(self.function, self.arguments)[0]
        return 1 if found is None else found.cores

    @property
    def is_jitted(self) -> bool:
        """Whether the step is a `jax.jit` function."""
        return hasattr(self.function, "trace") and hasattr(self.function, "lower")


_PARTIAL_BATCH = (
    "replicas here hold different numbers of rows: compiled as if each had the most, because a"
    " partial batch is not one program for all devices",
)


def _full_batch(x: Any) -> Any:
    """Return a full batch in place of a partial one."""
    if not is_ragged(x):
        return x
    most = max(x.form.values, key=np.size)
    return pieces([most] * len(x.form.values), x.form.topology)


@dataclass(frozen=True)
class Variation:
    """Deviations from the script.

    Attributes:
        rows: The batch size per replica; 0 for the script's.
        policy: The variable policy, ``mirrored`` or ``sharded``; empty for the script's.
    """

    rows: int = 0
    policy: str = ""


UNCHANGED = Variation()
# JAX refuses to export custom calls without a compatibility guarantee.
_NO_GUARANTEE, _CUSTOM_CALL = "no compatibility guarantees", re.compile(r"custom_call @([\w$.]+)")


def trace(step: Step, devices: Target, variation: Variation = UNCHANGED) -> Traced:
    """Trace a call for a whole slice, with as many replicas as fit, each with its own batch."""
    found, used = (
        (None, []) if step.is_jitted else _find_strategy(step.function, step.arguments, devices)
    )
    if found is None:
        return _without_strategy(step, devices)
    shape = devices.mesh_shape
    planned = PlannedTopology.of(devices.num_devices, found.cores, shape, found.shards, found.axes)
    target = dataclasses.replace(planned, device=_gpu(devices))
    places, notes = _device_coordinates(found, devices)
    with redeclare_variables(target, variation.policy), move_to(target, used):
        program, avals = _program(step.function, step.arguments, target, variation.rows)
        contents = _contents(program, target, variation.rows or _batch_rows(step.arguments))
        exported = _export_step(program.jitted, avals, {}, devices)
    axes = dict(zip(target.mesh.axis_names, target.mesh.axis_sizes, strict=True))
    serialized = bytes(exported.serialize())
    donated = tuple(range(len(program.changed))) if program.donates else ()
    cells = (c.name for c in (*program.changed, *program.read_only))
    return Traced(
        name=program.name,
        program=serialized,
        axes=axes,
        donated=donated,
        places=places,
        notes=(*step.notes, *notes, *_host_notes(program)),
        num_replicas=target.num_replicas,
        names=(*cells, *(f"argument {i}" for i in range(len(avals[-1])))),
        contents=contents,
        host_inputs=_offloaded([*program.changed, *program.read_only]),
        host_outputs=_offloaded(program.written),
    )


def _host_notes(program: Program) -> tuple[str, ...]:
    return _COPIES if any(cell.offloaded for cell in program.written) else ()


_COPIES = (
    "the time of copies between the devices and the memory of the host, which runs concurrently"
    " with operations, is not counted",
)


def _offloaded(cells: Sequence[Cell]) -> tuple[int, ...]:
    return tuple(i for i, cell in enumerate(cells) if cell.offloaded)


def _contents(program: Program, target: Topology, rows: int) -> DeviceContents:
    """Return the contents of the memory of a device of `target`."""
    total = mirrored = 0
    for cell in (*program.changed, *program.read_only):
        if cell.offloaded:
            continue
        aval = _cell_aval(cell, target)
        size = math.prod(aval.sharding.shard_shape(aval.shape)) * aval.dtype.itemsize
        total += size
        is_stored_whole = not (cell.transient or cell.sharded or cell.per_replica)
        if is_stored_whole and is_sharded_over_replicas(aval, "sharded", cell.topology, cell.spec):
            mirrored += size
    return DeviceContents(total, mirrored, rows, target.num_replicas)


def _without_strategy(step: Step, devices: Target) -> Traced:
    """Trace a plain JAX program, on the mesh of its arguments or on one device."""
    args, kwargs = step.arguments.with_arrays(step.arguments.arrays)
    meshes = [m for x in jax.tree.leaves((args, kwargs)) if (m := _mesh_of(x)) is not None]
    if not step.is_jitted and not meshes:
        return _trace_alone(step, devices)
    jitted: Any = step.function if step.is_jitted else jax.jit(step.function)
    exported = _export_step(jitted, args, kwargs, devices)
    mesh: Any = next((m for m in meshes if m.size == exported.nr_devices), None)
    axes = {"all": exported.nr_devices} if mesh is None else dict(mesh.shape)
    if exported.nr_devices not in (1, devices.num_devices):
        raise PlacementError(
            f"{_name(step.function)} uses no strategy, and its arguments lie on a mesh of"
            f" {exported.nr_devices} devices, while {devices.name} has {devices.num_devices}. Make"
            f" the mesh of {devices.num_devices} devices: with REPLICAX_CPU_DEVICES="
            f"{devices.num_devices} there are as many virtual ones."
        )
    notes = _ONE_DEVICE if exported.nr_devices < devices.num_devices else ()
    consumed = _donated(exported)
    paths = jax.tree_util.tree_leaves_with_path((args, kwargs))
    names = tuple(f"argument {jax.tree_util.keystr(path[1:])}" for path, _ in paths)
    program = bytes(exported.serialize())
    return Traced(_name(step.function), program, axes, consumed, (), notes, 0, names)


def _donated(exported: export.Exported) -> tuple[int, ...]:
    """Return the indices of donated inputs, from the attributes in the module's text."""
    head = re.search(r"func\.func public @main\((.*?)\) ->", exported.mlir_module(), re.DOTALL)
    given = re.split(r"%arg\d+: ", head[1])[1:] if head else []
    marks = [i for i, x in enumerate(given) if "aliasing_output" in x or "buffer_donor" in x]
    return tuple(exported.module_kept_var_idx[i] for i in marks)


_ONE_DEVICE = ("no strategy and no mesh: one device computes everything, the others nothing",)


def _trace_alone(step: Step, devices: Target) -> Traced:
    """Trace a function without a strategy, including the variables that it reads and changes."""
    level, avals = TraceLevel(in_replica=False), [_aval(x) for x in step.arguments.arrays]
    lifted, outputs = _lift_step(step.function, step.arguments, avals, level)
    program = Program(lifted, level, outputs, _name(step.function))
    cells = program.changed, program.read_only
    state = [[jax.ShapeDtypeStruct(c.shape, c.dtype) for c in some] for some in cells]
    exported = _export_step(program.jitted, (*state, avals), {}, devices)
    donated = tuple(range(len(program.changed))) if program.donates else ()
    names = (
        *(c.name for some in cells for c in some),
        *map("argument {}".format, range(len(avals))),
    )
    notes = _ONE_DEVICE if devices.num_devices > 1 else ()
    program_bytes = bytes(exported.serialize())
    return Traced(program.name, program_bytes, {"all": 1}, donated, (), notes, 0, names)


def _mesh_of(x: Any) -> Any:
    where = getattr(x, "sharding", None)
    return where.mesh if isinstance(where, NamedSharding) else None


def _device_coordinates(found: Topology, devices: Target) -> tuple[Places, tuple[str, ...]]:
    """Return the coordinates of the mesh's devices under the strategy's device assignment."""
    if found.assignment is None or not devices.mesh_shape:
        return (), ()
    assignment = _rebuild_assignment(found.assignment, devices.mesh_shape)
    if assignment is None:
        shape = "x".join(map(str, devices.mesh_shape))
        return (), (
            f"the device assignment cannot be laid over {shape} (x, y, z, cores of a chip), so that"
            " replicas take the devices in their order",
        )
    return tuple(map(tuple, assignment.core_assignment.reshape(-1, 4).tolist())), ()


def _rebuild_assignment(old: DeviceAssignment, mesh: tuple[int, ...]) -> DeviceAssignment | None:
    """Return the assignment for a slice of another shape; None if its replicas do not fill it."""
    size, cores = math.prod(mesh), old.num_cores_per_replica
    if mesh == tuple(old.topology.mesh_shape.tolist()):
        return old if old.num_replicas * cores == size else None
    # The bounding block of the first replica, and the strides between its cores.
    first = old.core_assignment[0] - old.core_assignment[0].min(axis=0)
    steps = [int(np.gcd.reduce(axis)) or 1 for axis in first.T]
    block = [int(axis.max()) // step + 1 for axis, step in zip(first.T, steps, strict=True)]
    if math.prod(block) != cores or size % cores:
        return None
    topology = TPUTopology(None, mesh, [list(itertools.product(*map(range, mesh)))])
    try:
        return DeviceAssignment.build(topology, block, steps, size // cores)
    except PlacementError:
        return None


def _export_step(jitted: Any, args: Any, kwargs: Any, devices: Target) -> export.Exported:
    """Export a jitted function for the target's platform."""
    try:
        with _device_of_kernels(devices):
            made = _allow_custom_calls(
                lambda c: _export_once(jitted, devices.platform, c, args, kwargs)
            )
        # Use flat trees: the compiling process may not know the classes of the pytree nodes.
        ins = jax.tree.structure((tuple(range(len(made.in_avals))), {}))
        outs = jax.tree.structure(tuple(range(len(made.out_avals))))
        return dataclasses.replace(made, in_tree=ins, out_tree=outs)
    except (NotImplementedError, ValueError) as error:
        signs = "devices to be present", "callback", "is different from the lowering platform"
        if not any(sign in str(error) for sign in signs):
            raise
        raise TracingError(
            f"{_name(jitted)} calls back into Python while it runs (jax.pure_callback, io_callback,"
            " jax.debug.print or the like), for which JAX must have the devices. Leave that out"
            " for the preflight."
        ) from error


def _device_of_kernels(devices: Target) -> AbstractContextManager[Any]:
    """Set the GPU for which Pallas lowers kernels outside of replicas."""
    gpu = _gpu(devices)
    if gpu is None or not jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu))


def _gpu(devices: Target) -> AbstractDevice | None:
    """Return the GPU for which Pallas lowers kernels; from JAX 0.11 on it looks for a device."""
    if devices.platform != "cuda":
        return None
    kind = f"NVIDIA {devices.kind.upper()}"
    return AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")


def _export_once(jitted: Any, platform: str, checks: Sequence[Any], args: Any, kwargs: Any) -> Any:
    return export.export(jitted, platforms=[platform], disabled_checks=checks)(*args, **kwargs)


def _allow_custom_calls(make: Callable[[Sequence[Any]], export.Exported]) -> export.Exported:
    """Export with every custom call allowed: the program is compiled here, by the same versions."""
    known: set[str] = set()
    while True:
        try:
            return make([export.DisabledSafetyCheck.custom_call(name) for name in sorted(known)])
        except ValueError as error:
            refused = set(_CUSTOM_CALL.findall(str(error))) - known
            if _NO_GUARANTEE not in str(error) or not refused:
                raise
            known |= refused


def _find_strategy(
    step: Callable[..., Any], arguments: Arguments, devices: Target
) -> tuple[Topology | None, list[Cell]]:
    """Return the topology of the step's strategy, or None, and the cells that the step uses."""
    found, cells = _trace_topology(step, arguments)
    if found is None:
        return None, cells
    if devices.num_devices % found.cores:
        raise PlacementError(
            f"{devices.name} has {devices.num_devices} devices, which replicas of {found.cores}"
            " logical devices cannot fill. Choose a larger slice, or another device assignment."
        )
    return found, cells


def _trace_topology(
    step: Callable[..., Any], arguments: Arguments
) -> tuple[Topology | None, list[Cell]]:
    level = TraceLevel(in_replica=False)
    lifted, _ = _lift_step(step, arguments, [_aval(x) for x in arguments.arrays], level)
    found = max(level.topologies, key=lambda t: len(t.devices), default=None)
    return found, [*lifted.reads, *lifted.writes]


def _program(
    step: Callable[..., Any], arguments: Arguments, target: Topology, rows: int
) -> tuple[Program, tuple[Any, ...]]:
    """Trace the step for the target; return the program and the avals of its inputs."""
    moved = arguments._replace(
        rebuilds=[_rebuild(*pair, target) for pair in _pairs(arguments)],
    )
    here = _batch_rows(arguments)
    avals = [_argument_aval(x, target, {here: rows or here}) for x in _array_leaves(arguments)]
    level = TraceLevel(in_replica=False)
    lifted, outputs = _lift_step(step, moved, avals, level)
    program = Program(lifted, level, outputs, _name(step))
    changed = [_cell_aval(c, target) for c in program.changed]
    read_only = [_cell_aval(c, target) for c in program.read_only]
    return program, (changed, read_only, avals)


def _lift_step(
    step: Callable[..., Any], arguments: Arguments, avals: Sequence[Any], level: TraceLevel
) -> Any:
    """Trace the step with its variables as inputs and outputs."""
    outputs, fields = Outputs(), Fields(arguments.treedef, arguments.leaves)

    def body(*arrays: Any) -> list[Any]:
        args, kwargs = arguments.with_arrays(arrays)
        place = lambda: next(iter(level.topologies), None)  # noqa: E731
        return outputs.take(step(*args, **kwargs), place, fields)

    return lift(body, avals, level), outputs


def _pairs(arguments: Arguments) -> list[tuple[Any, Any]]:
    return list(zip(arguments.leaves, arguments.rebuilds, strict=True))


def _array_leaves(arguments: Arguments) -> list[tuple[Any, Any]]:
    """Return each leaf of the arguments that is an array, with the array that represents it."""
    leaves = [x for x, rebuild in _pairs(arguments) if rebuild is not None]
    return list(zip(leaves, arguments.arrays, strict=True))


def _is_per_replica(leaf: Any) -> bool:
    return isinstance(leaf, PerReplica)


def _batch_rows(arguments: Arguments) -> int:
    """Return the number of rows of one replica's batch; 0 if no argument is a batch."""
    return next((n for x, a in _array_leaves(arguments) if (n := _rows_here(x, a))), 0)


def _rows_here(leaf: Any, array: Any) -> int:
    """Return the number of rows of one replica's batch; 0 if the argument is no batch."""
    if _is_per_replica(leaf):
        return array.shape[1] if array.ndim > 1 else 0
    return _own_rows(array)


def _own_rows(array: Any) -> int:
    """Return a replica's number of rows of an array that is sharded over them; 0 for others."""
    where = getattr(array, "sharding", None)
    if not isinstance(where, NamedSharding) or where.spec[:1] != (REPLICA_AXIS,):
        return 0
    return int(array.shape[0] // where.mesh.shape[REPLICA_AXIS])


def _rebuild(leaf: Any, rebuild: Any, target: Topology) -> Any:
    if rebuild is not None and _is_per_replica(leaf):
        return lambda a: stacked(a, target)
    return rebuild


def _argument_aval(
    pair: tuple[Any, Any], target: Topology, rows: Mapping[int, int]
) -> jax.ShapeDtypeStruct:
    leaf, array = pair
    if not _is_per_replica(leaf):
        own = _own_rows(array)
        if not own:
            return _struct(array.shape, array.dtype, target.mirrored)
        # A batch of `fit`: one array of the rows of all replicas.
        shape = (rows.get(own, own) * target.num_replicas, *array.shape[1:])
        return _struct(shape, array.dtype, target.stacked)
    batch = (rows.get(array.shape[1], array.shape[1]), *array.shape[2:]) if array.ndim > 1 else ()
    return _struct((target.num_replicas, *batch), array.dtype, target.stacked)


def _cell_aval(cell: Cell, target: Topology) -> jax.ShapeDtypeStruct:
    if cell.topology is None:
        return _struct(cell.shape, cell.dtype, target.mirrored)
    return _struct(cell.stored_shape, cell.dtype, cell.sharding)


def _struct(shape: Any, dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    dtype = jax.dtypes.canonicalize_dtype(dtype) if isinstance(dtype, np.dtype) else dtype
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _aval(x: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _name(step: Callable[..., Any]) -> str:
    return getattr(step, "__name__", type(step).__name__).replace("<lambda>", "lambda_")
