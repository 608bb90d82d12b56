"""Runs that meet fault after fault, checked step by step against a run that met none.

One run is one training that is struck, started again by the launcher, struck again, and so on. Its
seed decides all faults, so that a run which fails can be had again.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.trainee import EVERY
from tests.multi_process.gang import ROOT, left_behind

SOON, LATER = 20.0, 60.0  # seconds until the others know of a death, and of one that is stuck
COMMITS = ("commit-begin", "commit-write", "commit-manifest", "committed", "prune")
QUIET = ("stop", "hang", "busy")  # whoever does that must first be missed
AGAIN = "starting all workers again"


def _at(rng, point, action, most):
    # The first batches are read ahead of the restoration, which throws them away.
    least = 6 if point == "input" else 1
    worker = 0 if point in COMMITS and point != "commit-write" else rng.randrange(2)
    return {"worker": worker, "fault": f"{point}:{action}@{rng.randint(least, least + most - 1)}"}


def _struck(rng, who, names):
    return {
        "worker": rng.randrange(2),
        "blow": f"{who}:{rng.choice(names)}",
        "after": rng.randint(1, 7),
    }


FAMILIES = {
    "killed at any time": lambda r: _at(r, "collective", "kill", 24),
    "killed at a point": lambda r: _at(
        r, r.choice(["join", "collected", "input", "leave"]), "kill", 6
    ),
    "preempted": lambda r: _at(r, r.choice(["collective", "collected", "input"]), "term", 16),
    "stuck": lambda r: _at(r, r.choice(["collected", "input"]), r.choice(QUIET), 12),
    "raises": lambda r: _at(
        r, r.choice(["collective", "collected", "input"]), r.choice(["raise", "int", "memory"]), 16
    ),
    "ends early": lambda r: _at(r, "collected", r.choice(["exit", "vanish", "abort"]), 16),
    "launcher ends": lambda r: _struck(r, "launcher", ["TERM", "INT", "HUP", "KILL"]),
    "killed in a commit": lambda r: _at(r, r.choice(COMMITS), "kill", 2),
    "disk": lambda r: _at(r, r.choice(COMMITS[:3]), r.choice(["full", "denied"]), 2),
    "damaged commit": lambda r: {
        **_at(r, "collected", "kill", 14),
        "damage": r.choice(
            ["flip", "cut", "lose", "flip manifest", "cut manifest", "lose manifest"]
        ),
    },
    "coordinator ends": lambda r: _struck(
        r, *r.choice([("hub", ["KILL", "TERM", "INT"]), ("keeper", ["KILL"])])
    ),
    "late": lambda r: {**_at(r, "collected", "kill", 14), "late": r.uniform(0, 5)},
    "slow": lambda r: {
        "worker": r.randrange(2),
        "fault": f"collective:slow@{r.randint(8, 12)},collected:kill@{r.randint(13, 18)}",
    },
}


def plan_of(seed, faults, families=tuple(FAMILIES)):
    """So many faults of each family in turn, in an order and of a kind that the seed decides."""
    rng = random.Random(seed)
    names = [families[i % len(families)] for i in range(faults)]
    rng.shuffle(names)
    return [{"family": name, **FAMILIES[name](rng)} for name in names]


@dataclass
class Fault:
    """What was done, and what came of it."""

    family: str
    plan: dict
    happened: float | None = None
    seconds_to_error: float | None = None
    seconds_to_recovery: float | None = None


@dataclass
class Outcome:
    """One run."""

    seed: int
    faults: list[Fault]
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def happened(self):
        return [f for f in self.faults if f.happened is not None]


class Run:
    """One training, from its first attempt to its end."""

    def __init__(self, folder, plan, steps):
        self.folder = Path(folder)
        self.plan = plan
        self.steps = steps
        self.blocks = {}  # what the launcher said of each attempt
        self.violations = []
        (self.folder / "tmp").mkdir(parents=True)
        (self.folder / "plan.json").write_text(json.dumps(plan))

    def train(self):
        """Launch, and launch again when the launcher itself was ended."""
        base = 0
        while base <= len(self.plan):
            code, said = self._launch(base)
            blocks = re.split(rf"^replicax launch: {AGAIN}.*$", said, flags=re.MULTILINE)
            self.blocks |= dict(enumerate(blocks, base))
            struck = [x["attempt"] for x in self.lines(0, 1) if "launcher" in x.get("blow", "")]
            if code == 0:
                return
            if not struck or struck[-1] < base:
                self.violations.append(f"I1: the launcher ended with {code}: {said[-2000:]}")
                return
            base = struck[-1] + 1

    def _launch(self, base):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "TMPDIR": str(self.folder / "tmp"),
            "CHAOS_BASE": str(base),
            "REPLICAX_PING_TIMEOUT": "10",
            "REPLICAX_STEP_TIMEOUT": "10",
            "REPLICAX_JOIN_TIMEOUT": "120",
        }
        restarts = str(len(self.plan) - base + 3)
        with (self.folder / f"said-{base}.txt").open("w+") as said:
            launcher = subprocess.Popen(
                [
                    *(sys.executable, "-m", "replicax", "launch", "--workers", "2"),
                    *("--max-restarts", restarts, "--log-dir", str(self.folder / f"logs-{base}")),
                    *("-m", "tests.chaos.trainee", str(self.folder), str(self.steps)),
                ],
                env=environment,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            try:
                code = launcher.wait(120 + 60 * len(self.plan))
            except subprocess.TimeoutExpired:
                launcher.kill()
                code = launcher.wait()
                self.violations.append("I4: the run did not end in time")
            left = left_behind(f"TMPDIR={self.folder}/tmp", 30)
            if left or any((self.folder / "tmp").iterdir()):
                self.violations.append(
                    f"I5: left behind: {left}, {os.listdir(self.folder / 'tmp')}"
                )
            said.seek(0)
            return code, said.read()

    def lines(self, *workers):
        """The ledger of some workers, in the order of time."""
        found = []
        for worker in workers:
            path = self.folder / f"ledger-{worker}.jsonl"
            for line in path.read_text().splitlines() if path.exists() else ():
                found.append(json.loads(line) | {"worker": worker})
        return sorted(found, key=lambda x: x["time"])

    def steps_of(self, worker):
        """What each step gave, by its number; all attempts must agree on it."""
        made = {}
        for line in self.lines(worker):
            if line["kind"] == "step":
                told = (line["ids"], line["loss"], line["state"])
                if made.setdefault(line["step"], told) != told:
                    where = f"step {line['step']} of worker {worker}"
                    self.violations.append(f"I2: {where} differs in attempt {line['attempt']}")
        return made


def golden(folder, steps):
    """What a run without faults gives."""
    run = Run(folder, [], steps)
    run.train()
    assert not run.violations, run.violations
    return run


def chaos(folder, seed, plan, against):
    """Train with the faults of a plan; what happened, and what was violated."""
    began = time.monotonic()
    run = Run(folder, plan, against.steps)
    run.train()
    _check_steps(run, against)
    _check_commits(run)
    faults = [Fault(entry["family"], entry) for entry in plan]
    for attempt, fault in enumerate(faults):
        _measure(run, attempt, fault)
        _check_fault(run, attempt, fault)
    return Outcome(seed, faults, run.violations, time.monotonic() - began)


def _check_steps(run, against):
    """I1 and I2: every step is that of the run without faults, and the end is the same."""
    for worker in range(2):
        made, right = run.steps_of(worker), against.steps_of(worker)
        run.violations += [
            f"I2: step {n} of worker {worker} is not as without faults"
            for n in made
            if made[n] != right[n]
        ]
        if missing := sorted(right.keys() - made.keys()):
            run.violations.append(f"I1: worker {worker} never took the steps {missing}")
        ends = [
            [x[k] for k in ("seen", "step", "state")]
            for x in run.lines(worker)
            if x["kind"] == "end"
        ]
        rights = [
            [x[k] for k in ("seen", "step", "state")]
            for x in against.lines(worker)
            if x["kind"] == "end"
        ]
        if ends[-1:] != rights[-1:]:
            run.violations.append(f"I1: the end of worker {worker} differs: {ends} for {rights}")


def _check_commits(run):
    """I3 and I7: an attempt goes on from a commit, not too old, and both workers from the same."""
    lines = run.lines(0, 1)
    furthest = 0
    for attempt in range(len(run.plan) + 1):
        mine = [x for x in lines if x["attempt"] == attempt]
        begun = {x["restored"] for x in mine if x["kind"] == "begin"}
        damaged = any(x["kind"] == "damaged" for x in mine)
        allowed = EVERY * (4 if damaged else 3)
        if len(begun) > 1:
            run.violations.append(f"I3: the workers of attempt {attempt} begin at {sorted(begun)}")
        if begun and min(begun) < furthest - allowed:
            run.violations.append(f"I7: attempt {attempt} begins at {begun} after step {furthest}")
        furthest = max([furthest, *(x["step"] for x in mine if x["kind"] == "step")])


def _measure(run, attempt, fault):
    lines = run.lines(0, 1)
    log = run.folder / f"fault-{attempt}.log"
    blows = [x["time"] for x in lines if x["attempt"] == attempt and x["kind"] == "blow"]
    logged = (
        [float(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []
    )
    if not (times := blows + logged):
        return
    fault.happened = times[-1]
    noticed = [
        x["time"]
        for x in lines
        if x["attempt"] == attempt
        and x["kind"] == "noticed"
        and x["worker"] != fault.plan["worker"]
    ]
    again = [x["time"] for x in lines if x["attempt"] > attempt and x["kind"] == "step"]
    if noticed:
        fault.seconds_to_error = noticed[0] - fault.happened
    if again:
        fault.seconds_to_recovery = again[0] - fault.happened


def _check_fault(run, attempt, fault):
    """I4 and I6: the others know in time, and the launcher says who it was, in few lines."""
    if fault.happened is None:
        return
    limit = LATER if any(word in str(fault.plan.get("fault")) for word in QUIET) else SOON
    if (fault.seconds_to_error or 0.0) > limit:
        run.violations.append(f"I4: {fault.seconds_to_error:.1f} s until an error: {fault.plan}")
    block = run.blocks.get(attempt, "")
    if "SIGABRT" in block and "abort" not in fault.plan.get("fault", ""):
        run.violations.append(
            f"I6: a worker was aborted in attempt {attempt}, {fault.plan}: {block}"
        )
    if len(block.splitlines()) > 40:
        run.violations.append(f"I6: {len(block.splitlines())} lines for attempt {attempt}")
    named = re.search(rf"\bworker {fault.plan['worker']}\b", block, re.IGNORECASE)
    if "blow" in fault.plan:
        named = "launcher" in fault.plan["blow"] or "coordina" in block
    elif fault.plan["fault"].startswith("leave"):
        named = True  # all had done their work
    if not named:
        run.violations.append(
            f"I6: attempt {attempt} does not name who it was, {fault.plan}: {block}"
        )
