"""Generators with a state; what TensorFlow 2.21's do with it is stated here as laws."""

import itertools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import mirrored

Generator = rx.random.Generator

DRAWS = {
    "normal": lambda g: g.normal([4]),
    "truncated_normal": lambda g: g.truncated_normal([4]),
    "uniform": lambda g: g.uniform([4]),
    "integers": lambda g: g.uniform([4], 0, 1 << 20, jnp.int32),
    "uniform_full_int": lambda g: g.uniform_full_int([4]),
    "make_seeds": lambda g: g.make_seeds(4),
}


@pytest.fixture(params=["eager", "compiled"])
def mode(request):
    return rx.function if request.param == "compiled" else lambda f: f


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_numbers_follow_from_the_seed_and_are_new_in_every_draw(draw, mode):
    one, other, third = Generator.from_seed(5), Generator.from_seed(5), Generator.from_seed(6)

    first = mode(lambda: (draw(one), draw(one)))()
    again = mode(lambda: (draw(other), draw(other)))()

    np.testing.assert_array_equal(first, again)
    assert first[0].tolist() != first[1].tolist()
    assert first[0].tolist() != draw(third).tolist()


def test_a_compiled_function_continues_where_it_ended():
    g, plain = Generator.from_seed(1), Generator.from_seed(1)
    draw = rx.function(lambda: g.normal([2]))

    np.testing.assert_allclose([draw() for _ in range(3)], [plain.normal([2]) for _ in range(3)])


def test_any_whole_number_is_a_seed_of_its_own():
    seeds = [0, 1, -1, 2**32, 2**63, 2**32 - 1]
    drawn = [float(Generator.from_seed(s).uniform([])) for s in seeds]

    assert len(set(drawn)) == len(seeds)


@pytest.mark.parametrize("replicas", [2, 3])
def test_made_in_scope_every_replica_has_its_own_stream_and_one_state(replicas, mode):
    strategy = mirrored(replicas)
    with strategy.scope():
        g = Generator.from_seed(1234)
    draw = mode(lambda: strategy.run(lambda: g.normal([2])))

    drawn = [tuple(v.tolist()) for _ in range(2) for v in draw().values]

    assert len(set(drawn)) == 2 * replicas
    states = [c.numpy().tolist() for c in g.state.components]
    assert states == [[2, 0, 1234, 0]] * replicas


def test_eager_and_compiled_replicas_draw_the_same_numbers():
    strategy = mirrored(2)
    drawn = []
    for mode in (rx.function, lambda f: f):
        with strategy.scope():
            g = Generator.from_seed(3)
        drawn.append(mode(lambda g=g: strategy.run(lambda: g.uniform([3])))().values)

    np.testing.assert_allclose(*drawn, rtol=1e-6)


def test_made_outside_of_the_scope_the_replicas_draw_different_numbers_too():
    g = Generator.from_seed(3)

    one, other = mirrored(2).run(lambda: g.uniform([3])).values

    assert one.tolist() != other.tolist()


def test_made_in_a_replica_function_every_replica_has_its_own_stream():
    one, other = mirrored(2).run(lambda: Generator.from_seed(3).normal([1])).values

    assert one.tolist() != other.tolist()


def test_a_checkpoint_brings_the_numbers_back(tmp_path):
    strategy = mirrored(2)
    with strategy.scope():
        g = Generator.from_seed(1234)
    draw = lambda: [v.tolist() for v in strategy.run(lambda: g.normal([2])).values]  # noqa: E731
    draw()
    saved = rx.train.Checkpoint(generator=g).save(tmp_path / "c")
    after = draw()

    other = Generator.from_seed(0)
    rx.train.Checkpoint(generator=g).restore(saved)
    rx.train.Checkpoint(generator=other).restore(saved)

    assert draw() == after
    assert other.state.numpy().tolist() == [1, 0, 1234, 0]


def test_the_parts_of_a_split_are_apart_from_each_other_and_the_whole():
    g = Generator.from_seed(1)
    parts = g.split(3)

    drawn = [tuple(x.uniform([2]).tolist()) for x in [*parts, g]]

    assert all(a != b for a, b in itertools.combinations(drawn, 2))
    assert g.split(0) == []


def test_draws_are_counted_beyond_one_word():
    g = Generator.from_state([2**32 - 1, 0, 7, 0])

    g.uniform([])

    assert g.state.numpy().tolist() == [0, 1, 7, 0]
    g.skip(2**33 + 5)
    assert g.state.numpy().tolist() == [5, 3, 7, 0]


def test_a_copy_continues_by_itself():
    g = Generator.from_seed(4)
    g.normal([])
    copies = [Generator(copy_from=g), Generator.from_state(g.state)]
    other = Generator.from_seed(9)
    other.reset(g.state)

    assert len({float(x.normal([])) for x in [g, other, *copies]}) == 1


def test_two_generators_of_chance_differ():
    one, other = (Generator.from_non_deterministic_state() for _ in range(2))

    assert one.uniform([2]).tolist() != other.uniform([2]).tolist()


def test_the_numbers_are_distributed_as_they_should_be():
    g = Generator.from_seed(8)

    assert np.allclose(g.normal([20000], 3.0, 2.0).mean(), 3.0, atol=0.05)
    assert np.allclose(g.normal([20000], 3.0, 2.0).std(), 2.0, atol=0.05)
    cut = g.truncated_normal([20000], 1.0, 0.5)
    assert cut.min() >= 0.0
    assert cut.max() <= 2.0
    assert abs(float(cut.mean()) - 1) < 0.02
    ints = g.uniform([2000], -1, 2, jnp.int32)
    assert set(ints.tolist()) == {-1, 0, 1}
    full = g.uniform([2000], None, None, jnp.int32)
    assert full.min() < -(2**30)
    assert full.max() > 2**30
    tossed = g.binomial([20000], 10.0, 0.25)
    assert tossed.dtype == jnp.int32
    assert abs(float(tossed.mean()) - 2.5) < 0.05
    assert g.binomial([3, 2], [10.0, 5.0], [0.5, 0.5]).shape == (3, 2)


BAD = {
    "one bound of integers": (lambda g: g.uniform([2], 0, None, jnp.int32), ValueError, "both"),
    "an algorithm": (lambda g: Generator.from_seed(1, alg="x"), ValueError, "'threefry'"),
    "a seed of text": (lambda g: Generator.from_seed("a"), TypeError, "whole number"),
    "normal integers": (lambda g: g.normal([2], dtype=jnp.int32), TypeError, "floating-point"),
    "full floats": (lambda g: g.uniform_full_int([2], jnp.float32), ValueError, "integers"),
    "no start": (lambda g: Generator(), ValueError, "from_seed"),
    "a seed as state": (lambda g: Generator(state=[5]), ValueError, "from_seed"),
    "a number as shape": (lambda g: g.normal(2), ValueError, r"write `\[2\]`"),
    "a negative split": (lambda g: g.split(-1), ValueError, "0 or more"),
}


@pytest.mark.parametrize(("call", "kind", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_told_what_to_write(call, kind, words):
    with pytest.raises(kind, match=words):
        call(Generator.from_seed(1))


def test_seeds_are_keys_of_jax():
    seeds = Generator.from_seed(1).make_seeds(3)

    assert seeds.shape == (2, 3)
    keys = jax.random.wrap_key_data(seeds.T)
    assert keys.shape == (3,)


def _drawn(replicas, *, count=2, path=None, compiled=False):
    """Draws of each replica, after an optional restore; and the generator."""
    strategy = rx.distribute.MirroredStrategy(jax.devices()[:replicas]) if replicas else None
    scope = strategy.scope() if strategy else nullcontext()
    with scope:
        generator = rx.random.Generator.from_seed(1)
    if path is not None:
        rx.train.Checkpoint(generator=generator).restore(path)
    draw = (lambda: strategy.run(lambda: generator.normal([]))) if strategy else generator.normal
    step = rx.function(draw) if compiled else draw
    rows = []
    for _ in range(count):
        drawn = step() if strategy else generator.normal([])
        local = strategy.experimental_local_results(drawn) if strategy else [drawn]
        rows.append([float(x) for x in local])
    return rows, generator


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("few", "many"), [(0, 1), (1, 2), (0, 2), (2, 3), (1, 4)])
def test_the_stream_of_a_replica_does_not_depend_on_their_number(few, many, compiled):
    less, _ = _drawn(few, compiled=compiled)
    more, _ = _drawn(many, compiled=compiled)
    assert less == [row[: max(few, 1)] for row in more]
    assert len({x for row in more for x in row}) == 2 * many


@pytest.mark.parametrize(("saved", "restored"), [(2, 1), (2, 3), (1, 2), (0, 2), (2, 0), (3, 2)])
def test_a_checkpoint_continues_the_streams_of_replicas_that_both_have(tmp_path, saved, restored):
    _, generator = _drawn(saved, count=3)
    path = rx.train.Checkpoint(generator=generator).write(str(tmp_path / "saved"))
    there, _ = _drawn(restored, path=path)
    uninterrupted, _ = _drawn(saved, count=5)
    both = min(max(saved, 1), max(restored, 1))
    assert [row[:both] for row in there] == [row[:both] for row in uninterrupted[3:]]
