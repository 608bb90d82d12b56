"""Making variables: creator scopes, once for all replicas, and inside traced functions."""

import copy

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from replicax._src.base.errors import TracingError
from tests.replicas import context


def test_the_innermost_creator_is_called_first():
    order = []

    def named(name):
        def creator(next_creator, **kwargs):
            order.append(name)
            return next_creator(**{**kwargs, "name": kwargs.get("name", "") + name})

        return creator

    with rx.variable_creator_scope(named("outer")), rx.variable_creator_scope(named("inner")):
        v = rx.Variable(1.0, name="v_")

    assert order == ["inner", "outer"]
    assert v.name == "v_innerouter:0"
    assert rx.Variable(1.0).name == "Variable:0"


def test_a_creator_sees_every_argument_by_name():
    seen = {}

    def creator(next_creator, **kwargs):
        seen.update(kwargs)
        return next_creator(**kwargs)

    with rx.variable_creator_scope(creator):
        rx.Variable(1.0, False, dtype=jnp.float16)

    assert seen == {"initial_value": 1.0, "trainable": False, "dtype": jnp.float16}


def test_a_creator_scope_ends_with_an_exception():
    with (
        pytest.raises(ZeroDivisionError),
        rx.variable_creator_scope(lambda next_creator, **kwargs: 1 / 0),
    ):
        rx.Variable(1.0)

    assert float(rx.Variable(2.0)) == 2.0


def test_more_than_two_positional_arguments_are_refused():
    with pytest.raises(TypeError, match="3 positional"):
        rx.Variable(1.0, True, "name")


def test_the_nth_variable_of_every_eager_replica_is_one_variable(two):
    made = []

    def step():
        made.append(rx.Variable(1.0, name="a"))
        made.append(rx.Variable(2.0, name="b"))
        return made[-1]

    two.run(step)

    # The replicas take turns at every creation.
    assert [v.name for v in made] == ["a:0", "a:0", "b:0", "b:0"]
    assert made[0] is made[1]
    assert made[2] is made[3]
    assert len(made[0].components) == 2


def test_an_initial_function_is_called_once_for_all_copies(four):
    calls = []

    def initial():
        calls.append(1)
        return jnp.float32(len(calls))

    with four.scope():
        v = rx.Variable(initial)

    assert calls == [1]
    assert [float(c) for c in v.components] == [1.0] * 4


class Model:
    """Makes its variable when it is first called."""

    def __init__(self):
        self.v = None
        self.bodies = 0

    def __call__(self, initial):
        self.bodies += 1
        if self.v is None:
            self.v = rx.Variable(initial)
        self.v.assign_add(1.0)
        return self.v.read_value()


def test_a_variable_made_in_the_first_call_is_kept(two, mode):
    model = Model()
    step = mode(lambda: model(3.0))

    with two.scope():
        seen = [float(step()), float(step())]

    assert seen == [4.0, 5.0]
    assert len(model.v.components) == 2


def test_a_variable_made_inside_run_is_mirrored(two, mode):
    model = Model()
    step = mode(lambda: two.run(lambda: model(3.0)))

    step()
    seen = step()

    assert [float(x) for x in seen.values] == [5.0, 5.0]
    assert [float(c) for c in model.v.components] == [5.0, 5.0]


def test_an_initial_value_computed_in_the_trace_is_kept():
    model = Model()
    step = rx.function(lambda: model(jnp.ones(()) * 3 + jnp.arange(3.0).sum()))

    assert [float(step()), float(step())] == [7.0, 8.0]


def test_an_initial_value_computed_inside_run_is_kept(two):
    model = Model()
    step = rx.function(lambda: two.run(lambda: model(jnp.ones(()) * 3)))

    assert [float(x) for x in step().values] == [4.0, 4.0]
    assert [float(x) for x in step().values] == [5.0, 5.0]


def test_an_initial_value_that_depends_on_an_argument_is_refused():
    model = Model()

    with pytest.raises(TracingError, match=r"initial value of variable 'Variable:0'.*arguments"):
        rx.function(lambda x: model(x))(jnp.float32(1))


def test_random_initial_values_are_drawn_in_the_trace(two):
    key = jax.random.key(0)
    model = Model()
    step = rx.function(lambda: two.run(lambda: model(jax.random.normal(key, ()))))

    step()

    assert float(model.v) == pytest.approx(float(jax.random.normal(key, ())) + 1)


def test_an_initial_value_that_depends_on_the_replica_is_refused(two):
    model = Model()

    def step():
        i = rx.distribute.get_replica_context().replica_id_in_sync_group
        return model(i.astype(jnp.float32))

    with pytest.raises(TracingError, match=r"initial value.*replica"):
        rx.function(lambda: two.run(step))()


def test_a_tracer_of_jax_cannot_be_an_initial_value():
    with pytest.raises(TracingError, match="exists only while JAX traces"):
        jax.jit(lambda x: rx.Variable(x).read_value())(1.0)


def test_without_an_initial_value_it_says_what_one_is():
    with pytest.raises(ValueError, match="needs an initial value: an array, a number, or a func"):
        rx.Variable()


@pytest.mark.parametrize("aggregation", ["NONE", "MEAN"])
def test_a_deep_copy_is_a_variable_of_its_own(two, aggregation):
    with two.scope():
        v = rx.Variable([1.0, 2.0], name="w", aggregation=rx.VariableAggregation[aggregation])
    copied = copy.deepcopy({"layer": [v, v]})["layer"]
    copied[0].assign([5.0, 6.0])

    assert copied[0] is copied[1]
    assert v.numpy().tolist() == [1.0, 2.0]
    assert [c.numpy().tolist() for c in copied[0].components] == [[5.0, 6.0]] * 2
    assert (copied[0].name, copied[0].aggregation) == (v.name, v.aggregation)
    add = rx.function(lambda: two.run(lambda: copied[0].assign_add(jnp.ones(2))))
    add(), add()
    assert v.numpy().tolist() == [1.0, 2.0]
    assert copied[0].numpy().tolist() == [7.0, 8.0]


def test_a_deep_copy_has_every_replicas_own_value(two):
    with two.scope():
        v = rx.Variable(
            0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
    two.run(lambda: v.assign(context().replica_id_in_sync_group + 1))
    copied = copy.deepcopy(v)
    two.run(lambda: v.assign_add(10))

    assert [int(c.read_value()) for c in copied.components] == [1, 2]
    assert int(copied.read_value()) == 3
    assert int(copy.deepcopy(v.components[1]).read_value()) == 12


def test_a_plain_variable_is_copied_too_and_not_in_a_trace():
    v = rx.Variable(1.0)
    copied = copy.deepcopy(v)
    copied.assign(2.0)

    assert (float(v), float(copied)) == (1.0, 2.0)
    with pytest.raises(TracingError, match="Copy it outside"):
        rx.function(lambda: copy.deepcopy(v).read_value())()


def test_a_variable_that_is_read_as_a_sum_may_be_trained(two):
    on_read = {
        "synchronization": rx.VariableSynchronization.ON_READ,
        "aggregation": rx.VariableAggregation.SUM,
    }
    with two.scope():
        v = rx.Variable(3.0, trainable=True, **on_read)

    def step():
        with rx.GradientTape() as tape:
            loss = v * v
        return tape.gradient(loss, v)

    assert v.trainable
    for run in (two.run, rx.function(two.run)):
        assert [float(g) for g in run(step).values] == [6.0, 6.0]


@pytest.mark.parametrize("place", ["function", "replicas"])
def test_a_start_that_is_a_function_may_draw_random_numbers_in_a_trace(two, place):
    class Layer:
        v = None

        def __call__(self):
            if self.v is None:
                self.v = rx.Variable(lambda: rx.random.normal([2]))
            return self.v + rx.random.uniform([2]) * 0

    layer = Layer()
    run = rx.function(layer if place == "function" else lambda: two.run(layer))
    rx.random.set_seed(3)
    results = [two.experimental_local_results(run()) for _ in range(2)]

    rx.random.set_seed(3)
    start = rx.Variable(lambda: rx.random.normal([2])).numpy().tolist()
    if place == "replicas":
        with two.scope():
            rx.random.set_seed(3)
            start = rx.Variable(lambda: rx.random.normal([2])).numpy().tolist()
    assert layer.v.numpy().tolist() == start
    assert all(r.tolist() == start for replicas in results for r in replicas)


def test_a_start_that_reads_what_the_trace_has_changed_is_refused():
    v, made = rx.Variable(1.0), []

    @rx.function
    def step():
        v.assign(5.0)
        if not made:
            made.append(rx.Variable(lambda: v.read_value() * 2))
        return made[0].read_value()

    with pytest.raises(TracingError, match=r"before the first call"):
        step()


def test_a_start_may_read_what_the_trace_has_not_changed():
    v, made = rx.Variable(3.0), []

    @rx.function
    def step():
        if not made:
            made.append(rx.Variable(lambda: v.read_value() * 2))
        v.assign_add(1.0)
        return made[0].read_value() + v

    assert [float(step()) for _ in range(2)] == [10.0, 11.0]
