import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import WAYS, mirrored

random = rx.random


@pytest.fixture(autouse=True)
def _seeded():
    random.set_seed(0)


@pytest.mark.parametrize("draw", [random.uniform, random.normal])
def test_a_seed_restarts_the_sequence(draw):
    first = [draw([3]).tolist() for _ in range(2)]
    random.set_seed(0)
    again = [draw([3]).tolist() for _ in range(2)]
    random.set_seed(1)
    other = [draw([3]).tolist() for _ in range(2)]

    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_a_program_may_begin_with_its_seed_before_jax_starts():
    """As strategies of several workers must be made before JAX's devices are there."""
    code = (
        "import jax, replicax as rx\n"
        "rx.random.set_seed(3)\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"  # refused once there are devices
        "print(float(rx.random.uniform([])))\n"
    )
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    rx.random.set_seed(3)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == float(rx.random.uniform([]))


@pytest.mark.parametrize("seed", [-1, 2**40, 0])
def test_any_integer_is_a_seed(seed):
    random.set_seed(seed)
    one = random.uniform([2], seed=seed).tolist()
    random.set_seed(seed)

    assert random.uniform([2], seed=seed).tolist() == one


def test_a_seed_of_its_own_gives_another_sequence():
    plain = random.uniform([4]).tolist()
    random.set_seed(0)

    assert random.uniform([4], seed=7).tolist() != plain


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-2.0, 3.0)])
def test_uniform_numbers_fill_their_bounds(low, high):
    numbers = np.asarray(random.uniform([4000], low, high))

    assert low <= numbers.min() < low + 0.02 * (high - low)
    assert high - 0.02 * (high - low) < numbers.max() < high
    assert numbers.mean() == pytest.approx((low + high) / 2, abs=0.05 * (high - low))


def test_floats_end_at_one_by_default():
    assert np.asarray(random.uniform([100], maxval=None)).max() < 1


def test_integers_are_drawn_below_their_bound_and_need_one():
    numbers = random.uniform([200], 0, 3, jnp.int32)

    assert set(numbers.tolist()) == {0, 1, 2}
    assert numbers.dtype == jnp.int32
    with pytest.raises(ValueError, match="int32 needs maxval"):
        random.uniform([2], dtype=jnp.int32)


def test_normal_numbers_have_their_mean_and_spread():
    numbers = np.asarray(random.normal([4000], mean=5.0, stddev=2.0))

    assert numbers.mean() == pytest.approx(5.0, abs=0.2)
    assert numbers.std() == pytest.approx(2.0, abs=0.2)


@pytest.mark.parametrize("shape", [[2, 3], (2, 3), np.array([2, 3]), jnp.asarray([2, 3])])
def test_a_shape_comes_in_any_sequence(shape):
    assert random.uniform(shape).shape == (2, 3)
    assert random.normal(shape).shape == (2, 3)
    assert random.uniform([]).shape == ()


def test_a_shape_that_is_a_number_is_refused_with_the_cure():
    with pytest.raises(ValueError, match=r"write `\[3\]`"):
        random.uniform(3)


@pytest.mark.parametrize("way", WAYS)
def test_every_replica_draws_its_own_numbers(way):
    strategy = mirrored(4)

    drawn = way(strategy, lambda: random.uniform([3]))
    again = way(strategy, lambda: random.uniform([3]))

    rows = [tuple(v.tolist()) for v in (*drawn.values, *again.values)]
    assert len(set(rows)) == 8


def test_eager_and_compiled_replicas_draw_the_same():
    strategy = mirrored(2)
    results = []
    for way in WAYS:
        random.set_seed(3)
        results.append([v.tolist() for v in way(strategy, lambda: random.normal([3])).values])

    np.testing.assert_allclose(*results, rtol=1e-6)


def test_a_compiled_function_draws_new_numbers_on_every_call():
    draw = rx.function(lambda: random.uniform([2]))

    numbers = [tuple(draw().tolist()) for _ in range(3)]

    assert len(set(numbers)) == 3
    assert draw.experimental_get_tracing_count() == 1


def test_under_a_jit_of_jax_it_is_refused():
    with pytest.raises(rx.errors.TracingError):
        jax.jit(lambda: random.uniform([2]))()


def test_variables_of_a_scope_start_equal_on_all_replicas():
    with mirrored(2).scope():
        v = rx.Variable(lambda: random.normal([3]))

    one, two = v.components
    assert one.numpy().tolist() == two.numpy().tolist()


@pytest.mark.parametrize("source", ["program", "generator"])
def test_a_variable_made_in_a_function_may_start_with_numbers_drawn_there(two, source):
    def first_numbers(wrap):
        rx.random.set_seed(3)
        with two.scope():
            generator = rx.random.Generator.from_seed(3)
        draw = generator.normal if source == "generator" else rx.random.normal
        held = []

        def step():
            if not held:
                held.append(rx.Variable(draw([3])))
            return held[0] + 0.0

        with two.scope():
            calls = [np.asarray(two.experimental_local_results(wrap(step))[-1]) for _ in range(2)]
        assert (calls[0] == calls[1]).all()
        assert (calls[0] == held[0].numpy()).all()
        assert not (np.asarray(draw([3])) == held[0].numpy()).any(), "the source goes on"
        return calls[0].tolist()

    functions = {}

    def compiled(step):
        return functions.setdefault(step, rx.function(step))()

    def compiled_run(step):
        return functions.setdefault(step, rx.function(lambda: two.run(step)))()

    eager = first_numbers(two.run)
    assert first_numbers(compiled_run) == eager
    assert first_numbers(compiled) != [0.0, 0.0, 0.0]


def test_numbers_drawn_after_such_a_start_are_new_ones():
    rx.random.set_seed(4)
    held = []

    @rx.function
    def step():
        if not held:
            held.append(rx.Variable(rx.random.normal([3])))
        return rx.random.normal([3])

    draws = [held[0].numpy() for _ in [step()]] + [np.asarray(step()) for _ in range(3)]

    assert len({tuple(x.tolist()) for x in draws}) == 4


def test_a_start_of_another_variable_of_the_function_is_refused():
    other, held = rx.Variable(1.0), []

    @rx.function
    def step():
        if not held:
            held.append(rx.Variable(other * rx.random.normal([])))

    with pytest.raises(rx.errors.TracingError, match="depends on"):
        step()
