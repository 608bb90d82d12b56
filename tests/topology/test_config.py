import pytest

import replicax as rx
from replicax._src.base.errors import PlacementError, ScopeError
from replicax._src.topology import config
from tests.fresh_process import run_fresh

CPU = rx.config.PhysicalDevice("/physical_device:CPU:0", "CPU")
ONE = rx.config.LogicalDeviceConfiguration()


def test_all_cpus_are_one_physical_device():
    assert rx.config.list_physical_devices("CPU") == [CPU]


def test_every_virtual_device_is_a_logical_one():
    devices = rx.config.list_logical_devices("CPU")

    assert [device.name for device in devices] == [f"/device:CPU:{i}" for i in range(8)]
    assert {device.device_type for device in devices} == {"CPU"}


@pytest.mark.parametrize(
    "list_devices", [rx.config.list_physical_devices, rx.config.list_logical_devices]
)
def test_a_type_that_the_machine_lacks_lists_nothing(list_devices):
    assert list_devices("TPU") == []
    assert list_devices("XPU") == []


def test_a_type_may_be_in_lower_case():
    assert rx.config.list_physical_devices("cpu") == [CPU]


def test_devices_print_like_those_of_tensorflow():
    assert repr(CPU) == "PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')"
    assert (
        repr(rx.config.list_logical_devices()[0])
        == "LogicalDevice(name='/device:CPU:0', device_type='CPU')"
    )


def test_a_logical_device_name_is_a_device_name():
    name = rx.config.list_logical_devices("CPU")[3].name

    assert rx.device_name(name) == "/job:localhost/replica:0/task:0/device:CPU:3"


def test_listing_physical_devices_starts_no_backend():
    result = run_fresh("""
        import replicax as rx
        from replicax._src.compat.jax import backend_is_initialized
        rx.config.list_physical_devices()
        print(backend_is_initialized())
    """)

    assert result.stdout.split() == ["False"], result.stderr


def test_setting_makes_logical_devices():
    result = run_fresh("""
        import replicax as rx
        [cpu] = rx.config.list_physical_devices("CPU")
        print(rx.config.get_logical_device_configuration(cpu))
        three = [rx.config.LogicalDeviceConfiguration()] * 3
        rx.config.set_logical_device_configuration(cpu, three)
        print(len(rx.config.get_logical_device_configuration(cpu)))
        print(len(rx.config.list_logical_devices("CPU")))
        print(len(rx.config.list_physical_devices("CPU")))
    """)

    assert result.stdout.split() == ["None", "3", "3", "1"], result.stderr


def test_setting_after_the_start_says_to_call_it_first():
    with pytest.raises(ScopeError, match="already started with 8 CPU") as error:
        rx.config.set_logical_device_configuration(CPU, [ONE] * 2)

    assert isinstance(error.value, RuntimeError)
    assert "at the top of the program" in str(error.value)


def test_setting_after_the_start_to_what_is_there_changes_nothing():
    rx.config.set_logical_device_configuration(CPU, [ONE] * 8)

    assert rx.config.get_logical_device_configuration(CPU) == [ONE] * 8


def test_an_accelerator_cannot_be_split():
    gpu = rx.config.PhysicalDevice("/physical_device:GPU:0", "GPU")

    with pytest.raises(PlacementError, match="Cannot split /physical_device:GPU:0"):
        rx.config.set_logical_device_configuration(gpu, [ONE] * 2)

    assert rx.config.get_logical_device_configuration(gpu) is None


@pytest.mark.parametrize("device", ["CPU:0", None, 3])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(PlacementError, match="list_physical_devices"):
        rx.config.set_logical_device_configuration(device, [ONE])
    with pytest.raises(PlacementError, match="list_physical_devices"):
        rx.config.get_logical_device_configuration(device)


def test_no_logical_device_is_refused():
    with pytest.raises(PlacementError, match="No logical device in the list"):
        rx.config.set_logical_device_configuration(CPU, [])


def test_an_entry_that_is_not_a_configuration_is_shown():
    with pytest.raises(PlacementError, match="it holds 2"):
        rx.config.set_logical_device_configuration(CPU, [ONE, 2])


@pytest.mark.parametrize("extra", [{"memory_limit": 1024}, {"experimental_priority": 1}])
def test_limits_that_a_cpu_does_not_have_are_refused(extra):
    entry = rx.config.LogicalDeviceConfiguration(**extra)

    with pytest.raises(PlacementError, match="memory limit or a priority"):
        rx.config.set_logical_device_configuration(CPU, [entry])


@pytest.mark.parametrize(
    ("platforms", "kind", "possible"),
    [("cpu", "GPU", False), ("cpu", "TPU", False), ("cuda,cpu", "TPU", False)],
)
def test_platforms_that_jax_is_told_to_leave_out_are_not_asked(
    monkeypatch, platforms, kind, possible
):
    monkeypatch.setattr(config, "setting", lambda name: platforms)

    assert config._may_have(kind) is possible


def test_a_plugin_is_what_makes_a_gpu_possible(monkeypatch):
    monkeypatch.setattr(config, "setting", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [group])

    assert config._may_have("GPU")
    assert not config._may_have("TPU")
