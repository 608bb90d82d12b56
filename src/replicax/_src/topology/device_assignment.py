"""`DeviceAssignment`: the cores of a TPU slice that form each replica."""

import enum
import itertools
import math

import numpy as np
import numpy.typing as npt

from replicax._src.base.errors import PlacementError
from replicax._src.topology.devices import larger_simulation
from replicax._src.topology.tpu_topology import (
    MESH_RANK,
    CoordinateError,
    Coordinates,
    TPUTopology,
    to_whole_numbers,
)

_Shape = tuple[int, ...]


class DeviceOrderMode(enum.IntEnum):
    """The order of replicas, and of the cores of a replica, in the mesh.

    ``RING`` places consecutive ones next to each other, including the last and the first; ``MESH``
    follows the axes; ``AUTO`` makes rings where possible.

    Example:
        >>> from replicax._src.topology.device_assignment import DeviceOrderMode
        >>> [mode.name for mode in DeviceOrderMode]
        ['AUTO', 'RING', 'MESH']
    """

    AUTO = 0
    RING = 1
    MESH = 2


class DeviceAssignment:
    """The cores of a TPU slice that form each replica.

    `build` makes regular assignments; the constructor accepts any.

    Args:
        topology: The slice.
        core_assignment: The coordinates of every core, as an array
            ``[replicas, logical cores per replica, 4]``.

    Raises:
        PlacementError: If ``topology`` is not a topology, the array has another shape, or a core
            is used twice or missing in the slice.

    Example:
        >>> from replicax.tpu.experimental import DeviceAssignment, Topology
        >>> topology = Topology(None, [1, 1, 1, 2], [[[0, 0, 0, 0], [0, 0, 0, 1]]])
        >>> assignment = DeviceAssignment(topology, [[[0, 0, 0, 1]], [[0, 0, 0, 0]]])
        >>> assignment.num_replicas, assignment.tpu_ordinal(replica=0)
        (2, 1)
    """

    def __init__(self, topology: TPUTopology, core_assignment: npt.ArrayLike) -> None:
        _check_topology(topology)
        cores = to_whole_numbers(core_assignment, "core_assignment")
        if cores.ndim != 3 or cores.shape[2] != MESH_RANK or not cores.size:
            raise PlacementError(
                f"core_assignment has the shape {list(cores.shape)}; it must be"
                " [replicas, logical cores of each replica, 4], such as [[[0, 0, 0, 0]]]"
                " for one replica of one core."
            )
        self._topology = topology
        self._core_assignment = cores
        self._replicas_of = _index_replicas(topology, cores)

    @staticmethod
    def build(
        topology: TPUTopology,
        computation_shape: Coordinates | None = None,
        computation_stride: Coordinates | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> "DeviceAssignment":
        """Divide a slice into replicas of the same shape.

        Args:
            topology: The slice.
            computation_shape: The cores of one replica in x, y, z and per chip; three numbers mean
                x, y and per chip. One core by default.
            computation_stride: The distance between the cores of one replica on each axis; the
                cores in between belong to other replicas. 1 by default.
            num_replicas: The number of replicas.
            device_order_mode: The order of the replicas in the mesh.

        Returns:
            The assignment. On a slice with missing cores, the replicas take the cores in the order
            of their tasks.

        Raises:
            PlacementError: If the replicas do not fit, or an argument is invalid.

        Example:
            >>> import itertools
            >>> from replicax.tpu.experimental import DeviceAssignment, Topology
            >>> cores = list(itertools.product(range(2), range(2), range(1), range(2)))
            >>> topology = Topology(mesh_shape=[2, 2, 1, 2], device_coordinates=[cores])
            >>> assignment = DeviceAssignment.build(topology, [1, 1, 2], num_replicas=4)
            >>> assignment.num_replicas, assignment.num_cores_per_replica
            (4, 2)
        """
        _check_topology(topology)
        mesh: _Shape = tuple(topology.mesh_shape.tolist())
        shape = _to_shape(computation_shape, "computation_shape")
        stride = _to_shape(computation_stride, "computation_stride")
        mode = _to_mode(device_order_mode)
        slots = _replica_slots(mesh, shape, stride)
        _check_num_replicas(
            num_replicas, math.prod(slots), f"{list(shape)} in the mesh {list(mesh)}"
        )
        if topology.missing_devices.size:
            cores = _task_order(topology, shape, stride, num_replicas)
            return DeviceAssignment(topology, cores)
        fills = num_replicas == math.prod(slots) and math.prod(stride) == 1
        if fills and shape[-1] == mesh[-1] and mode is not DeviceOrderMode.MESH:
            return DeviceAssignment(topology, _ring_order(slots, shape))
        if mode is DeviceOrderMode.RING:
            raise PlacementError(
                f"DeviceOrderMode.RING needs replicas that fill the mesh {list(mesh)} without"
                f" stride and take whole chips; {num_replicas} of computation_shape {list(shape)}"
                f" with computation_stride {list(stride)} do not."
                " Use DeviceOrderMode.AUTO, which makes rings where they are possible."
            )
        return DeviceAssignment(topology, _mesh_order(shape, stride, slots, num_replicas))

    @property
    def topology(self) -> TPUTopology:
        """The slice."""
        return self._topology

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return int(self._core_assignment.shape[0])

    @property
    def num_cores_per_replica(self) -> int:
        """The number of logical cores per replica."""
        return int(self._core_assignment.shape[1])

    @property
    def core_assignment(self) -> npt.NDArray[np.int32]:
        """The coordinates of every core: ``[replicas, logical cores per replica, 4]``."""
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Return the coordinates of a logical core of a replica.

        Returns:
            The x, y, z and core index.

        Raises:
            CoordinateError: If there is no such replica or logical core.

        Example:
            >>> from replicax.tpu.experimental import DeviceAssignment, Topology
            >>> topology = Topology(None, [1, 1, 1, 1], [[[0, 0, 0, 0]]])
            >>> DeviceAssignment.build(topology).coordinates(0, 0)
            (0, 0, 0, 0)
        """
        replicas, cores = self.num_replicas, self.num_cores_per_replica
        if not (0 <= replica < replicas and 0 <= logical_core < cores):
            raise CoordinateError(
                f"There is no logical core {logical_core} of replica {replica}; this assignment has"
                f" {replicas} replicas of {cores} logical cores, both counted from 0."
            )
        return tuple(self._core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Return the replicas that have the given logical core on a task.

        Returns:
            The replicas, in order.

        Raises:
            PlacementError: If there are none.

        Example:
            >>> from replicax.tpu.experimental import DeviceAssignment, Topology
            >>> topology = Topology(None, [1, 1, 1, 2], [[[0, 0, 0, 0], [0, 0, 0, 1]]])
            >>> DeviceAssignment.build(topology, num_replicas=2).lookup_replicas(0, 0)
            [0, 1]
        """
        replicas = self._replicas_of.get((task_id, logical_core))
        if replicas is None:
            tasks = sorted({task for task, _ in self._replicas_of})
            raise PlacementError(
                f"No replica has its logical core {logical_core} on task {task_id}; the tasks in"
                f" use are {tasks} and the logical cores 0 to {self.num_cores_per_replica - 1}."
            )
        return list(replicas)

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Return the index within its task of a logical core's TPU.

        Example:
            >>> from replicax.tpu.experimental import DeviceAssignment, Topology
            >>> topology = Topology(None, [1, 1, 1, 1], [[[0, 0, 0, 0]]])
            >>> DeviceAssignment.build(topology).tpu_ordinal()
            0
        """
        place = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(place)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Return the name of a logical core's TPU.

        Example:
            >>> from replicax.tpu.experimental import DeviceAssignment, Topology
            >>> topology = Topology(None, [1, 1, 1, 1], [[[0, 0, 0, 0]]])
            >>> DeviceAssignment.build(topology).tpu_device(job="worker")
            '/job:worker/task:0/device:TPU:0'
        """
        place = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_name_at_coordinates(place, job=job)

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Return the name of the CPU of a logical core's task.

        Example:
            >>> from replicax.tpu.experimental import DeviceAssignment, Topology
            >>> topology = Topology(None, [1, 1, 1, 1], [[[0, 0, 0, 0]]])
            >>> DeviceAssignment.build(topology).host_device()
            '/task:0/device:CPU:0'
        """
        place = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(place, job=job)


def _check_topology(topology: object) -> None:
    if not isinstance(topology, TPUTopology):
        raise PlacementError(
            f"topology is a {type(topology).__name__}; it must be the Topology that"
            " rx.tpu.experimental.initialize_tpu_system(resolver) returns."
        )


def _index_replicas(
    topology: TPUTopology, cores: npt.NDArray[np.int32]
) -> dict[tuple[int, int], list[int]]:
    """Map (task, logical core) to replicas; raise for cores that are missing or used twice."""
    users: dict[_Shape, tuple[int, int]] = {}
    index: dict[tuple[int, int], list[int]] = {}
    for replica, logical_cores in enumerate(cores.tolist()):
        for logical_core, core in enumerate(logical_cores):
            task = topology.task_ordinal_at_coordinates(core)
            if task < 0:
                raise PlacementError(
                    f"Logical core {logical_core} of replica {replica} is assigned to {core}, where"
                    " this slice has no core; missing_devices lists such places."
                )
            other = users.setdefault(tuple(core), (replica, logical_core))
            if other != (replica, logical_core):
                raise PlacementError(
                    f"The core at {core} is used twice: by logical core {other[1]} of replica"
                    f" {other[0]} and by logical core {logical_core} of replica {replica}."
                )
            index.setdefault((task, logical_core), []).append(replica)
    return index


def _to_shape(value: Coordinates | None, name: str) -> _Shape:
    if value is None:
        return (1,) * MESH_RANK
    numbers = to_whole_numbers(value, name)
    if numbers.ndim != 1 or numbers.size not in (MESH_RANK - 1, MESH_RANK) or (numbers < 1).any():
        raise PlacementError(
            f"{name} is {numbers.tolist()}; it must be four positive numbers (x, y, z, cores on"
            " each chip), or three (x, y, cores on each chip), such as [1, 1, 1, 2]."
        )
    *chips, on_chip = numbers.tolist()
    return (*chips, *[1] * (MESH_RANK - 1 - len(chips)), on_chip)


def _to_mode(mode: object) -> DeviceOrderMode:
    try:
        return DeviceOrderMode(mode)  # type: ignore[arg-type]
    except ValueError:
        raise PlacementError(
            f"device_order_mode is {mode!r}; it must be DeviceOrderMode.AUTO, RING or MESH."
        ) from None


def _replica_slots(mesh: _Shape, shape: _Shape, stride: _Shape) -> _Shape:
    """Return the number of replicas that fit along each axis."""
    footprint = tuple(n * step for n, step in zip(shape, stride, strict=True))
    if any(need > size for need, size in zip(footprint, mesh, strict=True)):
        raise PlacementError(
            f"A replica of computation_shape {list(shape)} with computation_stride {list(stride)}"
            f" covers {list(footprint)}, which does not fit in the mesh {list(mesh)};"
            f" each number must be at most the mesh's.{larger_simulation()}"
        )
    return tuple(
        size // need * step for size, need, step in zip(mesh, footprint, stride, strict=True)
    )


def _check_num_replicas(num_replicas: object, room: int, what: str) -> None:
    if isinstance(num_replicas, bool) or not isinstance(num_replicas, int | np.integer):
        raise PlacementError(f"num_replicas is {num_replicas!r}; it must be a whole number.")
    if not 1 <= num_replicas <= room:
        raise PlacementError(
            f"num_replicas is {num_replicas}, but there is room for 1 to {room} replicas of"
            f" computation_shape {what}; ask for fewer, or make each smaller.{larger_simulation()}"
        )


def _ring_order(slots: _Shape, shape: _Shape) -> list[list[_Shape]]:
    """Order the replicas in a ring over the mesh, and the chips of each in a ring over it."""
    chips = [(*chip, core) for chip in _ring(shape[:-1]) for core in range(shape[-1])]
    return [
        [
            tuple(b * n + c for b, n, c in zip((*block, 0), shape, chip, strict=True))
            for chip in chips
        ]
        for block in _ring(slots[:-1])
    ]


def _ring(grid: _Shape) -> list[_Shape]:
    """Return a cycle through every cell of an x, y, z grid in which each step is to a neighbour.

    This requires axes of even length, or of length 1. Other grids are returned in order, x fastest.
    """
    x, y, z = grid
    if any(size > 1 and size % 2 for size in grid):
        return [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    plane = _loop(x, y)
    return [(*plane[step], k) for step, k in _loop(len(plane), z)]


def _loop(length: int, rows: int) -> list[tuple[int, int]]:
    """Return a cycle through a rectangle: row 0, the other rows in a zigzag, back by column 0."""
    if length == 1 or rows == 1:
        return [(i, j) for j in range(rows) for i in range(length)]
    there = [(i, 0) for i in range(length)]
    for j in range(1, rows):
        across = range(1, length) if j % 2 == 0 else range(length - 1, 0, -1)
        there.extend((i, j) for i in across)
    return there + [(0, j) for j in range(rows - 1, 0, -1)]


def _mesh_order(
    shape: _Shape, stride: _Shape, slots: _Shape, num_replicas: int
) -> list[list[_Shape]]:
    """Order the replicas core fastest, then x, y, z, within a nearly cubic part of the mesh."""
    x, y, z, on_chip = _compact_grid(slots, num_replicas)
    positions = itertools.product(range(z), range(y), range(x), range(on_chip))
    assignment: list[list[_Shape]] = []
    for k, j, i, core in itertools.islice(positions, num_replicas):
        # On each axis `step` replicas interleave in one block, each with its own first core.
        axes = [
            range(at // step * n * step + at % step, (at // step + 1) * n * step, step)
            for at, n, step in zip((i, j, k, core), shape, stride, strict=True)
        ]
        assignment.append(list(itertools.product(*axes)))
    return assignment


def _compact_grid(slots: _Shape, num_replicas: int) -> _Shape:
    """Return the smallest, most cubic grid within ``slots`` for ``num_replicas`` replicas."""
    grid = [1] * len(slots)
    left = num_replicas
    # Short axes first, as they have the fewest options; among equals the core on a chip, then x.
    order = sorted(range(len(slots)), key=lambda axis: (slots[axis], (axis + 1) % len(slots)))
    for rank, axis in zip(range(len(slots), 0, -1), order, strict=True):
        side = next(n for n in itertools.count(1) if n**rank >= left)
        grid[axis] = min(side, slots[axis])
        left = -(-left // grid[axis])
    return tuple(grid)


def _task_order(
    topology: TPUTopology, shape: _Shape, stride: _Shape, num_replicas: int
) -> npt.NDArray[np.int32]:
    """Order the cores by task, regardless of their coordinates, for a slice with missing cores."""
    cores = topology.device_coordinates.reshape(-1, MESH_RANK)
    per_replica = math.prod(shape)
    if math.prod(stride) != 1:
        raise PlacementError(
            f"computation_stride {list(stride)} needs a slice without missing cores;"
            f" {len(topology.missing_devices)} are missing here. Leave the stride out."
        )
    if num_replicas * per_replica > len(cores):
        raise PlacementError(
            f"{num_replicas} replicas of {per_replica} cores need {num_replicas * per_replica}"
            f" cores; this slice has {len(cores)} and {len(topology.missing_devices)} are missing."
        )
    return cores[: num_replicas * per_replica].reshape(num_replicas, per_replica, MESH_RANK)
