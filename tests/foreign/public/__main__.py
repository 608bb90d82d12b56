"""Compare public example programs with and without replicas.

``python -m tests.foreign.public --keras-io DIR --flax DIR --equinox DIR`` prints a table in
Markdown and ends with 1 if a program fails or differs without an explanation.
"""

import argparse
import collections
import dataclasses
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.foreign.public.compare import Comparison, Verdict
from tests.foreign.public.programs import Program, discover

HEAD = ("program", "how", "verdict", "compared", "largest difference", "reason")


def main() -> int:
    """Run the programs that the command line names."""
    options = _parser().parse_args()
    programs = [program for program in _programs(options) if re.search(options.only, program.name)]
    known = _read(options.json)
    sys.stdout.write(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}\n")
    verdicts = []
    for program in programs[: options.limit]:
        verdict = known.get(program.name) or _compare(program, options)
        verdicts.append(verdict)
        known[program.name] = verdict
        _write(options.json, known.values())
        sys.stdout.write(verdict.row + "\n")
        sys.stdout.flush()
    return _totals(verdicts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.foreign.public", description=__doc__)
    parser.add_argument("--keras-io", type=Path, help="a checkout of keras-io")
    parser.add_argument("--flax", type=Path, help="a checkout of Flax")
    parser.add_argument("--equinox", type=Path, help="a checkout of Equinox")
    parser.add_argument("--only", default="", help="a pattern that the names of programs match")
    parser.add_argument("--limit", type=int, help="how many programs to run, smallest first")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds of one run")
    parser.add_argument("--no-dropout", action="store_true", help="set the rate of dropout to 0")
    parser.add_argument(
        "--json", type=Path, help="keep results here; those there are not run again"
    )
    parser.add_argument("--logs", type=Path, help="keep the output of every run in this folder")
    return parser


def _programs(options: argparse.Namespace) -> list[Program]:
    named = (("keras", options.keras_io), ("flax", options.flax), ("equinox", options.equinox))
    roots = [(name, root.resolve()) for name, root in named if root]
    absent = [str(root) for _, root in roots if not root.exists()]
    if absent:
        raise SystemExit(f"No such folder: {', '.join(absent)}. Name a checkout of the library.")
    return [program for name, root in roots for program in discover(name, root)]


def _compare(program: Program, options: argparse.Namespace) -> Verdict:
    ways = ("no-dropout",) if options.no_dropout else ()
    return Comparison(program, options.replicas, options.timeout, ways, options.logs).verdict()


def _read(path: Path | None) -> dict[str, Verdict]:
    if path is None or not path.exists():
        return {}
    return {row["program"]: Verdict(**row) for row in json.loads(path.read_text())}


def _write(path: Path | None, verdicts: Iterable[Verdict]) -> None:
    if path is not None:
        path.write_text(json.dumps([dataclasses.asdict(v) for v in verdicts], indent=1))


def _totals(verdicts: list[Verdict]) -> int:
    counts = collections.Counter(verdict.verdict for verdict in verdicts)
    ran = sum(counts.values()) - counts["not run"]
    words = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    sys.stdout.write(f"\n{ran} programs ran: {words or 'none'}\n")
    return int(bool(counts["fails"] or counts["differs"]))


if __name__ == "__main__":
    sys.exit(main())
