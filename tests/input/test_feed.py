import subprocess
import sys

PROGRAM = """
import os
os.environ["REPLICAX_CPU_DEVICES"] = "2"
import sys, time
import numpy as np
import replicax as rx
strategy = rx.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
dataset = rx.data.Dataset.range(10**6).map(lambda x: np.full(20_000, x)).batch(8)
iterator = iter(strategy.experimental_distribute_dataset(dataset))
for _ in range(3):
    next(iterator)
time.sleep({pause})
sys.exit(3)
"""


def test_a_program_that_ends_while_its_data_are_fed_ends_with_its_own_code():
    """A feeding thread that came back from JAX after Python was gone aborted the process."""
    pauses = [0.0, 0.002, 0.005, 0.01]
    programs = [subprocess.Popen([sys.executable, "-c", PROGRAM.format(pause=p)]) for p in pauses]
    assert [p.wait(timeout=120) for p in programs] == [3] * len(pauses)
