"""The entry point of the command line, which dispatches to the module of the subcommand."""

import argparse
import importlib
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from replicax._src.base.errors import ReplicaxError

VERBS = {
    "completion": "Print the completion script of a shell: bash, zsh or fish.",
    "doctor": "Check this machine, and the cluster, before training.",
    "launch": "Start the workers of a cluster on this machine, or this machine's part of them.",
    "manifest": "Print manifests for Kubernetes: a JobSet, a TrainJob, a Job, or plain pods.",
    "plan": "Find the devices on which a training step fits, from the smallest to the fastest.",
    "port": "Rewrite a TensorFlow program for replicax, and mark the places left to do.",
    "preflight": "Compile a script's training step for TPUs or GPUs that this machine lacks.",
    "timeline": "Record what every device does in a training step, and what it waits for.",
    "top": "Show the workers of a running cluster: steps, input waits, memory, last heartbeat.",
    "verify": "Compute on this machine's devices, and compare with NumPy.",
}


_WIDTH = 78
_PIPE_CLOSED = 128 + signal.SIGPIPE


_EXAMPLES = {
    "": """\
examples:
  replicax doctor                                check this machine
  replicax launch --workers 2 train.py           train with two workers here
  replicax preflight train.py                    compile it for a TPU slice
  replicax COMMAND --help                        options and examples
""",
    "completion": """\
examples:
  eval "$(replicax completion bash)"             in ~/.bashrc
  eval "$(replicax completion zsh)"              in ~/.zshrc
  replicax completion fish | source              in ~/.config/fish/config.fish
""",
    "doctor": """\
examples:
  replicax doctor --checkpoints /data/run        also test that folder
  replicax launch --workers 2 -m replicax doctor --cluster
""",
    "launch": """\
examples:
  replicax launch --workers 2 train.py --epochs 3
  replicax launch --workers 4 --max-restarts 3 --log-dir logs -m package.train
  replicax launch --workers 4 --hosts a,b --ssh --port 9000 train.py
""",
    "manifest": """\
examples:
  replicax manifest jobset --image train:1 --workers 4 --gpus 8 train.py
""",
    "plan": """\
examples:
  replicax plan train.py --fit v5e,h100 --global-batch 1024
""",
    "port": """\
examples:
  replicax port --diff train.py                  show the changes
  replicax port -o ported.py train.py            write them to another file
""",
    "preflight": """\
examples:
  replicax preflight train.py --topology v5p-128
  replicax preflight train.py --topology h100:2x8 --json r.json -- --batch 8
""",
    "timeline": """\
examples:
  replicax timeline train.py -o timeline.html
""",
    "top": """\
examples:
  replicax top                                   the only run on this machine
  replicax top 12345 --once                      the run of that process
""",
    "verify": """\
examples:
  replicax verify --json verify.json             on all accelerators
  REPLICAX_CPU_DEVICES=4 replicax verify         on four virtual devices
""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the command line names.

    Returns:
        The exit status: 0 for success, 1 for failure, 2 for an invalid command.
    """
    own, rest = _split_arguments(sys.argv[1:] if argv is None else list(argv))
    parser, parsers = make_parsers()
    if own == ["--version"]:
        found = importlib.import_module("replicax")
        sys.stdout.write(f"replicax {found.__version__}\n")
        return 0
    if not own:
        parser.print_help()
        return 0
    chosen = next((word for word in own[:1] if word in VERBS), None)
    if chosen is None:
        parser.parse_args(own)  # prints the help or an error, and exits
        return 2
    verb = _module_of(chosen)  # only this one: some import JAX
    verb.add_arguments(parsers[chosen])
    try:
        options = parser.parse_args(own)  # raises for a URL where only local files are supported
        options.own, options.rest = own[1:], rest
        status: int = verb.run(options)
    except (ReplicaxError, ImportError, FileNotFoundError) as error:
        _print_error(f"replicax {chosen}: {error}")
        return 2
    return status


def make_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command, and those of its subcommands, without their arguments."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="replicax",
        description="Tools to start, watch and plan distributed training.",
        epilog=_EXAMPLES[""],
        formatter_class=shown,
    )
    parser.add_argument("--version", action="store_true", help="show the version of replicax")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND", title="commands")
    return parser, {
        name: verbs.add_parser(
            name,
            help=text,
            description=textwrap.fill(text, _WIDTH),
            epilog=_EXAMPLES.get(name),
            formatter_class=shown,
        )
        for name, text in VERBS.items()
    }


def complete_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of all subcommands, with their arguments."""
    _, parsers = make_parsers()
    for name, parser in parsers.items():
        _module_of(name).add_arguments(parser)
    return parsers


def _module_of(verb: str) -> Any:
    return importlib.import_module(f"replicax._src.cli.{verb}")


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
