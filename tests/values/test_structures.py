from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.values.structures import check_counts, has_distributed, regroup, select
from tests.replicas import components, mirrored

PerReplica = rx.distribute.PerReplica
Pair = namedtuple("Pair", "left right")


@pytest.fixture
def topology():
    return mirrored(2).topology


@pytest.mark.parametrize(
    "plain", [None, 3, 2.5, True, "text", b"bytes", 1 + 2j, np.float32(2), int, print]
)
def test_python_values_that_all_agree_on_stay_bare(topology, plain):
    merged = regroup([plain, plain], topology)

    assert merged is plain


def test_equal_python_values_that_are_two_objects_stay_bare_too(topology):
    merged = regroup([float("1.5"), float("1.5")], topology)

    assert merged == 1.5
    assert isinstance(merged, float)


@pytest.mark.parametrize("values", [[1, 2], [1, 1.0], [True, 1], ["a", "b"], [None, 1]])
def test_python_values_that_differ_become_per_replica(topology, values):
    assert regroup(values, topology).values == tuple(values)


@pytest.mark.parametrize("make", [jnp.ones, np.ones])
def test_arrays_become_per_replica_even_if_they_are_equal(topology, make):
    merged = regroup([make(2), make(2)], topology)

    assert isinstance(merged, PerReplica)
    assert components(merged) == [[1.0, 1.0], [1.0, 1.0]]


def test_containers_keep_their_types(topology):
    result = lambda i: {"a": [jnp.int32(i)], "b": Pair((i, "x"), None)}  # noqa: E731

    merged = regroup([result(0), result(1)], topology)

    assert type(merged["a"]) is list
    assert components(merged["a"][0]) == [0, 1]
    assert type(merged["b"]) is Pair
    assert merged["b"].left[0].values == (0, 1)
    assert merged["b"].left[1] == "x"
    assert merged["b"].right is None


@pytest.mark.parametrize(
    ("one", "other"), [([1], (1,)), ({"a": 1}, {"b": 1}), ([1, 2], [1]), (1, [1]), (None, [])]
)
def test_different_structures_are_refused_and_shown(topology, one, other):
    with pytest.raises(ValueError, match="different structures") as error:
        regroup([one, other], topology)

    assert "replica 0 PyTreeDef" in str(error.value)
    assert "replica 1 PyTreeDef" in str(error.value)


def test_select_takes_each_replicas_component_out_of_a_structure():
    tree = {"x": [PerReplica([1, 2])], "y": 5, "z": rx.distribute.Mirrored([7, 7]), "n": None}

    assert select(tree, 0) == {"x": [1], "y": 5, "z": 7, "n": None}
    assert select(tree, 1) == {"x": [2], "y": 5, "z": 7, "n": None}


def test_select_undoes_regroup(topology):
    results = [{"a": jnp.float32(i), "b": (i, "same")} for i in range(2)]

    merged = regroup(results, topology)

    for i, expected in enumerate(results):
        assert select(merged, i) == expected


def test_has_distributed_looks_into_structures():
    assert has_distributed([{"a": PerReplica([1])}])
    assert not has_distributed([{"a": 1}, None])


def test_components_are_counted_in_a_structure(topology):
    check_counts({"a": PerReplica([1, 2]), "b": jnp.ones(3)}, topology)

    with pytest.raises(ValueError, match="1 components was used with 2 replicas"):
        check_counts({"a": [PerReplica([1])]}, topology)


def test_registered_dataclasses_are_taken_apart_and_put_together(topology):
    merged = regroup([Point(jnp.float32(i), "p") for i in range(2)], topology)

    assert type(merged) is Point
    assert components(merged.x) == [0.0, 1.0]
    assert merged.name == "p"


class Point:
    def __init__(self, x, name):
        self.x, self.name = x, name


jax.tree_util.register_pytree_node(
    Point, lambda p: ((p.x,), p.name), lambda name, xs: Point(xs[0], name)
)
