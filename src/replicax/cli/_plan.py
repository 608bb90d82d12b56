"""``replicax plan train.py --fit v5e,h100 --global-batch 4096``: on what, and how."""

import argparse
import dataclasses

from rich.console import Console

from replicax.ahead._compiler import Compiling
from replicax.ahead._plan import Candidate, Plan, prices_of, search, sizes_of
from replicax.ahead._preflight import require_compiler
from replicax.ahead._trace import Step
from replicax.cli._preflight import DOES_NOT_FIT, OK, caught, choose_devices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb."""
    parser.add_argument("script", help="the training program; its own arguments follow after --")
    parser.add_argument("--fit", metavar="KINDS", default="v5e", help="such as v5e,v5p,h100")
    parser.add_argument(
        "--global-batch", type=int, required=True, metavar="N", help="examples of one step"
    )
    parser.add_argument("--most", type=int, default=64, metavar="N", help="devices (default: 64)")
    parser.add_argument("--prices", metavar="FILE", help='a JSON file: {"v5e": 1.2} for an hour')
    parser.add_argument("--function", metavar="NAME", help="the step, if not the first that fits")
    parser.add_argument(
        "--plan", action="store_true", help="make the script's variables without values"
    )
    parser.add_argument("--cache", metavar="DIR", default="", help="keep what the compiler said")
    parser.add_argument("--plot", metavar="FILE", help="also draw it, as .png or .svg")


def run(options: argparse.Namespace) -> int:
    """Catch the step of the script, try it on the devices, print the table."""
    kinds = [kind.strip() for kind in options.fit.split(",") if kind.strip()]
    prices = prices_of(options.prices) if options.prices else {}
    targets = [target for kind in kinds for target in sizes_of(kind, options.most)]
    for platform in {target.platform for target in targets}:
        require_compiler(platform)
    choose_devices(8)
    console = Console()

    def planned(step: Step) -> Plan:
        found: list[Candidate] = []
        how = Compiling(cache=options.cache)
        for one in search(step, kinds, options.global_batch, options.most, how):
            price = prices.get(one.report.topology.split(":")[0].split("-")[0])
            found.append(dataclasses.replace(one, price=price))
            console.print(f"tried {one.report.topology}, {one.policy}", style="dim")
        return Plan(tuple(found))

    status, plan = caught(options, "plan", planned)
    if status:
        return status
    console.print(plan)
    for title in ("smallest", "fastest"):
        if one := getattr(plan, title):
            console.print(f"The {title} that fits: {one.report.topology}, variables {one.policy}.")
    if options.plot:
        plan.plot(options.plot)
    return OK if plan.fastest else DOES_NOT_FIT
