"""A search for the devices on which a step with a given global batch fits, and how fast it is."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from replicax._src.base.errors import PlacementError
from replicax._src.base.rendering import show_bytes
from replicax._src.files.paths import local_file, local_path
from replicax._src.preflight.compiler import Compiling, OptionError
from replicax._src.preflight.preflight import compile_steps
from replicax._src.preflight.report import PreflightReport, drawing
from replicax._src.preflight.targets import Target
from replicax._src.preflight.trace import Step, Variation
from replicax._src.topology.tpu_generations import GENERATIONS

POLICIES = "mirrored", "sharded"
# Slices of TPUs and machines of GPUs, by their number of devices.
_TPUS = (1, 4, 8, 16, 32, 64, 128, 256)
_GPUS = ("1x1", "1x2", "1x4", "1x8", "2x8", "4x8", "8x8", "16x8", "32x8")


@dataclass(frozen=True)
class Candidate:
    """One way to run a step.

    Attributes:
        report: The result of compiling it.
        policy: Whether the replicas mirror or shard the variables.
        rows: The batch size per replica.
        price: The price of one device per hour; None if unknown.
        options: The options with which the script was run.
    """

    report: PreflightReport
    policy: str
    rows: int
    price: float | None = None
    options: tuple[str, ...] = ()

    def with_price(self, prices: Mapping[str, float]) -> Candidate:
        """Return a copy with the price of its kind of device."""
        kind = re.split("[:-]", self.report.topology)[0]
        return dataclasses.replace(self, price=prices.get(kind))

    @property
    def how(self) -> str:
        """A description of everything but the devices, for display."""
        cores = f", {self.cores} logical devices" if self.cores > 1 else ""
        options = f", {' '.join(self.options)}" if self.options else ""
        return f"{self.policy}{cores}{options}"

    @property
    def cores(self) -> int:
        """The number of devices per replica."""
        return self.report.num_devices // (self.report.num_replicas or self.report.num_devices)

    @property
    def works(self) -> bool:
        """Whether it compiles and fits."""
        return self.report.compiles and self.report.fits

    @property
    def cost(self) -> float | None:
        """The price of a thousand steps at the estimated time; None if unknown."""
        hours = 1000 * self.report.step_seconds / 3600
        return None if self.price is None else hours * self.report.num_devices * self.price


@dataclass(frozen=True)
class Plan:
    """The candidates that were tried. Print it, or use `smallest` and `fastest`.

    Attributes:
        candidates: The candidates, in the order in which they were tried.
    """

    candidates: tuple[Candidate, ...]

    @property
    def ranked(self) -> list[Candidate]:
        """The candidates that work, fastest first, followed by the others."""
        return sorted(
            self.candidates,
            key=lambda c: (not c.works, c.report.step_seconds, c.report.num_devices),
        )

    @property
    def smallest(self) -> Candidate | None:
        """The candidate that works with the fewest devices; among equals the fastest."""
        working = [c for c in self.candidates if c.works]
        order: Callable[[Candidate], Any] = lambda c: (c.report.num_devices, c.report.step_seconds)  # noqa: E731
        return min(working, key=order, default=None)

    @property
    def fastest(self) -> Candidate | None:
        """The candidate that works with the shortest step; among equals the smallest."""
        return next((c for c in self.ranked if c.works), None)

    def plot(self, path: str | Path) -> None:
        """Plot the estimated time of a step over the number of devices, for each kind.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        file = local_path(path)
        figure_module, agg = drawing()
        figure = figure_module.Figure(figsize=(6, 4), layout="constrained")
        agg.FigureCanvasAgg(figure)
        axes = figure.subplots()
        lines: dict[str, list[Candidate]] = {}
        for c in self.candidates:
            kind = re.split("[:-]", c.report.topology)[0]
            lines.setdefault(f"{kind}, {c.how}", []).append(c)
        for label, tried in lines.items():
            working = [c for c in tried if c.works]
            points = [(c.report.num_devices, 1e3 * c.report.step_seconds) for c in working]
            axes.plot(*zip(*points, strict=True), "o-", label=label) if points else None
        axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="ms, roofline")
        axes.set(title="a step, where it fits")
        sizes = sorted({c.report.num_devices for c in self.candidates})
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_yscale("log", subs=())
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=7)
        figure.savefig(file, dpi=150)

    def __rich__(self) -> Table:
        table = Table(title="From the fastest on, by the estimate")
        columns = ("devices", "number", "logical", "variables", "options", "rows", "memory", "fits")
        rows = [_row(c) for c in self.ranked]
        for column in (*columns, "step, roofline", "examples/s", "1,000 steps"):
            if any(row[column] for row in rows):
                table.add_column(column, justify="left" if column == "devices" else "right")
        shown = [str(column.header) for column in table.columns]
        for c, row in zip(self.ranked, rows, strict=True):
            table.add_row(*(row[name] for name in shown), style="" if c.works else "dim")
        return table


def _row(c: Candidate) -> dict[str, str]:
    """Return the cells by column; columns that are empty in all rows are not shown."""
    r, seconds = c.report, c.report.step_seconds
    examples = c.rows * (r.num_replicas or 1) / seconds if seconds else 0
    return {
        "devices": r.topology,
        "number": f"{r.num_devices:,}",
        "logical": f"{c.cores}" if c.cores > 1 else "",
        "variables": c.policy,
        "options": " ".join(c.options),
        "rows": f"{c.rows:,}",
        "memory": show_bytes(r.memory.total) if r.memory.total else "-",
        "fits": "yes" if c.works else "no",
        "step, roofline": f"{1e3 * seconds:.3g} ms" if r.compiles else "-",
        "examples/s": f"{examples:,.0f}" if c.works else "-",
        "1,000 steps": f"{c.cost:,.2f}" if c.works and c.cost is not None else "",
    }


def option_combinations(varied: Sequence[str]) -> list[list[str]]:
    """Return the command-line arguments for all combinations of the varied options.

    Args:
        varied: ``cores=1,8`` tries an option of the script with each value; ``remat`` tries a
            flag without a value, off and on.

    Raises:
        OptionError: If one of them has no name, or no values.

    Example:
        >>> from replicax._src.preflight.plan import option_combinations
        >>> option_combinations(["cores=1,8"])
        [['--cores', '1'], ['--cores', '8']]
    """
    tried = itertools.product(*map(_choices, varied))
    return [list(itertools.chain.from_iterable(parts)) for parts in tried]


def _choices(text: str) -> list[list[str]]:
    name, equals, values = text.partition("=")
    option = name if name.startswith("-") else f"--{name}"
    found = [[option, value] for value in values.split(",") if value]
    if not name or (equals and not found):
        raise OptionError(
            f"--vary takes an option of the script, with values as in 'cores=1,8' or without as in"
            f" 'remat', and not {text!r}."
        )
    return found if equals else [[], [option]]


def targets_of_kind(kind: str, most: int) -> list[Target]:
    """Return the usual slices or GPU hosts of a kind, up to ``most`` devices, smallest first."""
    if kind not in GENERATIONS:
        return [t for t in (Target.parse(f"{kind}:{n}") for n in _GPUS) if t.num_devices <= most]
    cores = 1 if kind in ("v5e", "v6e") else 2
    found = []
    for name in (f"{kind}-{n * cores}" for n in _TPUS):
        with suppress(PlacementError):  # some generations have no slice of one or two hosts
            found.append(Target.parse(name))
    return [target for target in found if target.num_devices <= most]


def search(
    step: Step, kinds: Sequence[str], global_batch: int, most: int, how: Compiling | None = None
) -> Iterator[Candidate]:
    """Yield candidates for the sizes of each kind, with variables mirrored and sharded.

    Args:
        step: The step; the global batch is divided among the replicas.
        kinds: Kinds of devices such as ``v5e`` and ``h100``.
        global_batch: The number of examples per step.
        most: The maximum number of devices.
        how: The compiler options.
    """
    cores = step.cores()
    for kind in kinds:
        for target in targets_of_kind(kind, most):
            replicas, rest = divmod(target.num_devices, cores)
            if rest or not replicas or global_batch % replicas:
                continue
            rows = global_batch // replicas
            for policy in POLICIES if cores == 1 and replicas > 1 else POLICIES[:1]:
                variation = Variation(rows, policy)
                (report,) = compile_steps(step, [target], how, variation)
                yield Candidate(report, policy, rows)


def read_prices(path: str) -> dict[str, float]:
    """Return the hourly price of a device by kind, from a JSON file; {} without a file.

    Raises:
        OptionError: If the file is malformed.
    """
    file = local_file(path) if path else None
    try:
        read = json.loads(file.read_text()) if file else {}
    except ValueError:
        read = None
    if not isinstance(read, dict) or not all(isinstance(v, int | float) for v in read.values()):
        raise OptionError(
            f"{path} must map kinds of devices to prices per hour, such as"
            ' {"v5e": 1.2, "h100": 11.0}.'
        )
    return {kind: float(price) for kind, price in read.items()}
