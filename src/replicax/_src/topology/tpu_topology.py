"""Topology of a TPU slice: the mesh coordinates of its cores, and the task of each core."""

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replicax._src.base.errors import PlacementError

MESH_RANK = 4  # x, y, z and the core on a chip
_FORMAT = "replicax-tpu-topology-1"
_EXAMPLE = "mesh_shape=[2, 2, 1, 2]"

Coordinates = Sequence[int] | npt.NDArray[np.int32]


class CoordinateError(IndexError, PlacementError):
    """Coordinates, a replica or a logical core that does not exist."""


class TPUTopology:
    """The cores of a TPU slice: their mesh coordinates, and the task of each.

    Args:
        serialized: The bytes from another topology's `serialized`; the other arguments are then
            ignored.
        mesh_shape: The size of the mesh, as four numbers: x, y, z and cores per chip.
        device_coordinates: The coordinates of every core, as an array ``[tasks, cores per task,
            4]``. Mesh coordinates without a core count as missing.

    Raises:
        PlacementError: If the mesh is not four positive numbers, or a core is outside of it or at
            the coordinates of another.

    Example:
        >>> from replicax.tpu.experimental import Topology
        >>> topology = Topology(
        ...     mesh_shape=[2, 1, 1, 2],
        ...     device_coordinates=[
        ...         [[0, 0, 0, 0], [0, 0, 0, 1]],
        ...         [[1, 0, 0, 0], [1, 0, 0, 1]],
        ...     ],
        ... )
        >>> topology.num_tasks, topology.num_tpus_per_task
        (2, 2)
        >>> topology.tpu_device_name_at_coordinates([1, 0, 0, 1], job="worker")
        '/job:worker/task:1/device:TPU:1'
    """

    def __init__(
        self,
        serialized: bytes | str | None = None,
        mesh_shape: Coordinates | None = None,
        device_coordinates: npt.ArrayLike | None = None,
    ) -> None:
        if serialized:
            mesh_shape, device_coordinates = _parse(serialized)
        self._mesh_shape = _to_mesh_shape(mesh_shape)
        self._device_coordinates = _to_device_coordinates(device_coordinates, self._mesh_shape)
        self._tasks, self._devices = _invert(self._mesh_shape, self._device_coordinates)

    def __repr__(self) -> str:
        mesh = "x".join(map(str, self._mesh_shape))
        return f"Topology({mesh}, {self.num_tasks} tasks of {self.num_tpus_per_task} TPUs)"

    @property
    def mesh_shape(self) -> npt.NDArray[np.int32]:
        """The size of the mesh: x, y, z, cores per chip.

        Example:
            >>> from replicax.tpu.experimental import Topology
            >>> Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]]]).mesh_shape
            array([1, 1, 1, 1], dtype=int32)
        """
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of mesh axes, 4."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> npt.NDArray[np.int32]:
        """The coordinates of every core, as an array ``[tasks, cores per task, 4]``."""
        return self._device_coordinates

    @property
    def num_tasks(self) -> int:
        """The number of tasks, that is, of hosts with TPUs."""
        return int(self._device_coordinates.shape[0])

    @property
    def num_tpus_per_task(self) -> int:
        """The number of cores per task."""
        return int(self._device_coordinates.shape[1])

    @property
    def missing_devices(self) -> npt.NDArray[np.int64]:
        """The mesh coordinates without a core, one row for each.

        Example:
            >>> from replicax.tpu.experimental import Topology
            >>> half = Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]]])
            >>> half.missing_devices.tolist()
            [[1, 0, 0, 0]]
        """
        return np.argwhere(self._tasks < 0)

    def task_ordinal_at_coordinates(self, device_coordinates: Coordinates) -> int:
        """Return the task of the core at the given coordinates.

        Args:
            device_coordinates: The x, y, z and core number.

        Returns:
            The task, or -1 if the core is missing.

        Raises:
            CoordinateError: If the coordinates are outside the mesh.

        Example:
            >>> from replicax.tpu.experimental import Topology
            >>> topology = Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]]])
            >>> topology.task_ordinal_at_coordinates([0, 0, 0, 0])
            0
        """
        return int(self._tasks[self._inside(device_coordinates)])

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Coordinates) -> int:
        """Return the index within its task of the core at the given coordinates.

        Args:
            device_coordinates: The x, y, z and core number.

        Returns:
            The index, or -1 if the core is missing.

        Raises:
            CoordinateError: If the coordinates are outside the mesh.

        Example:
            >>> from replicax.tpu.experimental import Topology
            >>> topology = Topology(
            ...     mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]]
            ... )
            >>> topology.tpu_device_ordinal_at_coordinates([0, 0, 0, 1])
            1
        """
        return int(self._devices[self._inside(device_coordinates)])

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Coordinates, job: str | None = None
    ) -> str:
        """Return the name of the CPU device of the task with the core at the given coordinates.

        Args:
            device_coordinates: The x, y, z and core number.
            job: A job name to prepend.

        Returns:
            A name such as ``/job:worker/task:0/device:CPU:0``.

        Raises:
            CoordinateError: If there is no core at the coordinates.

        Example:
            >>> from replicax.tpu.experimental import Topology
            >>> topology = Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]]])
            >>> topology.cpu_device_name_at_coordinates([0, 0, 0, 0], job="worker")
            '/job:worker/task:0/device:CPU:0'
        """
        return f"{self._task_name(device_coordinates, job)}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Coordinates, job: str | None = None
    ) -> str:
        """Return the name of the core at the given coordinates.

        Args:
            device_coordinates: The x, y, z and core number.
            job: A job name to prepend.

        Returns:
            A name such as ``/job:worker/task:0/device:TPU:1``.

        Raises:
            CoordinateError: If there is no core at the coordinates.

        Example:
            >>> from replicax.tpu.experimental import Topology
            >>> topology = Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]]])
            >>> topology.tpu_device_name_at_coordinates([0, 0, 0, 0])
            '/task:0/device:TPU:0'
        """
        ordinal = self.tpu_device_ordinal_at_coordinates(device_coordinates)
        return f"{self._task_name(device_coordinates, job)}/device:TPU:{ordinal}"

    def serialized(self) -> bytes:
        """Return the topology as bytes, for the constructor's ``serialized``.

        Returns:
            JSON in replicax's own format (TensorFlow uses a protocol buffer).

        Example:
            >>> from replicax.tpu.experimental import Topology
            >>> topology = Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0]]])
            >>> Topology(serialized=topology.serialized()).num_tasks
            1
        """
        described = {
            "format": _FORMAT,
            "mesh_shape": self._mesh_shape.tolist(),
            "device_coordinates": self._device_coordinates.tolist(),
        }
        return json.dumps(described, separators=(",", ":")).encode()

    def _inside(self, coordinates: Coordinates) -> tuple[int, ...]:
        place = np.asarray(coordinates)
        if place.shape != (MESH_RANK,) or place.dtype.kind not in "iu":
            raise CoordinateError(
                f"{_short(coordinates)} are not coordinates; a core has four whole numbers:"
                " x, y, z and the core on its chip."
            )
        if (place < 0).any() or (place >= self._mesh_shape).any():
            raise CoordinateError(
                f"The coordinates {place.tolist()} are outside of the mesh"
                f" {self._mesh_shape.tolist()}; they start at 0 and end below the mesh's size."
            )
        return tuple(place.tolist())

    def _task_name(self, coordinates: Coordinates, job: str | None) -> str:
        task = self.task_ordinal_at_coordinates(coordinates)
        if task < 0:
            raise CoordinateError(
                f"The core at {np.asarray(coordinates).tolist()} is missing in this slice;"
                " missing_devices lists the places without a core."
            )
        return f"/task:{task}" if job is None else f"/job:{job}/task:{task}"


def to_whole_numbers(value: object, name: str) -> npt.NDArray[np.int32]:
    """Convert a value to an array of whole numbers, of any shape.

    Raises:
        PlacementError: If it is anything else.

    Example:
        >>> from replicax._src.topology.tpu_topology import to_whole_numbers
        >>> to_whole_numbers((2, 2, 1, 2), "mesh_shape")
        array([2, 2, 1, 2], dtype=int32)
    """
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "iu" and array.size:
        raise PlacementError(f"{name} is {_short(value)}; it must be made of whole numbers.")
    limits = np.iinfo(np.int32)
    if ((array < limits.min) | (array > limits.max)).any():
        raise PlacementError(f"{name} is {_short(value)}, which has numbers beyond 32 bits.")
    # Copy, so that later changes of the caller's array have no effect.
    frozen: npt.NDArray[np.int32] = np.array(array, dtype=np.int32)
    frozen.flags.writeable = False
    return frozen


def _short(value: object, limit: int = 80) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else f"{text[:limit]}..."


def _to_mesh_shape(mesh_shape: object) -> npt.NDArray[np.int32]:
    if mesh_shape is None:
        raise PlacementError(
            f"Topology needs a mesh: pass mesh_shape and device_coordinates, such as {_EXAMPLE},"
            " or serialized."
        )
    shape = to_whole_numbers(mesh_shape, "mesh_shape")
    if shape.shape != (MESH_RANK,) or (shape < 1).any():
        raise PlacementError(
            f"mesh_shape is {shape.tolist()}; it must be four positive numbers, the size in x, y"
            f" and z and the cores on each chip, such as {_EXAMPLE}."
        )
    return shape


def _to_device_coordinates(
    device_coordinates: object, mesh_shape: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    if device_coordinates is None:
        raise PlacementError(
            "Topology needs device_coordinates in addition to mesh_shape: for each task, the x, y,"
            " z and core number of each of its cores, such as [[[0, 0, 0, 0], [0, 0, 0, 1]]]."
        )
    coordinates = to_whole_numbers(device_coordinates, "device_coordinates")
    if coordinates.ndim != 3 or coordinates.shape[2] != MESH_RANK or not coordinates.size:
        raise PlacementError(
            f"device_coordinates has the shape {list(coordinates.shape)}; it must be"
            " [tasks, cores of each task, 4], such as [[[0, 0, 0, 0], [0, 0, 0, 1]]]"
            " for one task with two cores."
        )
    outside = (coordinates < 0) | (coordinates >= mesh_shape)
    if outside.any():
        task, device, _ = np.argwhere(outside)[0].tolist()
        raise CoordinateError(
            f"Core {device} of task {task} lies at {coordinates[task, device].tolist()}, outside of"
            f" the mesh {mesh_shape.tolist()}."
        )
    return coordinates


def _invert(
    mesh_shape: npt.NDArray[np.int32], coordinates: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the task and the index within it for all mesh coordinates, -1 where missing."""
    tasks = np.full(mesh_shape.tolist(), -1, dtype=np.int32)
    devices = np.full(mesh_shape.tolist(), -1, dtype=np.int32)
    for task, cores in enumerate(coordinates.tolist()):
        for device, core in enumerate(cores):
            place = tuple(core)
            if tasks[place] >= 0:
                raise PlacementError(
                    f"Core {device} of task {task} and core {devices[place]} of task"
                    f" {tasks[place]} both lie at {core}; every core has a place of its own."
                )
            tasks[place], devices[place] = task, device
    return tasks, devices


def _parse(serialized: bytes | str) -> tuple[Coordinates, npt.ArrayLike]:
    try:
        described = json.loads(serialized)
        if described["format"] != _FORMAT:
            raise KeyError("format")
        return described["mesh_shape"], described["device_coordinates"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise PlacementError(
            f"serialized is {_short(serialized, 40)}, which is not what Topology.serialized() of"
            " replicax writes. A topology that TensorFlow wrote cannot be read: pass mesh_shape"
            " and device_coordinates."
        ) from error
