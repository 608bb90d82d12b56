"""Run JAX's own tests beside replicax, and after a strategy was used.

JAX ships its tests in no package: ``JAX_SOURCE`` names a checkout of the version of JAX that is
installed. ``python -m tests.foreign.jax_own [group ...]`` prints how many tests pass.
"""

import os
import sys
from pathlib import Path

from tests.foreign.own_tests import Suite

# What replicax hooks into or rewrites: a test file, and which of its tests (all if empty).
GROUPS = {
    "api": ("api_test.py", ""),
    "jit": ("jax_jit_test.py", ""),
    "pjit": ("pjit_test.py", ""),
    "shard_map": ("shard_map_test.py", ""),
    "custom_derivatives": ("custom_api_test.py", ""),
    "control_flow": ("lax_control_flow_test.py", ""),
    "lax": ("lax_test.py", "Dot or dot or ReduceWindow or reduce_window or Conv"),
    "lax_derivatives": ("lax_autodiff_test.py", "Dot or ReduceWindow or Conv or Pool"),
    "lax_vmap": ("lax_vmap_test.py", "Dot or ReduceWindow or Conv"),
    "callbacks": ("python_callback_test.py", ""),
    "effects": ("jaxpr_effects_test.py", ""),
    "core": ("core_test.py", ""),
    "cache": ("compilation_cache_test.py", ""),
}


def source() -> Path | None:
    """Return the folder with JAX's tests that ``JAX_SOURCE`` names, if it does."""
    named = os.environ.get("JAX_SOURCE")
    return Path(named).resolve() / "tests" if named else None


def _files(group: str) -> list[Path]:
    tests = source()
    if tests is None:
        raise RuntimeError("JAX_SOURCE must name a checkout of JAX, for its tests.")
    return [tests / GROUPS[group][0]]


SUITE = Suite(
    groups=lambda: list(GROUPS),
    files=_files,
    ways=("imported", "strategy"),
    exceptions={},
    # The same devices in every way, created before JAX's tests ask for them.
    env=lambda: {"JAX_NUM_CPU_DEVICES": "8", "JAX_SKIP_SLOW_TESTS": "1"},
    wanted=lambda group: GROUPS[group][1],
)


if __name__ == "__main__":
    SUITE.main(sys.argv[1:])
