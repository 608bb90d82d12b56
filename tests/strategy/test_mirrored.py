import jax
import pytest

import replicax as rx
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
def test_devices_that_do_not_fit_are_refused_in_words(devices, words):
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
