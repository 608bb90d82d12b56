"""The pytest plugin, in test runs of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import replicax

TESTS = """
import pytest

def test_two(rx_strategy):
    assert rx_strategy.num_replicas_in_sync == 2

@pytest.mark.rx_replicas(4)
def test_four(rx_strategy):
    assert rx_strategy.num_replicas_in_sync == 4

def test_of_both_sizes(rx_mirrored):
    assert [rx_mirrored(n).num_replicas_in_sync for n in (1, 3)] == [1, 3]
"""


def run(folder, text, *options):
    (folder / "test_mine.py").write_text(textwrap.dedent(text))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "PYTEST_"))}
    env = clean | {"PYTHONPATH": str(Path(replicax.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    plugin = ["-p", "no:replicax", "-p", "replicax_command.pytest_plugin"]  # also if not installed
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "--strict-markers", *plugin, *options],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )


def test_the_number_of_devices_is_an_option_and_strategies_are_fixtures(tmp_path):
    done = run(tmp_path, TESTS, "--replicax-cpu-devices=4")

    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_the_number_of_devices_stands_in_the_configuration_and_tests_that_need_more_are_skipped(
    tmp_path,
):
    (tmp_path / "pytest.ini").write_text("[pytest]\nreplicax_cpu_devices = 3\n")

    done = run(tmp_path, TESTS)

    assert "2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "--replicax-cpu-devices=4" in done.stdout


def test_a_test_run_that_does_not_use_replicax_does_not_import_it(tmp_path):
    done = run(
        tmp_path,
        """
        import sys

        def test_other():
            assert not {"jax", "replicax"} & set(sys.modules)
        """,
    )

    assert "1 passed" in done.stdout, done.stdout + done.stderr
