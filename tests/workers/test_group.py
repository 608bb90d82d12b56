"""What one worker tells the others of itself."""

import contextlib
import io
import socket
import sys
import threading

import pytest

from replicax._src.base.errors import ReplicaError
from replicax._src.cluster.checks import WorkerLostError
from replicax._src.cluster.spec import ClusterFacts
from replicax._src.workers.group import Group
from replicax._src.workers.reports import Report
from replicax._src.workers.wire import Wire

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

    group.report_failure(error_of(program))

    assert other.receive_within(10)["raised"].startswith(told)


class Unread(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("stream", [None, Unread()])
def test_a_worker_whose_errors_nobody_reads_hears_on(pair, monkeypatch, stream):
    group, _ = pair
    monkeypatch.setattr(sys, "stderr", stream)

    group._handle({"stacks": 1})
    group._handle({"answer": "a question", "values": [1]})

    assert group._answers == {"a question": [1]}


def begin_and_end(group, *endings):
    """Enter a collective for each ending; end it by that exception, if there is one."""
    for ending in endings:
        with contextlib.suppress(StopIteration, KeyError), group.collective("a step"):
            if ending is not None:
                raise ending


@pytest.mark.parametrize(
    ("endings", "at_exit", "by_leave"),
    [
        ([None, None], 2, 2),
        ([None, StopIteration], 2, 2),  # the end of the data: all workers reach it
        ([None, KeyError], 2, 1),  # others may wait in it, unless they raise the same
    ],
)
def test_a_worker_that_goes_says_which_collective_was_its_last(pair, endings, at_exit, by_leave):
    # One that is late takes part in all that this worker has begun, and raises what it raises.
    group, other = pair
    begin_and_end(group, *endings)
    assert group._completed == by_leave

    group.leave()

    assert other.receive_within(10)["bye"]["count"] == at_exit


def test_leave_ends_the_wait_for_a_collective_that_failed_here(pair):
    group, other = pair
    begin_and_end(group, None, KeyError)

    group.depart(None)

    assert other.receive_within(10)["bye"]["count"] == 1


@pytest.mark.parametrize("error", [None, ValueError("a wrong turn")])
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_worker_that_left_says_so_whenever_the_hub_reports_it(pair, error, comes_back):
    group, _ = pair
    say_goodbye = group._say_goodbye

    def answered(last):  # the hub's report for the others arrives before this worker has left
        if comes_back:
            group._handle_report(Report("lost", 1, "worker 0 is gone"))
        say_goodbye(last)

    group._say_goodbye = answered
    group.depart(error)

    with pytest.raises(ReplicaError, match="has left its cluster"), group.collective("a sum"):
        pytest.fail("it took part")


def test_a_worker_that_leaves_after_a_loss_still_names_the_loss(pair):
    group, _ = pair
    group._handle_report(Report("lost", 1, "worker 1 is gone"))

    group.depart(None)

    with pytest.raises(WorkerLostError, match="worker 1 is gone"), group.collective("a sum"):
        pytest.fail("it took part")


def go(generation, **more):
    one = {"index": 0, "address": "a:1"}
    known = {"members": [one], "newcomers": False, "holds": False, "joined": [], "apart": False}
    return {"generation": generation, "calls": 0, "workers": 2, **known, **more}


def lost(kind, generation=None):
    message = Report(kind, 1, "worker 1 is gone.").to_message()
    return message if generation is None else {**message, "generation": generation}


def test_report_that_ends_the_run_is_kept_when_a_resize_begins(pair):
    """It came after the start message of the next generation, before this worker entered that."""
    group, _ = pair
    group._handle(lost("resize", 0))
    group._handle(lost("lost"))
    group.enter(go(1))
    with pytest.raises(WorkerLostError), group.collective("a step"):
        raise AssertionError("it began")


def test_report_of_the_next_generation_waits_for_it(pair):
    group, _ = pair
    group._handle(lost("resize", 0))
    group._handle(lost("resize", 1))
    group._handle(lost("left", 1))
    group.enter(go(1))
    assert group.may_resize
    group.enter(go(2))
    with group.collective("a step"):
        pass


def test_ping_has_the_generation_that_it_counts(pair):
    group, _ = pair
    for _ in range(3):
        with group.collective("a step"):
            pass
    counted = group._progress

    def progress():  # a resize would come between the two parts of the message
        found = counted()
        is_free = threading.Thread(target=group.enter, args=(go(1),))
        is_free.start()
        is_free.join(0.2)
        return found

    group._progress = progress
    message = group._ping_message()
    assert (message["ping"]["count"], message["generation"]) == (3, 0)


def test_worker_is_behind_up_to_its_next_collective(pair):
    group, _ = pair
    with group.call(), group.collective("step 1"), group.call():  # a call in a call
        pass
    assert group.calls == 1
    group.enter(go(1, calls=2, workers=3, apart=True))
    group.finish_start()
    group.resume()
    assert group.is_behind
    with group.call(), group.collective("step 2"):
        assert not group.is_behind
        assert group.call_workers == 3  # its batch is divided by as many workers as the others'
    group.enter(go(2, calls=2, workers=3))
    assert not group.is_behind
    group.enter(go(3, joined=[1]))
    assert group.calls == 0
