"""``replicax preflight train.py --topology v4:8x8x8``: does the step compile, and does it fit?"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from replicax._src.compat.jax import backend_is_initialized
from replicax._src.files.paths import local_path
from replicax._src.preflight.compiler import Compiling, OptionError
from replicax._src.preflight.preflight import compile_steps, require_compiler
from replicax._src.preflight.report import PreflightReport, Sweep, drawing
from replicax._src.preflight.script import NoStepError, ScriptError, preflight_script
from replicax._src.preflight.tables import above, grown, limit_of
from replicax._src.preflight.targets import Target
from replicax._src.preflight.trace import Step
from replicax._src.state.declaration import planning
from replicax._src.topology.virtual_devices import planned_cpu_devices

# The exit statuses; 2 is reserved for invalid commands.
OK, DOES_NOT_FIT, DOES_NOT_COMPILE, SCRIPT_FAILED, NO_STEP, TOO_MUCH = 0, 1, 3, 4, 5, 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    parser.add_argument("script", help="the training program; its own arguments follow after --")
    parser.add_argument(
        "--topology",
        action="append",
        metavar="SLICE",
        help="a slice or GPUs, such as v5e:16x16 (default), v5p-128, '2x v5e:16x16' or h100:2x8;"
        " give several for a sweep",
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
        "--json", type=local_path, metavar="FILE", help="also write the report as JSON"
    )
    parser.add_argument(
        "--plot", type=local_path, metavar="FILE", help="also plot it, as .png or .svg"
    )
    _add_compiling(parser)
    parser.add_argument(
        "--devices",
        type=int,
        default=8,
        metavar="N",
        help="virtual CPU devices for the script, unless configured otherwise (default: 8)",
    )


def _add_compiling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-memory", metavar="SIZE", help="fail above this, such as 12GiB or 80%%"
    )
    parser.add_argument(
        "--baseline",
        type=local_path,
        metavar="FILE",
        help="fail if more is needed than in this report",
    )
    parser.add_argument(
        "--hlo", type=local_path, metavar="DIR", help="also write the optimized programs"
    )
    parser.add_argument(
        "--save-executable",
        type=local_path,
        metavar="FILE",
        default="",
        help="also write the executable",
    )
    parser.add_argument(
        "--xla-flags", metavar="FLAGS", default="", help="compiler options, in one string"
    )
    parser.add_argument(
        "--cache",
        type=local_path,
        metavar="DIR",
        default="",
        help="cache the compiler's results there",
    )


def run(options: argparse.Namespace) -> int:
    """Capture the step of the script, compile it for each topology, and print the reports."""
    names = options.topology or ["v5e:16x16"]
    targets = [Target.parse(name) for name in names]
    for platform in {target.platform for target in targets}:
        require_compiler(platform)
    # Validate the options before anything that takes minutes.
    if options.max_memory:
        limit_of(options.max_memory, 0)
    before = _baseline(options.baseline, names)
    check_outputs(options.json, options.plot, options.save_executable)
    if options.save_executable and len(names) > 1:
        raise OptionError("--save-executable writes one executable; give one --topology with it.")
    choose_devices(options.devices)
    how = Compiling.of(options.xla_flags, options.save_executable, options.cache)
    console = Console()

    def compile_all(step: Step) -> list[PreflightReport]:
        reports = []
        waiting = f"compiling for {', '.join(names)}"
        with console.status(waiting) if console.is_terminal else nullcontext():
            for report in compile_steps(step, targets, how):
                console.print(report)
                reports.append(report)
        return reports

    status, reports = capture_step(options, "preflight", compile_all)
    if status:
        return status
    _deliver(Sweep(tuple(reports)), options, console)
    return _status(reports) or _judge(reports, before, options.max_memory, console)


def _baseline(path: str | None, names: Sequence[str]) -> Sequence[PreflightReport]:
    """Return the reports in file ``path``, which must include one for each of ``names``."""
    if not path:
        return ()
    try:
        reports = Sweep.from_json(Path(path).read_text()).reports
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(
            f"{path} is not a preflight report ({type(error).__name__}: {error}); --json writes"
            " one."
        ) from error
    known = [report.topology for report in reports]
    if missing := [name for name in names if name not in known]:
        raise OptionError(
            f"{path} has no report of {', '.join(missing)}, only of {', '.join(known) or 'none'}:"
            " there is nothing to compare with. Make one with --topology and --json."
        )
    return reports


def check_outputs(*paths: str | None) -> None:
    """Raise now for outputs that could not be written at the end.

    Raises:
        FileNotFoundError: If the folder of a file does not exist.
        ImportError: If a plot is requested, and matplotlib is not installed.
    """
    for path in filter(None, paths):
        if not Path(path).absolute().parent.is_dir():
            raise FileNotFoundError(f"There is no folder {str(Path(path).parent)!r} for {path!r}.")
        if path.endswith((".png", ".svg", ".pdf")):
            drawing()


def capture_step(
    options: argparse.Namespace, verb: str, use: Callable[[Step], Any]
) -> tuple[int, Any]:
    """Run the script; return an exit status, and ``use(step)`` of its step if that is 0."""
    if not Path(options.script).is_file():
        raise FileNotFoundError(f"There is no script {options.script!r}.")
    try:
        with planning() if options.plan else nullcontext():
            return OK, preflight_script(options.script, options.rest, options.function, use)
    except ScriptError as error:
        sys.stderr.write(f"{error}\n")
        return SCRIPT_FAILED, None
    except NoStepError as error:
        sys.stderr.write(f"replicax {verb}: {error}\n")
        return NO_STEP, None


def _judge(
    reports: Sequence[PreflightReport],
    before: Sequence[PreflightReport],
    most: str | None,
    console: Console,
) -> int:
    """Print the figures above the limit or the baseline; return the exit status."""
    found = list(above(reports, most)) if most else []
    found += grown(before, reports)
    for excess in found:
        console.print(f"[red]{excess.topology}: {excess.figure}[/] {excess.shown}")
        for place in excess.where:
            console.print(f"    {place}", markup=False)
    return TOO_MUCH if found else OK


def _status(reports: Sequence[PreflightReport]) -> int:
    if any(not report.compiles and report.fits for report in reports):
        return DOES_NOT_COMPILE
    return OK if all(report.fits for report in reports) else DOES_NOT_FIT


def choose_devices(count: int) -> None:
    """Give the script virtual CPU devices, so that it runs on a machine without accelerators."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    if planned_cpu_devices() is None and not backend_is_initialized():
        jax.config.update("jax_num_cpu_devices", count)


def _deliver(sweep: Sweep, options: argparse.Namespace, console: Console) -> None:
    several = len(sweep.reports) > 1
    if several:
        console.print(sweep)
    if options.json:
        text = sweep.to_json() if several else sweep.reports[0].to_json()
        Path(options.json).write_text(text + "\n")
    if options.hlo:
        Path(options.hlo).mkdir(parents=True, exist_ok=True)
        for r in sweep.reports:
            name = re.sub(r"\W+", "_", f"{r.step}_{r.topology}")
            Path(options.hlo, f"{name}.hlo.txt").write_text(r.hlo)
    if options.plot:
        sweep.plot(options.plot)
