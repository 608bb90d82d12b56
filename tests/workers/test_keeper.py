from tests.fresh_process import run_fresh

STOPPED = """
import socket, time
from replicax.workers import _keeper

_keeper._LONGEST = 1.0
keeper = _keeper.Keeper("127.0.0.1", 1)
host, port = keeper.address.rsplit(":", 1)
stopped = socket.create_connection((host, int(port)))  # a worker that does nothing any more
time.sleep(0.5)
keeper.end()
print("ended while it was connected")
"""


def test_the_keeper_does_not_wait_for_ever_for_a_worker_that_is_stopped():
    assert "ended while it was connected" in run_fresh(STOPPED).stdout
