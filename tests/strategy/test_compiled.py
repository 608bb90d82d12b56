"""One program for all replicas: state, divergence, collectives that some would miss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.values.per_replica import Joined, Stacked
from tests.replicas import compiled, components, context, mirrored, per_replica, replica_id

D = rx.distribute


@pytest.fixture
def strategy():
    return mirrored(4)


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_writes_of_replicas_are_combined(strategy, aggregation):
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation[aggregation])

    compiled(strategy, lambda: v.assign(replica_id() + 1))

    expected = {"SUM": 10.0, "MEAN": 2.5, "ONLY_FIRST_REPLICA": 1.0}[aggregation]
    assert [float(c) for c in v.components] == [expected] * 4


def test_a_write_that_differs_is_refused_and_nothing_is_assigned(strategy):
    with strategy.scope():
        v = rx.Variable(5.0, name="w")

    with pytest.raises(rx.errors.DivergenceError, match="'w'"):
        compiled(strategy, lambda: v.assign(replica_id()))

    assert [float(c) for c in v.components] == [5.0] * 4


def test_a_write_that_is_equal_on_all_replicas_is_done(strategy):
    with strategy.scope():
        v = rx.Variable(5.0)

    compiled(strategy, lambda: v.assign(context().all_reduce("SUM", replica_id())))

    assert [float(c) for c in v.components] == [6.0] * 4


def test_own_state_stays_own(strategy):
    with strategy.scope():
        seen = rx.Variable(
            0.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
    step = rx.function(lambda: strategy.run(lambda: seen.assign_add(replica_id() + 1)))

    step()
    step()

    assert [float(c) for c in seen.components] == [2.0, 4.0, 6.0, 8.0]
    assert float(seen) == 20.0


@pytest.mark.parametrize(
    "divergent",
    [
        lambda x: rx.cond(x > 0, lambda: context().all_reduce("SUM", x), lambda: x),
        lambda x: rx.while_loop(lambda y: y < x, lambda y: context().all_reduce("SUM", y) + 1, x),
        lambda x: jax.lax.cond(
            x > 0, lambda y: context().all_gather(y[None], axis=0)[0], lambda y: y, x
        ),
        lambda x: jax.lax.switch(
            jnp.int32(x), [lambda y: y, lambda y: context().all_reduce("MEAN", y)], x
        ),
    ],
)
def test_a_collective_that_only_some_replicas_reach_is_refused(strategy, divergent):
    with pytest.raises(rx.errors.ReplicaError, match="some replicas would wait for others"):
        compiled(strategy, lambda: divergent(replica_id()))


def test_a_collective_under_a_condition_that_all_share_is_fine(strategy):
    def step(x):
        ready = context().all_reduce("SUM", replica_id()) > 3
        return rx.cond(ready, lambda: context().all_reduce("SUM", x), lambda: x)

    own = per_replica(strategy, [jnp.float32(i) for i in range(4)])

    assert components(compiled(strategy, step, own)) == [6.0] * 4


def test_inputs_of_all_kinds_enter_one_program(strategy):
    own = per_replica(strategy, [jnp.float32(i) for i in range(4)])
    same = strategy.extended.broadcast_to(jnp.float32(10), own)
    numbers = D.PerReplica([100, 200, 300, 400])

    result = compiled(
        strategy, lambda a, b, c, d: a + b + c + d, own, same, numbers, jnp.float32(1000)
    )

    assert components(result) == [1110.0, 1211.0, 1312.0, 1413.0]


def test_components_of_a_variable_as_pieces_of_a_value_are_refused_with_advice(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)
    own = strategy.experimental_local_results(v)
    value = strategy.experimental_distribute_values_from_function(
        lambda ctx: own[ctx.replica_id_in_sync_group]
    )

    with pytest.raises(TypeError, match=r"Run without `rx.function`; of variables use the whole"):
        compiled(strategy, lambda x: x * 1.0, value)


def test_mirrored_values_come_out_of_a_function(strategy):
    own = per_replica(strategy, [jnp.float32(i) for i in range(4)])
    total = rx.function(lambda v: strategy.extended.reduce_to("SUM", v, v))(own)

    assert isinstance(total, D.Mirrored)
    assert components(total) == [6.0] * 4


def test_compiled_training_equals_eager_training(strategy):
    def train(wrap):
        with strategy.scope():
            w = rx.Variable(jnp.zeros(2))
        x = per_replica(strategy, [jnp.ones((3, 2)) * (i + 1) for i in range(4)])

        def step(x):
            def loss():
                return rx.nn.compute_average_loss((x @ w.read_value() - 1.0) ** 2)

            value, gradient = rx.value_and_grad(loss, w)()
            gradient = context().all_reduce("SUM", gradient)
            w.assign_sub(0.02 * gradient)
            return value

        run = wrap(lambda v: strategy.reduce("SUM", strategy.run(step, args=(v,)), axis=None))
        return [float(run(x)) for _ in range(3)], w.numpy()

    eager, eager_weights = train(lambda f: f)
    fast, fast_weights = train(rx.function)

    assert eager == pytest.approx(fast, rel=1e-5)
    assert eager[0] > eager[1] > eager[2]
    assert eager_weights.tolist() == pytest.approx(fast_weights.tolist(), rel=1e-5)


class TestWhatDoesNotVary:
    """Functional state: it goes into every step, and comes out the same on all replicas."""

    def test_comes_out_as_one_array_and_goes_in_as_one(self, two):
        @rx.function
        def step(state, x):
            def replica(state, x):
                total = context().all_reduce("SUM", x)
                return {"w": state["w"] + total, "n": state["n"] + 1}, x

            return two.run(replica, args=(state, x))

        state = {"w": jnp.zeros(2), "n": jnp.int32(0)}
        own = two.experimental_distribute_values_from_function(
            lambda c: jnp.full(2, c.replica_id_in_sync_group + 1.0)
        )
        for _ in range(3):
            state, x = step(state, own)

        assert step.experimental_get_tracing_count() == 2  # arrays first, then what came out
        assert isinstance(state["w"], rx.distribute.PerReplica)
        assert isinstance(state["w"], rx.distribute.Mirrored)
        assert isinstance(state["w"].stored, Joined)
        assert not isinstance(x, rx.distribute.Mirrored)
        assert isinstance(x.stored, Stacked)
        assert [v.tolist() for v in state["w"].values] == [[9.0, 9.0]] * 2
        assert [v.devices() for v in state["w"].values] == [{d} for d in jax.devices()[:2]]

    def test_may_be_assigned_to_a_mirrored_variable(self, two):
        with two.scope():
            v = rx.Variable(0.0)
        state = compiled(two, lambda: context().all_reduce("SUM", jnp.float32(2)))
        assign = rx.function(lambda s: two.run(lambda s: v.assign(s * 3), args=(s,)))

        assign(state)

        assert float(v) == 12.0
        assert v.cell._verdict is None  # nobody had to compare

    @pytest.mark.parametrize("way", [lambda f: f, rx.function, jax.jit])
    def test_is_one_array_where_no_replica_runs(self, way, two):
        state = {"w": compiled(two, lambda: context().all_reduce("SUM", jnp.arange(2.0)))}

        loss = way(lambda state: (state["w"] ** 2).sum() + state["w"][1])(state)
        slope = way(jax.grad(lambda state: (state["w"] ** 2).sum()))(state)

        assert float(loss) == 6.0
        assert np.asarray(slope["w"]).tolist() == [0.0, 4.0]
        assert (state["w"].shape, float(state["w"][1])) == ((2,), 2.0)
        assert (state["w"] == 2.0).tolist() == [False, True]

    def test_keeps_what_differs_from_being_one_array(self, two):
        own = compiled(two, lambda: context().replica_id_in_sync_group * jnp.ones(2))

        with pytest.raises(rx.errors.PerReplicaError, match="one value for each replica"):
            own + 1

    @pytest.mark.parametrize("way", [lambda f: f, rx.function])
    def test_is_still_one_value_for_each_replica(self, way, two):
        same = compiled(two, lambda: jnp.arange(2.0))

        total = way(lambda s: two.reduce("SUM", s, axis=None))(same)
        mean = way(lambda s: two.reduce("MEAN", s, axis=0))(same)
        joined = way(lambda s: two.gather(s, axis=0))(same)

        assert total.tolist() == [0.0, 2.0]
        assert float(mean) == 0.5
        assert joined.tolist() == [0.0, 1.0, 0.0, 1.0]
