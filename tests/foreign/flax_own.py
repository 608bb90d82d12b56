"""Run the tests of Flax NNX, which are in its sdist, beside replicax and in a scope.

``python -m tests.foreign.flax_own [file ...]`` prints how many pass, file by file. `FLAX_TESTS`
names a folder with Flax's ``tests/nnx``; without it pip downloads the sdist of the installed Flax.
"""

import functools
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.foreign.own_tests import Suite

_OTHER_DEVICES = (
    "makes variables, which the strategy puts on its two devices, and then gives them to a jit or"
    " a shard_map of its own over four, or asserts that they are on one"
)
_CLOSED_OVER = (
    "reads a variable inside a trace of JAX that closes over it and would keep its value; a"
    " strategy's variables refuse that"
)

# Tests that pass without replicax and not in a way, and why.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "scope": {
        "TestShardMap.": _OTHER_DEVICES,
        "test_apply_shardings": _OTHER_DEVICES,
        "test_with_sharding_and_static_args": _OTHER_DEVICES,
        "test_jit_partial_in_shardings_named": _OTHER_DEVICES,
        "test_jit_partial_mixed_shardings": _OTHER_DEVICES,
        "test_equivalent_state_sharding_mapping": _OTHER_DEVICES,
        "TestHijaxVariables.test_ref_and_pytree": "jits over references (jax.new_ref) of one device"
        " and of the strategy's two; JAX moves no reference",
        "lora_test.TestLora.test_basic": _CLOSED_OVER,
        "optimizer_test.TestOptimizer.test_jit": _CLOSED_OVER,
        "test_wrt_update_linesearch": _CLOSED_OVER,
        "test_split_rngs_decorator_simple_functional": _CLOSED_OVER,
        "test_checkify_stateful": _CLOSED_OVER + " (checkify closes over its arguments)",
        "TestRngs.test_rng_stream": "asserts that a variable gives back the same object; here it is"
        " a copy on the strategy's devices",
        "test_graph_updates_unflatten_functional": "counts the traces of a function of weakly typed"
        " variables; a strategy's have a strong type after the first assignment",
    },
}


@functools.cache
def folder() -> Path:
    """Return the folder of Flax's tests of NNX, downloading them if the user names none."""
    if named := os.environ.get("FLAX_TESTS"):
        return Path(named).resolve()
    version = importlib.metadata.version("flax")
    where = Path(tempfile.gettempdir()) / f"flax-own-tests-{os.getuid()}"
    tests = where / f"flax-{version}" / "tests" / "nnx"
    if not tests.exists():
        where.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", ":all:", "--dest", str(where), f"flax=={version}"]
        subprocess.run(command, check=True)
        with tempfile.TemporaryDirectory(dir=where) as scratch:
            with tarfile.open(where / f"flax-{version}.tar.gz") as archive:
                archive.extractall(scratch, filter="data")
            # One step, so that an interrupted run leaves no half of the files.
            (Path(scratch) / f"flax-{version}").rename(where / f"flax-{version}")
    return tests


def groups() -> list[str]:
    """Return the test files, relative to the folder."""
    found = [*folder().rglob("*_test.py"), *folder().rglob("test_*.py")]
    return sorted(str(path.relative_to(folder())) for path in found)


def _config() -> str:
    # Flax's own settings, which make errors of warnings.
    settings = folder().parents[1] / "pyproject.toml"
    return str(settings) if settings.exists() else os.devnull


SUITE = Suite(
    groups=groups,
    files=lambda group: [folder() / group],
    ways=("imported", "scope"),
    exceptions=EXCEPTIONS,
    # Some files of Flax ask for these devices themselves, if nothing imported JAX before.
    env=lambda: {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
    config=_config,
)


if __name__ == "__main__":
    SUITE.main(sys.argv[1:])
