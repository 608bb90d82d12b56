"""Programs: compiled calls, where their arrays are, and what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import compiled, mirrored


def test_a_compiled_step_aliases_the_variables_it_changes(two):
    with two.scope():
        v, w = rx.Variable(jnp.zeros(4)), rx.Variable(jnp.ones(4))

    @rx.function
    def step():
        v.assign_add(w)

    text = step.get_concrete_function().as_text()

    # One output is written where one input was; the variable that is only read is not.
    assert text.splitlines()[0].count("may-alias") + text.splitlines()[0].count("must-alias") == 1


def test_each_variable_is_written_where_it_was_itself(two):
    with two.scope():
        variables = [rx.Variable(jnp.full(4, float(i))) for i in range(4)]

    @rx.function
    def step():
        read = [v.read_value() for v in variables]
        for v, x in reversed(list(zip(variables, read, strict=True))):
            v.assign(x * 2)
        return jnp.zeros(4)  # of their shape, and no place for one of them

    text = step.get_concrete_function().as_text()

    assert " copy(" not in text  # nothing has to be saved from being overwritten
    step()
    assert [float(v.numpy()[0]) for v in variables] == [0, 2, 4, 6]


def test_a_step_that_may_be_refused_aliases_nothing(two):
    with two.scope():
        v = rx.Variable(jnp.zeros(4))

    def replica():
        i = rx.distribute.get_replica_context().replica_id_in_sync_group
        v.assign_add(jnp.ones(4) * (i >= 0))

    text = rx.function(lambda: two.run(replica)).get_concrete_function().as_text()

    assert "alias" not in text.splitlines()[0]


def test_arguments_on_other_devices_are_brought_along(two):
    with two.scope():
        v = rx.Variable(1.0)
    far = jax.device_put(jnp.float32(5), jax.devices()[5])
    f = rx.function(lambda x: v * x)

    assert float(f(far)) == 5.0
    assert float(f(jnp.float32(2))) == 2.0


def test_a_per_replica_argument_enters_without_being_gathered(two):
    f = rx.function(lambda x: two.run(lambda x: x * 2, args=(x,)))
    x = two.run(lambda: jnp.arange(4.0))
    y = f(x)

    text = f.get_concrete_function(y).as_text()

    assert [v.tolist() for v in f(y).values] == [[0, 4, 8, 12]] * 2
    assert not any(word in text for word in ("all-gather", "all-reduce", "collective-permute"))


def test_a_setting_of_jax_that_a_trace_bakes_in_is_another_signature():
    multiply = rx.function(lambda x: x @ x)

    def precision():
        return multiply.get_concrete_function(jnp.ones((2, 2))).as_text()

    plain = precision()
    with jax.default_matmul_precision("highest"):
        assert "highest" in precision()
    assert "highest" not in plain
    assert precision() == plain


def test_x64_is_another_signature():
    f = rx.function(lambda x: x * 2)
    f(jnp.float32(1.5))

    with jax.enable_x64(True):
        wide = f(jnp.float64(0.1))

    assert wide.dtype == jnp.float64
    assert float(wide) == 0.2


def test_a_name_of_the_user_is_in_the_program():
    @rx.function
    def very_own_name(x):
        return x + 1

    assert "very_own_name" in very_own_name.get_concrete_function(jnp.ones(2)).as_text()


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_are_traced_once_whatever_their_number(two, four, replicas):
    bodies = []
    strategy = {2: two, 4: four}[replicas]

    def replica():
        bodies.append(1)
        return jnp.ones(())

    rx.function(lambda: strategy.run(replica))()

    assert bodies == [1]


def test_a_first_call_compiles_the_program_and_nothing_else():
    strategy = mirrored(2)
    # A shape of its own, for which nothing was compiled before.
    batch = compiled(strategy, lambda: jnp.ones((3, 17, 5)))
    with strategy.scope():
        v = rx.Variable(np.zeros((3, 17, 5), np.float32))
    held = v.read_value()  # so that the call must copy what it changes
    seen = []
    listener = lambda name, _, **__: seen.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        compiled(strategy, lambda x: (v.assign_add(jnp.ones((3, 17, 5))), x * 3)[1], batch)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)

    assert sum("backend_compile" in name for name in seen) == 1
    assert not np.any(held)
