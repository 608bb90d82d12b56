"""The hub hears strangers, fools and workers, and only workers move it."""

import contextlib
import json
import math
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax._src.cluster.checks import RollCallError
from replicax._src.workers import hub as _hub
from replicax._src.workers import join, watchdog
from replicax._src.workers import wire as _wire
from replicax._src.workers.hub import Hub, HubOptions
from replicax._src.workers.join import HubProcess, prove
from replicax._src.workers.sessions import NOTICES, bare_python
from replicax._src.workers.wire import Acceptor, Wire
from tests.fresh_process import run_fresh
from tests.multi_process.gang import ROOT

SRC = ROOT / "src"

TOKEN = "the token of this run"
PING = {"count": 1, "inside": False, "pace": 0.0, "journal": [[1, "a step", 7]]}


def options(size, **more):
    usual = {
        "address": f"127.0.0.1:{_wire.free_ports(1)[0]}",
        "size": size,
        "token": TOKEN,
        "addresses": (None,) * size,
        "owner": "the test",
        "join_timeout": 60.0,
        "ping_timeout": 60.0,
        "step_timeout": 60.0,
        "disk_timeout": 600.0,
    }
    return HubOptions(**usual | more)


@contextlib.contextmanager
def hub(size, **more):
    """A hub in a thread; gives its address. That its thread fails is an error."""
    told = options(size, **more)
    errors, reasons = [], []

    def serve():
        try:
            door = Acceptor(_wire.listen(told.address), TOKEN)
            listening.set()
            Hub(told, door).serve(lambda: reasons[0] if reasons else "")
            for visitor in list(door.connections.values()):
                door.disconnect(visitor)
            door.selector.close()
        except BaseException as error:
            errors.append(error)

    listening = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    assert listening.wait(30)
    try:
        yield told.address
    finally:
        reasons.append("the test is over")
        thread.join(30)
    assert not errors
    assert not thread.is_alive()


@contextlib.contextmanager
def stranger(address):
    with socket.create_connection(_wire.split_address(address), timeout=30) as sock:
        yield sock


@contextlib.contextmanager
def trusted(address):
    """A connection that has proved to know the token."""
    with stranger(address) as sock:
        wire = Wire(sock)
        prove(wire, TOKEN, address)
        yield wire


def facts(index, size, **more):
    known = {"address": None, "pid": os.getpid(), "versions": {"jax": "1"}, "program": None}
    return {"index": index, "size": size, **known, **more}


@contextlib.contextmanager
def worker(address, index, size, **more):
    with trusted(address) as wire:
        wire.send({"join": facts(index, size, **more)})
        yield wire


def heard(wire, kind):
    """The next message of a kind."""
    while (message := wire.receive_within(30)) is not None:
        if kind in message:
            return message[kind]
    raise AssertionError(f"no message {kind!r} came")


def test_workers_come_and_go_in_peace():
    with hub(2) as address, worker(address, 0, 2) as a, worker(address, 1, 2) as b:
        assert heard(a, "go")["same_program"]
        heard(b, "go")
        a.send({"ping": PING})
        assert heard(a, "pong") == 1


def test_offer_of_before_a_resize_is_not_answered_by_the_workers_that_are_left():
    """A checkpoint that was being written would be committed without the lost worker's part."""
    told = options(2, least_workers=1)
    process = HubProcess(told)
    with worker(told.address, 0, 2) as a:
        with worker(told.address, 1, 2) as b:
            heard(a, "go")
            heard(b, "go")
        heard(a, "report")  # b is gone
        a.send({"ready": 0, "has": 0, "completed": 0})
        assert heard(a, "go")["generation"] == 1
        a.send({"offer": "checkpoint 1, 2", "value": "of a", "generation": 0})
        a.send({"offer": "1:checkpoint 1, 2", "value": "of a", "generation": 1})
        assert heard(a, "answer") == "1:checkpoint 1, 2"
    process.end()


def test_exchange_is_not_answered_after_a_loss():
    """Of two survivors, one would take the answer, and the other the loss."""
    told = options(3, least_workers=1)
    process = HubProcess(told)
    with worker(told.address, 0, 3) as a, worker(told.address, 1, 3) as b:
        with worker(told.address, 2, 3) as c:
            heard(a, "go")
            c.send({"offer": "main 1", "value": 3, "generation": 0})
            c.send({"ping": PING})
            heard(c, "pong")
        a.send({"offer": "main 1", "value": 1, "generation": 0})
        heard(b, "report")  # c is gone
        b.send({"offer": "main 1", "value": 2, "generation": 0})  # before it has read that
        b.send({"ready": 0, "has": 0, "completed": 0})
        a.send({"ready": 0, "has": 0, "completed": 0})
        while "go" not in (message := b.receive_within(30)):
            assert "answer" not in message
    process.end()


def test_survivor_that_fails_after_the_agreement_is_lost_to_the_others():
    """They wait for it already, to connect."""
    told = options(3, least_workers=1)
    process = HubProcess(told)
    with worker(told.address, 0, 3) as a, worker(told.address, 1, 3) as b:
        with worker(told.address, 2, 3):
            heard(a, "go")
            heard(b, "go")
        for wire in (a, b):
            heard(wire, "report")
            wire.send({"ready": 0, "has": 0, "completed": 0})
        assert heard(a, "go")["generation"] == 1
        b.send({"cannot": "A checkpoint is still being written."})
        while "report" not in (message := a.receive_within(30)):
            pass
        assert (message["report"]["kind"], message["generation"]) == ("resize", 1)
        assert "A checkpoint is still being written." in message["report"]["text"]
    process.end()


def test_survivors_hear_which_of_them_has_begun_most_calls():
    told = options(3, least_workers=1)
    process = HubProcess(told)
    with worker(told.address, 0, 3) as a, worker(told.address, 1, 3) as b:
        with worker(told.address, 2, 3):
            heard(a, "go")
            heard(b, "go")
        a.send({"ready": 0, "has": 6, "completed": 6, "calls": 7, "workers": 3})
        b.send({"ready": 0, "has": 6, "completed": 5, "calls": 6, "workers": 4})
        go = heard(b, "go")
        assert (go["calls"], go["workers"], go["apart"], go["last"]) == (7, 3, True, 6)
        assert go["joined"] == []
    process.end()


# Readers.


@contextlib.contextmanager
def reader(address):
    with stranger(address) as sock:
        wire = Wire(sock)
        prove(wire, TOKEN, address, role="reader")
        yield wire


def test_a_reader_is_told_how_each_worker_is():
    load = {"steps": 7, "rate": 2.5, "waited": 3.0, "waits": 0.25, "memory": 4096}
    with hub(2) as address, worker(address, 0, 2) as a, worker(address, 1, 2, host="h") as b:
        heard(b, "go")
        a.send({"ping": {**PING, "load": load}})
        heard(a, "pong")
        with reader(address) as wire:
            status = heard(wire, "status")

    first, second = status["workers"]
    assert {name: first[name] for name in load} == load
    assert (first["index"], first["state"], second["host"]) == (0, "here", "h")


def test_a_reader_stays_until_the_end_and_hears_why():
    with hub(2) as address, worker(address, 0, 2) as a, worker(address, 1, 2) as b:
        heard(b, "go")
        with reader(address) as wire:
            heard(wire, "status")
            a.send({"raised": "ValueError: no", "progress": PING})
            heard(b, "report")
            status = heard(wire, "status")
            while not status["news"]:
                status = heard(wire, "status")

    assert "it raised ValueError: no" in status["news"][0]
    assert [w["state"] for w in status["workers"]] == ["lost", "here"]


@given(st.lists(st.one_of(st.binary(), st.just(b'{"bye": {}}\n'), st.just(b'{"join": 1}\n'))))
@settings(max_examples=20)
def test_nothing_that_a_reader_says_moves_the_run(run, data):
    address, workers = run
    with reader(address) as wire, contextlib.suppress(OSError):
        for part in data:
            wire.socket.sendall(part)
        message = {"raised": "I am a worker", "progress": PING}
        wire.socket.sendall(json.dumps(message).encode() + b"\n")
        while wire.receive_within(30) is not None:  # it is shown out
            pass

    for index, wire in enumerate(workers):
        wire.send({"ping": {**PING, "count": 1}})
        assert heard(wire, "pong") == 1, index


def test_a_reader_that_takes_nothing_in_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(_wire, "_SEND_PATIENCE", 1e6)  # who waits for it, waits for ever
    door = Acceptor(_wire.listen("127.0.0.1:0"), TOKEN)
    ours, theirs = socket.socketpair()
    with contextlib.closing(door.selector), contextlib.closing(door), ours, theirs:
        visitor = _wire.Connection(Wire.__new__(Wire), "", trusted=True, reads=True)
        visitor.wire.socket = ours
        door.connections[ours] = visitor
        readers = watchdog.Readers(door)
        for number in range(50):
            readers.publish(lambda n=number: {"number": n, "text": "x" * 100_000}, at_once=True)
            assert len(visitor.unsent) < 110_000
        received, lines = b"", []
        theirs.setblocking(False)
        while visitor.unsent or b"\n" not in received[-1:]:
            readers.publish(dict)
            with contextlib.suppress(BlockingIOError):
                received += theirs.recv(1 << 20)
        lines = [json.loads(line)["status"] for line in received.splitlines()]

    numbers = [line["number"] for line in lines if line]
    assert numbers[0] == 0
    assert len(numbers) < 50
    assert numbers == sorted(set(numbers))


def test_there_are_only_so_many_readers():
    with hub(1) as address, contextlib.ExitStack() as stack:
        wires = [stack.enter_context(reader(address)) for _ in range(_wire.MOST_READERS + 2)]
        heard(wires[-1], "status")
        for wire in wires[:2]:
            while wire.receive_within(30) is not None:
                pass


def test_a_readers_proof_does_not_let_in_a_worker():
    with hub(1) as address, stranger(address) as sock:
        wire = Wire(sock)
        challenge = wire.receive_within(30)["challenge"]
        proof = _wire.proof(TOKEN, "reader", challenge, "n")
        wire.send({"role": "worker", "nonce": "n", "proof": proof})
        assert heard(wire, "refused") == "token"


def test_readers_do_not_keep_a_hub_alive():
    with hub(1) as address, reader(address) as wire:
        with worker(address, 0, 1) as a:
            heard(a, "go")
            a.send({"bye": PING})
            a.receive_within(30)
        while wire.receive_within(30) is not None:
            pass


@pytest.fixture(scope="module")
def run():
    with hub(2) as address, worker(address, 0, 2) as a, worker(address, 1, 2) as b:
        heard(a, "go")
        heard(b, "go")
        yield address, (a, b)


# Strangers.


def test_idle_strangers_do_not_keep_workers_out():
    with hub(2) as address, contextlib.ExitStack() as stack:
        for _ in range(3 * _wire.MOST_STRANGERS):
            stack.enter_context(stranger(address))
        a, b = (stack.enter_context(worker(address, i, 2)) for i in range(2))

        assert heard(a, "go")
        assert heard(b, "go")


def test_a_hub_without_file_descriptors_serves_its_workers():
    """With a limit that strangers reach before the number of them does."""
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40));"
        "from replicax._src.workers.hub import main; main()"
    )
    told = options(2)
    with _wire.listen(told.address) as listener:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    with process:
        process.stdin.write(json.dumps(asdict(told)).encode() + b"\n")
        process.stdin.flush()
        assert process.stdout.readline()
        with contextlib.ExitStack() as stack:
            a, b = (stack.enter_context(worker(told.address, i, 2)) for i in range(2))
            assert heard(a, "go")
            for _ in range(120):
                stack.enter_context(stranger(told.address))
            for _ in range(3):
                for wire in (a, b):
                    assert wire.send({"ping": PING})
                    assert heard(wire, "pong") == 1
                time.sleep(0.2)
        process.stdin.close()
        process.wait(30)

    assert process.returncode == 0


def test_a_stranger_that_says_nothing_is_shown_out_in_time(monkeypatch):
    monkeypatch.setattr(_wire, "PROVE_WITHIN", 0.2)
    with hub(2) as address, stranger(address) as sock:
        assert b"challenge" in sock.recv(1000)
        assert sock.recv(1000) == b""


def test_a_stranger_cannot_send_much():
    with hub(2) as address, stranger(address) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"x" * (2 * _wire.LONGEST_PROOF))
            while sock.recv(1000):
                pass
        with worker(address, 0, 2) as a, worker(address, 1, 2):
            assert heard(a, "go")


def test_those_who_wait_hear_of_one_with_a_wrong_token(monkeypatch):
    monkeypatch.setattr(_hub, "_REPORT_EVERY", 0.1)
    with hub(2) as address, worker(address, 0, 2) as a, stranger(address) as sock:
        Wire(sock).send({"nonce": "x", "proof": "y"})
        while "did not know the token" not in (text := heard(a, "waiting")):
            pass

        assert "A process at 127.0.0.1 did not know the token of this run" in text


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([math.inf, -1, 10**30, "\ud800"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
KEYS = ["join", "ping", "offer", "value", "withdraw", "raised", "progress", "bye", "nonce", "proof"]
KEYS += ["ready", "has", "completed", "cannot", "generation", "planned", "state", "goodbye"]
KEYS += ["waits", "newcomer", "no newcomers"]
MESSAGES = st.dictionaries(
    st.sampled_from(KEYS),
    JSON
    | st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ("index", "size", "pid", "versions", "count", "inside", "pace", "journal"), JSON
        ),
    ),
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(MESSAGES, max_size=4))
def test_no_message_of_a_trusted_one_ends_the_hub(served, messages):
    with trusted(served) as wire:
        for message in messages:
            wire.send(message)
    _still_serves(served)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_of_a_stranger_end_the_hub(served, data):
    with stranger(served) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(data + b"\n")
    _still_serves(served)


@settings(max_examples=60, deadline=None)
@given(st.lists(MESSAGES, max_size=4))
def test_no_message_of_a_worker_ends_the_hub(messages):
    with hub(2) as address, worker(address, 0, 2) as a, worker(address, 1, 2) as b:
        heard(b, "go")
        for message in messages:
            a.send(message)
        b.send({"ping": PING})
        assert heard(b, "pong") == 1


@pytest.fixture(scope="module")
def served():
    # The first refused worker would end this hub after half a minute.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_hub, "AFTER_REFUSAL", 3600.0)
        with hub(100_000, join_timeout=3600.0) as address:
            yield address


def _still_serves(address):
    with trusted(address) as wire:
        wire.send({"join": facts(0, 1)})
        assert "for a cluster of 1 workers" in heard(wire, "refused")


# The roll.


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        (facts(0, 3), "The index 0 is claimed twice"),
        (facts(0, 3), "under `if __name__ == '__main__':`"),
        (facts(1, 2), "was started for a cluster of 2 workers, and worker 0 for one of 3"),
        (facts(7, 3), "worker 7 (pid"),
        (facts(1, 3, versions={"jax": "2"}), "runs jax 2, and worker 0"),
    ],
)
def test_a_refusal_is_told_to_all_and_they_wait_only_a_little_longer(monkeypatch, other, fault):
    monkeypatch.setattr(_hub, "AFTER_REFUSAL", 0.5)
    with hub(3) as address, worker(address, 0, 3) as a, trusted(address) as b:
        b.send({"join": other})

        assert fault in heard(b, "refused")
        assert fault in heard(a, "waiting")
        final = heard(a, "refused")
        assert "2 of 3 workers did not join" in final
        assert f"Refused: {fault}" in final or fault in final


def test_a_roll_call_whose_starter_ends_is_over_for_all():
    told = options(2)
    process = HubProcess(told)
    with worker(told.address, 1, 2) as b, worker(told.address, 1, 2) as twin:
        heard(twin, "refused")  # so that the first has joined
        process.detach()
        text = heard(b, "refused")
    process.wait(30)

    assert "ended before all workers had joined: the test, which had started it, has ended" in text
    _wire.listen(told.address).close()


def test_an_address_that_another_process_holds_is_a_fault_before_the_hub_starts():
    told = options(2)
    with _wire.listen(told.address), pytest.raises(OSError, match="in use"):
        HubProcess(told)


def test_a_hub_that_ends_at_once_is_a_fault(monkeypatch):
    monkeypatch.setattr(join, "bare_python", lambda module: [sys.executable, "-c", "0"])
    assert HubProcess(options(2)).fault() == "its process ended at once"


@pytest.mark.parametrize("number", sorted(NOTICES))
def test_hub_and_keeper_outlive_signals_until_their_owner_ends_them(number):
    told = options(2)
    process = HubProcess(told)
    with worker(told.address, 0, 2) as a, worker(told.address, 1, 2) as b:
        go = heard(a, "go")
        heard(b, "go")
        pids = [go["hub_pid"], *_children(go["hub_pid"])]
        assert len(pids) == 2
        names = [Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0") for pid in pids]
        assert names[0] == f"replicax hub at {told.address}"
        assert names[1].startswith("replicax keeper of JAX's coordination service")
        for pid in pids:
            os.kill(pid, number)
        for wire in (a, b):
            wire.send({"offer": "after", "value": 1})
        assert [heard(wire, "answer") for wire in (a, b)] == ["after", "after"]
        threading.Thread(target=process.end).start()
        for wire in (a, b):
            text = heard(wire, "report")["text"]
            assert f"(pid {pids[0]}) has ended: the test, which had started it, ends it" in text
    process.wait(30)


def _children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def launcher(address, host):
    with stranger(address) as sock:
        wire = Wire(sock)
        prove(wire, TOKEN, address, role="launcher")
        wire.send({"launcher": host})
        yield wire


@pytest.mark.parametrize(
    ("other", "again", "why"),
    [
        ("again", True, ""),
        ("over", False, "the launcher of host 1 (b) has ended for good, with code 3"),
        ("lost", True, ""),  # it may be started again
        ("absent", False, "the launcher of host 1 (b) did not come"),
    ],
)
def test_launchers_are_told_what_all_of_them_do(other, again, why):
    with (
        hub(2, hosts=("a", "b")) as address,
        launcher(address, 0) as a,
        worker(address, 0, 2) as w,
    ):
        if other != "absent":
            with launcher(address, 1) as b:
                b.send({"ended": "worker 1 exited with code 3"})
                heard(w, "refused")  # so that the hub knows the second launcher, too
                if other != "lost":
                    b.send({"again": other == "again", "code": 3})
                a.send({"again": True, "code": 1})
                if other == "lost":
                    b.close()
                answer = a.receive_within(30)
        else:
            a.send({"again": True, "code": 1})
            answer = a.receive_within(30)

    assert answer == {"all": again, "why": why}


def test_a_connection_is_read_beyond_1024_open_files():
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1300:
        pytest.skip("this system allows fewer open files")
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        with socket.create_connection(server.getsockname()) as sock:
            assert sock.fileno() > 1024
            assert Wire(sock).receive_within(0.1) is None


def test_half_a_line_is_not_waited_for_longer_than_allowed():
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as sock:
        other, _ = server.accept()
        with other:
            other.sendall(b'{"half')
            assert Wire(sock).receive_within(0.2) is None


def test_the_programs_that_run_bare_need_no_jax():
    for module in ("hub", "sessions"):
        command = bare_python(f"replicax._src.workers.{module}")
        script = command[3].replace(").main()", ")")
        script += "print([m for m in ('jax', 'numpy') if m in sys.modules])"
        done = subprocess.run(
            [*command[:3], script, *command[4:]], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "[]\n", done.stderr


AUDITED = """
    import json, os, sys
    import replicax as rx
    from replicax._src.workers.reports import Report
    from tests.workers import test_hub as hubs

    forbidden = ("pickle.find_class", "exec", "compile", "marshal.loads", "import", "os.system",
                 "subprocess.Popen", "os.exec", "os.posix_spawn", "ctypes.dlopen")
    seen = set()
    evil = "__import__('os').system('true')"
    cluster = {"cluster": {"worker": ["a:1", "b:1"], evil: ["c:1"]}, "task": {"type": "worker"}}

    def note(event, args):
        if event in forbidden:
            seen.add((event, str(args)[:200]))

    def talk():
        with hubs.hub(2) as address, hubs.worker(address, 0, 2, host=evil) as a:
            with hubs.worker(address, 1, 2) as b:
                hubs.heard(b, "go")
                a.send({"ping": hubs.PING | {"disk": [evil, 1]}})
                hubs.heard(a, "pong")
                for wire in (a, b):
                    wire.send({"offer": "os.system", "value": {"__reduce__": [evil]}})
                hubs.heard(b, "answer")
                a.send({"raised": evil, "progress": hubs.PING})
                Report.from_message({"report": hubs.heard(b, "report")})
        os.environ["TF_CONFIG"] = json.dumps(cluster | {"task": {"type": "worker", "index": 0}})
        rx.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec().as_dict()

    talk()  # imports what the code needs, whatever is said
    sys.addaudithook(note)
    talk()
    print(sorted(seen))
"""


def test_what_comes_by_the_network_is_not_unpickled_evaluated_or_imported():
    done = run_fresh(AUDITED, PYTHONPATH=f"{SRC}:{ROOT}")

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "another program"])
def test_a_worker_tries_again_while_the_hub_is_silent(monkeypatch, is_busy):
    monkeypatch.setattr(join, "_ANSWER_PATIENCE", 0.3)
    monkeypatch.setattr(join, "_SILENCE", 60.0 if is_busy else 1.0)
    silent = []
    with _wire.listen("127.0.0.1:0") as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve():
            for _ in range(2):  # the challenge comes too late
                silent.append(listener.accept()[0])
            wire = Wire(listener.accept()[0])
            wire.send({"challenge": "c"})
            theirs = wire.receive_within(30)["nonce"]
            wire.send({"proof": _wire.proof(TOKEN, "hub", theirs, "c")})
            silent.append(wire.socket)

        told = SimpleNamespace(token=TOKEN, join_timeout=60.0, name_timeout=60.0)
        deadline = time.monotonic() + 60
        if is_busy:
            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            join._connect_and_prove(None, told, address, "", deadline).close()
            thread.join(30)
            assert len(silent) == 3
        else:  # nobody accepts
            with pytest.raises(RollCallError, match="is not worker 0 of this run"):
                join._connect_and_prove(None, told, address, "", deadline)
    for sock in silent:
        sock.close()
