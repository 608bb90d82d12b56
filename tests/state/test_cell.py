"""Where a variable's value lives: snapshots, donation, memory of its own."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.fresh_process import run_fresh

ON_READ = rx.VariableSynchronization.ON_READ
SUM = rx.VariableAggregation.SUM


@pytest.fixture(params=["plain", "mirrored", "on_read"])
def v(request, two):
    """A variable of three numbers, of each kind of storage."""
    if request.param == "plain":
        return rx.Variable(jnp.zeros(3))
    with two.scope():
        if request.param == "mirrored":
            return rx.Variable(jnp.zeros(3))
        return rx.Variable(jnp.zeros(3), synchronization=ON_READ, aggregation=SUM)


@pytest.fixture
def step(v):
    """A compiled call that changes every copy, and consumes what the one before left."""
    if len(v.components) == 1 or not v.cell.per_replica:
        step = rx.function(lambda: bump(v))
    else:
        strategy = v.distribute_strategy
        step = rx.function(lambda: strategy.run(lambda: bump(v)))
    step()
    return step


def bump(v):
    v.assign_add(jnp.ones(3))


HOLDERS = {
    "read_value": lambda v: v.read_value(),
    "value": lambda v: v.value(),
    "numpy": lambda v: v.numpy(),
    "asarray": np.asarray,
    "jnp_asarray": jnp.asarray,
    "view": lambda v: np.asarray(v.read_value()),
    "component": lambda v: v.components[-1].read_value(),
    "component_view": lambda v: np.asarray(v.components[-1].read_value()),
    "slice": lambda v: v[:],
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_was_read_does_not_change_with_later_steps(v, step, hold):
    held = hold(v)
    before = np.array(held)

    for _ in range(3):
        step()

    np.testing.assert_array_equal(np.asarray(held), before)
    assert not np.array_equal(v.numpy(), before)


def test_a_per_replica_value_of_what_was_read_does_not_change(two):
    with two.scope():
        v = rx.Variable(jnp.zeros(3))
    step = rx.function(lambda: two.run(lambda: bump(v)))
    step()

    eager = two.run(lambda: v.read_value())
    compiled = rx.function(lambda: two.run(lambda: v.read_value()))()
    step()
    step()

    for held in (eager, compiled):
        assert [x.tolist() for x in two.experimental_local_results(held)] == [[1.0] * 3] * 2
    assert v.numpy().tolist() == [3.0] * 3


def test_a_value_returned_by_the_step_that_wrote_it_does_not_change(two):
    with two.scope():
        mirrored = rx.Variable(jnp.zeros(3))
    plain = rx.Variable(jnp.zeros(3))

    @rx.function
    def step():
        bump(mirrored)
        bump(plain)
        return mirrored.read_value(), plain.read_value(), plain

    first = step()
    step()
    step()

    assert [x.tolist() for x in first] == [[1.0] * 3] * 3


@pytest.mark.parametrize("v", ["plain", "mirrored"], indirect=True)
def test_an_argument_that_was_assigned_is_not_consumed(v):
    x = jnp.arange(3.0)
    rx.function(lambda x: store(v, x))(x)
    step = rx.function(lambda: bump(v))

    step()
    step()

    assert x.tolist() == [0.0, 1.0, 2.0]
    assert v.numpy().tolist() == [2.0, 3.0, 4.0]


def store(v, x):
    v.assign(x)


def test_changing_the_numpy_array_afterwards_changes_no_variable(v):
    # JAX may use aligned NumPy memory in place.
    memory = np.zeros(3 * 1024 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    source = memory[start : start + 3]

    v.assign(source)
    source[:] = 7

    assert v.numpy().tolist() == [0.0] * 3


def test_the_memory_in_use_does_not_grow_with_the_steps(v, step):
    def live():
        gc.collect()
        return len(jax.live_arrays())

    for _ in range(3):
        step()
    before = live()
    for _ in range(200):
        step()

    assert live() <= before


def test_a_step_uses_the_memory_of_the_one_before(v, step):
    old = v.cell.array()

    step()

    assert old.is_deleted()


def test_the_first_step_uses_the_memory_that_a_mirrored_variable_was_made_in(two):
    with two.scope():
        v = rx.Variable(np.zeros(3, np.float32))
    first = v.cell.array()
    rx.function(lambda: bump(v))()
    assigned = v.assign(jnp.full(3, 5.0)).cell.array()
    rx.function(lambda: bump(v))()

    assert first.is_deleted()
    assert assigned.is_deleted()
    assert v.numpy().tolist() == [6, 6, 6]


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_was_read_of_a_new_value_does_not_change_with_the_next_step(v, step, hold):
    given = jnp.full(3, 7.0)
    v.assign(given)
    held = hold(v)
    before = np.array(held)

    step()

    assert np.array_equal(held, before)
    assert given.tolist() == [7, 7, 7]


def test_what_was_read_outlives_an_assignment_that_is_undone(two):
    with two.scope():
        v = rx.Variable(jnp.zeros(3))
    held = v.components[0].read_value()

    def replica():
        v.assign(jnp.ones(3))
        raise KeyError

    with pytest.raises(KeyError):
        two.run(replica)
    rx.function(lambda: bump(v))()

    assert held.tolist() == [0, 0, 0]
    assert v.numpy().tolist() == [1, 1, 1]


def test_a_value_that_somebody_holds_is_copied_once_and_then_consumed_again(v, step):
    held = v.read_value()
    step()
    second = v.cell.array()
    step()

    assert second.is_deleted()
    assert held.shape == (3,)


def test_one_array_in_two_variables_does_not_crash_the_process():
    # Donating one buffer twice is a segmentation fault.
    result = run_fresh(
        """
        import jax, jax.numpy as jnp, numpy as np
        import replicax as rx

        strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            a, b, c = (rx.Variable(jnp.zeros(1000)) for _ in range(3))
        plain = [rx.Variable(jnp.zeros(1000)) for _ in range(2)]

        @rx.function
        def step():
            for v in (a, b, c, *plain):
                v.assign_add(jnp.ones(1000))

        @rx.function
        def swap():
            x = a.read_value()
            a.assign(b.read_value())
            b.assign(x)
            c.assign(x)

        x = jnp.arange(1000.0)
        placed = jax.device_put(x, strategy.topology.mirrored)
        for source in (x, placed, np.asarray(x)):
            for v in (a, b, c, *plain):
                v.assign(source)
            step()
            step()
        a.assign(b)
        c.assign(a.components[1].read_value())
        plain[0].assign(plain[1])
        step()
        for _ in range(3):
            swap()
            step()
        jax.block_until_ready([v.cell.value for v in (a, b, c, *plain)])
        print(*(float(v.read_value()[1]) for v in (a, b, c, *plain)), float(x[1]), float(placed[1]))
        """,
        REPLICAX_CPU_DEVICES="2",
    )

    assert result.returncode == 0, result.stderr
    assert [float(x) for x in result.stdout.split()] == [7.0, 7.0, 7.0, 7.0, 7.0, 1.0, 1.0]


def test_a_shard_of_a_mirrored_variable_survives_its_steps_in_eager_replicas():
    result = run_fresh(
        """
        import jax.numpy as jnp
        import replicax as rx

        strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            v = rx.Variable(jnp.zeros(1000), aggregation=rx.VariableAggregation.MEAN)

        def bump():
            v.assign_add(jnp.ones(1000))

        step = rx.function(lambda: strategy.run(bump))
        held = []
        for _ in range(5):
            step()
            held.append(strategy.run(lambda: v.read_value()))
            strategy.run(bump)
        print(*(float(h.values[1][0]) for h in held))
        """,
        REPLICAX_CPU_DEVICES="2",
    )

    assert result.returncode == 0, result.stderr
    assert [float(x) for x in result.stdout.split()] == [1.0, 3.0, 5.0, 7.0, 9.0]


def test_plain_variables_that_two_strategies_used_meet_in_one_function(two):
    other = rx.distribute.MirroredStrategy(["CPU:2", "CPU:3"])
    a, b = rx.Variable(1.0), rx.Variable(2.0)
    rx.function(lambda: two.run(lambda: store(a, a + 1)))()
    rx.function(lambda: other.run(lambda: store(b, b + 1)))()

    total = rx.function(lambda: a + b)()

    assert (float(total), float(a * b)) == (5.0, 6.0)


def test_plain_variables_assigned_from_two_devices_meet_in_one_function():
    a, b = rx.Variable(1.0), rx.Variable(2.0)
    a.assign(jax.device_put(jnp.float32(3), jax.devices()[1]))
    b.assign(jax.device_put(jnp.float32(4), jax.devices()[2]))

    assert (float(a + b), float(rx.function(lambda: a + b)())) == (7.0, 7.0)


def test_random_keys_can_be_variables(two, mode):
    with two.scope():
        v = rx.Variable(jax.random.key(3))

    def step():
        v.assign(jax.random.split(v.read_value())[0])

    mode(lambda: two.run(step))()

    wanted = jax.random.key_data(jax.random.split(jax.random.key(3))[0])
    assert [jax.random.key_data(c.read_value()).tolist() for c in v.components] == [
        wanted.tolist()
    ] * 2
    rx.debug.check_in_sync([v])
    assert "key" in repr(v)
