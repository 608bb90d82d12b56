"""Lines between hub and workers: bounded, authenticated, and never more than JSON."""

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.workers import wire
from replicax._src.workers.wire import Lines, Wire, WireError


@given(
    st.lists(st.dictionaries(st.text(), st.integers() | st.text()), max_size=5), st.integers(1, 9)
)
def test_messages_survive_any_cutting(messages, size):
    data = b"".join(json.dumps(m).encode() + b"\n" for m in messages)
    lines = Lines()

    got = [m for i in range(0, len(data), size) for m in lines.feed(data[i : i + size])]

    assert got == messages


@given(st.binary(max_size=200))
def test_anything_else_is_refused_with_one_kind_of_error(data):
    try:
        messages = Lines().feed(data + b"\n")
    except WireError:
        return
    assert all(isinstance(m, dict) for m in messages)


def test_a_line_without_end_is_refused():
    with pytest.raises(WireError, match="without end"):
        Lines().feed(b"x" * (wire.LONGEST_LINE + 1))


def test_a_proof_needs_the_token_both_nonces_and_the_role():
    given = wire.proof("token", "worker", "a", "b")

    assert wire.is_proof(given, "token", "worker", "a", "b")
    assert not wire.is_proof(given, "other", "worker", "a", "b")
    assert not wire.is_proof(given, "token", "hub", "a", "b")
    assert not wire.is_proof(given, "token", "worker", "b", "a")
    assert not wire.is_proof(None, "token", "worker", "a", "b")


def test_a_wire_carries_messages_and_sees_the_end():
    with socket.create_server(("127.0.0.1", 0)) as server:
        b = Wire(socket.create_connection(server.getsockname()))
        other, _ = server.accept()
        end = Wire(other)
        assert b.send({"one": 1})
        assert b.send({"two": [2]})
        assert end.receive() == {"one": 1}
        assert end.receive_within(1) == {"two": [2]}
        assert end.receive_within(0.05) is None
        b.close()
        assert end.receive() is None
        end.close()


@pytest.mark.parametrize(
    ("address", "pair"),
    [("a:1", ("a", 1)), ("[::1]:22", ("::1", 22)), ("10.0.0.1:9", ("10.0.0.1", 9))],
)
def test_an_address_is_a_host_and_a_port(address, pair):
    assert wire.split_address(address) == pair


def test_free_ports_differ_and_can_be_listened_at():
    ports = wire.free_ports(5)

    assert len(set(ports)) == 5
    for port in ports:
        wire.listen(f"127.0.0.1:{port}").close()
