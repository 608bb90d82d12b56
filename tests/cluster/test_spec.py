import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.cluster.checks import ClusterError, ClusterTypeError
from replicax._src.cluster.spec import ClusterSpec

MIXED = {"worker": ["a:1", "b:2"], "ps": {0: "p:0", 2: "p:2"}}


def test_a_spec_answers_for_its_jobs_and_tasks():
    spec = ClusterSpec(MIXED)

    assert spec.as_dict() == MIXED
    assert sorted(spec.jobs) == ["ps", "worker"]
    assert (spec.num_tasks("worker"), spec.num_tasks("ps")) == (2, 2)
    assert spec.task_indices("ps") == [0, 2]
    assert spec.task_address("ps", 2) == "p:2"
    assert spec.job_tasks("worker") == ["a:1", "b:2"]
    assert spec.job_tasks("ps") == ["p:0", None, "p:2"]


def test_indices_may_be_text_and_out_of_order():
    spec = ClusterSpec({"worker": {"1": "b:2", "0": "a:1"}})

    assert spec.as_dict() == {"worker": ["a:1", "b:2"]}


def test_indices_may_be_numpys():
    spec = ClusterSpec({"worker": {np.int64(1): "b:2", np.int32(0): "a:1"}})

    assert spec.as_dict() == {"worker": ["a:1", "b:2"]}
    assert spec.task_address("worker", np.int64(1)) == "b:2"


def test_a_job_that_does_not_start_at_0_stays_a_dictionary():
    assert ClusterSpec({"worker": {1: "b:2"}}).as_dict() == {"worker": {1: "b:2"}}


def test_a_job_without_tasks_is_an_empty_dictionary_as_in_tensorflow():
    spec = ClusterSpec({"worker": []})

    assert spec.as_dict() == {"worker": {}}
    assert spec.num_tasks("worker") == 0
    assert spec.job_tasks("worker") == []


def test_a_tuple_is_as_good_as_a_list():
    assert ClusterSpec({"worker": ("a:1",)}) == ClusterSpec({"worker": ["a:1"]})


def test_only_an_empty_spec_is_false():
    assert ClusterSpec(MIXED)
    assert not ClusterSpec({})


def test_equal_specs_are_equal_and_hash_alike():
    spec = ClusterSpec(MIXED)

    assert spec == ClusterSpec(spec)
    assert spec == ClusterSpec(spec.as_dict())
    assert hash(spec) == hash(ClusterSpec(spec))
    assert spec != ClusterSpec({"worker": ["a:1"]})
    assert spec != 5


def test_a_spec_equals_its_dictionary_by_index_as_in_tensorflow():
    assert ClusterSpec({"worker": ["a:1"]}) == {"worker": {0: "a:1"}}


def test_a_copy_does_not_follow_the_dictionary_it_was_made_from():
    cluster = {"worker": ["a:1"]}
    spec = ClusterSpec(cluster)

    cluster["worker"].append("b:2")
    spec.as_dict()["worker"].append("c:3")

    assert spec.num_tasks("worker") == 1


def test_a_copy_of_a_spec_lists_its_jobs_by_name_as_in_tensorflow():
    spec = ClusterSpec({"worker": ["a:1"], "ps": ["p:0"]})

    assert spec.jobs == ["worker", "ps"]
    assert ClusterSpec(spec).jobs == ["ps", "worker"]


def test_it_prints_its_jobs_in_order():
    assert repr(ClusterSpec({"worker": ["a:1"], "ps": ["p:0"]})) == (
        "ClusterSpec({'ps': ['p:0'], 'worker': ['a:1']})"
    )


@pytest.mark.parametrize("method", ["num_tasks", "task_indices", "job_tasks"])
def test_an_unknown_job_is_a_value_error_that_lists_the_jobs(method):
    with pytest.raises(ValueError, match=r"no job 'x' .* \['ps', 'worker'\]"):
        getattr(ClusterSpec(MIXED), method)("x")


@pytest.mark.parametrize("index", [1, 3, -1, "0", None, True, 0.5])
def test_an_unknown_task_is_a_value_error_that_lists_the_indices(index):
    with pytest.raises(ClusterError, match=r"indices are \[0, 2\]"):
        ClusterSpec(MIXED).task_address("ps", index)


@pytest.mark.parametrize("cluster", [None, [], "worker", 5, [("worker", ["a:1"])]])
def test_a_cluster_that_is_not_a_mapping_is_a_type_error(cluster):
    with pytest.raises(ClusterTypeError, match="must map job names to addresses"):
        ClusterSpec(cluster)


@pytest.mark.parametrize(
    ("cluster", "key"),
    [
        ({"worker": "a:1"}, r'cluster\["worker"\] is \'a:1\''),
        ({"worker": 5}, r'cluster\["worker"\] is 5'),
        ({"worker": None}, r'cluster\["worker"\] is None'),
        ({"worker": ["a:1", None]}, r'cluster\["worker"\]\[1\] is None'),
        ({"worker": [5]}, r'cluster\["worker"\]\[0\] is 5'),
        ({"worker": [b"a:1"]}, r'cluster\["worker"\]\[0\]'),
        ({"worker": [["a:1"]]}, r'cluster\["worker"\]\[0\]'),
        ({"worker": {0: 1}}, r'cluster\["worker"\]\[0\] is 1'),
        ({"worker": {None: "a:1"}}, "task index None"),
        ({"worker": {True: "a:1"}}, "task index True"),
        ({5: ["a:1"]}, "job name"),
        ({None: ["a:1"]}, "job name"),
    ],
    ids=str,
)
def test_a_part_of_the_wrong_kind_is_a_type_error_that_names_it(cluster, key):
    with pytest.raises(ClusterTypeError, match=key):
        ClusterSpec(cluster)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"worker": {-1: "a:1"}}, "task index -1"),
        ({"worker": {1.5: "a:1"}}, "task index 1.5"),
        ({"worker": {"one": "a:1"}}, "task index 'one'"),
        ({"worker": {"": "a:1"}}, "task index ''"),
        ({"worker": {"1": "a:1", "01": "b:2"}}, "two addresses for task 1"),
        ({"worker": {1: "a:1", "1": "b:2"}}, "two addresses for task 1"),
        ({"worker": [""]}, "empty"),
        ({"": ["a:1"]}, "empty"),
    ],
    ids=str,
)
def test_a_part_that_makes_no_sense_is_a_value_error(cluster, message):
    with pytest.raises(ClusterError, match=message):
        ClusterSpec(cluster)


names = st.text("abcw", min_size=1, max_size=3)
indices = st.dictionaries(st.integers(0, 20), names, max_size=5)
addresses = st.one_of(st.lists(names, min_size=1, max_size=5), indices)


@given(cluster=st.dictionaries(names, addresses, max_size=4))
def test_as_dict_makes_the_same_spec_again(cluster):
    spec = ClusterSpec(cluster)

    again = ClusterSpec(spec.as_dict())

    assert again == spec
    assert hash(again) == hash(spec)
    for job in cluster:
        listed = spec.job_tasks(job)
        assert sum(address is not None for address in listed) == spec.num_tasks(job)
        assert all(listed[i] == spec.task_address(job, i) for i in spec.task_indices(job))
