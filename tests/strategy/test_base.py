import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import compiled, components, context, mirrored, per_replica, replica_id

D = rx.distribute
PerReplica = D.PerReplica


@pytest.fixture
def strategy():
    return mirrored(2)


@pytest.fixture
def one():
    return D.OneDeviceStrategy("CPU:1")


class TestLocalResults:
    """Values as each replica of this process holds them."""

    def test_a_distributed_value_gives_its_components(self, strategy):
        for value in (
            strategy.run(lambda: replica_id()),
            compiled(strategy, lambda: replica_id()),
            PerReplica([jnp.float32(0), jnp.float32(1)]),
        ):
            results = strategy.experimental_local_results(value)

            assert type(results) is tuple
            assert [float(r) for r in results] == [0.0, 1.0]

    @pytest.mark.parametrize("plain", [3, "text", None, 2.5])
    def test_a_plain_value_is_its_own_only_result(self, strategy, plain):
        assert strategy.experimental_local_results(plain) == (plain,)

    def test_an_array_is_its_own_only_result(self, strategy):
        (result,) = strategy.experimental_local_results(jnp.ones(3))

        assert result.shape == (3,)

    def test_a_structure_gives_one_for_each_replica(self, strategy):
        value = strategy.run(lambda: {"a": replica_id(), "b": [replica_id() + 1], "c": "x"})

        results = strategy.experimental_local_results(value)

        assert [{"a": float(r["a"]), "b": float(r["b"][0]), "c": r["c"]} for r in results] == [
            {"a": 0.0, "b": 1.0, "c": "x"},
            {"a": 1.0, "b": 2.0, "c": "x"},
        ]

    @pytest.mark.parametrize("nest", [[], {}, (1, 2), {"a": 1}, [None]])
    def test_a_structure_of_plain_values_is_repeated_as_in_tensorflow(self, strategy, nest):
        assert strategy.experimental_local_results(nest) == (nest, nest)

    @pytest.mark.parametrize("nest", [[], (1, 2), {"a": [1, None]}])
    def test_with_one_device_a_structure_is_one_result(self, one, nest):
        assert one.experimental_local_results(nest) == (nest,)
        assert D.get_strategy().experimental_local_results(nest) == (nest,)

    def test_a_variable_gives_its_copies(self, strategy):
        with strategy.scope():
            v = rx.Variable(9.0)

        copies = strategy.experimental_local_results(v)

        assert [float(c) for c in copies] == [9.0, 9.0]
        assert [c.device[-1] for c in copies] == ["0", "1"]

    def test_it_works_inside_a_function(self, strategy):
        @rx.function
        def total(v):
            a, b = strategy.experimental_local_results(v)
            return a - b

        assert float(total(PerReplica([jnp.float32(5), jnp.float32(2)]))) == 3.0


class TestReduce:
    """What is not a per-replica value, and where reduce may be called."""

    def test_a_plain_array_is_its_own_mean(self, strategy):
        assert float(strategy.reduce("MEAN", jnp.float32(4), axis=None)) == 4.0
        assert strategy.reduce("MEAN", 3, axis=None) == 3

    def test_the_sum_of_a_plain_array_could_mean_two_things(self, strategy):
        with pytest.raises(ValueError, match="one value, not one for each of the 2 replicas"):
            strategy.reduce("SUM", jnp.float32(4), axis=None)

    @pytest.mark.parametrize(("op", "expected"), [("SUM", 6.0), ("MEAN", 1.5)])
    def test_over_an_axis_every_replica_counts_as_in_tensorflow(self, strategy, op, expected):
        assert float(strategy.reduce(op, jnp.asarray([1.0, 2.0]), axis=0)) == expected

    def test_a_mirrored_variable_is_its_own_mean_and_has_no_sum(self, strategy):
        with strategy.scope():
            v = rx.Variable(3.0)

        assert float(strategy.reduce("MEAN", v, axis=None)) == 3.0
        with pytest.raises(ValueError, match="times the replicas"):
            strategy.reduce("SUM", v, axis=None)

    def test_an_on_read_variable_is_reduced_over_its_copies(self, strategy):
        with strategy.scope():
            v = rx.Variable(
                0.0,
                synchronization=rx.VariableSynchronization.ON_READ,
                aggregation=rx.VariableAggregation.SUM,
            )
        strategy.run(lambda: v.assign(replica_id() + 1))

        assert float(strategy.reduce("SUM", v, axis=None)) == 3.0
        assert float(strategy.reduce("MEAN", v, axis=None)) == 1.5

    def test_a_mirrored_value_is_treated_as_plain(self, strategy):
        value = strategy.extended.broadcast_to(jnp.float32(2), ["CPU:0", "CPU:1"])

        assert float(strategy.reduce("MEAN", value, axis=None)) == 2.0
        with pytest.raises(ValueError, match="times the replicas"):
            strategy.reduce("SUM", value, axis=None)

    @pytest.mark.parametrize("op", ["SUM", "MEAN"])
    def test_with_one_device_the_value_is_its_own_reduction(self, one, op):
        for strategy in (one, D.get_strategy()):
            value = strategy.run(lambda: jnp.asarray([1.0, 3.0]))

            assert strategy.reduce(op, value, axis=None).tolist() == [1.0, 3.0]
            assert float(strategy.reduce(op, value, axis=0)) == (4.0 if op == "SUM" else 2.0)
            assert strategy.reduce(op, 3.0, axis=None) == 3.0

    def test_it_works_inside_a_function(self, strategy):
        @rx.function
        def step(x):
            value = strategy.run(lambda y: y * (replica_id() + 1), args=(x,))
            return strategy.reduce("SUM", value, axis=None), strategy.reduce("MEAN", value, axis=0)

        total, mean = step(jnp.asarray([1.0, 3.0]))

        assert total.tolist() == [3.0, 9.0]
        assert float(mean) == 3.0

    def test_it_is_differentiated_inside_a_function(self, strategy):
        def loss(x):
            return strategy.reduce("SUM", strategy.run(lambda y: y * y, args=(x,)), axis=None)

        assert float(rx.function(jax.grad(loss))(jnp.float32(3))) == 12.0


class TestGather:
    """Joining the replicas' values."""

    def test_structures_are_gathered_leaf_by_leaf(self, strategy):
        value = strategy.run(lambda: {"a": replica_id()[None], "b": [jnp.ones((1, 2))]})

        joined = strategy.gather(value, axis=0)

        assert joined["a"].tolist() == [0.0, 1.0]
        assert joined["b"][0].shape == (2, 2)

    def test_uneven_rows_are_joined(self, strategy):
        value = strategy.run(lambda: jnp.full(int(context().replica_id_in_sync_group), 7.0))

        assert strategy.gather(value, axis=0).tolist() == [7.0]

    def test_a_plain_array_is_itself(self, strategy, one):
        for each in (strategy, one, D.get_strategy()):
            assert each.gather(jnp.ones(2), axis=0).tolist() == [1.0, 1.0]

    def test_it_works_inside_a_function(self, strategy):
        @rx.function
        def step():
            return strategy.gather(strategy.run(lambda: replica_id()[None] * 5), axis=0)

        assert step().tolist() == [0.0, 5.0]


class TestDistributeValues:
    """Per-replica values of one's own making."""

    def test_each_replica_gets_what_its_context_made(self, strategy):
        value = strategy.experimental_distribute_values_from_function(
            lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync)
        )

        assert value[0].values == (0, 1)
        assert value[1].values == (2, 2)

    @pytest.mark.parametrize("kept", [np.float64(3.0), 2.5, "text", 7])
    def test_values_are_kept_as_they_are(self, strategy, kept):
        value = strategy.experimental_distribute_values_from_function(lambda c: kept)

        assert all(v is kept for v in value.values)

    def test_structures_are_regrouped(self, strategy):
        value = strategy.experimental_distribute_values_from_function(
            lambda c: {"a": [c.replica_id_in_sync_group]}
        )

        assert value["a"][0].values == (0, 1)

    def test_arrays_may_be_placed_first_on_the_workers_devices(self, strategy):
        devices = strategy.extended.worker_devices

        def on_its_device(c):
            with rx.device(devices[c.replica_id_in_sync_group]):
                return rx.identity(jnp.float32(c.replica_id_in_sync_group))

        value = strategy.experimental_distribute_values_from_function(on_its_device)

        assert components(strategy.run(lambda x: x + 1, args=(value,))) == [1.0, 2.0]

    def test_a_single_mirrored_replica_is_wrapped_and_one_device_is_not(self, one):
        single = mirrored(1)

        wrapped = single.experimental_distribute_values_from_function(lambda c: 5)
        bare = one.experimental_distribute_values_from_function(lambda c: 5)

        assert isinstance(wrapped, PerReplica)
        assert single.experimental_local_results(wrapped) == (5,)
        assert single.run(lambda x: x + 1, args=(wrapped,)) == 6
        assert bare == 5
        assert D.get_strategy().experimental_distribute_values_from_function(lambda c: 5) == 5

    def test_different_structures_are_refused(self, strategy):
        with pytest.raises(ValueError, match="different structures"):
            strategy.experimental_distribute_values_from_function(
                lambda c: [1] * (c.replica_id_in_sync_group + 1)
            )

    def test_it_works_inside_a_function(self, strategy):
        @rx.function
        def step():
            ids = strategy.experimental_distribute_values_from_function(
                lambda c: jnp.int32(c.replica_id_in_sync_group)
            )
            return strategy.run(lambda i: context().all_reduce("sum", i), args=(ids,))

        assert components(step()) == [1, 1]


class TestTheObject:
    """A strategy as a thing."""

    def test_it_is_not_copied_but_deep_copies_of_its_owners_keep_it(self, strategy):
        with pytest.raises(RuntimeError, match="cannot be copied"):
            copy.copy(strategy)

        holder = copy.deepcopy({"strategy": strategy, "other": [1]})
        assert holder["strategy"] is strategy

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: mirrored(2), "<MirroredStrategy of 2 replicas>"),
            (lambda: mirrored(1), "<MirroredStrategy of 1 replica>"),
            (lambda: D.OneDeviceStrategy("CPU:0"), "<OneDeviceStrategy of 1 replica>"),
            (D.get_strategy, "<the default strategy>"),
        ],
    )
    def test_it_prints_how_many_replicas_it_has(self, make, text):
        assert repr(make()) == text

    def test_it_has_no_cluster(self, strategy, one):
        for each in (strategy, one, D.get_strategy()):
            assert each.cluster_resolver is None

    def test_it_is_a_key(self, strategy):
        assert {strategy: 1}[strategy] == 1
        assert mirrored(2) != mirrored(2)

    def test_v2_reduce_needs_its_axis(self, strategy):
        with pytest.raises(TypeError, match="axis"):
            strategy.reduce("SUM", strategy.run(replica_id))

    @pytest.mark.parametrize("name", ["ParameterServerStrategy", "CentralStorageStrategy"])
    def test_what_replicax_leaves_out_says_so(self, name):
        with pytest.raises(AttributeError, match=f"has no {name}.*Use Mirrored"):
            getattr(D, name)

    def test_a_configuration_is_copied_and_changed(self, strategy):
        given = rx.compat.v1.ConfigProto(allow_soft_placement=True)

        changed = strategy.update_config_proto(given)

        assert changed is not given
        assert changed.isolate_session_state
        assert changed.allow_soft_placement
        assert not given.isolate_session_state

    def test_per_replica_values_of_the_helpers_are_on_their_devices(self, strategy):
        value = per_replica(strategy, [1.0, 2.0])

        assert [v.devices() for v in value.values] == [{d} for d in jax.devices()[:2]]
