import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.tpu.nets import slice_of

LAYOUTS = rx.tpu.LayoutMap({"kernel$": [1, 4], "table": [2, 1]})


def part(variable):
    return variable.read_value().addressable_shards[0].data.shape


@pytest.fixture
def strategy():
    return slice_of(cores=4, replicas=2)


def test_by_default_every_logical_device_has_the_whole(strategy):
    with strategy.scope():
        variable = rx.Variable(jnp.ones((4, 8)))

    held = variable.cell.value
    assert [s.data.shape for s in held.addressable_shards] == [(4, 8)] * 8


def test_a_variable_made_of_a_split_value_lies_in_the_same_parts(strategy):
    with strategy.scope():
        value = strategy.experimental_split_to_logical_devices(jnp.ones((4, 8)), [2, 2])
        variable = rx.Variable(value)

    assert part(variable) == (2, 4)


def test_a_variable_can_be_laid_out_after_it_was_made(strategy):
    with strategy.scope():
        variable = rx.Variable(jnp.arange(32.0).reshape(4, 8))

    same = strategy.experimental_split_to_logical_devices(variable, [1, 4])

    assert same is variable
    assert part(variable) == (4, 2)
    np.testing.assert_array_equal(variable, np.arange(32.0).reshape(4, 8))
    strategy.experimental_replicate_to_logical_devices(variable)
    assert variable.read_value().shape == (4, 8)


def test_a_layout_map_finds_variables_by_name(strategy):
    with strategy.scope(), LAYOUTS.scope():
        kernel = rx.Variable(jnp.ones((4, 8)), name="dense/kernel")
        table = rx.Variable(jnp.ones((4, 8)), name="table_0")
        bias = rx.Variable(jnp.ones(8), name="dense/bias")

    assert part(kernel) == (4, 2)
    assert part(table) == (2, 8)  # two parts, each on two of the four devices
    assert bias.cell.value.is_fully_replicated


def test_the_state_of_an_optimizer_follows_its_variable(strategy):
    with strategy.scope(), LAYOUTS.scope():
        kernel = rx.Variable(jnp.ones((4, 8)), name="dense/kernel")
        momentum = rx.Variable(jnp.zeros_like(kernel))
        with strategy.extended.colocate_vars_with(kernel):
            slot = rx.Variable(lambda: jnp.zeros((4, 8)))
            count = rx.Variable(0)

    assert part(momentum) == part(slot) == (4, 2)
    assert count.cell.value.is_fully_replicated


def test_memory_of_a_device_is_its_part(strategy):
    with strategy.scope(), LAYOUTS.scope():
        kernel = rx.Variable(jnp.ones((256, 256)), name="kernel")

    @rx.function
    def step(x):
        def replica(x):
            kernel.assign_add(jnp.outer(x, x))
            return (x @ kernel.read_value()).sum()

        return strategy.run(replica, args=(x,))

    concrete = step.get_concrete_function(jnp.ones(256))
    memory = concrete._program.lowered(concrete._arguments.arrays).compile().memory_analysis()
    whole = 256 * 256 * 4
    assert whole / 4 <= memory.argument_size_in_bytes < whole / 4 + 4096
    step(jnp.ones(256))
    assert [s.data.nbytes for s in kernel.cell.value.addressable_shards] == [whole // 4] * 8


def test_assignments_keep_the_layout(strategy):
    with strategy.scope(), LAYOUTS.scope():
        kernel = rx.Variable(jnp.zeros((4, 8)), name="kernel")
    ones = np.ones((4, 8), np.float32)

    kernel.assign(ones)
    assert part(kernel) == (4, 2)
    rx.function(lambda: kernel.assign_add(ones))()
    assert part(kernel) == (4, 2)
    strategy.run(lambda: kernel.assign(kernel * 3))
    assert part(kernel) == (4, 2)
    np.testing.assert_array_equal(kernel, 6 * ones)


def test_copies_of_a_split_variable_can_be_looked_at_and_written(strategy):
    with strategy.scope(), LAYOUTS.scope():
        kernel = rx.Variable(jnp.zeros((4, 8)), name="kernel")

    first, second = strategy.experimental_local_results(kernel)
    np.testing.assert_array_equal(second, np.zeros((4, 8)))
    rx.debug.check_in_sync([kernel])
    second.assign(jnp.ones((4, 8)))

    np.testing.assert_array_equal(first, np.zeros((4, 8)))
    np.testing.assert_array_equal(second, np.ones((4, 8)))
    with pytest.raises(ValueError, match="differs between replicas"):
        rx.debug.check_in_sync([kernel])


def test_split_variables_meet_other_arrays(strategy):
    with strategy.scope(), LAYOUTS.scope():
        kernel = rx.Variable(jnp.ones((4, 8)), name="kernel")
    with rx.device("CPU:3"):
        other = jnp.ones((4, 8))

    np.testing.assert_array_equal(kernel + other, np.full((4, 8), 2.0))
    np.testing.assert_array_equal(kernel.numpy() + np.asarray(other), np.full((4, 8), 2.0))


def test_one_replica_of_eight_devices_splits_variables_too():
    strategy = slice_of(cores=8, replicas=1)
    with strategy.scope(), rx.tpu.LayoutMap({"kernel": [2, 4]}).scope():
        kernel = rx.Variable(jnp.ones((4, 8)), name="kernel")

    strategy.run(lambda: kernel.assign_add(jnp.ones((4, 8))))

    assert part(kernel) == (2, 2)
    np.testing.assert_array_equal(kernel, np.full((4, 8), 2.0))


def test_a_layout_means_nothing_to_strategies_without_logical_devices():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope(), LAYOUTS.scope():
        kernel = rx.Variable(jnp.ones((4, 8)), name="kernel")

    assert kernel.cell.value.is_fully_replicated


# What is refused.


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([4], "needs 2, one for each axis"),
        ([1, 3], "8 is not divisible by 3"),
        ([1, 8], "a divisor of the 4"),
        ([0, 4], "positive whole numbers"),
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_names_the_variable(strategy, parts, message):
    with (
        strategy.scope(),
        rx.tpu.LayoutMap({"kernel": parts}).scope(),
        pytest.raises(ValueError, match=message),
    ):
        rx.Variable(jnp.ones((4, 8)), name="dense/kernel")


def test_a_name_that_several_patterns_match_is_refused():
    layouts = rx.tpu.LayoutMap({"dense": [1, 4], "kernel": [4, 1], "the kernel": [2, 2]})

    with pytest.raises(ValueError, match=r"matches several patterns.*'dense', 'kernel'"):
        layouts.find("dense/kernel")
    assert layouts.find("the kernel") == (2, 2)
    assert layouts.find("bias") is None


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(ValueError, match="is not a valid pattern"):
        rx.tpu.LayoutMap({"(": [1]})


def test_variables_of_their_own_on_each_replica_have_no_layout(strategy):
    with strategy.scope(), LAYOUTS.scope():
        own = rx.Variable(
            jnp.ones((4, 8)), name="kernel", synchronization=rx.VariableSynchronization.ON_READ
        )

    with pytest.raises(ValueError, match="has no layout"):
        strategy.experimental_split_to_logical_devices(own, [1, 4])


def test_a_variable_of_nobody_has_no_layout(strategy):
    with pytest.raises(ValueError, match="made outside of its scope"):
        strategy.experimental_split_to_logical_devices(rx.Variable(jnp.ones((4, 8))), [1, 4])


def test_a_layout_map_is_a_mapping():
    layouts = rx.tpu.LayoutMap({"a": [1, 2]})
    layouts["b"] = [2, 1]
    del layouts["a"]

    assert dict(layouts) == {"b": (2, 1)}
    assert len(layouts) == 1


def test_a_planned_variable_takes_no_memory_and_has_no_value(strategy):
    with strategy.scope(), rx.tpu.planning(), LAYOUTS.scope():
        kernel = rx.Variable(lambda: jnp.zeros((1 << 20, 1 << 20)), name="kernel")

    assert kernel.shape == (1 << 20, 1 << 20)
    assert isinstance(kernel.cell.value, jax.ShapeDtypeStruct)
    for look in (kernel.read_value, kernel.numpy, lambda: kernel + 1):
        with pytest.raises(ValueError, match="made while planning"):
            look()


def test_a_planned_variable_of_one_element_has_a_value(strategy):
    with strategy.scope(), rx.tpu.planning():
        steps = rx.Variable(7)

    assert int(steps.assign_add(1).numpy()) == 8
