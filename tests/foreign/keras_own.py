"""Run Keras's own tests, from its wheel, beside replicax and in a scope.

``python -m tests.foreign.keras_own [group ...]`` prints how many pass, file by file.
"""

import importlib.util
import sys
from pathlib import Path

from tests.foreign.own_tests import Suite

KERAS = Path(importlib.util.find_spec("keras").submodule_search_locations[0]) / "src"

GROUPS = {
    "trainers": ["trainers/*_test.py"],
    "data_adapters": ["trainers/data_adapters/*_test.py"],
    "callbacks": ["callbacks/*_test.py"],
    "optimizers": ["optimizers/*_test.py", "optimizers/schedules/*_test.py"],
    "metrics": ["metrics/*_test.py"],
    "normalization": ["layers/normalization/*_test.py"],
    "rnn": ["layers/rnn/*_test.py"],
    "saving": ["saving/*_test.py"],
}

# Tests that pass without a strategy and not within one, and why.
EXCEPTIONS = {
    "test_fit_eval_flow_for_jax_model_weights": "asserts that weights are absent during fit; here"
    " they stay in their variables",
    "test_jit_fit_with_out_shardings_logic_distributed": "asserts the shardings that a"
    " keras.distribution gives; inside a scope the strategy gives them",
    "test_distributed_checkpoint": "cuts weights with a keras.distribution along the axis of the"
    " replicas; inside a scope that is refused",
    "test_best_case_step": "counts the batches of an epoch that starts again when it was"
    " interrupted; here it goes on with the batch that comes next",
    "test_backup_corrupted": "looks for the files of Keras's backup; here it is a checkpoint of"
    " rx.train, of which the one before is read if the last is damaged",
}


def files(group: str) -> list[Path]:
    """Return the test files of a group."""
    return [path for pattern in GROUPS[group] for path in sorted(KERAS.glob(pattern))]


SUITE = Suite(
    groups=lambda: list(GROUPS),
    files=files,
    ways=("imported", "scope"),
    exceptions={"scope": EXCEPTIONS},
    env=lambda: {"KERAS_BACKEND": "jax", "REPLICAX_CPU_DEVICES": "2"},
)


if __name__ == "__main__":
    SUITE.main(sys.argv[1:])
