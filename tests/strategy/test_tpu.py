import logging

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from tests.fresh_process import run_fresh
from tests.replicas import local
from tests.tpu.nets import slice_of

# Which devices.


def test_without_arguments_every_core_is_a_replica():
    strategy = rx.distribute.TPUStrategy()

    assert strategy.num_replicas_in_sync == 8
    assert strategy.extended.worker_devices == tuple(
        f"/job:localhost/replica:0/task:0/device:TPU:{i}" for i in range(8)
    )
    resolver = rx.distribute.cluster_resolver.TPUClusterResolver
    assert isinstance(strategy.cluster_resolver, resolver)


def test_the_resolver_that_was_given_is_the_strategys():
    resolver = rx.distribute.cluster_resolver.TPUClusterResolver(tpu="")

    assert rx.distribute.experimental.TPUStrategy(resolver).cluster_resolver is resolver


@pytest.mark.parametrize(("shape", "replicas", "cores"), [([1, 1, 2], 4, 2), ([2, 2, 2], 1, 8)])
def test_the_two_systems_of_the_page(shape, replicas, cores):
    resolver = rx.distribute.cluster_resolver.TPUClusterResolver(tpu="")
    rx.config.experimental_connect_to_cluster(resolver)
    topology = rx.tpu.experimental.initialize_tpu_system(resolver)
    assignment = rx.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=shape, num_replicas=replicas
    )

    strategy = rx.distribute.experimental.TPUStrategy(resolver, device_assignment=assignment)

    assert strategy.num_replicas_in_sync == replicas
    assert strategy.topology.cores == cores
    assert str(replicas) in repr(strategy)
    assert str(cores) in repr(strategy)


def test_a_replica_lies_where_the_assignment_puts_it():
    topology = rx.tpu.experimental.initialize_tpu_system()
    cores = [[[1, 1, 0, 1]], [[0, 0, 0, 0]]]
    assignment = rx.tpu.experimental.DeviceAssignment(topology, cores)

    strategy = rx.distribute.TPUStrategy(experimental_device_assignment=assignment)

    names = [f"TPU:{assignment.tpu_ordinal(r)}" for r in range(2)]
    assert [n.split("device:")[1] for n in strategy.extended.worker_devices] == names
    assert names == ["TPU:7", "TPU:0"]


def test_worker_devices_are_names_that_rx_device_takes():
    strategy = rx.distribute.TPUStrategy()
    placed = []
    for name in strategy.extended.worker_devices:
        with rx.device(name):
            placed.append(jnp.float32(1.0))

    values = strategy.experimental_distribute_values_from_function(
        lambda ctx: placed[ctx.replica_id_in_sync_group]
    )

    assert [x.device.id for x in placed] == list(range(8))
    assert local(strategy, values) == [1.0] * 8


def test_simulated_tpus_are_named_only_while_the_system_is_up():
    with pytest.raises(ValueError, match="There is no device 'TPU:0'"), rx.device("TPU:0"):
        pass
    rx.tpu.experimental.initialize_tpu_system()
    assert len(rx.config.list_logical_devices("TPU")) == 8
    assert rx.device_name("TPU:1").endswith("device:TPU:1")

    rx.tpu.experimental.shutdown_tpu_system()

    assert rx.config.list_logical_devices("TPU") == []


def test_one_line_of_the_log_says_that_the_slice_is_simulated(caplog):
    with caplog.at_level(logging.INFO, "replicax"):
        rx.tpu.experimental.initialize_tpu_system()
        rx.distribute.TPUStrategy()

    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    assert "simulated" in lines[0]
    assert "2x2x1x2" in lines[0]


def test_a_variable_is_on_the_named_device():
    with rx.distribute.TPUStrategy().scope():
        variable = rx.Variable(1.0)

    assert variable.device.endswith("TPU:0")
    assert variable.components[3].device.endswith("TPU:3")


# What is refused.


def test_an_assignment_for_another_slice_is_refused():
    other = rx.tpu.experimental.Topology(None, [1, 1, 1, 1], [[[0, 0, 0, 0]]])
    assignment = rx.tpu.experimental.DeviceAssignment.build(other)

    with pytest.raises(ValueError, match=r"made for .*1x1x1x1.*this program runs on"):
        rx.distribute.TPUStrategy(experimental_device_assignment=assignment)


def test_something_that_is_not_an_assignment_is_refused():
    with pytest.raises(ValueError, match=r"device_assignment is a list.*DeviceAssignment\.build"):
        rx.distribute.experimental.TPUStrategy(device_assignment=[1])


def test_a_remote_tpu_cannot_be_driven():
    remote = rx.distribute.cluster_resolver.TPUClusterResolver("grpc://10.0.0.1:8470")

    for use in (
        rx.config.experimental_connect_to_cluster,
        rx.tpu.experimental.initialize_tpu_system,
        rx.tpu.experimental.shutdown_tpu_system,
        rx.distribute.TPUStrategy,
    ):
        with pytest.raises(ValueError, match="not attached to this machine"):
            use(remote)


@pytest.mark.parametrize("wrong", [5, "local", None])
def test_connecting_to_no_cluster_is_refused(wrong):
    with pytest.raises(ValueError, match="Expected a cluster resolver"):
        rx.config.experimental_connect_to_cluster(wrong)


@pytest.mark.parametrize(
    "strategy",
    [
        rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
        rx.distribute.OneDeviceStrategy("CPU:0"),
        rx.distribute.get_strategy(),
    ],
    ids=repr,
)
def test_other_strategies_name_the_one_that_has_logical_devices(strategy):
    for call in (
        lambda: strategy.experimental_split_to_logical_devices(jnp.ones(2), [1]),
        lambda: strategy.experimental_replicate_to_logical_devices(jnp.ones(2)),
        lambda: strategy.experimental_assign_to_logical_device(jnp.ones(2), 0),
    ):
        with pytest.raises(NotImplementedError, match=r"rx\.distribute\.TPUStrategy"):
            call()


# How a run runs.


def test_an_eager_run_is_compiled_once():
    strategy, traces = rx.distribute.TPUStrategy(), []

    def double(x):
        traces.append(isinstance(x, jax.core.Tracer))
        return x * 2

    for i in range(3):
        result = strategy.run(double, args=(jnp.float32(i),))

    assert traces == [True]
    assert local(strategy, result) == [4.0] * 8


def test_an_eager_run_of_one_replica_is_compiled_too():
    strategy, traces = slice_of(cores=8, replicas=1), []

    def double(x):
        traces.append(isinstance(x, jax.core.Tracer))
        return x * 2

    results = [strategy.run(double, args=(jnp.float32(i),)) for i in range(3)]

    assert traces == [True]
    assert [float(r) for r in results] == [0.0, 2.0, 4.0]


def test_a_compiled_run_writes_variables():
    strategy = rx.distribute.TPUStrategy()
    with strategy.scope():
        total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)

    strategy.run(lambda: total.assign_add(jnp.float32(1.0)))

    assert float(total) == 8.0


def test_reduce_lands_on_the_host():
    strategy = slice_of(cores=2, replicas=4)
    ids = strategy.run(lambda: rx.distribute.get_replica_context().replica_id_in_sync_group)

    total = strategy.reduce("SUM", ids, axis=None)

    assert int(total) == 6
    assert total.devices() == {jax.devices("cpu")[0]}


def test_a_short_last_batch_is_exact():
    strategy = rx.distribute.TPUStrategy()
    ragged = rx.distribute.PerReplica([jnp.ones(2)] * 7 + [jnp.ones(1)])

    sums = strategy.run(lambda x: x.sum(), args=(ragged,))

    assert local(strategy, sums) == [2.0] * 7 + [1.0]


@pytest.mark.parametrize(
    "options",
    [
        rx.distribute.RunOptions(experimental_enable_dynamic_batch_size=False),
        rx.distribute.RunOptions(
            experimental_xla_options=rx.tpu.XLAOptions(enable_xla_dynamic_padder=False)
        ),
    ],
    ids=["batch size", "padder"],
)
def test_run_options_may_forbid_a_short_last_batch(options):
    strategy = rx.distribute.TPUStrategy()
    ragged = rx.distribute.PerReplica([jnp.ones(2)] * 7 + [jnp.ones(1)])

    with pytest.raises(ValueError, match="drop_remainder=True"):
        strategy.run(lambda x: x.sum(), args=(ragged,), options=options)


def test_run_options_that_mean_nothing_here_are_accepted():
    options = rx.distribute.RunOptions(
        experimental_bucketizing_dynamic_shape=True,
        experimental_xla_options=rx.tpu.XLAOptions(use_spmd_for_xla_partitioning=False),
    )

    result = rx.distribute.TPUStrategy().run(lambda: jnp.float32(1.0), options=options)

    assert len(result.values) == 8


def test_xla_options_of_another_kind_are_refused():
    with pytest.raises(TypeError, match=r"rx\.tpu\.XLAOptions"):
        rx.distribute.RunOptions(experimental_xla_options={"xla_flag": True})


def test_logical_devices_need_the_same_shapes_on_all_replicas():
    strategy = slice_of(cores=2, replicas=4)
    ragged = rx.distribute.PerReplica([jnp.ones(2)] * 3 + [jnp.ones(1)])

    assert strategy.extended.experimental_require_static_shapes
    with pytest.raises(ValueError, match=r"needs the same shapes.*drop_remainder=True"):
        strategy.run(lambda x: x.sum(), args=(ragged,))


# A slice that the environment names.


def test_the_environment_names_the_slice_and_its_devices_are_made():
    result = run_fresh(
        """
        import replicax as rx
        topology = rx.tpu.experimental.initialize_tpu_system()
        build = rx.tpu.experimental.DeviceAssignment.build
        two = build(topology, [2, 2, 1, 2], num_replicas=2)
        strategy = rx.distribute.TPUStrategy(experimental_device_assignment=two)
        print(topology.mesh_shape.tolist(), strategy)
        """,
        REPLICAX_TPU_TOPOLOGY="v3:4x2",
    )

    assert "[4, 2, 1, 2] <TPUStrategy of 2 replicas of 8 logical devices>" in result.stdout


def test_a_slice_that_does_not_exist_is_refused_with_those_that_do():
    result = run_fresh("import replicax", REPLICAX_TPU_TOPOLOGY="v9:2x2")

    assert result.returncode == 1
    assert "'v9:2x2' is not the name of a TPU slice" in result.stderr
    assert "v5e:16x16" in result.stderr


def test_a_slice_of_more_devices_than_there_are_is_refused():
    result = run_fresh(
        """
        import replicax as rx
        rx.distribute.TPUStrategy()
        """,
        REPLICAX_TPU_TOPOLOGY="v5e:4x4",
        REPLICAX_CPU_DEVICES="4",
    )

    assert "v5e:4x4 has 16 devices" in result.stderr
    assert "REPLICAX_CPU_DEVICES" in result.stderr


def test_the_extended_view_has_the_names_of_tpus():
    strategy = rx.distribute.TPUStrategy()
    extended = strategy.extended

    assert isinstance(extended, rx.distribute.StrategyExtended)
    assert extended.num_hosts * extended.num_replicas_per_host == strategy.num_replicas_in_sync
    assert extended.tpu_hardware_feature == strategy.cluster_resolver.tpu_hardware_feature
    with extended.experimental_logical_device(0), strategy.scope():
        assert float(rx.Variable(1.0).read_value()) == 1.0
    with (
        pytest.raises(ValueError, match="no logical device 1"),
        extended.experimental_logical_device(1),
    ):
        pass
