"""What strategies, values and datasets say of themselves to people.

Bridges to hand-written JAX: nothing is copied on the way.
"""

import io
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

import replicax as rx
from replicax._src.base.rendering import Sheet
from tests.replicas import mirrored, replica_id
from tests.tpu.nets import slice_of


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
    with pytest.raises(TypeError, match="has an unknown length: count its steps"):
        len(spread)
    assert spread.element_spec
    assert "2 replicas, elements PerReplicaSpec(" in repr(spread)


@pytest.mark.parametrize("rows", [0, 1, 7, 8])
def test_a_distributed_dataset_has_the_length_of_a_pass(rows):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    spread = strategy.experimental_distribute_dataset(rx.data.Dataset.range(rows).batch(2))

    assert len(spread) == len(list(spread))
    assert spread
    endless = strategy.experimental_distribute_dataset(rx.data.Dataset.range(2).batch(2).repeat())
    with pytest.raises(TypeError, match="is infinite"):
        len(endless)


def test_the_default_strategy_says_that_none_is_in_use():
    assert "no strategy is in use" in str(rx.distribute.get_strategy().describe())
    assert jax.devices()


ON_READ, SUM = rx.VariableSynchronization.ON_READ, rx.VariableAggregation.SUM


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.fixture(params=[1, 2, 4])
def strategy(request):
    return mirrored(request.param)


def test_shard_map_code_takes_per_replica_values_and_gives_them_back(strategy):
    count = strategy.num_replicas_in_sync
    value = rx.function(lambda: strategy.run(lambda: jnp.ones(3) * replica_id()))()
    doubled = jax.jit(
        jax.shard_map(
            lambda x: x * 2 + jax.lax.psum(x, "replica"),
            mesh=strategy.mesh,
            in_specs=PartitionSpec("replica"),
            out_specs=PartitionSpec("replica"),
        )
    )
    if count == 1:  # one replica's result is bare
        value = strategy.per_replica(value[None])

    back = strategy.per_replica(doubled(strategy.array(value)))
    total = rx.function(lambda x: strategy.reduce("SUM", x, axis=0))(back)

    assert float(total) == 3 * (2 + count) * sum(range(count))


def test_a_round_trip_copies_nothing(strategy):
    rows = jax.device_put(
        np.ones((strategy.num_replicas_in_sync, 4), np.float32),
        NamedSharding(strategy.mesh, PartitionSpec("replica")),
    )

    assert pointers(strategy.array(strategy.per_replica(rows))) == pointers(rows)


def test_a_variable_gives_its_own_array_which_later_steps_leave_alone(strategy):
    with strategy.scope():
        v = rx.Variable(jnp.arange(3.0))
    add = rx.function(lambda: v.assign_add(jnp.ones(3)))
    add()

    array = strategy.array(v)
    add()

    assert array.tolist() == [1, 2, 3]
    assert strategy.array(v).tolist() == [2, 3, 4]
    assert array.sharding.mesh == strategy.mesh
    assert float(jax.jit(jnp.sum)(array)) == 6


def test_an_on_read_variable_gives_a_row_for_each_replica():
    strategy = mirrored(2)
    with strategy.scope():
        v = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
    strategy.run(lambda: v.assign(replica_id()))

    assert strategy.array(v).tolist() == [0, 1]
    assert rx.function(lambda: strategy.array(v) * 2)().tolist() == [0, 2]


def test_what_is_not_a_distributed_value_is_refused_with_what_to_write():
    strategy = mirrored(2)

    with pytest.raises(TypeError, match=r"NamedSharding\(strategy\.mesh"):
        strategy.array(jnp.ones(2))
    with pytest.raises(ValueError, match=r"\(3,\).*2 replicas.*reshape"):
        strategy.per_replica(jnp.ones(3))


IMAGES = np.arange(2 * 8 * 8 * 3, dtype=np.float32).reshape(2, 8, 8, 3)


def factorisations(n, length):
    return [p for p in itertools.product(range(1, n + 1), repeat=length) if math.prod(p) == n]


@pytest.mark.parametrize("cores", [2, 4, 8])
def test_every_factorisation_of_the_logical_devices_can_be_had(cores):
    strategy = slice_of(cores, replicas=8 // cores)
    value = jnp.arange(512.0).reshape(8, 8, 8)

    for parts in factorisations(cores, 3):
        split = strategy.experimental_split_to_logical_devices(value, parts)

        shard = split.addressable_shards[0].data
        assert shard.shape == tuple(8 // n for n in parts)
        assert (np.asarray(split) == np.asarray(value)).all()


@pytest.mark.parametrize(("cores", "parts"), [(4, [1, 2, 2, 1]), (8, [1, 2, 4, 1])])
def test_the_compiled_program_works_on_parts(cores, parts):
    strategy = slice_of(cores, replicas=8 // cores)

    @rx.function
    def step(images):
        def replica(images):
            images = strategy.experimental_split_to_logical_devices(images, parts)
            return jnp.sin(images) * 2

        return strategy.run(replica, args=(images,))

    images = strategy.experimental_distribute_values_from_function(lambda _: IMAGES)
    text = step.get_concrete_function(images).as_text()
    result = strategy.experimental_local_results(step(images))[0]

    part = ",".join(str(size // n) for size, n in zip(IMAGES.shape, parts, strict=True))
    assert re.search(rf"f32\[(1,)?{part}\]\S* (sine|fusion)\(", text)
    assert not re.search(r"f32\[(1,)?2,8,8,3\]\S* sine\(", text)
    np.testing.assert_allclose(result, np.sin(IMAGES) * 2, rtol=1e-6)


def test_temporary_memory_of_a_device_falls_with_the_parts():
    sizes = {}
    for cores, parts in ((1, [1, 1]), (8, [8, 1])):
        strategy = slice_of(cores, replicas=1)

        @rx.function
        def step(x, strategy=strategy, parts=parts):
            def replica(x):
                x = strategy.experimental_split_to_logical_devices(x, parts)
                y = jnp.sort(jnp.sin(x), axis=1)  # a large value that must be kept
                return (y * jnp.cumsum(y, axis=1)).sum()

            return strategy.run(replica, args=(x,))

        concrete = step.get_concrete_function(rx.TensorSpec([512, 512]))
        lowered = concrete._program.lowered(concrete._arguments.arrays)
        sizes[cores] = lowered.compile().memory_analysis().temp_size_in_bytes

    assert sizes[8] < sizes[1] / 4


def test_annotations_in_cross_replica_context_of_a_function_change_no_number():
    strategy = slice_of(cores=8, replicas=1)

    @rx.function
    def step(x):
        x = strategy.experimental_split_to_logical_devices(x, [2, 4])
        x = strategy.experimental_assign_to_logical_device(x + 1, 3)
        return strategy.experimental_replicate_to_logical_devices(x * 2)

    x = jnp.arange(32.0).reshape(4, 8)
    np.testing.assert_array_equal(step(x), (np.asarray(x) + 1) * 2)


def test_gradients_pass_through_the_annotations():
    strategy = slice_of(cores=4, replicas=2)
    with strategy.scope():
        weight = rx.Variable(jnp.ones((4, 4)))

    def replica(x):
        def loss():
            y = strategy.experimental_split_to_logical_devices(x @ weight.read_value(), [1, 4])
            return strategy.experimental_replicate_to_logical_devices(y**2).sum()

        return rx.value_and_grad(loss, [weight])()[1][0]

    x = jnp.arange(8.0).reshape(2, 4)
    expected = 2 * x.T @ (x @ jnp.ones((4, 4)))
    for gradient in strategy.experimental_local_results(strategy.run(replica, args=(x,))):
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_with_one_logical_device_the_annotations_do_nothing():
    strategy = rx.distribute.TPUStrategy()
    x = jnp.ones((2, 2))

    assert strategy.experimental_split_to_logical_devices(x, [1, 1]) is x
    assert strategy.experimental_assign_to_logical_device(x, 0) is x


# The errors, in TensorFlow's order: rank, divisibility, product.


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([8], "needs 4, one for each axis"),
        ([1, 2, 4, 1, 1], "needs 4"),
        ([1, 3, 4, 1], "8 is not divisible by 3"),
        ([1, 1, 16, 1], "8 is not divisible by 16"),
        ([3, 3, 3, 3], "2 is not divisible by 3"),
        ([1, 2, 2, 1], "makes 4 parts.*equal to the 8 logical"),
        ([1, 1, 1, 1], "makes 1 parts"),
        ([1, 0, 8, 1], "positive whole numbers"),
        ([1, -2, -4, 1], "positive whole numbers"),
        ([1, 2.0, 4, 1], "positive whole numbers"),
        ([True, 2, 4, 1], "positive whole numbers"),
        (8, "positive whole numbers"),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["eager", "function", "replica"])
def test_dimensions_that_do_not_fit_are_refused(parts, message, where):
    strategy = slice_of(cores=8, replicas=1)

    def split(x):
        return strategy.experimental_split_to_logical_devices(x, parts)

    calls = {
        "eager": lambda: split(IMAGES),
        "function": lambda: rx.function(split)(IMAGES),
        "replica": lambda: strategy.run(split, args=(IMAGES,)),
    }
    with pytest.raises(ValueError, match=message):
        calls[where]()


@pytest.mark.parametrize("number", [-1, 2, 100, 0.5, "0", None])
def test_a_logical_device_that_is_not_there_is_refused(number):
    strategy = slice_of(cores=2, replicas=4)

    with pytest.raises(ValueError, match="numbered from 0 to 1"):
        strategy.experimental_assign_to_logical_device(jnp.ones(2), number)


def test_a_per_replica_value_is_annotated_inside_of_the_run():
    strategy = slice_of(cores=2, replicas=4)

    with pytest.raises(ValueError, match=r"inside the function that `strategy\.run` calls"):
        strategy.experimental_replicate_to_logical_devices(strategy.run(lambda: jnp.ones(2)))
