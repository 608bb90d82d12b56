import importlib
import os
import subprocess
import textwrap

import jax
import jax.numpy as jnp
import pytest

from replicax._src.base.errors import PlacementError
from replicax._src.topology import virtual_devices
from replicax._src.topology.program_cache import sharing_programs
from tests.fresh_process import run_fresh

# XLA's own patience is 40 s; then, as here, it ends the process.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=15"

# Two cores, whatever the machine has: what the pool of threads is sized by.
_TWO_CORES = """
import importlib
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
"""

# Steps that follow each other without waiting: the first waits in a collective, the next come in.
_STEPS = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.sharding.Mesh(jax.devices(), ("replica",))
step = jax.jit(jax.shard_map(
    lambda x: jax.lax.psum(x, "replica"), mesh=mesh, in_specs=P("replica"), out_specs=P("replica")
))
x = jax.device_put(jnp.ones((len(jax.devices()), 64)), NamedSharding(mesh, P("replica")))
totals = [step(x) for _ in range(100)]
print(len(jax.devices()), *{float(total.sum()) for total in totals})
"""

_IMPORT = "import replicax as rx\n"

_BY_JAX = """
import jax
import jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", {devices})
"""

_BY_CONFIG = """
[cpu] = rx.config.list_physical_devices("CPU")
entries = [rx.config.LogicalDeviceConfiguration()] * {devices}
rx.config.set_logical_device_configuration(cpu, entries)
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    flags = f"{environment.pop('XLA_FLAGS', '')} {_PATIENCE}"
    return run_fresh(_TWO_CORES + textwrap.dedent(script), XLA_FLAGS=flags, **environment)


def assert_steps_end(result: subprocess.CompletedProcess[str], devices: int) -> None:
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == [str(devices), str(64.0 * devices * devices)]


two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the number of cores cannot be limited here"
)


@two_cores
@pytest.mark.parametrize("devices", [2, 8, 64])
def test_unblocked_steps_end_with_devices_from_our_variable(devices):
    result = run(_IMPORT + _STEPS, REPLICAX_CPU_DEVICES=str(devices))

    assert_steps_end(result, devices)


@two_cores
@pytest.mark.parametrize("devices", [8])
def test_unblocked_steps_end_with_devices_from_an_xla_flag(devices):
    flag = f"--xla_force_host_platform_device_count={devices}"

    result = run(_IMPORT + _STEPS, XLA_FLAGS=flag)

    assert_steps_end(result, devices)


@two_cores
@pytest.mark.parametrize("devices", [8])
def test_unblocked_steps_end_with_devices_asked_of_jax_after_the_import(devices):
    result = run(_IMPORT + _BY_JAX.format(devices=devices) + _STEPS)

    assert_steps_end(result, devices)


@two_cores
@pytest.mark.parametrize("devices", [8])
def test_unblocked_steps_end_with_devices_from_rx_config(devices):
    result = run(_IMPORT + _BY_CONFIG.format(devices=devices) + _STEPS)

    assert_steps_end(result, devices)


@two_cores
def test_unblocked_steps_end_though_the_shell_asks_for_few_threads():
    result = run(_IMPORT + _STEPS, JAX_NUM_CPU_DEVICES="8", NPROC="2", PJRT_NPROC="2")

    assert_steps_end(result, 8)


@two_cores
@pytest.mark.slow
def test_xla_still_stops_forever_without_our_cure():
    result = run(_BY_JAX.format(devices=64) + _STEPS)

    assert result.returncode != 0, "XLA has no deadlock any more: remove `_enough_threads`"
    assert "waiting for all" in result.stderr.replace("`", "") or "rendezvous" in result.stderr


def test_importing_starts_no_backend_and_leaves_the_environment_alone():
    result = run("""
        import jax  # which sets variables of its own
        before = dict(os.environ)
        import replicax
        from replicax._src.compat.jax import backend_is_initialized
        print(backend_is_initialized(), dict(os.environ) == before)
        jax.config.update("jax_num_cpu_devices", 4)
        print(len(jax.devices()), dict(os.environ) == before)
    """)

    assert result.stdout.split() == ["False", "True", "4", "True"], result.stderr


def test_one_device_keeps_the_threads_that_jax_gives_it():
    result = run("""
        import replicax, jax
        from replicax._src.topology import virtual_devices
        with virtual_devices._enough_threads():
            print(os.environ.get("NPROC"), os.environ.get("PJRT_NPROC"))
    """)

    assert result.stdout.split() == ["None", "None"], result.stderr


@pytest.mark.parametrize(("processes", "asked", "threads"), [(2, "", 1), (3, "", 1), (2, "5", 5)])
def test_workers_of_one_machine_share_its_cores_unless_told_otherwise(processes, asked, threads):
    result = run(
        f"""
        import replicax, jax
        from replicax._src.topology import virtual_devices
        from replicax._src.base import cores
        cores.divide([cores.local_facts()] * {processes}, 0)
        with virtual_devices._enough_threads():
            print(os.environ["NPROC"])
        """,
        NPROC=asked,
    )

    assert result.stdout.split() == [str(threads)], result.stderr


def test_the_pool_is_enlarged_while_the_backend_starts_and_restored_after(monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.delenv("PJRT_NPROC", raising=False)

    with virtual_devices._enough_threads():
        inside = os.environ["NPROC"], os.environ["PJRT_NPROC"]

    assert inside == ("32", "32")  # conftest.py plans 8 devices
    assert os.environ["NPROC"] == "2"
    assert "PJRT_NPROC" not in os.environ


def test_a_large_enough_pool_of_the_user_is_kept(monkeypatch):
    monkeypatch.setenv("NPROC", "48")

    with virtual_devices._enough_threads():
        assert os.environ["NPROC"] == "48"


@pytest.mark.parametrize("text", ["0", "-1", "x", "2.5", "\u0661", "100000000", "9" * 5000])
def test_a_device_count_that_is_not_a_number_names_the_variable_and_the_value(monkeypatch, text):
    monkeypatch.setenv("REPLICAX_CPU_DEVICES", text)

    with pytest.raises(
        PlacementError, match=r"REPLICAX_CPU_DEVICES=.* Expected 1 to 16384"
    ) as error:
        virtual_devices.requested_devices()

    assert repr(text[:40]) in str(error.value)


def test_importing_with_a_bad_device_count_fails_with_that_message():
    result = run(_IMPORT, REPLICAX_CPU_DEVICES="many")

    assert result.returncode != 0
    assert "REPLICAX_CPU_DEVICES='many' is not a number of devices" in result.stderr


def test_an_empty_device_count_means_none(monkeypatch):
    monkeypatch.setenv("REPLICAX_CPU_DEVICES", "")

    assert virtual_devices.requested_devices() is None


def test_our_variable_wins_over_an_xla_flag():
    result = run(
        _IMPORT + "import jax; print(len(jax.devices()))",
        REPLICAX_CPU_DEVICES="3",
        XLA_FLAGS="--xla_force_host_platform_device_count=5",
    )

    assert result.stdout.split() == ["3"], result.stderr


def test_importing_too_late_with_too_few_threads_warns_what_to_do():
    result = run("import jax; jax.devices(); import replicax", JAX_NUM_CPU_DEVICES="8", NPROC="2")

    assert result.returncode == 0, result.stderr
    assert "8 virtual CPU devices and only 2 thread(s)" in result.stderr
    assert "Import replicax before the first JAX computation" in result.stderr
    assert "NPROC=32" in result.stderr


def test_importing_too_late_with_enough_threads_is_silent():
    result = run("import jax; jax.devices(); import replicax", JAX_NUM_CPU_DEVICES="4", NPROC="16")

    assert (result.returncode, result.stderr) == (0, "")


def test_a_device_count_that_comes_too_late_warns():
    result = run("import jax; jax.devices(); import replicax", REPLICAX_CPU_DEVICES="4")

    assert result.returncode == 0, result.stderr
    assert "REPLICAX_CPU_DEVICES=4 comes too late" in result.stderr
    assert "started with 1 CPU device(s)" in result.stderr


def test_the_last_of_several_xla_flags_counts(monkeypatch):
    monkeypatch.setattr(virtual_devices, "setting", lambda name: -1)
    flag = "--xla_force_host_platform_device_count"
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=2 --xla_other=7 {flag}=5")

    assert virtual_devices.planned_cpu_devices() == 5


def test_nothing_planned_is_none(monkeypatch):
    monkeypatch.setattr(virtual_devices, "setting", lambda name: -1)
    monkeypatch.delenv("XLA_FLAGS", raising=False)

    assert virtual_devices.planned_cpu_devices() is None


_NAMED = """
import replicax as rx
rx.distribute.MirroredStrategy({names})
import jax
print(len(jax.devices()))
"""


@pytest.mark.parametrize(
    ("names", "environment", "count"),
    [
        (["CPU:0", "CPU:1"], {}, "2"),
        (["/cpu:1", "/device:CPU:2", "cpu:0"], {}, "3"),
        (["CPU:0"], {}, "1"),
        (["CPU:0", "CPU:1"], {"REPLICAX_CPU_DEVICES": "4"}, "4"),
        (["CPU:0", "CPU:1"], {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, "3"),
    ],
)
def test_named_cpu_devices_are_made_unless_their_number_is_set(names, environment, count):
    result = run_fresh(_NAMED.format(names=names), **({"REPLICAX_CPU_DEVICES": ""} | environment))

    assert result.stdout.split() == [count], result.stderr


@pytest.mark.parametrize("names", [["CPU:0", "CPU:7"], ["CPU:1", "CPU:2"], ["CPU:0", "GPU:1"]])
def test_no_cpu_devices_are_made_for_names_with_gaps(names):
    result = run_fresh(_NAMED.format(names=names), REPLICAX_CPU_DEVICES="")

    assert "There is no device" in result.stderr


def test_named_cpu_devices_after_the_start_of_jax_are_refused_with_the_way_out():
    script = "import replicax as rx, jax.numpy as jnp; jnp.ones(1)" + _NAMED

    result = run_fresh(script.format(names=["CPU:0", "CPU:1"]), REPLICAX_CPU_DEVICES="")

    assert "There is no device 'CPU:1'" in result.stderr
    assert "create the strategy before the first JAX computation" in result.stderr


@pytest.mark.parametrize(("devices", "threads"), [(2, 8), (4, 16), (8, 32), (64, 256)])
def test_four_threads_for_each_device(devices, threads):
    assert virtual_devices.threads_needed(devices) == threads


def test_these_tests_run_on_eight_devices():
    assert jax.local_device_count() == 8


def on_each_device(f, x, devices):
    with sharing_programs():
        return [f(jax.device_put(x, d)) for d in devices]


def shared():
    with sharing_programs():
        pass
    return importlib.import_module("jax._src.compiler").backend_compile_and_load


def test_a_program_of_one_virtual_device_is_loaded_on_the_others():
    f = jax.jit(lambda x: jnp.sin(x) * 1.2345 + x @ x)
    x = jnp.arange(9.0).reshape(3, 3)
    first, *others = jax.devices()
    (expected,) = on_each_device(f, x, [first])
    before = shared().loads

    found = on_each_device(f, x, others)

    assert shared().loads == before + len(others)
    assert [y.devices() for y in found] == [{d} for d in others]
    assert all((y == expected.tolist()).all() for y in map(jax.device_get, found))


def test_different_programs_are_not_taken_for_one_another():
    found = [
        [y.tolist() for y in on_each_device(jax.jit(f), jnp.arange(2.0), jax.devices()[:2])]
        for f in (lambda x: x + 3, lambda x: x + 6)
    ]

    assert found == [[[3.0, 4.0]] * 2, [[6.0, 7.0]] * 2]


def test_what_calls_back_or_is_kept_in_files_or_is_outside_is_compiled_for_each_device(tmp_path):
    seen = []
    x, devices, before = jnp.float32(3), jax.devices()[:2], shared().loads

    calls = jax.jit(lambda x: jax.pure_callback(lambda x: seen.append(1) or x, x, x))
    assert [float(y) for y in on_each_device(calls, x, devices)] == [3.0, 3.0]
    plain = jax.jit(lambda x: x * 7 + 1)
    assert [float(plain(jax.device_put(x, d))) for d in devices] == [22.0, 22.0]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        kept = jax.jit(lambda x: x * 8 + 1)
        assert [float(y) for y in on_each_device(kept, x, devices)] == [25.0, 25.0]
    finally:
        jax.config.update("jax_compilation_cache_dir", None)

    assert len(seen) == 2
    assert shared().loads == before
