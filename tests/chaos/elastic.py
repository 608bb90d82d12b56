"""Losses and joins in one elastic run: ``python -m tests.chaos.elastic --faults 30``.

Kills random workers of a training with ``--elastic``, which the launcher starts again: any worker,
also the first, two at once, while the others re-form, and while a worker joins. At the end the
ledger of the workers must show that every step was taken once, with its examples, by all workers
that took part, and the weights must be NumPy's. With ``--library keras`` (`fit`) or ``nnx`` the
ledger has no examples, but the weights depend on them. A worker that is lost while JAX connects the
others ends them, and all are restarted from the last commit; that is counted, and is no violation.

Prints a table of the faults, how long the survivors took to re-form, and what one worker held at
its first and last rounds. Then every step is taken again in runs without faults, of as many workers
as took it, from the values that it began with: the bits of loss and weights must be the same. With
``--spare-first``, one worker stays through all rounds, so that threads, descriptors or memory that
a round leaves behind add up in it.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

import replicax as rx
from replicax._src.cli import top
from replicax._src.cluster.checks import ClusterError

BATCH, STEPS = 12, 60_000
TRAINEE = Path(__file__).parents[1] / "multi_process" / "elastic.py"
LIBRARIES = TRAINEE.with_name("elastic_models.py")
EPOCH = 6  # steps of an epoch of a library
SOURCES = Path(rx.__file__).parents[1]
_MOST = 3  # workers
_RESTART = "starting all workers again"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600, help="the time limit")
    parser.add_argument("--spare-first", action="store_true", help="never kill the first worker")
    parser.add_argument("--library", choices=["keras", "nnx"], default="")
    parser.add_argument("--pace", type=float, default=0.2, help="seconds of a step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        faults, said = _run(options, Path(folder))
        check = _check_library if options.library else _check
        found = _ledgers(Path(folder))
        violations = check(found, options.library)
        if not options.library:
            violations += _replay(found, Path(folder))
        if "SIGTERM: saving after this step" not in said:
            violations.append("the run ended before it was told to")
    _say("| fault | number | of these, all workers restarted |\n| --- | --- | --- |")
    for kind in sorted(faults):
        _say(f"| {kind} | {len(faults[kind])} | {sum(faults[kind])} |")
    seconds = sorted(map(float, re.findall(r"re-formed in ([0-9.]+) s", said)))
    if seconds:
        p50, p95 = (seconds[int(q * (len(seconds) - 1))] for q in (0.5, 0.95))
        _say(f"re-formed {len(seconds)} times, in {p50:.2f} s (p50), {p95:.2f} s (p95)")
    _say(f"joined {said.count('joined: there are')} times")
    _say(f"{sum(map(len, faults.values()))} faults, {len(violations)} violations")
    for violation in violations:
        _say(f"VIOLATION {violation}")
    if violations:
        _say(said[-20_000:])
    return 1 if violations else 0


def _say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _run(options, folder):
    """Run the training with faults, then end it.

    Returns:
        For each kind of fault, whether all workers were restarted after each; and the output.
    """
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(SOURCES)}
    env |= {"PACE": str(options.pace)}
    command = [sys.executable, "-m", "replicax", "launch", "--workers", f"1:{_MOST}", "--elastic"]
    trainee = [str(LIBRARIES), options.library] if options.library else [str(TRAINEE)]
    command += ["--max-restarts", "1000", *trainee, str(folder), str(STEPS)]
    output = folder / "output"
    chance, faults = random.Random(options.seed), {}
    held, killed, restarts = {}, set(), 0
    with open(output, "w") as file:
        launcher = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
        until = time.monotonic() + options.seconds
        while (
            sum(map(len, faults.values())) < options.faults
            and launcher.poll() is None
            and time.monotonic() < until
        ):
            time.sleep(chance.uniform(0.5, 2.0))
            here, joining = workers_of(launcher.pid)
            here = [pid for pid in here if pid not in killed]  # the hub may not know it yet
            kind, victims = _choose(chance, here, joining, spare=options.spare_first)
            if not victims or not any(folder.glob("ledger*")):
                continue
            if len(here) == _MOST:  # comparable states only
                for pid in here:
                    with contextlib.suppress(OSError):  # it ends just now
                        held.setdefault(pid, []).append(_held(pid))
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            killed.update(victims)
            _say(f"{time.strftime('%H:%M:%S')} {kind}: {victims}")
            time.sleep(chance.choice([0.0, 0.1, 5.0, 15.0]))  # also while the others re-form
            now = output.read_text().count(_RESTART)
            faults.setdefault(kind, []).append(now > restarts)
            restarts = now
        if launcher.poll() is None:
            time.sleep(5)
            launcher.send_signal(signal.SIGTERM)
        code = launcher.wait(300)
    said = output.read_text()
    restarts = said.count(_RESTART)
    _say(f"exit code {code}; {restarts} times all workers were restarted from the last commit")
    longest = max(held.values(), key=len, default=[])
    for number in dict.fromkeys([0, len(longest) - 1]) if longest else ():
        threads, files, memory = longest[number]
        _say(f"round {number}: {threads} threads, {files} descriptors, {memory:.0f} MiB")
    return faults, said


def _held(pid):
    """The threads, descriptors and MiB of memory that a process has."""
    status = Path(f"/proc/{pid}/status").read_text()
    threads, memory = (int(re.search(rf"{n}:\s+(\d+)", status)[1]) for n in ("Threads", "VmRSS"))
    return threads, len(list(Path(f"/proc/{pid}/fd").iterdir())), memory / 1024


def workers_of(pid):
    """The processes of the workers that take part, and of those that are joining."""
    try:
        rows = top.current_status(top.find_run(str(pid)))["workers"]
    except ClusterError:
        return [], []
    here = [row for row in rows if row["state"] == "here"]
    if not all(row.get("steps") for row in here):  # all have been started again
        return [], []
    return [row["pid"] for row in here], [row["pid"] for row in rows if row["state"] == "joining"]


def _choose(chance, here, joining, *, spare):
    """A kind of fault and the processes to kill; at least one worker stays."""
    kinds = ["any worker", "two at once", "while one joins", *([] if spare else ["first worker"])]
    kind = chance.choice(kinds)
    here = here[1:] if spare else here
    if kind == "while one joins":
        return kind, [chance.choice(joining)] if joining else []
    count = 2 if kind == "two at once" else 1
    if len(here) < count + (not spare):
        return kind, []
    return kind, here[:1] if kind == "first worker" else chance.sample(here, count)


def _ledgers(folder):
    """The lines of all workers for each step; of a step that was taken again, the last ones."""
    found: dict[int, list] = {}
    attempts = {path: int(path.name.rpartition(".")[2]) for path in folder.glob("ledger*")}
    for attempt in sorted(set(attempts.values())):
        lines = [
            json.loads(line)
            for path in attempts
            if attempts[path] == attempt
            for line in path.read_text().splitlines()
        ]
        # A restart of all continues from the last commit, and takes the steps since then again.
        begin = min((step for step, *_ in lines), default=STEPS + 1)
        found = {step: rest for step, rest in found.items() if step < begin}
        for step, *rest in lines:
            found.setdefault(step, []).append(rest)
    return found


def _check(found, _):
    """Compare the ledgers with the dataset and with NumPy; return what differs."""
    ids = list(rx.data.Dataset.range(BATCH * STEPS).shuffle(30, seed=7).batch(BATCH).take(STEPS))
    rows = np.random.default_rng(0).normal(size=(BATCH * STEPS, 4)).astype("float32")
    last = max(found, default=0)
    violations = [f"no line for step {k}" for k in range(1, last + 1) if k not in found]
    weights, speed = np.ones(4), np.zeros(4)
    for k in range(1, last + 1):
        batch = np.asarray(ids[k - 1])
        x = rows[batch]
        speed = 0.9 * speed + 2 * (x @ weights - 1) @ x / BATCH
        weights = weights - 0.01 * speed
        violations += [f"step {k}: {text}" for text in _faults(found.get(k, []), batch, weights)]
    sizes = Counter(lines[0][0] for lines in found.values())
    _say(f"{last} steps; steps by the number of workers: {dict(sizes)}")
    return violations[:20]


def _replay(found, folder):
    """Take each step again in runs without faults; return the steps whose bits differ."""
    bits = {step: {tuple(line[2:]) for line in lines} for step, lines in found.items()}
    ends = {0: [np.ones(4, "float32").tobytes().hex(), np.zeros(4, "float32").tobytes().hex()]}
    ends |= {step: next(iter(rests))[1:] for step, rests in bits.items()}
    violations, same = [], 0
    for size in sorted({lines[0][0] for lines in found.values()}):
        mine = [k for k, lines in found.items() if lines[0][0] == size and k - 1 in ends]
        place = folder / f"replay{size}"
        place.mkdir()
        plan = place / "plan"
        plan.write_text(json.dumps({k: ends[k - 1] for k in mine}))
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(SOURCES)}
        command = [sys.executable, "-m", "replicax", "launch", "--workers", str(size)]
        command += [str(TRAINEE), str(place), str(STEPS)]
        subprocess.run(command, env=env | {"REPLAY": str(plan)}, capture_output=True, check=True)
        again = _ledgers(place)
        for k in mine:
            expected = {tuple(line[2:]) for line in again[k]}
            same += bits[k] == expected
            if bits[k] != expected:
                violations.append(f"step {k}: not the bits of {size} workers without faults")
    _say(f"{same} steps have the bits of runs without faults")
    return violations[:20]


def _check_library(found, library):
    """Compare the weights of a library's training with NumPy's; return what differs."""
    rows = np.random.default_rng(0).normal(size=(BATCH * EPOCH, 4)).astype("float32")
    data = rx.data.Dataset.from_tensor_slices((rows, np.sin(3 * rows).sum(1, keepdims=True)))
    data = data.shuffle(30, seed=7).batch(BATCH)
    if library == "keras":
        next(iter(data))  # `fit` reads an element for its shapes, so its epochs are later passes
    passes = itertools.chain.from_iterable(iter(data) for _ in itertools.count())
    batches = iter(data.repeat()) if library == "nnx" else passes
    last = max(found, default=0)
    violations = []
    weights, speed = [np.full((4, 1), 0.5), np.zeros(1)], [np.zeros((4, 1)), np.zeros(1)]
    for k in range(1, last + 1):
        x, y = map(np.asarray, next(batches))
        errors = 2 * (x @ weights[0] + weights[1] - y) / BATCH
        speed = [0.9 * s + g for s, g in zip(speed, (x.T @ errors, errors.sum(0)), strict=True)]
        weights = [w - 0.02 * s for w, s in zip(weights, speed, strict=True)]
        if k not in found:
            violations.append(f"no line for step {k}")
            continue
        if len({str(line) for line in found[k]}) != 1:
            violations.append(f"step {k}: the workers differ")
        if len(found[k]) > found[k][0][0]:
            violations.append(f"step {k}: taken {len(found[k])} times by {found[k][0][0]} workers")
        bits = [np.frombuffer(bytes.fromhex(text), "float32") for text in found[k][0][1]]
        for mine, w in zip(bits, weights, strict=True):
            if not np.allclose(mine, w.ravel(), rtol=1e-3, atol=1e-4):
                violations.append(f"step {k}: the weights are {mine}, and NumPy's {w.ravel()}")
    sizes = Counter(lines[0][0] for lines in found.values())
    _say(f"{last} steps; steps by the number of workers: {dict(sizes)}")
    return violations[:20]


def _faults(lines, batch, weights):
    """Return the violations in the lines of one step."""
    if not lines:
        return
    met = [i for _, ids, *_ in lines for i in ids]
    size = lines[0][0]
    if len({tuple(rest) for _, _, *rest in lines}) != 1 or {line[0] for line in lines} != {size}:
        yield "the workers differ"
    if len(met) != len(set(met)) or not set(met) <= set(batch.tolist()):
        yield f"an example was met twice, or is another step's: {sorted(met)}"
    if len(lines) == size and sorted(met) != sorted(batch.tolist()):
        yield f"an example is missing: {sorted(met)}"
    bits = np.frombuffer(bytes.fromhex(lines[0][3]), "float32")
    if not np.allclose(bits, weights, rtol=1e-3, atol=1e-4):
        yield f"the weights are {bits}, and NumPy's {weights}"


if __name__ == "__main__":
    sys.exit(main())
