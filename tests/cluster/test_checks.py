import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.cluster.checks import (
    ClusterError,
    ClusterTypeError,
    parse_address,
    show,
    to_index,
    to_name,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:12345", "localhost", 12345),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("worker-0.mnist.svc.cluster.local:65535", "worker-0.mnist.svc.cluster.local", 65535),
        ("[::1]:8888", "::1", 8888),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ("node_7:08", "node_7", 8),
    ],
)
def test_an_address_is_a_host_and_a_port(text, host, port):
    assert parse_address(text, "worker 0") == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        "localhost:",
        ":8888",
        "localhost:http",
        "a" * 64 + ".example:1",
        "a..b:1",
        "\ud800:1",
        "localhost:-1",
        "localhost:0",
        "localhost:65536",
        "localhost:99999",
        "localhost:123456",
        "localhost:8 888",
        " localhost:8888",
        "localhost:8888 ",
        "localhost:8888\n",
        "local host:8888",
        "::1:8888",
        "[::1]",
        "[::1:8888",
        "[]:8888",
        "a:1:2",
        "grpc://localhost:8888",
        "http://localhost:8888/path",
        "localhost:8888/path",
        "user@localhost:8888",
        "localhost:\uff18\uff18",
    ],
)
def test_an_address_that_is_not_host_and_port_is_refused_by_its_owner(text):
    with pytest.raises(ClusterError, match="worker 3 has the address"):
        parse_address(text, "worker 3")


def test_a_protocol_before_the_address_is_explained():
    with pytest.raises(ClusterError, match=r"write only host:port, such as 'a:1'"):
        parse_address("grpc://a:1", "worker 0")


@pytest.mark.parametrize(
    ("value", "index"),
    [(0, 0), (7, 7), ("3", 3), (" 3 ", 3), (2.0, 2), (np.int64(4), 4), (np.uint8(5), 5)],
)
def test_an_index_is_a_whole_number_also_as_text_or_numpys(value, index):
    assert to_index(value, "task_id") == index
    assert type(to_index(value, "task_id")) is int


@pytest.mark.parametrize(
    "value",
    [
        *(-1, 1.5, "one", "", " ", "-1", "+1", "1.0", "1_0", "0x1", "\u0663", "9" * 5000, "1e3"),
        *(1_000_000, 1e300, float("inf"), float("nan"), -(2**70)),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_number_that_is_not_an_index_is_a_value_error(value):
    with pytest.raises(ClusterError, match="task_id is"):
        to_index(value, "task_id")


@pytest.mark.parametrize(
    "value", [None, True, False, [], {}, b"1", [1], 1j, np.True_, np.array([1])], ids=repr
)
def test_a_value_of_another_kind_is_not_an_index(value):
    with pytest.raises(ClusterTypeError, match="task_id is"):
        to_index(value, "task_id")


def test_a_name_is_text_that_is_not_empty():
    assert to_name("worker", "task_type") == "worker"
    with pytest.raises(ClusterError, match="task_type is empty"):
        to_name("", "task_type")
    with pytest.raises(ClusterTypeError, match="task_type is 5"):
        to_name(5, "task_type")


def test_a_long_value_is_cut_and_a_deep_one_is_named():
    deep = []
    for _ in range(100_000):
        deep = [deep]

    assert show("x" * 500).endswith("...")
    assert len(show("x" * 500)) < 80
    assert show(deep) == "a deeply nested list"
    while deep:  # so that freeing it does not recurse
        deep = deep[0]


@given(value=st.one_of(st.text(), st.integers(), st.floats(), st.binary(), st.none()))
def test_any_value_is_an_index_or_one_of_our_errors(value):
    try:
        index = to_index(value, "task_id")
    except (ClusterError, ClusterTypeError):
        return
    assert 0 <= index < 1_000_000


@given(text=st.text())
def test_any_text_is_an_address_or_a_cluster_error(text):
    try:
        host, port = parse_address(text, "worker 0")
    except ClusterError:
        return
    assert host
    assert 1 <= port <= 65535
