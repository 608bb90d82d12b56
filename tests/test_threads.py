import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

ENDS = """
import sys, threading, time
from replicax._src.base.threads import new_thread

told = threading.Event()

def work():
    told.wait()
    time.sleep(0.3)
    sys.stdout.write("ended\\n")

new_thread(work, name="t", stop=told.set).start()
"""

FEEDS = """
import os, sys, time
import jax, numpy as np
from replicax._src.input.feed import Prefetch

class Slow:  # what a thread lets go of as it ends: JAX takes its time, without Python's lock
    def __init__(self):
        self.array = jax.device_put(np.zeros(4))
    def __del__(self):
        time.sleep(0.5)
        self.array.block_until_ready()
        os.write(1, b"let go\\n")

def elements():
    while True:
        yield Slow()

prefetch = Prefetch(elements, 1)
while prefetch._room.qsize():
    time.sleep(0.01)
time.sleep(0.1)  # the thread has a second element, and waits for room
del prefetch  # the owner is gone, its thread is not yet
"""


def run(program):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_the_end_of_the_program_tells_a_thread_and_waits_for_it():
    assert run(ENDS) == (0, "ended\n", "")


def test_a_feeding_thread_whose_owner_is_gone_ends_before_python_does():
    code, out, _ = run(FEEDS)

    assert code == 0
    assert out == "let go\n" * 2  # the element in the queue, and the one in the thread


ITERATES = """
import sys
import replicax as rx
iterator = iter(rx.data.Dataset.range(9).prefetch(2))
next(iterator)
sys.modules["kept"] = type("Kept", (), {"iterator": iterator})  # until modules are emptied
"""


def test_an_iterator_that_lives_until_the_end_of_python_says_nothing():
    assert run(ITERATES) == (0, "", "")
