"""``python -m tests.chaos --faults 300``: strike, check, and say what was found."""

import argparse
import json
import signal
import statistics
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from tests.chaos.rig import (
    FAMILIES,
    RESIZED,
    STORE_FAMILIES,
    Fault,
    Outcome,
    chaos,
    golden,
    plan_of,
    resized,
)
from tests.stores.emulators import MODULES, started

EVERY_FAMILY = (*FAMILIES, *STORE_FAMILIES)
STEPS_FOR_EACH = 12  # that a run has for each of its faults


def main():
    parser = argparse.ArgumentParser(prog="chaos")
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--each", type=int, default=13, help="how many in one run")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first run; the next has the next"
    )
    parser.add_argument(
        "--resized", type=int, default=5, help="runs with other numbers of workers, before them"
    )
    parser.add_argument(
        "--store", choices=MODULES, help="commit to this emulated store, with its faults only"
    )
    parser.add_argument("--out", type=Path, default=Path("chaos.jsonl"))
    parser.add_argument("--family", action="append", choices=EVERY_FAMILY, help="only of these")
    parser.add_argument(
        "--table", type=Path, nargs="+", metavar="JSONL", help="strike nobody: what runs have found"
    )
    options = parser.parse_args()
    if options.table:
        _say(table([told for path in options.table for told in _read(path)]))
        return
    # What a shell runs in the background ignores it, and so would all that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup` ignores, and so would a launcher
    outcomes, families = [], options.family or (STORE_FAMILIES if options.store else FAMILIES)
    resizes = 0 if options.store else options.resized
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as name,
        options.out.open("w") as out,
        started(options.store) if options.store else nullcontext() as emulator,
    ):
        right = golden(Path(name, "golden"), STEPS_FOR_EACH * options.each)
        short = golden(Path(name, "short"), STEPS_FOR_EACH * 3) if resizes else None
        seed = options.seed
        while sum(len(o.happened) for o in outcomes) < options.faults:
            folder = Path(name, f"run-{seed}")
            if len(outcomes) < resizes:
                outcome = resized(folder, seed, short)
            else:
                plan = plan_of(seed, options.each, tuple(families))
                outcome = chaos(folder, seed, plan, right, emulator)
            outcomes.append(outcome)
            out.write(json.dumps(asdict(outcome)) + "\n")
            out.flush()
            _say(
                f"seed {seed}: {len(outcome.happened)} of {len(outcome.faults)} faults,"
                f" {len(outcome.violations)} violations, {outcome.seconds:.0f} s"
            )
            for violation in outcome.violations:
                _say(f"    {violation}")
            seed += 1
    _say(table(outcomes))
    sys.exit(any(o.violations for o in outcomes))


def _read(path):
    """The outcomes that a file holds."""
    for line in path.read_text().splitlines():
        told = json.loads(line)
        yield Outcome(**told | {"faults": [Fault(**fault) for fault in told["faults"]]})


def table(outcomes):
    """A row for each family."""
    rows = ["| fault | count | seconds until an error: p50, p95, max | until training resumes |"]
    rows += ["|---|---|---|---|"]
    every = [f for o in outcomes for f in o.happened]
    for family in [*EVERY_FAMILY, RESIZED, "all"]:
        mine = [f for f in every if family in (f.family, "all")]
        if mine:
            errors = _spread([f.seconds_to_error for f in mine])
            again = _spread([f.seconds_to_recovery for f in mine])
            rows.append(f"| {family} | {len(mine)} | {errors} | {again} |")
    violations = sum(len(o.violations) for o in outcomes)
    seconds = sum(o.seconds for o in outcomes)
    return "\n".join([*rows, "", f"{len(every)} faults, {violations} violations, {seconds:.0f} s"])


def _spread(values):
    known = sorted(v for v in values if v is not None)
    if not known:
        return "-"
    p95 = known[min(len(known) - 1, int(0.95 * len(known)))]
    return f"{statistics.median(known):.1f}, {p95:.1f}, {known[-1]:.1f}"


def _say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
