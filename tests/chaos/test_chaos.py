"""A small sample of what ``make chaos`` does at length, and a proof that it would notice."""

import json
import sys
from collections import Counter

import pytest

from tests.chaos.peers.__main__ import Trial, run, table
from tests.chaos.rig import (
    FAMILIES,
    Run,
    _check_commits,
    _check_examples,
    _check_steps,
    chaos,
    golden,
    plan_of,
)

QUICK = (
    *("killed at any time", "preempted", "raises", "ends early", "launcher ends"),
    *("killed in a commit", "disk", "damaged commit"),
)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return golden(tmp_path_factory.mktemp("golden") / "run", 60)


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("seed", "faults"),
    [(20, 2), *(pytest.param(seed, 4, marks=pytest.mark.slow) for seed in (20, 21))],
)
def test_a_training_that_is_struck_again_and_again_ends_as_if_nothing_had_been(
    tmp_path, seed, faults, right
):
    plan = plan_of(seed, faults, QUICK[:4] if seed % 2 else QUICK[4:])

    outcome = chaos(tmp_path / "run", seed, plan, right)

    assert outcome.violations == [], f"seed {seed}"
    assert len(outcome.happened) == len(plan)


def test_runs_of_a_few_faults_each_have_all_families():
    plans = [plan_of(seed, 13) for seed in range(100, 105)]

    times = Counter(fault["family"] for plan in plans for fault in plan)

    assert times.keys() == FAMILIES.keys()
    assert max(times.values()) - min(times.values()) <= 1


STEP = {"kind": "step", "ids": [5], "loss": 7, "state": "a"}
LEDGER = [
    {"kind": "begin", "attempt": 0, "restored": 0},
    STEP | {"attempt": 0, "step": 1},
    STEP | {"attempt": 0, "step": 2},
    {"kind": "begin", "attempt": 1, "restored": 1},
    STEP | {"attempt": 1, "step": 2},
    STEP | {"attempt": 1, "step": 3},
    {"kind": "end", "attempt": 1, "seen": [1, 1, 1], "step": 3, "state": "a"},
]


def run_with(folder, lines):
    run = Run(folder, [{}], 3)
    for worker in range(2):
        text = "".join(json.dumps(x | {"time": t}) + "\n" for t, x in enumerate(lines))
        (run.folder / f"ledger-{worker}.jsonl").write_text(text)
    return run


def violations(tmp_path, lines):
    run = run_with(tmp_path / "run", lines)
    _check_steps(run, run_with(tmp_path / "right", LEDGER))
    _check_commits(run)
    return {text[:2] for text in run.violations}


def test_a_ledger_without_fault_has_no_violations(tmp_path):
    assert violations(tmp_path, LEDGER) == set()


@pytest.mark.parametrize("key", ["ids", "loss", "state"])
@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_a_step_that_differs_is_noticed(tmp_path, key, at):
    lines = [dict(x) for x in LEDGER]
    lines[at][key] = "other"

    assert violations(tmp_path, lines) == {"I2"}


@pytest.mark.parametrize(
    ("at", "key", "value", "found"),
    [
        (1, "ids", [6], {"I2"}),
        (5, "loss", 1065353216, {"I2"}),  # 1.0
        (5, "step", 4, {"I1", "I2"}),
        (6, "seen", [1, 1, 2], {"I1"}),
        (0, "restored", 0, set()),
    ],
)
def test_with_another_number_of_workers_other_examples_or_losses_are_noticed(
    tmp_path, at, key, value, found
):
    right = [*LEDGER[:-1], STEP | {"attempt": 0, "step": 3}, LEDGER[-1]]
    lines = [dict(x) for x in LEDGER]
    lines[at][key] = value
    run = run_with(tmp_path / "run", lines)

    _check_examples(run, run_with(tmp_path / "right", right))

    assert {text[:2] for text in run.violations} == found


def test_a_step_that_is_missing_is_noticed(tmp_path):
    assert violations(tmp_path, LEDGER[:5] + LEDGER[6:]) == {"I1"}


@pytest.mark.parametrize("key", ["seen", "step", "state"])
def test_another_end_is_noticed(tmp_path, key):
    assert violations(tmp_path, [*LEDGER[:-1], LEDGER[-1] | {key: 0}]) == {"I1"}


def test_much_lost_work_is_noticed(tmp_path):
    lines = [*LEDGER[:3], STEP | {"attempt": 0, "step": 30}, *LEDGER[3:]]
    run = run_with(tmp_path / "run", lines)

    _check_commits(run)

    assert [text[:2] for text in run.violations] == ["I7"]


@pytest.mark.slow
@pytest.mark.multi_process
def test_a_trial_says_how_long_it_took_who_was_named_and_what_stayed():
    trial = run("replicax", "kill", {"replicax": sys.executable}, limit=60.0)

    assert trial.outcome == "all have ended"
    assert trial.seconds < 60
    assert trial.is_named
    assert trial.left == []


def test_the_table_of_peers_says_what_waits_and_what_stays():
    trials = [
        Trial("replicax", "kill", 1.04, "all have ended", is_named=True),
        Trial("torch", "kill", None, "2 of 2 wait", is_named=False),
        Trial("torch", "twin", 3.0, "all have ended", is_named=False, left=["a", "b"]),
        Trial("torch", "late", 5.0, "trains"),
    ]

    _, _, kill, *_, late, _, twin, _ = table(trials, 120.0).splitlines()

    assert kill == "| killed (SIGKILL) | 1.0 s, named | **waits** (2 of 2, 120 s), not named |"
    assert late == "| comes 15 s late | not tried | trains after 5.0 s |"
    assert twin == "| has another's index | not tried | 3.0 s, not named, **2 left** |"
