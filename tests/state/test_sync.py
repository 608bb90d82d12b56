"""Are all copies still equal? Asked by hand, and after every call."""

import gc

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._errors import DivergenceError
from tests.fresh_process import run_fresh


@pytest.fixture
def v(two):
    with two.scope():
        return rx.Variable(jnp.arange(6.0).reshape(2, 3), name="weight")


def test_equal_copies_pass(v):
    rx.debug.check_in_sync([v])


@pytest.mark.parametrize(
    ("change", "entries", "index", "theirs"),
    [
        (lambda x: x.at[1, 2].set(9.0), 1, r"\(1, 2\)", "9.0"),
        (lambda x: x + 1, 6, r"\(0, 0\)", "1.0"),
        (lambda x: x.at[0, 1].set(jnp.nan), 1, r"\(0, 1\)", "nan"),
        (lambda x: x.at[0, 0].set(-0.0), 1, r"\(0, 0\)", "-0.0"),
    ],
    ids=["one", "all", "nan", "sign of zero"],
)
def test_the_first_difference_is_named(v, change, entries, index, theirs):
    v.components[1].assign(change(v.read_value()))

    with pytest.raises(
        DivergenceError,
        match=rf"'weight' differs.*after step 7: {entries} of 6.*index {index}.*has {theirs}\. ",
    ):
        rx.debug.check_in_sync([v], step=7)


def test_nan_on_all_copies_is_in_sync(v):
    v.assign(jnp.full((2, 3), jnp.nan))

    rx.debug.check_in_sync([v])


def test_a_scalar_needs_no_index(two):
    with two.scope():
        v = rx.Variable(1.0, dtype=jnp.bfloat16)
    v.components[1].assign(2.0)

    with pytest.raises(DivergenceError, match=r"first: replica 0 has 1\.0, replica 1 has 2\.0"):
        rx.debug.check_in_sync([v])


def test_all_living_variables_are_checked_by_default(v):
    gc.collect()
    rx.debug.check_in_sync()
    v.components[1].assign_add(jnp.ones((2, 3)))

    with pytest.raises(DivergenceError, match="'weight'"):
        rx.debug.check_in_sync()


def test_variables_that_are_gone_are_not_checked(two):
    with two.scope():
        gone = rx.Variable(1.0)
    gone.components[1].assign(2.0)
    del gone
    gc.collect()

    rx.debug.check_in_sync()


def test_copies_of_an_on_read_variable_may_differ(two):
    with two.scope():
        v = rx.Variable(0.0, synchronization=rx.VariableSynchronization.ON_READ)
    v.components[1].assign(2.0)

    rx.debug.check_in_sync([v])


def test_a_copy_stands_for_its_variable(v):
    v.components[1].assign(np.zeros((2, 3), np.float32))

    with pytest.raises(DivergenceError):
        rx.debug.check_in_sync([v.components[0]])


_PROGRAM = """
    import jax.numpy as jnp
    import replicax as rx

    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = rx.Variable(1.0, name="weight")
        w = rx.Variable(1.0, name="bias")

    @rx.function
    def train_step():
        v.assign_add(1.0)

    train_step()
    train_step()
    v.components[1].assign(7.0)
    train_step()
    print("not noticed")
"""


def test_the_environment_variable_checks_after_every_call():
    result = run_fresh(_PROGRAM, REPLICAX_CPU_DEVICES="2", REPLICAX_CHECK_SYNC="1")

    assert result.returncode == 1
    assert "'weight' differs between replicas after call 3 of train_step" in result.stderr
    assert "replica 0 has 4.0, replica 1 has 8.0" in result.stderr


def test_set_to_zero_it_checks_nothing():
    result = run_fresh(_PROGRAM, REPLICAX_CPU_DEVICES="2", REPLICAX_CHECK_SYNC="0")

    assert (result.returncode, result.stdout.split()) == (0, ["not", "noticed"]), result.stderr


_CARRIED = """
    import jax
    import jax.numpy as jnp
    import replicax as rx

    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rows = strategy.per_replica(jnp.array([[1.0, 2.0], [3.0, 4.0]]))

    @rx.function
    def train_step(params, x):
        def replica_step(params, x):
            gradient = jax.grad(lambda p: jnp.sum(p["w"] * x))(params)
            {gradient}
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        return strategy.run(replica_step, args=(params, x))

    params = {{"w": jnp.ones(2)}}
    for step in range(4):
        params = train_step(params, rows)
    print([f"{{w:.1f}}" for w in params["w"].values[1]])
"""


def test_functional_state_that_drifts_apart_is_found():
    program = _CARRIED.format(gradient="pass")
    result = run_fresh(program, REPLICAX_CPU_DEVICES="2", REPLICAX_CHECK_SYNC="1")

    assert result.returncode == 1
    assert "argument 'params'['w'] of train_step was the same on all replicas" in result.stderr
    assert "2 of 2 entries, first at index (0,)" in result.stderr
    assert "all_reduce" in result.stderr


def test_functional_state_of_reduced_gradients_passes():
    reduced = 'gradient = rx.distribute.get_replica_context().all_reduce("SUM", gradient)'
    program = _CARRIED.format(gradient=reduced)
    result = run_fresh(program, REPLICAX_CPU_DEVICES="2", REPLICAX_CHECK_SYNC="1")

    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "['-0.6', '-1.4']"
