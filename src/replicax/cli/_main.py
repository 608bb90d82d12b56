"""The command line: the verb -> its module."""

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from rich.console import Console

from replicax._errors import ReplicaxError
from replicax.cli import _launch, _preflight

VERBS: dict[str, ModuleType] = {"launch": _launch, "preflight": _preflight}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb that the command line names.

    Returns:
        The exit status: 0 if all is well, 1 if not, 2 if the command makes no sense.
    """
    parser = argparse.ArgumentParser(prog="replicax", description="The tools of replicax.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, module in VERBS.items():
        one = verbs.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(one)
    own, rest = _halves(sys.argv[1:] if argv is None else list(argv))
    options = parser.parse_args(own)
    options.rest = rest
    try:
        status: int = VERBS[options.verb].run(options)
    except (ReplicaxError, ImportError, FileNotFoundError) as error:
        Console(stderr=True).print(f"replicax {options.verb}: {error}", style="red", markup=False)
        return 2
    return status


def _halves(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is for us, and what follows ``--`` for the program that we start."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def entry() -> None:
    """What the installed command calls."""
    sys.exit(main())
