"""What one worker tells the others of itself."""

import io
import socket
import sys

import pytest

from replicax.cluster._spec import ClusterFacts
from replicax.workers._group import Group
from replicax.workers._wire import Wire

FACTS = ClusterFacts.of_processes(0, ("a:1", "b:1"), coordinator="a:1", source="test")
GO = {"members": [], "hub_pid": 1, "ping_timeout": 20}


@pytest.fixture
def pair():
    """A group, and the other end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Wire(socket.create_connection(server.getsockname()))
        theirs = Wire(server.accept()[0])
        yield Group(FACTS, ours, GO), theirs
        ours.close()
        theirs.close()


def error_of(text):
    try:
        exec(compile(text, "model.py", "exec"))
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("x = = 1", "SyntaxError: invalid syntax (model.py, line 1)"),
        ("raise ValueError('a wrong turn')", "ValueError: a wrong turn"),
        ("raise ValueError", "ValueError"),
        ("import json; json.loads('{')", "json.decoder.JSONDecodeError: Expecting property name"),
    ],
)
def test_an_error_is_told_by_its_kind_and_text(pair, program, told):
    group, other = pair

    group.tell(error_of(program))

    assert other.receive_within(10)["raised"].startswith(told)


class Unread(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("stream", [None, Unread()])
def test_a_worker_whose_errors_nobody_reads_hears_on(pair, monkeypatch, stream):
    group, _ = pair
    monkeypatch.setattr(sys, "stderr", stream)

    group._take({"stacks": 1})
    group._take({"answer": "a question", "values": [1]})

    assert group._answers == {"a question": [1]}
