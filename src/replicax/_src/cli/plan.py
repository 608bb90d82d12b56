"""``replicax plan``: find devices and options for a training step by compiling it for each."""

import argparse
import dataclasses
import gc
from functools import partial

from rich.console import Console

from replicax._src.cli.preflight import (
    DOES_NOT_FIT,
    OK,
    capture_step,
    check_outputs,
    choose_devices,
)
from replicax._src.files.paths import local_path
from replicax._src.preflight.compiler import Compiling
from replicax._src.preflight.plan import (
    Candidate,
    Plan,
    option_combinations,
    read_prices,
    search,
    targets_of_kind,
)
from replicax._src.preflight.preflight import require_compiler
from replicax._src.preflight.trace import Step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    parser.add_argument("script", help="the training program; its own arguments follow after --")
    parser.add_argument("--fit", metavar="KINDS", default="v5e", help="such as v5e,v5p,h100")
    parser.add_argument(
        "--global-batch", type=int, required=True, metavar="N", help="examples per step"
    )
    parser.add_argument(
        "--most",
        type=int,
        default=64,
        metavar="N",
        help="largest number of devices to try (default: 64)",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="OPTION=A,B",
        help="an option of the script, to try with each of these values, such as cores=1,8; without"
        " values, to try without and with the option",
    )
    parser.add_argument(
        "--prices",
        type=local_path,
        metavar="FILE",
        help='a JSON file with hourly prices: {"v5e": 1.2}',
    )
    parser.add_argument(
        "--function",
        metavar="NAME",
        help="the step, if it is not the first function that changes variables on replicas",
    )
    parser.add_argument(
        "--plan", action="store_true", help="create the script's variables without values"
    )
    parser.add_argument(
        "--devices", type=int, default=8, metavar="N", help="virtual CPU devices for the script"
    )
    parser.add_argument(
        "--cache",
        type=local_path,
        metavar="DIR",
        default="",
        help="cache the compiler's results there",
    )
    parser.add_argument(
        "--plot", type=local_path, metavar="FILE", help="also plot the result, as .png or .svg"
    )


def run(options: argparse.Namespace) -> int:
    """Capture the step of the script, compile it for each candidate, and print the table."""
    targets = [target for kind in _kinds(options) for target in targets_of_kind(kind, options.most)]
    for platform in {target.platform for target in targets}:
        require_compiler(platform)
    choices, prices = option_combinations(options.vary), read_prices(options.prices or "")
    check_outputs(options.plot)
    choose_devices(options.devices)
    console, candidates = Console(), list[Candidate]()
    for choice in choices:
        words = argparse.Namespace(**vars(options) | {"rest": [*options.rest, *choice]})
        tried = partial(_try_candidates, options=words, choice=tuple(choice), console=console)
        status, found = capture_step(words, "plan", tried)
        if status:
            return status
        candidates += found
        gc.collect()  # free the variables of this run of the script
    plan = Plan(tuple(c.with_price(prices) for c in candidates))
    console.print(plan)
    for title in ("smallest", "fastest"):
        if one := getattr(plan, title):
            console.print(f"The {title} that fits: {one.report.topology}, variables {one.how}.")
    if options.plot:
        plan.plot(options.plot)
    return OK if plan.fastest else DOES_NOT_FIT


def _kinds(options: argparse.Namespace) -> list[str]:
    return [kind.strip() for kind in options.fit.split(",") if kind.strip()]


def _try_candidates(
    step: Step, options: argparse.Namespace, choice: tuple[str, ...], console: Console
) -> list[Candidate]:
    """Compile the step for all candidates, printing a line as each finishes; return them."""
    how, found = Compiling(cache=options.cache), list[Candidate]()
    for one in search(step, _kinds(options), options.global_batch, options.most, how):
        found.append(dataclasses.replace(one, options=choice))
        console.print(f"tried {one.report.topology}, {found[-1].how}", style="dim")
    return found
