"""Objects that hold a variable pass wherever one does.

Are all copies still equal? Asked by hand, and after every call.

A structure of arrays -> the same structure of variables.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.base.errors import DivergenceError, TracingError
from replicax._src.state.variables import allow_reads, read_global, variable_of
from tests.fresh_process import run_fresh
from tests.replicas import mirrored


class Weight:
    """What an adapter makes of a library's variable."""

    def __init__(self, value, **kwargs):
        self.held = None if value is None else rx.Variable(value, **kwargs)

    def __rx_variable__(self):
        return self.held


@pytest.fixture
def strategy():
    return rx.distribute.MirroredStrategy(jax.devices()[:2])


def test_a_holder_is_differentiated_reduced_returned_and_compared_as_its_variable(strategy):
    with strategy.scope():
        weight = Weight(3.0)
        shares = Weight(
            1.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    value, (gradient,) = rx.value_and_grad(lambda: weight.held**2, [weight])()
    returned = rx.function(lambda: weight)()

    assert (float(value), float(gradient), float(returned)) == (9.0, 6.0, 3.0)
    assert float(strategy.reduce("SUM", shares, axis=None)) == float(shares.held.read_value())
    assert float(strategy.reduce("MEAN", weight, axis=None)) == 3.0
    assert len(strategy.experimental_local_results(weight)) == 2
    assert strategy.extended.read_var(weight) == 3.0
    assert strategy.extended.variable_created_in_scope(weight)
    strategy.extended.update(weight, lambda copy: copy.assign(4.0))
    assert weight.held.numpy() == 4.0
    with strategy.extended.colocate_vars_with(weight):
        rx.Variable(1.0)
    rx.debug.check_in_sync([weight])
    weight.held.components[1].assign(5.0)
    with pytest.raises(DivergenceError, match="differs between replicas"):
        rx.debug.check_in_sync([weight])


def test_what_holds_no_variable_is_refused_with_advice(strategy):
    nothing = Weight(None)

    assert variable_of(nothing) is None
    assert variable_of(3) is None
    with pytest.raises(TypeError, match="differentiates with respect to variables"):
        rx.value_and_grad(lambda: jnp.zeros(()), [nothing])
    with pytest.raises(TypeError, match="check_in_sync needs a variable"):
        rx.debug.check_in_sync([nothing])


def test_the_global_value_lies_on_all_devices_and_is_not_consumed(strategy):
    with strategy.scope():
        v = rx.Variable(np.arange(3.0))
    bump = rx.function(lambda: v.assign_add(jnp.ones(3)))
    bump()

    held = read_global(v)
    bump()

    assert len(held.devices()) == 2
    assert np.asarray(held).tolist() == [1.0, 2.0, 3.0]
    assert v.numpy().tolist() == [2.0, 3.0, 4.0]


def test_a_foreign_trace_reads_the_global_value_only_where_it_is_trusted(strategy):
    with strategy.scope():
        v = rx.Variable(2.0)

    with pytest.raises(TracingError, match="JAX is tracing"):
        jax.jit(lambda: read_global(v) * 2)()
    with allow_reads():
        assert float(jax.jit(lambda: read_global(v) * 2)()) == 4.0


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


def test_each_array_becomes_a_variable_with_the_name_of_its_path():
    tree = {"a": [1.0, (np.ones(2), jnp.zeros(3))], "b": {"c": 2}}

    made = rx.variables(tree)

    assert jax.tree.structure(made) == jax.tree.structure(tree)
    names = [v.name for v in jax.tree.leaves(made)]
    assert names == ["a/0:0", "a/1/0:0", "a/1/1:0", "b/c:0"]
    assert rx.variables(tree, name="net")["b"]["c"].name == "net/b/c:0"
    assert rx.variables(3.0).name == "Variable:0"


def test_the_declaration_is_the_same_for_all():
    with mirrored(2).scope():
        made = rx.variables({"a": 1.0, "b": 2.0}, trainable=False, dtype=jnp.float16)

    assert all(not v.trainable and v.dtype == jnp.float16 for v in made.values())
    assert all(len(v.components) == 2 for v in made.values())


@pytest.mark.parametrize(
    "tree",
    [{"a": 1.0}, [{"a": 1.0}], [1.0, None], "text", object()],
    ids=lambda tree: str(tree)[:9],
)
def test_a_variable_of_a_structure_is_refused_with_the_way_to_do_it(tree):
    with pytest.raises(rx.errors.VariableError, match=r"holds one array.*rx\.variables\(tree\)"):
        rx.Variable(tree)


@pytest.mark.parametrize(
    "value", [[1.0, 2.0], [[1], [2]], (1, 2.5), True, 1j, np.float16(2), [jnp.ones(2), np.ones(2)]]
)
def test_what_jax_takes_for_an_array_makes_a_variable(value):
    np.testing.assert_array_equal(rx.Variable(value).numpy(), jnp.asarray(value))
