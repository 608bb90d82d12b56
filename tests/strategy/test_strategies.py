import inspect

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from tests.fresh_process import run_fresh
from tests.replicas import components, context

D = rx.distribute


@pytest.mark.parametrize("devices", [None, []])
def test_without_a_list_all_devices_are_taken(devices):
    strategy = D.MirroredStrategy(devices)

    assert strategy.num_replicas_in_sync == len(jax.devices())
    assert len(strategy.extended.worker_devices) == len(jax.devices())


@pytest.mark.parametrize(
    "devices",
    [
        ["/cpu:2", "CPU:5"],
        ("/device:CPU:2", "/job:localhost/replica:0/task:0/device:CPU:5"),
        [2, 5],
    ],
)
def test_the_order_of_the_list_is_the_order_of_the_replicas(devices):
    devices = [jax.devices()[d] if isinstance(d, int) else d for d in devices]

    strategy = D.MirroredStrategy(devices=devices)

    assert [name[-5:] for name in strategy.extended.worker_devices] == ["CPU:2", "CPU:5"]
    assert strategy.extended.parameter_devices == strategy.extended.worker_devices
    ids = strategy.run(lambda: context().replica_id_in_sync_group + 0)
    assert [v.devices() for v in ids.values] == [{jax.devices()[2]}, {jax.devices()[5]}]


@pytest.mark.parametrize("compile_it", [False, True])
def test_reversed_devices_keep_their_replicas(compile_it):
    order = [6, 1, 4, 0]
    strategy = D.MirroredStrategy([f"CPU:{i}" for i in order])
    with strategy.scope():
        v = rx.Variable(1.0)
    run = lambda: strategy.run(lambda: v + context().replica_id_in_sync_group)  # noqa: E731

    result = (rx.function(run) if compile_it else run)()

    assert components(result) == [1.0, 2.0, 3.0, 4.0]
    assert [next(iter(x.devices())).id for x in result.values] == order
    assert [c.device[-1] for c in v.components] == [str(i) for i in order]


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["CPU:0", "/cpu:0"], "Duplicate devices CPU:0"),
        (["CPU:0", "CPU:99"], "There is no device 'CPU:99'.*REPLICAX_CPU_DEVICES"),
        (["GPU:0"], "There is no device 'GPU:0'.*This process has CPU:0 to CPU:7"),
        (["nonsense"], "is not a device name"),
        ("CPU:0", "devices must be a list of names, got 'CPU:0'"),
        ([3], "is not a device name"),
    ],
)
def test_devices_that_do_not_fit_are_refused_with_advice(devices, words):
    with pytest.raises(ValueError, match=words):
        D.MirroredStrategy(devices)


def test_the_environment_of_a_cluster_does_not_disturb(monkeypatch):
    for text in (
        '{"cluster": {"worker": ["h1:1", "h2:2"]}, "task": {"type": "worker", "index": 1}}',
        "{broken",
    ):
        monkeypatch.setenv("TF_CONFIG", text)
        strategy = D.MirroredStrategy(["CPU:0", "CPU:1"])

        assert strategy.num_replicas_in_sync == 2
        assert strategy.cluster_resolver is None


def test_it_is_a_strategy_with_an_extended_view():
    strategy = D.MirroredStrategy(["CPU:0"])

    assert isinstance(strategy, D.Strategy)
    assert isinstance(strategy.extended, D.StrategyExtended)


def test_it_cannot_be_derived_from():
    assert D.MirroredStrategy.__final__


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


@pytest.mark.parametrize(
    ("member", "parameters"),
    [
        ("run", ["self", "fn", "args", "kwargs", "options"]),
        ("reduce", ["self", "reduce_op", "value", "axis"]),
        ("gather", ["self", "value", "axis"]),
        ("scope", ["self"]),
        ("experimental_local_results", ["self", "value"]),
        ("experimental_distribute_values_from_function", ["self", "value_fn"]),
        ("update_config_proto", ["self", "config_proto"]),
    ],
)
def test_signatures_are_tensorflows(member, parameters):
    signature = inspect.signature(getattr(rx.distribute.Strategy, member))

    assert list(signature.parameters) == parameters


def test_the_axis_of_reduce_has_no_default():
    signature = inspect.signature(rx.distribute.Strategy.reduce)

    assert signature.parameters["axis"].default is inspect.Parameter.empty


SCRIPT = """
import jax, jax.numpy as jnp, replicax as rx
strategy = rx.distribute.MirroredStrategy()
traces = []
with strategy.scope():
    w = rx.Variable(jnp.zeros(8))
    seen = rx.Variable(0.0, synchronization=rx.VariableSynchronization.ON_READ,
                       aggregation=rx.VariableAggregation.SUM)

def step(x):
    traces.append(1)
    context = rx.distribute.get_replica_context()
    gradient = context.all_reduce("MEAN", w - x)
    w.assign_sub(0.5 * gradient)
    seen.assign_add(1.0)
    return context.all_reduce("SUM", context.replica_id_in_sync_group)

train = rx.function(lambda x: strategy.run(step, args=(x,)))
results = [train(jnp.ones(8)) for _ in range(30)]  # nothing waits in between
ids = [int(v) for v in results[-1].values]
rx.debug.check_in_sync()
print(strategy.num_replicas_in_sync, len(traces), float(w[0]) > 0.999, float(seen), set(ids))
"""


def test_64_virtual_devices_train_back_to_back_without_a_deadlock():
    result = run_fresh(SCRIPT, REPLICAX_CPU_DEVICES="64")

    assert result.stdout.split() == ["64", "1", "True", "1920.0", "{2016}"], result.stderr
