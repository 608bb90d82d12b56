import contextlib
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.base.errors import PlacementError
from replicax._src.topology.tpu_topology import CoordinateError
from replicax.tpu.experimental import Topology

ONE = [[[0, 0, 0, 0]]]


def slice_of(shape, tasks=1, without=()):
    cores = [c for c in itertools.product(*map(range, shape)) if c not in without]
    each = len(cores) // tasks
    parts = [cores[task * each : (task + 1) * each] for task in range(tasks)]
    return Topology(mesh_shape=shape, device_coordinates=parts)


def test_a_topology_tells_its_mesh_and_its_tasks():
    topology = slice_of((2, 2, 1, 2), tasks=2)

    assert topology.mesh_shape.tolist() == [2, 2, 1, 2]
    assert topology.mesh_rank == 4
    assert (topology.num_tasks, topology.num_tpus_per_task) == (2, 4)
    assert topology.device_coordinates.shape == (2, 4, 4)
    assert topology.missing_devices.size == 0


def test_coordinates_lead_back_to_the_task_and_the_device():
    topology = slice_of((2, 2, 1, 2), tasks=2)

    for task, device in itertools.product(range(2), range(4)):
        place = topology.device_coordinates[task, device]
        assert topology.task_ordinal_at_coordinates(place) == task
        assert topology.tpu_device_ordinal_at_coordinates(place) == device


def test_device_names_are_those_of_tensorflow():
    topology = slice_of((2, 2, 1, 2), tasks=2)

    assert (
        topology.cpu_device_name_at_coordinates([1, 0, 0, 1], job="w")
        == "/job:w/task:1/device:CPU:0"
    )
    assert (
        topology.tpu_device_name_at_coordinates([1, 0, 0, 1], job="w")
        == "/job:w/task:1/device:TPU:1"
    )
    assert topology.tpu_device_name_at_coordinates([0, 0, 0, 0]) == "/task:0/device:TPU:0"
    assert topology.cpu_device_name_at_coordinates([0, 0, 0, 0]) == "/task:0/device:CPU:0"


def test_places_without_a_core_are_missing():
    topology = slice_of((2, 2, 1, 2), tasks=2, without=((0, 0, 0, 0), (1, 1, 0, 1)))

    assert topology.missing_devices.tolist() == [[0, 0, 0, 0], [1, 1, 0, 1]]
    assert topology.task_ordinal_at_coordinates([0, 0, 0, 0]) == -1
    assert topology.tpu_device_ordinal_at_coordinates([0, 0, 0, 0]) == -1


@pytest.mark.parametrize(
    "name", ["tpu_device_name_at_coordinates", "cpu_device_name_at_coordinates"]
)
def test_a_missing_core_has_no_device_name(name):
    topology = slice_of((2, 1, 1, 1), without=((1, 0, 0, 0),))

    with pytest.raises(CoordinateError, match=r"\[1, 0, 0, 0\] is missing"):
        getattr(topology, name)([1, 0, 0, 0])


@pytest.mark.parametrize(
    "mesh_shape",
    [
        None,
        [],
        [2, 2],
        [1, 1, 1],
        [1, 1, 1, 1, 1],
        [0, 1, 1, 1],
        [1, -1, 1, 1],
        [[1, 1, 1, 1]],
        [1.5, 1, 1, 1],
        ["1", "1", "1", "1"],
        "1111",
        7,
        [1, [1], 1, 1],
        [True, True, True, True],
        [2**40, 1, 1, 1],
        {},
    ],
    ids=repr,
)
def test_a_mesh_that_is_not_four_positive_numbers_is_refused(mesh_shape):
    with pytest.raises(PlacementError, match="mesh_shape"):
        Topology(mesh_shape=mesh_shape, device_coordinates=ONE)


@pytest.mark.parametrize(
    "coordinates",
    [
        None,
        [],
        [[]],
        [[[]]],
        [[[0, 0, 0]]],
        [[[0, 0, 0, 0, 0]]],
        [[0, 0, 0, 0]],
        [0, 0, 0, 0],
        [[[0, 0, 0, 0]], [[0, 0, 0, 1], [0, 0, 0, 0]]],
        [[[0.5, 0, 0, 0]]],
        [[["0", "0", "0", "0"]]],
        "0000",
        [[[None, 0, 0, 0]]],
    ],
    ids=repr,
)
def test_device_coordinates_of_another_shape_are_refused(coordinates):
    with pytest.raises(PlacementError, match="device_coordinates"):
        Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=coordinates)


@pytest.mark.parametrize("core", [[1, 0, 0, 0], [0, 0, 0, -1], [0, 5, 0, 0]])
def test_a_core_outside_of_the_mesh_is_refused_by_name(core):
    with pytest.raises(CoordinateError, match=r"Core 1 of task 0 lies at .* outside of the mesh"):
        Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], core]])


def test_two_cores_at_one_place_are_refused_by_name():
    with pytest.raises(PlacementError, match="Core 0 of task 1 and core 0 of task 0 both lie at"):
        Topology(mesh_shape=[1, 1, 1, 2], device_coordinates=[ONE[0], ONE[0]])


@pytest.mark.parametrize(
    "place", [[5, 0, 0, 0], [-1, 0, 0, 0], [0, 0], [], [0, 0, 0, 0, 0], [0.5, 0, 0, 0], "0000"]
)
def test_looking_up_a_place_that_is_not_there_is_an_index_error(place):
    topology = slice_of((2, 2, 1, 2))

    for look_up in (
        topology.task_ordinal_at_coordinates,
        topology.tpu_device_ordinal_at_coordinates,
        topology.tpu_device_name_at_coordinates,
        topology.cpu_device_name_at_coordinates,
    ):
        with pytest.raises(IndexError) as caught:
            look_up(place)
        assert isinstance(caught.value, PlacementError)


def test_the_arrays_of_a_topology_cannot_be_changed():
    given = np.zeros((1, 1, 4), dtype=np.int32)
    topology = Topology(mesh_shape=[1, 1, 1, 1], device_coordinates=given)

    given += 1

    assert topology.device_coordinates.tolist() == ONE
    with pytest.raises(ValueError, match="read-only"):
        topology.device_coordinates[0, 0, 0] = 1


sizes = st.integers(1, 3)


@given(shape=st.tuples(sizes, sizes, sizes, st.integers(1, 2)), data=st.data())
def test_serialized_is_read_back_as_the_same_topology(shape, data):
    cores = list(itertools.product(*map(range, shape)))
    kept = data.draw(st.lists(st.sampled_from(cores), min_size=1, unique=True))
    topology = Topology(mesh_shape=shape, device_coordinates=[[core] for core in kept])

    again = Topology(serialized=topology.serialized())

    assert again.mesh_shape.tolist() == list(shape)
    assert again.device_coordinates.tolist() == topology.device_coordinates.tolist()
    assert again.missing_devices.tolist() == topology.missing_devices.tolist()
    assert len(again.missing_devices) == len(cores) - len(kept)


def test_other_arguments_are_ignored_beside_serialized():
    topology = slice_of((1, 1, 1, 2))

    again = Topology(topology.serialized(), mesh_shape=[9, 9, 9, 9], device_coordinates=ONE)

    assert again.mesh_shape.tolist() == [1, 1, 1, 2]


@pytest.mark.parametrize(
    "serialized",
    [
        b"junk",
        b"\x0a\x04\x01\x01\x01\x01\x10\x01",
        b"\xff\xfe",
        "{}",
        "[]",
        "5",
        "null",
        json.dumps({"format": "other", "mesh_shape": [1, 1, 1, 1]}),
        json.dumps({"format": "replicax-tpu-topology-1"}),
        "[" * 100_000,
        7,
    ],
    ids=lambda value: repr(value)[:20],
)
def test_bytes_of_another_format_are_refused(serialized):
    with pytest.raises(PlacementError, match="serialized"):
        Topology(serialized=serialized)


@given(text=st.one_of(st.binary(min_size=1), st.text(min_size=1)))
def test_any_bytes_give_a_topology_or_one_of_our_errors(text):
    with contextlib.suppress(PlacementError):
        assert Topology(serialized=text).num_tasks >= 1


def test_a_topology_prints_what_it_is():
    assert repr(slice_of((2, 2, 1, 2), tasks=2)) == "Topology(2x2x1x2, 2 tasks of 4 TPUs)"
