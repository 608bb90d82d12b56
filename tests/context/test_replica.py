from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import WAYS, components, context, local, mirrored, replica_id

D = rx.distribute
ScopeError = rx.errors.ScopeError


@pytest.fixture(params=[1, 2, 4], ids=lambda n: f"{n} replicas")
def strategy(request):
    return mirrored(request.param)


@pytest.mark.parametrize("way", WAYS)
def test_a_replica_knows_its_number_and_its_strategy(strategy, way):
    n = strategy.num_replicas_in_sync

    def step():
        assert context().num_replicas_in_sync == n
        assert context().strategy is strategy
        i = context().replica_id_in_sync_group
        assert i.dtype == jnp.int32
        assert i.shape == ()
        return i

    assert local(strategy, way(strategy, step)) == list(range(n))


def test_the_number_is_concrete_in_eager_code(strategy):
    seen = []

    def step():
        if context().replica_id_in_sync_group == 0:
            seen.append("first")
        return list(range(3))[context().replica_id_in_sync_group % 3]

    strategy.run(step)

    assert seen == ["first"]


@pytest.mark.parametrize(
    "use",
    [
        lambda i: "first" if i == 0 else "other",
        bool,
        int,
        float,
        range,
        lambda i: [1, 2, 3][i],
        np.asarray,
        lambda i: [x for x in range(3) if i > x],
    ],
)
def test_python_on_the_number_in_compiled_code_names_cond(use):
    strategy = mirrored(2)

    def step():
        use(context().replica_id_in_sync_group)
        return jnp.ones(())

    with pytest.raises(rx.errors.TracingError, match=r"rx\.cond") as error:
        rx.function(lambda: strategy.run(step))()

    assert "replica id" in str(error.value)
    assert isinstance(error.value, TypeError)


def test_cond_on_the_number_is_the_way(strategy):
    def step():
        i = context().replica_id_in_sync_group
        return rx.cond(i == 0, lambda: jnp.float32(10), lambda: jnp.float32(20))

    n = strategy.num_replicas_in_sync
    for result in (strategy.run(step), rx.function(lambda: strategy.run(step))()):
        assert local(strategy, result) == [10.0] + [20.0] * (n - 1)


def test_devices_name_the_replicas_own_in_eager_code():
    strategy = mirrored(2, first=3)

    names = strategy.run(lambda: context().devices[0])

    assert names.values == tuple(f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in (3, 4))


def test_a_context_prints_its_strategy(strategy):
    assert "MirroredStrategy" in strategy.run(lambda: repr(context()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("op", ["SUM", "mean", D.ReduceOp.SUM, D.ReduceOp.MEAN])
def test_all_reduce_combines_structures(strategy, way, op):
    n = strategy.num_replicas_in_sync
    share = 1 if str(getattr(op, "name", op)).upper() == "SUM" else n

    def step():
        return context().all_reduce(
            op, {"a": replica_id() + 1, "b": [jnp.ones(2), np.ones(1, np.float32), 2.0]}
        )

    result = way(strategy, step)

    total = n * (n + 1) / 2 / share
    assert local(strategy, result["a"]) == [total] * n
    assert local(strategy, result["b"][0]) == [[n / share] * 2] * n
    assert local(strategy, result["b"][1]) == [[n / share]] * n
    assert local(strategy, result["b"][2]) == [2.0 * n / share] * n


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("empty", [[], {}, (), None])
def test_all_reduce_of_nothing_is_nothing(way, empty):
    assert way(mirrored(2), lambda: context().all_reduce("SUM", empty)) == empty


@pytest.mark.parametrize("way", WAYS)
def test_variables_are_reduced_by_their_value(way):
    strategy = mirrored(2)
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])

    assert components(way(strategy, lambda: context().all_reduce("SUM", v))) == [[2.0, 4.0]] * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("bad", ["text", object(), b"x"])
def test_what_is_not_an_array_is_refused_by_name(way, verb, bad):
    calls = {
        "all_reduce": lambda: context().all_reduce("SUM", [bad]),
        "all_gather": lambda: context().all_gather([bad], axis=0),
    }

    with pytest.raises(TypeError, match=f"{verb} needs arrays, got"):
        way(mirrored(2), calls[verb])


@pytest.mark.parametrize("op", ["max", "", None, 3])
@pytest.mark.parametrize("way", WAYS)
def test_an_unknown_op_is_refused(way, op):
    with pytest.raises(ValueError, match="There is no reduce op"):
        way(mirrored(2), lambda: context().all_reduce(op, jnp.ones(())))


@pytest.mark.parametrize("axis", [1, -2, 5])
@pytest.mark.parametrize("way", WAYS)
def test_a_gather_along_an_axis_that_does_not_exist_is_refused(way, axis):
    with pytest.raises(ValueError, match=f"along axis={axis} of a value of shape"):
        way(mirrored(2), lambda: context().all_gather(jnp.ones(2), axis=axis))


@pytest.mark.parametrize("way", WAYS)
def test_scalars_are_not_gathered_and_the_error_shows_how(way):
    with pytest.raises(ValueError, match=r"value\[None\]"):
        way(mirrored(2), lambda: context().all_gather(replica_id(), axis=0))


@pytest.mark.parametrize("way", WAYS)
def test_gather_joins_structures(strategy, way):
    n = strategy.num_replicas_in_sync

    result = way(
        strategy,
        lambda: context().all_gather({"a": replica_id()[None], "b": [jnp.ones((1, 2))]}, axis=0),
    )

    assert local(strategy, result["a"]) == [[float(i) for i in range(n)]] * n
    assert local(strategy, result["b"][0]) == [[[1.0, 1.0]] * n] * n


class TestMergeCall:
    """One function for all replicas, in the middle of a replica function."""

    @pytest.mark.parametrize("way", WAYS)
    def test_it_sees_arguments_of_all_replicas_and_plain_values_as_they_are(self, way):
        strategy = mirrored(4)
        seen = []

        def merged(given, x, flag, extra=None):
            seen.append((given is strategy, type(x).__name__, flag, extra))
            seen.append(len(given.experimental_local_results(x)))
            return given.reduce("SUM", x, axis=None)

        def step():
            return context().merge_call(merged, (replica_id() + 1, "on"), {"extra": 5})

        assert components(way(strategy, step)) == [10.0] * 4
        assert seen == [(True, "PerReplica", "on", 5), 4]

    @pytest.mark.parametrize("way", WAYS)
    def test_a_structure_comes_back_component_by_component(self, way):
        strategy = mirrored(3)

        def step():
            result = context().merge_call(
                lambda s, x: {"own": x, "same": 5.0, "none": None}, (replica_id() * 10,)
            )
            assert result["none"] is None
            return result["own"] + result["same"]

        assert components(way(strategy, step)) == [5.0, 15.0, 25.0]

    @pytest.mark.parametrize("way", WAYS)
    def test_functions_of_the_leaves_keep_each_replicas_own(self, way):
        strategy = mirrored(3)

        def step():
            return context().merge_call(
                lambda s, x: jax.tree.map(lambda leaf: leaf * 10, x), (replica_id() + 1,)
            )

        assert components(way(strategy, step)) == [10.0, 20.0, 30.0]

    @pytest.mark.parametrize("way", WAYS)
    def test_a_value_made_of_local_results_comes_back_in_order(self, way):
        strategy = mirrored(3)

        def turned(s, x):
            return D.PerReplica(s.experimental_local_results(x)[::-1])

        def step():
            return context().merge_call(turned, (replica_id(),))

        assert components(way(strategy, step)) == [2.0, 1.0, 0.0]

    @pytest.mark.parametrize("way", WAYS)
    def test_gather_and_every_axis_of_reduce_work_there(self, way):
        strategy = mirrored(2)

        def merged(s, x):
            return (
                s.gather(x, axis=1),
                s.reduce("SUM", x, axis=0),
                s.reduce("MEAN", x, axis=(0, -1)),
                s.reduce("MEAN", x, axis=None),
            )

        def step():
            return context().merge_call(merged, (jnp.ones((2, 1)) * (replica_id() + 1),))

        gathered, total, mean_of_all, mean = way(strategy, step)

        assert components(gathered) == [[[1.0, 2.0], [1.0, 2.0]]] * 2
        assert components(total) == [[6.0]] * 2
        assert components(mean_of_all) == [1.5] * 2
        assert components(mean) == [[[1.5], [1.5]]] * 2

    def test_it_is_differentiated_in_compiled_code(self):
        strategy = mirrored(2)

        def step():
            def loss(x):
                total = context().merge_call(lambda s, v: s.reduce("SUM", v, axis=None), (x * x,))
                return total * (replica_id() + 1)

            return jax.grad(loss)(replica_id() + 1.0)

        result = rx.function(lambda: strategy.run(step))()

        assert components(result) == [6.0, 12.0]  # 3 * 2x, as for all_reduce

    @pytest.mark.parametrize("transform", [jax.grad, jax.jit, jax.vmap], ids=lambda t: t.__name__)
    def test_it_is_transformed_in_eager_code_as_in_compiled_code(self, transform):
        strategy = mirrored(2)

        def step(x):
            def total(x):
                merged = context().merge_call(lambda s, v: s.reduce("SUM", v, None), (x * x,))
                return jnp.sum(merged) * (replica_id() + 1)

            return transform(total)(x * (replica_id() + 1))

        x = jnp.ones(2) if transform is not jax.grad else jnp.float32(1)
        eager, one_program = strategy.run(step, args=(x,)), rx.function(strategy.run)(step, (x,))

        assert components(eager) == components(one_program)

    def test_a_run_inside_it_is_refused_in_compiled_code(self):
        strategy = mirrored(2)

        def step():
            return context().merge_call(lambda s: s.run(lambda: jnp.ones(())))

        with pytest.raises(ScopeError, match="part of every replica"):
            rx.function(lambda: strategy.run(step))()

    def test_a_run_inside_it_works_in_eager_code_as_in_tensorflow(self):
        strategy = mirrored(2)

        def step():
            own = context().merge_call(lambda s: s.run(lambda: context().all_reduce("SUM", 1.0)))
            return context().all_reduce("SUM", own)

        assert components(strategy.run(step)) == [4.0, 4.0]

    @pytest.mark.parametrize("make", [D.get_strategy, lambda: D.OneDeviceStrategy("CPU:0")])
    def test_with_one_replica_it_is_called_directly(self, make):
        strategy = make()

        def merged(s, x):
            assert D.in_cross_replica_context()
            return s is strategy, x * 2

        assert strategy.run(lambda: context().merge_call(merged, (3,))) == (True, 6)

    def test_outside_of_every_run_the_default_context_has_it_too(self):
        seen = context().merge_call(lambda s: (D.in_cross_replica_context(), context()))

        assert seen == (True, None)
        assert not D.in_cross_replica_context()


class TestWrongContext:
    """A context is good for the code that it was given to."""

    CALLS: ClassVar = {
        "all_reduce": lambda c: c.all_reduce("SUM", jnp.ones(())),
        "all_gather": lambda c: c.all_gather(jnp.ones(1), axis=0),
        "merge_call": lambda c: c.merge_call(lambda s: None),
    }

    @pytest.mark.parametrize("verb", CALLS)
    @pytest.mark.parametrize("way", WAYS)
    def test_it_is_refused_after_its_run(self, verb, way):
        kept = []
        way(mirrored(2), lambda: kept.append(context()))

        with pytest.raises(ScopeError, match=f"{verb} was called on a replica context that is not"):
            self.CALLS[verb](kept[0])

    @pytest.mark.parametrize("verb", CALLS)
    @pytest.mark.parametrize("way", WAYS)
    def test_it_is_refused_inside_merge_call(self, verb, way):
        def step():
            mine = context()
            return mine.merge_call(lambda s: self.CALLS[verb](mine))

        with pytest.raises(ScopeError, match="not the current one"):
            way(mirrored(2), step)

    @pytest.mark.parametrize("verb", CALLS)
    def test_it_is_refused_in_another_replica(self, verb):
        kept = []

        def step():
            kept.append(context())
            return self.CALLS[verb](kept[0])

        with pytest.raises(RuntimeError):
            mirrored(2).run(step)

    def test_the_default_context_is_refused_inside_a_scope(self):
        mine = context()

        with mirrored(2).scope(), pytest.raises(ScopeError):
            mine.all_reduce("SUM", jnp.ones(()))


@pytest.mark.parametrize("make", [D.get_strategy, lambda: D.OneDeviceStrategy("CPU:2")])
def test_with_one_replica_collectives_are_identities(make):
    strategy = make()

    def step():
        return (
            context().all_reduce("SUM", jnp.float32(3)),
            context().all_reduce("MEAN", {"k": jnp.ones(2)}),
            context().all_gather(jnp.ones(1), axis=0),
            context().num_replicas_in_sync,
            int(context().replica_id_in_sync_group),
        )

    for result in (strategy.run(step), rx.function(lambda: strategy.run(step))()):
        total, mean, rows, count, number = result
        assert float(total) == 3.0
        assert mean["k"].tolist() == [1.0, 1.0]
        assert rows.tolist() == [1.0]
        assert (int(count), int(number)) == (1, 0)
