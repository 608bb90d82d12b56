"""The entry point of the command line, which dispatches to the module of the subcommand."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from replicax._src.base.errors import ReplicaxError

VERBS = {
    "doctor": "Check this machine, and the cluster, before training.",
    "launch": "Start the workers of a cluster on this machine, or this machine's part of them.",
    "manifest": "Print manifests for Kubernetes: a JobSet, a TrainJob, a Job, or plain pods.",
    "plan": "Find the devices on which a training step fits, from the smallest to the fastest.",
    "port": "Rewrite a TensorFlow program for replicax, and mark the places left to do.",
    "preflight": "Compile a script's training step for TPUs or GPUs that this machine lacks.",
    "timeline": "Record what every device does in a training step, and what it waits for.",
    "top": "Show the workers of a running cluster: steps, input waits, memory, last heartbeat.",
}


_PIPE_CLOSED = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the command line names.

    Returns:
        The exit status: 0 for success, 1 for failure, 2 for an invalid command.
    """
    own, rest = _split_arguments(sys.argv[1:] if argv is None else list(argv))
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
        parser.parse_args(own)  # prints the help or an error, and exits
        return 2
    verb = importlib.import_module(f"replicax._src.cli.{chosen}")  # only this one: some import JAX
    verb.add_arguments(parsers[chosen])
    try:
        options = parser.parse_args(own)  # raises for a URL where only local files are supported
        options.own, options.rest = own[1:], rest
        status: int = verb.run(options)
    except (ReplicaxError, ImportError, FileNotFoundError) as error:
        _print_error(f"replicax {chosen}: {error}")
        return 2
    return status


def _print_error(text: str) -> None:
    red, reset = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    sys.stderr.write(f"{red}{text}{reset}\n")


def _split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at ``--``: ours, and those of the program that we start."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _open_streams() -> None:
    """Open the null device in place of standard streams that are closed, as under `cron`.

    Otherwise the next file or pipe that is opened would get the stream's descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def entry() -> None:
    """Run the installed command."""
    _open_streams()
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as in `replicax doctor | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        status = _PIPE_CLOSED
    sys.exit(status)
