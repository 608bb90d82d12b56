import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.base.errors import PlacementError
from replicax._src.topology.device_assignment import DeviceAssignment, DeviceOrderMode
from replicax._src.topology.tpu_topology import CoordinateError
from replicax.tpu.experimental import Topology

AUTO, RING, MESH = DeviceOrderMode


def slice_of(shape, tasks=1, without=()):
    cores = [c for c in itertools.product(*map(range, shape)) if c not in without]
    each = len(cores) // tasks
    parts = [cores[task * each : (task + 1) * each] for task in range(tasks)]
    return Topology(mesh_shape=shape, device_coordinates=parts)


def written(assignment):
    """Replicas separated by a bar, cores by a space: ``0000 0001|1000 1001``."""
    replicas = assignment.core_assignment.tolist()
    return "|".join(" ".join("".join(map(str, core)) for core in cores) for cores in replicas)


# What TensorFlow 2.21 answered for (mesh, computation_shape, computation_stride, num_replicas,
# device_order_mode); one sample of each kind out of 3,957 that were compared.
OBSERVED = [
    ((4, 1, 2, 1), [4, 1, 1, 1], None, 2, 2, "0000 1000 2000 3000|0010 1010 2010 3010"),
    ((3, 2, 1, 1), [1, 1, 1, 1], None, 6, 0, "0000|1000|2000|0100|1100|2100"),
    ((1, 4, 1, 2), [1, 4, 1, 1], None, 2, 0, "0000 0100 0200 0300|0001 0101 0201 0301"),
    (
        (3, 1, 4, 1),
        [3, 1, 2, 1],
        None,
        2,
        0,
        "0000 1000 2000 0010 1010 2010|0020 1020 2020 0030 1030 2030",
    ),
    ((1, 4, 1, 1), [1, 1, 1, 1], None, 4, 1, "0000|0100|0200|0300"),
    (
        (4, 2, 4, 1),
        [3, 1, 1, 1],
        None,
        4,
        0,
        "0000 1000 2000|0100 1100 2100|0010 1010 2010|0110 1110 2110",
    ),
    ((1, 4, 1, 2), [1, 2, 1, 1], None, 4, 2, "0000 0100|0001 0101|0200 0300|0201 0301"),
    ((1, 2, 2, 1), [1, 2, 1, 1], None, 2, 1, "0000 0100|0010 0110"),
    (
        (2, 3, 1, 2),
        [2, 1, 1, 2],
        None,
        3,
        2,
        "0000 0001 1000 1001|0100 0101 1100 1101|0200 0201 1200 1201",
    ),
    ((2, 4, 1, 2), [2, 1, 1, 2], None, 2, 0, "0000 0001 1000 1001|0100 0101 1100 1101"),
    ((2, 1, 3, 2), [1, 1, 2, 1], None, 4, 2, "0000 0010|0001 0011|1000 1010|1001 1011"),
    (
        (2, 3, 1, 2),
        [1, 3, 1, 2],
        None,
        2,
        1,
        "0000 0001 0100 0101 0200 0201|1000 1001 1100 1101 1200 1201",
    ),
    ((1, 2, 1, 2), [1, 1, 1, 2], None, 2, 1, "0000 0001|0100 0101"),
    (
        (6, 4, 1, 1),
        [2, 1, 1, 1],
        [2, 3, 1, 1],
        6,
        2,
        "0000 2000|1000 3000|0100 2100|1100 3100|0200 2200|1200 3200",
    ),
    (
        (3, 2, 1, 2),
        [1, 2, 1, 2],
        None,
        3,
        0,
        "0000 0001 0100 0101|1000 1001 1100 1101|2000 2001 2100 2101",
    ),
    (
        (2, 4, 4, 2),
        [1, 1, 3, 2],
        None,
        2,
        0,
        "0000 0001 0010 0011 0020 0021|1000 1001 1010 1011 1020 1021",
    ),
    ((1, 3, 3, 1), [1, 3, 1, 1], None, 3, 1, "0000 0100 0200|0010 0110 0210|0020 0120 0220"),
    ((4, 2, 2, 2), [1, 1, 1, 2], None, 3, 2, "0000 0001|0100 0101|0010 0011"),
    (
        (1, 3, 3, 2),
        [1, 2, 1, 2],
        None,
        3,
        0,
        "0000 0001 0100 0101|0010 0011 0110 0111|0020 0021 0120 0121",
    ),
    ((4, 1, 2, 1), [1, 1, 2, 1], [3, 1, 1, 1], 3, 2, "0000 0010|1000 1010|2000 2010"),
    ((3, 1, 2, 2), [1, 1, 1, 1], [1, 1, 2, 1], 4, 0, "0000|0001|0010|0011"),
    ((5, 1, 1, 1), [2, 1, 1, 1], None, 2, 2, "0000 1000|2000 3000"),
    ((2, 3, 1, 1), [1, 3, 1, 1], None, 2, 1, "0000 0100 0200|1000 1100 1200"),
    (
        (2, 2, 4, 1),
        [2, 2, 1, 1],
        [1, 1, 3, 1],
        3,
        0,
        "0000 0100 1000 1100|0010 0110 1010 1110|0020 0120 1020 1120",
    ),
    ((1, 2, 1, 2), [1, 1, 1, 2], None, 2, 2, "0000 0001|0100 0101"),
    ((4, 2, 1, 1), [2, 2, 1, 1], [2, 1, 1, 1], 2, 0, "0000 0100 2000 2100|1000 1100 3000 3100"),
    ((1, 2, 2, 2), [1, 1, 1, 2], None, 4, 1, "0000 0001|0100 0101|0110 0111|0010 0011"),
    ((1, 3, 2, 2), [1, 2, 1, 2], None, 2, 1, "0000 0001 0100 0101|0010 0011 0110 0111"),
    (
        (1, 4, 2, 2),
        [1, 3, 1, 2],
        [1, 1, 2, 1],
        2,
        0,
        "0000 0001 0100 0101 0200 0201|0010 0011 0110 0111 0210 0211",
    ),
    ((2, 3, 1, 2), [1, 1, 1, 2], [2, 1, 1, 1], 4, 2, "0000 0001|1000 1001|0100 0101|1100 1101"),
    ((2, 2, 1, 2), [2, 1, 1, 2], [1, 2, 1, 1], 2, 0, "0000 0001 1000 1001|0100 0101 1100 1101"),
]


@pytest.mark.parametrize(("mesh", "shape", "stride", "num_replicas", "mode", "expected"), OBSERVED)
def test_build_lays_replicas_as_tensorflow_does(mesh, shape, stride, num_replicas, mode, expected):
    assignment = DeviceAssignment.build(
        slice_of(mesh), shape, stride, num_replicas, DeviceOrderMode(mode)
    )

    assert written(assignment) == expected


def test_full_replication_goes_around_in_a_ring():
    assignment = DeviceAssignment.build(slice_of((2, 2, 1, 1)), num_replicas=4)

    assert written(assignment) == "0000|1000|1100|0100"


even = st.sampled_from([1, 2, 4, 6])


@given(grid=st.tuples(even, even, even).filter(lambda grid: math.prod(grid) <= 64))
def test_consecutive_replicas_of_a_ring_are_neighbours(grid):
    assignment = DeviceAssignment.build(
        slice_of((*grid, 1)), num_replicas=math.prod(grid), device_order_mode=RING
    )

    ring = assignment.core_assignment[:, 0, :]
    steps = np.abs(np.diff(ring, axis=0)).sum(axis=1)
    assert (steps == 1).all()
    closes = sum(size > 1 for size in grid) > 1
    if closes:
        assert np.abs(ring[0] - ring[-1]).sum() == 1


size = st.integers(1, 4)


@given(mesh=st.tuples(size, size, size, st.integers(1, 2)), data=st.data())
def test_every_build_gives_distinct_cores_in_boxes_of_the_asked_shape(mesh, data):
    shape = [data.draw(st.integers(1, n)) for n in mesh]
    stride = [data.draw(st.integers(1, n // c)) for n, c in zip(mesh, shape, strict=True)]
    room = math.prod(n // (c * s) * s for n, c, s in zip(mesh, shape, stride, strict=True))
    num_replicas = data.draw(st.integers(1, room))

    assignment = DeviceAssignment.build(slice_of(mesh), shape, stride, num_replicas)

    cores = assignment.core_assignment
    assert cores.shape == (num_replicas, math.prod(shape), 4)
    assert len(np.unique(cores.reshape(-1, 4), axis=0)) == num_replicas * math.prod(shape)
    for replica in cores:
        for axis in range(4):
            expected = replica[:, axis].min() + np.arange(shape[axis]) * stride[axis]
            assert np.unique(replica[:, axis]).tolist() == expected.tolist()


def test_three_numbers_are_x_y_and_the_cores_of_a_chip():
    topology = slice_of((2, 2, 1, 2))

    three = DeviceAssignment.build(topology, [1, 1, 2], num_replicas=4)
    four = DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=4)
    whole = DeviceAssignment.build(topology, [2, 2, 2])

    assert written(three) == written(four)
    assert (three.num_replicas, three.num_cores_per_replica) == (4, 2)
    assert (whole.num_replicas, whole.num_cores_per_replica) == (1, 8)


def test_three_numbers_of_stride_leave_z_alone():
    topology = slice_of((2, 2, 2, 1))

    three = DeviceAssignment.build(topology, [1, 1, 1], [2, 1, 1], num_replicas=4)
    four = DeviceAssignment.build(topology, [1, 1, 1, 1], [2, 1, 1, 1], num_replicas=4)

    assert written(three) == written(four)


def test_one_replica_of_one_core_is_the_default():
    assert written(DeviceAssignment.build(slice_of((2, 2, 1, 2)))) == "0000"


def test_few_replicas_stay_on_one_chip_and_then_go_along_x():
    topology = slice_of((2, 2, 2, 2))

    placed = [written(DeviceAssignment.build(topology, num_replicas=n)) for n in (2, 3)]
    strided = DeviceAssignment.build(topology, None, [2, 2, 1, 2], num_replicas=2)

    assert placed == ["0000|0001", "0000|0001|1000"]
    assert written(strided) == "0000|0001"


def test_look_ups_agree_with_tensorflow():
    topology = slice_of((2, 2, 1, 2), tasks=2)

    assignment = DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=4)

    assert assignment.coordinates(2, 1) == (1, 1, 0, 1)
    pairs = itertools.product(range(4), range(2))
    assert [assignment.tpu_ordinal(r, c) for r, c in pairs] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert assignment.tpu_device(3, 1, job="worker") == "/job:worker/task:0/device:TPU:3"
    assert assignment.host_device(3, 1, job="worker") == "/job:worker/task:0/device:CPU:0"
    assert assignment.tpu_device() == "/task:0/device:TPU:0"
    pairs = itertools.product(range(2), range(2))
    assert [assignment.lookup_replicas(t, c) for t, c in pairs] == [[0, 3], [0, 3], [1, 2], [1, 2]]
    assert assignment.topology is topology


def test_given_cores_are_kept_as_they_are():
    grid = [[[0, 0, 0, 0], [0, 0, 0, 1]], [[1, 1, 0, 0], [1, 1, 0, 1]]]

    assignment = DeviceAssignment(slice_of((2, 2, 1, 2)), grid)

    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (2, 2)
    assert assignment.core_assignment.tolist() == grid
    assert [assignment.tpu_ordinal(r, c) for r in range(2) for c in range(2)] == [0, 1, 6, 7]


def test_a_list_of_replicas_that_was_looked_up_may_be_changed():
    assignment = DeviceAssignment.build(slice_of((1, 1, 1, 2)), num_replicas=2)

    assignment.lookup_replicas(0, 0).clear()

    assert assignment.lookup_replicas(0, 0) == [0, 1]


def test_a_slice_with_holes_is_filled_in_the_order_of_its_tasks():
    topology = slice_of((2, 2, 1, 2), tasks=2, without=((0, 0, 0, 0), (1, 1, 0, 1)))

    single = DeviceAssignment.build(topology, num_replicas=6)
    pairs = DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=3)

    assert written(single) == "0001|0100|0101|1000|1001|1100"
    assert written(pairs) == "0001 0100|0101 1000|1001 1100"


def test_a_slice_with_holes_holds_no_more_replicas_than_cores():
    topology = slice_of((2, 2, 1, 2), tasks=2, without=((0, 0, 0, 0), (1, 1, 0, 1)))

    with pytest.raises(PlacementError, match="need 7 cores; this slice has 6 and 2 are missing"):
        DeviceAssignment.build(topology, num_replicas=7)
    with pytest.raises(PlacementError, match="computation_stride"):
        DeviceAssignment.build(topology, computation_stride=[2, 1, 1, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"computation_shape": [4, 1, 1, 1]}, r"covers \[4, 1, 1, 1\].*does not fit"),
        ({"computation_shape": [1, 1, 1, 2], "computation_stride": [1, 1, 1, 2]}, "does not fit"),
        ({"computation_shape": [1, 1, 1, 2], "num_replicas": 5}, "room for 1 to 4 replicas"),
        ({"num_replicas": 9}, "room for 1 to 8 replicas"),
        ({"num_replicas": 0}, "num_replicas is 0"),
        ({"num_replicas": -1}, "num_replicas is -1"),
        ({"num_replicas": 1.0}, "num_replicas is 1.0"),
        ({"num_replicas": True}, "num_replicas is True"),
        ({"num_replicas": "2"}, "num_replicas is '2'"),
        ({"num_replicas": None}, "num_replicas is None"),
        ({"computation_shape": [1, 2]}, "four positive numbers"),
        ({"computation_shape": []}, "four positive numbers"),
        ({"computation_shape": [1, 1, 1, 1, 1]}, "four positive numbers"),
        ({"computation_shape": [[1, 1, 1, 1]]}, "four positive numbers"),
        ({"computation_shape": [1, 1, 1, 0]}, "four positive numbers"),
        ({"computation_shape": [1, 1, -2]}, "four positive numbers"),
        ({"computation_shape": [1.5, 1, 1, 1]}, "whole numbers"),
        ({"computation_shape": "1112"}, "whole numbers"),
        ({"computation_shape": 2}, "four positive numbers"),
        ({"computation_shape": [1, [1], 1, 1]}, "whole numbers"),
        ({"computation_shape": [2**40, 1, 1, 1]}, "32 bits"),
        ({"computation_stride": [0, 1, 1, 1]}, "computation_stride is .* four positive"),
        ({"computation_stride": [1, 1]}, "computation_stride is .* four positive"),
        ({"device_order_mode": "ring"}, "device_order_mode is 'ring'"),
        ({"device_order_mode": 7}, "device_order_mode is 7"),
        ({"device_order_mode": None}, "device_order_mode is None"),
        ({"device_order_mode": RING}, "RING needs replicas that fill the mesh"),
        ({"device_order_mode": RING, "num_replicas": 8}, "take whole chips"),
    ],
    ids=str,
)
def test_build_refuses_what_does_not_fit(arguments, message):
    with pytest.raises(PlacementError, match=message):
        DeviceAssignment.build(slice_of((2, 2, 1, 2)), **arguments)


@pytest.mark.parametrize("topology", [None, 5, "v4:2x2x2", [[[0, 0, 0, 0]]]])
def test_something_that_is_not_a_topology_is_refused(topology):
    with pytest.raises(PlacementError, match="initialize_tpu_system"):
        DeviceAssignment.build(topology)
    with pytest.raises(PlacementError, match="initialize_tpu_system"):
        DeviceAssignment(topology, [[[0, 0, 0, 0]]])


@pytest.mark.parametrize(
    "cores",
    [None, [], [[]], [[[]]], [[0, 0, 0, 0]], [[[0, 0, 0]]], [[[0.5, 0, 0, 0]]], "0000", 3],
    ids=str,
)
def test_a_core_assignment_of_another_shape_is_refused(cores):
    with pytest.raises(PlacementError, match="core_assignment"):
        DeviceAssignment(slice_of((2, 2, 1, 2)), cores)


def test_two_replicas_on_one_core_are_refused_by_name():
    cores = [[[0, 0, 0, 0], [0, 0, 0, 1]], [[1, 0, 0, 0], [0, 0, 0, 1]]]

    with pytest.raises(
        PlacementError,
        match=r"\[0, 0, 0, 1\] is used twice: by logical core 1 of replica 0 and by logical core 1"
        " of replica 1",
    ):
        DeviceAssignment(slice_of((2, 2, 1, 2)), cores)


def test_one_replica_cannot_use_a_core_twice():
    with pytest.raises(PlacementError, match="used twice"):
        DeviceAssignment(slice_of((1, 1, 1, 1)), [[[0, 0, 0, 0], [0, 0, 0, 0]]])


def test_a_core_outside_of_the_mesh_or_missing_is_refused():
    with pytest.raises(CoordinateError, match="outside of the mesh"):
        DeviceAssignment(slice_of((1, 1, 1, 2)), [[[9, 0, 0, 0]]])
    with pytest.raises(PlacementError, match="no core"):
        DeviceAssignment(slice_of((2, 1, 1, 1), without=((1, 0, 0, 0),)), [[[1, 0, 0, 0]]])


@pytest.mark.parametrize(("replica", "core"), [(4, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_replica_or_core_that_is_not_there_is_an_index_error(replica, core):
    assignment = DeviceAssignment.build(slice_of((2, 2, 1, 2)), [1, 1, 2], num_replicas=4)

    for look_up in (
        assignment.coordinates,
        assignment.tpu_ordinal,
        assignment.tpu_device,
        assignment.host_device,
    ):
        with pytest.raises(IndexError, match="4 replicas of 2 logical cores"):
            look_up(replica, core)


@pytest.mark.parametrize(("task", "core"), [(0, 5), (7, 0), (-1, 0)])
def test_a_task_without_that_logical_core_is_an_error(task, core):
    assignment = DeviceAssignment.build(slice_of((2, 2, 1, 2)), [1, 1, 2], num_replicas=4)

    with pytest.raises(PlacementError, match=f"logical core {core} on task {task}"):
        assignment.lookup_replicas(task, core)
