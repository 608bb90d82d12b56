"""The Optax calls of docs/porting.md, against what Keras's optimizers did."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

optax = pytest.importorskip("optax")

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "porting.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+\([^`]*\))` \| `(optax[^`]*)` \|$", DOCS, re.MULTILINE))
KERAS = json.loads((ROOT / "tests" / "golden" / "optimizers.json").read_text())
START, GRADIENT = [1.0, -2.0, 3.0], [0.1, -0.001, 1e-5]


def made(call):
    keras_eps = re.search(r">>> keras_eps = (.*)", DOCS)[1]
    return eval(call, {"optax": optax, "keras_eps": eval(keras_eps)})


def values(optimizer):
    variable, seen = jnp.asarray(START), []
    state = optimizer.init(variable)
    for step in range(5):
        gradient = jnp.asarray(GRADIENT) * (step + 1)
        updates, state = optimizer.update(gradient, state, variable)
        variable = optax.apply_updates(variable, updates)
        seen.append(variable)
    return np.asarray(seen)


def test_every_row_was_recorded():
    assert list(ROWS) == list(KERAS)
    assert len(ROWS) >= 16


@pytest.mark.parametrize("call", ROWS)
def test_the_optax_call_of_a_row_has_kerass_numbers(call):
    np.testing.assert_allclose(values(made(ROWS[call])), KERAS[call], rtol=1e-6, atol=1e-6)


def test_without_kerass_epsilon_adam_takes_other_steps_for_small_gradients():
    assert np.abs(values(optax.adam(0.01, eps=1e-7)) - KERAS["Adam(0.01)"]).max() > 1e-3
