from tests.fresh_process import run_fresh

STOPPED = """
import socket, time
from replicax._src.workers import keeper as _keeper

_keeper._LONGEST = 1.0
keeper = _keeper.Keeper("127.0.0.1", 1)
host, port = keeper.address.rsplit(":", 1)
stopped = socket.create_connection((host, int(port)))  # a worker that does nothing any more
time.sleep(0.5)
keeper.end()
print("ended while it was connected")
"""


def test_the_keeper_does_not_wait_forever_for_a_worker_that_is_stopped():
    assert "ended while it was connected" in run_fresh(STOPPED).stdout


DEAD = """
import os, socket, subprocess, sys, time
from replicax._src.workers import keeper as _keeper, sockets as _sockets

# The network is down: what the system knows of a connection's end never comes. (The service itself
# would close one that says nothing after a minute.)
_sockets.connections = lambda port: 1
worker = subprocess.Popen(["sleep", "600"])
keeper = _keeper.Keeper("127.0.0.1", 1)
keeper.watch([{"pid": worker.pid, "host": socket.gethostname()}])
time.sleep(0.5)
os.waitpid(keeper.pid, os.WNOHANG) == (0, 0) or sys.exit("it did not wait for the worker")
worker.kill()
worker.wait()
keeper.end()
print("ended without its worker")
"""


def test_the_keeper_does_not_wait_for_the_connection_of_a_worker_that_is_dead():
    assert "ended without its worker" in run_fresh(DEAD).stdout


SLOW = """
import socket, time
from replicax._src.workers import keeper as _keeper, wire as _wire

start = _keeper._start_service
_keeper._start_service = lambda *given: time.sleep(2.5) or start(*given)  # a busy machine
server = socket.create_server(("127.0.0.1", 0))
far = socket.create_connection(server.getsockname())
near, _ = server.accept()
acceptor = _wire.Acceptor(server, "token")
acceptor.connections[near] = _wire.Connection(_wire.Wire(near), "")
acceptor.connections[near].index = 0
keeper = _keeper.Keeper("127.0.0.1", 1, meanwhile=acceptor.greet)
print(bool(keeper.address), _wire.Wire(far).receive_within(0))
keeper.end()
"""


def test_workers_hear_from_the_hub_while_the_service_starts():
    result = run_fresh(SLOW)

    assert result.stdout == "True {'pong': 0}\n", result.stderr


PORT = """
import socket
from replicax._src.workers import keeper as _keeper, wire as _wire

(port,) = _wire.free_ports(1)
keeper = _keeper.Keeper("10.9.8.7", 1, bind="127.0.0.1", port=port)
socket.create_connection(("127.0.0.1", port)).close()
taken = _keeper.Keeper("127.0.0.1", 1, port=port)
print(keeper.address == f"10.9.8.7:{port}", [keeper.fault, taken.address], taken.fault)
keeper.end()
"""


def test_the_service_takes_the_port_it_is_given_or_says_why_not():
    result = run_fresh(PORT)

    assert result.stdout == "True ['', ''] [Errno 98] Address already in use\n", result.stderr
