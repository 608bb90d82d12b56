import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from tests.replicas import context

D = rx.distribute


@pytest.fixture
def one():
    return D.OneDeviceStrategy("/cpu:3")


def test_everything_lives_on_the_device(one):
    with one.scope():
        v = rx.Variable(2.0)

    result = one.run(lambda: (jnp.ones(2), v * 2, context().replica_id_in_sync_group))

    assert v.device.endswith("CPU:3")
    assert all(x.devices() == {jax.devices()[3]} for x in result)
    assert one.extended.worker_devices == ("/job:localhost/replica:0/task:0/device:CPU:3",)


@pytest.mark.parametrize("where", [0, 3, 6])
def test_arguments_of_any_device_are_computed_there(one, where):
    x = jax.device_put(jnp.ones(2), jax.devices()[where])
    with one.scope():
        v = rx.Variable(2.0)
    double = lambda y: y * v  # noqa: E731

    eager = one.run(double, args=(x,))
    compiled = rx.function(lambda y: one.run(double, args=(y,)))(x)

    assert eager.tolist() == compiled.tolist() == [2.0, 2.0]
    assert eager.devices() == {jax.devices()[3]}


def test_results_are_plain(one):
    result = one.run(lambda x: {"a": x, "b": [x + 1], "c": None}, args=(1,))

    assert result == {"a": 1, "b": [2], "c": None}


def test_the_pages_sum_over_python_numbers(one):
    total = 0
    for i in range(10):
        total += one.run(lambda x: x * 2, args=(i,))

    assert total == 90


@pytest.mark.parametrize("synchronization", list(rx.VariableSynchronization)[2:])
def test_variables_of_any_kind_are_ordinary(one, synchronization):
    with one.scope():
        v = rx.Variable(
            1.0, synchronization=synchronization, aggregation=rx.VariableAggregation.SUM
        )

    one.run(lambda: v.assign_add(2.0))
    v.assign_add(1.0)

    assert float(v) == 4.0
    assert [float(x) for x in one.experimental_local_results(v)] == [4.0]


def test_its_configuration_is_an_equal_copy(one):
    given = rx.compat.v1.ConfigProto(allow_soft_placement=True)

    copied = one.update_config_proto(given)

    assert copied == given
    assert copied is not given


@pytest.mark.parametrize("device", [None, ["CPU:0"], 3, "", "CPU:77"])
def test_what_names_no_device_is_refused(device):
    with pytest.raises(ValueError, match="device"):
        D.OneDeviceStrategy(device)


class TestTheDefaultStrategy:
    """What is there when no other is."""

    def test_every_verb_works(self):
        default = D.get_strategy()

        assert default.run(lambda x: x * 2, args=(3,)) == 6
        assert default.run(rx.function(lambda x: x * 2), args=(jnp.float32(3),)) == 6.0
        assert default.reduce("SUM", 3.0, axis=None) == 3.0
        assert default.gather(jnp.ones(1), axis=0).tolist() == [1.0]
        assert default.experimental_local_results(3) == (3,)
        assert default.num_replicas_in_sync == 1
        assert default.extended.reduce_to("SUM", 2.0, "CPU:0") == 2.0
        assert default.extended.broadcast_to(2.0, "CPU:0") == 2.0

    def test_its_configuration_is_an_equal_copy(self):
        given = rx.compat.v1.ConfigProto()

        assert D.get_strategy().update_config_proto(given) == given

    def test_it_has_no_devices_of_its_own(self):
        for name in ("worker_devices", "parameter_devices"):
            with pytest.raises(RuntimeError, match="not defined for the default strategy"):
                getattr(D.get_strategy().extended, name)

    def test_variables_are_plain_and_belong_to_it(self):
        v = rx.Variable(1.0)

        assert v.distribute_strategy is D.get_strategy()
        assert D.get_strategy().extended.variable_created_in_scope(v)
        D.get_strategy().run(lambda: v.assign_add(1.0))
        assert float(v) == 2.0
