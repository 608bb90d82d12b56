"""Runs that meet fault after fault, checked step by step against a run that met none.

One run is one training that is struck, started again by the launcher, struck again, and so on. Its
seed decides all faults, so that a run which fails can be had again.
"""

import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.trainee import EVERY
from tests.multi_process.gang import ROOT, left_behind
from tests.stores.proxy import BUSY, DROP, LATE, LOSE, SLOWLY

SOON, LATER = 20.0, 60.0  # seconds until the others know of a death, and of one that is stuck
COMMITS = ("commit-begin", "commit-write", "commit-manifest", "committed", "prune")
QUIET = ("stop", "hang", "busy")  # whoever does that must first be missed
STARTS = (
    *("twin", "other size", "other token", "other devices", "other address"),
    *("broken program", "never", "other version", "other jax", "other program"),
)
DAMAGES = (
    *("flip", "cut", "lose", "flip manifest", "cut manifest", "lose manifest"),
    *("link", "litter"),
)
RESIZED, SURVIVED = "other number of workers", "network for a while"
WORKERS = range(4)
AGAIN = "starting all workers again"


def _at(rng, point, action, most):
    # The first batches are read ahead of the restoration, which throws them away.
    least = 6 if point == "input" else 1
    most = 1 if point in ("leave", "join") else most
    most = min(most, 2) if point in COMMITS else most
    worker = 0 if point in COMMITS and point != "commit-write" else rng.randrange(2)
    return {"worker": worker, "fault": f"{point}:{action}@{rng.randint(least, least + most - 1)}"}


def _struck(rng, who, names):
    return {
        "worker": rng.randrange(2),
        "blow": f"{who}:{rng.choice(names)}",
        "after": rng.randint(1, 7),
    }


FAMILIES = {
    "killed at any time": lambda r: {
        **_at(r, "collective", "kill", 24),
        "both": r.random() < 0.3,
    },
    "killed at a point": lambda r: _at(
        r, r.choice(["join", "collected", "input", "leave"]), "kill", 6
    ),
    "preempted": lambda r: _at(
        r, r.choice(["collective", "collected", "input", "commit-write"]), "term", 16
    ),
    "stuck": lambda r: _at(r, r.choice(["collected", "input"]), r.choice(QUIET), 12),
    "raises": lambda r: _at(
        r, r.choice(["collective", "collected", "input"]), r.choice(["raise", "int", "memory"]), 16
    ),
    "ends early": lambda r: _at(r, "collected", r.choice(["exit", "vanish", "abort"]), 16),
    "launcher ends": lambda r: _struck(r, "launcher", ["TERM", "INT", "HUP", "KILL"]),
    "killed in a commit": lambda r: _at(r, r.choice(COMMITS), "kill", 2),
    "disk": lambda r: _at(r, r.choice(COMMITS[:3]), r.choice(["full", "denied", "broken"]), 2),
    "disk hangs": lambda r: _at(r, r.choice([*COMMITS, "restore"]), "hang", 1),
    "damaged commit": lambda r: {
        **_at(r, "collected", "kill", 14),
        "damage": r.choice(DAMAGES),
    },
    "coordinator ends": lambda r: _struck(r, *r.choice([("hub", ["KILL"]), ("keeper", ["KILL"])])),
    "network": lambda r: _struck(r, "net", ["reset", "down"]),
    SURVIVED: lambda r: {
        **_struck(r, "net", ["0.05", "0.5", "1", "2"]),
        "fault": f"collected:kill@{r.randint(16, 20)}",
    },
    "started wrongly": lambda r: {
        "worker": r.randrange(2),
        "start": r.choice(STARTS),
    },
    "helpers": lambda r: {**_at(r, "collected", r.choice(["kill", "exit"]), 14), "helpers": True},
    "clock": lambda r: {
        **_at(r, "collected", "kill", 14),
        "clock": r.choice([-86_400, -3_600, 3_600, 86_400]),
    },
    "late": lambda r: {**_at(r, "collected", "kill", 14), "late": r.uniform(0, 5)},
    "slow": lambda r: {
        "worker": r.randrange(2),
        "fault": f"collective:slow@{r.randint(8, 12)},collected:kill@{r.randint(13, 18)}",
    },
}


def _survived(rng, store, every):
    """A store that answers badly now and then: nothing may come of it until a worker is killed."""
    kill = f"collected:kill@{rng.randint(16, 20)}"
    return {"worker": rng.randrange(2), "store": store, "every": every, "fault": kill}


STORE_FAMILIES = {
    "store answers 503": lambda r: _survived(r, BUSY, r.randint(4, 8)),
    "store is slow": lambda r: _survived(r, SLOWLY, r.randint(2, 4)),
    "store loses answers": lambda r: _survived(r, LOSE, r.randint(5, 9)),
    "store lists late": lambda r: _survived(r, LATE, 1),
    "store goes down": lambda r: {"worker": 0, "store": "down", "at": r.randint(1, 25)},
    "killed at a request": lambda r: {
        "worker": 0,
        "store": r.choice([DROP, LOSE]),
        "at": r.randint(1, 25),
    },
    "killed in a commit to a store": lambda r: _at(r, r.choice(COMMITS), "kill", 2),
}


def plan_of(seed, faults, families=tuple(FAMILIES)):
    """So many faults of each family in turn, in an order and of a kind that the seed decides.

    The next seed goes on with the next families.
    """
    rng = random.Random(seed)
    names = [families[(seed * faults + i) % len(families)] for i in range(faults)]
    rng.shuffle(names)
    plan = [{"family": name, **(FAMILIES | STORE_FAMILIES)[name](rng)} for name in names]
    # At the end of a run, and where there is something to restore.
    late = {"leave": 2, "restore": 1}
    return sorted(plan, key=lambda entry: late.get(entry.get("fault", "").partition(":")[0], 0))


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

    def __init__(self, folder, plan, steps, **environment):
        self.folder = Path(folder)
        self.environment = environment
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
            code, said = self.launch(base)
            blocks = re.split(rf"^replicax launch: {AGAIN}.*$", said, flags=re.MULTILINE)
            self.blocks |= dict(enumerate(blocks, base))
            struck = [x["attempt"] for x in self.lines(0, 1) if "launcher" in x.get("blow", "")]
            if code == 0:
                return
            if not struck or struck[-1] < base:
                self.violations.append(f"I1: the launcher ended with {code}: {said[-2000:]}")
                return
            base = struck[-1] + 1

    def launch(self, base, workers=2, restarts=None):
        """One launcher, from attempt ``base`` on: its code, and what it said."""
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "TMPDIR": str(self.folder / "tmp"),
            "CHAOS_BASE": str(base),
            "REPLICAX_PING_TIMEOUT": "10",
            "REPLICAX_STEP_TIMEOUT": "10",
            "REPLICAX_DISK_TIMEOUT": "15",
            "REPLICAX_JOIN_TIMEOUT": "120",
            **self.environment,
        }
        restarts = len(self.plan) - base + 3 if restarts is None else restarts
        with (self.folder / f"said-{base}.txt").open("w+") as said:
            launcher = subprocess.Popen(
                [
                    *(sys.executable, "-m", "replicax", "launch", "--workers", str(workers)),
                    *("--max-restarts", str(restarts)),
                    *("--log-dir", str(self.folder / f"logs-{base}")),
                    *("-m", "tests.chaos.trainee", str(self.folder), str(self.steps)),
                ],
                env=environment,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            try:
                # A commit to a store has many requests, and its client takes seconds to import.
                code = launcher.wait(120 + (180 if self.environment else 60) * len(self.plan))
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


def chaos(folder, seed, plan, against, emulator=None):
    """Train with the faults of a plan; what happened, and what was violated.

    With an emulator of an object store the commits are there.
    """
    began = time.monotonic()
    if emulator is None:
        run = Run(folder, plan, against.steps)
    else:
        place = emulator.environment | {"CHAOS_COMMITS": emulator.fresh()}
        run = Run(folder, plan, against.steps, **place)
        emulator.proxy.rule = StoreFaults(run)
    run.train()
    _check_steps(run, against)
    _check_commits(run)
    faults = [Fault(entry["family"], entry) for entry in plan]
    for attempt, fault in enumerate(faults):
        _measure(run, attempt, fault)
        _check_fault(run, attempt, fault)
    return Outcome(seed, faults, run.violations, time.monotonic() - began)


class StoreFaults:
    """Chooses what a store does with each request of a run, by the plan of its attempt."""

    def __init__(self, run):
        self._run = run
        self._attempt = -1
        self._requests = self._writes = 0

    def __call__(self, method, what):
        now = self._run.folder / "now.json"
        told = json.loads(now.read_text()) if now.exists() else {"attempt": -1}
        if told["attempt"] != self._attempt:
            self._attempt, self._requests, self._writes = told["attempt"], 0, 0
        self._requests += 1
        is_of_first = not re.search(r"(arrays|index)-1\b", what)
        self._writes += is_of_first and method not in ("GET", "HEAD")
        plan = self._run.plan[self._attempt] if 0 <= self._attempt < len(self._run.plan) else {}
        fault = plan.get("store")
        if "every" in plan:
            return self._happens(fault) if self._requests % plan["every"] == 0 else None
        if fault is None or self._writes < plan["at"]:
            return None
        if fault == "down":
            return self._happens(BUSY)
        if fault == LOSE and self._writes == plan["at"]:
            return self._happens(LOSE)  # and the worker is killed when it tries again
        if is_of_first and method not in ("GET", "HEAD"):
            with suppress(ProcessLookupError):
                os.kill(told["pid"], signal.SIGKILL)
        return self._happens(DROP)

    def _happens(self, fault):
        path = self._run.folder / f"store-{self._attempt}.log"
        if not path.exists():
            path.write_text(f"{time.time()} {fault}\n")
        return fault


def resized(folder, seed, against):
    """Train with another number of workers after each fault: the same examples, and the same end.

    Sums of floats depend on how many workers add them up: losses are compared within a tolerance.
    """
    began = time.monotonic()
    rng = random.Random(seed)
    sizes = rng.choice([(2, 1, 4, 2), (1, 2, 1, 2), (4, 2, 1, 2)])
    plan = [
        {"family": RESIZED, "worker": rng.randrange(n), "blow": "self:KILL", "after": 4, "size": n}
        for n in sizes[:-1]
    ]
    run = Run(folder, plan, against.steps)
    for attempt, size in enumerate(sizes):
        code, run.blocks[attempt] = run.launch(attempt, size, restarts=0)
        if (code == 0) != (attempt == len(plan)):
            run.violations.append(f"I1: {size} workers ended with {code}: {run.blocks[attempt]}")
    _check_examples(run, against)
    _check_commits(run)
    faults = [Fault(RESIZED, entry) for entry in plan]
    for attempt, fault in enumerate(faults):
        _measure(run, attempt, fault)
        _check_fault(run, attempt, fault)
    return Outcome(seed, faults, run.violations, time.monotonic() - began)


def _check_examples(run, against):
    """I1 and I2 for any number of workers: every step has its examples, and nearly its loss."""
    made, right = _examples(run), _examples(against)
    for attempt, step in sorted(made):
        ids, loss = made[attempt, step]
        right_ids, right_loss = right.get((0, step), ("no such step", 0.0))
        if ids != right_ids or abs(loss - right_loss) > 1e-4 * max(1.0, abs(right_loss)):
            what = f"{ids} {loss} for {right_ids} {right_loss}"
            run.violations.append(f"I2: step {step} of attempt {attempt} differs: {what}")
    if missing := {step for _, step in right} - {step for _, step in made}:
        run.violations.append(f"I1: nobody took the steps {sorted(missing)}")
    seen = [[x["seen"] for x in r.lines(*WORKERS) if x["kind"] == "end"] for r in (run, against)]
    if seen[0][-1:] != seen[1][-1:]:
        run.violations.append(f"I1: examples were seen {seen[0][-1:]} times for {seen[1][-1:]}")


def _examples(run):
    """Of each attempt and step that all its workers took: the examples of all, and the loss."""
    steps = {}
    for x in run.lines(*WORKERS):
        if x["kind"] == "step":
            steps.setdefault((x["attempt"], x["step"]), []).append(x)
    sizes = {e: run.plan[e].get("size", 2) if e < len(run.plan) else 2 for e, _ in steps}
    return {
        key: (sorted(i for x in xs for i in x["ids"]), _as_float(xs[0]["loss"]))
        for key, xs in steps.items()
        if len(xs) == sizes[key[0]]
    }


def _as_float(bits):
    return struct.unpack("f", struct.pack("I", bits))[0]


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
    lines = run.lines(*WORKERS)
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
        run.violations += [
            f"I8: attempt {attempt} cannot read {x['path']}: {x['error']}"
            for x in mine
            if x["kind"] == "unreadable"
        ]


def _measure(run, attempt, fault):
    lines = run.lines(*WORKERS)
    log, store = (run.folder / f"{name}-{attempt}.log" for name in ("fault", "store"))
    if "store" in fault.plan and not store.exists():
        return
    blows = [x["time"] for x in lines if x["attempt"] == attempt and x["kind"] == "blow"]
    logged = (
        [float(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []
    )
    if not (times := blows + logged) and store.exists():
        times = [float(store.read_text().split()[0])]  # also if it ended what it must not
    if not times:
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
    what = f"{fault.plan.get('fault')} {fault.plan.get('blow')} store:{fault.plan.get('store')}"
    limit = LATER if any(word in what for word in (*QUIET, "net:down", "store:down")) else SOON
    if (fault.seconds_to_error or 0.0) > limit:
        run.violations.append(f"I4: {fault.seconds_to_error:.1f} s until an error: {fault.plan}")
    block = run.blocks.get(attempt, "")
    if "SIGABRT" in block and "abort" not in fault.plan.get("fault", ""):
        run.violations.append(
            f"I6: a worker was aborted in attempt {attempt}, {fault.plan}: {block}"
        )
    if block and not _is_survived(run, attempt, fault):
        run.violations.append(
            f"I4: what must do no harm ended attempt {attempt}, {fault.plan}: {block}"
        )
    if len(block.splitlines()) > 40:
        run.violations.append(f"I6: {len(block.splitlines())} lines for attempt {attempt}")
    if not _is_named(fault.plan, block):
        run.violations.append(
            f"I6: attempt {attempt} does not name who it was, {fault.plan}: {block}"
        )


def _is_survived(run, attempt, fault):
    """Whether it did no harm, if it must not: what is to happen later in the attempt, happens."""
    is_harmless = fault.family == SURVIVED or "every" in fault.plan
    return not is_harmless or (run.folder / f"fault-{attempt}.log").exists()


def _is_named(plan, block):
    """Whether the launcher says who it was, where it can know."""
    named = re.search(rf"\bworker {plan['worker']}\b", block, re.IGNORECASE)
    match plan.get("blow", "").partition(":")[0]:
        case "launcher":
            return True  # it cannot say it
        case "hub" | "keeper":
            return "coordina" in block
        case "net":
            return named or "coordina" in block
    return named or plan.get("fault", "").startswith("leave")  # all had done their work
