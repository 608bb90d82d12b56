"""The command line: the verb -> its module."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from replicax._errors import ReplicaxError

VERBS = {
    "doctor": "Look at what this machine, and the cluster, have for a training program.",
    "launch": "Start the workers of a cluster on this machine, or this machine's part of one.",
    "manifest": "Print manifests for Kubernetes: a JobSet, a TrainJob, a Job, or plain pods.",
    "plan": "Find the devices on which a training step fits, from the smallest to the fastest.",
    "port": "Rewrite a program for TensorFlow as one for replicax, and mark what is left to do.",
    "preflight": "Compile the training step of a script for TPUs or GPUs that are not here.",
    "timeline": "Record what each device does in a training step, and what it waits for.",
    "top": "Show the workers of a running cluster: steps, waits for input, memory, last heard.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb that the command line names.

    Returns:
        The exit status: 0 if all is well, 1 if not, 2 if the command makes no sense.
    """
    own, rest = _halves(sys.argv[1:] if argv is None else list(argv))
    parser = argparse.ArgumentParser(prog="replicax", description="The tools of replicax.")
    parser.add_argument("--version", action="store_true", help="Show which replicax this is.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar=f"{{{','.join(VERBS)}}}")
    parsers = {name: verbs.add_parser(name, help=h, description=h) for name, h in VERBS.items()}
    if own == ["--version"]:
        found = importlib.import_module("replicax")
        sys.stdout.write(f"replicax {found.__version__}\n")
        return 0
    chosen = next((word for word in own[:1] if word in VERBS), None)
    if chosen is None:
        parser.parse_args(own)  # which says what is missing, or helps
        return 2
    verb = importlib.import_module(f"replicax.cli._{chosen}")  # no other: one of them needs JAX
    verb.add_arguments(parsers[chosen])
    options = parser.parse_args(own)
    options.own, options.rest = own[1:], rest
    try:
        status: int = verb.run(options)
    except (ReplicaxError, ImportError, FileNotFoundError) as error:
        _complain(f"replicax {chosen}: {error}")
        return 2
    return status


def _complain(text: str) -> None:
    red, usual = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    sys.stderr.write(f"{red}{text}{usual}\n")


def _halves(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is for us, and what follows ``--`` for the program that we start."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _open_streams() -> None:
    """Where a standard stream is closed, as services and `cron` may do it, use the empty device.

    Otherwise the next file or pipe that is opened would take its place.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free is this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def entry() -> None:
    """What the installed command calls."""
    _open_streams()
    sys.exit(main())
