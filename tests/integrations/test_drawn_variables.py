"""Variables that replicas make inside a function start with numbers of any library's source."""

import jax
import numpy as np
import pytest
from flax import nnx

import replicax as rx

keras = rx.keras


def seeded_sources():
    """Sources of random numbers, each with a function that draws from it."""
    keras_seed, rngs = keras.random.SeedGenerator(3), nnx.Rngs(0)
    generator = rx.random.Generator.from_seed(1)
    rx.random.set_seed(3)
    return {
        "rx.random": lambda: rx.random.normal([2]),
        "rx.random.Generator": lambda: generator.normal([2]),
        "keras.random": lambda: keras.random.normal((2,)),
        "keras seed": lambda: keras.random.normal((2,), seed=keras_seed),
        "keras initializer": lambda: keras.initializers.RandomNormal(seed=keras_seed)((2,)),
        "nnx.Rngs": lambda: jax.random.normal(rngs.params(), (2,)),
    }


@pytest.mark.parametrize("source", seeded_sources())
@pytest.mark.parametrize("is_function", [False, True], ids=["value", "function"])
def test_variable_made_in_a_replica_starts_with_drawn_numbers(two, source, is_function):
    draw, made = seeded_sources()[source], []

    @rx.function
    def step():
        return two.run(replica)

    def replica():
        if not made:
            made.append(rx.Variable(draw if is_function else draw()))
        return made[0].assign_add([1.0, 1.0]).read_value()

    first, second = (two.experimental_local_results(step()) for _ in range(2))
    start = first[0] - 1

    assert np.unique(start).size == 2
    assert all((r == first[0]).all() for r in first)
    np.testing.assert_allclose(second[1], start + 2, rtol=1e-6)
    assert not np.array_equal(draw(), start)  # the source has moved on
