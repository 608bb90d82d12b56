"""The v1 form of TPUStrategy."""

import copy
import inspect
import warnings

import jax.numpy as jnp
import pytest

import replicax as rx
from replicax._src.strategy import v1 as _strategies
from tests.replicas import components, context, replica_id

V1 = rx.compat.v1.distribute


@pytest.fixture
def strategy():
    return V1.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def one():
    return V1.OneDeviceStrategy("CPU:1")


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(_strategies, "_warned", set())


def test_v1_strategies_are_a_family_of_their_own(strategy, one):
    v2 = rx.distribute.MirroredStrategy(["CPU:0"])

    assert isinstance(strategy, V1.Strategy)
    assert isinstance(one, V1.Strategy)
    assert not isinstance(strategy, rx.distribute.Strategy)
    assert not isinstance(v2, V1.Strategy)
    assert isinstance(strategy.extended, rx.distribute.StrategyExtended)
    assert V1.StrategyExtended is rx.distribute.StrategyExtended
    assert strategy.num_replicas_in_sync == 2


def test_the_current_verbs_work(strategy):
    with strategy.scope():
        assert V1.get_strategy() is strategy
        v = rx.Variable(1.0)
    result = strategy.run(lambda x: x * v + replica_id(), args=(jnp.float32(2),))

    assert components(result) == [2.0, 3.0]
    assert [float(r) for r in strategy.experimental_local_results(result)] == [2.0, 3.0]
    assert not V1.has_strategy()
    assert not V1.in_cross_replica_context()
    assert V1.get_replica_context().num_replicas_in_sync == 1


def test_reduce_has_a_default_axis(strategy):
    value = strategy.run(lambda: jnp.asarray([1.0, 2.0]) * (replica_id() + 1))

    assert strategy.reduce("SUM", value).tolist() == [3.0, 6.0]
    assert float(strategy.reduce(V1.ReduceOp.MEAN, value, axis=0)) == 2.25
    assert inspect.signature(V1.Strategy.reduce).parameters["axis"].default is None


def test_the_name_of_run_in_2_0_works_and_warns_once(strategy):
    step = lambda x: x + replica_id()  # noqa: E731

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = strategy.experimental_run_v2(step, args=(jnp.float32(7),))
        second = strategy.experimental_run_v2(step, kwargs={"x": jnp.float32(3)})

    assert components(first) == [7.0, 8.0]
    assert components(second) == [3.0, 4.0]
    (warning,) = caught
    assert warning.category is DeprecationWarning
    assert "use `strategy.run`" in str(warning.message)
    assert warning.filename == __file__
    assert "options" not in inspect.signature(V1.Strategy.experimental_run_v2).parameters


def test_experimental_run_feeds_the_next_element(strategy):
    class Counted:
        def __init__(self):
            self.asked = 0

        def get_next(self):
            self.asked += 1
            return rx.distribute.PerReplica([jnp.float32(self.asked), jnp.float32(10)])

    iterator = Counted()
    with pytest.warns(DeprecationWarning, match="experimental_run"):
        one = strategy.experimental_run(lambda x: x * 2, iterator)
    two = strategy.experimental_run(lambda x: x * 2, iterator)
    none = strategy.experimental_run(lambda: replica_id() * 3)

    assert components(one) == [2.0, 20.0]
    assert components(two) == [4.0, 20.0]
    assert components(none) == [0.0, 3.0]
    assert iterator.asked == 2


def test_one_device_results_are_plain(one):
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert float(one.experimental_run(lambda: jnp.float32(3))) == 3.0
    assert one.experimental_local_results([1, 2]) == ([1, 2],)
    assert one.reduce("SUM", 4.0) == 4.0
    assert one.run(lambda: context().all_reduce("SUM", 2.0)) == 2.0


def test_cross_device_ops_are_taken(strategy):
    ops = rx.distribute.ReductionToOneDevice()

    assert V1.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops).cross_device_ops is ops


def test_configurations_are_copied_and_changed(strategy, one):
    given = rx.compat.v1.ConfigProto(allow_soft_placement=True)

    for each, isolated in ((strategy, True), (one, False)):
        changed = each.update_config_proto(given)

        assert changed is not given
        assert changed.isolate_session_state is isolated
        assert changed.allow_soft_placement
    assert given == rx.compat.v1.ConfigProto(allow_soft_placement=True)


def test_eager_execution_needs_no_switch():
    assert rx.compat.v1.enable_eager_execution() is None
    assert rx.enable_eager_execution() is None


ConfigProto = rx.compat.v1.ConfigProto


def test_a_configuration_has_the_fields_that_strategies_change():
    config = ConfigProto()

    assert config.allow_soft_placement is False
    assert config.isolate_session_state is False
    assert config.device_filters == []
    assert config.experimental.collective_group_leader == ""


def test_configurations_are_equal_by_value():
    assert ConfigProto(allow_soft_placement=True) == ConfigProto(allow_soft_placement=True)
    assert ConfigProto() != ConfigProto(allow_soft_placement=True)


def test_a_copy_shares_nothing():
    config = ConfigProto(device_filters=["/job:worker"])

    for other in (config.copy(), copy.deepcopy(config)):
        other.device_filters.append("/job:ps")
        other.experimental.collective_group_leader = "/job:worker/task:0"

    assert config.device_filters == ["/job:worker"]
    assert config.experimental.collective_group_leader == ""


def test_any_configuration_that_can_be_copied_will_do():
    class Other:
        allow_soft_placement = True
        isolate_session_state = False

    given = Other()
    changed = rx.compat.v1.distribute.MirroredStrategy(["CPU:0"]).update_config_proto(given)

    assert type(changed) is Other
    assert changed.isolate_session_state
    assert not given.isolate_session_state


v1 = rx.compat.v1.distribute


def test_it_is_a_v1_strategy_that_compiles_its_runs():
    strategy = v1.experimental.TPUStrategy(steps_per_run=3)
    traced = []

    def step(x):
        traced.append(1)
        return x + 1

    for _ in range(2):
        result = strategy.run(step, args=(jnp.float32(1),))

    assert isinstance(strategy, v1.Strategy)
    assert not isinstance(strategy, rx.distribute.Strategy)
    assert len(traced) == 1
    assert float(strategy.reduce("SUM", result)) == 2.0 * strategy.num_replicas_in_sync
    assert strategy.steps_per_run == 3
    assert isinstance(rx.distribute.TPUStrategy(), rx.distribute.Strategy)
