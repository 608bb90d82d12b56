"""One-liners over JAX."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

NARROWED = {
    "constant": lambda: rx.constant(3, dtype="int64"),
    "variable": lambda: rx.Variable(3, dtype=np.int64),
    "uniform": lambda: rx.random.uniform([2], dtype="float64"),
    "normal": lambda: rx.random.normal([2], dtype=jnp.float64),
    "integers": lambda: rx.random.uniform([2], maxval=5, dtype=np.int64),
    "generator": lambda: rx.random.Generator.from_seed(1).normal([2], dtype=np.float64),
    "full_int": lambda: rx.random.Generator.from_seed(1).uniform_full_int([2], np.uint64),
    "binomial": lambda: rx.random.Generator.from_seed(1).binomial([2], 3.0, 0.5, np.int64),
    "metric": lambda: rx.metrics.Mean(dtype="float64").variables[0],
}


@pytest.mark.parametrize("made", NARROWED.values(), ids=NARROWED)
def test_a_type_that_jax_narrows_is_told_at_the_users_own_line(made):
    with pytest.warns(UserWarning, match="is what you get: JAX keeps 32 bits") as told:
        value = made()

    assert {warning.filename for warning in told} == {__file__}
    assert np.dtype(value.dtype).itemsize == 4


def test_a_type_that_is_kept_is_not_told():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rx.constant(3, dtype="int32")
        rx.Variable(3.0, dtype=jnp.bfloat16)
        rx.Variable(np.float64(3))
