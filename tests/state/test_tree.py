"""A structure of arrays -> the same structure of variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import mirrored


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
