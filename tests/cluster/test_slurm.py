import os
import stat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.cluster.checks import ClusterError, ClusterStateError
from replicax._src.cluster.slurm import SlurmClusterResolver, expand_counts, expand_hosts


@pytest.fixture
def step(monkeypatch):
    """Set the variables of a job step."""

    def set_to(*, rank=0, tasks, hosts, counts):
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(tasks))
        monkeypatch.setenv("SLURM_STEP_NODELIST", hosts)
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", counts)

    return set_to


@pytest.mark.parametrize(
    ("hosts", "counts", "tasks", "workers"),
    [
        ("n[1,3-4],m7", "1(x4)", 4, ["m7:8888", "n1:8888", "n3:8888", "n4:8888"]),
        ("a[08-10]", "1(x3)", 3, ["a08:8888", "a09:8888", "a10:8888"]),
        ("m[2,10]", "1(x2)", 2, ["m2:8888", "m10:8888"]),
        (
            "r2-n1,r10-n[2,10]",
            "2,1(x2)",
            4,
            ["r10-n2:8888", "r10-n10:8888", "r2-n1:8888", "r2-n1:8889"],
        ),
        ("x1,x2", "2,1", 3, ["x1:8888", "x1:8889", "x2:8888"]),
        ("solo", "2", 2, ["solo:8888", "solo:8889"]),
    ],
)
def test_hosts_become_workers_in_slurms_order(step, hosts, counts, tasks, workers):
    step(tasks=tasks, hosts=hosts, counts=counts)

    resolver = SlurmClusterResolver(gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False)

    assert resolver.cluster_spec().as_dict() == {"worker": workers}


def test_the_task_is_known_once_the_cluster_is(step):
    step(rank=1, tasks=3, hosts="a,b", counts="2,1")
    resolver = SlurmClusterResolver(gpus_per_node=4)

    assert (resolver.get_task_info(), resolver.master()) == ((None, None), "")
    resolver.cluster_spec()

    assert resolver.get_task_info() == ("worker", 1)
    assert resolver.master() == "grpc://a:8889"
    assert resolver.master("worker", 2, rpc_layer="x") == "x://b:8888"
    assert resolver.num_accelerators() == {"GPU": 2}


def test_each_task_sees_its_own_gpus(step, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seen = []
    for rank in range(3):
        step(rank=rank, tasks=3, hosts="a,b", counts="2,1")
        SlurmClusterResolver(gpus_per_node=4).cluster_spec()
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])

    assert seen == ["0,1", "2,3", "0,1"]  # the two tasks of a, then b


def test_gpus_are_left_alone_when_asked(step, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    step(tasks=1, hosts="a", counts="1")

    SlurmClusterResolver(auto_set_gpu=False).cluster_spec()

    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


def test_jobs_are_filled_in_the_order_of_their_names(step):
    step(rank=1, tasks=3, hosts="a,b", counts="2,1")

    resolver = SlurmClusterResolver(jobs={"worker": 2, "ps": 1}, gpus_per_node=0)

    assert resolver.cluster_spec().as_dict() == {"ps": ["a:8888"], "worker": ["a:8889", "b:8888"]}
    assert resolver.get_task_info() == ("worker", 0)
    assert resolver.master("worker", 1) == "grpc://b:8888"


def test_tasks_per_node_may_be_given_as_a_number_or_by_host(step):
    step(tasks=4, hosts="a,b", counts="9,9")

    number = SlurmClusterResolver(tasks_per_node=2, gpus_per_node=0, port_base=100)
    by_host = SlurmClusterResolver(tasks_per_node={"q": 4}, gpus_per_node=0)

    assert number.cluster_spec().job_tasks("worker") == ["a:100", "a:101", "b:100", "b:101"]
    assert by_host.cluster_spec().task_address("worker", 3) == "q:8891"


@pytest.mark.parametrize(("visible", "gpus"), [("0,1,2,3", 4), ("", 0), ("7", 1)])
def test_gpus_are_counted_from_cuda_visible_devices(step, monkeypatch, visible, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    step(tasks=1, hosts="a", counts="1")

    assert SlurmClusterResolver(auto_set_gpu=False).num_accelerators() == {"GPU": gpus}


def put_nvidia_smi(folder, monkeypatch, script):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(folder))


def test_gpus_are_counted_by_nvidia_smi(step, monkeypatch, tmp_path):
    put_nvidia_smi(tmp_path, monkeypatch, "echo 'GPU 0: A'; echo 'GPU 1: B'; echo other")
    step(tasks=1, hosts="a", counts="1")

    assert SlurmClusterResolver(auto_set_gpu=False).num_accelerators() == {"GPU": 2}


def test_an_nvidia_smi_that_fails_is_reported(step, monkeypatch, tmp_path):
    put_nvidia_smi(tmp_path, monkeypatch, "exit 9")
    step(tasks=1, hosts="a", counts="1")

    with pytest.raises(RuntimeError, match="gpus_per_node"):
        SlurmClusterResolver()


def test_without_nvidia_smi_there_are_no_gpus(step, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    step(tasks=2, hosts="a", counts="2")

    resolver = SlurmClusterResolver()

    assert resolver.num_accelerators() == {"GPU": 0}
    assert resolver.cluster_spec().num_tasks("worker") == 2
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize("missing", ["PROCID", "STEP_NUM_TASKS", "STEP_NODELIST"])
def test_outside_of_a_step_the_missing_variable_is_named(step, monkeypatch, missing):
    step(tasks=1, hosts="a", counts="1")
    monkeypatch.delenv(f"SLURM_{missing}")

    with pytest.raises(RuntimeError, match=f"SLURM_{missing} is not set.*srun"):
        SlurmClusterResolver(gpus_per_node=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus_per_node": 1, "gpus_per_task": 2}, "do not fit on a node with 1 GPUs"),
        ({"gpus_per_node": 0, "jobs": {"worker": 9}}, "need 9 tasks, but Slurm started 3"),
        ({"gpus_per_node": 0, "tasks_per_node": 1}, "need 3 tasks, but Slurm started 2"),
    ],
    ids=str,
)
def test_numbers_that_do_not_add_up_are_a_runtime_error(step, arguments, message):
    step(tasks=3, hosts="a,b", counts="2,1")

    with pytest.raises(ClusterStateError, match=message):
        SlurmClusterResolver(**arguments)


@pytest.mark.parametrize("rank", ["x", "", "-1", "1.5"])
def test_a_rank_that_is_not_a_number_is_a_value_error(step, rank):
    step(rank=rank, tasks=1, hosts="a", counts="1")

    with pytest.raises(ClusterError, match="SLURM_PROCID"):
        SlurmClusterResolver(gpus_per_node=0)


@pytest.mark.parametrize("tasks_per_node", [0, {}, {"a": 0}], ids=str)
def test_every_host_needs_a_task(step, tasks_per_node):
    step(tasks=1, hosts="a", counts="1")

    with pytest.raises(ClusterError, match="at least one task"):
        SlurmClusterResolver(tasks_per_node=tasks_per_node, gpus_per_node=0)


@pytest.mark.parametrize("tasks_per_node", [1, "1", 1.0, np.int64(1), {"a": 1, "b": "1"}], ids=repr)
def test_tasks_per_node_may_be_any_whole_number(step, tasks_per_node):
    step(tasks=2, hosts="a,b", counts="7,7")

    resolver = SlurmClusterResolver(tasks_per_node=tasks_per_node, gpus_per_node=2)

    assert resolver.cluster_spec().as_dict() == {"worker": ["a:8888", "b:8888"]}
    assert resolver.num_accelerators() == {"GPU": 2}


@pytest.mark.parametrize("tasks_per_node", [-1, "x", 1.5, {"a": -1}], ids=repr)
def test_tasks_per_node_that_is_not_a_whole_number_is_refused_by_its_name(step, tasks_per_node):
    step(tasks=1, hosts="a", counts="1")

    with pytest.raises(ClusterError, match="tasks_per_node"):
        SlurmClusterResolver(tasks_per_node=tasks_per_node, gpus_per_node=0)


BAD_HOSTS = [
    *("n[1", "n]", "n[1-]", "n[-1]", "n[3-1]", "a,,b", "", ",", "a,", "n[a]", "n[1-2]x", "n[1][2]"),
    *("n[]", " a", "n[1-2-3]", "n[1,]", "n[[1]]", "a b", "n[0-999999999]", "n[1-99999999999]"),
]


@pytest.mark.parametrize("hosts", BAD_HOSTS)
def test_a_host_list_that_cannot_be_read_is_a_value_error(step, hosts):
    step(tasks=1, hosts=hosts, counts="1")

    with pytest.raises(ValueError, match="host list"):
        SlurmClusterResolver(gpus_per_node=1)


@pytest.mark.parametrize("counts", ["", "x", "1,", "1(2)", "1(x)", "(x2)", "-1", "1.5", "1(x2"])
def test_counts_that_cannot_be_read_are_a_value_error(counts):
    with pytest.raises(ClusterError, match="task counts"):
        expand_counts(counts)


@given(numbers=st.lists(st.integers(0, 99), min_size=1, max_size=8), width=st.integers(1, 3))
def test_a_list_in_brackets_is_the_same_as_written_out(numbers, width):
    texts = [str(n).zfill(width) for n in numbers]

    assert expand_hosts(f"n[{','.join(texts)}]") == [f"n{text}" for text in texts]
    assert expand_hosts(",".join(f"n{text}" for text in texts)) == [f"n{text}" for text in texts]


@given(text=st.text("abn019[]-, (x)", max_size=12))
def test_any_text_is_hosts_or_a_cluster_error(text):
    for expand in (expand_hosts, expand_counts):
        try:
            found = expand(text)
        except ClusterError:
            continue
        assert found
