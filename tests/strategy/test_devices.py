"""What strategies, values and datasets say of themselves to people."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import replicax as rx
from replicax._show import Sheet


def test_a_tpu_strategy_names_its_logical_devices_and_mesh():
    topology = rx.tpu.experimental.initialize_tpu_system()
    pairs = rx.tpu.experimental.DeviceAssignment.build(topology, [1, 1, 2], num_replicas=4)
    text = str(rx.distribute.experimental.TPUStrategy(device_assignment=pairs).describe())

    assert "4 in sync, of 2 logical devices each" in text
    assert "replica=4, l0=2" in text
    assert "TPU:" in text


def test_many_replicas_are_cut_short_with_their_number():
    rows = tuple((str(i), "CPU:0") for i in range(1000))
    text = str(Sheet("Strategy", (), ("replica", "devices"), rows))

    assert "and 950 rows more" in text
    assert len(text.splitlines()) < 60


def test_rich_draws_the_description_and_a_notebook_gets_a_table():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"], variable_policy="sharded")
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=80).print(strategy.describe())

    assert "\x1b[" in out.getvalue()
    assert "<td>2 in sync</td>" in strategy._repr_html_()
    assert "sharded" in strategy._repr_html_()


@pytest.mark.parametrize("size", [3, 100_000])
def test_only_small_arrays_are_looked_at_for_a_notebook(size):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    value = rx.function(lambda: strategy.run(lambda: jnp.ones(size) * 7))()

    shown = value._repr_html_()

    assert ("[7., 7., 7.]" in shown) is (size == 3)
    assert f"({size},)" in shown
    if size > 3:
        assert all(v._npy_value is None for v in value.values)


@pytest.mark.parametrize(
    "value",
    [
        rx.distribute.PerReplica(["<b>", {"k": "<i>" * 1000}]),
        rx.distribute.PerReplica([np.array(["<u>"]), None]),
    ],
    ids=["text", "array of text"],
)
def test_what_users_put_into_a_value_is_escaped_and_cut(value):
    shown = value._repr_html_()

    assert not any(tag in shown for tag in ('<b>"', "<i>", "<u>"))
    assert len(shown) < 2000


def test_inside_compiled_code_a_value_shows_that_it_is_traced():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    seen = []

    def merge(_, x):
        seen.append(x._repr_html_())
        return x

    def step(x):
        return rx.distribute.get_replica_context().merge_call(merge, args=(x,))

    rx.function(lambda: strategy.run(step, args=(jnp.ones(2),)))()

    assert "traced" in seen[0]


def test_a_distributed_dataset_says_what_is_known_without_reading_it():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def never():
        raise AssertionError("read")
        yield 1

    dataset = rx.data.Dataset.from_generator(never, output_signature=rx.TensorSpec((2,), "float32"))
    spread = strategy.experimental_distribute_dataset(dataset)

    assert repr(spread) == "<DistributedDataset of an unknown number of steps, 2 replicas>"
    assert "CPU:0, CPU:1" in spread._repr_html_()


def test_the_default_strategy_says_that_none_is_in_use():
    assert "no strategy is in use" in str(rx.distribute.get_strategy().describe())
    assert jax.devices()
