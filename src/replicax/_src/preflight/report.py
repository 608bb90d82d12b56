"""Preflight reports: `PreflightReport` for one step on one slice, `Sweep` for several slices."""

from __future__ import annotations

import dataclasses
import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replicax._src.base.rendering import as_text, show_bytes
from replicax._src.files.paths import local_path
from replicax._src.preflight.costs import Collective
from replicax._src.preflight.memory import Buffer
from replicax._src.preflight.targets import Limits, Target

FORMULA = (
    "step time = sum over operations of max(flops / peak flops, bytes / memory bandwidth)"
    " + sent bytes / link bandwidth"
)


@dataclass(frozen=True)
class Memory:
    """Memory of one device, in bytes.

    Attributes:
        arguments: Variables and inputs.
        outputs: Results that do not share a buffer with an argument.
        temporaries: Intermediate values.
        code: The program.
        total: Their sum; if it does not fit, the compiler's figure.
        host: Variables in the memory of the host, of each device; not in the sum.

    Example:
        >>> from replicax._src.preflight.report import Memory
        >>> Memory(arguments=4, outputs=2, temporaries=1, code=1, total=8).total
        8
    """

    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    code: int = 0
    total: int = 0
    host: int = 0


@dataclass(frozen=True)
class PreflightReport:
    """The resources that a step needs on each device of a slice. Print it, or use `to_json`.

    Attributes:
        step: The name of the function.
        topology: The slice, such as ``v5e:16x16``.
        num_devices: The number of devices.
        num_replicas: The number of replicas; 0 for a program without a strategy.
        compiles: Whether the step compiles.
        fits: Whether the program fits into the memory of a device.
        error: The compiler's error; empty if there is none.
        memory: The memory that the step needs on a device.
        hbm: The memory of a device.
        collectives: The collectives of a step.
        flops: Multiplications and additions of matmuls and convolutions on one device in one step,
            including all iterations of loops.
        bytes_accessed: Memory traffic of one device in one step: XLA's estimate, plus the further
            iterations of loops.
        compile_seconds: The time of the compilation.
        operation_seconds: The sum of the operations at the roofline: for each, the time of its
            arithmetic or of its memory traffic, whichever is longer.
        waiting_seconds: The time in which a device waits for collectives, if asynchronous ones run
            concurrently with the operations between their start and finish.
        advice: What would bring a step that does not fit under the limit, largest saving first.
        notes: Caveats: costs that could not be counted, or were assumed to be the worst case.
        limits: The peak rates of a device; by default, those of the named topology.
        largest: The largest buffers of a device at its peak memory use, with their source lines:
            arguments, and values found by a liveness analysis.
        by_line: The collectives by source line.
        hlo: The optimized program as text; not part of the JSON.

    Example:
        >>> from replicax._src.preflight.report import Memory
        >>> report = rx.tpu.PreflightReport(
        ...     step="train_step", topology="v5e:2x2", num_devices=4, num_replicas=4,
        ...     compiles=True, fits=True, error="", memory=Memory(total=1 << 30), hbm=16 << 30,
        ...     collectives=(), flops=1e12, bytes_accessed=1e9, compile_seconds=1.5,
        ... )
        >>> report.headroom == 15 << 30, round(report.step_seconds * 1e3, 2)
        (True, 5.08)
    """

    step: str
    topology: str
    num_devices: int
    num_replicas: int
    compiles: bool
    fits: bool
    error: str
    memory: Memory
    hbm: int
    collectives: tuple[Collective, ...]
    flops: float
    bytes_accessed: float
    compile_seconds: float
    operation_seconds: float = 0.0
    waiting_seconds: float = 0.0
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    limits: Limits | None = None
    largest: tuple[Buffer, ...] = ()
    by_line: tuple[Collective, ...] = ()
    hlo: str = field(default="", repr=False, compare=False)

    @property
    def chip(self) -> Limits:
        """The peak rates of a device."""
        return self.limits or Target.parse(self.topology).limits

    @property
    def headroom(self) -> int:
        """The free memory of a device in bytes; negative if the step does not fit."""
        return self.hbm - self.memory.total

    @property
    def communication_bytes(self) -> float:
        """The bytes that a device sends in one step."""
        return sum(c.wire_bytes for c in self.collectives)

    @property
    def compute_seconds(self) -> float:
        """The time of the arithmetic at peak rate."""
        return self.flops / self.chip.flops

    @property
    def memory_seconds(self) -> float:
        """The time of all memory traffic, including on-chip traffic, at full bandwidth."""
        return self.bytes_accessed / self.chip.hbm_bytes

    @property
    def communication_seconds(self) -> float:
        """The time of the collectives at full link bandwidth."""
        chip = self.chip
        return sum(chip.seconds(c.wire_bytes, c.group, c.hosts) for c in self.collectives)

    @property
    def step_seconds(self) -> float:
        """The roofline estimate without overlap of communication; few real steps reach it."""
        unsplit = max(self.compute_seconds, self.memory_seconds)
        return (self.operation_seconds or unsplit) + self.communication_seconds

    def to_json(self) -> str:
        """Return all figures, with the formula of the estimate, as JSON text.

        Example:
            >>> import json
            >>> from replicax._src.preflight.report import Memory
            >>> report = rx.tpu.PreflightReport(
            ...     "step", "v4:2x2x1", 8, 8, False, False, "no", Memory(), 1, (), 0.0, 0.0, 0.0
            ... )
            >>> json.loads(report.to_json())["compiles"]
            False
        """
        facts = dataclasses.asdict(self)
        del facts["hlo"]
        names = ("headroom", "communication_bytes", "compute_seconds", "memory_seconds")
        facts |= {name: getattr(self, name) for name in (*names, "communication_seconds")}
        facts |= {"step_seconds": self.step_seconds, "formula": FORMULA}
        return json.dumps(facts, indent=2)

    @classmethod
    def from_json(cls, text: str) -> PreflightReport:
        """Parse the result of `to_json`.

        Example:
            >>> from replicax._src.preflight.report import Memory
            >>> facts = "step", "v4:2x2x1", 4, 4, False, False, "no", Memory(), 1, (), 0.0, 0.0, 0.0
            >>> report = rx.tpu.PreflightReport(*facts)
            >>> rx.tpu.PreflightReport.from_json(report.to_json()) == report
            True
        """
        facts: dict[str, Any] = json.loads(text)
        values = {f.name: facts[f.name] for f in dataclasses.fields(cls) if f.name in facts}
        values["memory"] = Memory(**facts["memory"])
        values["limits"] = Limits(**facts["limits"]) if facts.get("limits") else None
        values |= {name: tuple(facts.get(name, ())) for name in ("advice", "notes")}
        values["largest"] = tuple(Buffer(**b) for b in facts.get("largest", ()))
        for name in ("collectives", "by_line"):
            values[name] = tuple(Collective(**c) for c in facts.get(name, ()))
        return cls(**values)

    def __rich__(self) -> Any:
        return _tables().report_table(self)

    def __str__(self) -> str:
        return as_text(self)


def _tables() -> Any:
    """Import the module with the tables on first use, as `import replicax` must not load rich."""
    return importlib.import_module("replicax._src.preflight.tables")


_ORANGE, _RED, _GREY = "#c8601a", "#b02a2a", "#777777"
_PARTS = {"arguments": "#1f5fa8", "outputs": "#5b9bd5", "temporaries": "#9dc3e6", "code": "#444444"}


@dataclass(frozen=True)
class Sweep:
    """Reports of one step on several slices. Print it, or use `to_json` or `plot`.

    Attributes:
        reports: One report per slice.

    Example:
        >>> rx.tpu.Sweep(()).to_json()
        '[]'
    """

    reports: tuple[PreflightReport, ...]

    def to_json(self) -> str:
        """Return all reports as JSON text."""
        return json.dumps([json.loads(report.to_json()) for report in self.reports], indent=2)

    @classmethod
    def from_json(cls, text: str) -> Sweep:
        """Parse the result of `to_json`, of a sweep or of a single report.

        Example:
            >>> rx.tpu.Sweep.from_json("[]")
            Sweep(reports=())
        """
        read = json.loads(text)
        rows = read if isinstance(read, list) else [read]
        return cls(tuple(PreflightReport.from_json(json.dumps(row)) for row in rows))

    def plot(self, path: str | Path) -> None:
        """Plot the memory of a device and the bytes it sends, for each slice.

        Args:
            path: The file to write; its suffix chooses the format: ``.png``, ``.svg``, ``.pdf``.

        Raises:
            ImportError: If matplotlib is not installed.

        Example:
            >>> sweep = rx.tpu.preflight_sweep(step, (batch,))  # doctest: +SKIP
            >>> sweep.plot("scaling.png")  # doctest: +SKIP
        """
        file = local_path(path)
        figure_module, agg = drawing()
        figure = figure_module.Figure(figsize=(9, 4), layout="constrained")
        agg.FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        done = sorted(self.reports, key=lambda r: r.num_devices)
        labels = [f"{r.topology}\n{r.num_devices:,}" for r in done]
        _stack(left, labels, done)
        compiled = [r for r in done if r.compiles]
        unit, size = _unit(max((r.communication_bytes for r in compiled), default=0.0))
        sent = [r.communication_bytes / size for r in compiled]
        right.bar([labels[done.index(r)] for r in compiled], sent, 0.6, color=_ORANGE)
        _finish(right, unit, "sent by a device in a step")
        figure.legend(
            *left.get_legend_handles_labels(), loc="outside lower left", ncols=6, fontsize=7
        )
        figure.savefig(file, dpi=150)

    def __rich__(self) -> Any:
        return importlib.import_module("replicax._src.preflight.tables").sweep_table(self)


def drawing() -> tuple[Any, Any]:
    """Return matplotlib's figure module and its Agg backend.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        return (
            importlib.import_module("matplotlib.figure"),
            importlib.import_module("matplotlib.backends.backend_agg"),
        )
    except ImportError as error:
        raise ImportError(
            "A plot needs matplotlib, which is not installed:\n\n    pip install 'replicax[plot]'\n"
        ) from error


def _stack(axes: Any, labels: list[str], reports: list[PreflightReport]) -> None:
    """Plot the memory of a device as stacked bars, and its limit."""
    fullest = max((r.memory.total for r in reports), default=0)
    unit, size = _unit(fullest)
    base = [0.0] * len(reports)
    for part, colour in _PARTS.items():
        sizes = [getattr(r.memory, part) / size for r in reports]
        axes.bar(labels, sizes, 0.6, bottom=base, label=part, color=colour)
        base = [a + b for a, b in zip(base, sizes, strict=True)]
    unknown = [max(0.0, r.memory.total / size - b) for r, b in zip(reports, base, strict=True)]
    if max(unknown, default=0.0) > 1e-3 * fullest / size:  # rejected: only the total is known
        axes.bar(labels, unknown, 0.6, bottom=base, label="does not fit", color=_RED)
    limits = [r.hbm for r in reports]
    if any(4 * r.memory.total > r.hbm for r in reports):
        there = [limit / size for limit in limits]
        axes.scatter(labels, there, marker="_", s=400, color=_GREY, label="there is")
        _finish(axes, unit, "memory of a device")
    else:  # the limits would dwarf the bars
        least = show_bytes(min(limits, default=0))
        _finish(axes, unit, f"memory of a device, which has {least} or more")


def _unit(most: float) -> tuple[str, int]:
    """Return a unit for amounts up to ``most``, and its size in bytes."""
    units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
    return next((pair for pair in units.items() if most >= pair[1]), ("bytes", 1))


def _finish(axes: Any, unit: str, title: str) -> None:
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set(xlabel="devices", ylabel=unit, title=title)
    axes.title.set_fontsize(10)
    crowded = len(axes.get_xticklabels()) > 4
    axes.tick_params(axis="x", labelsize=7, rotation=40 if crowded else 0)
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.set_axisbelow(True)
