import textwrap

import pytest

from tests.cli.test_preflight import replicax_command
from tests.preflight.needs import needs_compiler

SCRIPT = """
import argparse
import jax.numpy as jnp
import replicax as rx

parser = argparse.ArgumentParser()
parser.add_argument("--cores", type=int, default=1)
options = parser.parse_args()
topology = rx.tpu.experimental.initialize_tpu_system()
assignment = rx.tpu.experimental.DeviceAssignment.build(
    topology, [1, 1, options.cores], num_replicas=8 // options.cores
)
strategy = rx.distribute.TPUStrategy(experimental_device_assignment=assignment)
with strategy.scope(), rx.tpu.LayoutMap({"weight": [1, options.cores]}).scope():
    weight = rx.Variable(jnp.zeros((256, 256)), name="weight")

def replica(x):
    gradient = x.T @ (x @ weight.read_value())
    weight.assign_sub(rx.distribute.get_replica_context().all_reduce("SUM", gradient))

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
def test_logical_devices_are_varied_where_the_script_offers_them(script):
    done = replicax_command(
        *("plan", script, "--fit", "v5e", "--global-batch", "64", "--most", "4"),
        *("--vary", "cores=1,2"),
    )

    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("tried ")] == [
        "tried v5e-1, mirrored, --cores 1",
        "tried v5e-4, mirrored, --cores 1",
        "tried v5e-4, sharded, --cores 1",
        "tried v5e-4, mirrored, 2 logical devices, --cores 2",
    ]
    assert "The smallest that fits: v5e-1, variables mirrored, --cores 1." in done.stdout


def test_what_cannot_be_varied_is_refused_before_the_script_runs(script):
    done = replicax_command("plan", script, "--global-batch", "64", "--vary", "cores=")

    assert done.returncode == 2
    assert "--vary takes an option of the script" in done.stderr
