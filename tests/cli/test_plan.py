import textwrap

import pytest

from tests.ahead.needs import needs_compiler
from tests.cli.test_preflight import replicax_command

SCRIPT = """
import argparse
import jax.numpy as jnp
import replicax as rx

parser = argparse.ArgumentParser()
parser.add_argument("--cores", type=int, default=1)
parser.add_argument("--twice", action="store_true")
options = parser.parse_args()
topology = rx.tpu.experimental.initialize_tpu_system()
assignment = rx.tpu.experimental.DeviceAssignment.build(
    topology, [1, 1, options.cores], num_replicas=8 // options.cores
)
strategy = rx.distribute.TPUStrategy(experimental_device_assignment=assignment)
with strategy.scope(), rx.tpu.LayoutMap({"weight": [1, options.cores]}).scope():
    weight = rx.Variable(jnp.zeros((256, 256)), name="weight")

def replica(x):
    y = x @ weight.read_value()
    y = y @ weight.read_value() if options.twice else y
    weight.assign_sub(rx.distribute.get_replica_context().all_reduce("SUM", x.T @ y))

@rx.function
def train_step(x):
    strategy.run(replica, args=(x,))

train_step(strategy.experimental_distribute_values_from_function(lambda _: jnp.ones((8, 256))))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


@needs_compiler
def test_logical_devices_and_options_of_a_script_are_varied(script):
    done = replicax_command(
        *("plan", script, "--fit", "v5e", "--global-batch", "64", "--most", "4"),
        *("--vary", "cores=1,2", "--vary", "twice"),
    )

    assert done.returncode == 0, done.stderr
    tried = [line for line in done.stdout.splitlines() if line.startswith("tried ")]
    ways = ("1", ""), ("1", " --twice"), ("2", ""), ("2", " --twice")
    expected = []
    for cores, twice in ways:
        each = "" if cores == "1" else ", 2 logical devices"
        if cores == "1":
            expected.append(f"tried v5e-1, mirrored, --cores 1{twice}")
        expected.append(f"tried v5e-4, mirrored{each}, --cores {cores}{twice}")
        if cores == "1":
            expected.append(f"tried v5e-4, sharded, --cores 1{twice}")
    assert tried == expected
    assert "The smallest that fits: v5e-1, variables mirrored, --cores 1." in done.stdout


def test_what_cannot_be_varied_is_refused_before_the_script_runs(script):
    done = replicax_command("plan", script, "--global-batch", "64", "--vary", "cores=")

    assert done.returncode == 2
    assert "--vary takes an option of the script" in done.stderr
