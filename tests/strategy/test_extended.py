import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import WAYS, components, context, mirrored, per_replica, replica_id

D = rx.distribute
Options = D.experimental.CommunicationOptions


@pytest.fixture
def strategy():
    return mirrored(2)


@pytest.fixture
def extended(strategy):
    return strategy.extended


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return rx.Variable(1.0)


@pytest.fixture
def value(strategy):
    return per_replica(strategy, [jnp.float32(1), jnp.float32(2)])


def in_merge_call(strategy, merged, *args):
    """``merged`` inside merge_call of compiled code."""
    return rx.function(
        lambda *given: strategy.run(lambda *own: context().merge_call(merged, own), args=given)
    )(*args)


class TestReductions:
    """reduce_to, batch_reduce_to and broadcast_to."""

    @pytest.mark.parametrize(("op", "expected"), [("SUM", 3.0), (D.ReduceOp.MEAN, 1.5)])
    def test_reduce_to_lands_on_the_copies_of_a_variable(
        self, strategy, extended, variable, value, op, expected
    ):
        result = extended.reduce_to(op, value, variable)

        assert isinstance(result, D.Mirrored)
        assert components(result) == [expected] * 2
        assert components(strategy.run(lambda x: x + 1, args=(result,))) == [expected + 1] * 2

    def test_reduce_to_lands_on_one_device(self, extended, value):
        result = extended.reduce_to("SUM", value, "CPU:1")

        assert float(result) == 3.0
        assert result.devices() == {jax.devices()[1]}

    def test_batch_reduce_to_keeps_order_and_shapes(self, strategy, extended, variable, value):
        rows = strategy.run(lambda: jnp.ones(2) * replica_id())

        one, two = extended.batch_reduce_to(
            "MEAN", [(value, variable), (rows, rows)], Options(bytes_per_pack=100)
        )

        assert components(one) == [1.5, 1.5]
        assert components(two) == [[0.5, 0.5]] * 2
        assert extended.batch_reduce_to("SUM", []) == []

    def test_broadcast_to_puts_a_value_on_every_copy(self, extended, variable):
        result = extended.broadcast_to(jnp.asarray([1.0, 2.0]), variable)

        assert isinstance(result, D.Mirrored)
        assert components(result) == [[1.0, 2.0]] * 2
        assert [v.devices() for v in result.values] == [{d} for d in jax.devices()[:2]]

    def test_they_work_in_merge_call_of_compiled_code(self, strategy, variable, value):
        def merged(s, x):
            return (
                s.extended.reduce_to("SUM", x, variable),
                s.extended.reduce_to("SUM", x, "CPU:0"),
                s.extended.batch_reduce_to("MEAN", [(x, x), (x, variable)])[1],
                s.extended.broadcast_to(jnp.float32(7), variable),
            )

        results = in_merge_call(strategy, merged, value)

        assert [components(r) for r in results] == [[3.0] * 2, [3.0] * 2, [1.5] * 2, [7.0] * 2]

    @pytest.mark.parametrize("kind", ["dense", "slices"])
    def test_compiled_functions_give_eager_results_at_every_destination(
        self, strategy, variable, kind
    ):
        def own(i):
            rows = jnp.ones((1, 2)) * (i + 1)
            return rx.IndexedSlices(rows, jnp.asarray([i]), jnp.asarray([3, 2]))

        rows = per_replica(strategy, [jnp.ones((3, 2)), jnp.ones((3, 2)) * 2])
        if kind == "slices":
            rows = strategy.experimental_distribute_values_from_function(
                lambda c: own(c.replica_id_in_sync_group)
            )
        extended = strategy.extended

        def reductions(x):
            return [
                (
                    extended.reduce_to("SUM", x, place),
                    extended.batch_reduce_to("MEAN", [(x, place)])[0],
                    extended.broadcast_to(jnp.ones(2), place),
                )
                for place in ("CPU:0", "CPU:1", ["CPU:1"], ["CPU:0", "CPU:1"], variable)
            ]

        def numbers(tree):
            leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, D.DistributedValues))
            return [np.asarray(strategy.experimental_local_results(x)[0]) for x in leaves]

        eager, compiled = reductions(rows), rx.function(reductions)(rows)
        for ours, theirs in zip(numbers(compiled), numbers(eager), strict=True):
            np.testing.assert_array_equal(ours, theirs)

    def test_a_destination_that_does_not_exist_is_refused_in_compiled_functions(
        self, extended, value
    ):
        with pytest.raises(rx.errors.PlacementError, match="CPU:99"):
            rx.function(lambda x: extended.reduce_to("SUM", x, "CPU:99"))(value)

    @pytest.mark.parametrize("verb", ["reduce_to", "batch_reduce_to", "broadcast_to"])
    @pytest.mark.parametrize("way", WAYS)
    def test_they_are_refused_inside_a_replica(self, strategy, extended, variable, verb, way):
        calls = {
            "reduce_to": lambda: extended.reduce_to("SUM", replica_id(), variable),
            "batch_reduce_to": lambda: extended.batch_reduce_to("SUM", [(replica_id(), variable)]),
            "broadcast_to": lambda: extended.broadcast_to(replica_id(), variable),
        }

        with pytest.raises(rx.errors.ScopeError, match=f"extended.{verb}` needs the cross-replica"):
            way(strategy, calls[verb])

    def test_with_one_device_they_are_identities(self):
        one = D.OneDeviceStrategy("CPU:1").extended

        assert float(one.reduce_to("SUM", jnp.float32(2), "CPU:1")) == 2.0
        assert one.batch_reduce_to("MEAN", [(2.0, "CPU:1")]) == [2.0]
        assert float(one.broadcast_to(jnp.float32(2), "CPU:1")) == 2.0


class TestUpdate:
    """A function of each copy of a variable."""

    def subtract(self, copy, delta):
        return copy.assign_sub(delta)

    def test_each_copy_meets_its_own_argument(self, extended, variable, value):
        seen = []

        def look(copy, own):
            seen.append((float(copy), float(own)))
            return own

        result = extended.update(variable, look, args=(value,))

        assert seen == [(1.0, 1.0), (1.0, 2.0)]
        assert isinstance(result, D.Mirrored)
        assert components(result) == [1.0, 2.0]

    def test_copies_may_not_drift_apart(self, extended, variable, value, mode):
        update = mode(lambda v: extended.update(variable, self.subtract, args=(v,)))

        with pytest.raises(rx.errors.DivergenceError):
            update(value)

        assert [float(c) for c in variable.components] == [1.0, 1.0]

    @pytest.mark.parametrize("compile_it", [False, True])
    def test_every_copy_is_updated_once(self, extended, variable, compile_it):
        update = lambda: extended.update(variable, lambda v: v.assign_add(1.0))  # noqa: E731
        run = rx.function(update) if compile_it else update

        for expected in (2.0, 3.0):
            run()
            assert [float(c) for c in variable.components] == [expected] * 2

    @pytest.mark.parametrize("compile_it", [False, True])
    def test_keyword_arguments_and_results_are_passed(self, extended, variable, value, compile_it):
        update = lambda v: extended.update(  # noqa: E731
            variable, lambda copy, *, k: {"out": k * 2 + copy}, kwargs={"k": v}
        )

        result = (rx.function(update) if compile_it else update)(value)

        assert components(result["out"]) == [3.0, 5.0]

    @pytest.mark.parametrize("compile_it", [False, True])
    def test_ungrouped_results_are_a_tuple(self, extended, variable, value, compile_it):
        update = lambda v: extended.update(  # noqa: E731
            variable, lambda copy, x: x * 2, args=(v,), group=False
        )

        result = (rx.function(update) if compile_it else update)(value)

        assert isinstance(result, tuple)
        assert [float(r) for r in result] == [2.0, 4.0]

    def test_it_runs_in_cross_replica_context(self, extended, variable):
        seen = extended.update(variable, lambda v: D.in_cross_replica_context())

        assert seen is True

    @pytest.mark.parametrize("way", WAYS)
    def test_from_a_replica_it_merges_by_itself(self, strategy, extended, variable, way):
        way(strategy, lambda: extended.update(variable, self.subtract, args=(jnp.float32(3),)))

        assert [float(c) for c in variable.components] == [-2.0, -2.0]

    @pytest.mark.parametrize("way", WAYS)
    def test_a_user_defined_optimizer_reduces_and_updates(self, strategy, variable, way):
        def apply(s, gradient):
            total = s.extended.reduce_to("SUM", gradient, variable)
            return s.extended.update(variable, self.subtract, args=(total,))

        def step():
            return context().merge_call(apply, (replica_id() + 1,))

        way(strategy, step)

        assert [float(c) for c in variable.components] == [-2.0, -2.0]

    def test_with_one_device_the_variable_itself_is_given(self):
        one = D.OneDeviceStrategy("CPU:1")
        with one.scope():
            v = rx.Variable(1.0)

        result = one.extended.update(v, lambda copy: copy.assign_add(2.0))

        assert result is v
        assert float(v) == 3.0


class TestNonSlot:
    """What belongs to no variable."""

    def test_it_is_called_once_for_each_device(self, extended, variable, value):
        devices = extended.non_slot_devices([variable])

        grouped = extended.update_non_slot(devices, lambda x: x * 2, args=(value,))
        apart = extended.update_non_slot(devices, lambda x: x * 2, args=(value,), group=False)

        assert devices == extended.parameter_devices
        assert components(grouped) == [2.0, 4.0]
        assert [float(r) for r in apart] == [2.0, 4.0]

    def test_in_compiled_code_too(self, extended, value):
        update = rx.function(
            lambda v: extended.update_non_slot(None, lambda x, *, k: x * k, (v,), {"k": 3.0})
        )

        assert components(update(value)) == [3.0, 6.0]

    def test_with_one_device_it_is_called_once(self):
        one = D.OneDeviceStrategy("CPU:1").extended

        assert one.update_non_slot(["CPU:1"], lambda a: a + 1, args=(1,)) == 2


def test_call_for_each_replica_is_run(strategy, extended):
    result = extended.call_for_each_replica(
        lambda x, k=1.0: x * k + replica_id(), args=(jnp.float32(2),), kwargs={"k": 5.0}
    )

    assert components(result) == [10.0, 11.0]


def test_read_var_reads_in_every_context(strategy, extended, variable):
    with strategy.scope():
        on_read = rx.Variable(
            2.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    assert float(extended.read_var(variable)) == 1.0
    assert float(extended.read_var(on_read)) == 4.0
    assert components(strategy.run(lambda: extended.read_var(on_read) + 0)) == [2.0, 2.0]


def test_value_container_finds_the_whole_of_a_copy(strategy, extended, variable):
    for copy in strategy.experimental_local_results(variable):
        assert extended.value_container(copy) is variable
    assert extended.value_container(variable) is variable
    assert extended.value_container(3) == 3


def test_variables_know_where_they_were_created(extended, variable):
    other = mirrored(2)

    assert extended.variable_created_in_scope(variable)
    assert not other.extended.variable_created_in_scope(variable)
    assert not extended.variable_created_in_scope(rx.Variable(1.0))


def test_colocate_needs_a_variable_of_the_strategy(strategy, extended, variable):
    with strategy.scope(), extended.colocate_vars_with(variable):
        beside = rx.Variable(2.0)

    assert [c.device for c in beside.components] == [c.device for c in variable.components]
    for other in (rx.Variable(1.0), 3):
        with pytest.raises(ValueError, match="colocate_vars_with needs a variable made in"):
            extended.colocate_vars_with(other).__enter__()


@pytest.mark.parametrize("make", [lambda: mirrored(2), lambda: D.OneDeviceStrategy("CPU:0")])
def test_facts_of_single_worker_strategies(make):
    extended = make().extended

    assert extended.experimental_require_static_shapes is False
    assert extended.experimental_between_graph is False
    assert extended.experimental_should_init is True
    assert extended.should_checkpoint is True
    assert extended.should_save_summary is True
    assert extended.worker_devices == extended.parameter_devices


def test_results_of_an_update_are_arrays(extended, variable):
    result = extended.update(variable, lambda v: v.assign(5.0))

    assert [np.asarray(v).item() for v in result.values] == [5.0, 5.0]


def test_hosts_are_the_processes_of_the_replicas():
    assert rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).extended.num_hosts == 1
    assert rx.distribute.get_strategy().extended.num_hosts == 1


# Several steps: what TensorFlow 2.21's v1 strategies gave for the same program.


def test_steps_on_an_iterator_hand_out_what_the_last_one_set():
    strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
    iterator = strategy.make_dataset_iterator(rx.data.Dataset.range(12).batch(2))

    def step(context, batch):
        def replica(x):
            total.assign_add(x.sum().astype(jnp.float32))
            context.set_last_step_output("own", 3.0 * x, reduce_op="SUM")
            context.set_non_tensor_output("words", "text")
            return 2.0 * x

        doubled = strategy.extended.call_for_each_replica(replica, args=(batch,))
        context.set_last_step_output("raw", doubled)
        context.set_last_step_output("sum", doubled, reduce_op=rx.distribute.ReduceOp.SUM)
        context.set_non_tensor_output("n", 5)

    context = strategy.extended.experimental_run_steps_on_iterator(step, iterator, iterations=3)

    found = context.last_step_outputs
    assert [x.tolist() for x in strategy.experimental_local_results(found["raw"])] == [[8], [10]]
    assert (found["sum"].tolist(), found["own"].tolist()) == ([18], [27])
    assert context.non_tensor_outputs == {"n": 5, "words": ("text",)}
    assert context.run_op is None
    assert float(total) == 15


def test_a_step_beyond_the_end_and_an_output_that_stays_apart_are_refused():
    strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    iterator = strategy.make_dataset_iterator(rx.data.Dataset.range(4).batch(2))
    run = strategy.extended.experimental_run_steps_on_iterator

    with pytest.raises(rx.errors.OutOfRangeError):
        run(lambda context, batch: None, iterator, 3)
    iterator.initialize()

    def apart(context, batch):
        strategy.run(lambda x: context.set_last_step_output("x", x), args=(batch,))

    with pytest.raises(ValueError, match="needs reduce_op"):
        run(apart, iterator)
