import threading

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import replicax as rx
from replicax._src.base.errors import PlacementError
from replicax._src.topology import devices as _devices
from replicax._src.topology.devices import current_device, default_devices, resolve, resolve_all

SPELLINGS = [
    "CPU:{}",
    "cpu:{}",
    "/cpu:{}",
    "/CPU:{}",
    "device:CPU:{}",
    "/device:CPU:{}",
    "/job:localhost/device:CPU:{}",
    "/job:localhost/replica:0/task:0/device:CPU:{}",
    "/job:localhost/replica:0/task:0/cpu:{}",
]


@given(spelling=st.sampled_from(SPELLINGS), index=st.integers(0, 7))
def test_every_spelling_names_the_device_of_that_index(spelling, index):
    assert resolve(spelling.format(index)) == jax.devices("cpu")[index]


@given(spelling=st.sampled_from(SPELLINGS), index=st.integers(0, 7))
def test_every_spelling_has_one_canonical_name(spelling, index):
    name = rx.device_name(spelling.format(index))

    assert name == f"/job:localhost/replica:0/task:0/device:CPU:{index}"
    assert rx.device_name(name) == name


@pytest.mark.parametrize("name", ["cpu", "CPU", "/cpu", "/device:CPU"])
def test_a_name_without_an_index_is_the_first_device(name):
    assert resolve(name) == jax.devices("cpu")[0]


def test_a_device_resolves_to_itself():
    assert resolve(jax.devices()[2]) is jax.devices()[2]


@pytest.mark.parametrize("name", ["GPU:0", "/gpu:0", "TPU:0", "/device:TPU:7", "CPU:8", "cpu:99"])
def test_a_device_that_does_not_exist_lists_those_that_do(name):
    with pytest.raises(PlacementError) as error:
        resolve(name)

    message = str(error.value)
    assert f"There is no device {name!r}" in message
    assert "CPU:0 to CPU:7" in message
    assert "REPLICAX_CPU_DEVICES=8" in message
    assert "create the strategy before the first JAX computation" in message
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    "name", ["", "foo", "cpu:x", "cpu:-1", "cpu:0 ", "/cpu/0", "cpu:0:1", "gpu:*", 0, None, 1.5]
)
def test_what_is_not_a_device_name_shows_how_to_write_one(name):
    with pytest.raises(
        PlacementError, match=r"is not a device name. Write for example 'CPU:0'"
    ) as e:
        resolve(name)

    assert repr(name) in str(e.value)


def test_the_device_of_another_task_is_refused():
    with pytest.raises(PlacementError, match="task 3 of worker, and this process is task 0"):
        resolve("/job:worker/replica:0/task:3/device:CPU:0")


def test_the_own_task_of_a_cluster_is_accepted():
    assert resolve("/job:worker/replica:0/task:0/device:CPU:1") == jax.devices()[1]


def test_resolving_all_keeps_the_order():
    devices = resolve_all(["cpu:3", "/device:CPU:0", jax.devices()[5]])

    assert devices == tuple(jax.devices()[i] for i in (3, 0, 5))


@pytest.mark.parametrize("names", [["cpu:0", "/device:CPU:0"], ["cpu:1", "cpu:0", "CPU:1"]])
def test_duplicate_devices_are_named(names):
    with pytest.raises(PlacementError, match=r"Duplicate devices CPU:[01] in") as error:
        resolve_all(names)

    assert all(repr(name) in str(error.value) for name in names)
    assert "name every device once" in str(error.value)


@pytest.mark.parametrize("make", [resolve_all, rx.distribute.MirroredStrategy])
def test_a_number_of_devices_is_answered_with_their_names(make):
    with pytest.raises(PlacementError, match=r"the number 2.*\['CPU:0', 'CPU:1'\]"):
        make(2)


def test_devices_of_different_kinds_are_refused(monkeypatch):
    first, second = jax.devices()[:2]
    monkeypatch.setattr(_devices, "_kind", lambda d: "GPU" if d == second else "CPU")

    with pytest.raises(PlacementError, match=r"different kinds \(CPU and GPU\)"):
        resolve_all([first, second])


def test_the_default_is_every_cpu_device_without_an_accelerator():
    assert default_devices() == tuple(jax.devices("cpu"))


def test_gpus_are_preferred_to_tpus_and_tpus_to_cpus(monkeypatch):
    machine = {"CPU": ("c",), "TPU": ("t0", "t1"), "GPU": ("g",)}
    monkeypatch.setattr(_devices, "local_devices", machine.__getitem__)

    assert default_devices() == ("g",)
    machine["GPU"] = ()
    assert default_devices() == ("t0", "t1")


def test_the_name_of_an_array_is_that_of_its_device():
    x = jax.device_put(jnp.ones(2), jax.devices()[4])

    assert rx.device_name(x) == "/job:localhost/replica:0/task:0/device:CPU:4"


def test_a_device_attribute_that_is_a_name_is_taken():
    class Holder:
        device = "/job:localhost/replica:0/task:0/device:CPU:2"

    assert rx.device_name(Holder()) == Holder.device


def test_an_array_on_several_devices_has_no_name():
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    x = jax.device_put(jnp.ones(8), NamedSharding(mesh, PartitionSpec("x")))

    with pytest.raises(PlacementError, match=r"lies on 8 devices.*experimental_local_results"):
        rx.device_name(x)


def test_a_traced_value_has_no_device_yet():
    with pytest.raises(PlacementError, match="has no device yet"):
        jax.jit(rx.device_name)(1.0)


@pytest.mark.parametrize("x", [3, None, [1, 2], object()])
def test_what_lies_on_no_device_is_shown(x):
    with pytest.raises(PlacementError, match="which lies on no device"):
        rx.device_name(x)


def test_arrays_are_made_on_the_device_of_the_innermost_block():
    with rx.device("CPU:1") as outer:
        with rx.device(jax.devices()[2]):
            inner = jnp.ones(1)
        again = jnp.ones(1)
    after = jnp.ones(1)

    assert outer == jax.devices()[1]
    assert [rx.device_name(x)[-5:] for x in (inner, again, after)] == ["CPU:2", "CPU:1", "CPU:0"]


def test_none_returns_to_the_default_device_inside_a_block():
    with rx.device("CPU:1"), rx.device(None) as chosen:
        assert chosen is None
        assert current_device() is None
        assert rx.device_name(jnp.ones(1)).endswith("CPU:0")


def test_the_current_device_is_known_inside_a_block_only():
    assert current_device() is None
    with rx.device("CPU:1"):
        assert current_device() == jax.devices()[1]
    assert current_device() is None


def test_an_exception_ends_the_block():
    with pytest.raises(KeyError), rx.device("CPU:1"):
        raise KeyError

    assert current_device() is None
    assert rx.device_name(jnp.ones(1)).endswith("CPU:0")


def test_a_block_around_an_unknown_device_never_opens():
    with pytest.raises(PlacementError, match="There is no device 'GPU:0'"), rx.device("GPU:0"):
        pytest.fail("the block was entered")


def test_threads_do_not_see_the_block_of_another():
    seen = []
    with rx.device("CPU:1"):
        thread = threading.Thread(target=lambda: seen.append(current_device()))
        thread.start()
        thread.join()

    assert seen == [None]
