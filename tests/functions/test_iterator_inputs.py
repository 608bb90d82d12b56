"""Iterators and datasets inside compiled functions."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx


@pytest.fixture(scope="module")
def strategy():
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def batches(strategy, rows, batch=4):
    x = np.arange(rows, dtype=np.float32)
    return strategy.experimental_distribute_dataset(
        rx.data.Dataset.from_tensor_slices(x).batch(batch)
    )


def summed(strategy, batch):
    return strategy.reduce("SUM", strategy.run(jnp.sum, args=(batch,)), axis=None)


def test_each_next_in_a_function_takes_one_element_on_every_call(strategy):
    traces = []

    @rx.function
    def two_steps(iterator):
        traces.append(1)
        return summed(strategy, next(iterator)), summed(strategy, next(iterator))

    iterator = iter(batches(strategy, 16))
    results = [[float(x) for x in two_steps(iterator)] for _ in range(2)]

    assert results == [[6, 22], [38, 54]]
    assert len(traces) == 1


def test_tracing_looks_at_elements_and_takes_none(strategy):
    iterator = iter(batches(strategy, 8))

    def fails(it):
        next(it)
        raise KeyError("while tracing")

    with pytest.raises(KeyError):
        rx.function(fails)(iterator)

    assert [float(summed(strategy, b)) for b in iterator] == [6, 22]


def test_an_iterator_may_be_closed_over(strategy):
    iterator = iter(batches(strategy, 12))

    step = rx.function(lambda: summed(strategy, next(iterator)))

    assert [float(step()) for _ in range(3)] == [6, 22, 38]


def test_steps_before_the_end_still_happen_and_then_it_stops(strategy):
    with strategy.scope():
        seen = rx.Variable(0.0)
    iterator = iter(batches(strategy, 12))

    @rx.function
    def two_steps(it):
        for _ in range(2):
            seen.assign_add(summed(strategy, next(it)))

    two_steps(iterator)
    for end in (StopIteration, rx.errors.OutOfRangeError):
        with pytest.raises(end):
            two_steps(iterator)

    assert float(seen) == sum(range(12))


def test_a_short_last_batch_is_taken_by_the_same_function(strategy):
    iterator = iter(batches(strategy, 11, batch=4))

    step = rx.function(lambda it: summed(strategy, next(it)))

    assert [float(step(iterator)) for _ in range(3)] == [6, 22, 27]


def test_an_epoch_over_a_dataset_inside_a_function_trains_every_step(strategy):
    with strategy.scope():
        total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
        steps = rx.Variable(0)
    traces = []

    @rx.function
    def epoch(dataset):
        for batch in dataset:

            def replica_fn(x):
                traces.append(1)
                total.assign_add(jnp.sum(x))

            strategy.run(replica_fn, args=(batch,))
            steps.assign_add(1)

    dist = batches(strategy, 16)
    epoch(dist)
    epoch(dist)

    assert float(total) == 2 * sum(range(16))
    assert int(steps) == 8
    assert len(traces) == 1  # the function defined in the loop is found again


def test_arrays_that_a_function_in_the_loop_closes_over_are_inputs(strategy):
    results = []

    @rx.function
    def epoch(dataset):
        for i, batch in enumerate(dataset):
            scale = jnp.float32(i)
            per_replica = strategy.run(lambda x: jnp.sum(x) * scale, args=(batch,))  # noqa: B023
            results.append(float(strategy.reduce("SUM", per_replica, axis=None)))

    epoch(batches(strategy, 12))

    assert results == [0, 22, 76]


def test_a_dataset_that_is_closed_over_works_like_an_argument(strategy):
    dist = batches(strategy, 8)

    @rx.function
    def epoch():
        return sum(float(summed(strategy, b)) for b in dist)

    assert epoch() == sum(range(8))


def test_an_element_spec_is_an_input_signature(strategy):
    dist = batches(strategy, 8)

    step = rx.function(lambda x: summed(strategy, x), input_signature=[dist.element_spec])

    assert [float(step(b)) for b in dist] == [6, 22]
    with pytest.raises(TypeError, match="input_signature"):
        step(jnp.zeros((2, 2)))


PLACES = ["default", 1, 2, 4]


@pytest.fixture(params=PLACES, ids=str)
def place(request):
    if request.param == "default":
        return rx.distribute.get_strategy()
    return rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(request.param)])


def consumed(fn, times):
    """What each of several calls gives: a number, or the name of the error."""
    results = []
    for _ in range(times):
        try:
            results.append(int(fn()))
        except rx.errors.OutOfRangeError:
            results.append("OutOfRangeError")
    return results


def test_an_iterator_that_is_given_or_closed_over_moves_on_with_every_call(place):
    # TensorFlow gives 1, 5 and OutOfRangeError, both ways.
    dataset = rx.data.Dataset.range(4).batch(2)

    given = iter(place.experimental_distribute_dataset(dataset))
    taking = rx.function(lambda it: summed(place, next(it)))
    captured = iter(place.experimental_distribute_dataset(dataset))
    closing = rx.function(lambda: summed(place, captured.get_next()))

    assert consumed(lambda: taking(given), 3) == [1, 5, "OutOfRangeError"]
    assert consumed(closing, 3) == [1, 5, "OutOfRangeError"]


@pytest.mark.parametrize(
    ("rows", "results", "totals"),
    # As TensorFlow does: the steps before the end have happened.
    [
        (10, [10, 35, "OutOfRangeError"], [10, 45, 45]),
        (7, [10, "OutOfRangeError", "OutOfRangeError"], [10, 21, 21]),
    ],
)
def test_each_turn_of_a_scan_takes_an_element_of_its_own(rows, results, totals):
    iterator = iter(rx.data.Dataset.range(rows))
    total, traces, seen = rx.Variable(0), [], []

    @rx.function
    def loop():
        def step(carry, _):
            traces.append(1)
            element = next(iterator)
            total.assign_add(element)
            return carry + element, None

        return rx.scan(step, jnp.int32(0), length=5)[0]

    def call():
        try:
            return loop()
        finally:
            seen.append(int(total))

    assert consumed(call, 1) == results[:1]
    assert len(traces) == 1  # compiled once, and not unrolled
    assert consumed(call, 2) == results[1:]
    assert seen == totals


def test_a_loop_of_steps_over_replicas_takes_a_batch_in_each(place):
    iterator = iter(place.experimental_distribute_dataset(rx.data.Dataset.range(40).batch(4)))
    with place.scope():
        total = rx.Variable(0, aggregation=rx.VariableAggregation.SUM)

    def replica_fn(batch):
        total.assign_add(jnp.sum(batch))
        return jnp.sum(batch)

    @rx.function
    def steps(it):
        def step(carry, _):
            rows = place.run(replica_fn, args=(next(it),))
            return carry + place.reduce("SUM", rows, axis=None), None

        return rx.scan(step, jnp.int32(0), length=5)[0]

    assert consumed(lambda: steps(iterator), 3) == [190, 590, "OutOfRangeError"]
    assert int(total) == 780
    assert steps.experimental_get_tracing_count() == 1


def test_a_condition_takes_an_element_only_in_the_branch_that_runs():
    iterator = iter(rx.data.Dataset.range(5))
    take = rx.function(lambda p: rx.cond(p, lambda: next(iterator), lambda: jnp.int32(-1)))

    taken = [int(take(jnp.asarray(p))) for p in (True, False, False, True, True)]

    assert taken == [0, -1, -1, 1, 2]  # TensorFlow's


def test_a_condition_whose_branches_take_alike_stays_compiled():
    iterator = iter(rx.data.Dataset.range(6))
    traces = []

    @rx.function
    def either(p):
        traces.append(1)
        return rx.cond(p, lambda: next(iterator) * 10, lambda: next(iterator)) + next(iterator)

    assert [int(either(jnp.asarray(p))) for p in (True, False, True)] == [1, 5, 45]
    assert len(traces) == 1


def test_an_optional_is_empty_in_the_turns_after_the_end():
    iterator = iter(rx.data.Dataset.range(3))

    @rx.function
    def two():
        def step(state, _):
            total, count = state
            optional = iterator.get_next_as_optional()
            if optional.has_value():
                total, count = total + optional.get_value(), count + 1
            return (total, count), None

        return rx.scan(step, (jnp.int32(0), jnp.int32(0)), length=2)[0]

    assert [tuple(map(int, two())) for _ in range(3)] == [(1, 2), (2, 1), (0, 0)]  # TensorFlow's


def test_a_loop_over_an_iterator_takes_the_rest_of_it():
    iterator = iter(rx.data.Dataset.range(5))

    @rx.function
    def rest():
        total = jnp.int32(0)
        for element in iterator:
            total += element
        return total

    assert [int(rest()), int(rest())] == [10, 0]  # TensorFlow's


def test_a_while_loop_takes_an_element_in_each_of_its_turns():
    iterator = iter(rx.data.Dataset.range(9))
    steps = rx.Variable(2)

    @rx.function
    def loop():
        body = lambda s: (s[0] + 1, s[1] + next(iterator))  # noqa: E731
        return rx.while_loop(lambda s: s[0] < steps, body, (0, jnp.int32(0)))[1]

    assert int(loop()) == 0 + 1
    steps.assign(3)
    assert int(loop()) == 2 + 3 + 4
    assert int(next(iterator)) == 5


@pytest.mark.parametrize("transform", ["jit", "scan", "cond", "checkpoint", "grad", "vmap"])
def test_an_element_is_not_baked_into_what_jax_traces_by_itself(transform):
    iterator = iter(rx.data.Dataset.range(5).map(np.float32))
    programs = {
        "jit": lambda: jax.jit(lambda: next(iterator))(),
        "scan": lambda: jax.lax.scan(lambda c, _: (c + next(iterator), None), 0.0, length=2),
        "cond": lambda: jax.lax.cond(True, lambda: next(iterator), lambda: jnp.float32(0)),
        "checkpoint": lambda: jax.checkpoint(lambda x: x * next(iterator))(1.0),
        "grad": lambda: jax.grad(lambda x: x * next(iterator))(1.0),
        "vmap": lambda: jax.vmap(lambda x: x * next(iterator))(jnp.ones(2)),
    }
    program = programs[transform]

    with pytest.raises(rx.errors.TracingError, match=r"rx\.scan"):
        rx.function(program)()

    if transform in ("grad", "vmap"):  # plain Python, called once: an element is one element
        program()
        assert int(next(iterator)) == 1
    else:
        with pytest.raises(rx.errors.TracingError, match=r"rx\.scan"):
            program() if transform != "checkpoint" else jax.jit(program)()
        assert int(next(iterator)) == 0


def test_a_compiled_replica_function_takes_no_elements(strategy):
    iterator = iter(rx.data.Dataset.range(5))

    with pytest.raises(rx.errors.TracingError, match="args="):
        rx.function(lambda: strategy.run(lambda: next(iterator)))()

    assert int(next(iterator)) == 0


def test_a_gradient_of_a_loss_takes_its_own_element():
    iterator = iter(rx.data.Dataset.range(1, 5).map(np.float32))
    w = rx.Variable(2.0)
    step = rx.function(lambda: rx.value_and_grad(lambda: w * next(iterator), w)())

    assert [float(step()[1]) for _ in range(3)] == [1, 2, 3]


def test_a_pipeline_that_fails_in_the_middle_of_a_loop_fails_in_its_turn():
    def risky(x):
        if x == 3:
            raise ValueError("the fourth")
        return x

    iterator = iter(rx.data.Dataset.range(9).map(risky))
    total = rx.Variable(0)

    @rx.function
    def loop():
        def step(carry, _):
            total.assign_add(next(iterator))
            return carry, None

        rx.scan(step, 0, length=5)

    with pytest.raises(ValueError, match="the fourth"):
        loop()

    assert int(total) == 0 + 1 + 2


def test_elements_of_another_size_are_traced_once_and_found_again():
    traces = []

    @rx.function
    def step(it):
        traces.append(1)
        return jnp.sum(next(it))

    iterator = iter(rx.data.Dataset.range(10).batch(4).repeat(2))

    assert consumed(lambda: step(iterator), 7) == [6, 22, 17] * 2 + ["OutOfRangeError"]
    assert len(traces) == 3  # two sizes; and Python itself, which met the end


def test_a_function_that_drives_a_loop_gives_the_same_types_as_a_compiled_one():
    iterator = iter(rx.data.Dataset.range(3).batch(2))
    last = rx.function(lambda: (next(iterator), iterator.get_next_as_optional().has_value()))

    element, more = last()

    assert isinstance(element, jax.Array)
    assert element.dtype == jnp.int32
    assert bool(more)


def test_a_function_compiled_for_one_epoch_serves_the_next(place):
    dataset = place.experimental_distribute_dataset(rx.data.Dataset.range(8).batch(4))
    traces = []

    @rx.function
    def epoch(it):
        traces.append(1)
        step = lambda total, _: (total + summed(place, next(it)), None)  # noqa: E731
        return rx.scan(step, jnp.int32(0), length=2)[0]

    results = [int(epoch(iter(dataset))) for _ in range(3)]

    assert results == [28] * 3
    assert len(traces) == 1


def test_an_iterator_is_not_kept_alive_by_the_function_that_took_it():
    dataset = rx.data.Dataset.range(8)
    step = rx.function(lambda it: next(it) + 0)
    iterator = iter(dataset)
    step(iterator)

    alive = weakref.ref(iterator)
    del iterator
    gc.collect()

    assert alive() is None


def test_iterators_that_are_one_or_two_are_told_apart():
    dataset = rx.data.Dataset.range(8)
    pair = rx.function(lambda a, b: 10 * next(a) + next(b))
    one, other = iter(dataset), iter(dataset)

    assert int(pair(one, one)) == 1
    assert int(pair(one, other)) == 20
    assert int(pair(other, one)) == 13


def test_an_argument_is_not_taken_for_the_same_iterator_in_a_closure():
    dataset = rx.data.Dataset.range(8)
    captured, other = iter(dataset), iter(dataset)
    both = rx.function(lambda it: 10 * next(it) + next(captured))

    assert int(both(captured)) == 10 * 0 + 1
    assert int(both(other)) == 10 * 0 + 2
    assert int(both(captured)) == 10 * 3 + 4
