import itertools
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.tpu.nets import slice_of

IMAGES = np.arange(2 * 8 * 8 * 3, dtype=np.float32).reshape(2, 8, 8, 3)


def factorisations(n, length):
    return [p for p in itertools.product(range(1, n + 1), repeat=length) if math.prod(p) == n]


@pytest.mark.parametrize("cores", [2, 4, 8])
def test_every_factorisation_of_the_logical_devices_can_be_had(cores):
    strategy = slice_of(cores, replicas=8 // cores)
    value = jnp.arange(512.0).reshape(8, 8, 8)

    for parts in factorisations(cores, 3):
        split = strategy.experimental_split_to_logical_devices(value, parts)

        shard = split.addressable_shards[0].data
        assert shard.shape == tuple(8 // n for n in parts)
        assert (np.asarray(split) == np.asarray(value)).all()


@pytest.mark.parametrize(("cores", "parts"), [(4, [1, 2, 2, 1]), (8, [1, 2, 4, 1])])
def test_the_compiled_program_works_on_parts(cores, parts):
    strategy = slice_of(cores, replicas=8 // cores)

    @rx.function
    def step(images):
        def replica(images):
            images = strategy.experimental_split_to_logical_devices(images, parts)
            return jnp.sin(images) * 2

        return strategy.run(replica, args=(images,))

    images = strategy.experimental_distribute_values_from_function(lambda _: IMAGES)
    text = step.get_concrete_function(images).as_text()
    result = strategy.experimental_local_results(step(images))[0]

    part = ",".join(str(size // n) for size, n in zip(IMAGES.shape, parts, strict=True))
    assert re.search(rf"f32\[(1,)?{part}\]\S* (sine|fusion)\(", text)
    assert not re.search(r"f32\[(1,)?2,8,8,3\]\S* sine\(", text)
    np.testing.assert_allclose(result, np.sin(IMAGES) * 2, rtol=1e-6)


def test_temporary_memory_of_a_device_falls_with_the_parts():
    sizes = {}
    for cores, parts in ((1, [1, 1]), (8, [8, 1])):
        strategy = slice_of(cores, replicas=1)

        @rx.function
        def step(x, strategy=strategy, parts=parts):
            def replica(x):
                x = strategy.experimental_split_to_logical_devices(x, parts)
                y = jnp.sort(jnp.sin(x), axis=1)  # a large value that must be kept
                return (y * jnp.cumsum(y, axis=1)).sum()

            return strategy.run(replica, args=(x,))

        concrete = step.get_concrete_function(rx.TensorSpec([512, 512]))
        lowered = concrete._program.lowered(concrete._arguments.arrays)
        sizes[cores] = lowered.compile().memory_analysis().temp_size_in_bytes

    assert sizes[8] < sizes[1] / 4


def test_annotations_in_cross_replica_context_of_a_function_change_no_number():
    strategy = slice_of(cores=8, replicas=1)

    @rx.function
    def step(x):
        x = strategy.experimental_split_to_logical_devices(x, [2, 4])
        x = strategy.experimental_assign_to_logical_device(x + 1, 3)
        return strategy.experimental_replicate_to_logical_devices(x * 2)

    x = jnp.arange(32.0).reshape(4, 8)
    np.testing.assert_array_equal(step(x), (np.asarray(x) + 1) * 2)


def test_gradients_pass_through_the_annotations():
    strategy = slice_of(cores=4, replicas=2)
    with strategy.scope():
        weight = rx.Variable(jnp.ones((4, 4)))

    def replica(x):
        def loss():
            y = strategy.experimental_split_to_logical_devices(x @ weight.read_value(), [1, 4])
            return strategy.experimental_replicate_to_logical_devices(y**2).sum()

        return rx.value_and_grad(loss, [weight])()[1][0]

    x = jnp.arange(8.0).reshape(2, 4)
    expected = 2 * x.T @ (x @ jnp.ones((4, 4)))
    for gradient in strategy.experimental_local_results(strategy.run(replica, args=(x,))):
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_with_one_logical_device_the_annotations_do_nothing():
    strategy = rx.distribute.TPUStrategy()
    x = jnp.ones((2, 2))

    assert strategy.experimental_split_to_logical_devices(x, [1, 1]) is x
    assert strategy.experimental_assign_to_logical_device(x, 0) is x


# The errors, in TensorFlow's order: rank, divisibility, product.


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([8], "needs 4, one for each axis"),
        ([1, 2, 4, 1, 1], "needs 4"),
        ([1, 3, 4, 1], "8 is not divisible by 3"),
        ([1, 1, 16, 1], "8 is not divisible by 16"),
        ([3, 3, 3, 3], "2 is not divisible by 3"),
        ([1, 2, 2, 1], "makes 4 parts.*equal to the 8 logical"),
        ([1, 1, 1, 1], "makes 1 parts"),
        ([1, 0, 8, 1], "positive whole numbers"),
        ([1, -2, -4, 1], "positive whole numbers"),
        ([1, 2.0, 4, 1], "positive whole numbers"),
        ([True, 2, 4, 1], "positive whole numbers"),
        (8, "positive whole numbers"),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["eager", "function", "replica"])
def test_dimensions_that_do_not_fit_are_refused(parts, message, where):
    strategy = slice_of(cores=8, replicas=1)

    def split(x):
        return strategy.experimental_split_to_logical_devices(x, parts)

    calls = {
        "eager": lambda: split(IMAGES),
        "function": lambda: rx.function(split)(IMAGES),
        "replica": lambda: strategy.run(split, args=(IMAGES,)),
    }
    with pytest.raises(ValueError, match=message):
        calls[where]()


@pytest.mark.parametrize("number", [-1, 2, 100, 0.5, "0", None])
def test_a_logical_device_that_is_not_there_is_refused(number):
    strategy = slice_of(cores=2, replicas=4)

    with pytest.raises(ValueError, match="numbered from 0 to 1"):
        strategy.experimental_assign_to_logical_device(jnp.ones(2), number)


def test_a_per_replica_value_is_annotated_inside_of_the_run():
    strategy = slice_of(cores=2, replicas=4)

    with pytest.raises(ValueError, match=r"inside the function that `strategy\.run` calls"):
        strategy.experimental_replicate_to_logical_devices(strategy.run(lambda: jnp.ones(2)))
