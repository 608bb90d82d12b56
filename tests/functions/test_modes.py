"""Functions that are not compiled for a while."""

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from tests.replicas import mirrored


@pytest.fixture
def eagerly():
    rx.config.run_functions_eagerly(True)
    yield
    rx.config.run_functions_eagerly(False)


def test_every_call_runs_the_python_and_sees_values(eagerly):
    seen = []

    @rx.function
    def add(x):
        seen.append(float(x))
        return x + 1

    assert rx.config.functions_run_eagerly()
    assert [int(add(jnp.int32(i))) for i in (1, 1)] == [2, 2]
    assert seen == [1.0, 1.0]
    rx.config.run_functions_eagerly(False)
    with pytest.raises(rx.errors.TracingError):
        add(jnp.int32(1))


def test_replicas_run_op_by_op_too(eagerly):
    strategy = mirrored(2)
    seen = []

    @rx.function
    def step(x):
        seen.append(isinstance(x, jax.core.Tracer))
        return x * 2

    inner = strategy.run(step, args=(jnp.float32(3),))
    outer = rx.function(lambda: strategy.run(step, args=(jnp.float32(3),)))()

    assert [float(v) for v in (*inner.values, *outer.values)] == [6.0] * 4
    assert seen == [False] * 4


def test_anything_but_true_and_false_is_refused():
    with pytest.raises(TypeError, match="True or False"):
        rx.config.run_functions_eagerly("yes")
    assert not rx.config.functions_run_eagerly()
